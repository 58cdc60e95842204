"""Training, log-probs and sampling on one GPU: tokens per second, MFU and peak memory.

    python benchmarks/gpu.py [--parts training logps sampling] [--sequences 16] [--no-checkpointing]
    python benchmarks/gpu.py --device cpu --small

The models have the shapes of Qwen3-0.6B (all weights, bfloat16 with float32 copies) and Qwen3-4B (an adapter
of rank 16 on bfloat16 weights), and random weights: nothing is downloaded. A training step is the gradient of
RLOO without a reference over 16,384 tokens in one pass, --sequences of equal length without padding, and the
update. Activations are recomputed, unless --no-checkpointing is given. MFU counts six operations per weight
and token (four with an adapter, whose frozen weights need no gradient) and those of attention, not those of
recomputation, over the dense bfloat16 rate in RATES; it is unknown for other devices. To beat are the
baselines that prime-rl commits for one H100, in PEERS. Log-probs at a vocabulary of 151,936 are timed beside
those of Liger, skipped with the reason where liger_kernel or CUDA is absent. Sampling decodes 256 responses
at once. Memory is the largest that torch allocated on the GPU; on a CPU the process's largest.

--small is the same code with tiny shapes; its numbers say nothing. Results are written on a GPU only, to
benchmarks/results/gpu.json. It has not run on a GPU yet. `make gpu` runs it after the tests that need CUDA.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from agro import objectives
from agro.config import LoRA, RunConfig, SamplerConfig
from agro.models.adapters import adapted
from agro.models.logprobs import Outputs, token_streams
from agro.models.masters import Masters
from agro.models.policy import Policy
from agro.models.tiles import Head
from agro.rollout.engines import Request
from agro.rollout.engines.hf import HF
from agro.train.learner import Local
from agro.types import Batch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/gpu.json"
RATES = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bfloat16 operations a second, from NVIDIA
PEERS = {  # prime-rl's baselines on one H100: tokens a second, MFU, GiB
    "0.6B, all weights": {"tokens_per_second": 11_900, "mfu": 0.111, "gib": 12.5},
    "4B, LoRA 16": {"tokens_per_second": 6_200, "mfu": 0.217, "gib": 23.3},
}
SHAPES: dict[str, dict[str, int]] = {
    "0.6B, all weights": {"hidden": 1024, "inner": 3072, "layers": 28, "heads": 16, "per_head": 128},
    "4B, LoRA 16": {"hidden": 2560, "inner": 9728, "layers": 36, "heads": 32, "per_head": 128},
}
VOCABULARY, TOKENS, BATCH, NEW = 151_936, 16_384, 256, 128
SMALL = {"hidden": 32, "inner": 48, "layers": 2, "heads": 4, "per_head": 8}


def model_of(name: str, device: torch.device, small: bool) -> Policy:
    """A Qwen3 with random weights, trained as its name says."""
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
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    with_adapter = "LoRA" in name
    with device:
        model = transformers.Qwen3ForCausalLM(config)
    adapter, masters = None, None
    if with_adapter:
        model = model.bfloat16()
        adapter = adapted(model, "random", LoRA(rank=16))
    else:
        masters = Masters(dict(model.named_parameters()))
    policy = Policy(model, tokenizer, adapter=adapter)
    policy.masters = masters
    policy.eos_ids = ()  # only lengths end a response
    return policy


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """After one call that isn't timed."""
    found = []
    for repeat in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        if repeat:
            found.append(time.perf_counter() - began)
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def rate_of(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in RATES.items() if part in name), None)


def operations(policy: Policy, sequences: int, width: int) -> float:
    """Of forward and backward pass, without recomputation. The embedding is the head and counts once."""
    config = policy.model.config
    frozen = sum(p.numel() for p in policy.model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * width**2
    return sequences * (width * (6 * trained + 4 * frozen) + 3 * attention)


def training(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(asked.device)
    policy = model_of(name, device, asked.small)
    tokens = 128 if asked.small else TOKENS
    sequences, width = asked.sequences, tokens // asked.sequences
    config = RunConfig.of(
        {
            "objective": {"name": "rloo", "beta": 0.0},
            "train": {"micro_tokens": tokens, "gradient_checkpointing": asked.checkpointing, "lr": 1e-6},
        }
    )
    learner = Local(policy, None, print)
    learner.enter(config, began=None, resumed=None)
    learner.micro.adapts = False  # running out of memory is an error here
    random = torch.Generator().manual_seed(0)
    batch = Batch.of(
        mask=(torch.arange(width) > 0).expand(sequences, width),
        reward=torch.rand(sequences, generator=random).tolist(),
        group=[i // 4 for i in range(sequences)],
        tokens=torch.randint(0, policy.vocab_size, (sequences, width), generator=random),
        lengths=[width] * sequences,
    )
    options = objectives.get("rloo").resolve("rloo", config.objective.options)

    def step() -> None:
        learner.gradient(batch, "rloo", options, lambda: None)
        learner.move(1e-6)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    ours = seconds(step, device, asked.repeats)
    rate, used = rate_of(device), statistics.median(ours)
    mfu = None if rate is None else operations(policy, sequences, width) / used / rate
    found = {"tokens_per_second": tokens / used, "mfu": mfu, "gib": peak_gib(device)}
    return {"ours": ours, **found, "peer": PEERS[name], "ratio": ratio(found, PEERS[name], device)}


def ratio(found: dict[str, Any], peer: dict[str, float], device: torch.device) -> float | None:
    """Tokens per second over the peer's; unknown on another device than its own."""
    if device.type != "cuda" or "H100" not in torch.cuda.get_device_name(device):
        return None
    return float(found["tokens_per_second"] / peer["tokens_per_second"])


def logps(asked: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward from hidden states of width 1,024, ours and Liger's."""
    device = torch.device(asked.device)
    vocabulary, positions, width = (512, 64, 16) if asked.small else (VOCABULARY, 8192, 1024)
    random = torch.Generator(device).manual_seed(0)
    settings = {"generator": random, "device": device, "dtype": torch.bfloat16}
    hidden = torch.randn((1, positions + 1, width), **settings).requires_grad_()
    weight = torch.randn((vocabulary, width), **settings).mul_(0.05).requires_grad_()
    tokens = torch.randint(0, vocabulary, (1, positions + 1), generator=random, device=device)
    mask = torch.arange(positions + 1, device=device)[None] > 0

    def ours() -> torch.Tensor:
        hidden.grad = weight.grad = None
        logp = token_streams(Outputs(hidden, Head(weight)), tokens, mask)["logp"][mask]
        logp.sum().backward()
        return logp

    result: dict[str, Any] = measured(ours, device, asked.repeats)
    why = liger_is_missing(device)
    if why:
        return result | {"peer": None, "ratio": None, "skipped": why}
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")

    def liger() -> torch.Tensor:
        hidden.grad = weight.grad = None
        loss: torch.Tensor = fused(weight, hidden[0, :-1], tokens[0, 1:])
        loss.backward()
        return -loss

    both = float(ours().sum()), float(liger())
    assert abs(both[0] - both[1]) < 1e-2 * abs(both[0]), f"expected equal sums of log-probs, got {both}"
    other = measured(liger, device, asked.repeats)
    times = statistics.median(other["ours"]) / statistics.median(result["ours"])
    return result | {"peer": other["ours"], "peer_gib": other["gib"], "ratio": times}


def measured(work: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return {"ours": seconds(work, device, repeats), "gib": peak_gib(device)}


def liger_is_missing(device: torch.device) -> str:
    """Why Liger can't be measured; empty where it can."""
    if device.type != "cuda":
        return "Liger's kernels need CUDA"
    if find_spec("liger_kernel") is None:
        return "liger_kernel isn't installed: pip install liger-kernel"
    return ""


def sampling(asked: argparse.Namespace) -> dict[str, Any]:
    """Responses of 0.6B to prompts of 32 tokens, four to each, all decoded at once."""
    device = torch.device(asked.device)
    policy = model_of("0.6B, all weights", device, asked.small)
    batch, new = (8, 4) if asked.small else (BATCH, NEW)
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, policy.vocab_size, (-(-batch // 4), 32), generator=random).tolist()
    engine, sampler = HF(policy), SamplerConfig(batch=batch, max_new=new)

    def decode() -> None:
        requests = deque(Request(i, prompts[i // 4], new) for i in range(batch))
        assert sum(len(done.tokens) for done in engine.decode(requests, sampler, 0)) == batch * new

    result = measured(decode, device, asked.repeats)
    return result | {"tokens_per_second": batch * new / statistics.median(result["ours"])}


def machine(device: torch.device) -> str:
    name = f"{os.cpu_count()} CPU cores"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each case, one after the other, each in this process."""
    device = torch.device(asked.device)
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    if "training" in asked.parts:
        cases |= {f"training, {name}": lambda name=name: training(name, asked) for name in SHAPES}
    if "logps" in asked.parts:
        cases["log-probs, V = 151,936"] = lambda: logps(asked)
    if "sampling" in asked.parts:
        cases[f"sampling, batch {BATCH}"] = lambda: sampling(asked)
    rows = []
    for name, case in cases.items():
        row = {"name": name, "goal": 1.0, **case(), "commit": commit(), "machine": machine(device)}
        rows.append(row)
        print(json.dumps(row), flush=True)
        gc.collect()  # hooks of the weights refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", nargs="+", default=["training", "logps", "sampling"])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args(arguments)
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        print("skipped: expected a CUDA GPU, got none; --device cpu --small runs the code without one")
        return 0
    rows = measure(asked)
    if asked.device.startswith("cuda") and not asked.small:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
