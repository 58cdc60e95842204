"""Calls of a model as the rows of episodes, by the rule that fresh episodes have (`agro.rollout.rollout`).

A call whose messages extend those of an earlier one, and whose rendered text extends its text, extends that
row: its tokens stay as they were sampled. A rewrite and a branch (a sub-agent, a retry, another choice) begin
a row of their own with their own context. All rows of an episode share one reward.

An episode is a session that the client names; without a name, what a first call and those that extend it
make.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from agro.door.batch import Token
from agro.errors import Refused
from agro.models.encoding import Encoder, InvalidSample
from agro.models.template import NotShown
from agro.rollout.rollout import EpisodeRow
from agro.types import Messages

# Of answers that later calls may extend, with what they were asked; of older ones a call begins a row.
REMEMBERED_CHARACTERS = 16 << 20  # and tokens, of 44 bytes each: 0.7 GB
REMEMBERED_EPISODES = 20_000


@dataclass
class DoorEpisode:
    """What the rows of an episode share. `reward`, `feedback`: as the store has them."""

    name: str
    is_named: bool = False  # by the client
    prompt: Any = None  # messages of the first call
    rows: int = 0  # so far
    reward: float | None = None
    feedback: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Call:
    """A call under way: `row` ends with the context of its answer."""

    episode: DoorEpisode
    number: int  # of the row in the episode
    row: EpisodeRow
    opening: str  # the text of the context
    opened: Messages  # those that the row began with
    shown: Messages  # those of the call, as the client has them
    messages: Messages  # the same, with the assistant's turns as the policy wrote them
    digests: list[bytes]  # of the messages, see `digests_of`
    prefix: str = ""  # of its answer, at the end of the context: not the policy's choice
    answers: int = 0  # in the row before this one
    extends: Answered | None = None
    ids: tuple[str, ...] = ()  # of the calls that the row has

    @property
    def id(self) -> str:
        """What feedback names this call by, also after a restart."""
        return f"{self.episode.name}.{self.number}.{self.answers}"


@dataclass(eq=False)
class Answered:
    """A call with its answer, from which another one may go on."""

    call: Call
    row: EpisodeRow
    text: str  # of all tokens of the row, and of its context
    messages: Messages
    last_turn: str  # what was sampled last, without special tokens
    shown: Messages = field(default_factory=list)  # as the client has them, with the answer
    is_extended: bool = False

    @property
    def size(self) -> int:
        """Tokens and characters that are kept for it, about."""
        return len(self.row.tokens) + sum(len(message["content"]) for message in self.shown)


class Memory:
    """The episodes under way, and what was answered in them. It is used by one thread."""

    def __init__(self) -> None:
        self.episodes: OrderedDict[str, DoorEpisode] = OrderedDict()  # by name
        self._answered: OrderedDict[tuple[str, bytes], list[Answered]] = OrderedDict()
        self._size = 0  # of them

    def episode(self, session: str | None) -> DoorEpisode:
        """That of a named session, or a new one."""
        name = session or secrets.token_hex(12)
        episode = self.episodes.setdefault(name, DoorEpisode(name, is_named=session is not None))
        self.episodes.move_to_end(name)
        if len(self.episodes) > REMEMBERED_EPISODES:
            self.episodes.popitem(last=False)
        return episode

    def remember(self, answered: Answered, answer: dict[str, Any]) -> Answered:
        """`answer`: the message as the client got it, with which it will come again."""
        call = answered.call
        answered.shown = [*call.shown, answer]
        session = call.episode.name if call.episode.is_named else ""
        key = session, _digest(call.digests[-1], answer)
        self._answered.setdefault(key, []).append(answered)
        self._answered.move_to_end(key)
        self._size += answered.size
        while self._size > REMEMBERED_CHARACTERS:
            oldest, several = next(iter(self._answered.items()))
            self._size -= several.pop(0).size
            if not several:
                del self._answered[oldest]
        return answered

    def place(self, call: Call, extended: Answered | None) -> Call:
        """Make the call one of the row that it can extend, or of a new one. `call.row`: with its context."""
        if call.episode.prompt is None:
            call.episode.prompt = call.shown
        if extended is not None and not extended.is_extended:
            extended.is_extended = True
            before = extended.call
            call.number, call.opened, call.ids = before.number, before.opened, before.ids
            call.answers, call.extends = before.answers + 1, extended
        else:
            call.row = EpisodeRow(call.row.tokens)  # of a branch: what the other row has is its context
            call.number = call.episode.rows
            call.episode.rows += 1
        call.ids = (*call.ids, call.id)
        return call

    def give_up(self, call: Call) -> None:
        """The call has no answer: another may extend the row, or be the first."""
        if call.extends is not None:
            call.extends.is_extended = False
        elif call.number == call.episode.rows - 1:
            call.episode.rows -= 1
            if not call.episode.rows:
                call.episode.prompt = None

    def earlier(self, session: str | None, digests: list[bytes], messages: Messages) -> Answered | None:
        """The longest call that these messages extend; of several one that nothing extends yet."""
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] == "assistant":
                found = self._answered.get((session or "", digests[count - 1]))
                if found:
                    return next((each for each in reversed(found) if not each.is_extended), found[-1])
        return None


class Sessions(Memory):
    """Of a policy in this process, which continues tokens."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def begin(self, messages: Messages, session: str | None, prefix: str = "") -> Call:
        """A call with these messages, in one form (`agro.types.conversation`).

        `prefix`: what its answer has to begin with, which isn't the policy's choice. Raises `Refused` where
        the chat template doesn't show the messages, or they leave no room for an answer.
        """
        digests = digests_of(messages)
        found = self.earlier(session, digests, messages)
        episode = found.call.episode if found is not None else self.episode(session)
        shown = messages = list(self.encoder.chat.messages(messages))
        opening = None
        if found is not None:
            whole = [*found.messages, *messages[len(found.messages) :]]
            with suppress(NotShown):  # such as a result of a tool without its call, in some templates
                opening, messages = self.encoder.render(whole), whole
        opening = (self.encoder.render(messages) if opening is None else opening) + prefix
        if found is not None and opening.startswith(found.text):
            row = deepcopy(found.row)
            row.observe(self.encoder.following(found.text, opening[len(found.text) :]))
        else:
            found, row = None, EpisodeRow(self.encoder.ids(opening))
        if len(row.tokens) >= self.encoder.context:
            raise InvalidSample(
                "too long",
                f"messages: {len(row.tokens)} tokens leave no room for an answer in the model's context of "
                f"{self.encoder.context}; send fewer",
            )
        call = Call(episode, 0, row, opening, shown, shown, messages, digests, prefix)
        return self.place(call, found)

    def end(self, call: Call, drawn: Sequence[Token], answer: dict[str, Any]) -> Answered:
        """The answer of a call, from which later ones may go on. `answer`: see `remember`."""
        row, prefix, tokens = deepcopy(call.row), call.prefix, [token.id for token in drawn]
        versions = np.array([token.version for token in drawn], np.int32)
        row.act(tokens, [token.logp for token in drawn], versions, None)
        decode = self.encoder.chat.tokenizer.decode
        is_closed = tokens[-1] in self.encoder.eos_ids
        written = decode(tokens[:-1] if is_closed else tokens, clean_up_tokenization_spaces=False)
        message = self.encoder.chat.message(prefix + written, call.opening.removesuffix(prefix))
        end = decode(tokens[-1:]) if is_closed else ""
        last_turn = prefix + self.encoder.decode(tokens, call.row.tokens)
        text, messages = call.opening + written + end, [*call.messages, message]
        return self.remember(Answered(call, row, text, messages, last_turn), answer)


def digests_of(messages: Messages) -> list[bytes]:
    """Of each beginning of a conversation. Without ids of calls and reasoning, which clients leave out."""
    digests, digest = [], b""
    for message in messages:
        digest = _digest(digest, message)
        digests.append(digest)
    return digests


def _digest(before: bytes, message: dict[str, Any]) -> bytes:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [[function["name"], function["arguments"]] for function in functions]
    content = [message["role"].replace("developer", "system"), message["content"].strip(), calls]
    return blake2b(before + json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()


def check_name(name: str) -> str:
    """Raise `Refused` for what isn't the name of a session."""
    if 0 < len(name) <= 80 and name.isascii() and name.replace("-", "").replace("_", "").isalnum():
        return name
    raise Refused(f"session: expected up to 80 letters, digits, - and _, got {name[:100]!r}")
