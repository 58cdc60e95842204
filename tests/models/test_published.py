"""What a learner publishes: a probe with the model's own log-probs, and tied weights by their own names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agro.config import LoRA, NewModel, PolicyConfig, RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.published import Probe, form_of, publish

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
        save = type(policy.model).save_pretrained
        monkeypatch.setattr(
            type(policy.model),
            "save_pretrained",
            lambda self, folder: save(self, folder, max_shard_size="9KB"),
        )
    publish(policy, tmp_path, "explicit_head")
    files = {
        name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
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


def test_an_adapter_is_published_alone_with_the_log_probs_of_both(tmp_path: Path) -> None:
    Policy.load(PolicyConfig(new=NEW), seed=0).save(tmp_path / "base")
    tuned = Policy.load(PolicyConfig(model=str(tmp_path / "base"), lora=LoRA(rank=2)), seed=0)
    with torch.no_grad():
        for weight in tuned.weights().values():
            weight.add_(0.3)
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
    config = RunConfig.of(
        {"engine": engine, "policy": {"lora": lora}} if lora is not None else {"engine": engine}
    )
    assert form_of(config) == form


def test_the_probe_of_a_short_context_leaves_room_for_a_token() -> None:
    policy = Policy.load(PolicyConfig(new=NEW.model_copy(update={"context": 16})), seed=0)
    assert [len(ids) for ids in Probe.of(policy).ids] == [5, 15, 15, 15]
    assert json.dumps(Probe.of(policy).logp)
