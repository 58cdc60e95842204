"""Token rewards by a flow on hidden states (RLFR, arXiv 2510.10201), for a store of scored responses.

python examples/flow_rewards.py MODEL STORE OUT

The flow learns what MODEL's hidden states look like on the right responses of STORE, those of reward 1 or
more. All its responses go to OUT, with token rewards where their hidden states differ most and least.
"""

import sys
from pathlib import Path

from agro import Policy
from agro.config import PolicyConfig
from agro.store import Store
from agro_papers.flow_reward import FlowReward


def write(model: str, path: Path, out: Path) -> int:
    """Return the number of written responses."""
    policy = Policy.load(PolicyConfig(model=model))
    with Store.open(path, read_only=True) as store:
        samples = [policy.encode(sample) for sample in store.samples(scored=True)]
    trusted = [sample for sample in samples if sample.reward is not None and sample.reward >= 1]
    flow = FlowReward.fit(policy, trusted, layer=-1, steps=200)
    rewarded = flow.reward(samples, coef=0.01, threshold=0.5)
    with Store.open(out) as store:
        store.append(sample.replace(id=None) for sample in rewarded)
    return len(rewarded)


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])), "responses")
