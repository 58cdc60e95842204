"""Adapters: what trains, what the reference is, what is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rounding import rounding

from agro.config import LoRA, NewModel, PolicyConfig
from agro.errors import Refused
from agro.models.newmodel import new_model
from agro.models.policy import Policy
from agro.models.reference import frozen

TOKENS = torch.tensor([[1, 5, 6, 7, 4, 2]])
LENGTHS = torch.tensor([6])
MASK = torch.arange(6)[None] > 1


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("base")
    new_model(
        folder, NewModel(alphabet="abcd", hidden=16, layers=2, heads=2, context=32, initializer_range=0.3), 0
    )
    return str(folder)


def load(base: str, seed: int = 0, **lora) -> Policy:
    return Policy.load(PolicyConfig(model=base, lora=LoRA(rank=4, **lora)), seed=seed)


def logp(policy: Policy) -> torch.Tensor:
    return policy.streams(TOKENS, LENGTHS, MASK)["logp"].detach()[MASK]


def move(policy: Policy, by: float = 0.3) -> None:
    """Weights drawn at random, where B began as 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.weights().values():
            p.add_(by * torch.randn(p.shape, generator=generator))


def test_only_the_adapter_trains_and_it_begins_as_the_model(base: str) -> None:
    """peft's B matrices begin as 0, so nothing changes at first."""
    policy, plain = load(base), Policy.load(PolicyConfig(model=base))
    assert all("lora_" in name for name in policy.weights())
    assert len(policy.weights()) == 2 * 2 * 7  # A and B of the 7 linear maps of each of 2 layers
    assert torch.equal(logp(policy), logp(plain))


def test_the_adapter_is_drawn_from_the_seed(base: str) -> None:
    torch.manual_seed(5)
    one = load(base, seed=3).weights()
    torch.manual_seed(6)
    same, other = load(base, seed=3).weights(), load(base, seed=4).weights()
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert any(not torch.equal(one[n], other[n]) for n in one)


def test_the_reference_is_the_state_at_the_start_whether_the_adapter_was_empty_or_not(base: str) -> None:
    for begun in (False, True):
        policy = load(base)
        if begun:
            move(policy)
        before, reference = logp(policy), frozen(policy)
        move(policy, 0.5)
        assert not torch.allclose(logp(policy), before, atol=0.01)
        assert torch.equal(logp(reference), before)
        assert next(iter(reference.model.parameters())) is next(
            iter(policy.model.parameters())
        )  # no second model
        kl = policy.streams(TOKENS, LENGTHS, MASK, ["kl"], reference)["kl"]
        assert (kl[MASK] > 1e-4).all()
        kl[MASK].sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.weights().values())


def test_reading_the_reference_between_forward_and_backward_leaves_the_gradient(base: str) -> None:
    def gradient(disturb: bool) -> list[torch.Tensor]:
        policy = load(base)
        move(policy)
        reference = frozen(policy)
        move(policy)
        out = policy.streams(TOKENS, LENGTHS, MASK)["logp"]
        if disturb:
            logp(reference)
        out[MASK].sum().backward()
        return [p.grad for p in policy.weights().values()]

    assert all(torch.equal(a, b) for a, b in zip(gradient(False), gradient(True), strict=True))


def test_saved_alone_and_merged(base: str, tmp_path: Path) -> None:
    policy = load(base)
    move(policy)
    policy.save(tmp_path / "merged")
    policy.save(tmp_path / "alone", merge=False)
    expected = logp(policy)  # and saving left the policy as it was
    assert (
        json.loads((tmp_path / "alone" / "adapter_config.json").read_text())["base_model_name_or_path"]
        == base
    )
    assert not (tmp_path / "alone" / "model.safetensors").exists()
    for folder in ("merged", "alone"):
        loaded = Policy.load(PolicyConfig(model=str(tmp_path / folder)))
        assert loaded.adapter is None
        torch.testing.assert_close(logp(loaded), expected, **rounding(expected))
    again = Policy.load(PolicyConfig(model=base, lora=LoRA(start=str(tmp_path / "alone"))))
    torch.testing.assert_close(logp(again), expected, **rounding(expected))
    assert again.weights().keys() == policy.weights().keys()


@pytest.fixture(scope="module")
def untied(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model with an output layer of its own."""
    policy, folder = Policy.load(PolicyConfig(model=base)), tmp_path_factory.mktemp("untied")
    policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.detach() + 0.01)
    policy.model.config.tie_word_embeddings = False
    policy.save(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", [("all-linear",), ("embed_tokens", "q_proj")])
def test_merged_weights_are_the_exact_ones_rounded_once(
    dtype: str, targets: tuple[str, ...], untied: str, tmp_path: Path
) -> None:
    """W + α/r · BA, written once more; log-probs in float64 are those of the base with its adapter."""
    policy = Policy.load(PolicyConfig(model=untied, dtype=dtype, lora=LoRA(rank=4, targets=targets)))
    move(policy)
    policy.save(tmp_path / "merged")
    named = policy.model.named_parameters()
    exact = {name.replace(".base_layer", ""): p.detach().double() for name, p in named}
    for name in [name for name in exact if "_A" in name]:
        product = exact[name.replace("_A", "_B")] @ exact[name]
        weight = name.partition(".lora_")[0] + ".weight"
        scale = policy.adapter.peft_config["default"].lora_alpha / 4
        exact[weight] = exact[weight] + scale * (product.T if "embedding" in name else product)
    loaded = Policy.load(PolicyConfig(model=str(tmp_path / "merged"), dtype=dtype))
    weights = dict(loaded.model.named_parameters())
    for name, p in weights.items():
        assert torch.equal(p.detach(), exact[name].to(p.dtype)), name
    # Each weight is off by half a unit in its last place: log-probs by no more than some tens of these.
    bound = 64 * torch.finfo(loaded.dtype).eps
    assert float((exactly(loaded) - exactly(policy)).abs().max()) <= bound


def test_an_adapter_of_a_tied_embedding_is_refused_where_it_is_to_be_merged(base: str) -> None:
    with pytest.raises(Refused, match=r"policy\.lora: expected an adapter that can be merged"):
        load(base, targets=("embed_tokens",))
    policy = load(base, targets=("embed_tokens",), merge=False)
    with pytest.raises(Refused, match=r"tie_word_embeddings"):
        policy.save("nowhere")


def exactly(policy: Policy) -> torch.Tensor:
    """Log-probs with these weights in float64."""
    policy.model.double()
    return logp(policy)


def test_what_is_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"policy\.lora\.targets: nothing_like_it"):
        load(base, targets=("nothing_like_it",))
    load(base).save(tmp_path / "alone", merge=False)
    (tmp_path / "alone" / "adapter_model.safetensors").unlink()
    for config in (
        PolicyConfig(model=str(tmp_path / "alone")),
        PolicyConfig(model=base, lora=LoRA(start=str(tmp_path / "alone"))),
    ):
        with pytest.raises(Refused, match=r"it has no adapter_model\.safetensors"):
            Policy.load(config)
