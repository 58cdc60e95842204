"""Published sets of preferences: votes, ties, and which preference is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example import rows_of

from agro.errors import Refused
from agro.logs.format_table import FORMATS
from agro.logs.protocol import TIE, Context, Judgment
from agro_formats.judgments import rank_judgments, tally

CONTEXT = Context(Path("log.jsonl"))
NONE = (None, None)
NAMES = ("shp", "webgpt", "nectar", "safe-rlhf", "summarize-axes", "ultrafeedback-binarized")
SHP, WEBGPT, NECTAR, SAFE, AXES, BINARIZED = (dict(rows_of(name)[0]) for name in NAMES)


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


def test_which_preference_is_asked_where_there_are_two() -> None:
    with pytest.raises(Refused, match="--choose preference=NAME of better, safer"):
        judgments("safe-rlhf", SAFE)
    one = {name: value for name, value in SAFE.items() if name != "safer_response_id"}
    assert judgments("safe-rlhf", one) == ((1, 0, NONE),)


def test_a_tree_may_be_deep() -> None:
    tree: dict[str, Any] = message("end", "assistant", "Blue.")
    for i in range(999):
        tree = message(str(i), "prompter" if i % 2 == 0 else "assistant", "A color?", replies=[tree])
    assert len(FORMATS["oasst-trees"].read(tree, CONTEXT)) == 500


def test_which_axis_is_the_reward_is_asked() -> None:
    with pytest.raises(Refused, match="say --reward overall"):
        FORMATS["summarize-axes"].read(AXES, CONTEXT)
