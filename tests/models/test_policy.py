"""Policies of several architectures: log-probs against the model's own logits, encoding, what is refused."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
import transformers
from rounding import rounding
from safetensors.torch import load_file, save_file
from sampling import check_behavior
from tokenizers.processors import TemplateProcessing

from agro.config import NewModel, PolicyConfig, RunConfig, SamplerConfig
from agro.errors import Refused
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.models.pretrained import new_model
from agro.models.reference import frozen
from agro.rollout import Rollout
from agro.rollout.engines.hf import HF
from agro.train.trainer import notes
from agro.types import Prompt, Sample

ARCHITECTURES = ["Llama", "Qwen2", "Qwen3", "GPT2"]
LENGTHS = torch.tensor([9, 5, 2])


def rows(dtype=torch.long):
    tokens = torch.randint(4, 13, (3, 9), generator=torch.Generator().manual_seed(1), dtype=dtype)
    places = torch.arange(9)[None]
    return tokens, (places > 0) & (places < LENGTHS[:, None])


def own_logp(policy: Policy, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """[T] from the model's own logits of one sequence, without padding."""
    logits = policy.model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float() / temperature
    return torch.cat(
        [torch.tensor([torch.nan]), torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]]
    )


@pytest.mark.parametrize(
    ("name", "temperature", "special"),
    [
        *((name, temperature, {}) for name in ARCHITECTURES for temperature in (1.0, 0.6)),
        ("Gemma2", 1.0, {"final_logit_softcapping": 2.0, "sliding_window": 4}),
        ("Gemma3", 1.0, {"final_logit_softcapping": 2.0, "sliding_window": 4}),
        ("Cohere", 1.0, {"logit_scale": 0.3}),
        ("Granite", 1.0, {"logits_scaling": 3.0}),
        ("Mistral", 1.0, {"sliding_window": 4}),
        ("Mixtral", 1.0, {"router_jitter_noise": 0.2}),
    ],
)
def test_log_probs_and_gradients_are_the_models_own(tiny, name, temperature, special):
    policy = tiny(name, temperature=temperature, **special)
    tokens, mask = rows()
    expected = [own_logp(policy, row[:length], temperature) for row, length in zip(tokens, LENGTHS)]
    sum(e[1:].sum() for e in expected).backward()
    right = {n: p.grad for n, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    found = policy.streams(tokens, LENGTHS, mask)["logp"]
    found[mask].sum().backward()
    for row, e in zip(found, expected):
        torch.testing.assert_close(row[: len(e)], e, **rounding(e), equal_nan=True)
        assert row[len(e) :].isnan().all()
    largest_gradient = torch.stack([g.abs().max() for g in right.values()])
    for n, p in policy.model.named_parameters():
        torch.testing.assert_close(p.grad, right[n], **rounding(largest_gradient))


def test_a_padding_token_that_is_written_has_its_gradient(tiny):
    """Some models pad with their EOS, which a turn may hold. torch leaves that row out of the gradient."""
    policy = tiny("Llama", torch.float64, pad_token_id=4)
    tokens = torch.tensor([[5, 4, 6, 4, 7]])
    mask = torch.arange(5)[None] > 0
    weight = policy.model.get_input_embeddings().weight

    def total() -> torch.Tensor:
        return policy.streams(tokens, torch.tensor([5]), mask)["logp"][mask].sum()

    total().backward()
    found = weight.grad[4, 0].item()
    sides = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            weight[4, 0] += step
            sides.append(total().item())
            weight[4, 0] -= step
    # transformers' norms round to float32: 3e-5 here.
    assert found == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-3)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bfloat16(tiny, name):
    policy = tiny(name, torch.bfloat16)
    tokens, mask = rows()
    with torch.no_grad():
        found = policy.streams(tokens, LENGTHS, mask, ("logp", "entropy"))
    assert found["logp"].dtype == torch.float32
    whole = own_logp(policy, tokens[0])
    # One unit in the last place of a bfloat16 logit of size 4 to 8 is 2^-5.
    torch.testing.assert_close(found["logp"][0], whole, rtol=0, atol=0.1, equal_nan=True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_neither_padding_nor_neighbors_matter(tiny, name):
    policy = tiny(name)
    tokens, mask = rows()
    reference = frozen(tiny(name, initializer_range=0.2))
    want = ("logp", "entropy", "kl")
    together = policy.streams(tokens, LENGTHS, mask, want, reference)
    wide = torch.nn.functional.pad(tokens, (0, 7), value=-1)
    wide[1, 5:] = 12
    padded = policy.streams(wide, LENGTHS, torch.nn.functional.pad(mask, (0, 7)), want, reference)
    for i, length in enumerate(LENGTHS.tolist()):
        alone = policy.streams(
            tokens[i : i + 1, :length], LENGTHS[i : i + 1], mask[i : i + 1, :length], want, reference
        )
        for s in want:
            for other in (together[s][i, :length], padded[s][i, :length]):
                torch.testing.assert_close(alone[s][0], other, **rounding(other), equal_nan=True)
    assert padded["kl"][:, 9:].isnan().all()


def test_kl_is_the_sum_over_the_whole_vocabulary(tiny):
    policy, reference = tiny(), frozen(tiny(initializer_range=0.2))
    tokens, mask = rows()
    found = policy.streams(tokens, LENGTHS, mask, ["kl"], reference)["kl"]
    own, other = (
        torch.log_softmax(p.model(input_ids=tokens[:1]).logits[0, :-1], -1).detach()
        for p in (policy, reference)
    )
    torch.testing.assert_close(found[0, 1:].detach(), (own.exp() * (own - other)).sum(1), **rounding(own))
    assert found[0, 1:].min() > 0.01
    same = policy.streams(tokens, LENGTHS, mask, ["kl"], frozen(policy))["kl"]
    assert same[mask].abs().max() <= rounding(own)["atol"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dropout_is_off_in_train_mode(tiny, name):
    of_gpt2 = ("attn_pdrop", "resid_pdrop", "embd_pdrop")
    changes = dict.fromkeys(of_gpt2 if name == "GPT2" else ("attention_dropout",), 0.5)
    policy = tiny(name, **changes)
    tokens, mask = rows()
    assert policy.model.base_model.training
    first, second = (policy.streams(tokens, LENGTHS, mask)["logp"][mask] for _ in range(2))
    assert torch.equal(first, second)
    for key, value in changes.items():  # what is saved is the user's own configuration
        assert getattr(policy.model.config, key) == value


def test_a_frozen_copy_stays(tiny):
    policy = tiny()
    reference = frozen(policy)
    with torch.no_grad():
        for p in policy.model.parameters():
            p += 1
    assert not any(p.requires_grad for p in reference.model.parameters())
    fresh = tiny()
    assert all(torch.equal(a, b) for a, b in zip(reference.model.parameters(), fresh.model.parameters()))
    assert reference.fingerprint == policy.fingerprint


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_loaded_it_is_the_same(tiny, tmp_path, name, dtype):
    tiny(name).save(tmp_path / "float32")
    policy = Policy.load(PolicyConfig(model=str(tmp_path / "float32"), dtype=dtype, device="cpu", chunk=5))
    policy.save(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    assert not any(n.endswith((".bin", ".pt", ".pkl")) for n in names)
    again = Policy.load(PolicyConfig(model=str(tmp_path), dtype=dtype, device="cpu", chunk=5))
    assert type(again.model) is type(tiny(name).model)
    assert again.fingerprint == policy.fingerprint
    assert again.dtype == policy.dtype == getattr(torch, dtype)
    assert again.encoder.prompt("a b") == [1, 4, 12, 5]
    assert (again.eos_ids, again.context, again.vocab_size) == ((2,), 96, 13)
    tokens, mask = rows()
    found, expected = (p.streams(tokens, LENGTHS, mask)["logp"][mask] for p in (again, policy))
    assert torch.equal(found, expected)


def test_a_fingerprint_is_of_what_decides_the_ids(tokenizer, tiny, tmp_path):
    policy = tiny()
    before = policy.fingerprint
    # which leaves its settings in the tokenizer
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tiny().fingerprint == before
    assert len(before) == 16
    int(before, 16)
    found = {}
    for alphabet in ("abcdefgh ", "abcdefgi ", "abcdefhg "):
        folder = tmp_path / alphabet
        new_model(folder, NewModel(alphabet=alphabet, hidden=8, layers=1, heads=1, context=96), 0)
        found[alphabet] = Policy.load(PolicyConfig(model=str(folder), device="cpu")).fingerprint
    assert found["abcdefgh "] == before
    assert len(set(found.values())) == 3


def test_end_tokens_of_a_real_model(shared_model):
    policy = Policy.load(PolicyConfig(model=str(shared_model("stories260K")), device="cpu"))
    assert policy.eos_ids == (2, 1)  # </s> closes a text; generation_config.json names both
    assert policy.context == 512
    assert policy.encoder.prompt("") == [1]
    assert policy.encoder.decode(policy.encoder.prompt("Once upon a time")) == "Once upon a time"


def test_prompts_begin_as_the_tokenizer_begins_them(tiny, tokenizer):
    policy = tiny()
    assert policy.encoder.prompt("") == [1]
    assert policy.encoder.prompt("a b") == [1, 4, 12, 5]
    bare = copy.deepcopy(tokenizer)  # one that puts nothing in front, such as GPT-2's
    bare.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    bare = Policy(policy.model, bare)
    assert bare.encoder.prompt("a") == [4]
    assert bare.encoder.prompt("") == [1]


def test_nothing_is_put_behind_a_prompt(tmp_path, tiny):
    new_model(tmp_path, NewModel(alphabet="ab", hidden=8, layers=1, heads=1, context=16), 0)
    file = tmp_path / "tokenizer.json"
    definition = json.loads(file.read_text())
    single = definition["post_processor"]["single"]
    single.append({"SpecialToken": {"id": "<eos>", "type_id": 0}})
    definition["post_processor"]["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [2], "tokens": ["<eos>"]}
    file.write_text(json.dumps(definition))
    policy = Policy.load(PolicyConfig(model=str(tmp_path), device="cpu"))
    assert policy.tokenizer("ab")["input_ids"] == [1, 4, 5, 2]
    assert policy.encoder.prompt("ab") == [1, 4, 5]


def test_encoding_closes_a_response_with_the_end_token(tiny):
    policy = tiny()
    out = policy.encode(Sample("ab", "c", reward=1.0))
    assert out.tokens.tolist() == [1, 4, 5, 6, 2]
    assert out.action.tolist() == [False, False, False, True, True]
    assert out.tokenizer == policy.fingerprint
    assert (out.reward, out.prompt_id) == (1.0, Sample("ab", "c").prompt_id)
    cut = policy.encode(Sample("ab", "c", meta={"finish": "length"}))
    assert cut.tokens.tolist() == [1, 4, 5, 6]
    assert policy.encode(Sample("", "")).tokens.tolist() == [1, 2]


def test_tokens_of_this_tokenizer_are_kept(tiny):
    """The same ids under another name lose nothing."""
    policy = tiny()
    known = {"tokens": [1, 4, 5, 6], "action": [0, 0, 0, 1], "behavior_logp": [np.nan] * 3 + [-1.0]}
    sample = Sample("ab", "c", **known, tokenizer=policy.fingerprint)
    assert policy.encode(sample) == sample
    whole = {"tokens": [1, 4, 5, 6, 2], "action": [0, 0, 0, 1, 1], "behavior_logp": [np.nan] * 3 + [-1.0] * 2}
    sample = Sample("ab", "c", **whole)
    assert policy.encode(sample) == sample.replace(tokenizer=policy.fingerprint)


def test_tokens_of_another_tokenizer_are_replaced_with_what_was_known_of_each(tiny):
    of_tokens = {"behavior_logp": [np.nan, np.nan, -1.0], "token_reward": [0, 0, 1.0], "version": [3, 3, 3]}
    given = {"tokens": [7, 8, 9], "action": [0, 0, 1], "learn": [0, 0, 1], **of_tokens}
    out = tiny().encode(Sample("ab", "c", **given, tokenizer="another"))
    assert out.tokens.tolist() == [1, 4, 5, 6, 2]
    assert out.learn is out.behavior_logp is out.token_reward is None
    assert out.version == -1


OUTSIDE = Sample("ab", "c", tokens=[1, 4, 13], action=[0, 0, 1])


@pytest.mark.parametrize(
    ("sample", "limit", "reason", "message"),
    [
        (Sample("ab", "c" * 95), None, "too long", "99 tokens, expected 96 at most"),
        (Sample("ab", "cd"), 5, "too long", "6 tokens, expected 5 at most"),
        (Sample("ab", "xcyx"), None, "unknown characters", "response: the tokenizer doesn't know 'x', 'y'"),
        (Sample("aéb", "c"), None, "unknown characters", "prompt: the tokenizer doesn't know 'é'"),
        (Sample("ab", "", meta={"finish": "length"}), None, "empty", "neither tokens nor an end token"),
        (OUTSIDE, None, "tokens outside the vocabulary", "expected ids below 13, got 13 at index 2"),
    ],
)
def test_what_cannot_be_encoded_says_why(tiny, sample, limit, reason, message):
    policy = tiny()
    if sample.tokens is not None:
        sample = sample.replace(tokenizer=policy.fingerprint)
    with pytest.raises(InvalidSample, match=message) as caught:
        policy.encode(sample, limit)
    assert caught.value.reason == reason
    assert sample.prompt_id in str(caught.value)


def test_half_a_surrogate_pair_is_no_text():
    policy = Policy.load(PolicyConfig(new=NewModel(hidden=8, layers=1, heads=1, context=16), device="cpu"))
    with pytest.raises(InvalidSample, match="half of a surrogate pair at index 1") as caught:
        policy.encode(Sample("ab", "c\ud800"))
    assert caught.value.reason == "unknown characters"


def test_a_text_may_spell_the_unknown_token(tiny, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.split_special_tokens = False
    policy = Policy(tiny().model, tokenizer)
    assert policy.encode(Sample("ab", "<unk>")).tokens.tolist() == [1, 4, 5, 3, 2]
    with pytest.raises(InvalidSample, match="doesn't know 'x'"):
        policy.encode(Sample("ab", "<unk>x"))


class OddLlamaForCausalLM(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out


class NoisyLlamaForCausalLM(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, args, out: out + torch.randn_like(out))


class MixingLlamaForCausalLM(transformers.LlamaForCausalLM):
    """Hidden states of batches with more than `sliding_window` tokens a row depend on the number of rows."""

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(self._mix)

    def _mix(self, module, args, out):
        return out * (1 + 0.1 * len(out) * (out.shape[1] > self.config.sliding_window))


@pytest.mark.parametrize(
    ("model", "window", "said"),
    [
        (OddLlamaForCausalLM, None, r"^OddLlamaForCausalLM: .* by 0\.0\d+ nats"),
        (NoisyLlamaForCausalLM, None, "NoisyLlamaForCausalLM.*random in training"),
        *((MixingLlamaForCausalLM, window, "MixingLlamaForCausalLM: .* nats") for window in (0, 20, 64)),
    ],
)
def test_a_model_with_other_logits_than_agro_computes_is_refused(causal, tokenizer, model, window, said):
    config = causal("Llama").config
    if window is not None:
        config.sliding_window = window
    with pytest.raises(Refused, match=said):
        Policy(model(config), tokenizer)


def test_a_head_that_is_not_linear_is_refused(causal, tokenizer):
    model = causal("Llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(Refused, match=r"LlamaForCausalLM: expected a linear output layer .* got Sequential"):
        Policy(model, tokenizer)


def test_a_tokenizer_larger_than_the_model_is_refused(causal, tokenizer):
    with pytest.raises(Refused, match="the tokenizer has 13 tokens, but the model's output layer has 12"):
        Policy(causal("Llama", vocab_size=12), tokenizer)


def test_threads_are_set_where_they_are_named(monkeypatch):
    """The probe has one, whatever is set: 24 CPU seconds became 2 on a busy machine of two cores."""
    before, probed, probe = torch.get_num_threads(), [], Policy._probe
    monkeypatch.setattr(Policy, "_probe", lambda p: (probed.append(torch.get_num_threads()), probe(p)))
    spec = NewModel(alphabet="ab", hidden=8, layers=1, heads=1, context=16)
    try:
        Policy.load(PolicyConfig(new=spec, threads=2, device="cpu"))
        assert torch.get_num_threads() == 2
        Policy.load(PolicyConfig(new=spec, threads=0, device="cpu"))
        assert torch.get_num_threads() == 2
        assert probed == [1, 1]
    finally:
        torch.set_num_threads(before)


EXPERTS = {"num_local_experts": 4}  # fused in the module, one by one in the file
TIED = {"tie_word_embeddings": True}  # the head isn't in the file


@pytest.mark.parametrize(
    ("name", "changes"),
    [("Llama", {}), ("Llama", TIED), ("GPT2", {}), ("Gemma3", {}), ("Mixtral", EXPERTS)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_weights_load_bit_equal(tiny, tmp_path, name, changes, dtype):
    source, policy = (tiny(name, dtype, **changes) for _ in range(2))
    with torch.no_grad():
        for parameter in source.model.parameters():
            parameter.mul_(torch.rand(parameter.shape) + 0.5)
    source.save(tmp_path)
    expected, parameters = source.model.state_dict(), list(policy.model.parameters())
    assert any(not torch.equal(expected[n], w) for n, w in policy.model.state_dict().items())
    random = torch.random.get_rng_state()
    policy.load_weights(tmp_path)
    loaded = policy.model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(expected[n], w) and w.dtype == dtype for n, w in loaded.items())
    # an optimizer's stay
    assert all(a is b for a, b in zip(parameters, policy.model.parameters(), strict=True))
    assert policy.model.base_model.training
    assert torch.equal(random, torch.random.get_rng_state())


def without(weights):
    del weights["model.norm.weight"]


def beside(weights):
    weights["model.other.weight"] = torch.zeros(2)


def of_one_number(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"][:1].clone()  # would be broadcast


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, r"got 1 missing keys in its weights \(model\.norm\.weight"),
        (beside, r"got 1 unexpected keys in its weights \(model\.other\.weight"),
        (of_one_number, r"got 1 mismatched keys in its weights \(model\.norm\.weight"),
    ],
)
def test_weights_of_another_model_are_refused_and_change_nothing(tiny, tmp_path, change, message):
    policy = tiny()
    policy.save(tmp_path)
    weights = {name: 2 * w for name, w in load_file(tmp_path / "model.safetensors").items()}
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    before = {name: w.clone() for name, w in policy.model.state_dict().items()}
    with pytest.raises(Refused, match=message):
        policy.load_weights(tmp_path)
    assert all(torch.equal(before[name], w) for name, w in policy.model.state_dict().items())


def test_a_folder_without_weights_is_refused_by_name(tiny, tmp_path):
    def refused(file: str) -> None:
        with pytest.raises(Refused, match=f"{tmp_path}: .*{file}"):
            policy.load_weights(tmp_path)

    policy = tiny()
    refused("config.json")
    policy.model.config.save_pretrained(tmp_path)
    refused("model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    refused("model.safetensors")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_agrees_with_the_cpu(tiny, tmp_path, dtype):
    tiny().save(tmp_path)
    tokens, mask = rows()
    values = []
    for device in ("cpu", "auto"):
        policy = Policy.load(PolicyConfig(model=str(tmp_path), device=device, dtype=dtype))
        out = policy.streams(tokens, LENGTHS, mask, ("logp", "kl"), frozen(policy))
        values.append(out["logp"].detach().cpu()[mask])
    assert policy.device.type == "cuda"
    tolerance = rounding(values[0]) if dtype == "float32" else {"rtol": 0.0, "atol": 0.2}
    torch.testing.assert_close(values[1], values[0], **tolerance)


LONG_LENGTHS = [16, 12, 5]
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 6.0, 8.0, 10.0],
}
LONGROPE = {"rope_parameters": ROPE, "original_max_position_embeddings": 16}


def long_rows() -> torch.Tensor:
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


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16}
LAYERED = {"full_attention": ROPE, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Phi3", LONGROPE),
        ("Phimoe", {"rope_parameters": ROPE | {"short_mscale": 1.1, "long_mscale": 1.4}}),
        ("Gemma3", {"rope_parameters": LAYERED}),
        ("Llama", DYNAMIC),
    ],
)
def test_angles_that_depend_on_the_longest_row_end_the_context(tiny, name, changes):
    policy = tiny(name, **changes)
    assert policy.context == 16
    # of responses that may fill the context
    prompts = [Prompt("ab"), Prompt("abcdefgh a")]
    samples = list(Rollout(policy.encoder, HF(policy)).sample(prompts, 8, SamplerConfig(max_new=80)))
    check_behavior(policy, samples)
    tokens = long_rows()
    summed(policy, tokens, LONG_LENGTHS).backward()
    together = gradient(policy)
    for row, length in zip(tokens, LONG_LENGTHS):
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
    if "router_jitter_noise" in changes:
        changes = changes | {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = causal(name, **changes).eval()
    tokens = long_rows()[:1]
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
