"""`agro check --model`: AUC in a store, against log-probs of transformers' own logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agro import config
from agro.config import NewModel
from agro.errors import Refused
from agro.models.policy import Policy
from agro.pages.store import check_store
from agro.pages.store.measurements import measure
from agro.store import Pair, Store
from agro.types import Sample


def policy(seed: int, alphabet: str = "0123456789>") -> Policy:
    new = NewModel(alphabet=alphabet, hidden=16, layers=1, heads=2, context=16, initializer_range=0.5)
    return Policy.load(config.PolicyConfig(new=new), seed=seed)


def own_logp(policy: Policy, sample: Sample) -> float:
    """log π of the response, from the model's logits."""
    known = policy.encode(sample)
    tokens = torch.tensor(known.tokens.tolist())
    with torch.no_grad():
        logp = policy.model(tokens[None]).logits[0].log_softmax(-1)
    taken = logp[:-1].gather(1, tokens[1:, None])[:, 0]
    return float(taken[torch.tensor(known.action.tolist())[1:]].sum())


def auc(score: list[float], reward: list[float]) -> float:
    """Share of the pairs with different rewards in which the better one has the higher score; ties as ½."""
    pairs = [(i, j) for i in range(len(reward)) for j in range(len(reward)) if reward[i] > reward[j]]
    return float(np.mean([(1 + np.sign(score[i] - score[j])) / 2 for i, j in pairs]))


EQUAL = [Sample("7>", "1", reward=1.0), Sample("7>", "2", reward=1.0), Sample("8>", "3")]


@pytest.fixture
def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(f"{p}>", "".join(map(str, rng.integers(0, 10, rng.integers(1, 6)))), reward=float(r))
        for p in range(3)
        for r in (0, 0, 0, 1, 1, 2)
    ]


@pytest.fixture
def store(tmp_path, samples):
    with Store.open(tmp_path / "log.db") as store:
        store.append([*samples, *EQUAL, Sample("0>", "not a digit", reward=0.0)])
        yield store


def test_auc_is_the_mean_over_prompts_with_unequal_rewards(store, samples):
    pi, ref = policy(0), policy(1)
    alone, ratio = [], []
    for p in range(3):
        group = samples[6 * p : 6 * p + 6]
        reward = [s.reward for s in group]
        logp = [own_logp(pi, s) for s in group]
        alone.append(auc(logp, reward))
        ratio.append(auc([x - own_logp(ref, s) for x, s in zip(logp, group, strict=True)], reward))
    assert np.ptp(alone) > 0
    assert alone != ratio
    report = check_store(store, config.RunConfig.of({"objective": {"name": "agro"}}))
    for reference, expected, of in ((None, alone, "log π"), (ref, ratio, "log π/π_ref")):
        measured = measure(store, pi, reference)
        words = f"{of} ranks the better of two responses to a prompt higher in {100 * np.mean(expected):.0f}%"
        assert words in str(replace(report, measured=measured))
        found = measured.values
        assert found["auc_of"] == of
        assert found["auc"] == pytest.approx(np.mean(expected))
        assert found["auc_se"] == pytest.approx(np.std(expected, ddof=1) / 3**0.5)
        assert (found["auc_groups"], found["auc_dropped"]) == (3, 1)  # "not a digit" can't be encoded


def test_the_ranking_accuracy_of_judged_pairs(tmp_path):
    """By the log π of each response; a pair with a response that can't be encoded isn't counted."""
    texts = ["12", "3", "4567", "not a digit"]
    with Store.open(tmp_path / "pairs.db") as store:
        ids = store.append(Sample("7>", text) for text in texts)
        judged = [(0, 1), (1, 0), (0, 2), (2, 1), (0, 3)]
        store.add_pairs([Pair(ids[a], ids[b]) for a, b in judged])
        found = measure(store, policy(0), None).values
    logp = [own_logp(policy(0), Sample("7>", text)) for text in texts[:3]]
    right = [logp[a] >= logp[b] for a, b in judged[:4]]
    mean = [x / (len(text) + 1) for x, text in zip(logp, texts)]  # the end is a token too
    per_token = [mean[a] >= mean[b] for a, b in judged[:4]]
    assert found["ranked_pairs"] == 4
    assert (found["ranked_share"], found["ranked_share_per_token"]) == (np.mean(right), np.mean(per_token))


def test_a_model_doesnt_rank_better_than_itself(store):
    assert measure(store, policy(0), policy(0)).values["auc"] == 0.5


def test_auc_is_unknown_without_unequal_rewards(tmp_path):
    with Store.open(tmp_path / "equal.db") as store:
        store.append(EQUAL)
        found = measure(store, policy(0), None).values
    assert (found["auc"], found["auc_se"], found["auc_groups"]) == (None, None, 0)
    assert (found["ranked_share"], found["ranked_pairs"]) == (None, 0)


def test_a_reference_with_another_tokenizer_is_refused(store):
    with pytest.raises(Refused, match="expected a reference with the model's tokenizer"):
        measure(store, policy(0), policy(0, alphabet="9876543210>"))


def test_responses_that_cannot_be_encoded_are_a_problem(tmp_path):
    with Store.open(tmp_path / "words.db") as store:
        store.append([Sample("7>", "words", reward=float(i)) for i in range(2)])
        report = check_store(store, config.RunConfig.of({"objective": {"name": "agro"}}))
        report = replace(report, measured=measure(store, policy(0), policy(1)))
    [said] = [v for v in report.verdicts if "can't be trained on some" in v.text]
    assert said.level == "problem"
    assert report.to_json()["measured_groups"] == 0
    assert "measured" in str(report)
