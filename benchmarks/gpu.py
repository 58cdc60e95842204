"""All that is to be known of one GPU, in an hour: each part a process with a time limit of its own.

    python benchmarks/gpu.py [--parts tests agreement …] [--trl-python PYTHON] [--vllm COMMAND] [--model NAME]
    python benchmarks/gpu.py --device cpu --small

| part | what |
|---|---|
| tests | those that need CUDA |
| agreement | log-probs and decoding against the CPU's: float32 within 1e-4, bfloat16 within rounding |
| sampling | 256 responses of the shape of Qwen3-0.6B to prompts of 32 tokens, all decoded at once |
| vllm | the same by vLLM, which `engine.kind = "vllm"` starts (--vllm: its command), after pushes |
| training | RLOO over 16,384 tokens: Qwen3-0.6B, all weights; Qwen3-4B, an adapter of rank 16 |
| logps | log-probs at a vocabulary of 151,936, beside Liger's |
| learning | a small instruct model (--model) trained on sums, and its accuracy before and after |
| trl | the same run by TRL, where --trl-python names a Python that has it: seconds a step beside ours |

The result of a part is written as soon as it ends, also that it failed or ran out of time, to
benchmarks/results/gpu.json (on a CPU to build/gpu.json), so that what a part loses is its own time.

Models of training, sampling and log-probs have random weights in bfloat16. Activations are recomputed, unless
--no-checkpointing is given. MFU counts six operations per weight and token (four with an adapter, whose
frozen weights need no gradient) and those of attention, not those of recomputation, over the dense bfloat16
rate in RATES; it is unknown for other devices. To beat are the baselines that prime-rl commits for one H100,
in PEERS. Memory is the largest that torch allocated on the GPU; on a CPU the process's largest.

A machine that reaches no network must have all of it beforehand: --model as a folder, or in the cache of the
hub, and TRL, Liger's kernels and vLLM installed; what is missing is skipped, and the results say why.

--small is the same code with tiny shapes and models; its numbers say nothing. It has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from agro import objectives
from agro.config import EngineConfig, LoRA, RunConfig, SamplerConfig
from agro.models.adapters import adapted
from agro.models.logprobs import Outputs, token_streams
from agro.models.policy import Masters, Policy
from agro.models.published import publish
from agro.models.tiles import Head
from agro.rollout.engines import Engine, Request
from agro.rollout.engines.hf import HF
from agro.rollout.engines.vllm import VLLM
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
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    with_adapter = "LoRA" in name
    with device:
        model = transformers.Qwen3ForCausalLM(config)
    adapter, masters = None, None
    if not adapts:
        pass
    elif with_adapter:
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
    policy = model_of("0.6B, all weights", torch.device(asked.device), asked.small)
    return decoding(HF(policy), policy, asked)


def decoding(engine: Engine, policy: Policy, asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a batch of responses, and tokens a second."""
    batch, new = (8, 4) if asked.small else (BATCH, NEW)
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, policy.vocab_size, (-(-batch // 4), 32), generator=random).tolist()
    sampler = SamplerConfig(batch=batch, max_new=new)

    def decode() -> None:
        requests = deque(Request(i, prompts[i // 4], new) for i in range(batch))
        assert sum(len(done.tokens) for done in engine.decode(requests, sampler, 0)) == batch * new

    result = measured(decode, torch.device(asked.device), asked.repeats)
    return result | {"tokens_per_second": batch * new / statistics.median(result["ours"])}


def vllm(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """`sampling` by a server of vLLM that gets new weights first, and its tokens a second over ours."""
    name = f"sampling by vLLM, batch {BATCH}"
    command = shlex.split(asked.vllm)[0]
    if shutil.which(command) is None:
        why = f"no command {command}: pip install vllm into an environment and name it: --vllm ENV/bin/vllm"
        return [{"name": name, "goal": None, "skipped": why}]
    policy = model_of("0.6B, all weights", torch.device(asked.device), asked.small, adapts=False)
    policy.model.bfloat16()
    settings = EngineConfig(kind="vllm", vllm=asked.vllm)
    with closing(VLLM(settings, policy, partial(print, file=sys.stderr))) as engine:
        pushes, errors = [], []
        for version in range(asked.repeats):
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                publish(policy, Path(folder), "explicit_head")
                engine.load(Path(folder), version)
                pushes.append(time.perf_counter() - began)
                errors.append(engine.measured["push_error"])
        result = decoding(engine, policy, asked)
    ours = decoding(HF(policy), policy, asked)
    times = result["tokens_per_second"] / ours["tokens_per_second"]
    pushed = {"push_seconds": pushes, "push_error": errors}
    return [{"name": name, "goal": None, **result, **pushed, "peer": ours["ours"], "ratio": times}]


def machine(device: torch.device) -> str:
    name = f"{os.cpu_count()} CPU cores"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def agreement(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """How far log-probs, gradient and decoded log-probs are from those of float32 on the CPU, at most."""
    rows = []
    expected = numbers_on(torch.device("cpu"), torch.float32)
    for dtype, allowed in ((torch.float32, 1e-4), (torch.bfloat16, 0.25)):
        found = numbers_on(torch.device(asked.device), dtype)
        off = {name: float((found[name] - expected[name]).abs().max()) for name in ("logp", "gradient")}
        off["decoded"] = float(found["decoded"])
        within = max(off["logp"], off["decoded"]) <= allowed
        rows.append({"name": f"agreement, {dtype}", "goal": allowed, "ours": off, "within": within})
    return rows


def numbers_on(device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of a small model: log-probs, the gradient in direction, and how far decoded log-probs are off."""
    policy = model_of("4B, LoRA 16", torch.device("cpu"), small=True, adapts=False)
    policy.model.to(device, dtype)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, policy.vocab_size, (4, 64), generator=random)
    lengths, mask = torch.full((4,), 64), (torch.arange(64) > 7).expand(4, 64)
    logp = policy.streams(tokens, lengths, mask)["logp"]
    logp.nan_to_num().sum().backward()
    gradient = torch.cat([p.grad.float().flatten() for p in policy.weights().values() if p.grad is not None])
    engine = HF(policy)
    requests = deque(Request(i, tokens[i, :8].tolist(), 24) for i in range(4))
    off = []
    for done in engine.decode(requests, SamplerConfig(max_new=24), 0):
        row = torch.tensor([[*done.request.ids, *done.tokens.tolist()]])
        at = torch.arange(row.shape[1])[None] >= 8
        with torch.no_grad():
            own = policy.streams(row, torch.tensor([row.shape[1]]), at)["logp"].cpu()[at]
        off.append((own - torch.tensor(done.logp)).abs().max())
    return {
        "logp": logp.detach().float().cpu()[mask],
        "gradient": (gradient / gradient.norm()).cpu(),
        "decoded": torch.stack(off).max(),
    }


def learning(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Sums of two numbers, by AGRO: accuracy on other sums before and after, and seconds a step."""
    from agro import Trainer

    with tempfile.TemporaryDirectory() as folder:
        for name, numbers in (("train", range(10, 60)), ("held", range(60, 70))):
            sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in range(10, 30)]
            Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
        model: dict[str, Any] = {"model": asked.model, "dtype": "mixed"}
        if asked.small:
            model = {
                "new": {"alphabet": "0123456789+=", "hidden": 16, "layers": 1, "heads": 2, "context": 32}
            }
        values = {
            "policy": {**model, "device": asked.device},
            "data": {"prompts": f"{folder}/train.jsonl", "eval_prompts": f"{folder}/held.jsonl"},
            "sampler": {"n": 8, "max_new": 4 if asked.small else 32},
            "reward": {"name": "exact" if asked.small else "math"},
            "objective": {"name": "agro", "beta": 0.02},
            "train": {"steps": 2 if asked.small else 100, "groups": 2 if asked.small else 16, "lr": 1e-5},
            "evaluate": {"every": 2 if asked.small else 50, "n": 1},
        }
        run = Trainer(RunConfig.of(values), Path(folder) / "run").run()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [row["eval_reward"] for row in rows if row.get("eval_reward") is not None]
    seconds_a_step = [row["seconds"] for row in rows if row["step"]]
    return [{"name": "learning, sums", "goal": 0.1, "ours": seconds_a_step, "accuracy": measured}]


def trl(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds a step of TRL's RLOO on the sums of `learning`; the model is the same."""
    script = [asked.trl_python, str(ROOT / "benchmarks/gpu_trl.py"), "--model", asked.model]
    steps = "2" if asked.small else "30"
    done = subprocess.run(
        [*script, "--device", asked.device, "--steps", steps], check=True, stdout=subprocess.PIPE, text=True
    )
    return [
        {"name": "learning, sums, by TRL", "goal": None, "ours": json.loads(done.stdout.splitlines()[-1])}
    ]


def tests(asked: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-rs", "-q"]
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    return [{"name": "tests that need CUDA", "goal": 0, "ours": done.returncode, "said": done.stdout[-2000:]}]


PARTS: dict[
    str, tuple[int, Callable[[argparse.Namespace], list[dict[str, Any]]]]
] = {  # with seconds it may take
    "tests": (400, tests),
    "agreement": (200, agreement),
    "sampling": (400, lambda asked: [{"name": f"sampling, batch {BATCH}", "goal": 1.0, **sampling(asked)}]),
    "vllm": (900, vllm),
    "training": (
        600,
        lambda asked: [{"name": f"training, {n}", "goal": 1.0, **training(n, asked)} for n in SHAPES],
    ),
    "logps": (300, lambda asked: [{"name": "log-probs, V = 151,936", "goal": 1.0, **logps(asked)}]),
    "learning": (900, learning),
    "trl": (600, trl),
}


def measured_apart(part: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a part from a process of its own; one that says why there is no result where it fails."""
    began = time.perf_counter()
    command = [sys.executable, __file__, *asked.given, "--one", part]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PARTS[part][0], check=True)
        rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        rows = [{"name": part, "failed": f"{type(error).__name__}: {error}"[:500]}]
    used = time.perf_counter() - began
    return [{**row, "part": part, "seconds": used, "commit": commit()} for row in rows]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--trl-python")
    parser.add_argument("--vllm", default="vllm", help="the command, as engine.vllm")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=list(PARTS), help="this part, in this process")
    asked = parser.parse_args(arguments)
    asked.given = sys.argv[1:] if arguments is None else arguments
    on_gpu = asked.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        print("skipped: expected a CUDA GPU, got none; --device cpu --small runs the code without one")
        return 0
    if asked.one:
        print(json.dumps(PARTS[asked.one][1](asked)))
        return 0
    results = RESULTS if on_gpu and not asked.small else ROOT / "build/gpu.json"
    results.parent.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = []
    for part in asked.parts:
        if part == "trl" and asked.trl_python is None:
            print("trl: skipped: --trl-python names no Python that has it", flush=True)
            continue
        for row in measured_apart(part, asked):
            rows.append(row | {"machine": machine(torch.device(asked.device))})
            print(json.dumps(rows[-1]), flush=True)
        results.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
