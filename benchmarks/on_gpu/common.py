"""What the parts share: arguments, results that are written as they come, clocks, and the device."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from agro import objectives
from agro.config import RunConfig
from agro.models.policy import Policy
from agro.train.learner import Local
from agro.types import Batch

ROOT = Path(__file__).resolve().parents[2]
RATES = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bfloat16 operations a second, from NVIDIA


@dataclass(frozen=True)
class Asked:
    """What a part was asked to do."""

    device: torch.device
    out: Path
    ends: float  # by time.monotonic()
    small: bool

    @classmethod
    def parse(cls) -> Asked:
        parser = argparse.ArgumentParser()
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--seconds", type=float, required=True)
        parser.add_argument("--small", action="store_true")
        given = parser.parse_args()
        given.out.mkdir(parents=True, exist_ok=True)
        device = torch.device(given.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            sys.exit("expected a CUDA GPU, found none; --device cpu --small runs the code without one")
        return cls(device, given.out, time.monotonic() + given.seconds, given.small)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()


def write(file: Path, content: Any) -> None:
    """JSON, complete or as it was."""
    making = file.with_name(f".{file.name}")
    making.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    making.replace(file)


class Results:
    """The rows of a part in OUT/PART.json, which is complete after each of them."""

    def __init__(self, part: str, asked: Asked) -> None:
        self.asked = asked
        self.file = asked.out / f"{part}.json"
        self.content: dict[str, Any] = {"small": asked.small, "rows": []}
        self.failed = False

    def add(self, row: dict[str, Any]) -> None:
        """`row["within"]` is false where something isn't as it must be."""
        self.content["rows"].append(row)
        self.failed |= row.get("within") is False or "failed" in row
        self.write()
        print(json.dumps(row, ensure_ascii=False), flush=True)

    def write(self) -> None:
        write(self.file, self.content)

    def measure(self, name: str, work: Callable[[], dict[str, Any]], needs: float = 0.0) -> None:
        """Add what `work` returns, or how it failed, which costs no other row; `needs`: seconds, else it is
        skipped."""
        if self.asked.left < needs:
            self.add({"name": name, "skipped": f"{self.asked.left:.0f} s left, needs {needs:.0f}"})
            return
        began = time.monotonic()
        try:
            row = work()
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            row = {"failed": f"{type(error).__name__}: {error}"[:500]}
        self.add({"name": name, **row, "took": round(time.monotonic() - began, 2)})


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Of each call, after one that isn't timed."""
    found = []
    for repeat in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        if repeat:
            found.append(time.perf_counter() - began)
    return found


def measured(work: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, Any]:
    """Seconds of each call, their median, and the peak of memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found = seconds(work, device, repeats)
    return {"seconds": found, "median": statistics.median(found), "gib": peak_gib(device)}


def qwen3(shape: dict[str, int], vocabulary: int, **more: Any) -> Any:
    """A Qwen3 with random weights. `shape`: hidden, inner, layers, heads, key_heads and per_head."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["key_heads"],
        head_dim=shape["per_head"],
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        **more,
    )
    return transformers.Qwen3ForCausalLM(config)


def policy_of(model: Any, adapter: Any = None) -> Policy:
    """With a tokenizer that nobody reads; only lengths end a response."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    policy = Policy(model, tokenizer, adapter=adapter)
    policy.eos_ids = ()
    return policy


class Rloo:
    """Steps of RLOO over one batch of random tokens, in groups of four."""

    def __init__(self, policy: Policy, lengths: Sequence[int], prompt: int, **train: Any) -> None:
        """`lengths`: of each sequence; `prompt`: tokens before a response; `train`: the values of `train`."""
        config = RunConfig.of({"objective": {"name": "rloo", "beta": 0.0}, "train": train})
        self.learner = Local(policy, None, print)
        self.learner.enter(config, began=None, resumed=None)
        self.options = objectives.get("rloo").resolve("rloo", config.objective.options)
        random, rows, places = torch.Generator().manual_seed(0), len(lengths), torch.arange(max(lengths))
        self.batch = Batch.of(
            mask=(places >= prompt) & (places < torch.tensor(lengths)[:, None]),
            reward=torch.rand(rows, generator=random).tolist(),
            group=[i // 4 for i in range(rows)],
            tokens=torch.randint(0, policy.vocab_size, (rows, len(places)), generator=random),
            lengths=list(lengths),
        )

    def gradient(self) -> None:
        self.learner.gradient(self.batch, "rloo", self.options, lambda: None)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gib(device: torch.device) -> float:
    """Of the GPU, as torch allocated it; on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def rate_of(device: torch.device) -> float | None:
    """Operations a second; None where they aren't known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in RATES.items() if part in name), None)
