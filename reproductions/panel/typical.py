"""Is a log's author more careful than the policy? How probable its responses are, without any reward.

    python reproductions/panel/typical.py [--only JOB …] [--kept] [--out runs/panel]

The mean over a log's responses of Σ_t (log π(y_t) + H_t), H_t the entropy of the policy before token t: how
far they are above responses of its own in log-probability, in nats a response. It is 0 on average for
responses that the policy wrote, positive where the author writes as the policy does and slips less, negative
where the author writes what the policy wouldn't.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.store import Store  # noqa: E402
from agro.train.collate import collate  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.panel.jobs import JOBS  # noqa: E402
from reproductions.panel.logs import FULL, PARTS  # noqa: E402
from reproductions.panel.play import World, world  # noqa: E402
from reproductions.panel.run import jobs_to_run  # noqa: E402

MOST = 512  # responses of a log


def excess(world: World) -> list[float]:
    """Of each response, in nats."""
    with Store.open(world.files.log, read_only=True) as store:
        samples = list(store.samples())[:MOST]
    found: list[float] = []
    for first in range(0, len(samples), PARTS):
        batch = collate(samples[first : first + PARTS], 0)
        assert batch.tokens is not None
        with torch.no_grad():
            logp_BTV = world.start.policy.model(batch.tokens).logits.double().log_softmax(-1)[:, :-1]
        logp_BT = logp_BTV.gather(2, batch.tokens[:, 1:, None])[..., 0]
        entropy_BT = -(logp_BTV.exp() * logp_BTV).sum(-1)
        found += torch.where(batch.mask[:, 1:], logp_BT + entropy_BT, 0.0).sum(1).tolist()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB")
    parser.add_argument("--kept", action="store_true", help="the jobs that are kept for the last look too")
    parser.add_argument("--out", type=Path, default=Path("runs/panel"))
    args = parser.parse_args(arguments)
    print("| log | author | nats a response |\n|---|---|---|")
    for name in jobs_to_run(args.only, args.kept):
        job = JOBS[name]
        if job.data == "fresh" or job.environment:  # turns are in several rows
            continue
        values = excess(world(name, args.out, FULL))
        error = stdev(values) / math.sqrt(len(values))
        print(f"| {name} | {job.about} | {mean(values):+.2f} ± {error:.2f} |", flush=True)


if __name__ == "__main__":
    harness.guarded(main)
