"""From prompts to samples: what a sample records, where a response ends, what is refused."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from sampling import PROMPTS, by_index, end_with, rollout

from agro.config import SamplerConfig
from agro.errors import Refused
from agro.rollout import Rollout
from agro.rollout.engines.hf import HF
from agro.types import Prompt


def test_a_sample_says_where_it_is_from(tiny):
    policy = tiny()
    options = SamplerConfig(max_new=3, temperature=0.9, stop=("zz",))
    samples = by_index(rollout(policy, version=7).sample(PROMPTS, 2, options))
    s = samples[7]
    assert (s.prompt, s.prompt_id, s.role, s.source, s.version) == ("h", PROMPTS[3].id, "policy", "policy", 7)
    assert s.meta.items() >= {"answer": "e", "index": 7}.items()
    assert s.tokenizer == policy.fingerprint
    assert s.reward is None
    assert json.loads(json.dumps(s.sampling))["temperature"] == 0.9
    assert s.sampling["stop"] == ["zz"]
    assert s.tokens[: len(policy.encode_prompt("h"))].tolist() == policy.encode_prompt("h")
    assert s.response == policy.decode(s.tokens[s.action])
    for s in samples.values():
        ended = s.tokens[-1] == 2
        assert s.meta["finish"] == ("stop" if ended else "length")
        assert int(s.action.sum()) == 3 or ended
    assert policy.encode(s) == s


def test_a_stop_text_ends_a_response_and_is_cut_off(tiny):
    policy = tiny()
    end_with(policy)
    free = by_index(rollout(policy).sample(PROMPTS, 8, SamplerConfig(max_new=40)))
    stops = ("g", "dg", "ha")  # "dg" begins before the "g" that ends it
    stopped = by_index(rollout(policy).sample(PROMPTS, 8, SamplerConfig(max_new=40, stop=stops)))
    finished = Counter()
    for i, s in stopped.items():
        whole = free[i].response
        cuts = [whole.find(x) for x in stops if x in whole]
        assert s.response == (whole[: min(cuts)] if cuts else whole)
        assert s.meta["finish"] == ("stop" if cuts else "length")
        finished[s.meta["finish"]] += 1
        if cuts:  # the tokens end with the one that completed the stop text
            text = policy.decode(s.tokens[s.action])
            assert any(text.endswith(x) for x in stops)
            assert not any(x in text[:-1] for x in stops)
    assert finished["stop"] > 5


def test_a_prompt_without_room_is_refused_before_anything_is_computed(tiny, monkeypatch):
    policy = tiny(max_position_embeddings=20)
    sampler = rollout(policy)
    monkeypatch.setattr(policy.model.base_model, "forward", None)
    with pytest.raises(Refused, match=r"prompt too-long: 20 tokens leave no room .* context of 20"):
        sampler.sample([Prompt("a"), Prompt("a" * 19, id="too-long")], 1, SamplerConfig())


def test_no_prompts_give_no_responses(tiny):
    assert list(rollout(tiny()).sample([], 4, SamplerConfig())) == []


def test_an_empty_stop_text_is_refused(tiny):
    """It stands in every text: each response would be cut at its first character."""
    policy = tiny()

    class Silent:
        name, stop = "silent", ("d", "")

    with pytest.raises(Refused, match=r"sampler\.stop"):
        rollout(policy).sample(PROMPTS, 1, SamplerConfig(stop=("a", "")))
    with pytest.raises(Refused, match="environment silent: stop"):
        Rollout(policy.encoder, HF(policy), Silent(), 2).sample(PROMPTS, 1, SamplerConfig())
