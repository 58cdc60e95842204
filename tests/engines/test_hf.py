"""The embedded engine against the trainer's log-probs, transformers' greedy decoding, and other batches; and
what its probe refuses.
"""

from __future__ import annotations

import json
from collections import deque
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from rounding import rounding
from sampling import PROMPTS, assert_same, by_index, check_behavior, end_with, rollout, trainer_logp, windowed
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from agro.config import NewModel, PolicyConfig, SamplerConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rollout.engines import Continuation, Engine, Request, decoding_rows
from agro.rollout.engines.hf import HF
from agro.types import Prompt

ARCHITECTURES = ["Llama", "Qwen2", "Qwen3", "GPT2"]
WINDOWED = ["Mistral", "Gemma2", "Gemma3"]


def by_number(engine, requests, sampler=None, seed=3) -> dict[int, Continuation]:
    """Continuations by the numbers of their requests."""
    return {d.request.number: d for d in engine.decode(deque(requests), sampler or SamplerConfig(), seed)}


def scripted(monkeypatch, tokens) -> None:
    """Let these tokens be drawn one after another."""
    script = iter(tokens)
    monkeypatch.setattr(decoding_rows, "draw", lambda *_: (torch.tensor([next(script)]), torch.zeros(1)))


@pytest.mark.parametrize("name", ARCHITECTURES + WINDOWED)
@pytest.mark.parametrize("batch", [64, 5])
def test_behavior_log_probs_are_the_trainers(tiny, name, batch):
    policy = tiny(name, **windowed(name))
    samples = list(rollout(policy).sample(PROMPTS, 4, SamplerConfig(max_new=30, batch=batch)))
    assert len(samples) == 16
    check_behavior(policy, samples)
    assert all(np.array_equal(np.isnan(s.behavior_logp), ~s.action) for s in samples)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_behavior_log_probs_of_a_bfloat16_policy(tiny, name):
    policy = tiny(name, torch.bfloat16)
    differences = [
        np.abs(s.behavior_logp - trainer_logp(policy, s))[s.action]
        for s in rollout(policy).sample(PROMPTS, 4, SamplerConfig(max_new=30))
    ]
    # Keys, values and logits are rounded to 8 bits, in other orders: logits of size 4 to 8 by 2^-5 each.
    assert np.concatenate(differences).mean() < 0.03


def test_behavior_log_probs_are_of_what_was_really_sampled_from(tiny):
    policy = tiny(temperature=0.5)
    options = SamplerConfig(temperature=0.5, top_k=3, max_new=20)
    found, expected = [], []
    for s in rollout(policy).sample(PROMPTS, 4, options):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor(s.tokens[None].astype(np.int64))).logits[0]
        for t in np.flatnonzero(s.action):
            best = logits[t - 1].topk(3)
            place = best.indices.tolist().index(int(s.tokens[t]))
            found.append(s.behavior_logp[t])
            expected.append(torch.log_softmax(best.values / 0.5, 0)[place].item())
    np.testing.assert_allclose(found, expected, **rounding(expected))


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_a_response_is_the_same_in_any_company(tiny, name, monkeypatch):
    monkeypatch.setattr(decoding_rows, "_SLACK", 1)  # the columns are used up again and again
    policy = tiny(name, **windowed(name))

    def sampled(batch, seed=3):
        options = SamplerConfig(max_new=30, batch=batch)
        return by_index(rollout(policy).sample(PROMPTS, 4, options, seed=seed))

    alone = sampled(1)
    for batch in (64, 7, 2):
        assert_same(sampled(batch), alone)
    other_seed = sampled(64, seed=4)
    assert any(s.response != other_seed[i].response for i, s in alone.items())
    assert len({s.response for s in alone.values()}) > 12  # responses to one prompt differ


def as_each_alone(engine: HF, requests: list[Request], sampler: SamplerConfig, together: dict) -> None:
    """Continuations by number have the tokens and log-probs that each request has by itself."""
    assert_same(together, {r.number: by_number(engine, [r], sampler)[r.number] for r in requests})


def test_a_long_prompt_has_room_after_the_columns_were_used_up(tiny, monkeypatch):
    """Short prompts fill the columns; those in use are moved to the left; then the long prompt enters."""
    monkeypatch.setattr(decoding_rows, "_SLACK", 1)
    policy, sampler = tiny(), SamplerConfig(batch=2)
    end_with(policy)
    requests = [Request(i, [1, 4], 3 + bool(i)) for i in range(4)] + [Request(4, [1, *[5] * 19], 4)]
    engine = HF(policy)
    as_each_alone(engine, requests, sampler, by_number(engine, requests, sampler))


@pytest.mark.parametrize("fresh", [True, False])
def test_a_longer_prompt_than_any_before_may_come_while_others_are_decoded(tiny, fresh):
    """It is added while a row is live, or after all have finished."""
    policy, sampler = tiny(), SamplerConfig(batch=2)
    end_with(policy)
    requests = [Request(0, [1, 4], 3), Request(1, [1], 3 if fresh else 6), Request(2, [1, *[5] * 9], 3)]
    engine = HF(policy)
    waiting, together = deque(requests[:2]), {}
    for done in engine.decode(waiting, sampler, 3):
        if not together:
            waiting.append(requests[2])
        together[done.request.number] = done
    as_each_alone(engine, requests, sampler, together)


def test_a_response_that_is_continued_is_the_one_that_was_not_interrupted(tiny):
    """Its noise goes on at the position that the request names."""
    policy = tiny()
    end_with(policy)
    engine, ids = HF(policy), [1, 4]
    (whole,) = engine.decode(deque([Request(5, ids, 8)]), SamplerConfig(), 3)
    begun = whole.tokens[:3].tolist()
    (rest,) = engine.decode(deque([Request(5, ids + begun, 5, position=3)]), SamplerConfig(), 3)
    assert rest.tokens.tolist() == whole.tokens[3:].tolist()


def test_the_largest_noise_draws_a_token(tiny, monkeypatch):
    """Rounded to float32 it would be 1, beyond the last token."""
    engine, largest = HF(tiny()), 1 - 2.0**-51

    def noise(_, numbers, n, *more):
        return np.full((len(numbers), n), largest)

    monkeypatch.setattr(decoding_rows, "uniforms", noise)
    assert by_number(engine, [Request(0, [1, 4], 3)])[0].tokens.max() < 13


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_is_the_greedy_of_transformers(tiny, name):
    policy = tiny(name)
    for s in rollout(policy).sample(PROMPTS, 1, SamplerConfig(temperature=0, max_new=20)):
        ids = policy.encoder.prompt(s.prompt)
        expected = policy.model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=20, eos_token_id=2, pad_token_id=0
        )
        assert s.tokens.tolist() == expected[0].tolist()
        assert (s.behavior_logp[s.action] == 0).all()


def test_the_golden_story(shared_model):
    folder = shared_model("stories260K")
    golden = json.loads((folder.parent / "stories260K_golden.json").read_text())["expected_greedy_200"]
    policy = Policy.load(PolicyConfig(model=str(folder), device="cpu"))
    (story,) = rollout(policy).sample([Prompt("")], 1, SamplerConfig(temperature=0, max_new=200))
    assert story.response == golden
    assert story.tokens[0] == 1
    assert int(story.action.sum()) == 200


def test_end_tokens_end_a_response_and_stay_in_it(tiny):
    policy = tiny()
    end_with(policy, 5, 6)
    for s in rollout(policy).sample(PROMPTS, 8, SamplerConfig(max_new=40)):
        ends = [i for i, t in enumerate(s.tokens[s.action]) if t in (5, 6)]
        assert ends in ([], [int(s.action.sum()) - 1])
        assert s.meta["finish"] == ("stop" if ends else "length")


def test_a_stop_text_may_lie_across_bytes(monkeypatch):
    policy = Policy.load(PolicyConfig(new=NewModel(hidden=16, layers=1, heads=2, context=64), device="cpu"))
    wanted = policy.tokenizer("aéb", add_special_tokens=False)["input_ids"]  # é is two tokens
    sampler = rollout(policy)
    scripted(monkeypatch, [*wanted, *wanted])
    (s,) = sampler.sample([Prompt("x")], 1, SamplerConfig(max_new=8, stop=("é",)))
    assert s.response == "a"
    assert s.tokens[s.action].tolist() == wanted[:3]


@pytest.mark.parametrize("between", [0, 1, 60])
def test_a_stop_text_may_have_special_tokens_inside(tiny, between, monkeypatch):
    sampler = rollout(tiny(max_position_embeddings=256))
    wanted = [5, 4, *[0, 1] * between, 5, 6]  # "babc" with <pad> and <bos> inside "ab"
    scripted(monkeypatch, wanted)
    (s,) = sampler.sample([Prompt("h")], 1, SamplerConfig(max_new=len(wanted), stop=("ab",)))
    assert s.response == "b"
    assert s.tokens[s.action].tolist() == wanted[:-1]
    assert s.meta["finish"] == "stop"


def test_the_context_ends_a_response(tiny):
    policy = tiny(max_position_embeddings=20)
    end_with(policy)
    long, longest = Prompt("a" * 15), Prompt("b" * 18)
    samples = list(rollout(policy).sample([long, longest, Prompt("")], 1, SamplerConfig(max_new=10)))
    assert sorted(int(s.action.sum()) for s in samples) == [1, 4, 10]
    assert {s.meta["finish"] for s in samples} == {"length"}
    check_behavior(policy, samples)


def test_responses_come_as_they_finish(tiny):
    policy = tiny()
    end_with(policy, 5)
    lengths = [int(s.action.sum()) for s in rollout(policy).sample(PROMPTS, 16, SamplerConfig(max_new=40))]
    assert lengths == sorted(lengths)  # all began at once
    assert len(set(lengths)) > 5


def test_each_prompt_is_read_once(tiny, monkeypatch):
    policy = tiny()
    sampler, seen, forward = rollout(policy), [], policy.model.base_model.forward

    def watching(**inputs):
        seen.append(tuple(inputs["input_ids"].shape))
        return forward(**inputs)

    monkeypatch.setattr(policy.model.base_model, "forward", watching)
    end_with(policy)
    list(sampler.sample(PROMPTS, 4, SamplerConfig(max_new=5)))
    # The last token of every prompt is read with the first step. What is left of the others is how the third
    # begins, which has 25 tokens with the one before a text.
    assert seen == [(1, 24)] + [(16, 1)] * 5


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2"])
def test_what_prompts_begin_with_alike_is_read_once(tiny, name):
    policy, seen, found = tiny(name), [], {}
    prompts = [Prompt("abc def " + text) for text in ("gah", "gab", "h", "a")]
    policy.model.get_input_embeddings().register_forward_hook(lambda _, ids, __: seen.append(ids[0].numel()))
    # One token before a text, eight that all have in common, and "ga" of the first two; four rows of as many.
    for packs, tokens in ((True, 11), (False, 44)):
        policy.packs = packs
        sampler = rollout(policy)
        seen.clear()
        options = SamplerConfig(max_new=12, temperature=0.7)
        found[packs] = by_index(sampler.sample(prompts, 2, options))
        assert seen[0] == tokens
    assert_same(found[True], found[False])


def test_finished_rows_leave_and_others_enter(tiny, monkeypatch):
    policy = tiny()
    end_with(policy, 5, 6, 7)
    sampler, sizes, forward = rollout(policy), [], policy.model.base_model.forward

    def watching(**inputs):
        if not isinstance(inputs["past_key_values"], DynamicCache):  # not a prompt
            sizes.append(len(inputs["input_ids"]))
        return forward(**inputs)

    monkeypatch.setattr(policy.model.base_model, "forward", watching)
    samples = list(sampler.sample(PROMPTS, 32, SamplerConfig(max_new=60, batch=16)))
    assert len(by_index(samples)) == 128
    assert sum(sizes) == sum(int(s.action.sum()) for s in samples)  # no step for a row that is finished
    assert max(sizes) == 16
    tail = next(i for i, size in enumerate(sizes) if size <= 12)  # a quarter free, and nobody waits any more
    assert tail > 20
    assert sizes[tail:] == sorted(sizes[tail:], reverse=True)


def test_nothing_global_changes(tiny):
    policy = tiny()
    state = torch.random.get_rng_state()
    before = [p.clone() for p in policy.model.parameters()]
    for _ in rollout(policy).sample(PROMPTS[:2], 2, SamplerConfig(max_new=4)):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert torch.equal(state, torch.random.get_rng_state())
    assert policy.model.base_model.training
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters()))
    given = torch.tensor([[1, 4, 5]]), torch.tensor([3]), torch.tensor([[False, True, True]])
    policy.streams(*given)["logp"][:, 1:].sum().backward()


def test_new_weights_in_the_middle_are_an_error(tiny):
    sampler = rollout(tiny(), version=1)
    responses = sampler.sample(PROMPTS, 2, SamplerConfig(max_new=30))
    next(responses)
    sampler.engine.version = 2
    with pytest.raises(RuntimeError, match="version 2 arrived while version 1"):
        list(responses)


def test_memory_that_is_not_keys_and_values_is_refused(causal, tokenizer):
    config = transformers.MambaConfig(vocab_size=13, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(Refused, match=r"MambaForCausalLM: expected a model "):
        HF(Policy(transformers.MambaForCausalLM(config), tokenizer))
    sizes = {"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2, "context_length": 64}
    config = transformers.RwkvConfig(vocab_size=13, **sizes)
    with pytest.raises(Refused, match=r"RwkvForCausalLM: .*keys and values"):
        HF(Policy(transformers.RwkvForCausalLM(config), tokenizer))


def test_a_model_that_decodes_otherwise_than_it_trains_is_refused(tiny, monkeypatch):
    policy = tiny()
    forward = policy.model.base_model.forward

    def shifted(**inputs):
        if inputs["use_cache"]:
            inputs["position_ids"] = inputs["position_ids"] * 2
        return forward(**inputs)

    monkeypatch.setattr(policy.model.base_model, "forward", shifted)
    words = r"LlamaForCausalLM: decoded token by token, its log-probs differ by \d"
    with pytest.raises(Refused, match=words):
        HF(policy)


def test_tokens_are_sampled_as_often_as_the_policy_says(tiny):
    """4,096 first tokens after one prompt: frequencies within 5 standard errors of the probabilities."""
    policy, n = tiny(), 4096
    samples = rollout(policy).sample([Prompt("ab")], n, SamplerConfig(max_new=1, batch=512))
    counts = np.bincount([int(s.tokens[-1]) for s in samples], minlength=13)
    logits = policy.model(input_ids=torch.tensor([policy.encoder.prompt("ab")])).logits[0, -1]
    p = torch.softmax(logits.double(), 0).detach().numpy()
    assert (np.abs(counts / n - p) <= 5 * np.sqrt(p * (1 - p) / n) + 1e-9).all()


def test_it_is_an_engine(tiny, tmp_path):
    """Requests in, continuations out.

    The reader may add requests while it reads. Weights are loaded with a version.
    """
    policy, other = tiny(), tiny()
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.5)
    other.save(tmp_path)
    engine: Engine = HF(policy, 4)
    assert engine.measured == {"requests_failed": 0}
    ids = [1, 4, 5]
    waiting = deque(Request(i, ids, 6) for i in range(3))
    done: list[Continuation] = []
    for found in engine.decode(waiting, SamplerConfig(batch=2), seed=3):
        done.append(found)
        if len(done) == 1:
            waiting.append(Request(9, ids, 2, position=4))
    assert sorted(d.request.number for d in done) == [0, 1, 2, 9]
    for d in done:
        assert d.version == 4
        assert d.tokens.dtype == np.int64
        assert d.tokens.shape == d.logp.shape
        assert len(d.tokens) == d.request.room or d.tokens[-1] in policy.eos_ids
        assert (d.logp <= 0).all()
    engine.load(tmp_path, 7)
    assert engine.version == 7
    requests = [Request(i, ids, 6) for i in range(3)]
    again, expected = (by_number(e, requests) for e in (engine, HF(other, 7)))
    for i in range(3):
        assert again[i].tokens.tolist() == expected[i].tokens.tolist()
        assert again[i].logp.tobytes() == expected[i].logp.tobytes()
        assert again[i].version == 7
    assert list(engine.decode(deque(), SamplerConfig(), 0)) == []
    engine.close()


NAMES = ("stories260K", "babyllama_char105")


@contextmanager
def without_a_layer(model):
    layers, count = model.model.layers[:-1], model.config.num_hidden_layers - 1
    with patch.object(model.model, "layers", layers), patch.object(model.config, "num_hidden_layers", count):
        yield


@contextmanager
def with_a_stale_head(model):
    head = model.lm_head.weight
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0)).to(head)
    before = head.detach().clone()
    head.data.add_(0.1 * head.std() * noise)
    try:
        yield
    finally:
        head.data.copy_(before)


@contextmanager
def with_a_wrong_mask(model):
    """Each token sees the two before it alone."""
    attend = functional.scaled_dot_product_attention

    def near(query, key, value, **kwargs):
        size = key.shape[-2]
        seen = torch.ones(size, size, dtype=torch.bool).tril().triu(-2)
        kwargs |= {"attn_mask": seen[-query.shape[-2] :], "is_causal": False}
        return attend(query, key, value, **kwargs)

    with patch.object(functional, "scaled_dot_product_attention", near):
        yield


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
    engine = HF(tiny("GPT2", dtype, bos_token_id=50256))
    [done] = engine.decode(deque([Request(0, [1, 4], 3)]), SamplerConfig(), 3)
    assert max(done.tokens) < len(engine.policy.tokenizer)
