"""`agro serve`: a policy, its batch, and the store behind the door."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from agro.config import SamplerConfig
from agro.door.app import Serving
from agro.door.batch import Batch
from agro.door.door import Door
from agro.door.records import Unanswered, Writer, load_episode, store_feedback, store_row
from agro.door.sessions import Answered, DoorEpisode
from agro.door.wire import Outcome, Problem
from agro.errors import Refused
from agro.logs.privacy import Privacy
from agro.rollout.engines.hf import HF
from agro.rollout.rollout import recorded
from agro.store import Store
from agro.store.location import location_of


@contextmanager
def opened(
    engine: Any, size: int, store: str | None, privacy: Privacy, model: str, seconds: float
) -> Iterator[Serving]:
    """Raises `Refused` for an engine that isn't in this process, and for a store that can't be opened."""
    if not isinstance(engine, HF):
        raise Refused("agro serve samples in this process; for a server of its own use agro proxy --to URL")
    writer = None if store is None else Writer(location_of(store))
    batch = Batch(engine.policy, size, fused=engine.fused, version=engine.version)
    try:
        yield _serving(batch, writer, privacy, model, seconds)
    finally:
        batch.close()
        if writer is not None:
            writer.close()


def _serving(batch: Batch, writer: Writer | None, privacy: Privacy, model: str, seconds: float) -> Serving:
    encoder, lock = batch.policy.encoder, asyncio.Lock()

    def keep(answered: Answered, outcome: Outcome, sampler: SamplerConfig, number: int) -> Future[Any] | None:
        if writer is None:
            return None
        serving.stored += 1
        meta = {"finish": outcome.finish, "tool_calls": len(outcome.calls)}
        sampling = recorded(sampler, number)

        def work(store: Store) -> None:
            store_row(store, answered, encoder, privacy, meta, sampling=sampling, source=model)

        return writer.submit(work)

    async def feedback(given: dict[str, Any]) -> dict[str, Any]:
        if writer is None:
            raise Problem(400, "feedback: expected --store, in which answers are kept")
        name = given["episode"]
        episode = door.sessions.episodes.get(name, DoorEpisode(name))
        work = partial(store_feedback, feedback=given, episode=episode, source=model, privacy=privacy)
        try:
            return await asyncio.wrap_future(writer.submit(work))
        except Unanswered as error:
            raise Problem(404, str(error)) from None

    async def open_session(name: str) -> None:
        if writer is None or name in door.sessions.episodes:
            return
        async with lock:
            if name not in door.sessions.episodes:
                episode = DoorEpisode(name, is_named=True)
                await asyncio.wrap_future(writer.submit(partial(load_episode, episode=episode)))
                door.sessions.episodes[name] = episode

    door = Door(batch.policy, batch, keep=keep, seconds=seconds)
    serving = Serving(door, model, feedback)
    serving.open_session = open_session
    return serving
