"""Your own loop from agro's parts: sample, store, score, draw, step.

python examples/own_loop.py MODEL PROMPTS.jsonl REWARD OUT      (REWARD: exact, or file.py:function)
"""

import sys
from pathlib import Path

import torch

from agro.config import PolicyConfig, RewardConfig, SamplerConfig
from agro.models.policy import Policy
from agro.models.reference import frozen
from agro.objectives import get
from agro.rewards import load_reward
from agro.rollout import Rollout, Task, collect
from agro.rollout.prompts import load_prompts
from agro.rollout.rollout import embedded
from agro.store import At, DrawRule, Store
from agro.train.collate import collate
from agro.train.step import MicroBatch, Passes, backward, streams_of


def train(model: str, prompts: str, reward: str, out: Path, steps: int = 20, lr: float = 1e-5) -> list[float]:
    """The mean reward of each step's fresh samples."""
    policy = Policy.load(PolicyConfig(model=model))
    reference, rollout = frozen(policy), Rollout(policy.encoder, embedded(policy, version=0))
    asked, scorer = load_prompts(prompts), load_reward(RewardConfig(name=reward))
    options = get("agro").resolve("agro", {"beta": 0.05})
    optimizer = torch.optim.AdamW(policy.weights().values(), lr=lr, weight_decay=0.0)
    passes = Passes(MicroBatch(16))
    means = []
    with Store.open(out / "store.db") as store:
        for step in range(steps):
            chosen = [asked[(8 * step + i) % len(asked)] for i in range(8)]
            sampler = SamplerConfig(n=4, max_new=64)
            made = collect(rollout, chosen, sampler, store, Task(run="own", step=step, seed=step), scorer)
            rewards = [s.reward for s in store.samples(ids=made.ids)]
            known = [r for r in rewards if r is not None]
            means.append(sum(known) / len(known))

            # The least-drawn groups come first: the fresh ones, then older ones.
            rule = DrawRule(groups=12, min_group=2, fewer=True)
            drawn = store.draw(rule, At(run="own", step=step, seed=0, version=step))
            batch = collate([policy.encode(s) for s in drawn.samples], version=step)
            batch = batch.replace(ref_logp=streams_of(reference, batch, ["logp"], passes)["logp"])
            done = backward(policy, batch, "agro", options, passes)
            torch.nn.utils.clip_grad_norm_(policy.weights().values(), 1.0)
            optimizer.step()
            rollout.engine.version = step + 1
            store.ledger.commit("own", step, digest="")
            print(f"step {step}  reward {means[-1]:.3f}  ½Var(R) {done.evaluation.loss:.4f}")
    scorer.close()
    policy.save(out / "model")
    return means


if __name__ == "__main__":
    Path(sys.argv[4]).mkdir(parents=True)
    train(*sys.argv[1:4], Path(sys.argv[4]))
