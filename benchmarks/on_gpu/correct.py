"""Whether a GPU computes what the CPU does: the numbers, every objective, what saves memory, and resuming.

Bounds in float32: 1e-4 nats a token, and 1e-4 of a gradient's length. In bfloat16 the CPU's own rounding is
the measure: log-probs of sequences that the model itself wrote, against float32 with the same rounded
weights, may be off twice as far as the CPU's in bfloat16 on average, and three times at most. (For tokens
that no model would write log-probs of -20 and below differ by nats, which says nothing.)
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agro import objectives
from agro.config import LoRA, RunConfig, SamplerConfig
from agro.models.adapters import adapted
from agro.models.policy import Policy
from agro.rollout.engines import Request
from agro.rollout.engines.hf import HF
from agro.train.trainer import BaseTrainer
from benchmarks.on_gpu.common import ROOT, Asked, Results, Rloo, policy_of, qwen3

CPU = torch.device("cpu")
TESTS = ROOT / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "train")]  # whose batches and runs these are


def wild(small: bool) -> Any:
    """A model with random weights so large that it prefers some tokens: a float32 one, on the CPU."""
    width = 32 if small else 256
    shape = {"hidden": width, "inner": 2 * width, "layers": 2 if small else 4, "heads": 4, "key_heads": 2}
    vocabulary, spread = 256 if small else 4096, 1.7 / width**0.5  # as in the tests, .3 at a width of 32
    return qwen3(shape | {"per_head": width // 4}, vocabulary, initializer_range=spread)


def with_adapter(model: Any) -> Policy:
    torch.manual_seed(1)
    adapter = adapted(model, "random", LoRA(rank=4))
    for name, p in model.named_parameters():
        if "lora_B" in name:  # which are zero at first, and with them half of the gradient
            torch.nn.init.normal_(p.data, std=0.02)
    return policy_of(model, adapter)


def written(policy: Policy, rows: int, new: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the model writes by itself: tokens [B,T], lengths [B], and the recorded log-probs [B,new]."""
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, policy.vocab_size, (rows, 8), generator=random).tolist()
    engine = HF(policy)
    requests = deque(Request(i, prompts[i], new) for i in range(rows))
    found = {
        d.request.number: d for d in engine.decode(requests, SamplerConfig(batch=rows, max_new=new), seed)
    }
    tokens = torch.tensor([prompts[i] + found[i].tokens.tolist() for i in range(rows)])
    logp = torch.stack([torch.as_tensor(found[i].logp) for i in range(rows)])
    return tokens, torch.full((rows,), 8 + new), logp.float()


def logp_and_gradient(policy: Policy, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs [B,new] of what follows the 8 tokens of a prompt, and the gradient of their sum, in a row."""
    mask = (torch.arange(tokens.shape[1]) >= 8).expand(tokens.shape)
    policy.zero_grad()
    logp = policy.streams(tokens, lengths, mask)["logp"]
    logp.nan_to_num().sum().backward()
    return logp.detach().float().cpu()[:, 8:], in_a_row(policy)


def in_a_row(policy: Policy) -> Tensor:
    """All gradients, on the CPU, those of a value head last."""
    trained = [*policy.trained().values()]
    value = [] if policy.value is None else [p for p in policy.value.parameters() if p.grad is not None]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in (*trained, *value)]
    return torch.cat([grad.double().cpu().flatten() for grad in grads])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def numbers(asked: Asked) -> list[dict[str, Any]]:
    """Log-probs, gradients and decoding in float32 and bfloat16."""
    rows, new = (4, 16) if asked.small else (16, 64)
    exact = wild(asked.small)
    rounded = copy.deepcopy(exact).bfloat16().float()
    own = {
        "float32": written(policy_of(exact), rows, new, 0),
        "bfloat16": written(policy_of(rounded), rows, new, 0),
    }
    found = []
    allowed = {"mean": 1e-4, "most": 1e-4, "gradient": 1e-4}
    for name, model, device, dtype in (
        ("float32", exact, asked.device, torch.float32),
        ("bfloat16 of the CPU", rounded, CPU, torch.bfloat16),
        ("bfloat16", rounded, asked.device, torch.bfloat16),
    ):
        tokens, lengths, _ = own["float32" if dtype == torch.float32 else "bfloat16"]
        expected = logp_and_gradient(policy_of(copy.deepcopy(model)), tokens, lengths)
        there = policy_of(copy.deepcopy(model).to(device, dtype))
        logp, gradient = logp_and_gradient(there, tokens, lengths)
        off = (logp - expected[0]).abs()
        row = {"mean": float(off.mean()), "most": float(off.max())}
        row["gradient"] = relative(gradient, expected[1])
        # What it decodes there: against complete sequences there, and against float32 on the CPU.
        decoded, widths, recorded = written(there, rows, new, 1)
        for key, judge in (("decoded", there), ("decoded_cpu", policy_of(copy.deepcopy(model)))):
            off = (recorded - logp_and_gradient(judge, decoded, widths)[0]).abs()
            row |= {f"{key}_mean": float(off.mean()), f"{key}_most": float(off.max())}
        if name == "bfloat16 of the CPU":
            allowed = {"mean": 2 * row["mean"], "most": 3 * row["most"], "gradient": 2 * row["gradient"]}
            found.append({"name": name, **row, "largest_logp": float(expected[0].min())})
            continue
        pairs = [(row[key], allowed[key]) for key in allowed]
        pairs += [(row[f"decoded_cpu_{key}"], 1.5 * allowed[key]) for key in ("mean", "most")]
        found.append({"name": name, **row, "allowed": allowed, "within": all(a <= b for a, b in pairs)})
    return found


def every_objective(asked: Asked) -> dict[str, Any]:
    """The gradient of each, in float64 but for the norms of transformers, against the CPU's."""
    from test_step import CASES, batch_for, make_policies, passes

    from agro.train.step import backward

    policy, reference = make_policies()
    assert policy.value is not None
    first = {case[0]: case for case in reversed(CASES)}  # of each its first claim
    chosen = [first[name] for name in list(first)[:: 24 if asked.small else 1]]
    off, failed = {}, {}
    for name, options in chosen:
        try:
            batch = batch_for(name, options, policy, reference)
            resolved, found = objectives.get(name).resolve(name, options), []
            for device in (CPU, asked.device):
                for module in (policy.model, policy.value, reference.model):
                    module.to(device)
                policy.zero_grad()
                backward(policy, batch, name, resolved, passes(4), reference)
                found.append(in_a_row(policy))
            off[name] = relative(found[1], found[0])
        except Exception as error:  # noqa: BLE001
            failed[name] = f"{type(error).__name__}: {error}"[:300]
        finally:
            for module in (policy.model, policy.value, reference.model):
                module.to(CPU)
    worst = max(off, key=lambda name: off[name])
    row = {"objectives": len(chosen), "worst": {worst: off[worst]}, "allowed": 1e-5, "errors": failed}
    return {**row, "within": not failed and len(off) == len(chosen) and off[worst] <= 1e-5}


def steps_of(
    asked: Asked, device: torch.device, moves: int, lora: bool = False, **train: Any
) -> tuple[Tensor, Tensor]:
    """The first gradient of RLOO over a batch, and the weights after so many moves."""
    policy = (with_adapter if lora else policy_of)(wild(asked.small).to(device))
    rows, width = (8, 24) if asked.small else (32, 128)
    steps = Rloo(policy, [width - i % 5 for i in range(rows)], 4, **{"micro_tokens": 1 << 20, **train})
    gradient = None
    for _ in range(moves):
        steps.gradient()
        gradient = in_a_row(policy) if gradient is None else gradient
        steps.learner.move(1e-3)
    assert gradient is not None
    return gradient, torch.cat([p.detach().double().cpu().flatten() for p in policy.trained().values()])


def savers(asked: Asked) -> dict[str, Any]:
    """What saves memory changes nothing but rounding: of the first gradient, and of weights after two moves.

    Adam divides a gradient by its size, so that rounding decides the sign of those near 0: weights are
    compared where sums have the same order, with what is offloaded.
    """
    plain, moved = steps_of(asked, asked.device, 2)
    row: dict[str, Any] = {}
    for name, train in (
        ("micro-batches of 4", {"micro_tokens": None, "micro_batch": 4}),
        ("checkpointing", {"gradient_checkpointing": True}),
        ("offloaded activations", {"offload": ["activations"]}),
        ("offloaded optimizer", {"offload": ["optimizer"]}),
    ):
        gradient, weights = steps_of(asked, asked.device, 2, **train)
        row[name] = {"gradient": relative(gradient, plain)}
        if "optimizer" in name:
            row[name]["weights_equal"] = bool(torch.equal(weights, moved))
    on_cpu = {lora: steps_of(asked, CPU, 1, lora)[0] for lora in (False, True)}
    row["plain, against the CPU"] = {"gradient": relative(plain, on_cpu[False])}
    row["adapter, against the CPU"] = {
        "gradient": relative(steps_of(asked, asked.device, 1, True)[0], on_cpu[True])
    }
    return {**row, "allowed": 1e-4, "within": all(v["gradient"] <= 1e-4 for v in row.values())}


def ended(folder: Path, stops: Sequence[int], asked: Asked, dtype: str) -> bytes:
    """The weights of a tiny run of all that saves memory and follows, stopped and resumed at `stops`."""
    from reward import digits
    from tiny_runs import tiny

    folder.mkdir()
    settings: dict[str, Any] = {
        "reward__name": "digits",
        "policy__device": str(asked.device),
        "policy__dtype": dtype,
        "train__gradient_checkpointing": True,
        "train__offload": ["activations", "optimizer"],
        "train__weights_average": 0.5,
        "train__updates": 2,
        "train__checkpoint_every": 1,
        "train__steps": stops[0],
    }
    if dtype == "float32":  # in which alone it can move
        settings |= {"policy__reference": "ema", "policy__reference_decay": 0.9}
    config, run = tiny(folder, **settings), folder / "run"
    BaseTrainer(config, run, rewards={"digits": digits}).run()
    for stop in stops[1:]:
        config = RunConfig.load(run / "config.json")
        longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": stop})})
        BaseTrainer(longer, run, resume=True, rewards={"digits": digits}).run()
    return (run / "model/model.safetensors").read_bytes()


def resuming(asked: Asked, dtype: str) -> dict[str, Any]:
    """A run, the same again, and one that was stopped and resumed: the same bytes.

    Where a run isn't equal to itself, since kernels add in a varying order, the three are made again with
    torch's deterministic ones.
    """
    row = _three(asked, dtype)
    if not row["again_equal"]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        row["deterministic"] = _three(asked, dtype)
        torch.use_deterministic_algorithms(False)
    return {**row, "within": row.get("deterministic", row)["resumed_equal"]}


def _three(asked: Asked, dtype: str) -> dict[str, bool]:
    steps = 2 if asked.small else 4
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = ended(folder / "whole", [steps], asked, dtype)
        again = ended(folder / "again", [steps], asked, dtype)
        cut = ended(folder / "cut", [steps // 2, steps], asked, dtype)
    return {"again_equal": whole == again, "resumed_equal": whole == cut}


def cuda_tests(asked: Asked) -> dict[str, Any]:
    """The tests that are marked `cuda`."""
    marked = re.compile(r"^@pytest\.mark\.cuda", re.MULTILINE)
    files = [str(f) for f in sorted(TESTS.rglob("test_*.py")) if marked.search(f.read_text(encoding="utf-8"))]
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True, timeout=max(1.0, asked.left - 2)
    )
    lines = done.stdout.strip().splitlines()
    return {
        "said": lines[-1:],
        "within": done.returncode == 0,
        "failures": [x for x in lines if x.startswith(("FAILED", "ERROR"))],
    }


def main() -> int:
    asked = Asked.parse()
    results = Results("correct", asked)
    try:
        for row in numbers(asked):
            results.add(row)
    except Exception as error:  # noqa: BLE001
        results.add({"name": "numbers", "failed": f"{type(error).__name__}: {error}"[:500]})
    results.measure("every objective", lambda: every_objective(asked))
    results.measure("micro-batches, checkpointing, offloading, adapters", lambda: savers(asked))
    for dtype in ("float32", "mixed"):
        results.measure(f"resumed, {dtype}", lambda dtype=dtype: resuming(asked, dtype))
    if asked.small:
        results.add({"name": "CUDA tests", "skipped": "without a GPU each of them would be"})
    else:
        results.measure("CUDA tests", lambda: cuda_tests(asked), 15)
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
