"""From a request to its answers: a call of a session, a job of the batch, streamed text, a stored row. Tool
calls in a model's text are parsed by the syntax in which its chat template writes them."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from os.path import commonprefix
from typing import Any

from agro.config import SamplerConfig
from agro.door.batch import Batch, Job, Progress, Token
from agro.door.sessions import Call, Sessions
from agro.door.wire import Chat, Event, Outcome, Problem
from agro.errors import Refused
from agro.models.chat import Chat as ModelChat
from agro.models.policy import Policy
from agro.rollout.rollout import before_stop
from agro.types import Messages
from agro.types.conversation import TOOLS, normalized_message

MAX_NEW = 1024  # default limit of tokens per answer
Keep = Callable[[Call, Outcome, SamplerConfig, int], Awaitable[None]]


@dataclass
class Answering:
    """One answer under way."""

    index: int  # of the choice
    call: Call
    job: Job
    tokens: list[Token] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=lambda: {"reasoning_content": "", "content": ""})
    shown: int = 0  # number of tokens sent
    finish: str = ""  # "stop" or "length", once it has ended
    is_done: bool = False

    def take(self, progress: Progress) -> None:
        """Add a token or the finish reason. Raises a reported error."""
        if isinstance(progress, Exception):
            raise progress
        if isinstance(progress, Token):
            self.tokens.append(progress)
        else:
            self.finish = progress


class Door:
    """Answers requests with a policy, in one event loop."""

    def __init__(
        self, policy: Policy, batch: Batch, sessions: Sessions, *, keep: Keep, seconds: float
    ) -> None:
        """`keep` stores an answer before its end is sent. `seconds`: time limit of an answer, including the
        wait for a place in the batch."""
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
        # Special tokens to drop before parsing: ends of turns, padding.
        self._hidden = {i for i, text in texts.items() if not any(text in mark for mark in self._marks)}
        self._hidden |= set(policy.eos_ids)
        self.sampler: SamplerConfig | None = None  # overrides the requests' sampling, not their limits
        self.number: Callable[[Call, int | None, int], int] = number_of

    async def answer(self, wire: Chat, session: str | None) -> AsyncGenerator[Event]:
        """Yield the events of a stream as they arise, the end of each answer once it is stored.

        Without a stream the result is `wire.outcomes` at the end. A caller that stops iterating cancels the
        request. Raises `Problem` if it can't be answered.
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
                async with asyncio.timeout_at(deadline):  # not around a yield: another task may resume it
                    news = [await queue.get()]
                while not queue.empty():
                    news.append(queue.get_nowait())
                for index, progress in news:
                    answers[index].take(progress)
                for each in [answers[index] for index in dict.fromkeys(index for index, _ in news)]:
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
                raise Problem(400, "tool_choice: the model's chat template has no calls", "tool_choice")
            prefix = self.syntax.before_name + wire.forced if wire.forced else self.syntax.opening
        call = self.sessions.begin(wire.messages, session, prefix)
        limit = options.max_tokens or MAX_NEW
        keys = {"temperature": options.temperature, "top_p": options.top_p, "top_k": max(options.top_k, 0)}
        sampler = SamplerConfig(**keys, min_p=options.min_p, max_new=limit, stop=tuple(options.stop))
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
        """Return the events for an answer's new tokens."""
        if not (each.finish or wire.options.stream):
            return []
        outcome = self._read(each, wire)
        if each.finish:
            self.sessions.end(each.call, outcome.tokens, outcome.message)
            each.is_done = True
            await self.keep(each.call, outcome, each.job.sampler, each.job.number)
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
        """Parse the tokens so far; of an unfinished answer drop a possible start of a mark, and calls."""
        chat, stops = self.policy.chat, each.job.sampler.stop
        ids = [token.id for token in each.tokens if token.id not in self._hidden]
        decoded = chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        text, has_stop = before_stop(decoded, stops)
        stop = next((s for s in stops if decoded.startswith(s, len(text))), None) if has_stop else None
        if not each.finish:
            text = _without_partial(text.rstrip("\ufffd"), [*stops, *self._marks])
        prefix = each.call.prefix
        message = chat.message(prefix + text, each.call.opening.removesuffix(prefix))
        content, calls = message["content"], list[dict[str, Any]]()
        if wire.tools and self.syntax is not None:
            if each.finish:
                content, calls = self.syntax.parse(content, wire.tools)
                calls = [{"id": f"call_{secrets.token_hex(12)}", **call} for call in calls]
            elif self.syntax.opening:
                content = content.partition(self.syntax.opening)[0]
            elif content.lstrip()[:1] in "[{":  # possibly a call
                content = ""
        reasoning = message.get("reasoning_content", "")
        return Outcome(each.call.id, content, reasoning, calls, each.finish, each.tokens, stop)


def number_of(call: Call, seed: int | None, index: int) -> int:
    """Return the noise seed of an answer: from the request's seed, or random."""
    return secrets.randbits(62) if seed is None else hashed(f"{seed} {index}")


def hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def _without_partial(text: str, marks: Sequence[str]) -> str:
    """Drop the beginning of a mark at the end of the text, which the next tokens may complete."""
    for length in range(min(len(text), max(map(len, marks), default=0)), 0, -1):
        if any(mark.startswith(text[-length:]) and len(mark) > length for mark in marks):
            return text[:-length]
    return text


NAME, KEYS, VALUES = "door_tool_name", ("door_key_a", "door_key_b"), ("door_value_a", "door_value_b")
PING = {"role": "user", "content": "ping"}


@dataclass(frozen=True)
class CallSyntax:
    """The text around a tool call. If `arguments` is None a call is JSON; else it holds the text before and
    after an argument's name, and after its value."""

    opening: str
    closing: str
    before_name: str  # from the opening to the name
    arguments: tuple[str, str, str] | None = None

    @classmethod
    def of(cls, chat: ModelChat) -> CallSyntax | None:
        """Derive the syntax from a template; None if it renders no calls."""
        if not chat.tokenizer.chat_template or chat.template.call_form is None:
            return None
        written = [_written(chat, count) for count in (0, 1, 2)]
        if not all(written):
            return None
        one, two = written[1], written[2]
        pos = one.index(NAME)
        for start in (i for i in range(pos) if one[i] in "[{"):
            try:
                value, stop = json.JSONDecoder().raw_decode(one, start)
            except ValueError:
                continue
            if NAME in json.dumps(value):
                return cls(one[:start].strip(), one[stop:].strip(), one[:pos])
        gap = one[pos + len(NAME) : one.index(KEYS[0])]
        after_key = one[one.index(KEYS[0]) + len(KEYS[0]) : one.index(VALUES[0])]
        between = two[two.index(VALUES[0]) + len(VALUES[0]) : two.index(KEYS[1])]
        opening_of_key = commonprefix([gap[::-1], between[::-1]])[::-1]  # noqa: RUF071 compares characters
        after_value = between.removesuffix(opening_of_key)
        closing = one[one.index(VALUES[0]) + len(VALUES[0]) :].removeprefix(after_value).strip()
        opening = one[:pos].strip()
        if not (opening and closing and opening_of_key.strip() and after_value.strip()):
            return None
        return cls(
            opening, closing, one[:pos], (opening_of_key.strip(), after_key.strip(), after_value.strip())
        )

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """Return the text before the calls, and the calls; none if one of them can't be parsed.

        `tools`: the declared tools, for the types of arguments that aren't JSON.
        """
        begin = text.find(self.opening) if self.opening else len(text) - len(text.lstrip())
        read = self._json if self.arguments is None else self._tagged
        with suppress(ValueError, RecursionError):  # `Refused` is a ValueError
            named = {tool["function"]["name"]: tool["function"] for tool in tools}
            parsed = read(text[begin:], named) if begin >= 0 else []
            json.dumps(parsed, allow_nan=False)  # raises for NaN, which Python parses
            turn = {"role": "assistant", "content": None, "tool_calls": parsed}
            [message] = normalized_message(turn, "tool_calls")
            calls = message.get("tool_calls", [])
            if calls and all(isinstance(call["function"]["arguments"], dict) for call in calls):
                return text[:begin].rstrip(), calls
        return text, []

    def _json(self, text: str, tools: dict[str, Any]) -> list[Any]:
        values: list[Any] = []
        while text.strip():
            text = text.lstrip()
            if not text.startswith(self.opening) or (values and not self.opening):
                break
            text = text[len(self.opening) :].lstrip()
            value, stop = json.JSONDecoder().raw_decode(text)
            values += value if isinstance(value, list) else [value]
            text = text[stop:].lstrip().removeprefix(self.closing)
        return [{"function": value.get("function", value)} for value in values if isinstance(value, dict)]

    def _tagged(self, text: str, tools: dict[str, Any]) -> list[Any]:
        assert self.arguments is not None
        opening, after_key, after_value = map(re.escape, self.arguments)
        calls = []
        for block in text.split(self.opening)[1:]:
            name = re.match(r"\s*([\w.:-]+)", block)
            if name is None or self.closing not in block:
                raise ValueError("an unfinished call")
            types = tools.get(name[1], {}).get("parameters", {}).get("properties", {})
            arguments = {}
            pair = rf"{opening}\s*([^\s<>]+?)\s*{after_key}\n?(.*?)\n?\s*{after_value}"
            for key, value in re.findall(pair, block[name.end() :], re.DOTALL):
                arguments[key], schema = value, types.get(key)
                if not isinstance(schema, dict) or schema.get("type") != "string":  # true: any value
                    with suppress(ValueError):
                        arguments[key] = json.loads(value)
            calls.append({"function": {"name": name[1], "arguments": arguments}})
        return calls


def _written(chat: ModelChat, count: int) -> str:
    """Render a call with `count` arguments as the model writes it, without the end of the turn."""
    arguments = dict(zip(KEYS[:count], VALUES))
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
    declared = [{"type": "function", "function": {"name": NAME, "description": "", "parameters": parameters}}]
    history: Messages = [{"role": TOOLS, "content": json.dumps(declared)}, PING]
    call = {"type": "function", "function": {"name": NAME, "arguments": arguments}}
    try:
        written = chat.reply(history, {"role": "assistant", "content": "", "tool_calls": [call]}, ()).written
    except Refused:
        return ""
    return chat.unended(written, ())
