"""Sampling beside transformers' `generate`: models of 1M, 5M and 34M random weights, several batches.

    python benchmarks/sampling/run.py [--sizes 1M 5M 34M] [--batches 16 64 256] [--new 32] [--pairs 3]

Prompts of 32 tokens, four responses each, temperature 1, one thread. "equal": a batch of responses of --new
tokens. "mixed": twice as many, of 1 to --new tokens, after prompts of 8 to 56; `generate` decodes two
batches, padded on the left, each until its longest response ends. agro records log-probs, `generate` doesn't.
The runs of a pair take turns in one process after one unmeasured pair; the ratio is of medians of CPU
seconds. `products` is the share of our seconds that the matrix products of the same tokens take by
themselves, packed and at the full batch: no engine can take less. Rows of --results
(benchmarks/results/sampling.json) with the same names are replaced.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from agro.config import SamplerConfig
from agro.models.policy import Policy
from agro.rollout.engines import Request
from agro.rollout.engines.fused import FusedStep
from agro.rollout.engines.hf import HF

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks import recording  # noqa: E402

RESULTS = ROOT / "benchmarks/results/sampling.json"
GROUP, PROMPT = 4, 32
GOALS = {"equal": 2.0, "mixed": 3.0}
SIZES = {
    "1M": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 1024},
    "5M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5, "vocab_size": 4096},
    "34M": {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 6, "vocab_size": 32000},
}


class Until(StoppingCriteria):  # type: ignore[misc]
    """Ends each row at its own length."""

    def __init__(self, ends: list[int]) -> None:
        self.ends = torch.tensor(ends)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def make(size: str, dtype: torch.dtype) -> Policy:
    torch.manual_seed(0)
    heads = SIZES[size]["hidden_size"] // (64 if size == "34M" else 32)
    config = LlamaConfig(
        **SIZES[size],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    policy = Policy(LlamaForCausalLM(config).to(dtype), tokenizer)
    policy.eos_ids = ()  # only lengths end a response
    return policy


def requests(policy: Policy, batch: int, new: int, lengths: str) -> list[Request]:
    random = np.random.default_rng(0)
    count = batch if lengths == "equal" else 2 * batch
    asked = []
    for number in range(count):
        if number % GROUP == 0:
            width = PROMPT if lengths == "equal" else int(random.integers(8, 57))
            ids = random.integers(2, policy.vocab_size, width).tolist()
        room = new if lengths == "equal" else int(random.integers(1, new + 1))
        asked.append(Request(number, ids, room))
    return asked


def ours(engine: HF, asked: list[Request], batch: int, seed: int) -> int:
    """Sample with agro; returns the number of tokens."""
    sampler = SamplerConfig(batch=batch, max_new=max(r.room for r in asked))
    return sum(len(done.tokens) for done in engine.decode(deque(asked), sampler, seed))


def peer(model: LlamaForCausalLM, asked: list[Request], batch: int, seed: int) -> int:
    """The same with `generate`."""
    torch.manual_seed(seed)
    count = 0
    for first in range(0, len(asked), batch):
        part = asked[first : first + batch]
        width = max(len(r.ids) for r in part)
        ids = torch.tensor([[0] * (width - len(r.ids)) + r.ids for r in part])
        mask = torch.tensor([[0] * (width - len(r.ids)) + [1] * len(r.ids) for r in part])
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(r.room for r in part),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Until([width + r.room for r in part])]),
        )
        assert out.shape[1] == width + max(r.room for r in part)
        count += sum(r.room for r in part)
    return count


def seconds(sample: Callable[..., int], source: Any, asked: list[Request], batch: int, seed: int) -> float:
    start = time.process_time()
    count = sample(source, asked, batch, seed)
    used = time.process_time() - start
    assert count == sum(r.room for r in asked)
    return used


def compare(policy: Policy, batch: int, new: int, lengths: str, pairs: int) -> dict[str, Any]:
    """CPU seconds of both, in turns."""
    asked = requests(policy, batch, new, lengths)
    engine = HF(policy)
    assert engine.fused
    found: dict[str, list[float]] = {"ours": [], "peer": []}
    for seed in range(pairs + 1):
        own = seconds(ours, engine, asked, batch, seed)
        other = seconds(peer, policy.model, asked, batch, seed)
        if seed > 0:
            found["ours"].append(own)
            found["peer"].append(other)
    ratio = statistics.median(found["peer"]) / statistics.median(found["ours"])
    return {
        "ratio": ratio,
        **found,
        "tokens": sum(r.room for r in asked),
        "products": products(policy, asked, batch) / statistics.median(found["ours"]),
    }


@torch.no_grad()
def products(policy: Policy, asked: list[Request], batch: int) -> float:
    """CPU seconds of the products alone: of each different prompt once, and of each response's tokens."""
    step = FusedStep(policy, batch)
    hidden = policy.model.config.hidden_size
    prompts = {id(r.ids): len(r.ids) for r in asked}

    def layers(rows: int) -> float:
        x = torch.randn(rows, hidden, dtype=policy.dtype)
        inner = torch.randn(rows, policy.model.config.intermediate_size, dtype=policy.dtype)
        began = time.process_time()
        for layer in step.layers:
            for product, of in ((layer.read, x), (layer.write, x), (layer.gate_up, x), (layer.down, inner)):
                product(of)
        return time.process_time() - began

    def head() -> float:
        x = torch.randn(batch, hidden, dtype=policy.dtype)
        began = time.process_time()
        step.head(x)
        return time.process_time() - began

    a_step = statistics.median(layers(batch) + head() for _ in range(31))
    steps = sum(r.room for r in asked) / batch
    return steps * a_step + statistics.median(layers(sum(prompts.values())) for _ in range(5))


def main() -> None:
    asked = recording.parser(
        __doc__,
        sizes=SIZES,
        batches=[16, 64, 256],
        dtypes=["float32", "bfloat16"],
        new=32,
        pairs=3,
        results=RESULTS,
    ).parse_args()
    torch.set_num_threads(1)
    for size, dtype in itertools.product(asked.sizes, asked.dtypes):
        policy = make(size, getattr(torch, dtype))
        for batch, lengths in itertools.product(asked.batches, GOALS):
            name = f"{size}, {dtype}, batch {batch}, {lengths}"
            found = compare(policy, batch, asked.new, lengths, asked.pairs)
            about = {"new": asked.new, "machine": recording.machine_of_models()}
            row = recording.row(name, goal=GOALS[lengths], **found, **about)
            own, other = statistics.median(row["ours"]), statistics.median(row["peer"])
            print(f"{name:34} agro {own:7.2f} s, generate {other:7.2f} s, {row['ratio']:.2f}x", flush=True)
            recording.keep(asked.results, row)


if __name__ == "__main__":
    main()
