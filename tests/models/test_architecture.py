"""What a model's log-probs depend on besides weights and tokens: lengths, other rows, routers' noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from rounding import rounding

from agro.config import RunConfig, SamplerConfig
from agro.errors import Refused
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.rollout import Rollout
from agro.rollout.engines.hf import HF
from agro.train.monitors.warnings import notes
from agro.types import Prompt, Sample

LENGTHS = [16, 12, 5]
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 6.0, 8.0, 10.0],
}
LONGROPE = {"rope_parameters": ROPE, "original_max_position_embeddings": 16}


def rows() -> torch.Tensor:
    return torch.randint(4, 13, (3, 16), generator=torch.Generator().manual_seed(1))


def summed(policy: Policy, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The sum of the log-probs of rows in one pass, without their first tokens."""
    width = max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    mask[:, 0] = False
    return policy.streams(tokens[:, :width], torch.tensor(lengths), mask)["logp"][mask].sum()


def gradient(policy: Policy) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
    policy.zero_grad()
    return found


def log_probs(policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """Of responses that may fill the context: trained and sampled."""
    samples = Rollout(policy.encoder, HF(policy)).sample(
        [Prompt("ab"), Prompt("abcdefgh a")], 8, SamplerConfig(max_new=80)
    )
    found = []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens[None].astype(np.int64))
        mask = torch.tensor(sample.action[None])
        with torch.no_grad():
            own = policy.streams(tokens, torch.tensor([tokens.shape[1]]), mask)["logp"]
        found.append((own[0].numpy(), sample.behavior_logp))
    trained, sampled = map(np.concatenate, zip(*found, strict=True))
    return trained, sampled


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Phi3", LONGROPE),
        ("Phimoe", {"rope_parameters": ROPE | {"short_mscale": 1.1, "long_mscale": 1.4}}),
        (
            "Gemma3",
            {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_type": "default"}}},
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16},
        ),
    ],
)
def test_angles_that_depend_on_the_longest_row_end_the_context(tiny, name, changes):
    policy = tiny(name, **changes)
    assert policy.context == 16
    trained, sampled = log_probs(policy)
    np.testing.assert_allclose(trained, sampled, **rounding(sampled))
    tokens = rows()
    summed(policy, tokens, LENGTHS).backward()
    together = gradient(policy)
    for row, length in zip(tokens, LENGTHS):
        summed(policy, row[None], [length]).backward()
    torch.testing.assert_close(gradient(policy), together, **rounding(together))
    with pytest.raises(InvalidSample, match=r"context is 16") as caught:
        policy.encode(Sample("abcdefgh", "abcdefgh"))
    assert caught.value.reason == "too long"
    with pytest.raises(Refused, match=r"^\w+: 17 tokens.* context is 16"):
        policy.streams(torch.ones(1, 17), torch.tensor([17]), torch.arange(17)[None] > 0)


def test_a_context_that_longrope_ends_is_noted(tiny):
    config = RunConfig()
    assert any("LongRoPE" in line for line in notes(tiny("Phi3", **LONGROPE), [], config))
    assert not any("LongRoPE" in line for line in notes(tiny(), [], config))


class MixingLlamaForCausalLM(transformers.LlamaForCausalLM):
    """Hidden states of batches with more than `sliding_window` tokens a row depend on the number of rows."""

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(self._mix)

    def _mix(self, module, args, out):
        return out * (1 + 0.1 * len(out) * (out.shape[1] > self.config.sliding_window))


@pytest.mark.parametrize("window", [0, 20, 64])
def test_a_model_that_mixes_rows_beyond_a_length_is_refused(causal, tokenizer, window):
    config = causal("Llama").config
    config.sliding_window = window
    with pytest.raises(Refused, match=r"MixingLlamaForCausalLM: .* nats"):
        Policy(MixingLlamaForCausalLM(config), tokenizer)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Phimoe", {"router_jitter_noise": 0.3, "input_jitter_noise": 0.2}),
        ("Mixtral", {"router_jitter_noise": 0.2}),
        ("MiniMax", {"router_jitter_noise": 0.2, "layer_types": ["full_attention"] * 2}),
        ("OPT", {"layerdrop": 0.5, "dropout": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    ],
)
def test_log_probs_and_gradients_are_those_in_eval_mode(causal, tokenizer, name, changes):
    """Of the unchanged model: neither noise of routers nor dropout, and experts chosen as in evaluation."""
    changes = changes | (
        {"num_local_experts": 4, "num_experts_per_tok": 2} if "router" in str(changes) else {}
    )
    model = causal(name, **changes).eval()
    tokens = rows()[:1]
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    own = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0].sum()
    own.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    policy = Policy(model.train(), tokenizer)
    found = summed(policy, tokens, [16])
    found.backward()
    torch.testing.assert_close(found, own, **rounding(own))
    torch.testing.assert_close(gradient(policy), expected, **rounding(expected))
    for key, value in changes.items():  # what is saved is the user's own configuration
        assert getattr(model.config, key) == value


def test_a_model_that_cannot_be_called_is_refused(causal, tokenizer):
    electra = transformers.ElectraConfig(vocab_size=13, hidden_size=16, embedding_size=8, num_hidden_layers=1)
    electra.num_attention_heads, electra.is_decoder = 2, True  # its head has a layer before the linear one
    with pytest.raises(Refused, match=r"ElectraForCausalLM: .*fails"):
        Policy(transformers.ElectraForCausalLM(electra), tokenizer)
