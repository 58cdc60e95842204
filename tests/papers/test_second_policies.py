"""Second policies beside the policy: a sampler of what is missing, a draft; and decoding with one."""

from __future__ import annotations

import gc
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rounding import rounding
from sampling import PROMPTS, by_index, end_with, rollout
from tiers import some
from tiny_runs import copying, metrics, weights, whole_and_resumed

from agro import config
from agro.api.reporting_trainer import Trainer
from agro.config import NewModel, PolicyConfig, RunConfig, SamplerConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.pretrained import new_model
from agro.rollout import Rollout, Task, collect
from agro.rollout.engines import Request
from agro.rollout.engines.decoding_rows import Rows
from agro.rollout.engines.hf import HF
from agro.store import Store
from agro.train.check import check_config, check_sharded
from agro.types import Batch, Prompt, Sample
from agro_papers.drafted import Drafted, Lane
from agro_papers.props import aggregate_kl, distance

OFF = 1e-12  # a learning rate with which nothing moves


def proposing(folder: Path, steps: int, lr: float = 1e-3, **changes: Any) -> RunConfig:
    values = {
        "objective": {"name": "agro", "beta": 0.05},
        "source__around": "props",
        "source__options": {"lr": lr, "newest": 1000},
        "sampler": {"n": 4, "max_new": 1},
    }
    return copying(folder, steps, **{**values, **changes})


def drafted(folder: Path, steps: int, every: int | None, **changes: Any) -> RunConfig:
    new = NewModel(alphabet="0123456789>", hidden=16, layers=1, heads=2, context=8, initializer_range=0.2)
    if not (folder / "draft").exists():
        Policy.load(PolicyConfig(new=new), seed=5).save(folder / "draft")
    sampler = {"n": 4, "max_new": 3}
    engine = {"kind": "drafted", "options": {"model": str(folder / "draft"), "tokens": 2}}
    if every is not None:
        changes["source"] = {"around": "trained_draft", "options": {"every": every, "lr": 1e-2}}
    objective = {"name": "agro", "beta": 0.05}
    return copying(folder, steps, **{"objective": objective, "sampler": sampler, "engine": engine, **changes})


def column(run: Path, name: str) -> list[Any]:
    return [row[name] for row in metrics(run) if row["step"]]


def test_responses_together_are_nearer_to_the_policy_than_independent_ones(tmp_path: Path) -> None:
    """The policy doesn't move, and its sampler in one of two runs. 32 responses to each of ten prompts."""
    kl = {}
    for name, lr in (("independent", OFF), ("adapted", 1e-3)):
        (tmp_path / name).mkdir()
        config = proposing(tmp_path / name, 9, lr, train__lr=OFF)
        kl[name] = column(Trainer(config, tmp_path / name / "run").run(), "aggregate_kl")
    assert kl["adapted"][0] is None  # nothing was sampled yet
    assert kl["adapted"][1] == pytest.approx(kl["independent"][1], abs=1e-6)  # the first step is of π
    assert kl["adapted"][-1] < 0.8 * kl["independent"][-1]


def test_samples_record_the_log_probs_of_the_sampler(tmp_path: Path) -> None:
    """At step 2 the policy is as it was: the log-probs differ by what the sampler was trained."""
    config = proposing(tmp_path, 2, train__lr=OFF)
    run = Trainer(config, tmp_path / "run").run()
    policy = Policy.load(PolicyConfig(model=str(run / "model")))
    with Store.open(config.data.store, read_only=True) as store:
        samples = [s for s in store.samples(roles=("policy",)) if s.version == 1]
    assert len(samples) == 40
    differences = []
    for sample in samples:
        assert sample.sampling["adapted"] == "props"
        tokens, mask = torch.tensor(sample.tokens[None]).long(), torch.tensor(sample.action[None])
        logp = policy.streams(tokens, torch.tensor([tokens.shape[1]]), mask)["logp"][mask].detach()
        differences.append(float(logp - torch.tensor(sample.behavior_logp[sample.action])))
    assert np.abs(differences).mean() > 0.01
    row = metrics(run)[-1]
    assert row["proposal_kl"] > 0
    assert row["logp_diff_mean"] is None  # they aren't comparable


def test_a_resumed_run_has_the_same_sampler(tmp_path: Path) -> None:
    whole_and_resumed(lambda folder: proposing(folder, 5), tmp_path, 3)


def batch_of(logp: list[list[float]], ref_logp: list[list[float]]) -> tuple[torch.Tensor, Batch]:
    """The first token has no log-prob."""
    rows = len(logp)
    mask = torch.ones(rows, len(logp[0]), dtype=torch.bool)
    mask[:, 0] = False
    batch = Batch.of(mask=mask, reward=[0.0] * rows, group=["p"] * rows)
    return torch.tensor(logp), batch.replace(ref_logp=torch.tensor(ref_logp, dtype=torch.float64))


def test_the_kl_of_responses_together_by_hand() -> None:
    """Shares ¾ and ¼, probabilities ½ and ¼: ¾ log 3/2 + ¼ log 1."""

    def sample(token: int) -> Sample:
        ids, action = np.array([7, token], np.int32), np.array([False, True])
        return Sample("p", "x", tokens=ids, action=action, tokenizer="t")

    half, quarter = [0.0, math.log(0.5)], [0.0, math.log(0.25)]
    _, batch = batch_of([half] * 4, [half, half, half, quarter])
    samples = [sample(1), sample(1), sample(1), sample(2)]
    assert aggregate_kl(samples, batch) == pytest.approx(0.75 * math.log(1.5))


def test_the_distance_of_a_sampler_by_hand() -> None:
    """w = 2 and ½: (1 − log 2 + −½ + log 2) / 2."""
    logp, batch = batch_of([[0.0, math.log(0.5), math.log(0.1)]], [[0.0, math.log(0.25), math.log(0.2)]])
    assert distance(logp, batch) == pytest.approx(0.25)


def test_a_draft_that_is_trained_follows_the_policy(tmp_path: Path) -> None:
    """Without training less of what it proposes is accepted as the policy moves; responses are the same."""
    (tmp_path / "fixed").mkdir()
    fixed = Trainer(drafted(tmp_path / "fixed", 14, None), tmp_path / "fixed" / "run").run()
    (tmp_path / "trained").mkdir()
    trained = Trainer(drafted(tmp_path / "trained", 14, 1), tmp_path / "trained" / "run").run()
    accepted = {run: column(run, "draft_accepted") for run in (fixed, trained)}
    assert accepted[fixed][0] == accepted[trained][0]
    assert sum(accepted[trained][-4:]) > 1.3 * sum(accepted[fixed][-4:])
    assert sum(accepted[trained][-4:]) > sum(accepted[trained][:4])
    assert weights(trained) == weights(fixed)


def test_a_resumed_run_has_the_same_draft(tmp_path: Path) -> None:
    _, run = whole_and_resumed(lambda folder: drafted(folder, 6, 2), tmp_path, 3)
    drafts = sorted(folder.name for folder in (run / "weights" / "draft").iterdir())
    assert drafts[-1] == "v00000006"  # trained before the checkpoint of the last step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source__sync_every": 2}, r"props needs a source that .* weights .*, but source\.sync_every or"),
        ({"source__kind": "elsewhere"}, r'props needs a source that .*, but source\.kind is "elsewhere"'),
        ({"policy": {"model": "m", "lora": {}}}, r"props excludes \[policy\.lora\]"),
        ({"objective": {"name": "agro_onpolicy", "beta": 0.1}}, r"source\.around = props samples are of an"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        check_config(proposing(tmp_path, 2, **changes))


def test_several_ranks_have_no_complete_policy(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"props needs a source that is in one process .* several ranks"):
        check_sharded(proposing(tmp_path, 2))
    check_sharded(proposing(tmp_path, 2, source={}))


def test_a_draft_is_needed_to_train_one(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"trained_draft needs engine\.kind = .drafted.: there is no draft"):
        check_config(copying(tmp_path, 2, sampler={"n": 2, "max_new": 3}, source__around="trained_draft"))


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
    assert 0 < drafted.engine.measured["draft_accepted"] < 1


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
    ids = policy.encoder.prompt("ab")
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
    engine, ids = Drafted(policy, model=draft, tokens=1), policy.encoder.prompt("ab")
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
    assert abs(engine.measured["draft_accepted"] - share) <= 5 * np.sqrt(share * (1 - share) / n)


def test_all_proposals_of_the_policy_itself_are_accepted(tiny, tmp_path):
    """10 tokens are two steps of 4 proposals and the policy's own token."""
    policy = tiny()
    end_with(policy)
    engine = Drafted(policy, model=saved_draft(policy, tmp_path, 0.0))
    list(engine.decode(deque(Request(i, [1, 4], 10) for i in range(3)), SamplerConfig(), 0))
    assert engine.measured == {"requests_failed": 0, "draft_accepted": 1.0}
    list(engine.decode(deque(), SamplerConfig(), 0))
    assert engine.measured["draft_accepted"] is None  # of the last call, in which nothing was proposed


def test_a_step_of_collecting_reports_the_accepted_share(tiny, tmp_path):
    policy, sampler = tiny(), SamplerConfig(max_new=20)
    made = drafting(policy, saved_draft(policy, tmp_path / "draft"))
    with Store.open(tmp_path / "store.db") as store:
        for seed in range(2):
            measured = collect(made, PROMPTS, sampler, store, Task(seed=seed)).measured
            assert measured["draft_accepted"] == made.engine.measured["draft_accepted"] > 0
        measured = collect(rollout(policy), PROMPTS, sampler, store, Task(seed=2)).measured
        assert "draft_accepted" not in measured


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
