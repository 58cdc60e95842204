"""The mean reward of a log beside that of the policy's own responses to the log's prompts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.config import RunConfig
from agro.errors import Refused
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.rewards import Reward
from agro.rollout.evaluate import heldout
from agro.rollout.rollout import EpisodeReward, embedded, load_rollout
from agro.store import Store
from agro.store.draw_rules import noise
from agro.train.phases import derive
from agro.train.source import stored_prompt
from agro.types import Prompt

PROMPTS = 256  # that are asked, at most
RESPONSES = 4  # of the policy to each, at most; together about as many as PROMPTS
LOGGED = 64  # of the log to each, at most
Values = NDArray[np.float64]


@dataclass(frozen=True)
class OwnReward:
    """Means over the same prompts of the mean reward of their responses, with standard errors over prompts.

    `spread`: the standard deviation of the rewards of all responses, of the log's and the policy's.
    """

    log: float
    log_se: float
    own: float
    own_se: float
    difference_se: float
    spread: float
    prompts: int

    @property
    def lead(self) -> float:
        """How far the log is above the policy, in the rewards' spread; 0 where all rewards are equal."""
        return (self.log - self.own) / self.spread if self.spread else 0.0

    def to_json(self) -> dict[str, Any]:
        values = asdict(self) | {"lead": self.lead}
        return {name: None if math.isnan(value) else value for name, value in values.items()}


def own_reward(store: Store, policy: Policy, reward: Reward, config: RunConfig) -> OwnReward:
    """Score some of the log's responses, and the policy's to the same prompts, by one reward.

    The prompts have the columns of their first record. Responses are of the policy at its own temperature, of
    `config.sampler.max_new` tokens at most. Raises `Refused` where nothing can be asked or scored.
    """
    seed, scorer = config.train.seed, EpisodeReward(reward)
    names = sorted((group.prompt_id for group in store.survey.each_group()), key=lambda i: noise(seed, 0, i))
    asked = (prompt for name in names if (prompt := _askable(store, name, policy)) is not None)
    prompts = list(islice(asked, PROMPTS))
    if not prompts:
        raise Refused(
            f"--reward: {store.path}: expected prompts that leave room for a response, got none among "
            f"{len(names)}. What to do: leave --reward out"
        )
    n = max(1, min(RESPONSES, PROMPTS // len(prompts)))
    sampler = config.sampler.of_policy(config.policy.temperature, n)
    rollout = load_rollout(policy.encoder, embedded(policy), config.environment)
    result = heldout(rollout, scorer, prompts, sampler, derive(seed, "own reward"))
    logged = [_scores(store, prompt, scorer, keep=config.environment is not None) for prompt in prompts]
    known = [i for i, own in enumerate(result.rewards) if _known(own).size and logged[i].size]
    if not known:
        why = f", such as by: {result.errors[0]}" if result.errors else ""
        raise Refused(f"--reward: no prompt has a scored response of both log and policy{why}")
    log = np.array([logged[i].mean() for i in known])
    own = np.array([_known(result.rewards[i]).mean() for i in known])
    every = np.concatenate([np.concatenate([logged[i], _known(result.rewards[i])]) for i in known])
    errors = [_error(values) for values in (log, own, log - own)]
    return OwnReward(
        float(log.mean()), errors[0], float(own.mean()), errors[1], errors[2], float(every.std()), len(known)
    )


def _askable(store: Store, prompt_id: str, policy: Policy) -> Prompt | None:
    """A stored prompt; None where it leaves no room for a response, or no record of it is intact."""
    prompt = stored_prompt(store, prompt_id)
    try:
        if prompt is not None:
            policy.encoder.checked_prompt(prompt)
    except InvalidSample:
        return None
    return prompt


def _scores(store: Store, prompt: Prompt, scorer: EpisodeReward, *, keep: bool) -> Values:
    """Known rewards of the log's responses to a prompt. `keep`: an environment gave them, so that they are
    as stored."""
    rows = list(islice(store.samples(prompt_id=prompt.id, skip_damaged=True), LOGGED))
    samples = rows if keep else [row.replace(reward=None) for row in rows]
    of_response = {}
    for sample, score in zip(samples, scorer.score(samples), strict=True):
        of_response[sample.episode or sample.id] = math.nan if score.value is None else score.value
    return _known(np.array(list(of_response.values()), np.float64))


def _known(values: Values) -> Values:
    return values[~np.isnan(values)]


def _error(values: Values) -> float:
    """The standard error of a mean; NaN of fewer than two values."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
