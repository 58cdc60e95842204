"""Where a step's samples come from: fresh ones, stored ones, and what is left out of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from agro.config import RunConfig
from agro.objectives import Need, get, least_responses
from agro.policy import Policy, Unusable
from agro.rewards import Reward, check_failures
from agro.samplers import Sampler, Sampling
from agro.store import Damaged, DrawRule, Pair, Store
from agro.types import Prompt, Sample

S = TypeVar("S", bound=Sample | Damaged)


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
    prompts: int = 0  # sampled from in this step
    damaged: list[Damaged] = field(default_factory=list)  # stored rows that aren't as they were written
    pairs: list[Pair] = field(
        default_factory=list
    )  # judgements of the samples, where the objective needs them

    @property
    def is_fresh(self) -> list[bool]:
        """[B] of each of `samples`."""
        return [s.id in self.fresh for s in self.samples]


def stored_groups(config: RunConfig, at: int) -> int:
    """Groups that a phase's step (from 0) draws from the store: data.replay is met exactly over many steps."""
    per_step = config.train.groups * (1 - config.data.replay)
    return config.train.groups - (int((at + 1) * per_step + 1e-9) - int(at * per_step + 1e-9))


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
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        max_new=s.max_new,
        stop=s.stop,
        seed=seed,
        batch=s.batch,
    )


def draw_rule(config: RunConfig, groups: int) -> DrawRule:
    d, entry = config.data, get(config.objective.name)
    needs = entry.needed(config.objective.options)
    return DrawRule(
        groups=groups,
        group_size=d.group_size,
        roles=d.roles,
        sources=d.sources,
        max_age=d.max_age,
        order=d.order,
        min_group=least_responses(needs),
        scored_only="reward" in needs,
        pairs="pairs" in needs,
    )


def sample_fresh(
    config: RunConfig,
    run: str,
    step: int,
    prompts: Sequence[Prompt],
    sampler: Sampler,
    reward: Reward,
    store: Store,
    drawn: Drawn,
    between: Callable[[], None],
    tell: Callable[..., None],
    stage: Callable[..., None] = lambda *_: None,
) -> list[Sample]:
    """Sample, append unscored, score, record; what is counted goes into `drawn`. `tell`: of `Callback`'s methods.

    `stage`: how far it is, as `Progress.stage`.
    """
    tell("before_sample", prompts)
    found: list[Sample] = []
    stage("sampling", 0, len(prompts) * config.sampler.n)
    for sample in sampler.sample(
        prompts, config.sampler.n, sampling(config, derive(config.train.seed, "sample", step))
    ):
        found.append(sample)
        stage("sampling", len(found), len(prompts) * config.sampler.n)
        between()
    found.sort(key=lambda s: int(s.meta["index"]))
    ids = store.append(found, run=run, step=step)
    found = [f.replace(id=i) for i, f in zip(ids, found, strict=True)]
    tell("after_sample", found)
    tell("before_score", found)
    stage("scoring")
    scores = reward.score(found)
    store.set_rewards((i, s.value, s.meta) for i, s in zip(ids, scores, strict=True))
    drawn.failed = check_failures(found, scores, config.reward.max_failed)
    store.record_draws(run, step, ids)
    drawn.fresh = frozenset(ids)
    drawn.sampled_tokens = sum(int(s.action.sum()) for s in found if s.action is not None)
    scored = [f.replace(reward=s.value, meta=f.meta | s.meta) for f, s in zip(found, scores, strict=True)]
    tell("after_score", scored)
    return scored


def usable(
    samples: Sequence[Sample], policy: Policy, max_length: int | None, needs: set[Need], drawn: Drawn
) -> None:
    """Put into `drawn` the samples that give what is needed of them, encoded; count the others, and the damaged, by reason.

    An episode that loses a row leaves whole, and so does a group that loses so many that it is too small. A pair
    that loses a response leaves, and the other one with it where no pair is left to it.
    """
    least = least_responses(needs)
    fit: list[Sample] = []
    split = {(d.prompt_id, d.episode) for d in drawn.damaged}
    for sample in samples:
        try:
            encoded = policy.encode(sample, max_length)
        except Unusable as error:
            drawn.left_out[error.reason] += 1
            split.add((sample.prompt_id, sample.episode))
            continue
        if "reward" in needs and encoded.reward is None and encoded.token_reward is None:
            drawn.left_out["no reward"] += 1
        else:
            fit.append(encoded)
    if drawn.damaged:
        drawn.left_out["damaged"] = len(drawn.damaged)
    kept = [s for s in fit if s.episode is None or (s.prompt_id, s.episode) not in split]
    if len(kept) < len(fit):
        drawn.left_out["another row of its episode was left out"] = len(fit) - len(kept)
    if "pairs" in needs:
        kept = _in_pairs(kept, drawn)
    before, after = responses([*samples, *drawn.damaged]), responses(kept)
    for sample in kept:
        if after[sample.prompt_id] < least <= before[sample.prompt_id]:
            drawn.left_out["group too small for what was left out"] += 1
        else:
            drawn.samples.append(sample)


def _in_pairs(samples: list[Sample], drawn: Drawn) -> list[Sample]:
    """The samples whose responses stand in a pair, both of which are among `samples`; the pairs that are left."""
    response = {s.id: (s.prompt_id, s.id if s.episode is None else s.episode) for s in samples}
    drawn.pairs = [
        p
        for p in drawn.pairs
        if p.winner in response
        and p.loser in response
        and response[p.winner] != response[p.loser]  # two rows of one episode
        and response[p.winner][0] == response[p.loser][0]  # a step may draw both prompts of a pair of two
    ]
    joined = {response[i] for p in drawn.pairs for i in (p.winner, p.loser)}
    kept = [s for s in samples if response[s.id] in joined]
    if len(kept) < len(samples):
        drawn.left_out["the other response of its pair was left out"] = len(samples) - len(kept)
    return kept


def one_each(samples: Sequence[S]) -> list[S]:
    """A row of each response: rows of one episode are one response."""
    seen = {(s.prompt_id, s.episode if s.episode is not None else i): s for i, s in enumerate(samples)}
    return list(seen.values())


def responses(samples: Sequence[Sample | Damaged]) -> Counter[str]:
    """Responses a prompt has."""
    return Counter(s.prompt_id for s in one_each(samples))
