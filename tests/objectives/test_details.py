"""Details of the objectives that no other test covers, shown by mutants.

Metrics by hand, words of refusals, numbers at an edge.
"""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest
import torch
from cases import at, of_one_token

from agro import Batch, objectives
from agro.errors import Refused
from agro.models.policy import VALUES
from agro.objectives import Evaluation, NotFinite, Objective, differentiate
from agro.objectives.core import MethodWarnings, Terms, wanted_streams
from agro.objectives.methods import consistency
from agro.objectives.needs import BEHAVIOR_LOGP, KL, NEEDS, VALUE, provided_by
from agro.objectives.reduce import Groups
from agro.objectives.table import entries
from agro.store import SampleSummary


def at_the_reference(name: str, groups: dict[str, tuple[float, list[float]]], **options: Any) -> Evaluation:
    """{name: (weight, rewards)}, each response one token of log-prob -1 under policy and reference: R = r."""
    rows = [(g, weight, r) for g, (weight, rewards) in groups.items() for r in rewards]
    batch = of_one_token(
        [r for _, _, r in rows],
        [g for g, _, _ in rows],
        weight=[w for _, w, _ in rows],
        ref_logp=-1.0,
        staleness=[0] * len(rows),
        extra={"stored_value": [0.0] * len(rows)},
    )
    return at(-1.0, name, batch, **options)


TWO: Any = {"a": (1, [1, 0])}
UP_AND_DOWN: Any = {
    "up": (3, [0.4, 0]),
    "edge": (2, [0.5, 0]),
    "down": (4, [0.6, 0]),
    "far": (1, [1, 0, 0]),
    "equal": (8, [1, 1]),
}
PARTS: Any = {"a": (3, [0.2, 0]), "b": (1, [1, 0])}
ONE_OF_THREE: Any = {"one": (3, [1, 0, 0]), "two": (1, [1, 1, 0]), "pair": (9, [1, 0])}


@pytest.mark.parametrize(
    ("name", "groups", "options", "expected"),
    [
        # rewards 1 and 0: ½ · ½
        ("agro", TWO, {}, {"consistency": 0.25, "singletons_dropped": 0.0}),
        ("agro_onpolicy", TWO, {}, {"consistency": 0.25}),
        # ½ Var is ½ · ½, of one response unknown, ½ · ⅓: (1 · ¼ + 3 · ⅙)/(1 + 3); the lone one has no share
        (
            "squared_consistency",
            {"a": (1, [1, 0]), "lone": (2, [5]), "c": (3, [1, 0, 0])},
            {"baseline": "stored", "scale": "square"},
            {"consistency": 0.1875},
        ),
    ],
    ids=str,
)
def test_metrics_by_hand(name: str, groups: Any, options: dict[str, Any], expected: dict[str, float]) -> None:
    found = at_the_reference(name, groups, beta=0.5, **options).metrics
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-14)
    assert name != "agro" or found.keys() == expected.keys()


@pytest.mark.parametrize(
    ("groups", "options", "expected"),
    [
        # the best is pushed down where R_i − R̄_{-i} is above ½; groups of equal rewards don't count
        (UP_AND_DOWN, {}, {"reversed_share": (4 + 1) / (3 + 2 + 4 + 1), "likelihood_ratio": 1.0}),
        ({"equal": (8, [1, 1])}, {}, {"reversed_share": np.nan}),
        # adaptive: min(1, β / max_i (R_i − R̄_{-i})), here 1 and ¼/1, in the mean by weight
        (PARTS, {"likelihood_ratio": 0.4}, {"likelihood_ratio": 0.4}),
        (PARTS, {"likelihood_ratio": "adaptive"}, {"likelihood_ratio": 3.25 / 4, "reversed_share": 0}),
        # k₂ = k₃ = ⅓ of one success of three, its mirror −⅓: (1 − ⅓)/(2β (1 + ⅓)); a pair isn't counted
        (ONE_OF_THREE, {}, {"trap_ratio": 1.0}),
        (ONE_OF_THREE, {"beta": 0.0}, {"trap_ratio": np.nan}),
        # one of n: k₃/k₂ = 1, so 1/(2β); its mirror has −1, equal groups add nothing
        ({"a": (1, [1, 0, 0, 0]), "b": (1, [0, 0, 0])}, {}, {"trap_ratio": 2.0}),
        ({"a": (1, [1, 0, 0, 0]), "b": (1, [1, 1, 1, 0])}, {}, {"trap_ratio": 0.0}),
        (TWO, {}, {"trap_ratio": np.nan}),
    ],
    ids=str,
)
def test_metrics_of_on_policy_agro(groups: Any, options: dict[str, Any], expected: dict[str, float]) -> None:
    found = at_the_reference("agro_onpolicy", groups, **{"beta": 0.25} | options).metrics
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-14, nan_ok=True)


def test_a_weight_against_the_reference_by_hand() -> None:
    """Log-ratios log ½ and log 2 at β = 0: weights ½ and 1 on residuals 1 and −1.

    So −½·½·1 and +½·1·1; their mean is ¾.
    """
    half = float(np.log(0.5))
    batch = of_one_token([1, 0], ref_logp=-1.0)
    out = at([-1.0 + half, -1.0 - half], "agro", batch, beta=0.0, weight="reference")
    np.testing.assert_allclose(out.grad, [[0, -0.25], [0, 0.5]], atol=1e-15)
    assert out.metrics["weight_mean"] == pytest.approx(0.75, abs=1e-15)
    assert out.loss == 0.25


@pytest.mark.parametrize(("name", "option"), [("agro", "regularizer"), ("agro_onpolicy", "squared")])
def test_what_looks_along_a_response_says_which_option_does(name: str, option: str) -> None:
    given = {"response": [*"abb"], "staleness": [0] * 3, "ids": ["one", "two", "three"]}
    batch = of_one_token([1.0, 0.0, 0.0], ref_logp=-1.0, **given)
    said = rf'^objective {name}: {option} = "triangular" .* that of two is in several rows; use "sequence"$'
    with pytest.raises(Refused, match=said):
        at(-1.0, name, batch, beta=0.5, **{option: "triangular"})


def test_without_beta_a_policy_that_is_certain_stands_still() -> None:
    """log π = 0 at every token."""
    out = at(0.0, "agro", of_one_token([1.0, 0.0]), beta=0.0, scale="loss")
    assert (out.grad == 0).all()


def test_rows_that_a_micro_batch_does_not_hold_are_not_judged_by_it() -> None:
    """Rows 2 and 3 are given. The ratio of row 0 overflows, which the micro-batch with row 0 reports."""
    behavior = [-800.0, -1.0, -1.0, -1.0]
    batch = of_one_token([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], ids=[*"abcd"], behavior_logp=behavior)
    entry = objectives.get("grpo")
    options = entry.resolve("grpo", {})
    logp = {"logp": torch.tensor([[0.0, -1.0]] * 4, dtype=torch.float64)}
    out = objectives.differentiate("grpo", entry, logp, batch, options, torch.tensor([2, 3]))
    assert out.grads["logp"][2:, 1].isfinite().all()
    said = r"isn't finite in a \(does a ratio overflow\?\)\. What to do"
    with pytest.raises(NotFinite, match=said):
        objectives.differentiate("grpo", entry, logp, batch, options, torch.tensor([0, 1]))


EVERY = [(name, key) for name in objectives.names() for key in objectives.describe(name)["options"]]


@pytest.mark.parametrize(("name", "key"), EVERY)
def test_an_option_says_what_it_is(name: str, key: str) -> None:
    """Its default is accepted, and so is each choice it names.

    Its unit is one of a choice, a number, or what it multiplies.
    """
    entry = objectives.get(name)
    option = objectives.describe(name)["options"][key]
    if not option["required"]:
        assert entry.checked(name, {key: option["default"]})[key] == option["default"]
    if entry.of:
        return  # its options are those of another objective
    assert len(option["meaning"].split()) > 3
    if key == "beta":
        assert option["meaning"].endswith("anchor" if name == "squared_consistency" else "reference")
    if option["expected"].startswith("one of "):
        assert option["unit"] == "choice"
        choices = [ast.literal_eval(x) for x in option["expected"].removeprefix("one of ").split(", ")]
        assert len(choices) >= 2
        own = isinstance(option["default"], bool) or key == "advantage" or key in entry.preset
        assert option["default"] == choices[0] or own
        assert None not in choices
        for choice in choices:
            assert entry.checked(name, {key: choice})[key] == choice
    else:
        assert "number" in option["expected"]
        assert option["unit"] not in ("", "choice", "not stated")


LIMITS: list[tuple[str, str, list[Any], list[Any]]] = [
    ("agro", "beta", [0, 0.0, 0.5, 3], [-1e-9, np.inf, True, None]),
    ("agro_onpolicy", "likelihood_ratio", [0, 0.5, 1, 1.0, "adaptive"], [1.001, 2, -0.1, "adapted", True]),
    ("squared_consistency", "beta", [1e-6, 0.5, 2], [0, 0.0, -1, "1", True]),
    ("squared_consistency", "value_beta", [None, 1e-6, 0.5, 2], [0, -1, "1", True]),
    ("reinforce", "baseline", ["none", "mean", 0, -1.5], ["others", None, True, False]),
    ("grpo", "ratio", ["behavior", "old"], ["reference"]),
    ("grpo", "clip", [(0, 0), (0.5, 2)], [(0.2,), (0.1, 0.2, 0.3), (-0.1, 0.2), 0.2, ("a", "b")]),
    ("grpo", "std", [True, False], ["yes"]),
    ("pair_consistency", "beta", [1e-6, 2], [0, -1]),
    ("pair_consistency", "gap", ["reward", 1e-6, 0.5, 2], [0, -0.5, "rewards", True]),
    ("dpo", "beta", [1e-6, 2], [0, -1]),
    ("dpo", "label_smoothing", [0, 0.1, 0.499], [0.5, 1, -0.1, "0"]),
    ("dpo", "winner", [0, 1], [-0.1]),
    ("slic", "margin", [0.5, 2], [0, -1]),
    ("kto", "threshold", [-1, 0.5], ["0"]),
    ("kto", "desirable", [0, 1.3], [-0.1]),
    ("gepo", "variance", [0, 1.3], [-0.1]),
]


@pytest.mark.parametrize(("name", "key", "good", "bad"), LIMITS, ids=[f"{n}-{k}" for n, k, *_ in LIMITS])
def test_limits_of_an_option(name: str, key: str, good: list[Any], bad: list[Any]) -> None:
    entry = objectives.get(name)
    for value in good:
        assert entry.checked(name, {key: value})[key] == value
    for value in bad:
        with pytest.raises(Refused, match=rf"^objective {name}: option {key}: expected"):
            entry.checked(name, {key: value})


def test_an_objective_that_forgets_the_mask_or_a_stream_is_kept_to_both() -> None:
    """Gradients are 0 off the mask, and 0 of its own shape for a stream without a part in the loss."""
    careless = Objective(
        lambda streams, batch: Terms(streams["logp"].sum()), "here", lambda o: {KL, VALUE}, lambda o: "row"
    )
    batch = Batch.of(mask=[[0, 1, 0], [0, 1, 1]], reward=[1.0, 0.0], group=[0, 1])
    given = {"logp": torch.zeros((2, 3)), "kl": torch.ones((2, 3)), "value": torch.zeros(2)}
    out = objectives.differentiate("careless", careless, given, batch, {})
    found = {stream: grad.tolist() for stream, grad in out.grads.items()}
    assert found == {"logp": [[0, 1, 0], [0, 1, 1]], "kl": [[0] * 3] * 2, "value": [0, 0]}
    assert out.metrics == {}  # of groups left out nothing is said where none can be


def test_a_tensor_may_be_of_half_precision_and_in_a_graph() -> None:
    """Neither has a numpy array."""
    logp = torch.full((2, 2), -1.0, dtype=torch.bfloat16, requires_grad=True)
    out = objectives.evaluate("rloo", logp, of_one_token([1.0, 0.0]))
    assert out.grad.dtype == torch.bfloat16
    assert out.grad.tolist() == [[0, -0.5], [0, 0.5]]  # -(r_i - r̄_{-i})/n
    assert not out.grad.requires_grad


@pytest.mark.parametrize(("name", "stream"), [("dro", "value"), ("prefix_consistency", "prefix_value")])
def test_a_value_says_its_loss_and_its_mean(name: str, stream: str) -> None:
    """Of one token: ½ (r − V)² is ½ · ¼ in a and ½ in b, V is ½ and 1; the weights are 3 and 1.

    Over the prefix it is the same.
    """
    values = [0.5, 0.5, 1.0]
    batch = of_one_token([1.0, 0.0, 2.0], [*"aab"], weight=[3, 3, 1], ref_logp=-1.0)
    given = {stream: values if name == "dro" else [[np.nan, v] for v in values]}
    out = at(-1.0, name, batch, streams=given, beta=0.5)
    assert out.metrics == {"value_loss": 0.21875, "value_mean": 0.625}


def test_three_groups_are_named_of_those_too_small() -> None:
    with pytest.raises(Refused, match=r"0 of 5 groups have it, 5 don't \(for example: a; b; c\)\."):
        at_the_reference("rloo", {g: (1, [1.0]) for g in "abcde"})


@pytest.mark.parametrize(
    ("group", "pairs", "said"),
    [
        (
            "abcdefgh",
            [[0, 1], [2, 3], [4, 5], [6, 7]],
            r"4 of 4 pairs don't \(for example: r0 over r1; r2 over r3; r4 over r5\)",
        ),
        ("aabbccdd", [[0, 1]], r"1 of 4 groups have it, 3 don't \(for example: b; c; d\)"),
        ("aabcdeff", [[0, 1], [6, 7]], r"2 of 6 groups have it, 4 don't \(for example: b; c; d\)"),
    ],
)
def test_three_pairs_or_groups_are_named_of_those_that_cannot_be_used(
    group: str, pairs: Any, said: str
) -> None:
    batch = of_one_token([0.0] * 8, [*group], ref_logp=-1.0, pairs=pairs, ids=[f"r{i}" for i in range(8)])
    with pytest.raises(Refused, match=said):
        at(-1.0, "dpo", batch, beta=0.5)


def test_the_policy_gradient_says_its_kl() -> None:
    """½ (0.1 + 0.2 + 0.4) for two responses."""
    batch = Batch.of(mask=[[False, True, True], [False, True, False]], reward=[1.0, 0.0], group=[0, 0])
    kl = [[7.0, 0.1, 0.2], [7.0, 0.4, 7.0]]
    out = objectives.evaluate("kl_pg", [[0.0, -1.0, -1.0]] * 2, batch, beta=0.5, streams={"kl": kl})
    assert out.metrics["kl_sampled_prefixes"] == pytest.approx(0.35, abs=1e-15)


def test_a_list_of_an_option_becomes_a_tuple() -> None:
    assert objectives.get("grpo").checked("grpo", {"clip": [0.1, 0.3]})["clip"] == (0.1, 0.3)


def test_the_most_that_rows_may_couple() -> None:
    """Where β isn't known yet. test_reads.py measures it for all options."""
    assert [objectives.describe(name)["couples"] for name in ("agro", "squared_consistency")] == ["group"] * 2


def test_streams_come_in_one_order_and_two_are_of_the_value() -> None:
    of_policy = ["logp", "kl", "ref_mean", "ref_square", "entropy", "proposal", "proposal_mean"]
    others = ["normalizer", "value", "prefix_value", "observed_logp"]
    assert wanted_streams(NEEDS) == of_policy + others
    assert {"value", "prefix_value"} == VALUES == set(provided_by("value_head", NEEDS))


def test_the_log_ratio_is_a_sum_unless_its_option_says_otherwise() -> None:
    entry = objectives.get("agro")
    assert entry.averages({"average": "token"}) == "token"
    assert entry.averages({"average": "sum"}) == entry.averages({}) == "sum"


def test_the_table_says_what_each_method_is_anchored_to_and_what_may_be_dropped() -> None:
    own = {name: entry for name, entry in entries().items() if not entry.of}
    to_reference = {name for name, entry in own.items() if entry.anchor({}) == "ref_logp"}
    assert to_reference == {"agro", "agro_onpolicy", "squared_consistency", "dro", "tbrm", "rloo"}
    assert objectives.get("squared_consistency").anchor({"anchor": "behavior"}) == "behavior_logp"
    whole = {name for name, entry in own.items() if "singletons" not in entry.options.model_fields}
    of_rows = {"dro", "tbrm", "qrpo", "ppo", "hnpg", "prefix_consistency", "topr", "kto", "props"}
    assert whole == of_rows | {"sft", "otr", "distill", "middle_band"}
    warnings = objectives.get("agro_onpolicy").warnings
    assert warnings == MethodWarnings(
        consistency.options_warning, consistency.rewards_warning, consistency.metrics_warning
    )


@pytest.mark.parametrize(
    ("known", "truncation", "is_missing"), [(True, "", False), (False, "", True), (True, "top_p 0.9", True)]
)
def test_a_stored_sample_misses_behavior_log_probs(known: bool, truncation: str, is_missing: bool) -> None:
    of = {"truncation": truncation, "episode": None, "role": "policy"}
    stored = SampleSummary(1, "p", scored=True, knows_behavior=known, **of)
    assert BEHAVIOR_LOGP.missing_in(stored) is is_missing


def imitating(rewards: list[float], **options: Any) -> Any:
    """What imitation adds to rloo's loss and gradient. Two groups have three and two responses, of 1, 2, 1, 1
    and 2 tokens; log π is −1 at each."""
    mask = [[0, 1, t] for t in (0, 1, 0, 0, 1)]
    batch = Batch.of(mask=mask, reward=rewards, group=["a", "a", "a", "b", "b"], weight=[1, 1, 1, 3, 3])
    plain, out = (
        objectives.evaluate("rloo", [[0, -1, -1]] * 5, batch, **given)
        for given in ({}, {"imitation": 0.5, **options})
    )
    added = np.asarray(out.grad) - np.asarray(plain.grad)
    return [out.loss - plain.loss, *added[:, 1]], out.metrics["imitation_loss"]


@pytest.mark.parametrize(
    ("rewards", "added"),
    [
        # of `a` the second, of 2 tokens, and of `b`, which counts three times, none: its rewards are equal
        ([0, 1, 0, 2, 2], [0, -1 / 4, 0, 0, 0]),
        # of `b` the last one: 2 tokens of weight 1 and 2 of weight 3
        ([0, 1, 0, 1, 2], [0, -1 / 16, 0, 0, -3 / 16]),
    ],
)
def test_what_is_imitated(rewards: list[float], added: list[float]) -> None:
    found, mean = imitating(rewards)
    assert found == pytest.approx([0.5, *added], abs=1e-15)
    assert mean == pytest.approx(1.0, abs=1e-15)


def test_where_nothing_is_imitated_nothing_is_added() -> None:
    found, mean = imitating([1, 1, 1, 2, 2])
    assert found == [0.0] * 6
    assert np.isnan(mean)


def test_imitation_of_pairs_needs_no_rewards() -> None:
    needed = objectives.get("dpo").needed({"beta": 0.1, "imitation": {"start": 1, "end": 0, "steps": 9}})
    assert "reward" not in needed


def test_an_option_called_imitation_of_a_function_of_ones_own_is_its_own() -> None:
    def mine(streams: Any, batch: Any, *, imitation: float = 2.0) -> Terms:
        return Terms(imitation * streams["logp"].sum())

    entry = Objective(mine, "here", lambda options: set(), lambda options: "row")
    options = entry.resolve("mine", {"imitation": 3.0})
    batch = Batch.of(mask=[[0, 1]], reward=[1.0], group=["a"])
    out = differentiate("mine", entry, {"logp": torch.tensor([[0.0, -1.0]])}, batch, options)
    assert out.loss == -3.0
    assert out.grad.tolist() == [[0.0, 3.0]]
    assert out.metrics == {}


def test_observations_by_hand() -> None:
    """Half of the mean of −log π of five answered tokens, one of which counts three times."""
    observed = np.array([[0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]], bool)
    batch = Batch.of(
        mask=[[0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]],
        reward=[1, 0, 1, 0],
        group=["a", "a", "b", "b"],
        weight=[1, 1, 3, 3],
        extra={"observed": observed},
    )
    logp = -np.ones((4, 4))
    answered = np.where(observed, [[0, 0, -0.3, -0.4], [0, 0, -0.7, 0], [0] * 4, [0, 0, -1.5, 0]], np.nan)
    streams = {"observed_logp": answered}
    plain = objectives.evaluate("rloo", logp, batch)
    out = objectives.evaluate("rloo", logp, batch, observations=0.5, streams=streams)
    mean = (0.3 + 0.4 + 0.7 + 3 * 1.5) / 6
    assert out.metrics["observation_loss"] == pytest.approx(mean, abs=1e-15)
    assert out.loss - plain.loss == pytest.approx(mean / 2, abs=1e-15)
    np.testing.assert_array_equal(out.grad, plain.grad)
    expected = -0.5 / 6 * observed * np.array([[1], [1], [3], [3]])
    np.testing.assert_allclose(out.grads["observed_logp"], expected, rtol=0, atol=1e-15)


def test_observations_that_are_not_marked_are_refused_by_row() -> None:
    batch, streams = of_one_token([1, 0], ids=["one", "two"]), {"observed_logp": np.zeros((2, 2))}
    with pytest.raises(Refused, match=r"0 of 2 rows have it, 2 don't \(for example: one; two\)"):
        at(-1.0, "rloo", batch, observations=0.5, streams=streams)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_reduction_takes_any_dtype(dtype: torch.dtype) -> None:
    groups = Groups.of(Batch.of(mask=[[False, True, True]] * 2, reward=[1.0, 0.0], group=["a", "a"]))
    x_BT, v_N = torch.tensor([[1, 1, 1], [1, 1, 0]]).to(dtype), torch.tensor([1, 0]).to(dtype)
    assert groups.sum_tokens(x_BT).tolist() == [2.0, 1.0]
    assert groups.mean_tokens(x_BT).tolist() == [1.0, 0.5]
    assert [groups.mean_rows(v_N).tolist(), groups.mean(v_N).tolist()] == [[1.0, 0.0], [0.5, 0.5]]
    assert [groups.sum(v_N).tolist(), groups.largest(v_N).tolist()] == [[1.0], [1.0]]
    assert groups.average_responses(v_N).item() == 0.5
