"""Rewards for unscored responses, learned from scored ones with a bounded slope (arXiv 2006.16785).

python examples/learned_reward.py MODEL SCORED UNSCORED OUT

SCORED and UNSCORED are stores. The responses of UNSCORED go to OUT with the learned rewards, which are
guesses: score some of them as well before you train on the rest.
"""

import sys
from pathlib import Path

from agro import Policy
from agro.config import PolicyConfig
from agro.store import Store
from agro_papers.smooth import SmoothReward


def write(model: str, scored: Path, unscored: Path, out: Path) -> int:
    """The responses written."""
    policy = Policy.load(PolicyConfig(model=model))
    with Store.open(scored, read_only=True) as store:
        fitted = SmoothReward.fit(
            policy, list(store.samples(scored=True)), slope=0.2, penalty=10.0, steps=200
        )
    with Store.open(unscored, read_only=True) as store:
        rewarded = fitted.reward(list(store.samples()))
    with Store.open(out) as store:
        store.append(sample.replace(id=None) for sample in rewarded)
    return len(rewarded)


if __name__ == "__main__":
    print(write(sys.argv[1], *map(Path, sys.argv[2:5])), "responses")
