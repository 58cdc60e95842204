"""What the door stores: the rows of episodes, and feedback, each on the disk before it is answered."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from agro.door.sessions import Answered, DoorEpisode, Memory
from agro.door.wire import Problem
from agro.errors import Refused, without_secrets
from agro.logs.privacy import Privacy
from agro.models.encoding import Encoder
from agro.rollout.rollout import before_stop
from agro.store import Origin, Pair, Store
from agro.store.location import location_of
from agro.store.samples import LedgerSample
from agro.types import Messages, Sample, thought_in

PAGE = 4096  # rows of an episode that are looked up at once
DAY = 86400.0  # seconds
THUMBS = {"up": 1.0, "down": 0.0}
ANSWERED = "answered"  # in `meta`: when, in seconds since 1970
T = TypeVar("T")


class Keeping(NamedTuple):
    """What is stored, where and how long."""

    store: str | None = None
    privacy: Privacy = Privacy(redact=True)
    days: int | None = None


def ledger_of(episode: str) -> str:
    """The name under which the rows of an episode are stored once."""
    return f"door:{episode}"


def meta_of(answered: Answered, last_turn: str) -> dict[str, Any]:
    """The `meta` of the row of an answered call."""
    call = answered.call
    meta = {
        ANSWERED: time.time(),
        "session": call.episode.name,
        "row": call.number,
        "calls": list(call.ids),
        "turns": call.answers + 1,
        "last_turn": last_turn,
        "continuation": answered.shown[len(call.opened) :],
    }
    if call.number:
        meta["context"] = call.opened
    if thought := thought_in(call.opening, last_turn):
        meta["thought"] = thought
    if call.episode.feedback:
        meta["feedback"] = call.episode.feedback
    return meta


def put_row(store: Store, answered: Answered, sample: Sample, privacy: Privacy) -> None:
    """Add the row of an answered call, in place of the row that it extends."""
    episode, number = answered.call.episode, answered.call.number
    ledger = ledger_of(episode.name)
    if answered.call.extends is not None:
        store.experience.set_aside(ledger, [number])
    sample = sample.replace(reward=episode.reward, episode=episode.name)
    clean = redacted(sample, privacy, answered.call.opened)
    store.append([clean], origins=[Origin(ledger, number, "")])


def store_row(
    store: Store, answered: Answered, encoder: Encoder, privacy: Privacy, meta: dict[str, Any], **fields: Any
) -> None:
    """The row of an answered call of a policy of ours."""
    call, stops = answered.call, fields["sampling"]["stop"]
    meta = {**meta, **meta_of(answered, before_stop(answered.last_turn, stops)[0])}
    fields["prompt"] = call.episode.prompt
    sample = answered.row.sample(encoder, number=call.number, meta=meta, **fields)
    if not call.answers:  # as of a fresh response, whose stop text is among its tokens alone
        sample = sample.replace(response=before_stop(sample.response, stops)[0])
    put_row(store, answered, sample, privacy)


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
        except BaseException as error:  # noqa: BLE001 who submitted it gets it; the others are written alone
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
        except Exception as error:  # noqa: BLE001 such as others that have the file: answers are stored all the same
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
