"""A run's memory, counted from a shape, beside what torch allocates in the same step on `meta` tensors.

None of it was compared with a GPU: there was none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agro.config import RunConfig
from agro.models.adapters import adapted
from agro.models.footprint import CONTEXT, SIZES, SPARE, Footprint, on_meta, states_on_meta
from agro.models.logprobs import Outputs, token_streams
from agro.models.policy import recomputing
from agro.models.tiles import Head


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
    [("0.6B", False, 1000), ("0.6B", True, 4000), ("8B", True, 1000), ("8B", True, 4000)]
    + [
        pytest.param(model, checkpointing, tokens, marks=pytest.mark.nightly)
        for model in SIZES
        for checkpointing in (False, True)
        for tokens in (1000, 8000)
    ],
)
def test_a_step_takes_what_was_counted(model: str, checkpointing: bool, tokens: int) -> None:
    config = run(model, train={"gradient_checkpointing": checkpointing})
    counted = (Footprint.of(config).training(tokens) - CONTEXT) / SPARE
    real = allocated(config, tokens)
    print(
        model,
        checkpointing,
        tokens,
        f"counted {counted / 1e9:.2f} GB, allocated {real / 1e9:.2f} GB: {counted / real - 1:+.1%}",
    )
    assert counted == pytest.approx(real, rel=0.1)
