"""Logs as data scientists have them: of no format that agro knows, or without a reward in it.

Each has what is in the file, and what comes of it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet
from typer.testing import CliRunner

from agro.cli import app
from agro.store import Store

QUESTIONS = (
    "How do I reset my password?",
    "Why is the invoice higher this month?",
    "Can I change the delivery address?",
    "Where do I find the serial number?",
    "Does the warranty cover the battery?",
    "What are the opening hours on Sunday?",
)
ANSWERS = (
    "Open the settings, choose Security, and press Reset; you get a mail.",
    "It includes the yearly fee. The details are on page two.",
    "Yes, until the parcel has left our warehouse.",
    "It is on the back, below the bar code.",
    "For two years, unless it was opened.",
    "From ten to four.",
)
SIX = range(6)
WORSE = tuple(f"I don't know about that ({i})." for i in SIX)
BOTH = ANSWERS + WORSE
SCORES = (5, 2, 4, 1, 3, 5)
DAYS = [f"0{i + 1}.03.2026 14:0{i}" for i in SIX]
HALVES = ("0,5", "1,5", "2,5", "3,5", "4,5", "5,5")
CHATS = [
    [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in zip(QUESTIONS, ANSWERS)
]


def write(path: Path, content: Any, delimiter: str = ",", encoding: str = "utf-8") -> None:
    """Rows or columns of a table, by the file's ending; of JSON Lines records or columns; or a document."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({name: list(values) for name, values in content.items()}), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in records(content)))
    else:
        rows = [content, *zip(*content.values(), strict=True)] if isinstance(content, dict) else content
        with path.open("w", encoding=encoding, newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows(rows)


def records(content: Mapping[str, Sequence[Any]] | list[Any]) -> list[Any]:
    """Those of a table of columns."""
    if isinstance(content, list):
        return content
    return [dict(zip(content, row)) for row in zip(*content.values(), strict=True)]


def as_json(values: Sequence[Any]) -> list[str]:
    return [json.dumps(value) for value in values]


def numbered(text: str) -> list[str]:
    return [text.format(i) for i in SIX]


def run(*arguments: Any, code: int = 0) -> Any:
    """`agro import`."""
    result = CliRunner().invoke(app, ["import", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def rewards(store: Path) -> tuple[float, ...]:
    with Store.open(store, read_only=True) as opened:
        return tuple(sorted(s.reward for s in opened.samples() if s.reward is not None))


def taken(path: Path) -> dict[str, Any]:
    """The document of an import by the guess, with the rewards that are stored."""
    store = path.with_suffix(".store")
    document = json.loads(run(path, "--guess", "--yes", "--store", store, "--json").stdout)
    return {**document, "rewards": rewards(store)}


@dataclass(frozen=True)
class Log:
    file: str
    content: Any
    rewards: Sequence[float] = ()  # in ascending order
    responses: Sequence[str] = ANSWERS
    prompts: Sequence[str] = QUESTIONS  # which are in the prompts' texts
    pairs: int = 0
    mapping: Mapping[str, str] | None = None  # that is proposed, where the store doesn't tell
    delimiter: str = ","
    encoding: str = "utf-8"

    def write(self, path: Path) -> None:
        write(path, self.content, self.delimiter, self.encoding)


TWO, THREE = (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2)
TABLES = (
    Log(  # a survey, exported by a form
        "survey.csv",
        {
            "Timestamp": [f"2026-01-0{i + 1}" for i in SIX],
            "Question": QUESTIONS,
            "Answer of the bot": ANSWERS,
            "Rating (1-5)": SCORES,
        },
        (1, 2, 3, 4, 5, 5),
    ),
    Log(  # German Excel: semicolons, decimal commas, Windows-1252
        "umfrage.csv",
        {
            "Kunde": numbered("K{}"),
            "Frage": [f"Für wen? {question}" for question in QUESTIONS],
            "Antwort": [f"{answer} Grüße" for answer in ANSWERS],
            "Bewertung": HALVES,
        },
        (0.5, 1.5, 2.5, 3.5, 4.5, 5.5),
        responses=[f"{answer} Grüße" for answer in ANSWERS],
        delimiter=";",
        encoding="cp1252",
    ),
    Log(  # messages as JSON in a cell
        "export.csv",
        {"session": numbered("s{}"), "dialog": as_json(CHATS), "thumb": ("👎", "👍", "👍") * 2},
        (0, 0, 1, 1, 1, 1),
    ),
    Log("python_cells.csv", {"chat": [str(messages) for messages in CHATS], "rating": (0, 1, 2) * 2}, THREE),
    Log(
        "service.csv",
        {
            "request": as_json([{"messages": [asked]} for asked, _ in CHATS]),
            "response": as_json([{"choices": [{"message": said}]} for _, said in CHATS]),
            "rating": (0, 1, 2) * 2,
        },
        THREE,
    ),
    Log(
        "history.csv",
        {"history": as_json([[asked] for asked, _ in CHATS]), "reply": ANSWERS, "stars": (0, 1) * 3},
        TWO,
    ),
    Log(
        "log.tsv",
        {
            "user_input": QUESTIONS,
            "model_output": ANSWERS,
            "score": [score / 10 for score in SCORES],
            "latency_ms": range(100, 106),
        },
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.5),
        delimiter="\t",
    ),
    Log(
        "rated.parquet",
        {"instruction": QUESTIONS, "output": ANSWERS, "quality": [score / 5 for score in SCORES]},
        (0.2, 0.4, 0.6, 0.8, 1.0, 1.0),
    ),
    Log(  # Excel's "Unicode text"
        "unicode.csv",
        {"Prompt": QUESTIONS, "Réponse": ("é",) * 6, "Response": ANSWERS, "Note": SCORES},
        (1, 2, 3, 4, 5, 5),
        delimiter="\t",
        encoding="utf-16",
    ),
    Log("unnamed.csv", {"c1": QUESTIONS, "c2": ANSWERS, "c3": (0, 1) * 3, "c4": SIX}, TWO),
    Log(
        "percent.csv",
        {"query": QUESTIONS, "output": ANSWERS, "score": ("0%", "10%", "20%") * 2},
        (0, 0, 0.1, 0.1, 0.2, 0.2),
    ),
    Log(  # of the task own-log: responses that are numbers
        "digits.csv",
        {
            "Question": ("9770>", "3631>", "59>", "7059>", "13>", "2244>"),
            "Answer": ("0779", "1363", "9500", "9507", "3100", "4422"),
            "Stars (1-5)": (2, 5) * 3,
        },
        (2, 2, 2, 5, 5, 5),
        responses=("0779", "1363", "9500", "9507", "3100", "4422"),
        prompts=("9770>", "3631>", "59>", "7059>", "13>", "2244>"),
    ),
    Log(  # what would have been right is no response
        "expected.csv",
        {"question": QUESTIONS, "expected": ANSWERS, "predicted": WORSE, "em": (0, 1) * 3},
        TWO,
        mapping={"prompt": "question", "response": "predicted", "answer": "expected", "reward": "em"},
        responses=WORSE,
    ),
    Log(  # yes and no of a column whose name says nothing; the number of a ticket is none
        "tickets.csv",
        {
            "Ticket": SIX,
            "Customer question": QUESTIONS,
            "Agent answer": ANSWERS,
            "Resolved": ("No", "Yes") * 3,
        },
        TWO,
    ),
    Log(
        "selected.csv",
        {
            "query_id": (0, 0, 1, 1, 2, 2),
            "query_text": [QUESTIONS[i // 2] for i in SIX],
            "candidate_text": ANSWERS,
            "is_selected": (0, 1) * 3,
        },
        TWO,
        prompts=QUESTIONS[:3],
    ),
    Log(
        "metric.csv",
        {"case": SIX, "input_text": QUESTIONS, "prediction": ANSWERS, "rouge": [i / 7 for i in SIX]},
        [i / 7 for i in SIX],
    ),
    Log(  # the names of users are no prompts
        "chat.csv",
        {"user": numbered("U{}"), "text": QUESTIONS, "bot_reply": ANSWERS, "stars": (0, 1, 2, 3, 4, 0)},
        (0, 0, 1, 2, 3, 4),
    ),
    Log(  # German words of several parts; what has a date or an id is no prompt
        "dates_and_ids.csv",
        {
            "Eingang": DAYS,
            "Vorgang": numbered("V-10{}"),
            "Kundenanfrage": QUESTIONS,
            "KI-Antwort": ANSWERS,
            "Gesamtbewertung": HALVES,
            "Dauer (s)": (0, 1) * 3,
        },
        (0.5, 1.5, 2.5, 3.5, 4.5, 5.5),
    ),
    Log(
        "questions_as_names.csv",
        {
            "Was haben Sie gefragt?": QUESTIONS,
            "Was hat der Assistent geantwortet?": ANSWERS,
            "Wie bewerten Sie die Antwort?": (1, 2, 3, 4, 5, "k. A."),
        },
        (1, 2, 3, 4, 5),
    ),
    Log(
        "french.csv",
        {
            "Date": DAYS,
            "Question de l'usager": QUESTIONS,
            "Réponse": ANSWERS,
            "Note (sur 20)": ("12,5", 8, 15, 20, 9, "non noté"),
            "Commentaire": ("trop long",) * 6,
        },
        (8, 9, 12.5, 15, 20),
    ),
    Log(
        "postgres.csv",
        {"question": QUESTIONS, "sql": ANSWERS, "execution_success": ("t", "f") * 3, "latency_ms": SIX},
        TWO,
    ),
    Log(  # one word among judgments that is none
        "not_rated.csv",
        {"prompt": QUESTIONS, "reply": ANSWERS, "verdict": ("good", "bad", "good", "bad", "good", "ask Jim")},
        (0, 0, 1, 1, 1),
    ),
    Log(  # longer than the answers
        "comments.csv",
        {
            "Brief": QUESTIONS,
            "Copy": [f"short{' short' * i}" for i in SIX],
            "Stars": (0, 1, 2, 3, 4, 0),
            "Reviewer comment": [answer * 3 for answer in ANSWERS],
        },
        (0, 0, 1, 2, 3, 4),
        responses=[f"short{' short' * i}" for i in SIX],
    ),
)
PAIRS = (
    Log(
        "pairs.csv",
        {"question": QUESTIONS, "better_answer": ANSWERS, "worse_answer": WORSE},
        mapping={"prompt": "question", "chosen": "better_answer", "rejected": "worse_answer"},
        responses=BOTH,
        pairs=6,
    ),
    Log(  # two answers, and which one was preferred
        "ab_test.csv",
        {"prompt": QUESTIONS, "response_a": ANSWERS, "response_b": WORSE, "winner": ("A", "B", "tie") * 2},
        responses=BOTH,
        pairs=4,
    ),
    Log(
        "picked.csv",
        {"context": QUESTIONS, "left": WORSE, "right": ANSWERS, "choice": ("left", "right") * 3},
        mapping={
            "prompt": "context",
            "chosen": '(choice == `"left"` && left) || (choice == `"right"` && right)',
            "rejected": '(choice == `"left"` && right) || (choice == `"right"` && left)',
        },
        responses=BOTH,
        pairs=6,
    ),
    Log(
        "old_and_new.csv",
        {
            "question": QUESTIONS,
            "old_answer": WORSE,
            "new_answer": ANSWERS,
            "verdict": ("new", "old", "new") * 2,
        },
        mapping={
            "prompt": "question",
            "chosen": '(verdict == `"old"` && old_answer) || (verdict == `"new"` && new_answer)',
            "rejected": '(verdict == `"old"` && new_answer) || (verdict == `"new"` && old_answer)',
        },
        responses=BOTH,
        pairs=6,
    ),
    Log(
        "both_good.csv",
        {"question": QUESTIONS, "answer_a": ANSWERS, "answer_b": WORSE, "vote": ("a", "b", "both good") * 2},
        mapping={
            "prompt": "question",
            "chosen": '(vote == `"a"` && answer_a) || (vote == `"b"` && answer_b) || '
            '(vote == `"both good"` && answer_a)',
            "rejected": '(vote == `"a"` && answer_b) || (vote == `"b"` && answer_a) || '
            '(vote == `"both good"` && answer_b)',
            "votes_chosen": "`1`",
            "votes_rejected": '(vote == `"both good"` && `1`) || `0`',
        },
        responses=BOTH,
        pairs=4,
    ),
)


def judged(key: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    return records({"question": QUESTIONS, "pred": ANSWERS, key: values})


OBJECTS = (
    Log(  # messages, and a thumb beside them
        "chats.jsonl",
        {"conversation_id": SIX, "messages": CHATS, "feedback": ("thumbs_up", "thumbs_down") * 3},
        TWO,
    ),
    Log(  # a service's own log: objects within objects
        "requests.jsonl",
        {
            "ts": SIX,
            "request": [{"user": {"question": question}} for question in QUESTIONS],
            "result": [{"answer": answer, "tokens": 12} for answer in ANSWERS],
            "feedback": [{"stars": score, "comment": None} for score in SCORES],
        },
        (1, 2, 3, 4, 5, 5),
    ),
    Log(  # several answers to one question
        "sampled.jsonl",
        {
            "problem": QUESTIONS,
            "outputs": list(zip(ANSWERS, WORSE)),
            "scores": [(1.0, 0.0)] * 6,
            "seed": [7] * 6,
        },
        (0,) * 6 + (1,) * 6,
        responses=BOTH,
    ),
    Log(  # words that nobody defined
        "labels.jsonl",
        {"query": QUESTIONS, "reply": ANSWERS, "verdict": ("correct", "partial", "wrong") * 2},
        (0, 0, 0.5, 0.5, 1, 1),
    ),
    Log(
        "correct_or_not.jsonl",
        {
            "problem": QUESTIONS,
            "generations": [[answer] for answer in ANSWERS],
            "correctness": [[True], [False]] * 3,
        },
        TWO,
    ),
    Log("guete.jsonl", judged("Güte", HALVES), (0.5, 1.5, 2.5, 3.5, 4.5, 5.5)),
    Log(
        "label_studio.json",
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
            for i in SIX
        ],
        (0, 1, 2, 3, 4, 5),
    ),
    Log("ranks.jsonl", judged("rank", (1, 2, 3) * 2), (-3, -3, -2, -2, -1, -1)),
    Log("signs.jsonl", judged("reaction", ("-1", "+1") * 3), (-1, -1, -1, 1, 1, 1)),
    Log("likert.jsonl", judged("How satisfied are you?", ("Very satisfied", "Dissatisfied") * 3), TWO),
    Log(
        "in_the_turn.jsonl",
        [
            {"messages": [asked, said | {"feedback": {"thumb": thumb}}]}
            for (asked, said), thumb in zip(CHATS, ("up", "down") * 3)
        ],
        TWO,
    ),
    Log(  # a model's name is no answer
        "models.json",
        {
            "items": [
                {"question": question, "answers": [{"model": "m", "text": answer, "rating": 3}]}
                for question, answer in zip(QUESTIONS, ANSWERS)
            ]
        },
        (3,) * 6,
    ),
)
LOGS = {log.file: log for log in chain(TABLES, PAIRS, OBJECTS)}
