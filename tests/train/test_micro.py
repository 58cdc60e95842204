"""Forward passes: their limits, and what happens when memory runs out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tiny_runs import metrics, tiny, weights

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig, TrainConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.train import step
from agro.train.learner import Local
from agro.train.step import MicroBatch

LENGTH = [3, 9, 4, 8, 2, 7]


def test_tokens_count_with_their_padding() -> None:
    parts = MicroBatch(None, 16).pack([[i] for i in range(6)], LENGTH)
    assert parts == [[1], [3, 5], [2, 0, 4]]  # 9; 2 × 8; 3 × 4
    assert MicroBatch(2, 16).pack([[i] for i in range(6)], LENGTH) == [[1], [3, 5], [2, 0], [4]]
    assert MicroBatch(None, 5).pack([[0], [1]], LENGTH) == [[1], [0]]  # one that is too long goes alone


def test_blocks_stay_together_or_do_not_fit() -> None:
    assert MicroBatch(None, 24).pack([[0, 2], [3, 5], [4]], LENGTH) == [
        [3, 5],
        [0, 2, 4],
    ]  # 2 × 8, for 4 × 8 is too much
    assert MicroBatch(None, 15).pack([[0, 2], [3, 5]], LENGTH) is None


def test_defaults() -> None:
    assert MicroBatch.of(TrainConfig(micro_batch=3)).tokens is None
    assert (MicroBatch.of(TrainConfig()).sequences, MicroBatch.of(TrainConfig()).tokens) == (None, 2048)
    only = MicroBatch.of(TrainConfig(micro_tokens=100))
    assert (only.sequences, only.tokens) == (None, 100)


def test_it_halves_until_the_work_fits_and_says_so() -> None:
    said: list[str] = []
    micro = MicroBatch(16, 1000, said.append)

    def work() -> int:
        assert micro.sequences is not None
        if micro.sequences > 3:
            raise torch.OutOfMemoryError("tried to allocate")
        return micro.sequences

    assert micro.within_memory(work, 12) == 3  # 12 → 6 → 3
    assert micro.tokens == 250
    assert len(said) == 2
    assert "at most 3 sequences and 250 tokens" in said[1]


def test_other_errors_pass_and_a_single_sequence_is_the_end() -> None:
    def fails() -> None:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape"):
        MicroBatch(4).within_memory(fails, 4)
    with pytest.raises(Refused, match=r"single sequence .*allocate.*train\.gradient_checkpointing"):
        MicroBatch(4).within_memory(lambda: torch.empty(10**15), 4)  # what the CPU's allocator really says


def run(folder: Path, name: str, **changes) -> Path:
    return Trainer(tiny(folder, train__steps=3, **changes), folder / name).run()


def test_out_of_memory_in_the_middle_of_a_backward_changes_nothing_but_rounding(
    tmp_path: Path, monkeypatch
) -> None:
    """Memory runs out at the second pass of a step, when the first has left its gradient."""
    whole = run(tmp_path, "whole", train__micro_batch=6)
    forward, seen = step._forward, []

    def scarce(policy, batch, rows, *rest):
        seen.append(len(rows))
        if len(rows) > 3 and torch.is_grad_enabled() and len(seen) % 2 == 0:
            raise torch.OutOfMemoryError("no more")
        return forward(policy, batch, rows, *rest)

    monkeypatch.setattr(step, "_forward", scarce)
    cut = run(tmp_path, "cut", train__micro_batch=6)
    assert 6 in seen
    assert seen[-1] <= 3
    for a, b in zip(metrics(whole), metrics(cut), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_recomputing_and_offloading_change_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("agro.train.step.SMALL", 1)
    plain = weights(run(tmp_path, "plain"))
    assert weights(run(tmp_path, "offloaded", train__offload=["activations", "optimizer"])) == plain
    assert weights(run(tmp_path, "recomputed", train__gradient_checkpointing=True)) == plain


def test_a_model_that_cannot_recompute_is_refused(tokenizer) -> None:
    sizes = {"n_embd": 16, "dff": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    model = transformers.CTRLLMHeadModel(transformers.CTRLConfig(vocab_size=13, **sizes))
    learner = Local(Policy(model, tokenizer), None, print)
    learner.enter(RunConfig(), began=None, resumed=None)
    config = RunConfig.of({"train": {"gradient_checkpointing": True}})
    with pytest.raises(Refused, match=r"train\.gradient_checkpointing: CTRLLMHeadModel"):
        learner.enter(config, began=None, resumed=None)


def test_recomputing_keeps_less(tiny) -> None:
    """Bytes that autograd keeps for a backward pass of 6 layers."""

    def kept(recompute: bool) -> int:
        policy = tiny(num_hidden_layers=6)
        policy.recompute = recompute
        sizes: list[int] = []
        tokens = torch.ones((4, 64), dtype=torch.long)
        mask = torch.arange(64)[None].expand(4, 64) > 0
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.nbytes), x)[1], lambda x: x):
            policy.streams(tokens, torch.full((4,), 64), mask)
        return sum(sizes)

    assert kept(True) < 0.3 * kept(False)
