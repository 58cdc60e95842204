"""The local learner, which continues from what it saves alone; forward passes, their limits, and what happens
when memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from tiny_runs import metrics, run_tiny, tiny, weights

from agro import objectives
from agro.config import PolicyConfig, RunConfig, TrainConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.reference import load_reference
from agro.train import step
from agro.train.collate import collate
from agro.train.learner import Local, denormals_as_zero
from agro.train.step import MicroBatch, Passes, streams_of
from agro.types import Batch, Sample

REFERENCES = {
    "start": {},
    "ema": {"policy__reference": "ema", "policy__reference_decay": 0.5},
    "periodic": {"policy__reference": "periodic", "policy__reference_every": 2},
    "mixed": {"policy__dtype": "mixed"},
}


def batch(local: Local) -> Batch:
    samples = [
        Sample(f"{p}>", text, reward=float(i)) for p in (1, 2) for i, text in enumerate(("1", "234", "55"))
    ]
    drawn = collate([local.encoder.encode(s) for s in samples], 0)
    return drawn.replace(ref_logp=local.logp(drawn, "reference"))


def learner(config: RunConfig) -> Local:
    policy = Policy.load(config.policy, seed=0)
    if config.objective.name == "dro":
        policy.add_value()
    made = Local(policy, load_reference(config.policy, policy), print)
    made.enter(config, began=None, resumed=None)
    return made


def take_step(local: Local, number: int, check: Callable[[], None] = lambda: None) -> float:
    name, options = local.config.objective.name, local.config.objective.options
    resolved = objectives.get(name).resolve(name, options)
    loss = local.gradient(batch(local), name, resolved, check).evaluation.loss
    local.move(1e-2)
    local.follow(number)
    return loss


def all_weights(local: Local) -> list[torch.Tensor]:
    policy, reference = local.policy, local.reference
    parts = (policy.weights(), policy.trained(), policy.value_weights(), reference.weights())
    return [w.detach().clone() for part in parts for w in part.values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def saved(local: Local, folder: Path) -> Path:
    folder.mkdir()
    local.save(folder)
    return folder


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("objective", ["agro", "dro"])
def test_what_is_saved_continues_bit_by_bit(tmp_path: Path, reference: str, objective: str) -> None:
    """Weights, value, moments, a moving reference, the limits of a pass: three more steps are the same."""
    config = tiny(tmp_path, **REFERENCES[reference], objective={"name": objective, "beta": 0.1})
    first = learner(config)
    for number in range(1, 4):
        take_step(first, number)
    first.micro.sequences = 1  # as after memory ran out
    folder = saved(first, tmp_path / "saved")
    second = learner(config)
    second.load(folder, first.version)
    second.enter(config, began=None, resumed=folder)
    assert (second.version, second.micro.sequences) == (3, 1)
    assert same(all_weights(first), all_weights(second))
    for number in range(4, 7):
        assert take_step(first, number) == take_step(second, number)
    assert same(all_weights(first), all_weights(second))
    assert first.version == second.version == 6


def test_mixed_weights_move_and_add_up_in_float32(tmp_path: Path) -> None:
    """The gradient is exactly the sum over passes; updates that bfloat16 rounds away are kept."""
    local = learner(tiny(tmp_path, policy__dtype="mixed", train__micro_batch=1))
    rounded = learner(tiny(tmp_path, policy__dtype="bfloat16"))
    own = local.policy.trained()
    assert {w.dtype for w in local.policy.weights().values()} == {torch.bfloat16}
    assert {w.dtype for w in own.values()} == {torch.float32}
    for made in (local, rounded):
        for weight in made.policy.trained().values():
            weight.grad = torch.ones_like(weight)
        before = {name: w.detach().clone() for name, w in made.policy.trained().items()}
        made.move(1e-5)
        moved = [float((w.detach() - before[name]).abs().max()) for name, w in made.policy.trained().items()]
        name = next(n for n in before if "norm" in n)  # weights of 1, whose bfloat16 neighbor is 1 - 2^-8
        fell = float((before[name] - made.policy.trained()[name].detach()).max())
        assert fell == pytest.approx(1e-5, rel=1e-2) if made is local else fell == 0.0
        assert max(moved) > 0
    for name, weight in local.policy.weights().items():
        assert torch.equal(weight, own[name].bfloat16())
    parts = [torch.tensor(x, dtype=torch.bfloat16) for x in (1.0, 2**-9, 2**-9)]
    weight = next(iter(local.policy.weights().values()))
    local.policy.zero_grad()
    for part in parts:
        (weight * part).sum().backward()
    grad = next(iter(own.values())).grad
    assert weight.grad is None
    assert grad is not None
    assert (grad == 1 + 2**-8).all()  # in bfloat16 1


def test_a_phase_begins_with_new_moments_and_its_own_reference(tmp_path: Path) -> None:
    local = learner(tiny(tmp_path, policy__reference="phase"))
    take_step(local, 1)
    folder, drawn, key = saved(local, tmp_path / "saved"), batch(local), local.reference_key
    assert local.optimizer.adam.state
    assert not torch.equal(local.logp(drawn), local.logp(drawn, "reference"))
    local.enter(local.config, began=folder, resumed=None)
    assert not local.optimizer.adam.state
    assert torch.equal(local.logp(drawn), local.logp(drawn, "reference"))
    assert local.reference_key != key


def test_log_probs_are_the_streams(tmp_path: Path) -> None:
    local = learner(tiny(tmp_path, train__micro_batch=4))
    take_step(local, 1)
    drawn = batch(local)
    for which, policy in (("policy", local.policy), ("reference", local.reference)):
        found = local.logp(drawn, which)
        assert (found.dtype, found.requires_grad) == (torch.float64, False)
        assert torch.equal(found, streams_of(policy, drawn, ["logp"], Passes(MicroBatch(4)))["logp"])
        assert (found[~drawn.mask] == 0).all()
    assert not torch.equal(local.logp(drawn), local.logp(drawn, "reference"))


def test_the_value_is_clipped_by_itself(tmp_path: Path) -> None:
    """A large gradient of the value leaves the policy's, which is within the limit, as it is."""
    local = learner(tiny(tmp_path, objective={"name": "dro", "beta": 0.1}, train__clip=1.0))
    own, value = (list(of().values()) for of in (local.policy.weights, local.policy.value_weights))
    for parts, norm in ((own, 0.5), (value, 4.0)):
        for w in parts:
            w.grad = torch.full_like(w, norm / sum(v.numel() for v in parts) ** 0.5)
    assert local.optimizer.clip() == pytest.approx(0.5)
    norms = [float(torch.cat([w.grad.flatten() for w in parts]).norm()) for parts in (own, value)]
    assert norms == pytest.approx([0.5, 1.0])


def test_a_check_that_raises_leaves_weights_and_version(tmp_path: Path) -> None:
    local = learner(tiny(tmp_path))
    before = all_weights(local)
    with pytest.raises(KeyboardInterrupt):
        take_step(local, 1, check=Mock(side_effect=KeyboardInterrupt))
    assert local.version == 0
    assert same(before, all_weights(local))


def test_what_is_published_is_the_model(tmp_path: Path) -> None:
    local = learner(tiny(tmp_path))
    take_step(local, 1)
    local.publish(tmp_path / "published")
    found = Policy.load(PolicyConfig(model=str(tmp_path / "published"))).weights()
    assert all(torch.equal(w, found[name]) for name, w in local.policy.weights().items())


def test_denormal_numbers_are_zero_inside_and_as_before_outside() -> None:
    """They made updates with small weights six times slower."""
    small = torch.tensor([1e-39])
    with denormals_as_zero():
        assert float(small * 0.5) == 0
        with denormals_as_zero():
            pass
        assert float(small * 0.5) == 0
    assert float(small * 0.5) > 0


@pytest.mark.parametrize(
    ("sequences", "tokens", "blocks", "parts"),
    [
        (None, 16, [[i] for i in range(6)], [[1], [3, 5], [2, 0, 4]]),  # with padding 9; 2 × 8; 3 × 4
        (2, 16, [[i] for i in range(6)], [[1], [3, 5], [2, 0], [4]]),
        (None, 5, [[0], [1]], [[1], [0]]),  # one that is too long goes alone
        (None, 24, [[0, 2], [3, 5], [4]], [[3, 5], [0, 2, 4]]),  # 2 × 8, for 4 × 8 is too much
        (None, 15, [[0, 2], [3, 5]], None),  # blocks stay together or don't fit
    ],
)
def test_passes_of_so_many_sequences_and_tokens(
    sequences: int | None, tokens: int, blocks: list[list[int]], parts: list[list[int]] | None
) -> None:
    assert MicroBatch(sequences, tokens).pack(blocks, [3, 9, 4, 8, 2, 7]) == parts


@pytest.mark.parametrize(
    ("config", "sequences", "tokens"),
    [({"micro_batch": 3}, 3, None), ({}, None, 2048), ({"micro_tokens": 100}, None, 100)],
)
def test_limits_of_a_configuration(config: dict, sequences: int | None, tokens: int | None) -> None:
    micro = MicroBatch.of(TrainConfig(**config))
    assert (micro.sequences, micro.tokens) == (sequences, tokens)


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
    with pytest.raises(RuntimeError, match="shape"):
        MicroBatch(4).within_memory(Mock(side_effect=RuntimeError("shape mismatch")), 4)
    with pytest.raises(Refused, match=r"single sequence .*allocate.*train\.gradient_checkpointing"):
        MicroBatch(4).within_memory(lambda: torch.empty(10**15), 4)  # what the CPU's allocator really says


def test_out_of_memory_in_the_middle_of_a_backward_changes_nothing_but_rounding(
    tmp_path: Path, monkeypatch
) -> None:
    """Memory runs out at the second pass of a step, when the first has left its gradient."""
    changes = {"train__micro_batch": 6, "train__steps": 3}
    whole = run_tiny(tmp_path, "whole", **changes)
    forward, seen = step._forward, []

    def scarce(policy, batch, rows, *rest):
        seen.append(len(rows))
        if len(rows) > 3 and torch.is_grad_enabled() and len(seen) % 2 == 0:
            raise torch.OutOfMemoryError("no more")
        return forward(policy, batch, rows, *rest)

    monkeypatch.setattr(step, "_forward", scarce)
    cut = run_tiny(tmp_path, "cut", **changes)
    assert 6 in seen
    assert seen[-1] <= 3
    for a, b in zip(metrics(whole), metrics(cut), strict=True):
        assert [a["loss"], a["grad_norm"]] == pytest.approx([b["loss"], b["grad_norm"]], rel=1e-4)


def test_recomputing_and_offloading_change_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("agro.train.step.SMALL", 1)
    plain, offloaded, recomputed = (
        weights(run_tiny(tmp_path, name, train__steps=3, **changes))
        for name, changes in (
            ("plain", {}),
            ("offloaded", {"train__offload": ["activations", "optimizer"]}),
            ("recomputed", {"train__gradient_checkpointing": True}),
        )
    )
    assert plain == offloaded == recomputed


def test_a_model_that_cannot_recompute_is_refused(tokenizer) -> None:
    sizes = {"n_embd": 16, "dff": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    model = transformers.CTRLLMHeadModel(transformers.CTRLConfig(vocab_size=13, **sizes))
    local = Local(Policy(model, tokenizer), None, print)
    local.enter(RunConfig(), began=None, resumed=None)
    with pytest.raises(Refused, match=r"train\.gradient_checkpointing: CTRLLMHeadModel"):
        local.enter(RunConfig.of({"train": {"gradient_checkpointing": True}}), began=None, resumed=None)


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
