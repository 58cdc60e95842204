"""Runs, objectives and engines on a pretended GPU: no tensor of the CPU gets into its operations, they end as
on the CPU, and the host waits for it as seldom as promised."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
from pretended import Gpu, Mismatch, OnGpu, pretended_gpu
from safetensors.torch import load_file
from test_references import base
from test_step import CASES, batch_for, make_policies, passes, resolved
from tiers import first_of_each, some
from tiny_runs import run_tiny

from agro import objectives
from agro.config import NewModel, PolicyConfig, RunConfig, SamplerConfig
from agro.models.policy import Policy
from agro.models.reference import frozen
from agro.objectives.core import wanted_streams
from agro.rollout.engines import Request
from agro.rollout.engines.hf import HF
from agro.train.learner import Local
from agro.train.step import backward
from agro.train.trainer import notes
from agro.types import Batch, KeptSets
from agro_papers.drafted import Drafted

pytestmark = pytest.mark.skipif(bool(pretended.MISSING), reason=pretended.MISSING)
A_STEP, A_TOKEN = 5, 1  # the promised numbers of waits, of a training step and of a decoded token


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with pretended_gpu() as entered:
        yield entered


def test_mixing_devices_is_refused_and_every_kind_of_wait_is_counted(gpu: Gpu) -> None:
    """So the tests below can fail: what CUDA refuses, and for what it synchronizes."""
    x = torch.arange(4.0, device="cuda:0")
    with pytest.raises(Mismatch, match="add: tensors on cuda:0 and on the CPU"):
        x + torch.ones(4)
    with pytest.raises(Mismatch, match="numpy"):
        x.numpy()
    waiting = (
        *(lambda: x.sum().item(), x.tolist, lambda: bool((x > 1).any()), x.nonzero, x.cpu, lambda: x[x > 1]),
        *(lambda: x[[0, 2]], lambda: torch.tensor([1.0]).to("cuda:0"), lambda: x.long().bincount()),
    )
    for work in waiting:
        gpu.waits.clear()
        work()
        assert gpu.waits.total() == 1
    gpu.waits.clear()
    y = (x * 2 + 1)[:2].exp().cumsum(0) + torch.ones(2).to("cuda:0", non_blocking=True)
    assert isinstance(y, OnGpu)
    assert not gpu.waits


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "objective": {"name": "ppo"},
        "policy__reference": "ema",
        "policy__reference_decay": 0.9,
        "train__gradient_checkpointing": True,
        "train__offload": ["activations", "optimizer"],
        "train__weights_average": 0.5,
        "train__updates": 2,
    },
    "mixed": {"policy__dtype": "mixed", "policy__reference": "periodic", "policy__reference_every": 1},
    "kept sets": {
        "objective": {"name": "grpo", "beta": 0.05},
        "sampler__top_k": 5,
        "sampler__keep_sets": True,
        "policy__cache_reference": True,
    },
    "adapter": {"policy": {"lora": {"rank": 2}}, "train__lr": 1e-3},
    "trust region": {"train__step_kl": 0.01, "sampler__stop": ["7"]},
}


def ended(folder: Path, device: str, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of a run that stops and resumes."""
    folder.mkdir()
    settings = {**changes, "policy__device": device, "train__checkpoint_every": 1}
    if "policy" in changes:
        settings["policy"] = {**changes["policy"], "model": base(folder)}
    run_tiny(folder, **settings, train__steps=1)
    run = run_tiny(folder, **settings, train__steps=2, resume=True)
    return load_file(run / "model/model.safetensors")


@pytest.mark.parametrize("name", some(RUNS, every=3))
def test_a_run_ends_as_on_the_cpu(tmp_path: Path, name: str) -> None:
    """Up to rounding: that of bfloat16 decides the sign of gradients near 0, so of two steps of Adam's, of
    1e-2 each."""
    allowed = 4e-2 if name == "mixed" else 1e-4
    expected = ended(tmp_path / "cpu", "cpu", RUNS[name])
    with pretended_gpu():
        found = ended(tmp_path / "gpu", "cuda:0", RUNS[name])
    assert expected.keys() == found.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, atol=allowed, rtol=allowed)


def streams_wanted(case: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
    name, options = case
    needs = objectives.get(name).needs(resolved(name, **options))
    return tuple(map(str, wanted_streams(needs)))


@pytest.mark.parametrize(("name", "options"), first_of_each(streams_wanted, CASES))
def test_an_objective_has_the_gradient_of_the_cpu(name: str, options: dict[str, Any]) -> None:
    """Up to the rounding of float64."""
    policy, reference = make_policies()
    batch = batch_for(name, options, policy, reference)
    gradients = []
    with pretended_gpu():
        for device in ("cpu", "cuda:0"):
            for part in (policy.model, policy.value, reference.model):
                part.to(device)
            backward(policy, batch, name, resolved(name, **options), passes(4), reference)
            gradients.append({n: p.grad.cpu() for n, p in policy.weights().items() if p.grad is not None})
            policy.zero_grad()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, atol=1e-9, rtol=1e-7)


@cache
def policy_on(device: str, vocabulary: int = 100) -> Policy:
    alphabet = "".join(chr(0x4E00 + i) for i in range(vocabulary))
    new = NewModel(alphabet=alphabet, hidden=16, layers=3, heads=2, context=64)
    return Policy.load(PolicyConfig(new=new, device=device))


def decoded(engine: HF, sampler: SamplerConfig) -> list[tuple[int, ...]]:
    """Eight responses; each operation on the pretended GPU is one of Python."""
    requests = deque(Request(i, [2 + i // 2, 3, 4][: 1 + i % 3], 6 + i % 5) for i in range(8))
    found = {done.request.number: tuple(done.tokens) for done in engine.decode(requests, sampler, 0)}
    return [found[i] for i in range(8)]


def engine_on(device: str, fused: bool | None, folder: Path) -> HF:
    """With a draft where `fused` is None."""
    if fused is not None:
        return HF(policy_on(device), fused=fused)
    policy_on("cpu").save(folder / "draft")
    return Drafted(policy_on(device), model=str(folder / "draft"), tokens=2)


FEW = {"batch": 4}  # so that rows are added on the way
PROMISED = [(FEW, True), (FEW, False), (FEW, None), (FEW | {"top_p": 0.9}, True)]
OPTIONS = [
    *({"min_p": 0.1}, {"top_k": 5}, {"temperature": 0.0}, {"top_k": 5, "keep_sets": True}),
    *({"stop": ["一"]}, {"skip_layers": 1.0}),
]


@pytest.mark.parametrize(
    ("options", "fused"), [*PROMISED, *some([(options, True) for options in OPTIONS], every=3)]
)
def test_an_engine_decodes_as_on_the_cpu_and_a_token_waits_once(gpu, options, fused, tmp_path) -> None:
    """Whatever the rows: one copy of tokens and log-probs. Adding rows, and removing them, doesn't wait."""
    sampler = SamplerConfig(**{"batch": 10, "max_new": 10, **options})
    expected = decoded(engine_on("cpu", fused, tmp_path), sampler)
    engine = engine_on("cuda:0", fused, tmp_path)
    assert engine.fused == bool(fused)
    steps: list[None] = []
    engine.check = lambda: steps.append(None)  # once a step
    gpu.waits.clear()
    assert decoded(engine, sampler) == expected
    if (options, fused) in PROMISED:
        assert len(steps) > 5
        assert gpu.waits.total() <= A_TOKEN * len(steps), gpu.waits


@pytest.mark.parametrize("has_kept_sets", some([False, True], every=2))
@pytest.mark.parametrize(
    ("vocabulary", "rows", "passes_made", "objective", "options"),
    [
        (100, 4, 1, "rloo", {"beta": 0.05}),
        (2500, 4, 1, "rloo", {"beta": 0.05}),  # three tiles
        (100, 32, 8, "sft", {}),
        (100, 32, 8, "rloo", {"beta": 0.05}),
    ],
)
def test_a_step_waits_as_often_as_promised(
    gpu, vocabulary, rows, passes_made, objective, options, has_kept_sets
) -> None:
    """With the reference's log-probs: once for these, once for the gradient's norm, and for the streams.

    These are read once where an objective couples the rows of more than one pass, else once a pass, whose
    gradient then needs no second forward pass: that would cost a third of the step, and a wait a few
    milliseconds of a pass of thousands of tokens."""
    policy = policy_on("cuda:0", vocabulary)
    config = RunConfig.of({"objective": {"name": objective}, "train": {"micro_batch": rows // passes_made}})
    learner = Local(policy, frozen(policy), print)
    learner.enter(config, began=None, resumed=None)
    width = 12
    batch = Batch.of(
        mask=(torch.arange(width) >= 4).expand(rows, width),
        reward=[i % 3 for i in range(rows)],
        group=[i // 4 for i in range(rows)],
        tokens=torch.randint(0, policy.vocab_size, (rows, width), generator=torch.Generator().manual_seed(0)),
        lengths=[width] * rows,
    )
    if has_kept_sets:  # of two tokens each
        both = torch.stack([batch.tokens, (batch.tokens + 1) % policy.vocab_size], 2)
        ids = both[batch.mask].sort(1).values.flatten()
        batch = batch.replace(kept=KeptSets(ids, torch.where(batch.mask, 2, 0)))
    gpu.waits.clear()
    known = batch.replace(ref_logp=learner.logp(batch, "reference"))
    learner.gradient(known, objective, resolved(objective, **options), lambda: None)
    learner.move(1e-3)
    assert gpu.waits.total() <= A_STEP + passes_made - 1, gpu.waits


def test_a_run_that_decodes_on_a_gpu_is_told_of_vllm(gpu: Gpu) -> None:
    config = RunConfig.of({"engine": {"kind": "hf"}})
    [line] = notes(policy_on("cuda:0"), [], config)
    assert "engine.kind = vllm starts vLLM" in line
    assert notes(policy_on("cuda:0"), [], RunConfig.of({"engine": {"kind": "vllm"}})) == []
    assert notes(policy_on("cpu"), [], config) == []
