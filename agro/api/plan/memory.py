"""The memory of a step. `docs/scaling.md` explains it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from agro.api.plan.measure import Rates, Work, positions
from agro.config import RunConfig
from agro.models.policy import Policy
from agro.models.tiles import KEPT, TILE, sum_dtype
from agro.rollout.engines.capabilities import capabilities

_JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # see `agro.rollout.engines.fused`
_SLACK = 256  # columns that `agro.rollout.engines.decoding_rows` adds where responses wait


def resident(device: torch.device) -> int | None:
    """Bytes that are allocated now: on the GPU, or by the process (Linux; None elsewhere)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return None
    return int(pages.read_text().split()[1]) * 4096


def peak(policy: Policy, config: RunConfig, step: Work, rate: Rates | None, loaded: int | None) -> int | None:
    """The most bytes at once: while responses are sampled, or in a pass. None where a part is unknown.

    In the only pass of a step, gradients come as activations go. On a CPU the C library keeps what sampling
    and a pass of activations used, in pieces that seldom fit again, so both count besides a pass.

    Args:
        loaded: bytes that are allocated when everything is loaded.
    """
    if loaded is None or rate is None:
        return None
    trained = policy.trained().values()
    gradients = sum(w.nbytes for w in trained)
    is_8bit = config.train.optimizer == "adamw_8bit"
    constant = loaded + 2 * (sum(w.numel() for w in trained) if is_8bit else gradients)
    if config.train.weights_average is not None:
        constant += sum(w.numel() * max(w.itemsize, 4) for w in trained)
    head = policy.model.get_output_embeddings().weight
    head_gradient = head.numel() * sum_dtype(head).itemsize if head.requires_grad else 0
    learned = max((sum(row.learned for row in rows) for rows in step.passes), default=0)
    logits = min(KEPT, learned * policy.vocab_size) + 4 * config.policy.chunk * min(TILE, policy.vocab_size)
    sampling = _keys_and_values(policy, config, step) + _sampler_bytes(policy, config, step)
    activations = _activations(policy, config, step, rate)
    in_pass = activations + head_gradient + 4 * logits
    if policy.device.type == "cpu":
        return constant + gradients + sampling + in_pass + activations
    if len(step.passes) > 1:
        in_pass += gradients
    return constant + max(gradients + sampling, in_pass)


def _batch(config: RunConfig, step: Work) -> int:
    """Responses that are sampled at once in this process."""
    shares = "shares_weights" in capabilities(config.engine.kind)
    if not shares or config.source.kind != "inline":
        return 0
    return min(config.sampler.batch, len(step.fresh))


def _keys_and_values(policy: Policy, config: RunConfig, step: Work) -> int:
    c = policy.model.config.get_text_config()
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    per_head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    per_token: int = 2 * c.num_hidden_layers * heads * per_head * policy.dtype.itemsize
    batch, columns = _batch(config, step), max((len(row.tokens) for row in step.fresh), default=0)
    if len(step.fresh) > batch:
        columns += _SLACK
    return batch * columns * per_token


def _sampler_bytes(policy: Policy, config: RunConfig, step: Work) -> int:
    """Logits of a batch, twice, the copies of weights that the fused sampler packs, and those that lag."""
    batch = _batch(config, step)
    count = 2 * batch * policy.vocab_size * 4
    if batch and config.source.lags:
        count += sum(p.nbytes for p in policy.model.parameters())
    from agro.rollout.engines.fused import is_fusable

    if not (batch and config.engine.fused and is_fusable(policy)):
        return count
    for name, module in policy.model.named_modules():
        if isinstance(module, nn.Linear):
            copies = 1 + (name.endswith(_JOINED) and policy.dtype == torch.float32)
            count += copies * module.weight.nbytes
    return count


def _activations(policy: Policy, config: RunConfig, step: Work, rate: Rates) -> int:
    """Of the largest pass, with one layer's more for its backward pass."""
    largest = max(positions(policy, rows) for rows in step.passes)
    layers: int = policy.model.config.get_text_config().num_hidden_layers
    activations = rate.saved * largest
    per_layer = activations / layers
    if "activations" in config.train.offload and policy.device.type == "cuda":
        return round(2 * per_layer)
    if policy.recompute:
        width: int = policy.model.config.get_text_config().hidden_size * policy.dtype.itemsize
        return round(2 * per_layer + layers * largest * width)
    return round(activations + per_layer)
