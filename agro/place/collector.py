"""The collector of `agro collect RUN`: it samples and scores for a run that another process trains.

See `agro.train.source` for the trainer's side, and `agro.train.publications` for the state that both share.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from agro.config import RunConfig, check_texts
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.published import load_published
from agro.place.placement import PlacedRecord
from agro.rewards import load_reward
from agro.rollout import Activity, Task, collect
from agro.rollout.engines import Engine, NoServer
from agro.rollout.rollout import EpisodeReward, load_engine, load_rollout
from agro.store import Store
from agro.store.location import Location, located, url_of
from agro.store.sample_rows import ledger_of
from agro.store.shared import LocalFolder, leased, shared_runs, trainer_of
from agro.train.collate import recording
from agro.train.inputs import of_scoring
from agro.train.phases import Phase, derive
from agro.train.publications import ProcessReport, Publications, PublishedWeights
from agro.train.source import POLL_SECONDS, PromptOrder, ahead

REPORT_SECONDS = 1.0  # between status reports
IDLE_SECONDS = 1.0  # an idle collector asks for work this often, and whenever a step is published
BEGIN_SECONDS = 600.0  # wait for a trainer to begin
T = TypeVar("T")


class Collector:
    """Samples and scores for a run that another process trains."""

    def __init__(
        self,
        publications: Publications,
        store: Location,
        activity: Activity,
        name: str | None = None,
    ) -> None:
        """`name`: of this collector within the run. A collector restarted under a dead one's name takes over
        its claims.

        Raises `Refused` unless the run has source.kind = "elsewhere".
        """
        self.publications, self.store, self.activity = publications, store, activity
        record = publications.begun()
        self.config = RunConfig.of_record(record, f"{publications}: config.json")
        check_texts(self.config.model_dump())
        self.id = str(record["run"])
        if self.config.source.kind != "elsewhere":
            raise Refused(
                f"{publications}: expected a run with source.kind = elsewhere, got "
                f"{self.config.source.kind}, which samples in the trainer's process"
            )
        for key, digest in of_scoring(self.config, {}).items():  # of rewards and environments
            if record["inputs"].get(key, digest) != digest:
                raise Refused(
                    f"{publications}: {key} has other content here than when the run began. What to do: put "
                    "the same file here, or start a new run; --resume "
                    f"--accept {key} on the trainer's host makes the run continue with this content"
                )
        self.name = name or uuid.uuid4().hex
        self.process = ProcessReport(self.name, "collector", responses=0)
        self._reported = -math.inf

    @classmethod
    def of(cls, run: str, activity: Activity, name: str | None = None) -> Collector:
        """`run`: a run's folder, or the URL of its store, whose trainer may begin later."""
        url = url_of(run)
        if url is not None:
            with Store.open(url) as store:

                def working() -> str | None:
                    """Return the store's running run, the latest of several."""
                    runs = shared_runs(url)
                    alive = set(store.leases.alive([trainer_of(run) for run in runs]))
                    return next((run for run in reversed(runs) if trainer_of(run) in alive), None)

                at_work = _until(working, BEGIN_SECONDS, activity, _no_trainer(url))
            return cls(Publications.of(url, at_work, Path()), url, activity, name)
        folder = Path(run)
        publications = Publications(LocalFolder(folder))
        if PlacedRecord.read(folder) is None:
            record = publications.begun()
        else:  # its trainer starts at the same time
            record = _until(publications.record, BEGIN_SECONDS, activity, _no_trainer(publications))
        location = located(record["data"]["store"], folder)
        publications = Publications.of(location, str(record["run"]), folder)
        # A trainer publishes this shortly after it starts.
        record = _until(publications.record, BEGIN_SECONDS, activity, _no_trainer(publications))
        return cls(publications.told(record), location, activity, name)

    def serve(self) -> int:
        """Collect until the run ends, and return the number of responses."""
        policy, published = self._load()
        prompts = self.publications.prompts()
        reward = EpisodeReward(load_reward(self.config.reward))
        lease = leased(self.store, self.name, self.config.source.lease_seconds)
        with closing(reward), Store.open(self.store, create=False) as store, lease:
            engine = load_engine(self.config.engine, policy, self.activity.say, published.version)
            published = self._renew(engine)
            seconds = self.config.source.wait_seconds  # maximal absence of the trainer
            deadline = time.monotonic() + seconds
            phases = {phase.name: phase for phase in Phase.all(self.config)}
            while not published.ended:
                config = recording(list(phases.values()), phases[published.phase])
                numbers = self._claim(store, config, published.step)
                if numbers:
                    order = PromptOrder(prompts, derive(config.train.seed, "prompts", published.phase))
                    claimed = [order.take(number, 1)[0] for number in numbers]
                    task = Task(
                        run=self.id,
                        seed=derive(config.train.seed, "collect"),
                        numbers=tuple(numbers),
                        ledger=ledger_of(self.id),
                        max_failed=config.reward.max_failed,
                    )
                    rollout = load_rollout(policy.encoder, engine, config.environment)
                    with suppress(NoServer):  # keep the claims; `_renew` waits for a server
                        added = collect(rollout, claimed, config.sampler, store, task, reward, self.activity)
                        store.requests.finish(self.id, numbers)
                        count, version = len(added.ids), published.version
                        message = f"{count} responses to {len(numbers)} prompts at version {version}"
                        self.activity.say(message)
                        self.process = replace(self.process, responses=(self.process.responses or 0) + count)
                if numbers or store.leases.alive([trainer_of(self.id)]):
                    deadline = time.monotonic() + seconds
                elif time.monotonic() > deadline:
                    raise Refused(
                        f"source.wait_seconds: the trainer hasn't run for {seconds:g} s. What to do: resume "
                        "it (agro train … --resume), then run agro collect again"
                    )
                if not numbers:
                    self.publications.wait(published, IDLE_SECONDS)
                self.activity.check()
                published = self._renew(engine)
                self._report(published, engine)
        self.publications.withdraw(self.process)
        return self.process.responses or 0

    def _report(self, published: PublishedWeights, engine: Engine) -> None:
        """Publish a status report from time to time."""
        clock = time.monotonic()
        if clock - self._reported >= REPORT_SECONDS:
            servers = engine.measured
            error, dropped = servers.get("push_error"), tuple(servers.get("servers_dropped", ()))
            report = replace(self.process, version=published.version, push_error=error, dropped=dropped)
            self.publications.report(report)
            self._reported = clock

    def _claim(self, store: Store, config: RunConfig, trained: int) -> list[int]:
        """Claim prompts to sample: as many as the engine decodes at once and training allows."""
        at_once = max(1, config.sampler.batch // config.sampler.n)
        collectors = store.requests.collectors(self.id)
        alive = set(store.leases.alive(collectors))
        groups, room = config.train.groups, ahead(config)
        if config.data.max_age is None and len(store.requests.ready(self.id, groups)) < groups:
            room += store.requests.backlog(self.id, trained)  # slow requests must not block others
        return store.requests.claim(
            self.id,
            self.name,
            maximum=min(at_once, groups),
            ahead=room,
            trained=trained,
            dead=[name for name in collectors if name not in alive],
        )

    def _load(self) -> tuple[Policy, PublishedWeights]:
        """Load the weights that the trainer publishes."""
        seconds = self.config.source.wait_seconds
        refusal = Refused(
            f"source.wait_seconds: waited {seconds:g} s for the weights that the trainer publishes in "
            f"{self.publications}. What to do: start it (agro train … --out RUN), then run agro collect "
            "again"
        )
        published = _until(self.publications.newest, seconds, self.activity, refusal)
        while True:
            try:
                with self.publications.weights(published) as folder:
                    return load_published(self.config.policy, folder), published
            except (Refused, OSError) as error:
                published = self._newer(published, error)

    def _newer(self, published: PublishedWeights, error: Exception) -> PublishedWeights:
        """Find weights that replaced `published` while it was being read, or the same ones, if a database
        lost them and they were published again. Raises `error` if there are none."""
        in_database = url_of(self.store) is not None

        def find() -> PublishedWeights | None:
            newest = self.publications.newest()
            if newest is None or newest.version != published.version:
                return newest
            return newest if in_database and self.publications.has(newest) else None

        seconds = self.config.source.wait_seconds if in_database else 0.0
        return _until(find, seconds, self.activity, error)

    def _renew(self, engine: Engine) -> PublishedWeights:
        """Load newer weights if there are any, also into servers that were unreachable."""
        deadline = time.monotonic() + self.config.source.wait_seconds
        newest = self.publications.newest()
        assert newest is not None
        while newest.version != engine.version and not newest.ended:
            try:
                with self.publications.weights(newest) as folder:
                    engine.load(folder, newest.version)
            except NoServer:
                if time.monotonic() > deadline:
                    raise
                self.activity.check()
                time.sleep(POLL_SECONDS)
            except (Refused, OSError) as error:
                newest = self._newer(newest, error)
        return newest


def _no_trainer(location: object) -> Refused:
    return Refused(
        f"{location}: waited {BEGIN_SECONDS:g} s for a trainer with source.kind = elsewhere, and none began. "
        "What to do: start it (agro train …), then run agro collect again"
    )


def _until(find: Callable[[], T | None], seconds: float, activity: Activity, error: Exception) -> T:
    """Poll `find` for at most `seconds`. Raises `error` if it finds nothing."""
    deadline = time.monotonic() + seconds
    while (result := find()) is None:
        if time.monotonic() > deadline:
            raise error
        activity.check()
        time.sleep(POLL_SECONDS)
    return result
