"""In 16 bits an engine is refused for a defect and not for rounding, whatever the model's own rounding is."""

from contextlib import contextmanager

import pytest
import torch
import transformers

from agro.config import PolicyConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rollout.engines.hf import HF

NAMES = ("stories260K", "babyllama_char105")


@contextmanager
def unchanged(model):
    yield


@contextmanager
def without_a_layer(model):
    layers, count = model.model.layers, model.config.num_hidden_layers
    model.model.layers, model.config.num_hidden_layers = layers[:-1], count - 1
    try:
        yield
    finally:
        model.model.layers, model.config.num_hidden_layers = layers, count


@contextmanager
def with_a_stale_head(model):
    head = model.lm_head.weight
    before = head.detach().clone()
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0)).to(head)
    head.data.add_(0.1 * head.std() * noise)
    try:
        yield
    finally:
        head.data.copy_(before)


@contextmanager
def with_a_wrong_mask(model):
    """Each token sees the two before it alone."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def near(query, key, value, **kwargs):
        size = key.shape[-2]
        seen = torch.ones(size, size, dtype=torch.bool).tril().triu(-2)
        kwargs |= {"attn_mask": seen[-query.shape[-2] :], "is_causal": False}
        return attend(query, key, value, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = near
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = attend


DEFECTS = {f.__name__: f for f in (without_a_layer, with_a_stale_head, with_a_wrong_mask)}


def load(shared_model, name, dtype="bfloat16", temperature=1.0):
    path = str(shared_model(name))
    return Policy.load(PolicyConfig(model=path, dtype=dtype, device="cpu", temperature=temperature))


def trained_with(defect, monkeypatch):
    trained = HF._trained

    def changed(self, done):
        with defect(self.policy.model):
            return trained(self, done)

    monkeypatch.setattr(HF, "_trained", changed)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_rounding_passes(shared_model, name, temperature):
    engine = HF(load(shared_model, name, temperature=temperature))
    assert engine.fused


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_defect_is_refused(shared_model, monkeypatch, name, defect, dtype):
    policy = load(shared_model, name, dtype)
    trained_with(DEFECTS[defect], monkeypatch)
    with pytest.raises(Refused, match=r"token by token, its log-probs differ by .* nats"):
        HF(policy)


def test_a_deep_model_with_much_rounding_passes(shared_model):
    """Random weights of 30 layers, whose two paths are .8 nats apart on random tokens."""
    tokenizer = load(shared_model, "stories260K").tokenizer
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 30, "initializer_range": 0.06, "tie_word_embeddings": False}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **layers)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.lm_head.weight.data.mul_(32)  # logits of 20
    assert HF(Policy(model, tokenizer)).fused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_first_token_beyond_the_vocabulary_isnt_asked(tiny, dtype):
    """As GPT2's own, 50256, in the configuration of a small model."""
    HF(tiny("GPT2", dtype, bos_token_id=50256))
