"""Whose gradient it is: the norm of the part of right and of wrong responses, at the start and after a run.

    python reproductions/offline/gradients.py RUN_FOLDER [RUN_FOLDER …] [--groups 64]

RUN_FOLDER is one of run.py's. The norms are of the gradient of agro in the weights, at β = 0.01, with and
without the weight min(2, π/π_ref), on the first groups of the log.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro import objectives  # noqa: E402
from agro.config import PolicyConfig  # noqa: E402
from agro.models.policy import Policy  # noqa: E402
from agro.store import Store  # noqa: E402
from agro.train.collate import collate  # noqa: E402
from agro.types import Batch  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.offline import logs  # noqa: E402

WEIGHTS = {"1": {}, "min(2, π/π_ref)": {"weight": "reference", "weight_max": 2.0}}


def load(folder: Path) -> Policy:
    return Policy.load(PolicyConfig(model=str(folder), threads=1))


def batch_of(store: Path, reference: Policy, groups: int) -> Batch:
    """The first groups of the log, with the reference's log-probs."""
    with Store.open(store, read_only=True) as opened:
        found = [
            list(samples) for _, samples in islice(groupby(opened.samples(), lambda s: s.prompt_id), groups)
        ]
    batch = collate([reference.encode(sample) for samples in found for sample in samples], 0)
    with torch.no_grad():
        return batch.replace(ref_logp=logp_of(reference, batch).double())


def logp_of(policy: Policy, batch: Batch) -> Tensor:
    assert batch.tokens is not None
    assert batch.lengths is not None
    return policy.streams(batch.tokens, batch.lengths, batch.mask, ["logp"])["logp"]


def norms(policy: Policy, batch: Batch, options: dict[str, object]) -> dict[str, float]:
    """Of the gradient in the weights: the part of responses with reward 1, and that of the others."""
    logp_BT = logp_of(policy, batch)
    of_logp_BT = objectives.evaluate("agro", logp_BT.detach().double(), batch, beta=0.01, **options).grad
    out = {}
    for name, rows_B in (("right", batch.reward >= 1), ("wrong", batch.reward < 1)):
        part_BT = torch.where(rows_B[:, None] & batch.mask, of_logp_BT, 0.0).to(logp_BT.dtype)
        gradients = torch.autograd.grad(
            (part_BT * logp_BT).sum(), list(policy.weights().values()), retain_graph=True
        )
        out[name] = float(torch.cat([g.flatten() for g in gradients]).norm())
    return out


def measure(folders: Sequence[Path], groups: int) -> list[dict[str, object]]:
    """A row for the start and each run, with and without the weight."""
    reference = load(logs.MODEL)
    batch = batch_of(logs.prepare(folders[0].parent)["plain"], reference, groups)
    rows: list[dict[str, object]] = []
    for name, policy in [("start", reference), *((f.name, load(f / "model")) for f in folders)]:
        for weight, options in WEIGHTS.items():
            rows.append({"policy": name, "weight": weight, **norms(policy, batch, dict(options))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER")
    parser.add_argument("--groups", type=int, default=64)
    args = parser.parse_args()
    for row in measure(args.folders, args.groups):
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    harness.guarded(main)
