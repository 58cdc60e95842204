"""Columns of any name as fields of the record."""

from __future__ import annotations

from typing import Any

import pytest

from agro.errors import Refused
from agro.logs.mapping import expand, parse_map, unmapped

MODELS = {
    "q": "Q",
    "small": {"text": "a", "ok": True},
    "large": {"text": "b", "ok": False},
    "note": "n",
    "n": 3,
}


def records(row: dict[str, Any], *mapping: str) -> list[dict[str, Any]]:
    return [part.record for part in expand(row, parse_map(mapping))]


def test_without_a_mapping_a_row_is_a_record() -> None:
    assert records({"prompt": "Q", "response": ["a"], "x": 1}) == [{"prompt": "Q", "response": ["a"], "x": 1}]


def test_mapped_columns_and_fields_of_their_own_name() -> None:
    row = {"question": "Q", "out": {"text": "a", "a.b": 2}, "reward": 1, "choices": [{"t": "c"}], "other": 0}
    assert records(
        row, "prompt=question", "response=out.text", 'meta.n=out."a.b"', "answer=choices[0].t"
    ) == [{"prompt": "Q", "response": "a", "reward": 1, "answer": "c", "meta": {"n": 2}}]


def test_a_column_is_not_taken_twice() -> None:
    """`meta` gives the response, so it isn't the record's `meta` as well; mapped by name, it is."""
    row = {"prompt": "Q", "meta": {"output": "a", "n": 1}, "source": "s"}
    assert records(row, "response=meta.output") == [{"prompt": "Q", "response": "a", "source": "s"}]
    assert records(row, "response=meta.output", "meta=meta", "meta.x=source") == [
        {"prompt": "Q", "response": "a", "meta": {"output": "a", "n": 1, "x": "s"}}
    ]


def test_a_star_stands_for_every_key_and_names_the_source() -> None:
    assert records(MODELS, "prompt=q", "response=*.text", "reward=*.ok") == [
        {"prompt": "Q", "response": "a", "reward": True, "source": "small"},
        {"prompt": "Q", "response": "b", "reward": False, "source": "large"},
    ]
    assert [r["source"] for r in records(MODELS, "prompt=q", "response=*.text", "source=note")] == ["n", "n"]


def test_stars_go_in_step_by_key() -> None:
    row = {"texts": {"x": "a", "y": "b"}, "scores": {"y": 2, "x": 1}}
    got = records(row, "response=texts.*", "reward=scores.*")
    assert [(r["source"], r["response"], r["reward"]) for r in got] == [("x", "a", 1), ("y", "b", 2)]


def test_a_star_stands_for_the_items_of_a_list_which_name_no_source() -> None:
    row = {"prompt": "Q", "outputs": [{"text": "a", "score": 1}, {"text": "b", "score": 0}]}
    assert records(row, "response=outputs.*.text", "reward=outputs.*.score") == [
        {"prompt": "Q", "response": "a", "reward": 1},
        {"prompt": "Q", "response": "b", "reward": 0},
    ]


def test_lists_go_in_step() -> None:
    row = {
        "p": "Q",
        "rs": ["a", "b"],
        "scores": [1, None],
        "tokens": [[1, 2], [3]],
        "answer": [1, 2, 3],
        "tags": ["x"],
    }
    assert records(row, "prompt=p", "response=rs", "reward=scores", "meta.tags=tags") == [
        {
            "prompt": "Q",
            "response": "a",
            "reward": 1,
            "tokens": [1, 2],
            "answer": [1, 2, 3],
            "meta": {"tags": ["x"]},
        },
        {
            "prompt": "Q",
            "response": "b",
            "reward": None,
            "tokens": [3],
            "answer": [1, 2, 3],
            "meta": {"tags": ["x"]},
        },
    ]


def test_messages_and_tokens_of_one_response_are_no_lists_of_responses() -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "?"}]
    row = {"m": messages, "rs": ["a", "b"]}
    assert [r["prompt"] for r in records(row, "prompt=m", "response=rs")] == [messages, messages]
    assert records({"r": "a", "t": [1, 2], "prompt": ""}, "response=r", "tokens=t")[0]["tokens"] == [1, 2]


def test_lists_under_a_star() -> None:
    row = {"q": "Q", "m1": {"rs": ["a", "b"]}, "m2": {"rs": ["c"]}}
    parts = expand(row, parse_map(["prompt=q", "response=*.rs"]))
    assert [(p.record["source"], p.record["response"], p.column("response")) for p in parts] == [
        ("m1", "a", "m1.rs[0]"),
        ("m1", "b", "m1.rs[1]"),
        ("m2", "c", "m2.rs[0]"),
    ]


@pytest.mark.parametrize(
    ("row", "mapping", "message"),
    [
        ({"a": 1}, ["response=b"], "response: no column b; there are a"),
        ({"a": {}}, ["response=a.b"], "response: no column a.b"),
        ({"a": ["x"]}, ["response=a.0"], r"response: no column a.0; .*an item of a list is LIST\[0\]"),
        ({"a": ["x"]}, ["response=a[1]"], r"response: no column a\[1\]"),
        ({"a": {"b": 1}}, ["response=length(a.b)"], "length"),
        ({"a": 1}, ["response=*.b"], r"response: no column \*.b"),
        ({"a": 1}, ["response=a[b"], r"response: no column a\[b; there are a \(as a JMESPath expression: "),
        ({"a": {"t": 1}}, ["response=*.t", "answer=*.r"], r"answer: no column \*.r"),
        ({"r": ["a", "b"], "s": [1]}, ["response=r", "reward=s"], "s: expected 2 values, as r has, got 1"),
        ({"r": []}, ["response=r"], "r: expected at least one response"),
        ({"r": "x", "meta": 1}, ["response=r", "meta.x=r", "meta=meta"], "meta: expected an object"),
    ],
)
def test_columns_that_do_not_fit(row: dict[str, Any], mapping: list[str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        records(row, *mapping)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["prompt"], "expected FIELD=COLUMN, such as prompt=question"),
        (["=x"], "expected FIELD=COLUMN"),
        (["prompt="], "expected FIELD=COLUMN"),
        (["promt=x"], r"the record has no field promt; did you mean prompt\? \(meta\.promt keeps the column"),
        (["zzz=x"], "the fields are prompt, response, reward"),
        (["meta.=x"], "the record has no field meta"),
        (["reward=x", "reward=y"], "reward is mapped to x already"),
    ],
)
def test_a_mapping_that_can_not_be_meant(items: list[str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        parse_map(items)


def test_the_name_of_a_column_needs_no_quotes() -> None:
    row = {"gen_ai.input": "Q", "chosen-text": "a", "my score": 1}
    assert records(row, "prompt=gen_ai.input", "response=chosen-text", "reward=my score") == [
        {"prompt": "Q", "response": "a", "reward": 1}
    ]


def test_an_exact_name_wins_over_an_expression() -> None:
    row = {"Question (en)": "Q", "a.b": "R", "a": {"b": "no"}, "Rating (1-5)": 4}
    assert records(row, "prompt=Question (en)", "response=a.b", "reward=Rating (1-5)") == [
        {"prompt": "Q", "response": "R", "reward": 4}
    ]


def test_a_path_goes_on_into_json_in_a_cell() -> None:
    row = {"q": "Q", "reply": '{"text": "R", "scores": [0.5]}'}
    assert records(row, "prompt=q", "response=reply.text", "reward=reply.scores[0]") == [
        {"prompt": "Q", "response": "R", "reward": 0.5}
    ]


def test_a_wildcard_keeps_what_is_unknown_in_step() -> None:
    """JMESPath's own projection drops null, and the rewards would go to other responses."""
    row = {"prompt": "Q", "outputs": [{"text": "a", "score": None}, {"text": "b", "score": 0}]}
    assert records(row, "response=outputs[*].text", "reward=outputs[*].score") == [
        {"prompt": "Q", "response": "a", "reward": None},
        {"prompt": "Q", "response": "b", "reward": 0},
    ]


def test_an_expression_may_compute() -> None:
    row = {"q": "Q", "runs": [{"ok": False, "text": "a"}, {"ok": True, "text": "b"}]}
    assert records(row, "prompt=q", "response=runs[?ok] | [0].text", "meta.n=length(runs)") == [
        {"prompt": "Q", "response": "b", "meta": {"n": 2}}
    ]


def test_columns_left_behind() -> None:
    mapping = parse_map(["prompt=q", "response=*.text"])
    assert unmapped(MODELS, mapping) == ["note", "n"]
    assert unmapped({"q": 1, "reward": 1, "a.b": 1}, parse_map(["prompt=q", "response=a.b"])) == []
    assert unmapped(MODELS, {}) == []
