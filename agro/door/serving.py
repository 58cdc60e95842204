"""`agro serve`: a policy, its batch, and the store behind the door."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any

from agro.config import SamplerConfig
from agro.door.app import Serving
from agro.door.batch import Batch
from agro.door.door import Door
from agro.door.records import Recorder, store_row
from agro.door.sessions import Answered, Sessions
from agro.door.wire import Outcome
from agro.errors import Refused
from agro.logs.privacy import Privacy
from agro.rollout.engines.hf import HF
from agro.rollout.rollout import recorded
from agro.store import Store


@contextmanager
def opened(
    engine: Any, size: int, store: str | None, privacy: Privacy, model: str, seconds: float
) -> Iterator[Serving]:
    """Raises `Refused` for an engine that isn't in this process, and for a store that can't be opened."""
    if not isinstance(engine, HF):
        raise Refused("agro serve samples in this process; for a server of its own use agro proxy --to URL")
    sessions = Sessions(engine.policy.encoder)

    def keep(
        answered: Answered, outcome: Outcome, sampler: SamplerConfig, number: int
    ) -> Future[None] | None:
        meta = {"finish": outcome.finish, "tool_calls": len(outcome.calls)}
        sampling = recorded(sampler, number)

        def work(store: Store) -> None:
            store_row(store, answered, sessions.encoder, privacy, meta, sampling=sampling, source=model)

        return recorder.submit(work)

    with closing(Recorder(store, privacy, sessions, model)) as recorder:
        batch = Batch(engine.policy, size, fused=engine.fused, version=engine.version)
        with closing(batch):
            yield Serving(Door(engine.policy, batch, sessions, keep=keep, seconds=seconds), model, recorder)
