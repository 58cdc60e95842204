"""A run's memory, counted from a shape, beside what torch allocates in the same step on `meta` tensors.

None of it was compared with a GPU: there was none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from agro.api.fit import is_shape
from agro.config import RunConfig, TrainConfig
from agro.errors import Refused
from agro.models.adapters import adapted
from agro.models.footprint import (
    ASLEEP,
    CONTEXT,
    SIZES,
    SPARE,
    Footprint,
    engine_settings,
    on_meta,
    optimized,
    shape,
    shape_of,
    states_on_meta,
)
from agro.models.logprobs import Head, Outputs, token_streams
from agro.models.policy import recomputing


class Live(TorchDispatchMode):
    """Bytes of the storages on `meta` that are alive, and the most there were at once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: dict[int, int] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != "meta" or key in self.seen:
            return
        self.seen[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, key)

    def drop(self, key: int) -> None:
        self.now -= self.seen.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out


def run(model: str, **changes: Any) -> RunConfig:
    policy = {"model": model, "dtype": "bfloat16", "lora": {"rank": 16, "merge": False}}
    return RunConfig.of({"policy": policy | changes.pop("policy", {}), **changes})


def counted(config: RunConfig) -> Footprint:
    """Of a run with a reference."""
    return Footprint.of(config, has_reference=True)


def allocated(config: RunConfig, tokens: int) -> int:
    """The most bytes in a step with AdamW over one sequence, with the adapter's reference; as `Learner` does
    it, but for the objective, which is the sum of log-probs."""
    assert config.policy.model is not None
    assert config.policy.lora is not None
    model = on_meta(config.policy.model, "bfloat16")
    adapted(model, "", config.policy.lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    reference = [p.detach().clone() for p in trained]
    adam = torch.optim.AdamW(trained, foreach=False)
    adam.state.update({p: {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p)} for p in trained})
    for state in adam.state.values():
        state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
    moments = [t for state in adam.state.values() for t in state.values()]
    ids, mask = torch.zeros((1, tokens), dtype=torch.long), torch.arange(tokens)[None] > 0
    with (
        Live([*model.parameters(), *reference, *moments]) as live,
        recomputing(model, config.train.gradient_checkpointing),
    ):
        outputs = Outputs(states_on_meta(model, tokens), Head.of(model))
        streams = token_streams(outputs, ids, mask, want={"logp"}, temperature=1.0, chunk=config.policy.chunk)
        loss = streams.pop("logp").nan_to_num().sum()
        del outputs
        loss.backward()
        del loss
        adam.step()
    return live.peak


@pytest.mark.parametrize(
    ("model", "checkpointing", "tokens"),
    [("0.6B", False, 1000), ("0.6B", True, 4000), ("8B", True, 4000)]
    + [
        pytest.param(model, checkpointing, tokens, marks=pytest.mark.nightly)
        for model in SIZES
        for checkpointing in (False, True)
        for tokens in (1000, 8000)
    ],
)
def test_a_step_takes_what_was_counted(model: str, checkpointing: bool, tokens: int) -> None:
    config = run(model, train={"gradient_checkpointing": checkpointing})
    expected = (counted(config).training(tokens) - CONTEXT) / SPARE
    real = allocated(config, tokens)
    assert expected == pytest.approx(real, rel=0.1)


def test_sizes_are_those_of_qwen3() -> None:
    """Parameters that Qwen names: 0.6, 1.7, 4.0, 8.2 and 14.8 billion. A layer of the 8B has 4096² of queries
    and of outputs, a quarter of keys and of values (8 of 32 heads), and 3 · 4096 · 12288."""
    shapes = {name: shape(name, None, "bfloat16") for name in SIZES}
    billions = {name: round(found.weights / 1e9, 1) for name, found in shapes.items()}
    assert billions == {"0.6B": 0.6, "1.7B": 1.7, "4B": 4.0, "8B": 8.2, "14B": 14.8}
    assert shapes["8B"].packed == 36 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    served = counted(run("8B", engine={"kind": "vllm"}))  # its cache of keys and values, in bfloat16
    assert served.serving(300, 2) - served.serving(0, 2) == 600 * 2 * 36 * 8 * 128 * 2


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    values = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaConfig(vocab_size=500, num_key_value_heads=2, **values).save_pretrained(tmp_path)
    assert is_shape(str(tmp_path))
    found = shape_of(run(str(tmp_path)).policy)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert found.weights == 3 * layer + 2 * 500 * 64 + 64
    adapter = 2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 128) + 128 + 64  # in and out of each linear layer
    assert found.trained == 3 * 16 * adapter
    with pytest.raises(
        Refused, match=r"policy\.model: .*nowhere: expected 0\.6B, .* or a model with a config"
    ):
        counted(run(str(tmp_path / "nowhere")))


def test_a_second_model_in_the_process_counts_and_one_on_a_server_does_not() -> None:
    """A teacher of 1.7B in bfloat16, and a judge's own model. A teacher is the reference, so that the adapter
    has no frozen copy, in float32."""
    alone = counted(run("0.6B")).peak(1000, 8)
    copy = SPARE * 4 * shape_of(run("0.6B").policy).trained
    weights = 2 * shape("1.7B", None, "bfloat16").weights
    taught = {"policy": {"reference": "model", "reference_model": "1.7B"}}
    judged = {"reward": {"name": "model", "options": {"path": "1.7B"}}}
    served = {"policy": {"reference": "model", "reference_model": "http://127.0.0.1:8000"}}
    for changes, others in ((taught, 1), (judged, 1), (taught | judged, 2), (served, 0)):
        both = counted(run("0.6B", **changes)).peak(1000, 8)
        expected = others * weights - (0 if changes is judged else copy)
        assert both - alone == pytest.approx(expected)


def test_each_weight_of_a_run_without_an_adapter_has_its_copies() -> None:
    """In bytes: of float32 a weight, that of the reference, a gradient, two moments; of bfloat16 half. Of
    "mixed" model and reference are bfloat16; the optimizer's weight, its gradient and moments are float32."""
    weights = shape("0.6B", None, "bfloat16").weights
    for dtype, expected in (("float32", 5 * 4), ("bfloat16", 5 * 2), ("mixed", 2 * 2 + 4 * 4)):
        found = counted(run("0.6B", policy={"lora": None, "dtype": dtype}))
        assert found.resting - CONTEXT == pytest.approx(SPARE * expected * weights)


@pytest.mark.parametrize("reference", ["start", "model"])
def test_a_reference_that_no_phase_reads_is_not_there(reference: str) -> None:
    """In bytes: a frozen copy of each weight in bfloat16, 2, or those of the other model."""
    other = {"reference_model": "1.7B"} if reference == "model" else {}
    config = run("0.6B", policy={"lora": None, "reference": reference, **other})
    weights = shape("1.7B" if other else "0.6B", None, "bfloat16").weights
    without = Footprint.of(config, has_reference=False).resting
    factor = 1 if other else SPARE
    in_phases = run(
        "0.6B", policy={"lora": None}, phases=[{"name": "one", "policy": other | {"reference": reference}}]
    )
    assert counted(in_phases).resting == counted(config).resting
    assert counted(config).resting - without == pytest.approx(factor * 2 * weights)


def test_training_keeps_gradients_and_moments() -> None:
    """Of 10 weights in bfloat16, 20 bytes: gradients, two moments, or two of 8 bits; a float32 average."""
    kept = {"adamw": 20 + 40, "adamw_8bit": 20 + 20}
    for optimizer, expected in kept.items():
        assert optimized(TrainConfig(optimizer=optimizer), 10, 20) == SPARE * expected
    assert optimized(TrainConfig(weights_average=0.9), 10, 20) == SPARE * (kept["adamw"] + 40)


@pytest.mark.parametrize("sequences", [1, 1000])
def test_the_peak_is_the_larger_of_a_pass_and_sampling(sequences: int) -> None:
    """What rests is there in both. On a CPU both are there at once, and what an earlier pass had."""
    found = counted(run("0.6B"))
    training, serving = found.training(4000), found.serving(100, sequences)
    assert (training > found.resting + serving) == (sequences == 1)
    assert found.peak(4000, sequences, 100) == max(training, found.resting + serving)
    on_cpu = replace(found, on_cpu=True).peak(4000, sequences, 100)
    assert on_cpu == training + serving + sum(found.activations(4000))


@pytest.mark.parametrize("sleep", [False, True])
def test_a_server_gets_what_the_trainer_leaves(sleep: bool) -> None:
    """While it sleeps the trainer's activations have its memory; else both are there at once."""
    found = counted(run("0.6B", engine={"kind": "vllm", "sleep": sleep}))
    training, serving = found.training(4000), found.serving(4000, 8)
    both = max(training + ASLEEP, found.resting + serving) if sleep else training + serving
    assert found.peak(4000, 8) == both
    left = 24e9 - (found.resting if sleep else training)
    assert found.share(4000, 24e9, 48e9) == round(left / 48e9, 3)
    longest = found.longest(16e9, 8, 40_000)
    assert found.peak(longest, 8) <= 16e9 < found.peak(longest + 100, 8)
    with pytest.raises(Refused, match=r"engine\.memory: the trainer needs .* so vLLM gets nothing"):
        found.share(4000, 1e9, 1e9)


def test_the_server_gets_its_share_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run("0.6B", engine={"kind": "vllm", "sleep": True})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 24 * 10**9))
    assert engine_settings(config, torch.device("cpu"), has_reference=True).memory is None
    share = counted(config).share(2048, 24e9, 24e9)
    assert engine_settings(config, torch.device("cuda"), has_reference=True).memory == share
    given = run("0.6B", engine={"kind": "vllm", "memory": 0.5})
    assert engine_settings(given, torch.device("cuda"), has_reference=True).memory == 0.5
