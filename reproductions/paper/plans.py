"""What runs train on: fresh samples, their own earlier ones, those of old weights, logs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from agro.objectives.needs import BEHAVIOR_LOGP, FRESH, REWARD, Need
from reproductions.arena import task
from reproductions.arena.kinds import LOGGED, Kind
from reproductions.arena.task import GROUPS, OTHER, START, Files, N, Size
from reproductions.arena.world import Logged, World

MIXTURE = "a mixture"
CARELESS, CAREFUL = "careless", "careful"  # starts: right 3 times in 10, and 2 times in 3
SIZES = {CARELESS: Size(logged=1024), CAREFUL: Size(logged=64, slip=0.08)}
SMALL = Size(warm_up=60, taught=2000, prompts=16, logged=32, validation=16, test=16)
GROUPED = 256  # prompts of the logs with four responses: as many responses as 1,024 prompts with one
HALF = GROUPS // 2  # prompts of an update where responses are sampled
STORED = 128  # of its own groups that a run keeps, the newest ones


@dataclass(frozen=True)
class Plan(Kind):
    """Data. `replay` without a `log`: that share of the groups is the run's own earlier ones."""

    updates: int = 192
    every: int = 32  # updates from one measurement to the next
    sync_every: int = 1  # updates for which the sampler keeps its weights, as `source.sync_every`
    start: str = CARELESS

    def version(self, update: int) -> int:
        return update - update % self.sync_every

    def of_rate(self, update: int, updates: int) -> float:
        """Constant: what ruins a policy isn't hidden by a rate that falls."""
        return 1.0

    @property
    def provided(self) -> frozenset[Need]:
        """What its samples have. Nobody knows who wrote a mixture."""
        if self.replay == 0 and self.sync_every == 1:
            return LOGGED | {FRESH}
        return LOGGED - {BEHAVIOR_LOGP} if MIXTURE in self.log else LOGGED

    @property
    def fresh_an_update(self) -> int:
        """Responses that are generated for an update."""
        return (self.groups - round(self.groups * self.replay)) * self.n


def _of_log(log: str, n: int) -> Plan:
    """As many responses an update whatever n."""
    about = f"a log of {log}, {n} a prompt"
    return Plan(f"{log}, n = {n}", about, replay=1.0, log=f"{log}, {n}", groups=GROUPS * N // n, n=n)


LONG = f"{START}, n = 4, long"
LAGS = (1, 10, 100, 400)
SHARES = (0.0, 0.5, 0.75)
PLANS = {
    plan.name: plan
    for plan in (
        *(_of_log(log, n) for n in (4, 1) for log in (START, OTHER, MIXTURE)),
        replace(_of_log(START, 4), name=LONG, updates=768, every=96),
        *(
            Plan(
                f"replay {share:g}",
                f"{share:.0%} of the groups are the run's earlier ones",
                replay=share,
                groups=HALF,
                updates=240,
                every=40,
            )
            for share in SHARES
        ),
        *(
            Plan(
                f"sync {lag}",
                f"the sampler has new weights every {lag} updates",
                sync_every=lag,
                groups=HALF,
                updates=800,
                every=200,
            )
            for lag in LAGS
        ),
        Plan(f"fresh, {CARELESS}", "fresh samples; the start is right 3 times in 10", groups=HALF),
        Plan(
            f"fresh, {CAREFUL}", "fresh samples; the start is right 2 times in 3", groups=HALF, start=CAREFUL
        ),
    )
}


def prepare(out: Path, start: str, *, small: bool) -> Files:
    """The models, prompts and logs of a start, made once."""
    return task.prepare(out / start, SMALL if small else SIZES[start])


@cache
def load(files: Files) -> World:
    """The arena's world with the experiments' logs: of one model or of a mixture, four responses or one."""
    torch.set_num_threads(1)
    world = World(files)
    first, second = (_sorted(world.logs[name]) for name in (START, OTHER))
    for name, log in ((START, first), (OTHER, second), (MIXTURE, _mixture(first, second))):
        of_prompt = log.groups({REWARD})
        world.logs[f"{name}, 4"] = log.part([i for group in of_prompt[:GROUPED] for i in group])
        world.logs[f"{name}, 1"] = log.part([group[0] for group in of_prompt])
    return world


def _sorted(log: Logged) -> Logged:
    """By prompt, so that two logs of the same prompts have the same order."""
    return log.part(sorted(range(len(log.names)), key=lambda i: log.names[i]))


def _mixture(first: Logged, second: Logged) -> Logged:
    """Each response is of either log, by a coin; nobody recorded which, nor the log-probs."""
    assert first.names == second.names
    both, count = first.followed_by(second), len(first.names)
    coin = random.Random("mixture")
    mixed = both.part([i + count * coin.getrandbits(1) for i in range(count)])
    return mixed._replace(behavior=torch.full_like(mixed.behavior, torch.nan))
