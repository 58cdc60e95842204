"""A fused decoding step, and decoding with some layers skipped, against the model's own."""

from __future__ import annotations

import copy
from collections import deque

import numpy as np
import pytest
import torch
from rounding import rounding
from sampling import PROMPTS, assert_same, by_index, end_with, rollout, trainer_logp, windowed
from tiers import some

from agro.config import SamplerConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.pretrained import decoder_layers
from agro.rollout import Rollout
from agro.rollout.engines import Request
from agro.rollout.engines.fused import is_fusable
from agro.rollout.engines.hf import HF, chosen_layers, skipping
from agro_papers.drafted import Drafted

REQUESTS = [Request(i, [1, *[3 + (i + j) % 9 for j in range(5 * (i % 3))]], 20) for i in range(12)]


def decoded(policy, fused: bool, sampler: SamplerConfig | None = None) -> dict:
    engine = HF(policy, fused=fused)
    assert engine.fused == fused
    return {d.request.number: d for d in engine.decode(deque(REQUESTS), sampler or SamplerConfig(batch=5), 3)}


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_tokens_and_log_probs_are_those_of_the_model(tiny, name):
    """4 heads share 2 of keys and values. Rows of different lengths leave and enter."""
    policy = tiny(name, **({"sliding_window": None} if name == "Mistral" else {}))
    with torch.no_grad():
        for parameter_name, parameter in policy.model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:  # they are 1 or 0 at the start
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    end_with(policy, 5)
    own, plain = decoded(policy, True), decoded(policy, False)
    assert len({len(d.tokens) for d in plain.values()}) > 3
    assert_same(own, plain)


def test_the_weights_of_now_are_used(tiny):
    policy = tiny()
    engine = HF(policy)
    list(engine.decode(deque(REQUESTS), SamplerConfig(), 3))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.2)
    after = {d.request.number: d for d in engine.decode(deque(REQUESTS), SamplerConfig(), 3)}
    assert_same(after, decoded(policy, False))


def test_bfloat16_is_as_close_to_the_trainer_as_transformers_is(tiny):
    policy = tiny("Llama", torch.bfloat16)
    own, plain = decoded(policy, True), decoded(policy, False)
    first = [own[i].logp[0] - plain[i].logp[0] for i in own if own[i].tokens[0] == plain[i].tokens[0]]
    assert len(first) > 6
    assert np.abs(first).mean() < 0.03  # as in test_behavior_log_probs_of_a_bfloat16_policy


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_hook(policy):
    policy.model.base_model.layers[0].mlp.register_forward_hook(lambda module, inputs, out: out * 2)


def with_other_layer(policy):
    policy.model.base_model.layers[0].mlp.down_proj.__class__ = Scaled


def with_other_type(policy):
    policy.model.base_model.norm.double()


def with_other_forward(policy):
    layer = policy.model.base_model.layers[1]
    layer.forward = lambda hidden_states, **_: hidden_states


@pytest.mark.parametrize("change", [with_hook, with_other_layer, with_other_type, with_other_forward])
def test_a_modified_model_is_not_fused(tiny, change):
    policy = tiny()
    assert is_fusable(policy)
    change(policy)
    assert not is_fusable(policy)


@pytest.mark.parametrize("name", ["GPT2", "Gemma2", "Mistral"])
def test_other_models_are_not_fused(tiny, name):
    assert not HF(tiny(name, **windowed(name))).fused


def test_other_activations_are_not_fused(tiny):
    assert not HF(tiny(hidden_act="gelu")).fused


def test_a_step_that_computes_something_else_is_not_used(tiny, monkeypatch):
    monkeypatch.setattr("agro.rollout.engines.fused.silu", lambda x: torch.nn.functional.silu(x) * 1.001)
    assert not HF(tiny()).fused


NAMES = ["Llama", "GPT2", "Gemma3"]


def deep(tiny, name: str = "Llama", layers: int = 6) -> Policy:
    policy = tiny(name, num_hidden_layers=layers, **windowed(name))
    end_with(policy, 5)
    return policy


def without_layers(policy: Policy, skipped: list[int]) -> Policy:
    """A policy whose model has the other layers only."""
    model = copy.deepcopy(policy.model)
    blocks = next(m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList))
    kept = [i for i in range(len(blocks)) if i not in skipped]
    for i in reversed(skipped):
        del blocks[i]
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in kept]
    return Policy(model, policy.tokenizer)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", some([5, 64], every=2))
def test_log_probs_are_those_of_the_policy_without_the_layers(tiny, name, batch):
    policy = deep(tiny, name)
    options = SamplerConfig(max_new=30, batch=batch, skip_layers=0.5)
    samples = list(rollout(policy).sample(PROMPTS, 6, options))
    (layers,) = {tuple(s.sampling["skipped_layers"]) for s in samples}
    assert len(layers) == 2  # half of the 4 between the first and the last
    assert {0, 5}.isdisjoint(layers)
    shallow = without_layers(policy, list(layers))
    tolerance = rounding(*(s.behavior_logp for s in samples))
    for s in samples:
        np.testing.assert_allclose(s.behavior_logp, trainer_logp(shallow, s), **tolerance)
        assert np.abs(s.behavior_logp - trainer_logp(policy, s))[s.action].max() > 0.01


def test_each_batch_skips_others_and_a_seed_repeats_them(tiny):
    policy = deep(tiny)
    chosen = [chosen_layers(policy, 0.5, seed, number) for seed in range(5) for number in range(5)]
    assert chosen == [chosen_layers(policy, 0.5, seed, number) for seed in range(5) for number in range(5)]
    pairs = {(i, j) for i in range(1, 5) for j in range(i + 1, 5)}
    assert set(chosen) == pairs  # 25 draws of 6 pairs
    assert chosen_layers(policy, 1.0, 0, 0) == (1, 2, 3, 4)
    assert chosen_layers(policy, 0.0, 0, 0) == ()


def test_with_all_layers_nothing_is_recorded(tiny):
    (sample,) = rollout(deep(tiny)).sample(PROMPTS[:1], 1, SamplerConfig(max_new=3))
    assert "skipped_layers" not in sample.sampling


def test_a_draft_of_the_policy_without_its_layers(tiny, tmp_path):
    """The tokens are those that the same layers draw without a draft."""
    policy = deep(tiny)
    policy.save(tmp_path)
    sampler = SamplerConfig(max_new=20, skip_layers=0.25)
    plain = by_index(rollout(policy).sample(PROMPTS, 4, sampler))
    drafted = Rollout(policy.encoder, Drafted(policy, model=str(tmp_path)))
    for i, s in by_index(drafted.sample(PROMPTS, 4, sampler)).items():
        assert s.tokens.tolist() == plain[i].tokens.tolist()
        assert s.sampling == plain[i].sampling


def test_the_layers_are_back_whenever_the_reader_has_control(tiny, monkeypatch):
    policy = deep(tiny)
    tokens = torch.tensor([[1, 4, 5, 6]])
    given = tokens, torch.tensor([4]), torch.tensor([[False, True, True, True]])
    before = policy.streams(*given)["logp"]

    def is_whole() -> bool:
        own = [m for m in policy.model.modules() if "forward" in vars(m)]
        return not own and torch.equal(policy.streams(*given)["logp"][:, 1:], before[:, 1:])

    engine = rollout(policy)
    responses = engine.sample(PROMPTS, 4, SamplerConfig(max_new=20, skip_layers=0.5))
    next(responses)
    assert is_whole()  # in the middle
    responses.close()
    assert is_whole()
    head, calls = policy.model.base_model.layers[5], []

    def failing(module, *_):
        calls.append(1)
        if len(calls) > 30:
            raise RuntimeError("out of memory, say")

    handle = head.register_forward_pre_hook(failing)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        list(engine.sample(PROMPTS, 4, SamplerConfig(max_new=60, skip_layers=0.5)))
    handle.remove()
    assert is_whole()


def test_a_layer_that_has_its_own_forward_gets_it_back(tiny):
    policy = deep(tiny)
    block = decoder_layers(policy.model)[2]
    own = block.forward
    block.forward = own
    with skipping(policy, (2,)):
        assert block.forward is not own
    assert block.forward is own


def test_a_share_of_less_than_half_a_layer_is_refused(tiny):
    words = r"sampler.skip_layers: 0.1 of the 4 layers of LlamaForCausalLM .* none"
    with pytest.raises(Refused, match=words):
        next(rollout(deep(tiny)).sample(PROMPTS, 1, SamplerConfig(skip_layers=0.1)))
    with pytest.raises(Refused, match=r"0.9 of the 0 layers"):
        next(rollout(deep(tiny, layers=2)).sample(PROMPTS, 1, SamplerConfig(skip_layers=0.9)))


def test_a_model_whose_layers_need_each_other_is_refused(tiny, monkeypatch):
    policy = deep(tiny)
    engine, forward = HF(policy), policy.model.base_model.forward

    def counting(**inputs):
        whole = not any("forward" in vars(m) for m in decoder_layers(policy.model))
        if inputs["use_cache"] and not whole:
            inputs["position_ids"] = inputs["position_ids"] + 1 + inputs["position_ids"]
        return forward(**inputs)

    monkeypatch.setattr(policy.model.base_model, "forward", counting)
    with pytest.raises(Refused, match=r"its log-probs differ by"):
        next(engine.decode(deque([Request(0, [1, 4], 3)]), SamplerConfig(skip_layers=0.5), 0))


def test_evaluation_is_of_the_policy_itself():
    sampler = SamplerConfig(n=4, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, skip_layers=0.5, max_new=9)
    assert sampler.of_policy(1.0, 2) == SamplerConfig(n=2, max_new=9)
    assert SamplerConfig(temperature=0.7).is_of_policy(0.7)
    for name in ("top_k", "top_p", "min_p", "skip_layers"):
        one = SamplerConfig(temperature=0.7, **{name: getattr(sampler, name)})
        assert not one.is_of_policy(0.7)
    assert not SamplerConfig(temperature=0.7).is_of_policy(1.0)
