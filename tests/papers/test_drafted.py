"""Decoding with a draft model against decoding without one, and against enumerated probabilities."""

from __future__ import annotations

import gc
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import rounding
from sampling import PROMPTS, by_index, end_with, rollout
from tiers import some

from agro import config
from agro.config import NewModel, SamplerConfig
from agro.errors import Refused
from agro.models.newmodel import new_model
from agro.models.policy import Policy
from agro.rollout import Rollout, Task, collect
from agro.rollout.engines import Request
from agro.rollout.engines.decoding_rows import Rows
from agro.rollout.engines.hf import HF
from agro.store import Store
from agro.types import Prompt
from agro_papers.drafted import Drafted, Lane

ARCHITECTURES = ["Llama", "Qwen3", "GPT2"]


def saved_draft(policy: Policy, folder: Path, scale: float = 0.3) -> str:
    """A copy of the policy with noise of `scale` standard deviations of each weight."""
    random = torch.Generator().manual_seed(1)
    state = {name: value.clone() for name, value in policy.model.state_dict().items()}
    with torch.no_grad():
        for value in policy.model.parameters():
            value += scale * value.std(correction=0) * torch.randn(value.shape, generator=random)
    policy.save(folder)
    policy.model.load_state_dict(state)
    return str(folder)


def drafting(policy: Policy, draft: str, tokens: int = 4) -> Rollout:
    return Rollout(policy.encoder, Drafted(policy, model=draft, tokens=tokens))


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    "options",
    some(
        [
            {},
            {"tokens": 1},
            {"tokens": 7, "batch": 5},
            {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
            {"temperature": 0.0},
            {"stop": ("ab", "h")},
        ],
        every=2,
    ),
    ids=str,
)
def test_a_draft_changes_no_token(tiny, tmp_path, name, options):
    policy = tiny(name)
    end_with(policy, 5)
    tokens = options.get("tokens", 4)
    sampler = SamplerConfig(max_new=30, **{k: v for k, v in options.items() if k != "tokens"})
    plain = by_index(rollout(policy).sample(PROMPTS, 8, sampler, seed=3))
    drafted = drafting(policy, saved_draft(policy, tmp_path), tokens)
    found = by_index(drafted.sample(PROMPTS, 8, sampler, seed=3))
    assert found.keys() == plain.keys()
    tolerance = rounding(*(s.behavior_logp for s in plain.values()))
    for i, s in plain.items():
        assert found[i].tokens.tolist() == s.tokens.tolist()
        np.testing.assert_allclose(found[i].behavior_logp, s.behavior_logp, **tolerance)
        assert found[i].replace(behavior_logp=None) == s.replace(behavior_logp=None)  # `sampling` too
    assert len({len(s.tokens) for s in plain.values()}) > 3
    assert 0 < drafted.engine.accepted < drafted.engine.proposed


def test_requests_of_any_length_may_come_later(tiny, tmp_path):
    """A longer prompt than any before, and a turn that goes on where the noise of the last ended."""
    policy = tiny()
    end_with(policy)
    sampler = SamplerConfig(batch=2)
    requests = [Request(0, [1, 4], 7), Request(1, [1], 3), Request(2, [1, *[5] * 30], 7, position=4)]
    engine = Drafted(policy, model=saved_draft(policy, tmp_path))
    waiting, found = deque(requests[:2]), {}
    for done in engine.decode(waiting, sampler, 3):
        if not found:
            waiting.append(requests[2])
        found[done.request.number] = done
    tolerance = rounding(*(d.logp for d in found.values()))
    for r in requests:
        (alone,) = HF(policy).decode(deque([r]), SamplerConfig(), 3)
        assert found[r.number].tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(found[r.number].logp, alone.logp, **tolerance)


def test_the_context_ends_a_response(tiny, tmp_path):
    """GPT-2 has no embedding for a position beyond its context, where some proposals are."""
    policy = tiny("GPT2", max_position_embeddings=20)
    end_with(policy)
    sampler = SamplerConfig(max_new=10)
    prompts = [Prompt("a" * 15), Prompt("b" * 18), Prompt("")]
    found = by_index(drafting(policy, saved_draft(policy, tmp_path)).sample(prompts, 1, sampler))
    plain = by_index(rollout(policy).sample(prompts, 1, sampler))
    assert sorted(int(s.action.sum()) for s in found.values()) == [1, 4, 10]
    assert all(found[i].tokens.tolist() == s.tokens.tolist() for i, s in plain.items())


def test_pairs_of_tokens_are_as_frequent_as_the_policy_says(tiny, tmp_path):
    """8,192 responses of two tokens: the 169 frequencies within 5 standard errors of the probabilities."""
    policy, n = tiny(), 8192
    end_with(policy)
    sampler = SamplerConfig(temperature=0.8, max_new=2, batch=1024)
    drafted = drafting(policy, saved_draft(policy, tmp_path, 1.0))
    samples = list(drafted.sample([Prompt("ab")], n, sampler, seed=5))
    counts = np.zeros((13, 13))
    for s in samples:
        counts[tuple(s.tokens[-2:])] += 1
    ids = policy.encode_prompt("ab")
    contexts = torch.tensor([[*ids, token] for token in range(13)])
    with torch.no_grad():
        p = (policy.model(input_ids=contexts).logits.double() / 0.8).softmax(-1)
    joint = (p[0, len(ids) - 1][:, None] * p[:, -1]).numpy()
    assert (np.abs(counts / n - joint) <= 5 * np.sqrt(joint * (1 - joint) / n) + 1e-9).all()
    log = np.log(joint)
    found, expected = zip(
        *((s.behavior_logp[s.action].sum(), log[tuple(s.tokens[-2:])]) for s in samples[:100]), strict=True
    )
    np.testing.assert_allclose(found, expected, **rounding(expected))


def test_a_token_is_accepted_where_both_draw_it(tiny, tmp_path):
    """The share of noise that both inverse distribution functions send to the same token, enumerated."""
    policy, n = tiny(), 8192
    end_with(policy)
    draft = saved_draft(policy, tmp_path)
    engine, ids = Drafted(policy, model=draft, tokens=1), policy.encode_prompt("ab")
    sampler = SamplerConfig(max_new=1, batch=1024)
    list(engine.decode(deque(Request(i, ids, 1) for i in range(n)), sampler, 2))
    edges = []
    for model in (policy, Policy.load(config.PolicyConfig(model=draft, device="cpu"))):
        with torch.no_grad():
            p = model.model(input_ids=torch.tensor([ids])).logits[0, -1].double().softmax(0).numpy()
        edges.append(np.concatenate([[0.0], p.cumsum()]))
    low, high = np.maximum(edges[0][:-1], edges[1][:-1]), np.minimum(edges[0][1:], edges[1][1:])
    share = np.clip(high - low, 0, None).sum()
    assert 0.2 < share < 0.9
    assert engine.proposed == n
    assert abs(engine.accepted / n - share) <= 5 * np.sqrt(share * (1 - share) / n)


def test_all_proposals_of_the_policy_itself_are_accepted(tiny, tmp_path):
    """10 tokens are two steps of 4 proposals and the policy's own token."""
    policy = tiny()
    end_with(policy)
    engine = Drafted(policy, model=saved_draft(policy, tmp_path, 0.0))
    list(engine.decode(deque(Request(i, [1, 4], 10) for i in range(3)), SamplerConfig(), 0))
    assert (engine.proposed, engine.accepted) == (24, 24)


def test_a_step_of_collecting_reports_the_accepted_share(tiny, tmp_path):
    policy, sampler = tiny(), SamplerConfig(max_new=20)
    made = drafting(policy, saved_draft(policy, tmp_path / "draft"))
    with Store.open(tmp_path / "store.db") as store:
        for seed in range(2):
            before = np.array([made.engine.accepted, made.engine.proposed])
            share = collect(made, PROMPTS, sampler, store, Task(seed=seed)).draft_accepted
            accepted, proposed = np.array([made.engine.accepted, made.engine.proposed]) - before
            assert share == accepted / proposed
        assert collect(rollout(policy), PROMPTS, sampler, store, Task(seed=2)).draft_accepted is None


def test_a_draft_with_another_vocabulary_is_refused(tiny, tmp_path):
    new_model(tmp_path, NewModel(alphabet="abcdefgx", hidden=8, layers=1, heads=1, context=96), 0)
    with pytest.raises(Refused, match=r"options: model: .* 13 tokens, got 12 tokens, \d of which differ"):
        drafting(tiny(), str(tmp_path))


def test_sliding_windows_are_refused(tiny, tmp_path):
    policy = tiny("Mistral", sliding_window=8)
    with pytest.raises(Refused, match=r"drafted: .*MistralForCausalLM has DynamicSlidingWindowLayer"):
        drafting(policy, saved_draft(policy, tmp_path))


def test_a_model_that_reads_several_tokens_otherwise_is_refused(tiny, tmp_path, monkeypatch):
    policy = tiny()
    draft = saved_draft(policy, tmp_path)
    forward = policy.model.base_model.forward

    def blind(**inputs):
        if inputs["attention_mask"] is not None and inputs["attention_mask"].ndim == 4:
            inputs["attention_mask"] = torch.zeros_like(inputs["attention_mask"])
        return forward(**inputs)

    monkeypatch.setattr(policy.model.base_model, "forward", blind)
    with pytest.raises(Refused, match=r"decoded with a draft, its log-probs differ by"):
        Drafted(policy, model=draft)


@pytest.mark.parametrize("drafted", [False, True])
def test_keys_and_values_are_freed_at_once(tiny, tmp_path, drafted):
    """Without a search for cycles: they may be gigabytes, and Python counts them as a few objects."""
    policy = tiny("Llama")
    made = drafting(policy, saved_draft(policy, tmp_path)) if drafted else rollout(policy)
    gc.collect()
    gc.disable()
    try:
        assert len(list(made.sample(PROMPTS, 2, SamplerConfig(max_new=8)))) == 8
        left = [x for x in gc.get_objects() if isinstance(x, Rows | Lane)]
    finally:
        gc.enable()
    assert left == []
