"""Annotation tools: votes, what is asked where there are several questions, and what is no judgment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example import rows_of
from examples_annotations import COMPARED, RANKED, SIDES, annotation, result, task

from agro.errors import Refused
from agro.logs.format_table import FORMATS
from agro.logs.importing import import_files
from agro.logs.protocol import Context, Item
from agro.store import Store

PATH = Path("export.json")
ARGILLA, DATASET, FLAT = (
    dict(rows_of(name)[0]) for name in ("argilla", "argilla-feedback", "argilla-datasets")
)


def said(*values: Any) -> list[dict[str, Any]]:
    return [{"value": value, "user_id": str(i)} for i, value in enumerate(values)]


def read(name: str, row: dict[str, Any], **choose: str) -> Item:
    [item] = FORMATS[name].read(row, Context(PATH, choose=choose))
    return item


def test_annotators_are_votes_and_a_tie_is_half_a_vote() -> None:
    """Two say response-2, one response-1, and one that they are the same."""
    assert read("argilla", ARGILLA).judgments == ((1, 0, (2.5, 1.5)),)


def test_a_cancelled_annotation_has_no_vote() -> None:
    assert read("label-studio", COMPARED).judgments == ((1, 0, (2.0, 0.0)),)


def test_rankings_are_votes_on_every_two_responses() -> None:
    """b a c, and b c a; the third annotator sorted them into buckets, which is no order."""
    votes = {tuple(judgment[:2]): judgment.votes for judgment in read("label-studio", RANKED).judgments}
    assert votes == {(1, 0): (2.0, 0.0), (0, 2): (1.0, 1.0), (1, 2): (2.0, 0.0)}


@pytest.mark.parametrize(
    ("answer", "winner"), [("response-2", 1), ("Response 2", 1), ("2", 1), ("response_1", 0), ("1", 0)]
)
def test_a_choice_names_a_response(answer: str, winner: int) -> None:
    row = ARGILLA | {"responses": {"preference": said(answer)}}
    assert read("argilla", row).judgments == ((winner, 1 - winner, (1.0, 0.0)),)


def test_a_list_of_all_responses_is_a_ranking() -> None:
    row = ARGILLA | {"responses": {"ranking": said(["response-2", "response-1"])}}
    assert read("argilla", row).judgments == ((1, 0, (1.0, 0.0)),)
    chosen = task(SIDES, annotation(result("good", "prompt", "choices", ["answer2", "answer1"])))
    assert read("label-studio", chosen).judgments == ()


def test_a_choice_among_three_says_nothing_of_the_others() -> None:
    fields = {"prompt": "?", "response_a": "1", "response_b": "2", "response_c": "3"}
    item = read("argilla", ARGILLA | {"fields": fields, "responses": {"best": said("B")}})
    assert item.judgments == ((1, 0, (1.0, 0.0)), (1, 2, (1.0, 0.0)))


def test_other_words_are_no_judgment() -> None:
    row = ARGILLA | {"responses": {"language": said("English")}}
    assert read("argilla", row).judgments == ()
    with pytest.raises(Refused, match="language: expected the name of a response"):
        read("argilla", row, preference="language")


def test_which_preference_is_asked() -> None:
    row = ARGILLA | {"responses": {"helpful": said("response-1"), "safe": said("response-2")}}
    for choose in ({}, {"preference": "kind"}):
        with pytest.raises(Refused, match="--choose preference=NAME of helpful, safe"):
            read("argilla", row, **choose)
    assert read("argilla", row, preference="safe").judgments == ((1, 0, (1.0, 0.0)),)


def test_ratings_are_of_the_response_that_their_question_names() -> None:
    item = read("argilla-feedback", DATASET)
    assert [record["reward"] for record in item.records] == [5.0, None]
    rated = task(
        SIDES, annotation(result("r1", "answer1", "rating", 2), result("r2", "answer2", "rating", 5))
    )
    assert [record["reward"] for record in read("label-studio", rated).records] == [2.0, 5.0]
    asked = task(SIDES, annotation(result("difficulty", "prompt", "rating", 3)))
    assert [record["reward"] for record in read("label-studio", asked).records] == [None, None]


def test_different_ratings_are_asked_how_to_sum_up() -> None:
    with pytest.raises(Refused, match="say --choose scores=mean"):
        read("argilla-datasets", FLAT)


def test_a_reward_that_is_of_no_response_is_refused() -> None:
    context = Context(PATH, {"preference": 1.0})
    with pytest.raises(Refused, match="--reward preference: expected numbers for each response"):
        FORMATS["argilla"].read(ARGILLA, context)


def test_which_text_is_the_response_is_asked() -> None:
    row = ARGILLA | {"fields": {"prompt": "?"}, "responses": {"best": said("Blue."), "why": said("Sky.")}}
    with pytest.raises(Refused, match="--choose response=NAME of the questions best, why"):
        read("argilla", row)


def test_a_choice_of_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps(COMPARED))
    with (
        Store.open(tmp_path / "s.db") as store,
        pytest.raises(Refused, match="expected --choose prompt=NAME, "),
    ):
        import_files(store, [tmp_path / "log.jsonl"], choose={"filter": "strict"})
