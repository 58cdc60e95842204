"""`agro import --guess`: logs of no known format come in by their columns' names and content."""

from __future__ import annotations

import json
import shlex
import sqlite3
import sys
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from unknown_logs import ANSWERS, DAYS, LOGS, QUESTIONS, SIX, WORSE, Log, judged, rewards, run, taken, write

from agro.logs.guessing import propose
from agro.logs.unknown_columns import columns_of
from agro.store import Store


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_a_log_comes_in_as_proposed(log: Log, tmp_path: Path) -> None:
    path = tmp_path / log.file
    log.write(path)
    proposal = propose(path)
    if proposal:
        mapping = {name: at for name, at in proposal.mapping.items() if name != "source"}
        if log.mapping:
            assert mapping == log.mapping
        elif not log.pairs:
            assert mapping.keys() <= {"prompt", "response", "messages", "reward"}
        assert f", {len(log.rewards)} with a reward" in proposal.tried
    else:
        assert log.file == "label_studio.json"  # a format that is known needs no guess
    document = taken(path)
    assert (document["pairs"], document["refused_count"]) == (log.pairs, 0)
    assert document["scored"] == len(log.rewards)
    assert document["rewards"] == pytest.approx(log.rewards)
    with Store.open(path.with_suffix(".store"), read_only=True) as opened:
        samples = list(opened.samples())
    assert sorted(sample.response for sample in samples) == sorted(log.responses)
    assert all(any(text in str(sample.prompt) for sample in samples) for text in log.prompts)


def test_a_sheet_of_excel_comes_in_as_its_csv_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, a truth value, a formula's stored value and empty cells; what is no record is refused."""
    path, store = workbook(tmp_path / "survey.xlsx"), tmp_path / "s.db"
    document = json.loads(run(path, "--guess", "--yes", "--store", store, "--json").stdout)
    assert (document["samples"], document["scored"], document["refused_count"]) == (3, 2, 0)
    assert rewards(store) == (2, 4.5)
    assert "--map reward=Rating" in document["proposed"]["command"]
    with Store.open(store, read_only=True) as opened:
        assert [s.response for s in opened.samples()] == ["4", "9", "true"]

    twice = workbook(tmp_path / "two.xlsx", more=True)
    assert "one sheet with a table, got Sheet, Judges" in run(twice, "--guess", code=2).stderr
    wide = workbook(tmp_path / "wide.xlsx", wide=True)
    said = run(wide, "--guess", "--yes", "--store", tmp_path / "w.db").output
    assert "wide.xlsx:2: expected 3 cells, got more" in said

    damaged, whole = tmp_path / "damaged.xlsx", zipfile.ZipFile(path)
    with zipfile.ZipFile(damaged, "w") as book:
        for name in whole.namelist():
            content = whole.read(name)
            book.writestr(name, content[: len(content) // 2] if "sheet1" in name else content)
    assert "damaged.xlsx: sheet Notes: can't be read as Excel" in run(damaged, "--guess", code=2).stderr

    monkeypatch.setitem(sys.modules, "openpyxl", None)
    assert "pip install 'openpyxl>=3.1'" in run(path, "--guess", code=2).stderr


def workbook(path: Path, *, more: bool = False, wide: bool = False) -> Path:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    rows = [["Question", "Answer", "Rating"], ["What is 2 + 2?", 4, 4.5], ["What is 3 * 3?", 9, 2]]
    for row in [*rows, [None, None, None], ["Is it so?", True, None]]:
        book.active.append(row)
    if more:
        judges = book.create_sheet("Judges")
        for row in (["Name", "Country"], ["Ann", "NO"], ["Bo", "SE"]):
            judges.append(row)
    if wide:
        book.active["D2"] = "beyond"
    book.create_sheet("Notes", 0).append(["by hand"])
    book.create_sheet("Empty")
    book.save(path)
    return path


def test_the_proposed_command_does_the_same(tmp_path: Path) -> None:
    for log in LOGS.values():
        path, store = tmp_path / log.file, tmp_path / f"{log.file}.db"
        log.write(path)
        proposal = propose(path)
        if proposal is not None:
            run(*shlex.split(proposal.command(str(store)))[2:])
            assert rewards(store) == pytest.approx(log.rewards), log.file


def test_without_guess_an_unknown_file_is_refused_with_the_proposal(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    LOGS["log.tsv"].write(path)
    said = run(path, "--store", tmp_path / "s.db", code=2).stderr
    assert "--map prompt=user_input --map response=model_output --map reward=score" in said
    assert "nothing is imported until somebody says that this is right" in said
    assert "then give --yes (as proposed), --lower-is-better or --reward COLUMN with --guess" in said
    assert "number, 6 different" in said
    assert "not used: latency_ms" in said
    assert not (tmp_path / "s.db").exists()
    found = run(path, "--guess", "--json", code=2)
    assert "nothing is imported until somebody says that this is right" in found.stderr
    shown = json.loads(found.stdout)
    assert shown["columns"][0]["column"] == "user_input"
    assert len(shown["columns"][0]["first"]) == 3
    assert "--guess: expected no --map" in run(path, "--guess", "--map", "prompt=x", code=2).stderr


def test_what_no_column_says_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    write(path, {"x": (1, 3), "y": (2, 4)})
    said = run(path, "--guess", "--yes", "--store", tmp_path / "s.db", code=2).stderr
    assert "no column says that it is the prompt or the response, or which of two is better; name" in said


def test_prompts_stay_prompts_unless_somebody_judged_the_answers(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    write(path, {"prompt": QUESTIONS, "solution_text": ANSWERS})
    assert "these are prompts" in run(path, "--store", tmp_path / "s.db", code=2).stderr
    write(path, {"prompt": QUESTIONS, "reply": ANSWERS, "score": [1] * 6})
    assert "--map response=reply --map reward=score" in run(path, "--store", tmp_path / "s.db", code=2).stderr


def test_a_known_format_needs_no_guess(tmp_path: Path) -> None:
    path = tmp_path / "known.jsonl"
    write(path, {"prompt": QUESTIONS, "response": ANSWERS, "reward": [1] * 6})
    assert propose(path) is None
    document = taken(path)
    assert (document["scored"], "proposed" in document) == (6, False)
    said = run(path, "--guess", "--store", tmp_path / "known.store").stderr
    assert "known.jsonl: read as its format says, without --guess" in said


def test_rewards_that_are_not_taken_are_named(tmp_path: Path) -> None:
    path = tmp_path / "known.jsonl"
    write(path, [{"prompt": q, "response": "x", "stars": 3, "user": "u"} for q in QUESTIONS])
    said = run(path, "--store", tmp_path / "s.db").stdout
    assert "columns of numbers that aren't used: stars" in said
    assert "--reward stars" in said
    document = taken(path)
    assert (document["scored"], document["proposed"]["command"].split()[-2:]) == (6, ["--reward", "stars"])


def test_the_types_of_columns() -> None:
    chat = '[{"role": "user", "content": "x"}]'
    rows = [{"n": "3,5", "w": "yes", "t": f"A longer text {i}", "m": chat, "e": None} for i in range(4)]
    types = {column.path: column.type for column in columns_of(rows)}
    assert types == {"n": "number", "w": "word", "t": "text", "m": "messages", "e": "empty"}
    rows = [
        {
            "id": f"req_{i}a",
            "at": DAYS[i],
            "day": "2026-01-01",
            "mail": f"u{i}@x.org",
            "n": ["3", "NULL"][i % 2],
        }
        for i in SIX
    ]
    types = {column.path: column.type for column in columns_of([*rows, *[{"n": "4"}] * 6])}
    assert types == {"id": "id", "at": "date", "day": "date", "mail": "id", "n": "number"}
    nested = columns_of([{"a b": {"c-d": {"e": 1}}, "l": [{"x": 1}, {"x": 2}]}])
    assert [column.path for column in nested] == ['"a b"."c-d".e', "l[*].x"]


def test_thousands_are_no_decimals(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write(path, {"prompt": "QR", "response": "AB", "reward": ("1,000", "2,5")}, ";")
    document = json.loads(run(path, "--store", tmp_path / "s.db", "--json").stdout)
    assert (document["samples"], document["refused_count"]) == (1, 1)
    assert rewards(tmp_path / "s.db") == (2.5,)


def test_a_table_as_excel_writes_text_and_one_of_sqlite(tmp_path: Path) -> None:
    rows = [(q, a, i % 2) for i, (q, a) in enumerate(zip(QUESTIONS, ANSWERS, strict=True))]
    text, database = tmp_path / "sheet.txt", tmp_path / "app.db"
    said = "".join("\t".join(map(str, row)) + "\r\n" for row in [("Question", "Reply", "Helpful"), *rows])
    text.write_bytes(said.encode("utf-16"))
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("CREATE TABLE said (question, reply, helpful)")
        opened.executemany("INSERT INTO said VALUES (?, ?, ?)", rows)
        opened.commit()
    for path in (text, database):
        run(path, "--guess", "--yes", "--store", path.with_suffix(".store"))
        assert rewards(path.with_suffix(".store")) == (0, 0, 0, 1, 1, 1)
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("CREATE TABLE more (x)")
    assert "another database of several tables" in run(database, "--guess", code=2).stderr


def test_several_values_for_one_response_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "of_two.jsonl"
    write(path, judged("marks", [[{"score": i}, {"score": i + 1}] for i in SIX]))
    mapping = ("--map", "prompt=question", "--map", "response=pred", "--map", "reward=marks[*].score")
    said = run(path, *mapping, "--store", tmp_path / "s.db", code=2).stderr
    assert "reward: one response has 2 values of marks[*].score; avg(marks[].score)" in said


SIDES = {"question": QUESTIONS, "gpt_answer": ANSWERS, "llama_answer": WORSE}
ONE, OTHER = ([f"{answer} {name}" for answer in ANSWERS] for name in ("b", "c"))
UNTOLD: dict[str, Any] = {
    "models.csv": {**SIDES, "gpt_score": SIX, "llama_score": (0, 1) * 3},
    "wide.csv": {"Prompt": QUESTIONS, "Reply 1": ANSWERS, "Stars 1": SIX, "Reply 2": WORSE, "Stars 2": SIX},
    "three.csv": {
        "task": QUESTIONS,
        "candidate_1": ANSWERS,
        "candidate_2": ONE,
        "candidate_3": OTHER,
        "best": (1, 2, 3) * 2,
    },
    "scale.csv": {
        "question": QUESTIONS,
        "answer_a": ANSWERS,
        "answer_b": WORSE,
        "preference": (1, 2, 3, 4, 5, 1),
    },
    "frame.json": {name: dict(enumerate(values)) for name, values in SIDES.items()},
    "by_name.json": {f"q{i}": row for i, row in enumerate(judged("score", (0, 1, 2) * 2))},
    "by_number.json": dict(enumerate(judged("score", (0, 1, 2) * 2))),
    "several.jsonl": judged("marks", [[{"score": i}, {"score": i + 1}] for i in SIX]),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_of_what_no_column_says_nothing_is_proposed(name: str, tmp_path: Path) -> None:
    """Scores of several models side by side, the best of three, a scale between two, tables by column or by
    key, and several scores of a response."""
    path = tmp_path / name
    write(path, UNTOLD[name])
    said = run(path, "--guess", "--yes", "--store", tmp_path / "s.db", code=2).stderr
    assert "no column says that it is the prompt or the response, or which of two is better; name" in said


def test_a_page_of_the_web_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("\n<html><table><tr><td>Question</td></tr></table></html>")
    assert "got HTML or XML; save its table as CSV" in run(path, "--guess", code=2).stderr


def test_a_table_may_begin_with_a_record(tmp_path: Path) -> None:
    path, store = tmp_path / "noheader.csv", tmp_path / "s.db"
    write(path, [[i, QUESTIONS[i], ANSWERS[i], i % 2] for i in SIX])
    assert "--map reward=column_4" in run(path, "--guess", "--yes", "--store", store).output
    assert rewards(store) == (0, 0, 0, 1, 1, 1)
