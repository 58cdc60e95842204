"""From a request to its answers: a call of a session, a job of the batch, texts as they come, a row."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from agro.config import SamplerConfig
from agro.door.batch import Batch, Event, Job, Token
from agro.door.sessions import Answered, Call, Sessions
from agro.door.tool_calls import CallSyntax
from agro.door.wire import Ask, Chat, Outcome, Problem
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rollout.rollout import before_stop
from agro.types.conversation import with_tools

MAX_NEW = 1024  # tokens of an answer where the request says nothing
Keep = Callable[[Answered, Outcome, SamplerConfig, int], "Future[Any] | None"]


class Delta(NamedTuple):
    """A part of one of the answers, or with an outcome its end."""

    choice: int
    kind: str = ""  # content or reasoning_content
    text: str = ""
    tokens: Sequence[Token] = ()
    texts: Any = ()  # of the tokens, and of the likeliest ones
    outcome: Outcome | None = None


@dataclass
class Answering:
    """One answer under way."""

    call: Call
    job: Job
    prefix: str
    ask: Ask
    tokens: list[Token] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=lambda: {"reasoning_content": "", "content": ""})
    shown: int = 0  # tokens that were sent
    is_done: bool = False


class Door:
    """Answers requests with a policy. It is used by one event loop."""

    def __init__(
        self, policy: Policy, batch: Batch, sessions: Sessions, *, keep: Keep, seconds: float
    ) -> None:
        """`keep` stores an answer; its future is awaited before the end of the answer is sent.
        `seconds`: that an answer may take, with the time that it waits."""
        self.policy, self.encoder, self.batch = policy, policy.encoder, batch
        self.keep, self.seconds = keep, seconds
        self.sessions = sessions
        self.syntax = CallSyntax.of(policy.chat)
        style = policy.chat.template.thought if policy.tokenizer.chat_template else None
        self._marks = [
            "<think>",
            "</think>",
            *((style.opening.strip(), style.closing.strip()) if style else ()),
        ]
        if self.syntax is not None:
            self._marks += [self.syntax.opening, self.syntax.closing]
        texts = {i: policy.tokenizer.convert_ids_to_tokens(i) for i in policy.encoder.special}
        # Special tokens that aren't part of what is read: ends of turns, padding.
        self._hidden = {i for i, text in texts.items() if not any(text in mark for mark in self._marks)}
        self._hidden |= set(policy.eos_ids)
        self.sampler: SamplerConfig | None = None  # in place of what requests ask, as far as they differ
        self.number: Callable[[Call, int | None, int], int] = number_of

    async def answer(self, wire: Chat, session: str | None) -> AsyncGenerator[Delta]:
        """The parts of all answers to a request as they come; the end of one once it is stored.

        Who stops iterating ends the request. Raises `Problem` where it can't be answered.
        """
        queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        answering: list[Answering] = []
        deadline = asyncio.get_running_loop().time() + self.seconds
        try:
            for index in range(wire.ask.options.n):
                answering.append(self._begin(wire.ask, session, index, queue))
                self.batch.submit(answering[-1].job)
            wire.prompt_tokens = len(answering[0].job.ids)
            wire.id = wire.prefix + answering[0].call.id
            while not all(each.is_done for each in answering):
                async with asyncio.timeout_at(deadline):  # not around a yield: another task may go on
                    events = [await queue.get()]
                while not queue.empty():
                    events.append(queue.get_nowait())
                for delta in self._take(events, answering):
                    yield delta
                for index, event in ((i, event) for i, event in events if isinstance(event, str)):
                    for delta in await self._end(index, answering[index], event):
                        yield delta
        except TimeoutError:
            raise Problem(504, f"no complete answer in {self.seconds:g} s; ask for fewer tokens") from None
        except Refused as error:
            raise Problem(400, str(error), param="messages") from None
        finally:
            for each in answering:
                self._give_up(each)

    def _give_up(self, each: Answering) -> None:
        if not each.is_done:
            self.batch.leave(each.job)
            self.sessions.give_up(each.call)

    def _take(self, events: Sequence[tuple[int, Event]], answering: Sequence[Answering]) -> list[Delta]:
        """What can be sent with these tokens. Raises what went wrong."""
        for index, event in events:
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Token):
                answering[index].tokens.append(event)
        found = []
        for index in dict.fromkeys(index for index, _ in events):
            each = answering[index]
            if each.ask.options.stream and each.tokens:
                reasoning, content, _, _ = self._read(each, is_final=False)
                found += self._new(index, each, reasoning, content)
        return found

    def _begin(
        self, ask: Ask, session: str | None, index: int, queue: asyncio.Queue[tuple[int, Event]]
    ) -> Answering:
        options, prefix = ask.options, ""
        if ask.forced is not None:
            if self.syntax is None:
                raise Problem(
                    400, "tool_choice: the model's chat template shows no calls", param="tool_choice"
                )
            prefix = self.syntax.before_name + ask.forced if ask.forced else self.syntax.opening
        call = self.sessions.begin(with_tools(ask.messages, ask.tools), session, prefix)
        limit = options.max_tokens or MAX_NEW
        given = {"temperature": options.temperature, "top_p": options.top_p, "top_k": max(options.top_k, 0)}
        sampler = SamplerConfig(**given, min_p=options.min_p, max_new=limit, stop=tuple(options.stop))
        if self.sampler is not None:
            limit = min(options.max_tokens or self.sampler.max_new, self.sampler.max_new)
            sampler = self.sampler.model_copy(update={"stop": (*self.sampler.stop, *options.stop)})
        room = min(limit, self.encoder.context - len(call.row.tokens))
        loop = asyncio.get_running_loop()

        def put(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, (index, event))

        number = self.number(call, options.seed, index)
        top, ids = options.top_logprobs, call.row.tokens
        return Answering(call, Job(number, ids, room, sampler=sampler, put=put, top=top), prefix, ask)

    def _new(self, index: int, each: Answering, reasoning: str, content: str) -> list[Delta]:
        found = []
        for kind, text in (("reasoning_content", reasoning), ("content", content)):
            sent = each.sent[kind]
            if text.startswith(sent) and len(text) > len(sent):
                tokens = each.tokens[each.shown :] if each.ask.options.top_logprobs is not None else []
                each.shown = len(each.tokens)
                found.append(Delta(index, kind, text[len(sent) :], tokens, self._texts(tokens)))
                each.sent[kind] = text
        return found

    async def _end(self, index: int, each: Answering, finish: str) -> list[Delta]:
        """What is sent once the answer is stored."""
        reasoning, content, calls, stop = self._read(each, is_final=True)
        tokens = each.tokens
        shown = tokens if each.ask.options.top_logprobs is not None else []
        outcome = Outcome(each.call.id, content, reasoning, calls, finish, tokens, stop, self._texts(shown))
        ids, logp, versions = ([getattr(t, name) for t in tokens] for name in ("id", "logp", "version"))
        answered = self.sessions.end(each.call, ids, logp, versions, each.prefix)
        each.is_done = True
        self.sessions.remember(answered, outcome.message)
        stored = self.keep(answered, outcome, each.job.sampler, each.job.number)
        if stored is not None:
            await asyncio.wrap_future(stored)
        last = self._new(index, each, reasoning, content) if each.ask.options.stream else []
        return [*last, Delta(index, outcome=outcome)]

    def _read(self, each: Answering, *, is_final: bool) -> tuple[str, str, list[dict[str, Any]], str | None]:
        """Reasoning, content, calls of tools, and the stop text that ended it, of the tokens so far."""
        chat = self.policy.chat
        ids = [token.id for token in each.tokens if token.id not in self._hidden]
        decoded = chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        stops = each.job.sampler.stop
        text, has_stop = before_stop(decoded, stops)
        stop = next((s for s in stops if decoded.startswith(s, len(text))), None) if has_stop else None
        reads_calls = bool(each.ask.tools) and self.syntax is not None
        if not is_final:
            text = text.rstrip("\ufffd")
            style = chat.template.thought
            marks = [
                "<think>",
                "</think>",
                *((style.opening.strip(), style.closing.strip()) if style else ()),
            ]
            text = _without_half(text, [*stops, *marks, *([self.syntax.opening] if self.syntax else [])])
        opening = each.call.opening.removesuffix(each.prefix)
        message = chat.message(each.prefix + text, opening)
        content, calls = message["content"], list[dict[str, Any]]()
        if reads_calls:
            assert self.syntax is not None
            if is_final:
                content, calls = self.syntax.parse(content, each.ask.tools)
                calls = [{"id": f"call_{secrets.token_hex(12)}", **call} for call in calls]
            elif self.syntax.opening:
                content = content.partition(self.syntax.opening)[0]
            elif content.lstrip()[:1] in "[{":  # perhaps a call
                content = ""
        reasoning = message.get("reasoning_content", "")
        return reasoning, content, calls, stop

    def _texts(self, tokens: Sequence[Token]) -> list[tuple[str, list[tuple[str, float]]]]:
        decode = self.policy.chat.tokenizer.decode
        return [(decode([t.id]), [(decode([i]), logp) for i, logp in t.top]) for t in tokens]


def number_of(call: Call, seed: int | None, index: int) -> int:
    """What decides the noise of an answer: the request's seed, or a random number."""
    if seed is None:
        return secrets.randbits(62)
    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=7).digest(), "big")


def _without_half(text: str, marks: Sequence[str]) -> str:
    """The text without the beginning of a mark at its end, which the next tokens may complete."""
    for length in range(min(len(text), max(map(len, marks), default=0)), 0, -1):
        if any(mark.startswith(text[-length:]) and len(mark) > length for mark in marks):
            return text[:-length]
    return text
