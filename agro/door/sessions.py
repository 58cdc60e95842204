"""What the door remembers and stores: calls of a model as the rows of episodes, and feedback on them.

The rule is the one that fresh episodes have (`agro.rollout.rollout`). A call whose messages extend those of
an earlier one, and whose rendered text extends its text, extends that row: its tokens stay as they were
sampled. A rewrite and a branch (a sub-agent, a retry, another choice) begin a row of their own with their own
context. All rows of an episode share one reward. An answer is on the disk before its end is sent.

An episode is a session that the client names; without a name, what a first call and those that extend it
make.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import numpy as np

from agro.door.batch import Token
from agro.door.wire import Problem
from agro.errors import Refused, without_secrets
from agro.logs.privacy import Privacy
from agro.models.encoding import Encoder, InvalidSample
from agro.models.template import NotShown
from agro.rollout.rollout import EpisodeRow, before_stop
from agro.store import Origin, Pair, Store
from agro.store.location import location_of
from agro.store.samples import LedgerSample
from agro.types import Messages, Sample, thought_in

# Of answers that later calls may extend, with what they were asked; of older ones a call begins a row.
REMEMBERED_CHARACTERS = 16 << 20  # and tokens, of 44 bytes each: 0.7 GB
REMEMBERED_EPISODES = 20_000
PAGE = 4096  # rows of an episode that are looked up at once
DAY = 86400.0  # seconds
THUMBS = {"up": 1.0, "down": 0.0}
ANSWERED = "answered"  # in `meta`: when, in seconds since 1970
T = TypeVar("T")


@dataclass
class DoorEpisode:
    """What the rows of an episode share. `reward`, `feedback`: as the store has them."""

    name: str
    is_named: bool = False  # by the client
    prompt: Any = None  # messages of the first call
    rows: int = 0  # so far
    reward: float | None = None
    feedback: list[dict[str, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Call:
    """A call of the model, from which others may go on once it is answered.

    Until then `row`, `shown` and `messages` end with what was asked, and afterwards with the answer.
    """

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
    extends: Call | None = None  # until it is answered itself
    ids: tuple[str, ...] = ()  # of the calls that the row has
    text: str = ""  # of all tokens of the row, and of its context, once it is answered
    last_turn: str = ""  # what was sampled last, without special tokens
    is_extended: bool = False

    @property
    def id(self) -> str:
        """What feedback names this call by, also after a restart."""
        return f"{self.episode.name}.{self.number}.{self.answers}"

    @property
    def size(self) -> int:
        """Tokens and characters that are kept for it, about."""
        return len(self.row.tokens) + sum(len(message["content"]) for message in self.shown)


class Memory:
    """The episodes under way, and what was answered in them. It is used by one thread."""

    def __init__(self) -> None:
        self.episodes: OrderedDict[str, DoorEpisode] = OrderedDict()  # by name
        self._answered: OrderedDict[tuple[str, bytes], list[Call]] = OrderedDict()
        self._size = 0  # of them

    def episode(self, session: str | None) -> DoorEpisode:
        """That of a named session, or a new one."""
        name = session or secrets.token_hex(12)
        episode = self.episodes.setdefault(name, DoorEpisode(name, is_named=session is not None))
        self.episodes.move_to_end(name)
        if len(self.episodes) > REMEMBERED_EPISODES:
            self.episodes.popitem(last=False)
        return episode

    def remember(self, call: Call, answer: dict[str, Any]) -> None:
        """`answer`: the message as the client got it, with which it will come again."""
        call.shown, call.extends = [*call.shown, answer], None
        session = call.episode.name if call.episode.is_named else ""
        key = session, _digest(call.digests[-1], answer)
        self._answered.setdefault(key, []).append(call)
        self._answered.move_to_end(key)
        self._size += call.size
        while self._size > REMEMBERED_CHARACTERS:
            oldest, several = next(iter(self._answered.items()))
            self._size -= several.pop(0).size
            if not several:
                del self._answered[oldest]

    def place(self, call: Call, extended: Call | None) -> Call:
        """Make the call one of the row that it can extend, or of a new one. `call.row`: with its context."""
        if call.episode.prompt is None:
            call.episode.prompt = call.shown
        if extended is not None and not extended.is_extended:
            extended.is_extended = True
            call.number, call.opened, call.ids = extended.number, extended.opened, extended.ids
            call.answers, call.extends = extended.answers + 1, extended
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

    def earlier(self, session: str | None, digests: list[bytes], messages: Messages) -> Call | None:
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
        episode = found.episode if found is not None else self.episode(session)
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

    def end(self, call: Call, drawn: Sequence[Token], answer: dict[str, Any]) -> None:
        """The call is answered, so that later ones may go on from it. `answer`: see `remember`."""
        prefix, tokens = call.prefix, [token.id for token in drawn]
        versions = np.array([token.version for token in drawn], np.int32)
        call.last_turn = prefix + self.encoder.decode(tokens, call.row.tokens)
        call.row.act(tokens, [token.logp for token in drawn], versions)
        written, end = self.encoder.turn(tokens)
        message = self.encoder.chat.message(prefix + written, call.opening.removesuffix(prefix))
        call.text, call.messages = call.opening + written + end, [*call.messages, message]
        self.remember(call, answer)


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


class Keeping(NamedTuple):
    """What is stored, where and how long."""

    store: str | None = None
    privacy: Privacy = Privacy(redact=True)
    days: int | None = None


def ledger_of(episode: str) -> str:
    """The name under which the rows of an episode are stored once."""
    return f"door:{episode}"


def meta_of(call: Call, last_turn: str) -> dict[str, Any]:
    """The `meta` of the row of an answered call."""
    meta = {
        ANSWERED: time.time(),
        "session": call.episode.name,
        "row": call.number,
        "calls": list(call.ids),
        "turns": call.answers + 1,
        "last_turn": last_turn,
        "continuation": call.shown[len(call.opened) :],
    }
    if call.number:
        meta["context"] = call.opened
    if thought := thought_in(call.opening, last_turn):
        meta["thought"] = thought
    if call.episode.feedback:
        meta["feedback"] = call.episode.feedback
    return meta


def put_row(store: Store, call: Call, sample: Sample, privacy: Privacy) -> None:
    """Add the row of an answered call, in place of the row that it extends."""
    episode, number = call.episode, call.number
    ledger = ledger_of(episode.name)
    if call.answers:
        store.experience.set_aside(ledger, [number])
    sample = sample.replace(reward=episode.reward, episode=episode.name)
    clean = redacted(sample, privacy, call.opened)
    store.append([clean], origins=[Origin(ledger, number, "")])


def store_row(
    store: Store, call: Call, encoder: Encoder, privacy: Privacy, meta: dict[str, Any], **fields: Any
) -> None:
    """The row of an answered call of a policy of ours."""
    stops = fields["sampling"]["stop"]
    meta = {**meta, **meta_of(call, before_stop(call.last_turn, stops)[0])}
    fields["prompt"] = call.episode.prompt
    sample = call.row.sample(encoder, number=call.number, meta=meta, **fields)
    if not call.answers:  # as of a fresh response, whose stop text is among its tokens alone
        sample = sample.replace(response=before_stop(sample.response, stops)[0])
    put_row(store, call, sample, privacy)


def redacted(sample: Sample, privacy: Privacy, opened: Messages) -> Sample:
    """The sample without what isn't to be stored; where its texts change, without tokens.

    A row without tokens whose context isn't the prompt gets it as its prompt: nothing else knows it then.
    """
    record = {"prompt": sample.prompt, "response": sample.response, "meta": sample.meta, "tokens": True}
    clean = privacy.apply(record)
    changes = {name: clean[name] for name in ("prompt", "response", "meta")}
    if clean["prompt"] != sample.prompt:
        changes["prompt_id"] = ""
    if "tokens" not in clean:
        names = ("tokens", "action", "behavior_logp", "context_tokens", "tokenizer")
        changes |= dict.fromkeys(names) | {"version": -1}
        if sample.context_tokens is not None:
            changes |= {"prompt": clean["meta"].get("context") or opened, "prompt_id": ""}
    return sample.replace(**changes)


def _rows(store: Store, name: str) -> tuple[list[Sample], int]:
    """The rows of an episode, and how many it had with those that were deleted."""
    found, start = list[LedgerSample](), 0
    while page := store.experience.in_ledger(ledger_of(name), range(start, start + PAGE)):
        found, start = found + page, start + PAGE
    ids = [row.id for row in found]
    return (list(store.samples(ids=ids)), 1 + found[-1].number) if found else ([], 0)


def store_feedback(
    store: Store, feedback: dict[str, Any], episode: DoorEpisode, source: str, privacy: Privacy
) -> dict[str, Any]:
    """Feedback on an episode, named by a call or by the session; the last reward counts, all are kept.

    Raises `Problem` where nothing was answered under that name.
    """
    rows, count = _rows(store, episode.name)
    name = feedback["name"]
    if not rows or name not in {episode.name, *(call for sample in rows for call in sample.meta["calls"])}:
        got = f"feedback: expected the id of an answered call, or a session, got {name!r:.80}"
        gone = ", whose answers were deleted (--keep-days, agro forget)" if count > len(rows) else ""
        raise Problem(410 if gone else 404, got + gone)
    names = ("reward", "thumb", "comment", "correction")
    entry = privacy.apply({key: feedback[key] for key in names if key in feedback})
    history = [*rows[0].meta.get("feedback", []), {**entry, "id": name, "time": time.time()}]
    reward = feedback.get("reward", THUMBS.get(feedback.get("thumb", ""), rows[0].reward))
    store.set_rewards((sample.stored_id, reward, {"feedback": history}) for sample in rows)
    if "correction" in feedback:
        _correct(store, rows, name, entry["correction"], source)
    episode.reward, episode.feedback = reward, history
    return {"episode": episode.name, "reward": reward, "rows": len(rows), "feedback": len(history)}


def _correct(store: Store, rows: list[Sample], id: str, correction: str, source: str) -> None:
    """A demonstration, and a pair of it and the answer, in place of those of an earlier correction."""
    sample = next((sample for sample in rows if id in sample.meta["calls"]), None)
    if sample is None:
        raise Refused(f"correction: expected the id of one answer, got {id!r:.80}, which names a session")
    turns = sample.meta["continuation"]
    places = [i for i, message in enumerate(turns) if message["role"] == "assistant"]
    place = places[sample.meta["calls"].index(id)]
    before = [*sample.meta.get("context", sample.prompt), *turns[:place]]
    answer = turns[place]["content"]
    if answer == correction:
        raise Refused("correction: expected another answer than the model's, got the same")
    ledger, meta = f"door-correction:{id}", {"corrects": id, ANSWERED: time.time()}
    store.experience.set_aside(ledger, [0, 1])
    pair = [
        Sample(before, correction, role="expert", source="correction", meta=meta),
        Sample(before, answer, role="log", source=source, meta=meta),
    ]
    winner, loser = store.append(pair, origins=[Origin(ledger, 0, ""), Origin(ledger, 1, "")])
    store.add_pairs([Pair(winner, loser)])


class Recorder:
    """The store behind a door, and the sessions that it has.

    A thread of its own has the store, and what is submitted while it writes is one transaction. What was
    answered more days ago than are kept it deletes, at its start and once a day.
    """

    def __init__(self, keeping: Keeping, memory: Memory, source: str) -> None:
        """`source`: of the samples, where the answer doesn't say whose it is."""
        self.privacy, self.memory, self.source = keeping.privacy, memory, source
        self.days = keeping.days
        self.stored = self.expired = 0  # answers, and rows that were deleted
        self._lock = asyncio.Lock()
        self._ends = threading.Event()
        self._clock: threading.Thread | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._submitted: deque[tuple[Callable[[Store], Any], Future[Any]]] = deque()
        if keeping.store is not None:
            self._thread = ThreadPoolExecutor(1)
            self._store = self._thread.submit(Store.open, location_of(keeping.store)).result()
        if self._thread is not None and self.days is not None:
            self._thread.submit(self._expire).result()
            self._clock = threading.Thread(target=self._expire_daily, daemon=True)
            self._clock.start()

    def close(self) -> None:
        self._ends.set()
        if self._clock is not None:
            self._clock.join()
        if self._thread is not None:
            self._thread.submit(self._store.close)
            self._thread.shutdown()

    def measures(self) -> dict[str, float]:
        return {"stored_total": self.stored, "expired_total": self.expired}

    async def keep(self, work: Callable[[Store], None]) -> None:
        """Wait until `work` has stored an answer. Raises `Problem` where it can't: then it isn't answered."""
        if self._thread is None:
            return
        future = self.submit(work)
        future.add_done_callback(self._count)  # also where the client leaves meanwhile
        try:
            await asyncio.wrap_future(future)
        except Refused as error:
            said = f"agro: an answer can't be stored, and isn't given: {error}"
            print(without_secrets(said), file=sys.stderr)
            raise Problem(503, "the answer can't be stored") from None

    def _count(self, future: Future[None]) -> None:
        self.stored += future.exception() is None

    def submit(self, work: Callable[[Store], T]) -> Future[T]:
        """`work` is called with the store; what it wrote is durable when the future has its result."""
        assert self._thread is not None
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # who waits for it may leave: it is done all the same
        self._submitted.append((work, future))
        self._thread.submit(self._write_submitted)
        return future

    def _write_submitted(self) -> None:
        if self._submitted:  # else an earlier call has written them
            self._write([self._submitted.popleft() for _ in range(len(self._submitted))])

    def _write(self, together: list[tuple[Callable[[Store], Any], Future[Any]]]) -> None:
        try:
            with self._store.transaction():
                results = [work(self._store) for work, _ in together]
        except BaseException as error:  # noqa: BLE001 a panic of tokenizers too: who submitted it waits for it
            if len(together) == 1:
                together[0][1].set_exception(error)
            else:
                for each in together:
                    self._write([each])
            return
        for (_, future), result in zip(together, results, strict=True):
            future.set_result(result)

    def _expire_daily(self) -> None:
        while not self._ends.wait(DAY):
            assert self._thread is not None
            self._thread.submit(self._expire)

    def _expire(self) -> None:
        """Delete for good what was answered too long ago, and say so."""
        store, days = self._store, self.days or 0
        try:
            ids = store.experience.find_below(ANSWERED, time.time() - days * DAY)
            said = f"deleted {len(ids)} rows, {days} days old or more"
            said += "".join(f"; trained on by {run}" for run in store.draws.trained(ids))
            if ids:
                store.imports.forget(ids)
            self.expired += len(ids)
        except Exception as error:  # noqa: BLE001 else the pool would swallow it; answers are still stored
            said = f"--keep-days: nothing was deleted, and it is tried again in a day: {error}"
        print(without_secrets(f"agro: {said}"), file=sys.stderr)

    async def feedback(self, given: dict[str, Any]) -> dict[str, Any]:
        if self._thread is None:
            raise Problem(400, "feedback: expected --store, in which answers are kept")
        name = given["episode"]
        episode = self.memory.episodes.get(name, DoorEpisode(name))
        fields: dict[str, Any] = {"episode": episode, "source": self.source, "privacy": self.privacy}
        work = partial(store_feedback, feedback=given, **fields)
        return await asyncio.wrap_future(self.submit(work))

    async def open_session(self, name: str | None) -> None:
        """Before a call of a session that an earlier process may have begun, of which the store has rows."""
        if self._thread is None or name is None or name in self.memory.episodes:
            return
        async with self._lock:
            if name in self.memory.episodes:
                return
            rows, number = await asyncio.wrap_future(self.submit(partial(_rows, name=name)))
            episode = DoorEpisode(name, is_named=True, rows=number)
            if rows:
                episode.prompt, episode.reward = rows[0].prompt, rows[0].reward
                episode.feedback = rows[0].meta.get("feedback", [])
            self.memory.episodes[name] = episode
