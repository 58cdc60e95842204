"""What runs train on, fresh or stored, and by which methods."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from agro import objectives
from agro.config.recipes import recipes
from agro.objectives.needs import BEHAVIOR_LOGP, FRESH, GROUPS, REWARD, TRIPLES, Need, ordered
from reproductions.paper import task
from reproductions.paper.task import OTHER, START, N, Size
from reproductions.paper.world import Rows, World

MIXTURE = "a mixture"
CARELESS, CAREFUL = "careless", "careful"  # starts: right 3 times in 10, and 2 times in 3
SIZES = {CARELESS: Size(logged=1024), CAREFUL: Size(logged=64, slip=0.08)}
SMALL = Size(warm_up=60, taught=2000, prompts=16, logged=32, validation=16, test=16)
GROUPED = 256  # prompts of the logs with four responses: as many responses as 1,024 prompts with one
ASKED, HALF = 8, 4  # prompts of an update, and where responses are sampled
STORED = 128  # of its own groups that a run keeps, the newest ones
LOGGED = frozenset({REWARD, BEHAVIOR_LOGP, GROUPS, TRIPLES})  # what the samples have
BETAS = (0.1, 0.01)  # of objectives whose β has no default; the first one counts as it


@dataclass(frozen=True)
class Plan:
    """Data. `replay` without a `log`: that share of the groups is the run's own earlier ones."""

    name: str
    replay: float = 0.0  # share of the groups that aren't fresh
    log: str = ""  # whose, and how many responses a prompt
    groups: int = HALF  # prompts of an update
    n: int = N  # responses to each
    updates: int = 192
    every: int = 32  # updates from one measurement to the next
    sync_every: int = 1  # updates for which the sampler keeps its weights, as `source.sync_every`
    start: str = CARELESS

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
    return Plan(f"{log}, n = {n}", replay=1.0, log=f"{log}, {n}", groups=ASKED * N // n, n=n)


LONG = f"{START}, n = 4, long"
LAGS = (1, 10, 100, 400)
SHARES = (0.0, 0.5, 0.75)
PLANS = {
    plan.name: plan
    for plan in (
        *(_of_log(log, n) for n in (4, 1) for log in (START, OTHER, MIXTURE)),
        replace(_of_log(START, 4), name=LONG, updates=768, every=96),
        *(Plan(f"replay {share:g}", share, updates=240, every=40) for share in SHARES),
        *(Plan(f"sync {lag}", sync_every=lag, updates=800, every=200) for lag in LAGS),
        Plan(f"fresh, {CARELESS}"),
        Plan(f"fresh, {CAREFUL}", start=CAREFUL),
    )
}


@cache
def load(out: Path, start: str, small: bool) -> World:
    """The models, prompts and logs of a start, made once: of one model or of a mixture, four responses a
    prompt or one."""
    torch.set_num_threads(1)
    size = SMALL if small else SIZES[start]
    world = World(task.prepare(out / start / "task", size), size)
    first, second = (_sorted(world.logs[name]) for name in (START, OTHER))
    for name, log in ((START, first), (OTHER, second), (MIXTURE, _mixture(first, second))):
        of_prompt = log.groups({REWARD})
        world.logs[f"{name}, 4"] = log.part([i for group in of_prompt[:GROUPED] for i in group])
        world.logs[f"{name}, 1"] = log.part([group[0] for group in of_prompt])
    return world


def _sorted(log: Rows) -> Rows:
    """By prompt, so that two logs of the same prompts have the same order."""
    return log.part(sorted(range(len(log.names)), key=lambda i: log.names[i]))


def _mixture(first: Rows, second: Rows) -> Rows:
    """Each response is of either log, by a coin; nobody recorded which, nor the log-probs."""
    assert first.names == second.names
    both, count = first.followed_by(second), len(first.names)
    coin = random.Random("mixture")
    mixed = both.part([i + count * coin.getrandbits(1) for i in range(count)])
    return mixed._replace(behavior=torch.full_like(mixed.behavior, torch.nan))


@dataclass(frozen=True)
class Method:
    """An objective with options; `betas`: those that are tried, the first one with each learning rate."""

    name: str
    objective: str
    look: int  # the style of its line
    options: Mapping[str, Any] = field(default_factory=dict)
    betas: tuple[float | None, ...] = BETAS

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> Method:
        """Of methods.toml. The β of the recipe `log` isn't taken: it is of the grid, as others'."""
        values = {"options": {}, **given}
        if values.pop("of_recipe", False):
            options = tomllib.loads(recipes()["log"].text)["objective"]
            values["options"] = {key: value for key, value in options.items() if key.startswith("weight")}
        if "betas" in values:
            values["betas"] = tuple(None if beta == "default" else beta for beta in values["betas"])
        return cls(name, **values)

    def options_for(self, n: int, beta: float | None) -> dict[str, Any]:
        """With one response a prompt a group is the update, as in the recipe `feedback`."""
        options = dict(self.options) | ({} if beta is None else {"beta": beta})
        if n == 1 and "singletons" in objectives.get(self.objective).defaults():
            options["singletons"] = "pool"
        return options

    def obstacle(self, plan: Plan) -> str:
        """Why it can't train on these data; "" where it can."""
        needed = objectives.get(self.objective).needed(self.options_for(plan.n, self.betas[0]))
        provided = {str(need) for need in plan.provided}
        missing = [
            need.what for need in ordered(needed) if need.provider == "record" and need not in provided
        ]
        return f"needs {missing[0]}" if missing else ""


AGRO, WEIGHTED, BY_SAMPLER = "AGRO", "AGRO, weighted", "AGRO, weighted by the sampler"
ON_POLICY, KL_PG, UNREGULARIZED = "on-policy AGRO", "KL-PG", "KL-PG, β = 0"
METHODS = {
    name: Method.of(name, given)
    for name, given in tomllib.loads(Path(__file__).with_name("methods.toml").read_text("utf-8")).items()
}
