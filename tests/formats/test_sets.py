"""Published sets of judged responses: how votes and scores are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example import rows_of
from writers import json_lines

from agro.errors import Refused
from agro.logs.format_table import FORMATS
from agro.logs.protocol import TIE, Context, Judgment
from agro.logs.values import number
from agro.rollout.prompts import load_prompts
from agro_formats.preferences import rank_judgments, tally

CONTEXT = Context(Path("log.jsonl"))


def test_unknown_ranks_are_passed_over() -> None:
    assert rank_judgments([2.0, None, 1.0]) == ((2, 0, (None, None)),)


def test_annotators_are_votes_and_a_tie_is_half_a_vote_for_each() -> None:
    assert tally([Judgment(1, 0), Judgment(0, 1, TIE), Judgment(1, 0)]) == ((1, 0, (2.5, 0.5)),)
    assert tally([Judgment(1, 0), Judgment(0, 1)]) == ((0, 1, (1.0, 1.0)),)


def test_a_tree_may_be_deep() -> None:
    tree: dict[str, Any] = {"message_id": "end", "text": "Blue.", "role": "assistant", "lang": "en"}
    for i in range(999):
        role = "prompter" if i % 2 == 0 else "assistant"
        tree = {**tree, "message_id": str(i), "text": "A color?", "role": role, "replies": [tree]}
    assert len(FORMATS["oasst-trees"].read(tree, CONTEXT)) == 500


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


def test_a_file_of_math_is_one_of_prompts_with_answers(tmp_path: Path) -> None:
    [row] = rows_of("math")[:1]
    json_lines(tmp_path / "train.jsonl", [row])
    (prompt,) = load_prompts(tmp_path / "train.jsonl")
    assert prompt.text == row["problem"]
    assert prompt.columns == {"answer": r"\frac{2}{2}", "level": "Level 1", "type": "Prealgebra"}
