"""Log-probs of a sample under its own sampling settings, which may not be those that the trainer's are at."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from agro.config import SamplerConfig
from agro.models.policy import Policy
from agro.rollout.engines.draw import truncate
from agro.types import Sample


@torch.no_grad()
def logp_as_sampled(policy: Policy, sample: Sample) -> NDArray[np.float64]:
    """[A] nats of the policy's choices in an encoded sample, at its temperature and after its truncation.

    -inf for a token that the truncation excludes.
    """
    assert sample.tokens is not None
    assert sample.action is not None
    assert sample.sampling is not None
    settings = {key: sample.sampling[key] for key in ("temperature", "top_k", "top_p", "min_p")}
    sampler = SamplerConfig(**settings)
    tokens = torch.tensor(sample.tokens, device=policy.device).long()
    logits = policy.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampler.temperature
    logp = truncate(logits, sampler).log_softmax(1).gather(1, tokens[1:, None])[:, 0]
    found: NDArray[np.float64] = logp.double().cpu().numpy()[sample.action[1:]]
    return found
