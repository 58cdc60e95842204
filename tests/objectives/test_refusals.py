"""Requests and data that an objective can't use are refused.

The message has the objective, the field, the counts, the rows, and what to do.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from cases import VARIANTS, batch_of, by_objective, change, draw

from agro import Batch, objectives
from agro.errors import Refused
from agro.objectives import get

SIX = {
    "mask": [[False, True, True]] * 6,
    "reward": [1.0, 0.0, 0.5, 0.0, 1.0, 2.0],
    "group": ["a", "a", "a", "b", "b", "b"],
    "ref_logp": [[0.0, -1.0, -1.0]] * 6,
    "behavior_logp": [[0.0, -1.0, -1.0]] * 6,
    "old_logp": [[0.0, -1.0, -1.0]] * 6,
    "old_value": [[0.0, 0.2, 0.3]] * 6,
    "staleness": [0] * 6,
    "pairs": [[0, 1], [2, 1], [5, 3]],
    "votes": [[3, 1], [1, 0], [2, 2]],
    "ids": [f"sample {i}" for i in range(1, 7)],
}
LOGP = [[0.0, -1.0, -2.0]] * 6
KL = [[0.0, 0.1, 0.2]] * 6
STREAMS: dict[str, Any] = {
    "kl": KL,
    "value": [0.5] * 6,
    "prefix_value": [[0.0, 0.3, 0.2]] * 6,
    "normalizer": [[0.0, 1.0, 2.0]] * 6,
    "proposal": [[0.0, 0.3, 0.2]] * 6,
    "proposal_mean": [[0.0, -1.3, -1.2]] * 6,
    "ref_mean": [[0.0, -0.1, -0.2]] * 6,
    "ref_square": KL,
}
EXTRA = {
    "stored_value": [0.7, 0.7, 0.7, 0.4, 0.4, 0.4],
    "stored_quantile": [0.7, 0.1, 0.4, 0.4, 0.5, 1.0],
    "hinted": [0.0, 1.0, 0.0, 0.0, 1.0, 0.0],
    "meaning": [0.0, 0.0, 1.0, 2.0, 3.0, 3.0],
    "reward_parts": [[0.0, 1.0], [1.0, 0.5], [0.5, 0.0], [0.1, 0.2], [0.4, 0.9], [0.3, 0.7]],
    "part_weights": [[1.0, 0.5]] * 6,
}
FIELDS = ("reward", "fresh", "ref_logp", "behavior_logp", "old_logp", "old_value", *EXTRA)
WITHHELD = [(n, o, need) for n, o, needs in VARIANTS for need in sorted(needs) if need in FIELDS]


def refusal(name: str, options: dict[str, Any], streams: Any = None, logp: Any = None, **changes: Any) -> str:
    streams, logp = STREAMS if streams is None else streams, LOGP if logp is None else logp
    given = {**SIX, "extra": EXTRA, **changes}
    with pytest.raises(Refused) as caught:
        objectives.evaluate(name, logp, Batch.of(**given), streams=streams, **options)
    return str(caught.value)


def without(need: str, rows: range) -> dict[str, Any]:
    """SIX with `need` unknown in these rows: NaN, or None for a row of log-probs."""
    if need in EXTRA:
        values = np.array(EXTRA[need])  # [B] or [B,K]
        values[list(rows)] = np.nan
        return {"extra": EXTRA | {need: values.tolist()}}
    field = "staleness" if need == "fresh" else need
    values = list(SIX[field])
    for i in rows:
        values[i] = None if isinstance(values[i], list) else np.nan
    return {field: values}


@by_objective(WITHHELD)
def test_a_need_unknown_in_some_rows(name: str, options: dict[str, Any], need: str) -> None:
    said = refusal(name, options, **without(need, range(1, 5)))
    assert f"objective {name} " in said
    assert (need if need != "fresh" else "staleness 0") in said
    assert "2 of 6 rows have it, 4 don't" in said
    assert re.findall(r"sample \d", said) == ["sample 2", "sample 3", "sample 4"]
    assert re.search(r"What to do: \w+", said)


@by_objective(WITHHELD)
def test_a_need_unknown_everywhere(name: str, options: dict[str, Any], need: str) -> None:
    field = "staleness" if need == "fresh" else need
    changes = without(need, range(6)) if need == "reward" else {field: None}
    if need in EXTRA:
        changes = {"extra": {}}
    assert "0 of 6 rows have it, 6 don't" in refusal(name, options, **changes)


def test_one_token_without_its_log_prob_is_a_row_without() -> None:
    ref = [list(row) for row in SIX["ref_logp"]]
    ref[4][2] = np.nan
    said = refusal("agro", {"beta": 0.1}, ref_logp=ref)
    assert "5 of 6 rows have it, 1 don't (for example: sample 5)" in said


@pytest.mark.parametrize("staleness", [1.0, 0.5, np.nan])
@pytest.mark.parametrize("baseline", [False, True])
def test_onpolicy_is_refused_on_anything_but_fresh_samples(staleness: float, baseline: bool) -> None:
    said = refusal("agro_onpolicy", {"beta": 0.1, "baseline": baseline}, staleness=[0, 0, staleness, 0, 0, 0])
    assert "staleness 0" in said
    assert "5 of 6 rows have it, 1 don't (for example: sample 3)" in said
    assert "agro" in said.split("What to do")[1]


def test_grpo_without_behavior_names_a_way_out() -> None:
    """The case of logs without log-probs."""
    way_out = refusal("grpo", {}, behavior_logp=None).split("What to do")[1]
    assert "sample" in way_out
    assert "agro" in way_out


@by_objective([v for v in VARIANTS if "pairs" not in v[2]])
def test_groups_too_small(name: str, options: dict[str, Any], needs: set[str]) -> None:
    least = objectives.least_responses(needs - {"rows"})
    if least == 1:
        alone = Batch.of(**{**SIX, "group": list("abcdef"), "extra": EXTRA})
        objectives.evaluate(name, LOGP, alone, streams=STREAMS, **options)
        return
    group, counts = {
        2: ([*"aaa", "lone", "b", "c"], "1 of 4 groups have it, 3 don't"),
        3: ([*"aaabb", "lone"], "1 of 3 groups have it, 2 don't"),
    }[least]
    said = refusal(name, options, group=group)
    assert f"objective {name} needs groups of at least {least} responses" in said
    assert counts in said
    assert "lone" in said
    assert "objective.singletons=drop" in said
    said = refusal(name, {**options, "singletons": "drop"}, group=list("abcdef"))
    assert f"at least {least} responses: 0 of 6 groups have it" in said


NO_ROW = "0 of 6 rows have it, 6 don't (for example: sample 1; sample 2; sample 3)"
VOTES = 'of 3 pairs have it, {} don\'t .*sample 3 over sample 2; sample 4 over sample 6.*votes = "ignore"'
JOINED = "expected each to join two responses to one prompt, but 1 of 3 pairs don't .*sample 1 over sample {}"
THREE = [(0, 1), (2, 1), (3, 5)]


@pytest.mark.parametrize("name", ["dpo", "pair_consistency"])
@pytest.mark.parametrize(
    ("pairs", "batch", "options", "said"),
    [
        (None, {}, {}, f"needs pairs.*{re.escape(NO_ROW)}.*agro import"),
        ([], {}, {}, f"needs pairs.*{re.escape(NO_ROW)}.*agro import"),
        ([(3, 5)], {}, {}, r"1 of 2 groups have it, 1 don't \(for example: a\).*objective.singletons=drop"),
        ([(0, 2), (0, 3), (3, 4)], {}, {}, JOINED.format(4)),
        ([(0, 2), (0, 0), (3, 4)], {}, {}, JOINED.format(1)),
        ([(0, 2), (0, 1), (3, 4)], {"response": [0, 0, 1, 2, 3, 4]}, {}, JOINED.format(2)),
        (THREE, {}, {"votes": "mean"}, VOTES.format(3)),
        (THREE, {"votes": [(3, 1), (np.nan, 2), (1, np.nan)]}, {"votes": "mean"}, VOTES.format(2)),
        ([(0, 1), (3, 4)], {"votes": [(1.0, 1.0)] * 2}, {}, "all 2 pairs are equal .*sample 1 over sample 2"),
    ],
    ids=["no pairs", "an empty list", "a group without", "two prompts", "itself", "one response", "no votes",
         "some votes", "ties alone"],
)  # fmt: skip
def test_pairs_that_are_refused(name: str, pairs: Any, batch: Any, options: Any, said: str) -> None:
    found = refusal(name, {"beta": 0.4, **options}, **{"pairs": pairs, "votes": None} | batch)
    assert re.search(rf"(?s)objective {name}.*{said}", found)
    assert "What to do" in found


def test_an_episode_in_two_rows_is_one_response() -> None:
    """Two rows, one response: too few for a group of two."""
    said = refusal("rloo", {}, group=[*"aabbbb"], response=[0, 0, 1, 2, 3, 4], reward=[1.0, 1.0, 0, 1, 2, 3])
    assert "1 of 2 groups have it, 1 don't (for example: a)" in said


def test_the_kl_stream() -> None:
    said = refusal("kl_pg", {"beta": 0.1}, streams={"entropy": KL})
    assert 'objective kl_pg needs the stream "kl"' in said
    said = refusal("kl_pg", {"beta": 0.1}, streams={"kl": KL[:5]})
    assert "objective kl_pg: stream kl: expected shape [6, 3], got [5, 3]" in said


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "stream", "place"), [("kl_pg", "logp", (3, 1)), ("kl_pg", "kl", (3, 1)), ("dro", "value", (3,))]
)
def test_a_stream_that_is_not_finite(name: str, stream: str, place: tuple[int, ...], bad: float) -> None:
    values = np.array(LOGP if stream == "logp" else STREAMS[stream])
    values[place] = bad
    given = {"logp": values} if stream == "logp" else {"streams": {stream: values}}
    said = refusal(name, {"beta": 0.1}, **{"streams": {"kl": KL}} | given)
    assert f"objective {name}: stream {stream}" in said
    assert "sample 4" in said


@pytest.mark.parametrize(
    "logp",
    [LOGP[:5], [row[:2] for row in LOGP], LOGP[0], [[0.0, -1.0], [0.0]], None, "logp", [["a"] * 3] * 6],
    ids=str,
)
def test_log_probs_of_another_shape_or_kind(logp: Any) -> None:
    with pytest.raises(
        Refused, match=r"(^|: )stream logp: expected (numbers of shape \[B,T\]|shape \[6, 3\]), got"
    ):
        objectives.evaluate("sft", logp, Batch.of(**SIX))


def test_a_value_for_each_token_where_one_a_row_is_asked() -> None:
    said = refusal("dro", {"beta": 0.1}, streams={"value": KL})
    assert "stream value: expected shape [6], got [6, 3]" in said
    assert "expected numbers of shape [B]" in refusal("dro", {"beta": 0.1}, streams={"value": "many"})


def test_a_second_logp_among_the_streams() -> None:
    with pytest.raises(Refused, match="logp"):
        objectives.evaluate("sft", LOGP, Batch.of(**SIX), streams={"logp": KL})


@pytest.mark.parametrize(
    ("options", "field", "far"),
    [
        ({}, "behavior_logp", -800.0),
        ({"ratio": "old"}, "old_logp", -800.0),
        ({"std": False}, "behavior_logp", -800.0),
        ({"beta": 0.1}, "logp", -803.0),
    ],
)
def test_what_overflows_names_the_row(options: dict[str, Any], field: str, far: float) -> None:
    values = [list(row) for row in (LOGP if field == "logp" else SIX[field])]
    values[2][2] = far
    found = refusal("grpo", options, **{field: values})
    assert "objective grpo" in found
    assert "sample 3 (does a ratio overflow?). What to do: " in found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": [1, 1, 2, 1, 1, 1]}, ("weight", "sample 3", "expected one weight")),
        ({"response": [0, 0, 1, 2, 3, 4]}, ("reward", "sample 2", "different values")),
        ({"response": [0, 1, 2, 2, 3, 4], "reward": [0.0] * 6}, ("group", "sample 4", "different values")),
        ({"weight": [0.0] * 6}, ("weight", "0")),
        ({"weight": [0.0] * 3 + [1.0] * 3, "group": [*"aaabcd"]}, ("weight", "0")),
    ],
)
def test_rows_that_contradict_one_another(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    said = refusal("rloo", {"singletons": "drop"}, **changes)
    assert re.search(rf"(^|: ){words[0]}: ", said)
    assert all(w in said for w in words), said


def test_weights_of_0_leave_nothing_for_sft_either() -> None:
    assert "weight" in refusal("sft", {}, weight=[0.0] * 6)


@pytest.mark.parametrize(
    "act", [objectives.get, objectives.describe, lambda n: objectives.evaluate(n, LOGP, Batch.of(**SIX))]
)
def test_an_unknown_objective(act: Any) -> None:
    with pytest.raises(Refused) as caught:
        act("argo")
    assert "'argo'" in str(caught.value)
    assert "did you mean agro?" in str(caught.value)
    with pytest.raises(Refused, match=r"got 'zzzz'; there are agro, "):
        act("zzzz")


BETA: dict[str, Any] = {"beta": 0.1}
WEIGHED: dict[str, Any] = {"weight": "behavior"}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("agro", {}, ("beta", "no default")),
        ("kl_pg", {}, ("beta", "no default")),
        ("agro", BETA | {"bta": 0.1}, ("unknown option bta", "did you mean beta?")),
        ("agro", BETA | {"reward_scale": "loss"}, ("unknown option reward_scale; did you mean scale?",)),
        ("sft", BETA, ("unknown option beta; it has: weight",)),
        ("rloo", {"zeta_coefficient": 1}, ("it has: beta, baseline, normalize, weight",)),
        ("dro", BETA | {"scale": "loss"}, ("unknown option scale",)),
        ("agro", {"beta": -0.1}, ("beta", "0 or more", "-0.1")),
        ("agro", {"beta": np.nan}, ("beta", "nan")),
        ("agro", {"beta": "0.1"}, ("beta", "a number", "'0.1'")),
        ("agro", BETA | {"scale": "rewards"}, ("scale", "'reward', 'loss'", "'rewards'")),
        ("agro", BETA | {"singletons": "keep"}, ("singletons", "'error', 'drop'", "'keep'")),
        ("agro_onpolicy", BETA | {"baseline": 1}, ("baseline", "False, True", "1")),
        ("reinforce", {"baseline": "median"}, ("baseline", "'opo' or a number", "'median'")),
        ("grpo", {"clip": 0.2}, ("clip", "two numbers", "0.2")),
        ("grpo", {"clip": [0.2, -0.1]}, ("clip", "0 or more", "-0.1")),
        # of options that exclude each other
        (
            "agro",
            BETA | {"average": "token", "regularizer": "local"},
            ('regularizer = "local" needs average = "sum", got "token"',),
        ),
        ("agro", BETA | {"weight": "reference", "regularizer": "triangular"}, ("regularizer",)),
        (
            "agro_onpolicy",
            BETA | {"squared": "local", "likelihood_ratio": "adaptive"},
            ('likelihood_ratio = "adaptive" needs squared = "sequence", got "local"',),
        ),
        (
            "squared_consistency",
            BETA | {"baseline": "stored"},
            ('baseline = "stored" needs scale = "square" or "trajectory", got "half_variance"',),
        ),
        (
            "pair_consistency",
            BETA | {"gap": "reward", "votes": "mean"},
            ('gap = "reward" needs votes = "ignore", got "mean"',),
        ),
        ("opmd", {"form": "pairwise", "baseline": "soft"}, ('form = "pairwise"',)),
        ("grpo", {"weight_min": 0.5}, ('weight = "none" needs weight_min = 0.0, got 0.5; change weight or',)),
        (
            "grpo",
            {"weight_level": "token"},
            ('weight = "none" needs weight_level = "sequence", got "token"',),
        ),
        ("grpo", {"weight_rule": "mask"}, ('weight = "none" needs weight_rule = "truncate", got "mask"',)),
        (
            "grpo",
            WEIGHED | {"weight_min": 2.0},
            ("weight_min = 2.0 needs weight_max at least as large, got 1.0",),
        ),
        (
            "middle_band",
            {"low": 0.8, "high": 0.2},
            ("low = 0.8 needs high at least as large, got 0.2; change low or",),
        ),
        ("otr", {"draws": 1.5}, ("otr: draws = 1.5 needs to be a whole number; change draws",)),
        ("otr", {"seed": 3.0}, ("draws = 0.0 needs seed = 0, got 3.0; change draws or seed",)),
        (
            "bapo",
            {"low": (0.9, 0.6, 0.1)},
            ("low = [0.9, 0.6, 0.1] needs start, maximum and step, the start up",),
        ),
        (
            "bapo",
            {"high": (1.2, 3.0, 0.0)},
            ("high = [1.2, 3.0, 0.0] needs start, maximum and step, the start up",),
        ),
        (
            "bapo",
            {"low": (0.6, 1.5, 0.1)},
            ("low = [0.6, 1.5, 0.1] needs high to start at its maximum", "got [1.2,"),
        ),
    ],
    ids=str,
)
def test_options(name: str, options: dict[str, Any], words: tuple[str, ...]) -> None:
    said = refusal(name, options)
    assert f"objective {name}" in said
    assert all(w in said for w in words), said


@pytest.mark.parametrize("options", [{"bta": 0.1}, {"beta": -1.0}])
def test_describe_checks_the_options_it_is_given(options: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=rf"objective agro: .*option {next(iter(options))}"):
        objectives.describe("agro", **options)


def test_the_names_of_the_contract_are_there() -> None:
    assert {"agro", "agro_onpolicy", "rloo", "reinforce", "kl_pg", "grpo", "sft"} <= set(objectives.names())
    of_rows = ("ref_logp", "behavior_logp", "old_logp", "staleness", "role", "weight")
    columns = (*of_rows, "pairs", "votes", "extra")
    batch = Batch.of(mask=[[0, 1]], reward=[1.0], group=["a"], **dict.fromkeys(columns))
    assert all(hasattr(batch, name) for name in columns)


def test_a_preset_is_described_as_its_table_has_it() -> None:
    told = objectives.describe("dr_grpo", average=256.0)
    assert (told["preset_of"], told["certainty"]) == ("grpo", "code")
    assert 'TRL loss_type = "dr_grpo"' in told["called"]
    assert "2503.20783" in told["source"]
    assert told["options"]["average"]["required"]
    entry = get("dr_grpo")
    assert entry.with_preset({"beta": 0.1}) == {"std": False, "beta": 0.1}
    assert entry.recipe is not None
    assert "2503.20783" in entry.recipe.title


def test_describe() -> None:
    """Needs before options are known are the most it may need."""
    told = objectives.describe("agro")
    assert (told["name"], set(told["needs"]), told["couples"]) == (
        "agro",
        {"reward", "groups", "ref_logp"},
        "group",
    )
    beta = told["options"]["beta"]
    assert (beta["required"], beta["default"]) == (True, None)
    assert "reward per nat" in beta["unit"]
    assert "2503.19612" in told["source"]
    assert "eq. 4" in told["source"]
    defaults = {}
    for name in objectives.names():
        told = objectives.describe(name)
        assert told["summary"]
        assert told["source"]
        assert all(o["unit"] and o["meaning"] and o["expected"] for o in told["options"].values())
        defaults[name] = {k: o["default"] for k, o in told["options"].items() if not o["required"]}
    promised = {
        "agro": {"scale": "reward"},
        "rloo": {"beta": 0},
        "reinforce": {"baseline": "none"},
        "agro_onpolicy": {"baseline": False},
        "grpo": {"ratio": "behavior", "clip": (0.2, 0.2), "std": True, "beta": 0},
    }
    assert {name: {k: defaults[name][k] for k in of} for name, of in promised.items()} == promised


def test_a_refusal_leaves_the_batch_as_it_was() -> None:
    case = draw(1)
    batch = batch_of(case)
    before = batch.reward.clone()
    with pytest.raises(Refused):
        objectives.evaluate("agro", change(case, logp=case.logp * np.nan).logp, batch, beta=0.1)
    assert (batch.reward == before).all()
