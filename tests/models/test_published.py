"""Adapters, and what a learner publishes: a probe with the model's own log-probs, and tied weights by their
own names.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from rounding import rounding
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agro.config import LoRA, NewModel, PolicyConfig, RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.pretrained import new_model
from agro.models.published import Probe, form_of, publish
from agro.models.reference import frozen

NEW = NewModel(hidden=16, layers=1, heads=2, context=512)


@pytest.fixture
def policy() -> Policy:
    return Policy.load(PolicyConfig(new=NEW, temperature=0.5), seed=0)


def test_a_probe_has_the_log_probs_at_temperature_1_that_transformers_computes(
    policy, tmp_path: Path
) -> None:
    """Whatever the policy's own temperature; 365 tokens, of which the first of each sequence has none."""
    publish(policy, tmp_path, "model")
    probe = Probe.read(tmp_path)
    assert [len(ids) for ids in probe.ids] == [5, 40, 120, 200]
    assert {token for ids in probe.ids for token in ids} <= set(range(len(policy.tokenizer)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for ids, logp in zip(probe.ids, probe.logp, strict=True):
        with torch.no_grad():
            all_of = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = all_of.gather(1, torch.tensor(ids)[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logp), expected, rtol=0, atol=1e-5)
    assert Probe.of(policy) == probe


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_the_default_bound_is_that_of_the_type(dtype: str, allowed: float) -> None:
    policy = Policy.load(PolicyConfig(new=NEW, dtype=dtype), seed=0)
    assert Probe.of(policy).allowed == allowed


def test_a_folder_that_no_learner_published_is_refused(policy, tmp_path: Path) -> None:
    policy.save(tmp_path)
    with pytest.raises(Refused, match=r"expected weights that a learner published, with probe\.json"):
        Probe.read(tmp_path)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_tied_output_layer_gets_its_own_name(policy, tmp_path: Path, monkeypatch, sharded: bool) -> None:
    """The folder is a model of its own, with the same log-probs, which no longer ties the two."""
    assert policy.model.config.tie_word_embeddings
    if sharded:
        kind = type(policy.model)
        in_shards = functools.partialmethod(kind.save_pretrained, max_shard_size="9KB")
        monkeypatch.setattr(kind, "save_pretrained", in_shards)
    publish(policy, tmp_path, "explicit_head")
    files = {}
    for file in tmp_path.glob("*.safetensors"):
        files |= load_file(file)
    torch.testing.assert_close(files["lm_head.weight"], policy.model.lm_head.weight.detach(), rtol=0, atol=0)
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    torch.testing.assert_close(model.lm_head.weight, policy.model.lm_head.weight, rtol=0, atol=0)
    assert policy.model.config.tie_word_embeddings


def test_an_untied_model_is_published_as_it_is(policy, tmp_path: Path) -> None:
    policy.model.config.tie_word_embeddings = False
    policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.detach().clone())
    for form in ("model", "explicit_head"):
        publish(policy, tmp_path / form, form)
    names = [set(load_file(tmp_path / form / "model.safetensors")) for form in ("model", "explicit_head")]
    assert names[0] == names[1]


def test_an_adapter_is_published_alone_with_the_log_probs_of_both(base: str, tmp_path: Path) -> None:
    tuned = load(base)
    move(tuned)
    publish(tuned, tmp_path / "adapter", "adapter")
    publish(tuned, tmp_path / "merged", "model")
    assert not (tmp_path / "adapter/model.safetensors").exists()
    adapter, merged = Probe.read(tmp_path / "adapter"), Probe.read(tmp_path / "merged")
    assert adapter == merged
    served = Probe.of(Policy.load(PolicyConfig(model=str(tmp_path / "merged"))))
    for a, b in zip(adapter.logp, served.logp, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("engine", "lora", "form"),
    [
        ({}, None, "model"),
        ({"kind": "server"}, None, "explicit_head"),
        ({"kind": "server", "push": "transfer"}, None, "model"),
        ({"kind": "server"}, {}, "adapter"),
        ({"kind": "server", "push": "reload"}, {}, "explicit_head"),
        ({}, {}, "model"),
    ],
)
def test_the_form_is_what_the_engine_takes(engine, lora, form: str) -> None:
    config = RunConfig.of({"engine": engine} | ({} if lora is None else {"policy": {"lora": lora}}))
    assert form_of(config) == form


def test_the_probe_of_a_short_context_leaves_room_for_a_token() -> None:
    policy = Policy.load(PolicyConfig(new=NEW.model_copy(update={"context": 16})), seed=0)
    assert [len(ids) for ids in Probe.of(policy).ids] == [5, 15, 15, 15]
    assert json.dumps(Probe.of(policy).logp)


TOKENS = torch.tensor([[1, 5, 6, 7, 4, 2]])
LENGTHS = torch.tensor([6])
MASK = torch.arange(6)[None] > 1


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden": 16, "layers": 2, "heads": 2, "context": 32}
    new_model(folder, NewModel(alphabet="abcd", initializer_range=0.3, **sizes), 0)
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
        first, same = (next(iter(p.model.parameters())) for p in (policy, reference))
        assert first is same  # no second model
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
    written = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == base
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
