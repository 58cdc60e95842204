"""What people's columns mean, in the store: rewards that are unknown or words, messages that are text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from agro.errors import Refused
from agro.logs.importing import import_files
from agro.logs.mapping import parse_map
from agro.logs.values import parse_words
from agro.rollout.prompts import load_prompts
from agro.store import Store


def scored(store: Store, folder: Path, rows: list[dict[str, Any]], **options: Any) -> list[float | None]:
    path = folder / "rated.jsonl"
    path.write_text("".join(json.dumps({"prompt": "Q", "response": "A", **row}) + "\n" for row in rows))
    import_files(store, [path], **options)
    return [sample.reward for sample in store.samples()]


UP, DOWN, UNRATED = ({"f": {"t": value}} for value in ("up", "down", None))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("f.t == 'up'", [1, 0, None, None, None]),
        ("f.t != 'up'", [0, 1, None, None, None]),
        ("'up' == f.t", [1, 0, None, None, None]),
        ("!(f.t == 'up')", [0, 1, None, None, None]),
        ("f.t == 'up' && `1` || `-1`", [1, -1, None, None, None]),
        ("(f.t == 'up' && `1`) || (f.t == 'down' && `0.25`)", [1, 0.25, None, None, None]),
        ("contains(f.t, 'u')", [1, 0, None, None, None]),
        ("f.t == 'up' || f.t == 'x'", [1, 0, None, None, None]),
        ("f.t == 'up' && `false`", [0, 0, 0, 0, 0]),
        ("f.t == `null`", [0, 0, 1, 1, 1]),
        ("f.t != null", [1, 1, 0, 0, 0]),
        ("not_null(f.t, 'down') == 'up'", [1, 0, 0, 0, 0]),
        ("f.t", [1, 0, None, None, None]),
    ],
)
def test_a_comparison_with_null_is_unknown(
    expression: str, expected: list[Any], store: Store, tmp_path: Path
) -> None:
    """By Kleene's logic: null where the part that is known doesn't decide. An f that is null, and none."""
    rows = [UP, DOWN, UNRATED, {"f": None}, {}]
    assert scored(store, tmp_path, rows, mapping={"reward": expression}) == expected


RATED = {"q": "Q", "a": "A", "feedback": {"score": 1, "by": [{"mark": 2}]}, "cell": '{"score": 3}'}


@pytest.mark.parametrize(
    ("column", "without"),
    [
        *((name, 3) for name in ("scroe", "g.t == 'up'", "feedback.scroe", "cell.scroe")),
        *((name, 3) for name in ("feedback.by[0].mrak", "feedback.yb[0].mark")),
        *((name, 2) for name in ("feedback.score", "feedback.by[0].mark", "cell.score")),
    ],
)
def test_records_without_a_reward_are_counted_by_its_column(
    column: str, without: int, store: Store, tmp_path: Path
) -> None:
    """So that a typo is seen. Of three records the last one has ratings, and one has nothing around them."""
    path = tmp_path / "rated.jsonl"
    rows = [{"q": "Q", "a": "B", "feedback": None, "cell": None}, {"q": "Q", "a": "C"}, RATED]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = import_files(store, [path], mapping=parse_map(["prompt=q", "response=a", f"reward={column}"]))
    assert (report.samples, report.scored) == (3, 3 - without)
    assert f"--map reward={column}: {without} records have no value there: unknown" in str(report)


def test_numbers_are_not_compared_with_texts(store: Store, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="reward: expected two numbers to compare, got '5' and 3; to_number"):
        scored(store, tmp_path, [{"stars": "5"}], mapping={"reward": "stars > `3`"})
    assert scored(store, tmp_path, [{"stars": "5"}], mapping={"reward": "to_number(stars) > `3`"}) == [1]


def test_words_as_rewards(store: Store, tmp_path: Path) -> None:
    words = [
        "up",
        "down",
        "Thumbs_Up",
        "👍🏽",
        "👎",
        "yes",
        "No",
        "like",
        "dislike",
        "positive",
        "negative",
        "",
        None,
    ]
    rewards = scored(store, tmp_path, [{"thumbs": word} for word in words], mapping={"reward": "thumbs"})
    assert rewards == [1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0, None, None]


def test_a_word_that_is_not_known_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    rows = [{"reward": word} for word in ("great", "poor", "skip", None, "so-so")]
    words = parse_words("great=1, poor=-0.5,skip=null")
    assert scored(store, tmp_path, rows, reward_map=words) == [1, -0.5, None, None]
    report = import_files(store, [tmp_path / "rated.jsonl"], reward_map=words)
    assert report.refused[0].where.endswith(":5")
    assert (
        "reward: expected a finite number, or one of the words great, poor, skip, got 'so-so'"
        in report.refused[0].reason
    )
    with pytest.raises(Refused, match=r"with other options \(--reward-map\)"):
        import_files(store, [tmp_path / "rated.jsonl"])
    for wrong in ("up", "up=x", "up=1,up=0", "=1", "up=NaN"):
        with pytest.raises(Refused, match="--reward-map"):
            parse_words(wrong)


def test_words_in_the_columns_of_csv_and_of_reward(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("prompt,response,reward,kind\nQ,A,up,up\nQ,B,0.5,down\nQ,C,False,up\nQ,D,,\n")
    assert import_files(store, [path]).scored == 3
    assert [sample.reward for sample in store.samples()] == [1, 0.5, 0, None]
    import_files(store, [path], rewards={"kind": 2.0}, replace=True)
    assert [sample.reward for sample in store.samples()] == [2, 0, 2, None]


USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
AS_TEXT = [  # a column of prompts and one of responses
    ([USER], [REPLY]),
    ({"messages": [USER]}, {"messages": [REPLY]}),
    ({"messages": [USER]}, REPLY),
    ([USER], "4"),
    ([USER], [USER, REPLY]),
]


@pytest.mark.parametrize(("prompt", "response"), AS_TEXT)
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "text.jsonl"])
def test_messages_in_a_column(prompt: Any, response: Any, ending: str, store: Store, tmp_path: Path) -> None:
    """As JSON in a text, or as objects: they are the prompt and the response, not a text of braces."""
    path = tmp_path / f"log.{ending}"
    row = {"asked": prompt, "said": response, "score": 1}
    text = {name: x if isinstance(x, str) else json.dumps(x) for name, x in row.items()}
    if ending == "csv":
        quoted = ['"' + x.replace('"', '""') + '"' for x in text.values()]
        path.write_text(f"asked,said,score\n{','.join(quoted)}\n")
    elif ending == "parquet":
        parquet.write_table(pa.Table.from_pylist([text]), path)
    else:
        path.write_text(json.dumps(text | {"score": 1} if ending == "text.jsonl" else row) + "\n")
    names = ["prompt=asked", "response=said", "meta.score=score"]
    import_files(store, [path], mapping=parse_map(names))
    [sample] = store.samples()
    assert (sample.prompt, sample.response) == ([USER], "4")


def test_a_conversation_in_a_response(store: Store, tmp_path: Path) -> None:
    """It has the prompt inside, begins with it, or doesn't; tools' turns are kept as of any conversation."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    said = json.dumps({"messages": [USER, call, {"role": "tool", "content": "4"}, REPLY]})
    rows: list[dict[str, Any]] = [
        {"response": said},
        {"prompt": "2+2?", "response": said},
        {"prompt": "2+2?", "response": json.dumps([REPLY])},
        {"prompt": "2+2?", "chosen": json.dumps([REPLY]), "rejected": json.dumps({**REPLY, "content": "5"})},
        {"messages": json.dumps({"messages": [USER, REPLY]})},
        {"prompt": "3+3?", "response": said},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = import_files(store, [path])
    samples = list(store.samples())
    assert [sample.prompt for sample in samples] == [[USER], [USER], "2+2?", "2+2?", "2+2?", [USER]]
    assert [sample.response for sample in samples] == ["4", "4", "4", "4", "5", "4"]
    assert len(samples[0].meta["continuation"]) == len(samples[1].meta["continuation"]) == 3
    [refusal] = report.refused
    assert "response: expected its messages to begin with those of prompt, '3+3?'" in refusal.reason


def test_json_that_is_no_conversation_stays_a_text(store: Store, tmp_path: Path) -> None:
    texts = ['{"role": "admin"}', '{"name": "x", "messages": 3}', "[1, 2]", '[{"a": 1}]', "[", "{}"]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "response": text}) + "\n" for text in texts))
    import_files(store, [path])
    assert [(sample.prompt, sample.response) for sample in store.samples()] == [
        (text, text) for text in texts
    ]


def test_prompts_that_are_messages_as_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text('prompt,answer\n"[{""role"": ""user"", ""content"": ""2+2?""}]",4\n')
    assert load_prompts(path)[0].text == [USER]
