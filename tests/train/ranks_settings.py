"""Run on several ranks: updates of objectives × settings, beside one process, as JSON on stdout.

All cases share one start, since processes take seconds to begin. Weights are float64, but where the setting
is `mixed`, whose products are bfloat16 and sums float32.
"""

from __future__ import annotations

import json
import sys
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from test_step import CASES, batch_for
from torch import Tensor
from torch.distributed.tensor import DTensor

from agro import objectives
from agro.config import RunConfig
from agro.models.policy import Policy
from agro.models.reference import load_reference
from agro.objectives.needs import REF_LOGP
from agro.train import step as train_step
from agro.train.learner import Local
from agro.train.process_group import joined, rank
from agro.train.ranks import Ranks, Shard, serve

SPEC = {"alphabet": "abcdef", "hidden": 16, "layers": 2, "heads": 2, "context": 64}
LORA = {"policy.lora": {"rank": 2, "targets": ["all-linear"]}}
SINGLE: dict[str, dict[str, Any]] = {
    "checkpointing": {"train.gradient_checkpointing": True},
    "average": {"train.weights_average": 0.9},
    "offload": {"train.offload": ["activations", "optimizer"]},
    "ema": {"policy.reference": "ema", "policy.reference_decay": 0.5},
}
ALL = {key: value for values in SINGLE.values() for key, value in values.items()}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "all": ALL,
    "adapter and all": {**LORA, **ALL},
    "mixed": {"policy.dtype": "mixed"},
    "adapter": LORA,
    **SINGLE,
    "periodic": {"policy.reference": "periodic", "policy.reference_every": 2},
}
TOGETHER = ("none", "all", "adapter and all", "mixed")  # of the sample
Case = tuple[str, dict[str, Any]]


def config_of(setting: str, base: Path) -> RunConfig:
    # With a larger eps than usual, a weight moves by a smooth function of its gradient.
    values: dict[str, Any] = {
        "policy": {"model": str(base), "temperature": 1.3},
        "train": {"micro_batch": 3, "lr": 1e-3, "adam_eps": 1e-3, "clip": 0.5},
    }
    for key, value in SETTINGS[setting].items():
        section, name = key.split(".")
        values[section][name] = value
    return RunConfig.of(values)


def make(config: RunConfig) -> tuple[Policy, Policy]:
    """A policy and its reference, whose weights differ, with a value head; the same each time."""
    policy = Policy.load(config.policy, seed=0)
    generator = torch.Generator().manual_seed(5)

    def disturb() -> None:
        for weight in policy.trained().values():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.data += 0.1 * noise.to(weight)
        if policy.masters is not None:
            policy.masters.round()

    if policy.masters is None:
        policy.model.double()
    disturb()
    reference = load_reference(config.policy, policy)
    disturb()
    policy.add_value()
    assert policy.value is not None
    torch.nn.init.normal_(policy.value.linear.weight, generator=generator)
    policy.value.double()
    return policy, reference


def gathered(learner: Local) -> Tensor:
    """All weights that training changes, and their average."""
    return flat([*changing(learner), *({} if learner.average is None else learner.average.weights).values()])


def begin_again(learner: Local) -> None:
    """Give a learner the weights that it had the first time: differences of one case stay its own."""
    if not hasattr(learner, "first"):
        learner.first = [weight.detach().clone() for weight in changing(learner)]  # type: ignore[attr-defined]
    for weight, value in zip(changing(learner), learner.first, strict=True):  # type: ignore[attr-defined]
        weight.detach().copy_(value)
    if learner.policy.masters is not None:
        learner.policy.masters.round()


def gradients(learner: Local) -> Tensor:
    weights = [*learner.policy.trained().values(), *learner.policy.value_weights().values()]
    return flat([torch.zeros_like(w) if w.grad is None else w.grad for w in weights])


def changing(learner: Local) -> list[Tensor]:
    reference = learner._moving_reference() or {}
    parts = (learner.policy.trained(), learner.policy.value_weights(), reference)
    return [weight for part in parts for weight in part.values()]


def flat(tensors: list[Tensor]) -> Tensor:
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([t.detach().double().flatten() for t in full])


def quiet(*_: object) -> None:
    """Nothing is shown, and nothing stops a gradient."""


class Observed(Shard):
    """A shard that can be looked at: rank 0 asks all of them by these names."""

    # The functions above as methods: the right side is the module's.
    gathered, gradients, begin_again = gathered, gradients, begin_again


def compare(alone: Local, several: Ranks, setting: str, case: Case, config: RunConfig) -> dict[str, Any]:
    """Two updates on one batch; what differs then."""
    name, options = case
    resolved = objectives.get(name).resolve(name, options)
    both = (alone, several)
    for learner in both:
        learner.enter(config, began=None, resumed=None)
    begin_again(alone)
    several._all("begin_again")
    assert alone.reference is not None
    batch = batch_for(name, options, alone.policy, alone.reference)
    row = {"objective": f"{name} {options}", "setting": setting, "reference": 0.0, "promised": 0.0}
    if REF_LOGP in objectives.get(name).needs(resolved):
        expected, found = (learner.logp(batch, "reference") for learner in both)
        row["reference"] = float((found - expected).abs().max())
        batch = batch.replace(ref_logp=expected)
    # Where the setting is `mixed`, the second products are of weights that may be rounded the other way.
    for step in (1,) if setting == "mixed" else (1, 2):
        one, two = (learner.gradient(batch, name, resolved, quiet) for learner in both)
        if step == 1:
            row["norm"], row["reported"] = one.norm, abs(one.norm - two.norm)
            row["gradient"] = float((several._all("gradients") - gradients(alone)).abs().max())
            row["loss"] = abs(one.evaluation.loss - two.evaluation.loss)
        falls = []
        for learner in both:
            before = learner.along_gradient()
            learner.move(1e-3)
            falls.append(float(before - learner.along_gradient()))
            learner.follow(step)
        assert falls[0] != 0
        row["promised"] = max(row["promised"], abs(falls[1] - falls[0]))
    return row | {"weights": float((several._all("gathered") - gathered(alone)).abs().max())}


def averaged(alone: Local, several: Ranks) -> list[float]:
    """How far log-probs are apart while the average is in place and after that, and the copy's weights."""
    assert alone.reference is not None
    batch = batch_for("grpo", {}, alone.policy, alone.reference)

    def differences() -> list[float]:
        several.show()
        assert several.shard.copy is not None
        mine, copied = (flat(list(p.weights().values())) for p in (alone.policy, several.shard.copy))
        logp = alone.logp(batch) - several.logp(batch)
        return [float(logp.abs().max()), float((mine - copied).abs().max())]

    with alone.averaged(), several.averaged():
        during = differences()
    return during + differences()


def overflow(alone: Local, several: Ranks, row: int) -> str:
    """A ratio that overflows in one row: what the learner does."""
    assert alone.reference is not None
    batch = batch_for("grpo", {}, alone.policy, alone.reference)
    assert batch.behavior_logp is not None
    behavior_logp = batch.behavior_logp.double().clone()
    behavior_logp[row] -= 1e4
    options = objectives.get("grpo").resolve("grpo", {})
    try:
        several.gradient(batch.replace(behavior_logp=behavior_logp), "grpo", options, quiet)
    except objectives.NotFinite:
        return "raised"
    return "nothing"


def chosen() -> list[Case]:
    """Of each objective one case of each set of needs and coupling, which decide what ranks exchange."""
    found = {}
    for name, options in CASES:
        entry = objectives.get(name)
        resolved = entry.resolve(name, options)
        found.setdefault((name, frozenset(entry.needs(resolved)), entry.couples(resolved)), (name, options))
    return list(found.values())


def pairs(complete: bool) -> dict[str, list[Case]]:
    """The cases of each setting: of `TOGETHER` all; or the first of each objective, each with one, in turn.

    A setting also has the first case of each set of needs that none of its own has.
    """
    cases = chosen()
    taken: dict[str, list[Case]] = {setting: [] for setting in (SETTINGS if complete else TOGETHER)}
    first = {name: (name, options) for name, options in reversed(cases)}
    for case, setting in zip(sorted(first.values(), key=cases.index), cycle(TOGETHER)):
        taken[setting].append(case)
    if complete:
        taken |= {setting: list(cases) for setting in TOGETHER}
    for setting, case in product(taken, cases):
        if needs(case) not in map(needs, taken[setting]):
            taken[setting].append(case)
    return taken


def needs(case: Case) -> frozenset[str]:
    """What of the model an objective reads: the streams that ranks exchange, and the reference."""
    name, options = case
    entry = objectives.get(name)
    names = map(str, entry.needs(entry.resolve(name, options)))
    return frozenset(n for n in names if n in ("kl", "entropy", "value", "prefix_value", "ref_logp"))


def threads() -> int:
    """Threads of process groups that this process has."""
    names = (file.read_text() for file in Path("/proc/self/task").glob("*/comm"))
    return sum("gloo_runloop" in name for name in names)


def main(base: Path, complete: bool) -> None:
    train_step.SMALL = 0  # activations of this model are offloaded too
    found: dict[str, Any] = {"cases": [], "averaged": {}}
    with joined(torch.device("cpu")) as mesh:
        for setting, cases in pairs(complete).items():
            config = config_of(setting, base)
            shard = Observed(*make(config), quiet, mesh)
            if rank() > 0:
                serve(shard)
                continue
            several, alone = Ranks(shard), Local(*make(config), quiet)
            found["cases"] += [compare(alone, several, setting, case, config) for case in cases]
            found["averaged"][setting] = averaged(alone, several)
            if setting == "none":
                found["not_finite"] = [overflow(alone, several, row) for row in (0, -1)]
            several.close()
        found["threads"] = [threads()]
    if rank() == 0:
        found["threads"].append(threads())
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[2]), complete=sys.argv[1] == "complete")
