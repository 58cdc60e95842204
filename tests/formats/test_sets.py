"""Sets of judged responses: votes, and what is asked where a set holds several of a kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example import json_lines, rows_of

from agro.errors import Refused
from agro.logs.format_table import FORMATS
from agro.logs.protocol import Context, Format
from agro.rollout.prompts import load_prompts

CONTEXT = Context(Path("log.jsonl"))
FIRST = {
    name: rows_of(name)[0] for name in ("arena", "arena-55k", "helpsteer", "helpsteer-preference", "math")
}
ARENA, KAGGLE, STEER, STEER3, MATH = FIRST.values()


def votes(row: dict[str, Any]) -> tuple[float | None, float | None]:
    format = next(f for f in FORMATS.values() if f.fits(row) and f.kind == "pairs")
    return format.read(row, CONTEXT)[0].judgments[0].votes


def test_annotators_are_votes() -> None:
    """Of the scores -3, 1 and 0 one prefers the first, one the second, and one neither."""
    assert votes(STEER3) == (1.5, 1.5)
    assert votes({**STEER3, "individual_preference": [{"score": -1}, {"score": -2}]}) == (2.0, 0.0)
    assert votes({**STEER3, "individual_preference": None}) == (None, None)


def test_votes_go_with_the_better_response() -> None:
    row = {
        **STEER3,
        "overall_preference": 2,
        "individual_preference": [{"score": 3}, {"score": 3}, {"score": -1}],
    }
    assert votes(row) == (2.0, 1.0)


@pytest.mark.parametrize(
    "row",
    [
        {**STEER3, "overall_preference": 0, "individual_preference": None},
        {**ARENA, "winner": "tie"},
        {**KAGGLE, "winner_model_a": 0, "winner_tie": 1},
    ],
)
def test_a_tie_is_one_vote_each(row: dict[str, Any]) -> None:
    assert votes(row) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("format", "row", "said"),
    [
        (
            FORMATS["ultrafeedback"],
            rows_of("ultrafeedback")[0],
            "--choose aspect=NAME of helpfulness, honesty, mean, overall_score",
        ),
        (FORMATS["helpsteer"], STEER, "several columns of rewards .helpfulness, correctness, coherence"),
    ],
)
def test_several_ratings_are_asked_for(format: Format, row: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        format.read(row, CONTEXT)


def test_two_bad_responses_are_no_pair_by_default() -> None:
    items = FORMATS["arena"].read({**ARENA, "winner": "both_bad"}, CONTEXT)
    assert [item.judgments for item in items] == [(), ()]
    wrong = Context(CONTEXT.path, choose={"both_bad": "one"})
    with pytest.raises(Refused, match="both_bad=one: expected none, or zero"):
        FORMATS["arena"].read({**ARENA, "winner": "both_bad"}, wrong)


def test_a_file_of_math_is_one_of_prompts_with_answers(tmp_path: Path) -> None:
    json_lines(tmp_path / "train.jsonl", [MATH])
    (prompt,) = load_prompts(tmp_path / "train.jsonl")
    assert prompt.text == MATH["problem"]
    assert prompt.columns == {"answer": r"\frac{2}{2}", "level": "Level 1", "type": "Prealgebra"}
