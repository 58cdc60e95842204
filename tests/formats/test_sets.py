"""Published sets of judged responses: votes, ties, and what is asked where a set holds several of a kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example import json_lines, rows_of

from agro.errors import Refused
from agro.logs.format_table import FORMATS
from agro.logs.protocol import TIE, Context, Judgment
from agro.logs.values import number
from agro.rollout.prompts import load_prompts
from agro_formats.preferences import rank_judgments, tally

CONTEXT = Context(Path("log.jsonl"))
NONE = (None, None)
NAMES = (
    *("shp", "webgpt", "nectar", "safe-rlhf", "ultrafeedback-binarized", "arena", "arena-55k"),
    *("helpsteer-preference", "math"),
)
SHP, WEBGPT, NECTAR, SAFE, BINARIZED, ARENA, KAGGLE, STEER3, MATH = (dict(rows_of(name)[0]) for name in NAMES)


def message(id: str, role: str, said: str, **more: Any) -> dict[str, Any]:
    return {"message_id": id, "text": said, "role": role, "lang": "en", **more}


def judgments(name: str, row: dict[str, Any]) -> tuple[Judgment, ...]:
    [item] = FORMATS[name].read(row, CONTEXT)
    return item.judgments


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [(0, 1, (340.0, 166.0))]),
        ({"labels": 0, "score_A": 1}, [(1, 0, (166.0, 1.0))]),
        ({"score_A": 166}, [(0, 1, (166.0, 166.0))]),  # a tie, whatever the label says
        ({"score_B": -3}, [(0, 1, NONE)]),  # more votes against than for: how many isn't known
        ({"score_B": None}, [(0, 1, (340.0, None))]),
        ({"labels": None}, []),
    ],
)
def test_scores_of_shp_are_votes(change: dict[str, Any], expected: list[Any]) -> None:
    assert list(judgments("shp", SHP | change)) == expected


@pytest.mark.parametrize(
    ("scores", "expected"),
    [((0.5, -0.5), [(0, 1, NONE)]), ((0.0, 0.0), [(0, 1, TIE)]), ((None, 0.5), [])],
)
def test_a_score_of_webgpt_is_a_preference_and_no_number_of_votes(scores: Any, expected: list[Any]) -> None:
    assert list(judgments("webgpt", WEBGPT | dict(zip(("score_0", "score_1"), scores)))) == expected


def test_equal_ranks_are_ties() -> None:
    assert judgments("nectar", NECTAR)[-1] == (2, 3, TIE)
    assert rank_judgments([2.0, None, 1.0]) == ((2, 0, NONE),)


def test_equal_scores_of_a_pair_are_a_tie() -> None:
    inside = {name: value for name, value in BINARIZED.items() if name != "prompt"}
    for name, row in (("ultrafeedback-binarized", BINARIZED), ("trl-preference", inside)):
        assert judgments(name, row) == ((0, 1, NONE),)
        assert judgments(name, row | {"score_rejected": 8.0}) == ((0, 1, TIE),)
    assert judgments("trl-preference", inside | {"score_rejected": None}) == ((0, 1, NONE),)


def test_annotators_are_votes_and_a_tie_is_half_a_vote_for_each() -> None:
    assert tally([Judgment(1, 0), Judgment(0, 1, TIE), Judgment(1, 0)]) == ((1, 0, (2.5, 0.5)),)
    assert tally([Judgment(1, 0), Judgment(0, 1)]) == ((0, 1, (1.0, 1.0)),)


def test_of_two_preferences_one_may_be_there() -> None:
    one = {name: value for name, value in SAFE.items() if name != "safer_response_id"}
    assert judgments("safe-rlhf", one) == ((1, 0, NONE),)


def test_a_tree_may_be_deep() -> None:
    tree: dict[str, Any] = message("end", "assistant", "Blue.")
    for i in range(999):
        tree = message(str(i), "prompter" if i % 2 == 0 else "assistant", "A color?", replies=[tree])
    assert len(FORMATS["oasst-trees"].read(tree, CONTEXT)) == 500


@pytest.mark.parametrize(
    ("change", "votes"),
    [
        ({}, (1.5, 1.5)),  # of the scores -3, 1 and 0 one prefers the first, one the second, and one neither
        ({"individual_preference": [{"score": -1}, {"score": -2}]}, (2.0, 0.0)),
        ({"individual_preference": None}, NONE),
        # they go with the better response
        ({"overall_preference": 2, "individual_preference": [{"score": s} for s in (3, 3, -1)]}, (2.0, 1.0)),
    ],
)
def test_annotators_are_votes(change: dict[str, Any], votes: Any) -> None:
    assert judgments("helpsteer-preference", STEER3 | change)[0].votes == votes


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("helpsteer-preference", {**STEER3, "overall_preference": 0, "individual_preference": None}),
        ("arena", {**ARENA, "winner": "tie"}),
        ("arena-55k", {**KAGGLE, "winner_model_a": 0, "winner_tie": 1}),
    ],
)
def test_a_tie_is_one_vote_each(name: str, row: dict[str, Any]) -> None:
    assert judgments(name, row)[0].votes == TIE


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ultrafeedback", "--choose aspect=NAME of helpfulness, honesty, mean, overall_score"),
        ("helpsteer", "several columns of rewards .helpfulness, correctness, coherence"),
        ("summarize-axes", "say --reward overall"),
        ("safe-rlhf", "--choose preference=NAME of better, safer"),
    ],
)
def test_several_ratings_are_asked_for(name: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        FORMATS[name].read(rows_of(name)[0], CONTEXT)


def test_an_attribute_that_is_not_named_is_not_read() -> None:
    row = {**rows_of("helpsteer")[0], "helpfulness": 4, "verbosity": "N/A"}
    [item] = FORMATS["helpsteer"].read(row, replace(CONTEXT, rewards={"helpfulness": 1.0}))
    assert item.records[0]["reward"] == 4.0


def test_a_cell_without_a_list_is_unknown() -> None:
    row = {**rows_of("open-r1-math")[0], "finish_reasons": float("nan")}
    assert len(FORMATS["open-r1-math"].read(row, CONTEXT)) == len(row["generations"])


@pytest.mark.parametrize(
    ("written", "expected"),
    [(".5", 0.5), ("-.25", -0.25), ("5.", 5.0), ("05", 5.0), ("4,5", 4.5), ("nan", None), ("N/A", None)],
)
def test_a_score_in_a_text(written: str, expected: float | None) -> None:
    assert number(written, "score", is_text=True) == expected


@pytest.mark.parametrize("written", ["true", "inf", "[1]", "good"])
def test_what_is_no_score_in_a_text(written: str) -> None:
    with pytest.raises(Refused, match="score: expected a number or 'N/A', got"):
        number(written, "score", is_text=True)


def test_two_bad_responses_are_no_pair_by_default() -> None:
    items = FORMATS["arena"].read({**ARENA, "winner": "both_bad"}, CONTEXT)
    assert [item.judgments for item in items] == [(), ()]
    wrong = Context(CONTEXT.path, choose={"both_bad": "one"})
    with pytest.raises(Refused, match="both_bad: expected --choose both_bad=NAME of none, zero, got one"):
        FORMATS["arena"].read({**ARENA, "winner": "both_bad"}, wrong)


def test_a_file_of_math_is_one_of_prompts_with_answers(tmp_path: Path) -> None:
    json_lines(tmp_path / "train.jsonl", [MATH])
    (prompt,) = load_prompts(tmp_path / "train.jsonl")
    assert prompt.text == MATH["problem"]
    assert prompt.columns == {"answer": r"\frac{2}{2}", "level": "Level 1", "type": "Prealgebra"}
