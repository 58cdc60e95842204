"""What happens to the weight π/π_ref on long responses: stories of up to 60, 240 and 480 tokens.

    python reproductions/offline/lengths.py [--out runs/lengths] [--record]

A log of stories by a pretrained model of 260,032 parameters, rewarded by the animals that they name
(reproductions/stories), trains that model by the recipe log, with the weight of the complete response and
with others. On the log's own stories ρ = log π/π_ref is then measured, and how many weights are below 1 %.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.config import PolicyConfig, RunConfig  # noqa: E402
from agro.errors import Refused  # noqa: E402
from agro.models.policy import Policy  # noqa: E402
from agro.store import Store  # noqa: E402
from agro.train.collate import collate  # noqa: E402
from reproductions import harness  # noqa: E402

STORIES = HERE.parent / "stories"
MODEL = harness.SHARED / "models/stories260K"
LENGTHS = (60, 240, 480)
RESPONSES = 16  # to each of the openings
STEPS = 40
PLAIN = {"weight_power": 1.0, "weight_normalize": "none"}
WEIGHTS: dict[str, dict[str, Any]] = {
    "the complete response, the recipe": {},
    "the complete response, the earlier recipe": {**PLAIN, "weight_max": 2.0, "weight_baseline": "lower"},
    "geometric mean of its tokens": {**PLAIN, "weight_level": "mean", "weight_baseline": "mean"},
}


def log_of(length: int, out: Path) -> Path:
    """A store of stories of the start."""
    store = out / f"{length}.db"
    if store.exists():
        return store
    sampled = ("sample", "--model", MODEL, "--prompts", STORIES / "prompts.jsonl", "--out", store)
    steps: tuple[tuple[str | Path, ...], ...] = (
        (*sampled, "-n", str(RESPONSES), "--max-new", str(length)),
        ("score", store, "--reward", f"{STORIES / 'reward.py'}:fauna"),
    )
    for words in steps:
        done = harness.agro(*words)
        if done.returncode:
            raise Refused(done.stderr)
    return store


def configure(length: int, weight: str, store: Path) -> RunConfig:
    changes = [
        f"policy.model={MODEL}",
        f"data.store={store}",
        f"data.eval_prompts={STORIES / 'heldout.jsonl'}",
        f"reward.name={STORIES / 'reward.py'}:fauna",
        "train.lr=2.5e-4",
        f"train.steps={STEPS}",
        "train.groups=4",
        f"evaluate.every={STEPS}",
        "evaluate.n=16",
        f"sampler.max_new={length}",
        "sampler.batch=128",
        "data.spread=false",  # as these runs were recorded
    ]
    given = [f"objective.{key}={json.dumps(value)}" for key, value in WEIGHTS[weight].items()]
    return RunConfig.load(harness.ROOT / "agro/config/recipes/log.toml", [*changes, *given])


@torch.no_grad()
def log_ratios(policy: Policy, reference: Policy, store: Path) -> np.ndarray:
    """ρ of the log's stories."""
    with Store.open(store, read_only=True) as opened:
        samples = list(opened.samples())
    found = []
    for i in range(0, len(samples), 64):
        batch = collate([reference.encode(sample) for sample in samples[i : i + 64]], 0)
        assert batch.tokens is not None
        assert batch.lengths is not None
        given = (batch.tokens, batch.lengths, batch.mask, ["logp"])
        ratio_BT = policy.streams(*given)["logp"] - reference.streams(*given)["logp"]
        found.append(torch.where(batch.mask, ratio_BT, 0.0).sum(1).double().numpy())
    return np.concatenate(found)


def measure(length: int, weight: str, out: Path) -> dict[str, Any]:
    store = log_of(length, out)
    words = "".join(c if c.isalnum() else "-" for c in weight)
    folder = out / f"{length}_{words}"
    metrics = harness.train(configure(length, weight, store), folder)["metrics"]
    models = (Policy.load(PolicyConfig(model=str(path), threads=1)) for path in (folder / "model", MODEL))
    rho_N = log_ratios(*models, store)
    seen = [m for m in metrics if m["eval_reward"] is not None]
    return {
        "length": length,
        "weight": weight,
        "rho": [float(q) for q in np.quantile(rho_N, [0.1, 0.5, 0.9])],
        "below": float((rho_N < np.log(0.01)).mean()),
        "held_out": [m["eval_reward"] for m in seen],
        "held_out_se": [m["eval_reward_se"] for m in seen],
        "kl_ref": seen[-1]["eval_kl_ref"],
    }


def table(found: list[Mapping[str, Any]]) -> str:
    lines = []
    for run in found:
        ends = [harness.between(*each) for each in zip(run["held_out"], run["held_out_se"], strict=True)]
        rho = ", ".join(f"{q:.1f}" for q in run["rho"])
        figures = [f"{run['kl_ref']:.1f}", rho, f"{run['below']:.0%}"]
        lines.append([str(run["length"]), run["weight"], *ends, *figures])
    head = ["tokens", "weight", "held-out reward before", "after", "KL", "ρ: 10, 50, 90 %", "below 1 %"]
    return harness.markdown(head, lines)


def main() -> None:
    args = harness.parser(__doc__, "runs/lengths", record=harness.RECORD).parse_args()
    harness.need(MODEL)
    args.out.mkdir(parents=True, exist_ok=True)
    found = [measure(length, weight, args.out) for length in LENGTHS for weight in WEIGHTS]
    harness.keep_json(args, HERE, "lengths.json", {"machine": harness.machine(), "runs": found})
    print(table(found))


if __name__ == "__main__":
    harness.guarded(main)
