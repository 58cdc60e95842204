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
from typer.testing import CliRunner
from unknown_logs import ANSWERS, QUESTIONS, UNKNOWN_LOGS, WORSE, UnknownLog, lines, messages, table

from agro.cli import app
from agro.logs.guessing import propose
from agro.logs.unknown_columns import columns_of, worth_of
from agro.store import Store


def run(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["import", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def rewards(store: Path) -> tuple[float, ...]:
    with Store.open(store, read_only=True) as opened:
        return tuple(sorted(s.reward for s in opened.samples() if s.reward is not None))


@pytest.mark.parametrize("log", UNKNOWN_LOGS, ids=lambda log: log.file)
def test_a_log_comes_in_as_proposed(log: UnknownLog, tmp_path: Path) -> None:
    path, store = tmp_path / log.file, tmp_path / "s.db"
    log.write(path)
    document = json.loads(run(path, "--guess", "--yes", "--store", store, "--json").stdout)
    assert (document["samples"], document["pairs"], document["refused_count"]) == (log.samples, log.pairs, 0)
    assert document["scored"] == log.scored
    assert rewards(store) == pytest.approx(log.rewards)
    with Store.open(store, read_only=True) as opened:
        prompts = {str(sample.prompt) for sample in opened.samples()}
        assert all(any(question in prompt for prompt in prompts) for question in QUESTIONS)


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
    for log in UNKNOWN_LOGS:
        path, store = tmp_path / log.file, tmp_path / f"{log.file}.db"
        log.write(path)
        proposal = propose(path)
        if proposal is not None:
            run(*shlex.split(proposal.command(str(store)))[2:])
            assert rewards(store) == pytest.approx(log.rewards), log.file


def test_without_guess_an_unknown_file_is_refused_with_the_proposal(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    next(log for log in UNKNOWN_LOGS if log.file == "log.tsv").write(path)
    said = run(path, "--store", tmp_path / "s.db", code=2).stderr
    assert "--map prompt=user_input --map response=model_output --map reward=score" in said
    assert "nothing is imported until somebody says that this is right" in said
    assert "then give --yes (as proposed), --lower-is-better or --reward COLUMN with --guess" in said
    assert "number, 6 different" in said
    assert "not used: latency_ms" in said
    assert not (tmp_path / "s.db").exists()
    shown = json.loads(run(path, "--guess", "--json", code=2).stdout)
    assert shown["columns"][0]["column"] == "user_input"
    assert len(shown["columns"][0]["first"]) == 3
    assert "--guess: expected no --map" in run(path, "--guess", "--map", "prompt=x", code=2).stderr


def test_what_no_column_says_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    table([["x", "y"], [1, 2], [3, 4]])(path)
    said = run(path, "--guess", "--yes", "--store", tmp_path / "s.db", code=2).stderr
    assert "no column says that it is the prompt or the response, or which of two is better; name" in said


def test_prompts_stay_prompts_unless_somebody_judged_the_answers(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines([{"prompt": q, "solution_text": a} for q, a in zip(QUESTIONS, ANSWERS, strict=True)])(path)
    assert "these are prompts" in run(path, "--store", tmp_path / "s.db", code=2).stderr
    lines([{"prompt": q, "reply": a, "score": 1} for q, a in zip(QUESTIONS, ANSWERS, strict=True)])(path)
    assert "--map response=reply --map reward=score" in run(path, "--store", tmp_path / "s.db", code=2).stderr


def test_a_known_format_needs_no_guess(tmp_path: Path) -> None:
    path = tmp_path / "known.jsonl"
    lines([{"prompt": q, "response": a, "reward": 1} for q, a in zip(QUESTIONS, ANSWERS, strict=True)])(path)
    assert propose(path) is None
    document = json.loads(run(path, "--guess", "--yes", "--store", tmp_path / "s.db", "--json").stdout)
    assert (document["scored"], "proposed" in document) == (6, False)


def test_rewards_that_are_not_taken_are_named(tmp_path: Path) -> None:
    path = tmp_path / "known.jsonl"
    lines([{"prompt": q, "response": "x", "stars": 3, "user": "u"} for q in QUESTIONS])(path)
    said = run(path, "--store", tmp_path / "s.db").stdout
    assert "columns of numbers that aren't used: stars" in said
    assert "--reward stars" in said
    document = json.loads(run(path, "--guess", "--yes", "--store", tmp_path / "g.db", "--json").stdout)
    assert (document["scored"], document["proposed"]["command"].split()[-2:]) == (6, ["--reward", "stars"])


def test_the_types_of_columns() -> None:
    rows = [
        {
            "n": "3,5",
            "w": "yes",
            "t": f"A longer text {i}",
            "m": '[{"role": "user", "content": "x"}]',
            "e": None,
        }
        for i in range(4)
    ]
    types = {column.path: column.type for column in columns_of(rows)}
    assert types == {"n": "number", "w": "word", "t": "text", "m": "messages", "e": "empty"}
    nested = columns_of([{"a b": {"c-d": {"e": 1}}, "l": [{"x": 1}, {"x": 2}]}])
    assert [column.path for column in nested] == ['"a b"."c-d".e', "l[*].x"]


def test_thousands_are_no_decimals(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table([["prompt", "response", "reward"], ["Q", "A", "1,000"], ["R", "B", "2,5"]], ";")(path)
    document = json.loads(run(path, "--store", tmp_path / "s.db", "--json").stdout)
    assert (document["samples"], document["refused_count"]) == (1, 1)
    assert rewards(tmp_path / "s.db") == (2.5,)


LR = list(enumerate(["left", "right"] * 3))
MORE = {  # file: rows or table, and the mapping
    "python_cells.csv": (
        [["chat", "rating"], *[[str(messages(i)), i % 3] for i in range(6)]],
        {"messages": "chat", "reward": "rating"},
    ),
    "service.csv": (
        [
            ["request", "response", "rating"],
            *[
                [
                    json.dumps({"messages": messages(i)[:1]}),
                    json.dumps({"choices": [{"message": messages(i)[1]}]}),
                    i % 3,
                ]
                for i in range(6)
            ],
        ],
        {"prompt": "request.messages", "response": "response.choices[*].message.content", "reward": "rating"},
    ),
    "grades.csv": (
        [["question", "answer", "grade"], *[[QUESTIONS[i], ANSWERS[i], f"{i % 2} - no"] for i in range(6)]],
        {"prompt": "question", "response": "answer", "reward": "grade"},
    ),
    "unnamed.csv": (
        [["c1", "c2", "c3", "c4"], *[[QUESTIONS[i], ANSWERS[i], i % 2, i] for i in range(6)]],
        {"prompt": "c1", "response": "c2", "reward": "c3"},
    ),
    "history.csv": (
        [
            ["history", "reply", "stars"],
            *[[json.dumps(messages(i)[:1]), ANSWERS[i], i % 2] for i in range(6)],
        ],
        {"prompt": "history", "response": "reply", "reward": "stars"},
    ),
    "percent.csv": (
        [["query", "output", "score"], *[[QUESTIONS[i], ANSWERS[i], f"{10 * (i % 3)}%"] for i in range(6)]],
        {"prompt": "query", "response": "output", "reward": "score"},
    ),
    "picked.csv": (
        [
            ["context", "left", "right", "choice"],
            *[[QUESTIONS[i], "x" + ANSWERS[i], ANSWERS[i], s] for i, s in LR],
        ],
        {
            "prompt": "context",
            "chosen": '(choice == `"left"` && left) || (choice == `"right"` && right)',
            "rejected": '(choice == `"left"` && right) || (choice == `"right"` && left)',
        },
    ),
}


OTHERS = {
    "old_and_new.csv": (
        [["question", "old_answer", "new_answer", "verdict"]]
        + [[QUESTIONS[i], WORSE[i], ANSWERS[i], ("new", "old", "new")[i % 3]] for i in range(6)],
        {
            "prompt": "question",
            "chosen": '(verdict == `"old"` && old_answer) || (verdict == `"new"` && new_answer)',
            "rejected": '(verdict == `"old"` && new_answer) || (verdict == `"new"` && old_answer)',
        },
    ),
    "models.csv": (
        [["question", "gpt_answer", "gpt_score", "llama_answer", "llama_score"]]
        + [[QUESTIONS[i], ANSWERS[i], i, WORSE[i], i % 2] for i in range(6)],
        {
            "prompt": "question",
            "response": "[gpt_answer, llama_answer]",
            "reward": "[gpt_score, llama_score]",
        },
    ),
    "digits.csv": (  # of the task own-log: responses that are numbers
        [["Question", "Answer", "Stars (1-5)"]]
        + [
            [f"{n}>", f"{n:04d}"[::-1], 2 + i % 2 * 3] for i, n in enumerate((9770, 3631, 59, 7059, 13, 2244))
        ],
        {"prompt": "Question", "response": "Answer", "reward": "Stars (1-5)"},
    ),
    "expected.csv": (  # what would have been right is no response
        [["question", "expected", "predicted", "em"]]
        + [[QUESTIONS[i], ANSWERS[i], WORSE[i], i % 2] for i in range(6)],
        {"prompt": "question", "response": "predicted", "answer": "expected", "reward": "em"},
    ),
    "tickets.csv": (  # yes and no of a column whose name says nothing; the number of a ticket is none
        [["Ticket", "Customer question", "Agent answer", "Resolved"]]
        + [[i, QUESTIONS[i], ANSWERS[i], ("No", "Yes")[i % 2]] for i in range(6)],
        {"prompt": "Customer question", "response": "Agent answer", "reward": "Resolved"},
    ),
    "sessions.csv": (  # the names of sessions are no responses
        [["session", "asked", "replied", "thumb"]]
        + [[f"S{i}", QUESTIONS[i], ANSWERS[i], ("up", "down")[i % 2]] for i in range(6)],
        {"prompt": "asked", "response": "replied", "reward": "thumb"},
    ),
    "both_good.csv": (
        [["question", "answer_a", "answer_b", "vote"]]
        + [[QUESTIONS[i], ANSWERS[i], WORSE[i], ("a", "b", "both good")[i % 3]] for i in range(6)],
        {
            "prompt": "question",
            "chosen": '(vote == `"a"` && answer_a) || (vote == `"b"` && answer_b) || '
            '(vote == `"both good"` && answer_a)',
            "rejected": '(vote == `"a"` && answer_b) || (vote == `"b"` && answer_a) || '
            '(vote == `"both good"` && answer_b)',
            "votes_chosen": "`1`",
            "votes_rejected": '(vote == `"both good"` && `1`) || `0`',
        },
    ),
    "selected.csv": (
        [["query_id", "query_text", "candidate_text", "is_selected"]]
        + [[i // 2, QUESTIONS[i // 2], ANSWERS[i], i % 2] for i in range(6)],
        {"prompt": "query_text", "response": "candidate_text", "reward": "is_selected"},
    ),
    "metric.csv": (
        [["case", "input_text", "prediction", "rouge"]]
        + [[i, QUESTIONS[i], ANSWERS[i], i / 7] for i in range(6)],
        {"prompt": "input_text", "response": "prediction", "reward": "rouge"},
    ),
    "chat.csv": (  # the names of users are no prompts
        [["user", "text", "bot_reply", "stars"]]
        + [[f"U{i}", QUESTIONS[i], ANSWERS[i], i % 5] for i in range(6)],
        {"prompt": "text", "response": "bot_reply", "reward": "stars"},
    ),
}
MORE |= OTHERS


@pytest.mark.parametrize("name", MORE)
def test_other_names_and_cells(name: str, tmp_path: Path) -> None:
    rows, mapping = MORE[name]
    table(rows)(tmp_path / name)
    proposal = propose(tmp_path / name)
    assert proposal
    assert {key: value for key, value in proposal.mapping.items() if key != "source"} == mapping
    scored = 12 if name == "models.csv" else 6 * ("chosen" not in mapping)
    assert f", {scored} with a reward" in proposal.tried


def judged(key: str, value: Any = None) -> list[dict[str, Any]]:
    rows = [{"question": q, "pred": a} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    return [row | {key: i % 3 if value is None else value(i)} for i, row in enumerate(rows)]


SHAPES: dict[str, tuple[Any, tuple[float, ...]]] = {  # what is in the file, and the rewards
    "answer_of_an_interface.json": (
        {"data": [row | {"scores": [{"name": "user", "value": i}]} for i, row in enumerate(judged("x"))]},
        (0, 1, 2, 3, 4, 5),
    ),
    "correct_or_not.jsonl": (
        [
            {"problem": q, "generations": [a], "correctness": [i % 2 == 0]}
            for i, (q, a) in enumerate(zip(QUESTIONS, ANSWERS, strict=True))
        ],
        (0, 0, 0, 1, 1, 1),
    ),
    "guete.jsonl": (judged("Güte", lambda i: f"{i},5"), (0.5, 1.5, 2.5, 3.5, 4.5, 5.5)),
    "label_studio.json": (
        [
            {
                "id": i,
                "data": {"user_request": QUESTIONS[i], "model_answer": ANSWERS[i], "reference_answer": "x"},
                "annotations": [
                    {
                        "result": [
                            {"from_name": "stars", "to_name": "t", "type": "rating", "value": {"rating": i}}
                        ]
                    }
                ],
            }
            for i in range(6)
        ],
        (0, 1, 2, 3, 4, 5),
    ),
    "by_name.json": ({f"q{i}": row for i, row in enumerate(judged("score"))}, (0, 0, 1, 1, 2, 2)),
    "of_two.jsonl": (
        judged("marks", lambda i: [{"score": i}, {"score": i + 1}]),
        (0.5, 1.5, 2.5, 3.5, 4.5, 5.5),
    ),
    "ranks.jsonl": (judged("rank", lambda i: 1 + i % 3), (-3, -3, -2, -2, -1, -1)),
    "signs.jsonl": (judged("reaction", lambda i: "+1" if i % 2 else "-1"), (-1, -1, -1, 1, 1, 1)),
    "likert.jsonl": (
        judged("How satisfied are you?", lambda i: ("Very satisfied", "Dissatisfied")[i % 2]),
        (0, 0, 0, 1, 1, 1),
    ),
    "in_the_turn.jsonl": (
        [
            {"messages": [messages(i)[0], {**messages(i)[1], "feedback": {"thumb": ("up", "down")[i % 2]}}]}
            for i in range(6)
        ],
        (0, 0, 0, 1, 1, 1),
    ),
    "models.json": (  # a model's name is no answer
        {
            "items": [
                {"question": row["question"], "answers": [{"model": "m", "text": row["pred"], "rating": 3}]}
                for row in judged("x")
            ]
        },
        (3,) * 6,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes(name: str, tmp_path: Path) -> None:
    path, store = tmp_path / name, tmp_path / "s.db"
    content, expected = SHAPES[name]
    path.write_text(json.dumps(content)) if name.endswith(".json") else lines(content)(path)
    run(path, "--guess", "--yes", "--store", store)
    assert rewards(store) == expected
    with Store.open(store, read_only=True) as opened:
        assert sorted(s.response for s in opened.samples()) == sorted(ANSWERS)


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
    lines(SHAPES["of_two.jsonl"][0])(path)
    mapping = ("--map", "prompt=question", "--map", "response=pred", "--map", "reward=marks[*].score")
    said = run(path, *mapping, "--store", tmp_path / "s.db", code=2).stderr
    assert "reward: one response has 2 values of marks[*].score; avg(marks[].score)" in said


def test_worth_of_words() -> None:
    words = ["4/5", "80%", "★★★☆☆", "3 - fair", "2 stars", "thumbs up", "partial", "ship it"]
    assert [worth_of(word) for word in words[:-1]] == [0.8, 0.8, 0.6, 3.0, 2.0, 1.0, 0.5]
    assert worth_of(words[-1]) is None


def test_the_best_of_three_has_the_reward_1(tmp_path: Path) -> None:
    path, store = tmp_path / "three.csv", tmp_path / "s.db"
    rows = [[q, a, f"{a} b", f"{a} c", i % 3 + 1] for i, (q, a) in enumerate(zip(QUESTIONS, ANSWERS))]
    table([["task", "candidate_1", "candidate_2", "candidate_3", "best"], *rows, [*rows[0][:4], "tie"]])(path)
    run(path, "--guess", "--yes", "--store", store)
    with Store.open(store, read_only=True) as opened:
        best = [sample.response for sample in opened.samples() if sample.reward]
    assert best == [row[row[4]] for row in rows]
    assert rewards(store) == (0,) * 15 + (1,) * 6


def test_a_page_of_the_web_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("\n<html><table><tr><td>Question</td></tr></table></html>")
    assert "got HTML or XML; save its table as CSV" in run(path, "--guess", code=2).stderr


def test_a_table_may_begin_with_a_record(tmp_path: Path) -> None:
    path, store = tmp_path / "noheader.csv", tmp_path / "s.db"
    table([[i, QUESTIONS[i], ANSWERS[i], i % 2] for i in range(6)])(path)
    assert "--map reward=column_4" in run(path, "--guess", "--yes", "--store", store).output
    assert rewards(store) == (0, 0, 0, 1, 1, 1)
