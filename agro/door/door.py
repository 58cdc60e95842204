"""From a request to its answers: a call of a session, a job of the batch, texts as they come, a row."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from agro.config import SamplerConfig
from agro.door.batch import Batch, Job, Progress, Token
from agro.door.records import kept
from agro.door.sessions import Answered, Call, Sessions
from agro.door.tool_calls import CallSyntax
from agro.door.wire import Chat, Event, Outcome, Problem
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rollout.rollout import before_stop

MAX_NEW = 1024  # tokens of an answer where the request says nothing
Keep = Callable[[Answered, Outcome, SamplerConfig, int], "Future[Any] | None"]


@dataclass
class Answering:
    """One answer under way."""

    index: int  # of the choice
    call: Call
    job: Job
    tokens: list[Token] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=lambda: {"reasoning_content": "", "content": ""})
    shown: int = 0  # tokens that were sent
    finish: str = ""  # "stop" or "length", once it ended
    is_done: bool = False


class Door:
    """Answers requests with a policy. It is used by one event loop."""

    def __init__(
        self, policy: Policy, batch: Batch, sessions: Sessions, *, keep: Keep, seconds: float
    ) -> None:
        """`keep` stores an answer; its future is awaited before the end of the answer is sent.
        `seconds`: that an answer may take, with the time that it waits."""
        self.policy, self.batch, self.sessions = policy, batch, sessions
        self.keep, self.seconds = keep, seconds
        self.syntax = CallSyntax.of(policy.chat)
        self._marks = ["<think>", "</think>"]
        style = policy.chat.template.thought if policy.tokenizer.chat_template else None
        if style is not None:
            self._marks += [style.opening.strip(), style.closing.strip()]
        if self.syntax is not None:
            self._marks += [self.syntax.opening, self.syntax.closing]
        texts = {i: policy.tokenizer.convert_ids_to_tokens(i) for i in policy.encoder.special}
        # Special tokens that aren't part of what is read: ends of turns, padding.
        self._hidden = {i for i, text in texts.items() if not any(text in mark for mark in self._marks)}
        self._hidden |= set(policy.eos_ids)
        self.sampler: SamplerConfig | None = None  # in place of what requests ask, as far as they differ
        self.number: Callable[[Call, int | None, int], int] = number_of

    async def answer(self, wire: Chat, session: str | None) -> AsyncGenerator[Event]:
        """The events of a stream as they come; the end of an answer once it is stored.

        Without a stream what counts is `wire.outcomes` at the end. Who stops iterating ends the request.
        Raises `Problem` where it can't be answered.
        """
        queue: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()
        answers: list[Answering] = []
        deadline = asyncio.get_running_loop().time() + self.seconds
        try:
            for index in range(wire.options.n):
                answers.append(self._begin(wire, session, index, queue))
                self.batch.submit(answers[-1].job)
            wire.prompt_tokens = len(answers[0].job.ids)
            wire.id = wire.prefix + answers[0].call.id
            wire.decode = self.policy.chat.tokenizer.decode
            events = list(wire.begin())
            while len(wire.outcomes) < len(answers):
                async with asyncio.timeout_at(deadline):  # not around a yield: another task may go on
                    changed = await _receive(queue, answers)
                for each in changed:
                    events += await self._advance(each, wire)
                for event in events:
                    yield event
                events = []
            for event in wire.close():
                yield event
        except TimeoutError:
            raise Problem(504, f"no complete answer in {self.seconds:g} s; ask for fewer tokens") from None
        except Refused as error:
            raise Problem(400, str(error), "messages") from None
        finally:
            for each in answers:
                if not each.is_done:
                    self.batch.leave(each.job)
                    self.sessions.give_up(each.call)

    def _begin(
        self, wire: Chat, session: str | None, index: int, queue: asyncio.Queue[tuple[int, Progress]]
    ) -> Answering:
        options, prefix = wire.options, ""
        if wire.forced is not None:
            if self.syntax is None:
                raise Problem(400, "tool_choice: the model's chat template shows no calls", "tool_choice")
            prefix = self.syntax.before_name + wire.forced if wire.forced else self.syntax.opening
        call = self.sessions.begin(wire.messages, session, prefix)
        limit = options.max_tokens or MAX_NEW
        given = {"temperature": options.temperature, "top_p": options.top_p, "top_k": max(options.top_k, 0)}
        sampler = SamplerConfig(**given, min_p=options.min_p, max_new=limit, stop=tuple(options.stop))
        if self.sampler is not None:
            limit = min(options.max_tokens or self.sampler.max_new, self.sampler.max_new)
            sampler = self.sampler.model_copy(update={"stop": (*self.sampler.stop, *options.stop)})
        ids, loop = call.row.tokens, asyncio.get_running_loop()

        def put(progress: Progress) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, (index, progress))

        number, room = self.number(call, options.seed, index), self.policy.encoder.context - len(ids)
        job = Job(number, ids, min(limit, room), sampler=sampler, put=put, top=options.top_logprobs)
        return Answering(index, call, job)

    async def _advance(self, each: Answering, wire: Chat) -> list[Event]:
        """The events that an answer's new tokens make."""
        if not (each.finish or wire.options.stream):
            return []
        outcome = self._read(each, wire)
        if each.finish:
            answered = self.sessions.end(each.call, outcome.tokens, outcome.message)
            each.is_done = True
            await kept(self.keep(answered, outcome, each.job.sampler, each.job.number))
            wire.outcomes[each.index] = outcome
        events = list[Event]()
        for kind, text in (("reasoning_content", outcome.reasoning), ("content", outcome.content)):
            sent = each.sent[kind]
            if text.startswith(sent) and len(text) > len(sent):
                events += wire.delta(each.index, kind, text[len(sent) :], each.tokens[each.shown :])
                each.sent[kind], each.shown = text, len(each.tokens)
        if each.finish:
            events += wire.end(each.index, outcome)
        return events

    def _read(self, each: Answering, wire: Chat) -> Outcome:
        """What the tokens so far say; before the end without what may become a mark, and without calls."""
        chat, stops = self.policy.chat, each.job.sampler.stop
        ids = [token.id for token in each.tokens if token.id not in self._hidden]
        decoded = chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        text, has_stop = before_stop(decoded, stops)
        stop = next((s for s in stops if decoded.startswith(s, len(text))), None) if has_stop else None
        if not each.finish:
            text = _without_half(text.rstrip("\ufffd"), [*stops, *self._marks])
        prefix = each.call.prefix
        message = chat.message(prefix + text, each.call.opening.removesuffix(prefix))
        content, calls = message["content"], list[dict[str, Any]]()
        if wire.tools and self.syntax is not None:
            if each.finish:
                content, calls = self.syntax.parse(content, wire.tools)
                calls = [{"id": f"call_{secrets.token_hex(12)}", **call} for call in calls]
            elif self.syntax.opening:
                content = content.partition(self.syntax.opening)[0]
            elif content.lstrip()[:1] in "[{":  # perhaps a call
                content = ""
        reasoning = message.get("reasoning_content", "")
        return Outcome(each.call.id, content, reasoning, calls, each.finish, each.tokens, stop)


async def _receive(queue: asyncio.Queue[tuple[int, Progress]], answers: list[Answering]) -> list[Answering]:
    """The answers that have something new. Raises what went wrong."""
    news = [await queue.get()]
    while not queue.empty():
        news.append(queue.get_nowait())
    for index, progress in news:
        if isinstance(progress, Exception):
            raise progress
        if isinstance(progress, Token):
            answers[index].tokens.append(progress)
        else:
            answers[index].finish = progress
    return [answers[index] for index in dict.fromkeys(index for index, _ in news)]


def number_of(call: Call, seed: int | None, index: int) -> int:
    """What decides the noise of an answer: the request's seed, or a random number."""
    return secrets.randbits(62) if seed is None else hashed(f"{seed} {index}")


def hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def _without_half(text: str, marks: Sequence[str]) -> str:
    """The text without the beginning of a mark at its end, which the next tokens may complete."""
    for length in range(min(len(text), max(map(len, marks), default=0)), 0, -1):
        if any(mark.startswith(text[-length:]) and len(mark) > length for mark in marks):
            return text[:-length]
    return text
