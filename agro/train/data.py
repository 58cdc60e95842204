"""Where a step's samples come from: fresh ones, stored ones, and what is left out of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from agro.config import RunConfig
from agro.errors import Refused
from agro.objectives import get, lack
from agro.policy import Policy, Unusable
from agro.rewards import Reward, check_failures
from agro.samplers import Sampler, Sampling
from agro.store import DrawRule, Store
from agro.types import Prompt, Sample


def derive(*parts: object) -> int:
    """A 63-bit seed from any parts, the same on every machine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class Drawn:
    """One step's samples, encoded, and what was left out of them, by reason."""

    samples: list[Sample]
    left_out: Counter[str] = field(default_factory=Counter)
    failed: int = 0  # rewards
    fresh: frozenset[int] = frozenset()  # ids of what was sampled in this step
    sampled_tokens: int = 0


def shares(config: RunConfig, step: int) -> tuple[int, int]:
    """(groups sampled before, groups to sample) at a phase's step (from 0): data.replay is met exactly over many steps."""
    per_step = config.train.groups * (1 - config.data.replay)
    before, after = int(step * per_step + 1e-9), int((step + 1) * per_step + 1e-9)
    return before, after - before


class PromptOrder:
    """An endless sequence of epochs over the prompts, each in an order of its own that the seed fixes."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts, self.seed = prompts, seed
        self._epoch, self._order = -1, list(prompts)

    def take(self, start: int, count: int) -> list[Prompt]:
        """Number `start` and the following ones."""
        out: list[Prompt] = []
        while len(out) < count:
            epoch, at = divmod(start + len(out), len(self.prompts))
            if epoch != self._epoch:
                self._epoch, self._order = (
                    epoch,
                    sorted(self.prompts, key=lambda p: (derive(self.seed, epoch, p.id), p.id)),
                )
            out += self._order[at : at + count - len(out)]
        return out


def sampling(config: RunConfig, seed: int) -> Sampling:
    s = config.sampler
    return Sampling(
        temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, max_new=s.max_new, stop=s.stop,
        seed=seed, batch=s.batch,
    )  # fmt: skip


def draw_rule(config: RunConfig, groups: int) -> DrawRule:
    d, entry = config.data, get(config.objective.name)
    needs = entry.needs(config.objective.options)
    return DrawRule(
        groups=groups, group_size=d.group_size, roles=d.roles, sources=d.sources, max_age=d.max_age, order=d.order,
        min_group=3 if "triples" in needs else 2 if "groups" in needs else 1, scored_only="reward" in needs,
    )  # fmt: skip


def sample_fresh(
    config: RunConfig, run: str, step: int, prompts: Sequence[Prompt], sampler: Sampler, reward: Reward, store: Store,
    between: Callable[[], None],
) -> tuple[list[Sample], int]:  # fmt: skip
    """Sample, append unscored, score, record: the scored samples, and how many rewards failed."""
    found: list[Sample] = []
    for sample in sampler.sample(
        prompts, config.sampler.n, sampling(config, derive(config.train.seed, "sample", step))
    ):
        found.append(sample)
        between()
    found.sort(key=lambda s: int(s.meta["index"]))
    ids = store.append(found, run=run, step=step)
    scores = reward.score(found)
    store.set_rewards(
        (i, s.value, {"reward_error": s.error} if s.error else {}) for i, s in zip(ids, scores, strict=True)
    )
    check_failures(found, scores, config.reward.max_failed)
    store.record_draws(run, step, ids)
    scored = [f.replace(id=i, reward=s.value) for i, f, s in zip(ids, found, scores, strict=True)]
    return scored, sum(s.value is None for s in scores)


def usable(samples: Sequence[Sample], policy: Policy, config: RunConfig, drawn: Drawn) -> None:
    """Put into `drawn` the samples that can be trained on, encoded; count the others by reason.

    A group that loses so many that the objective can't use it leaves whole.
    """
    needs = get(config.objective.name).needs(config.objective.options)
    least = 3 if "triples" in needs else 2 if "groups" in needs else 1
    kept: list[Sample] = []
    for sample in samples:
        try:
            encoded = policy.encode(sample, config.train.max_length)
        except Unusable as error:
            drawn.left_out[error.reason] += 1
            continue
        if "reward" in needs and encoded.reward is None and encoded.token_reward is None:
            drawn.left_out["no reward"] += 1
        else:
            kept.append(encoded)
    before, after = responses(samples), responses(kept)
    for sample in kept:
        if after[sample.prompt_id] < least <= before[sample.prompt_id]:
            drawn.left_out["group too small for what was left out"] += 1
        else:
            drawn.samples.append(sample)


def responses(samples: Sequence[Sample]) -> Counter[str]:
    """Responses a prompt has: rows of one episode are one."""
    seen = {(s.prompt_id, s.episode if s.episode is not None else i) for i, s in enumerate(samples)}
    return Counter(prompt for prompt, _ in seen)


def eligible(store: Store, config: RunConfig) -> Iterator[Sample]:
    """What the store holds for this configuration, whether or not the objective can use it."""
    return store.samples(roles=config.data.roles, sources=config.data.sources)


def check_store(config: RunConfig, store: Store) -> None:
    """Raise `Refused` where the objective can't train on what would be drawn; before any model is loaded."""
    name = config.objective.name
    needs = get(name).needs(config.objective.options)
    total, lacking, scored = 0, [], 0
    for sample in eligible(store, config):
        total += 1
        scored += sample.reward is not None or sample.token_reward is not None
        if "behavior_logp" in needs and not sample.knows_behavior:
            lacking.append(f"sample {sample.id} (prompt {sample.prompt_id})")
    if total == 0:
        raise Refused(
            f"data.store: {store.path} holds no samples that data.roles and data.sources admit; import some (agro import)"
        )
    if "reward" in needs and not scored:
        raise Refused(lack(name, "reward", [f"sample {s.id}" for s in eligible(store, config)][:total], total))
    if lacking:
        raise Refused(lack(name, "behavior_logp", lacking, total))
