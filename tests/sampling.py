"""What tests of the embedded engine and of rollouts share: prompts, and sampling with a tiny policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from rounding import rounding

from agro.models.policy import Policy
from agro.rollout import Rollout
from agro.rollout.engines import Continuation
from agro.rollout.engines.hf import HF
from agro.types import Prompt, Sample

PROMPTS = [Prompt("ab"), Prompt(""), Prompt("abc def gh a" * 2), Prompt("h", columns={"answer": "e"})]


def windowed(name: str) -> dict[str, int]:
    """Changes of a small model's configuration: these architectures have layers that see a window."""
    return {"sliding_window": 8} if name in ("Mistral", "Gemma2", "Gemma3") else {}


def rollout(policy: Policy, version: int = -1) -> Rollout:
    return Rollout(policy.encoder, HF(policy, version))


def end_with(policy: Policy, *ids: int) -> None:
    """Let these tokens end a response."""
    policy.eos_ids = ids
    policy.encoder = dataclasses.replace(policy.encoder, eos_ids=ids)


def by_index(samples: Iterable[Sample]) -> dict[int, Sample]:
    samples = list(samples)
    found = {s.meta["index"]: s for s in samples}
    assert len(found) == len(samples)
    return found


def trainer_logp(policy: Policy, sample: Sample) -> np.ndarray:
    """[T] the policy's log-probs of a sample's actions; NaN elsewhere."""
    tokens = torch.tensor(sample.tokens[None].astype(np.int64))
    with torch.no_grad():
        mask = torch.tensor(sample.action[None])
        return policy.streams(tokens, torch.tensor([tokens.shape[1]]), mask)["logp"][0].numpy()


def check_behavior(policy: Policy, samples: Iterable[Sample]) -> None:
    """Behavior log-probs are the policy's, as far as rounding lets them be."""
    samples = list(samples)
    tolerance = rounding(*(s.behavior_logp for s in samples))
    for s in samples:
        np.testing.assert_allclose(s.behavior_logp, trainer_logp(policy, s), **tolerance)


def assert_same(own: Mapping[int, Any], expected: Mapping[int, Any]) -> None:
    """Responses by number: the same tokens, and their log-probs as far as rounding lets them be."""
    assert own.keys() == expected.keys()
    log_probs = {i: recorded_logp(one) for i, one in expected.items()}
    tolerance = rounding(*log_probs.values())
    for i, one in expected.items():
        assert own[i].tokens.tolist() == one.tokens.tolist()
        np.testing.assert_allclose(recorded_logp(own[i]), log_probs[i], **tolerance)


def recorded_logp(one: Sample | Continuation) -> np.ndarray:
    return one.behavior_logp if isinstance(one, Sample) else one.logp
