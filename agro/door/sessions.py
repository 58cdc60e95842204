"""What the door remembers and stores: model calls as the rows of episodes, and feedback on them.

Rows follow the rule of fresh episodes (`agro.rollout.rollout`). A call whose messages extend those of an
earlier one, and whose rendered text extends its text, extends that row, whose tokens stay as sampled. A
rewrite or a branch (a sub-agent, a retry, another choice) begins a new row with its own context. All rows of
an episode share one reward. An answer is on disk before its end is sent.

An episode is a session that the client names, or else a first call and the calls that extend it.
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

# Answers that later calls may extend, with their contexts. A call that extends an older one begins a row.
REMEMBERED_CHARACTERS = 16 << 20  # characters and tokens, 44 bytes each: 0.7 GB
REMEMBERED_EPISODES = 20_000
PAGE = 4096  # rows of an episode per query
DAY = 86400.0  # seconds
THUMBS = {"up": 1.0, "down": 0.0}
LEDGER = "door:"  # followed by the name of an episode
ANSWERED = "answered"  # in `meta`: when, in seconds since 1970
T = TypeVar("T")


@dataclass
class DoorEpisode:
    """The state that an episode's rows share. `reward`, `feedback`: as stored."""

    name: str
    is_named: bool = False  # whether the client named it
    prompt: Any = None  # the first call's messages
    rows: int = 0  # so far
    reward: float | None = None
    feedback: list[dict[str, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Call:
    """A call of the model, which others may extend once it is answered.

    `row`, `shown` and `messages` end with the request until then, and afterwards with the answer.
    """

    episode: DoorEpisode
    number: int  # the row's number in the episode
    row: EpisodeRow
    opening: str  # the rendered context
    opened: Messages  # the messages that the row began with
    shown: Messages  # the call's messages, as the client has them
    messages: Messages  # the same, with the assistant's turns as the policy wrote them
    digests: list[bytes]  # of the messages, see `digests_of`
    prefix: str = ""  # forced start of the answer, part of the context
    answers: int = 0  # earlier answers in the row
    extends: Call | None = None  # until it is answered itself
    ids: tuple[str, ...] = ()  # of the row's calls
    text: str = ""  # of the context and the row's tokens, once answered
    last_turn: str = ""  # the last sampled text, without special tokens
    is_extended: bool = False
    name: str = ""  # the id that another server gave to the answer

    @property
    def id(self) -> str:
        """The name that feedback uses for this call, also after a restart."""
        return self.name or f"{self.episode.name}.{self.number}.{self.answers}"

    @property
    def size(self) -> int:
        """The approximate number of tokens and characters held for it."""
        return len(self.row.tokens) + sum(len(message["content"]) for message in self.shown)


class Memory:
    """The running episodes and their answers, used by one thread."""

    def __init__(self) -> None:
        self.episodes: OrderedDict[str, DoorEpisode] = OrderedDict()  # by name
        self.episode_of: OrderedDict[str, str] = OrderedDict()  # names by the ids of calls
        self._answered: OrderedDict[tuple[str, bytes], list[Call]] = OrderedDict()
        self._size = 0  # of all answered calls

    def episode(self, session: str | None) -> DoorEpisode:
        """Return the episode of a named session, or a new one."""
        name = session or secrets.token_hex(12)
        episode = self.episodes.setdefault(name, DoorEpisode(name, is_named=session is not None))
        self.episodes.move_to_end(name)
        if len(self.episodes) > REMEMBERED_EPISODES:
            self.episodes.popitem(last=False)
        return episode

    def remember(self, call: Call, answer: dict[str, Any]) -> None:
        """Let later calls extend an answered call. `answer`: the message as the client will send it back."""
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
        """Assign the call to the row that it can extend, or to a new one. `call.row` has its context."""
        if call.episode.prompt is None:
            call.episode.prompt = call.shown
        if extended is not None and not extended.is_extended:
            extended.is_extended = True
            call.number, call.opened, call.ids = extended.number, extended.opened, extended.ids
            call.answers, call.extends = extended.answers + 1, extended
        else:
            call.row = EpisodeRow(call.row.tokens)  # in a branch, the other row's tokens are context
            call.number = call.episode.rows
            call.episode.rows += 1
        call.ids = (*call.ids, call.id)
        self.episode_of[call.id] = call.episode.name
        if len(self.episode_of) > REMEMBERED_EPISODES:
            self.episode_of.popitem(last=False)
        return call

    def give_up(self, call: Call) -> None:
        """Abandon a call without an answer: another may extend the row, or become its first."""
        if call.extends is not None:
            call.extends.is_extended = False
        elif call.number == call.episode.rows - 1:
            call.episode.rows -= 1
            if not call.episode.rows:
                call.episode.prompt = None

    def earlier(self, session: str | None, digests: list[bytes], messages: Messages) -> Call | None:
        """Find the longest call that these messages extend, if possible one that nothing extends yet."""
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] == "assistant":
                calls = self._answered.get((session or "", digests[count - 1]))
                if calls:
                    return next((each for each in reversed(calls) if not each.is_extended), calls[-1])
        return None


class Sessions(Memory):
    """The sessions of a policy in this process, which continues rows token by token."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def begin(self, messages: Messages, session: str | None, prefix: str = "") -> Call:
        """Begin a call with these normalized messages (`agro.types.conversation`).

        `prefix`: forced start of the answer. Raises `Refused` if the chat template can't render the messages,
        or if they leave no room for an answer.
        """
        digests = digests_of(messages)
        extended = self.earlier(session, digests, messages)
        episode = extended.episode if extended is not None else self.episode(session)
        shown = messages = list(self.encoder.chat.messages(messages))
        opening = None
        if extended is not None:
            conversation = [*extended.messages, *messages[len(extended.messages) :]]
            with suppress(NotShown):  # such as a result of a tool without its call, in some templates
                opening, messages = self.encoder.render(conversation), conversation
        opening = (self.encoder.render(messages) if opening is None else opening) + prefix
        if extended is not None and opening.startswith(extended.text):
            row = deepcopy(extended.row)
            row.observe(self.encoder.following(extended.text, opening[len(extended.text) :]))
        else:
            extended, row = None, EpisodeRow(self.encoder.ids(opening))
        if len(row.tokens) >= self.encoder.context:
            raise InvalidSample(
                "too long",
                f"messages: {len(row.tokens)} tokens leave no room for an answer in the model's context of "
                f"{self.encoder.context}; send fewer",
            )
        call = Call(episode, 0, row, opening, shown, shown, messages, digests, prefix)
        return self.place(call, extended)

    def end(self, call: Call, sampled: Sequence[Token], answer: dict[str, Any]) -> None:
        """Record the answer of a call, so that later ones may extend it. `answer`: see `remember`."""
        prefix, tokens = call.prefix, [token.id for token in sampled]
        versions = np.array([token.version for token in sampled], np.int32)
        call.last_turn = prefix + self.encoder.decode(tokens, call.row.tokens)
        call.row.act(tokens, [token.logp for token in sampled], versions)
        written, end = self.encoder.turn(tokens)
        message = self.encoder.chat.message(prefix + written, call.opening.removesuffix(prefix))
        call.text, call.messages = call.opening + written + end, [*call.messages, message]
        self.remember(call, answer)


def digests_of(messages: Messages) -> list[bytes]:
    """Hash each prefix of a conversation, without call ids and reasoning, which clients drop."""
    digests, digest = [], b""
    for message in messages:
        digest = _digest(digest, message)
        digests.append(digest)
    return digests


def _digest(prefix: bytes, message: dict[str, Any]) -> bytes:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [[function["name"], function["arguments"]] for function in functions]
    content = [message["role"].replace("developer", "system"), message["content"].strip(), calls]
    return blake2b(prefix + json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()


def check_name(name: str) -> str:
    """Return a valid session name. Raises `Refused` for any other text."""
    if 0 < len(name) <= 80 and name.isascii() and name.replace("-", "").replace("_", "").isalnum():
        return name
    raise Refused(f"session: expected up to 80 letters, digits, - and _, got {name[:100]!r}")


class Keeping(NamedTuple):
    """What the door stores, where, and for how long."""

    store: str | None = None
    privacy: Privacy = Privacy(redact=True)
    days: int | None = None


def ledger_of(episode: str) -> str:
    """Return the ledger in which an episode's rows are stored once."""
    return f"{LEDGER}{episode}"


def meta_of(call: Call, last_turn: str) -> dict[str, Any]:
    """Build the `meta` of an answered call's row."""
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
    """Store the row of an answered call, replacing the row that it extends."""
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
    """Store the row of a call that our policy answered."""
    stops = fields["sampling"]["stop"]
    meta = {**meta, **meta_of(call, before_stop(call.last_turn, stops)[0])}
    fields["prompt"] = call.episode.prompt
    sample = call.row.sample(encoder, number=call.number, meta=meta, **fields)
    if not call.answers:  # as in a fresh response, only the tokens have the stop text
        sample = sample.replace(response=before_stop(sample.response, stops)[0])
    put_row(store, call, sample, privacy)


def redacted(sample: Sample, privacy: Privacy, opened: Messages) -> Sample:
    """Redact a sample; if its texts change, drop its tokens.

    A row without tokens whose context isn't the prompt gets the context as its prompt, or it would be lost.
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
    """Return an episode's rows, and their number including deleted ones."""
    rows, start = list[LedgerSample](), 0
    while page := store.experience.in_ledger(ledger_of(name), range(start, start + PAGE)):
        rows, start = rows + page, start + PAGE
    ids = [row.id for row in rows]
    return (list(store.samples(ids=ids)), 1 + rows[-1].number) if rows else ([], 0)


def _episode_of(store: Store, feedback: dict[str, Any]) -> str:
    """Return the name of an episode that this process doesn't remember."""
    name: str = feedback["episode"]
    if not store.experience.in_ledger(ledger_of(name), range(PAGE)):  # not one of our own ids
        for sample in store.samples(ids=store.experience.find_listed(LEDGER, "calls", feedback["name"])[-1:]):
            name = sample.meta["session"]
    return name


def store_feedback(
    store: Store, feedback: dict[str, Any], episode: DoorEpisode, source: str, privacy: Privacy
) -> dict[str, Any]:
    """Store feedback on an episode, named by a call or the session. The last reward counts; all are kept.

    Raises `Problem` if no answer has that name.
    """
    rows, count = _rows(store, episode.name)
    name = feedback["name"]
    if not rows or name not in {episode.name, *(call for sample in rows for call in sample.meta["calls"])}:
        got = f"feedback: expected the id of an answered call, or a session, got {name!r:.80}"
        deleted = ", whose answers were deleted (--keep-days, agro forget)" if count > len(rows) else ""
        raise Problem(410 if deleted else 404, got + deleted)
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
    """Store a correction as a demonstration and as a pair with the answer, replacing an earlier one."""
    sample = next((sample for sample in reversed(rows) if id in sample.meta["calls"]), None)
    if sample is None:
        raise Refused(f"correction: expected the id of one answer, got {id!r:.80}, which names a session")
    turns = sample.meta["continuation"]
    places = [i for i, message in enumerate(turns) if message["role"] == "assistant"]
    answer_index = max(i for i, call in enumerate(sample.meta["calls"]) if call == id)
    position = places[answer_index]
    context = [*sample.meta.get("context", sample.prompt), *turns[:position]]
    answer = turns[position]["content"]
    if answer == correction:
        raise Refused("correction: expected another answer than the model's, got the same")
    # Not by `id`, which another server may give to several answers.
    ledger = f"door-correction:{sample.meta['session']}.{sample.meta['row']}.{answer_index}"
    meta = {"corrects": id, ANSWERED: time.time()}
    store.experience.set_aside(ledger, [0, 1])
    pair = [
        Sample(context, correction, role="expert", source="correction", meta=meta),
        Sample(context, answer, role="log", source=source, meta=meta),
    ]
    winner, loser = store.append(pair, origins=[Origin(ledger, 0, ""), Origin(ledger, 1, "")])
    store.add_pairs([Pair(winner, loser)])


class Recorder:
    """The store behind a door, and the sessions in it.

    One thread owns the store, and what is submitted while it writes becomes one transaction. It deletes
    answers older than the retention period, at its start and once a day.
    """

    def __init__(self, keeping: Keeping, memory: Memory, source: str) -> None:
        """`source`: of samples whose answer doesn't name its model."""
        self.privacy, self.memory, self.source = keeping.privacy, memory, source
        self.days = keeping.days
        self.stored = self.expired = 0  # numbers of stored answers and of deleted rows
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
        """Wait until `work` has stored an answer. Raises `Problem` if it fails, so that nothing is sent."""
        if self._thread is None:
            return
        future = self.submit(work)
        future.add_done_callback(self._count)  # even if the client disconnects meanwhile
        try:
            await asyncio.wrap_future(future)
        except Refused as error:
            message = f"agro: an answer can't be stored, and isn't sent: {error}"
            print(without_secrets(message), file=sys.stderr)
            raise Problem(503, "the answer can't be stored") from None

    def _count(self, future: Future[None]) -> None:
        self.stored += future.exception() is None

    def submit(self, work: Callable[[Store], T]) -> Future[T]:
        """Call `work` with the store in the thread; its writes are durable once the future has its result."""
        assert self._thread is not None
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # it runs even if the waiter cancels
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
        except BaseException as error:  # noqa: BLE001 tokenizers panics too: the submitter waits for it
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
        """Delete answers older than the retention period for good, and report it."""
        store, days = self._store, self.days or 0
        try:
            ids = store.experience.find_below(ANSWERED, time.time() - days * DAY)
            message = f"deleted {len(ids)} rows, {days} days old or more"
            message += "".join(f"; trained on by {run}" for run in store.draws.trained(ids))
            if ids:
                store.imports.forget(ids)
            self.expired += len(ids)
        except Exception as error:  # noqa: BLE001 the pool would swallow it; storing goes on
            message = f"--keep-days: nothing was deleted; the next attempt is in a day: {error}"
        print(without_secrets(f"agro: {message}"), file=sys.stderr)

    async def feedback(self, feedback: dict[str, Any]) -> dict[str, Any]:
        if self._thread is None:
            raise Problem(400, "feedback: expected --store, in which answers are kept")
        name = feedback["name"]
        if name not in self.memory.episodes:  # else a session, whatever ids a server gives
            name = self.memory.episode_of.get(name)
        if name is None:
            name = await asyncio.wrap_future(self.submit(partial(_episode_of, feedback=feedback)))
        episode = self.memory.episodes.get(name, DoorEpisode(name))
        fields: dict[str, Any] = {"episode": episode, "source": self.source, "privacy": self.privacy}
        work = partial(store_feedback, feedback=feedback, **fields)
        return await asyncio.wrap_future(self.submit(work))

    async def open_session(self, name: str | None) -> None:
        """Load the session of a call if an earlier process began it and the store has its rows."""
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
