"""Speed and memory: training beside prime-rl's baselines, decoding, and log-probs of a large vocabulary.

Models have random weights in bfloat16. Activations are recomputed. MFU counts six operations per weight and
token (four with an adapter, whose frozen weights need no gradient) and those of attention, not those of
recomputation, over the dense bfloat16 rate of `common.RATES`; it is unknown for other devices. To beat are
the baselines that prime-rl commits for one H100, in PEERS. LOSSES and ABLATIONS are kernels of others in
place of ours: agro uses none of them before it has paid here. A row says "not there" of those that aren't
installed or can't be compiled, and why vLLM was skipped. None of it has run on a GPU yet.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from agro import objectives
from agro.config import LoRA, RunConfig, SamplerConfig
from agro.models.adapters import adapted
from agro.models.logprobs import Head, Outputs, token_streams
from agro.models.policy import Masters, Policy
from agro.models.pretrained import decoder_layers
from agro.rollout.engines import Request
from agro.rollout.engines.hf import HF
from agro.train.learner import Local
from agro.types import Batch
from benchmarks.on_gpu.common import Asked, Results, measured, rate_of, two_words

PEERS = {  # prime-rl's baselines on one H100: tokens a second, MFU, GiB
    "0.6B, all weights": {"tokens_per_second": 11_900, "mfu": 0.111, "gib": 12.5},
    "4B, LoRA 16": {"tokens_per_second": 6_200, "mfu": 0.217, "gib": 23.3},
}
SHAPES: dict[str, dict[str, int]] = {
    "0.6B, all weights": {"hidden": 1024, "inner": 3072, "layers": 28, "heads": 16, "per_head": 128},
    "4B, LoRA 16": {"hidden": 2560, "inner": 9728, "layers": 36, "heads": 32, "per_head": 128},
}
VOCABULARY, TOKENS, SEQUENCES, BATCH, NEW = 151_936, 16_384, 16, 256, 128
SMALL = {"hidden": 32, "inner": 48, "layers": 2, "heads": 4, "per_head": 8}


def model_of(name: str, device: torch.device, small: bool, *, adapts: bool = True) -> Policy:
    """A Qwen3 with random weights, trained as its name says; not `adapts`: all of it, in float32."""
    shape = SMALL if small else SHAPES[name]
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512 if small else VOCABULARY,
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=min(8, shape["heads"]),
        head_dim=shape["per_head"],
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    with device:
        model = transformers.Qwen3ForCausalLM(config)
    adapter, masters = None, None
    if adapts and "LoRA" in name:
        model = model.bfloat16()
        adapter = adapted(model, "random", LoRA(rank=16))
    elif adapts:
        masters = Masters(dict(model.named_parameters()))
    policy = Policy(model, two_words(), adapter=adapter)
    policy.masters = masters
    policy.eos_ids = ()  # only lengths end a response
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
    config = RunConfig.of(
        {
            "objective": {"name": "rloo", "beta": 0.0},
            "train": {"micro_tokens": tokens, "gradient_checkpointing": True, "lr": 1e-6},
        }
    )
    learner = Local(policy, None, print)
    learner.enter(config, began=None, resumed=None)
    learner.micro.adapts = False  # running out of memory is an error here
    random = torch.Generator().manual_seed(0)
    batch = Batch.of(
        mask=(torch.arange(width) > 0).expand(SEQUENCES, width),
        reward=torch.rand(SEQUENCES, generator=random).tolist(),
        group=[i // 4 for i in range(SEQUENCES)],
        tokens=torch.randint(0, policy.vocab_size, (SEQUENCES, width), generator=random),
        lengths=[width] * SEQUENCES,
    )
    options = objectives.get("rloo").resolve("rloo", config.objective.options)

    def step() -> None:
        learner.gradient(batch, "rloo", options, lambda: None)
        learner.move(1e-6)

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


def _of_vocabulary(asked: Asked, rows: int | None = None, more: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the weights of a head, and tokens: in `rows`, or in none, of `more` positions."""
    vocabulary, positions, width = (512, 64, 16) if asked.small else (VOCABULARY, 8192, 1024)
    shape = (positions + more,) if rows is None else (rows, positions + more)
    random = torch.Generator(asked.device).manual_seed(0)
    settings: dict[str, Any] = {"generator": random, "device": asked.device, "dtype": torch.bfloat16}
    hidden = torch.randn((*shape, width), **settings).requires_grad_()
    weight = torch.randn((vocabulary, width), **settings).mul_(0.05).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, shape, generator=random, device=asked.device)


def logps(asked: Asked) -> dict[str, Any]:
    """Log-probs of 8,192 tokens of 151,936, forward and backward from hidden states of width 1,024, beside
    the plain way: all logits, and their cross entropy in float32."""
    hidden, weight, tokens = _of_vocabulary(asked, rows=1, more=1)
    here = tokens.cpu()
    mask = torch.arange(tokens.shape[1])[None] > 0

    def ours() -> float:
        hidden.grad = weight.grad = None
        logp = token_streams(Outputs(hidden, Head(weight)), here, mask)["logp"][mask.to(asked.device)]
        logp.sum().backward()
        return float(logp.sum())

    def plain() -> float:
        hidden.grad = weight.grad = None
        loss = cross_entropy(linear(hidden[0, :-1], weight).float(), tokens[0, 1:], reduction="sum")
        loss.backward()
        return -float(loss)

    repeats = 1 if asked.small else 5
    row = measured(ours, asked.device, repeats)
    try:
        other = measured(plain, asked.device, repeats)
    except torch.OutOfMemoryError:
        return {**row, "plain": None, "why": "the plain way runs out of memory"}
    sums = ours(), plain()
    return {
        **row,
        "plain": other,
        "ratio": other["median"] / row["median"],
        "sums": sums,
        "within": abs(sums[0] - sums[1]) < 1e-2 * abs(sums[1]),
    }


def liger_logps(hidden: Any, weight: Any, tokens: Any) -> Any:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, tokens)


def cut_logps(hidden: Any, weight: Any, tokens: Any) -> Any:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, tokens, reduction="sum")


LOSSES = {"liger_kernel": liger_logps, "cut_cross_entropy": cut_logps}  # of the sum of all log-probs, negated


def other_logps(package: str, asked: Asked) -> dict[str, Any]:
    """The log-probs of `logps` by a fused loss of another package, forward and backward."""
    if find_spec(package) is None:
        return {"not there": f"pip install {package.replace('_', '-')}"}
    hidden, weight, tokens = _of_vocabulary(asked)

    def theirs() -> float:
        hidden.grad = weight.grad = None
        loss = LOSSES[package](hidden, weight, tokens)
        loss.backward()
        return -float(loss)

    row = measured(theirs, asked.device, 1 if asked.small else 5)
    expected = -float(cross_entropy(linear(hidden, weight).float(), tokens, reduction="sum"))
    found = theirs()
    return {**row, "sums": (found, expected), "within": abs(found - expected) < 1e-2 * abs(expected)}


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


def peers_that_are_missing() -> dict[str, Any]:
    """Why there are no numbers of vLLM here."""
    if find_spec("vllm") is not None or shutil.which("vllm"):
        return {"vllm": "installed: measure it by hand (engine.kind = vllm)"}
    return {"vllm": "not installed: with the packages that it brings it is some GB, too much to carry along"}


def main() -> int:
    asked = Asked.parse()
    results = Results("fast", asked)

    def measure(name: str, work: Any, needs: float) -> None:
        results.measure(name, work, 0.0 if asked.small else needs)
        gc.collect()
        if asked.device.type == "cuda":
            torch.cuda.empty_cache()

    results.measure("vLLM", peers_that_are_missing)
    measure("log-probs, V = 151,936", lambda: logps(asked), 3)
    for package in LOSSES:
        measure(f"log-probs by {package}", lambda package=package: other_logps(package, asked), 3)
    for name in SHAPES:
        measure(f"training, {name}", lambda name=name: training(name, asked), 12)
    measure(f"decoding, batch {BATCH}", lambda: decoding(asked), 15)
    for name in ABLATIONS:
        measure(f"training with {name}", lambda name=name: ablation(name, asked), 12)
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
