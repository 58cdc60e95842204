"""Your own loop from agro's parts: sample, store, score, draw, step.

python examples/own_loop.py MODEL PROMPTS.jsonl REWARD OUT      (REWARD: exact, or file.py:function)
"""

import sys
from pathlib import Path

import torch

from agro.config import Policy as PolicyConfig
from agro.config import Reward as RewardConfig
from agro.objectives import get
from agro.policy import Policy
from agro.prompts import load_prompts
from agro.reference import frozen
from agro.rewards import load_reward
from agro.samplers import HFSampler, Sampling
from agro.store import DrawRule, Store
from agro.train.micro import MicroBatch
from agro.train.step import backward, collate


def train(model: str, prompts: str, reward: str, out: Path, steps: int = 20, lr: float = 1e-5) -> list[float]:
    """The mean reward of each step's fresh samples."""
    policy = Policy.load(PolicyConfig(model=model))
    reference, sampler = frozen(policy), HFSampler(policy, version=0)
    asked, scorer = load_prompts(prompts), load_reward(RewardConfig(name=reward))
    options = get("agro").resolve("agro", {"beta": 0.05})
    optimiser = torch.optim.AdamW(policy.weights().values(), lr=lr, weight_decay=0.0)
    means = []
    with Store.open(out / "store.db") as store:
        for step in range(steps):
            chosen = [asked[(8 * step + i) % len(asked)] for i in range(8)]
            fresh = list(sampler.sample(chosen, 4, Sampling(max_new=64, seed=step)))
            ids = store.append(fresh, run="own", step=step)
            scores = scorer.score(fresh)
            store.set_rewards(
                (i, s.value, {"reward_error": s.error} if s.error else {}) for i, s in zip(ids, scores)
            )
            means.append(sum(s.value or 0.0 for s in scores) / len(scores))

            # What was drawn least comes first: the fresh groups, then older ones, on equal terms.
            drawn = store.draw(
                DrawRule(groups=min(12, len(store.groups())), min_group=2),
                run="own",
                step=step,
                seed=0,
                version=step,
            )
            batch = collate([policy.encode(s) for s in drawn], version=step)
            done = backward(policy, batch, "agro", options, micro=MicroBatch(16), reference=reference)
            torch.nn.utils.clip_grad_norm_(policy.weights().values(), 1.0)
            optimiser.step()
            sampler.version = step + 1
            store.commit("own", step, digest="")
            print(f"step {step}  reward {means[-1]:.3f}  ½Var(R) {done.evaluation.loss:.4f}")
    scorer.close()
    policy.save(out / "model")
    return means


if __name__ == "__main__":
    Path(sys.argv[4]).mkdir(parents=True)
    train(*sys.argv[1:4], Path(sys.argv[4]))
