"""Speed and memory: training beside prime-rl's baselines, decoding, and log-probs of a large vocabulary.

Models have random weights in bfloat16. Activations are recomputed. MFU counts six operations per weight and
token (four with an adapter, whose frozen weights need no gradient) and those of attention, not those of
recomputation, over the dense bfloat16 rate of `common.RATES`; it is unknown for other devices. To beat are
the baselines that prime-rl commits for one H100, in PEERS. LOSSES and ABLATIONS are kernels of others in
place of ours: agro uses none of them before it has paid here. A row says "not there" of those that aren't
installed or can't be compiled. None of it has run on a GPU yet.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad

from agro.config import LoRA, SamplerConfig
from agro.models.adapters import adapted
from agro.models.logprobs import Head, Outputs, token_streams
from agro.models.policy import Masters, Policy
from agro.models.pretrained import decoder_layers
from agro.rollout.engines import Request
from agro.rollout.engines.hf import HF
from benchmarks.on_gpu.common import Asked, Results, Rloo, measured, policy_of, qwen3, rate_of

PEERS = {  # prime-rl's baselines on one H100: tokens a second, MFU, GiB
    "0.6B, all weights": {"tokens_per_second": 11_900, "mfu": 0.111, "gib": 12.5},
    "4B, LoRA 16": {"tokens_per_second": 6_200, "mfu": 0.217, "gib": 23.3},
}
HEADS = {"key_heads": 8, "per_head": 128}
SHAPES: dict[str, dict[str, int]] = {
    "0.6B, all weights": {"hidden": 1024, "inner": 3072, "layers": 28, "heads": 16, **HEADS},
    "4B, LoRA 16": {"hidden": 2560, "inner": 9728, "layers": 36, "heads": 32, **HEADS},
}
VOCABULARY, TOKENS, SEQUENCES, BATCH, NEW = 151_936, 16_384, 16, 256, 128
SMALL = {"hidden": 32, "inner": 48, "layers": 2, "heads": 4, "key_heads": 4, "per_head": 8}


def model_of(name: str, device: torch.device, small: bool) -> Policy:
    """A Qwen3 with random weights, trained as its name says."""
    with device:
        model = qwen3(SMALL if small else SHAPES[name], 512 if small else VOCABULARY)
    if "LoRA" in name:
        model = model.bfloat16()
        return policy_of(model, adapted(model, "random", LoRA(rank=16)))
    masters = Masters(dict(model.named_parameters()))
    policy = policy_of(model)
    policy.masters = masters
    return policy


def operations(policy: Policy, sequences: int, width: int) -> float:
    """Of forward and backward pass, without recomputation. The embedding is the head and counts once."""
    config = policy.model.config
    frozen = sum(p.numel() for p in policy.model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * width**2
    return sequences * (width * (6 * trained + 4 * frozen) + 3 * attention)


def training(
    name: str, asked: Asked, change: Callable[[Policy], None] = lambda policy: None
) -> dict[str, Any]:
    """A step of RLOO over 16,384 tokens in 16 sequences, of a policy that `change` has changed."""
    policy = model_of(name, asked.device, asked.small)
    change(policy)
    tokens = 128 if asked.small else TOKENS
    width = tokens // SEQUENCES
    train = {"micro_tokens": tokens, "gradient_checkpointing": True, "lr": 1e-6}
    steps = Rloo(policy, [width] * SEQUENCES, 1, **train)
    steps.learner.micro.adapts = False  # running out of memory is an error here

    def step() -> None:
        steps.gradient()
        steps.learner.move(1e-6)

    row = measured(step, asked.device, 1 if asked.small else 5)
    rate, speed = rate_of(asked.device), tokens / row["median"]
    is_h100 = asked.device.type == "cuda" and "H100" in torch.cuda.get_device_name(asked.device)
    peer = PEERS[name]
    return {
        **row,
        "tokens_per_second": speed,
        "mfu": None if rate is None else operations(policy, SEQUENCES, width) / row["median"] / rate,
        "peer": peer,
        "ratio": speed / peer["tokens_per_second"] if is_h100 else None,  # on their own card only
    }


def decoding(asked: Asked) -> dict[str, Any]:
    """256 responses of 128 tokens, of the shape of Qwen3-0.6B, all decoded at once."""
    policy = model_of("0.6B, all weights", asked.device, asked.small)
    engine = HF(policy)
    batch, new = (8, 4) if asked.small else (BATCH, NEW)
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, policy.vocab_size, (-(-batch // 4), 32), generator=random).tolist()
    sampler = SamplerConfig(batch=batch, max_new=new)

    def decode() -> None:
        requests = deque(Request(i, prompts[i // 4], new) for i in range(batch))
        assert sum(len(done.tokens) for done in engine.decode(requests, sampler, 0)) == batch * new

    row = measured(decode, asked.device, 1 if asked.small else 2)
    return {**row, "fused": engine.fused, "tokens_per_second": batch * new / row["median"]}


def own_loss(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    row = torch.cat([tokens[:1], tokens])[None].cpu()  # the first one is predicted by nothing
    mask = torch.arange(row.shape[1])[None] > 0
    outputs = Outputs(pad(hidden, (0, 0, 0, 1))[None], Head(weight))
    return -token_streams(outputs, row, mask)["logp"][mask.to(hidden.device)].sum()


def plain_loss(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """All logits, and their cross entropy in float32."""
    return cross_entropy(linear(hidden, weight).float(), tokens, reduction="sum")


def liger_loss(hidden: Any, weight: Any, tokens: Any) -> Any:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, tokens)


def cut_loss(hidden: Any, weight: Any, tokens: Any) -> Any:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, tokens, reduction="sum")


# By package the sum of all log-probs, negated.
LOSSES = {"agro": own_loss, "liger_kernel": liger_loss, "cut_cross_entropy": cut_loss}


def logps(package: str, asked: Asked) -> dict[str, Any]:
    """Log-probs of 8,192 tokens of 151,936, forward and backward from hidden states of width 1,024, beside
    the plain way."""
    if find_spec(package) is None:
        return {"not there": f"pip install {package.replace('_', '-')}"}
    vocabulary, positions, width = (512, 64, 16) if asked.small else (VOCABULARY, 8192, 1024)
    random = torch.Generator(asked.device).manual_seed(0)
    settings: dict[str, Any] = {"generator": random, "device": asked.device, "dtype": torch.bfloat16}
    hidden = torch.randn((positions, width), **settings).requires_grad_()
    weight = torch.randn((vocabulary, width), **settings).mul_(0.05).requires_grad_()
    tokens = torch.randint(0, vocabulary, (positions,), generator=random, device=asked.device)

    def total(loss: Callable[..., Tensor]) -> float:
        hidden.grad = weight.grad = None
        found = loss(hidden, weight, tokens)
        found.backward()
        return -float(found.detach())

    repeats = 1 if asked.small else 5
    row = measured(lambda: total(LOSSES[package]), asked.device, repeats)
    try:
        other = measured(lambda: total(plain_loss), asked.device, repeats)
    except torch.OutOfMemoryError:
        return {**row, "plain": None, "why": "the plain way runs out of memory"}
    sums = total(LOSSES[package]), total(plain_loss)
    within = abs(sums[0] - sums[1]) < 1e-2 * abs(sums[1])
    return {**row, "plain": other, "ratio": other["median"] / row["median"], "sums": sums, "within": within}


def compiled(policy: Policy) -> None:
    """torch.compile of each layer, for passes of one length."""
    for layer in decoder_layers(policy.model):
        layer.compile(dynamic=False)


def flash(policy: Policy) -> None:
    """flash-attn's kernel in place of torch's, for padded rows: ours packs by torch's alone."""
    policy.packs = False
    policy.model.set_attn_implementation("flash_attention_2")


ABLATIONS: dict[
    str, tuple[str, Callable[[Policy], None]]
] = {  # the package that it needs, and what it changes
    "torch.compile of the layers": ("triton", compiled),
    "flash attention": ("flash_attn", flash),
}


def ablation(name: str, asked: Asked) -> dict[str, Any]:
    """`training` of the first shape with one kernel changed."""
    package, change = ABLATIONS[name]
    if find_spec(package) is None:
        return {"not there": f"{package} isn't installed"}
    try:
        return training(next(iter(SHAPES)), asked, change)
    except (ImportError, RuntimeError, ValueError) as error:  # such as no compiler for Triton
        return {"not there": f"{type(error).__name__}: {error}"[:500]}


def main() -> int:
    asked = Asked.parse()
    results = Results("fast", asked)

    def measure(name: str, work: Any, needs: float) -> None:
        results.measure(name, work, 0.0 if asked.small else needs)
        gc.collect()
        if asked.device.type == "cuda":
            torch.cuda.empty_cache()

    for package in LOSSES:
        measure(f"log-probs, V = 151,936, by {package}", lambda package=package: logps(package, asked), 3)
    for name in SHAPES:
        measure(f"training, {name}", lambda name=name: training(name, asked), 12)
    measure(f"decoding, batch {BATCH}", lambda: decoding(asked), 15)
    for name in ABLATIONS:
        measure(f"training with {name}", lambda name=name: ablation(name, asked), 12)
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
