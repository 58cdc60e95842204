"""The fused decoding step against transformers' forward, and which models have it."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from rounding import rounding
from sampling import end_with

from agro.config import SamplerConfig
from agro.rollout.engines import Request
from agro.rollout.engines.fused import is_fusable
from agro.rollout.engines.hf import HF

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
    tolerance = rounding(*(d.logp for d in plain.values()))
    for number, d in plain.items():
        assert own[number].tokens.tolist() == d.tokens.tolist()
        np.testing.assert_allclose(own[number].logp, d.logp, **tolerance)


def test_the_weights_of_now_are_used(tiny):
    policy = tiny()
    engine = HF(policy)
    list(engine.decode(deque(REQUESTS), SamplerConfig(), 3))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.2)
    after = {d.request.number: d for d in engine.decode(deque(REQUESTS), SamplerConfig(), 3)}
    plain = decoded(policy, False)
    tolerance = rounding(*(d.logp for d in plain.values()))
    for number, d in plain.items():
        np.testing.assert_allclose(after[number].logp, d.logp, **tolerance)


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


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("GPT2", {}),
        ("Gemma2", {}),
        ("Mistral", {"sliding_window": 8}),
        ("Llama", {"hidden_act": "gelu"}),
    ],
)
def test_other_models_are_not_fused(tiny, name, changes):
    assert not HF(tiny(name, **changes)).fused


def test_a_step_that_computes_something_else_is_not_used(tiny, monkeypatch):
    monkeypatch.setattr("agro.rollout.engines.fused.silu", lambda x: torch.nn.functional.silu(x) * 1.001)
    assert not HF(tiny()).fused
