"""Run by torchrun: the gradient of every objective on several ranks and in one process, as JSON on stdout."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from test_step import CASES, batch_for, make_policies
from torch import Tensor
from torch.distributed.tensor import DTensor

from agro import objectives
from agro.config import RunConfig
from agro.models.policy import Policy
from agro.objectives.needs import REF_LOGP
from agro.train.learner import Local
from agro.train.process_group import joined, rank
from agro.train.ranks import Ranks, Shard, serve

CONFIG = RunConfig.of({"policy": {"new": {}}, "train": {"micro_batch": 3, "clip": 1e9}})


class Observed(Shard):
    """A shard whose gradient can be looked at."""

    def flat_gradient(self) -> Tensor:
        return flat(self.policy)


def flat(policy: Policy) -> Tensor:
    parts = []
    for weight in [*policy.weights().values(), *policy.value_weights().values()]:
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        parts.append(full.flatten())
    return torch.cat(parts)


def quiet(text: str) -> None:
    """Nothing is shown."""


def duplicate(policy: Policy) -> Policy:
    out = copy.copy(policy)
    out.model, out.value = copy.deepcopy(policy.model), copy.deepcopy(policy.value)
    return out


def compare(alone: Local, several: Ranks, name: str, options: dict[str, Any]) -> dict[str, Any]:
    resolved = objectives.get(name).resolve(name, options)
    batch = batch_for(name, options, alone.policy, alone.reference)
    if REF_LOGP in objectives.get(name).needs(resolved):
        batch = batch.replace(ref_logp=several.logp(batch, "reference"))
    one = alone.gradient(batch, name, resolved, lambda: None)
    two = several.gradient(batch, name, resolved, lambda: None)
    expected, found = flat(alone.policy), several._all("flat_gradient")
    return {
        "objective": f"{name} {options}",
        "norm": float(expected.norm()),
        "difference": float((found - expected).norm()),
        "loss": abs(one.evaluation.loss - two.evaluation.loss),
        "reported": abs(one.norm - two.norm),
    }


def overflow(alone: Local, several: Ranks, row: int) -> str:
    """A ratio that overflows in one row: what the learner does."""
    batch = batch_for("grpo", {}, alone.policy, alone.reference)
    behavior_logp = batch.behavior_logp.double().clone()
    behavior_logp[row] -= 1e4
    options = objectives.get("grpo").resolve("grpo", {})
    try:
        several.gradient(batch.replace(behavior_logp=behavior_logp), "grpo", options, lambda: None)
    except objectives.NotFinite:
        return "raised"
    return "nothing"


def chosen() -> list[tuple[str, dict[str, Any]]]:
    """Of each objective one case of each set of needs and coupling, which decide what ranks exchange."""
    found = {}
    for name, options in CASES:
        entry = objectives.get(name)
        resolved = entry.resolve(name, options)
        found.setdefault((name, frozenset(entry.needs(resolved)), entry.couples(resolved)), (name, options))
    return list(found.values())


def threads() -> int:
    """Threads of process groups that this process has."""
    names = (file.read_text() for file in Path("/proc/self/task").glob("*/comm"))
    return sum("gloo_runloop" in name for name in names)


def main() -> None:
    policy, reference = make_policies()
    alone = Local(duplicate(policy), duplicate(reference), quiet)
    alone.enter(CONFIG, began=None, resumed=None)
    found: dict[str, Any] = {}
    with joined(torch.device("cpu")) as mesh:
        shard = Observed(policy, reference, quiet, mesh)
        if rank() > 0:
            serve(shard)
            return
        several = Ranks(shard)
        several.enter(CONFIG, began=None, resumed=None)
        found["gradients"] = [compare(alone, several, name, options) for name, options in chosen()]
        found["not_finite"] = [overflow(alone, several, row) for row in (0, -1)]
        found["threads"] = [threads()]
        several.close()
    found["threads"].append(threads())
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
