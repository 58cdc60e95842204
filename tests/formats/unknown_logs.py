"""Fourteen logs as data scientists have them: of no format that agro knows, or without a reward in it.

Each has a writer, and what comes of it: samples, those with a reward, pairs, and the rewards that there are.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
WORSE = tuple(f"I don't know about that ({i})." for i in range(6))
SCORES = (5, 2, 4, 1, 3, 5)


@dataclass(frozen=True)
class UnknownLog:
    file: str
    write: Callable[[Path], None]
    samples: int
    scored: int
    rewards: tuple[float, ...] = ()
    pairs: int = 0


def table(rows: list[list[Any]], delimiter: str = ",", encoding: str = "utf-8") -> Callable[[Path], None]:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows(rows)
    return lambda path: path.write_bytes(text.getvalue().encode(encoding)) and None


def lines(rows: list[dict[str, Any]]) -> Callable[[Path], None]:
    return lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in rows)) and None


def columns(*names: str) -> list[list[Any]]:
    return [list(names)]


def parquet(path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet as pq

    qualities = [score / 5 for score in SCORES]
    pq.write_table(
        pa.table({"instruction": list(QUESTIONS), "output": list(ANSWERS), "quality": qualities}), path
    )


def messages(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTIONS[i]}, {"role": "assistant", "content": ANSWERS[i]}]


SIX = range(6)
UNKNOWN_LOGS = (
    UnknownLog(  # a survey, exported by a form
        "survey.csv",
        table(
            columns("Timestamp", "Question", "Answer of the bot", "Rating (1-5)")
            + [[f"2026-01-0{i + 1}", QUESTIONS[i], ANSWERS[i], SCORES[i]] for i in SIX]
        ),
        6,
        6,
        (1, 2, 3, 4, 5, 5),
    ),
    UnknownLog(  # German Excel: semicolons, decimal commas, Windows-1252
        "umfrage.csv",
        table(
            columns("Kunde", "Frage", "Antwort", "Bewertung")
            + [[f"K{i}", f"Für wen? {QUESTIONS[i]}", f"{ANSWERS[i]} Grüße", f"{i},5"] for i in SIX],
            ";",
            "cp1252",
        ),
        6,
        6,
        (0.5, 1.5, 2.5, 3.5, 4.5, 5.5),
    ),
    UnknownLog(  # messages, and a thumb beside them
        "chats.jsonl",
        lines(
            [
                {
                    "conversation_id": i,
                    "messages": messages(i),
                    "feedback": ("thumbs_up", "thumbs_down")[i % 2],
                }
                for i in SIX
            ]
        ),
        6,
        6,
        (0, 0, 0, 1, 1, 1),
    ),
    UnknownLog(  # messages as JSON in a cell
        "export.csv",
        table(
            columns("session", "dialog", "thumb")
            + [[f"s{i}", json.dumps(messages(i)), "👍" if i % 3 else "👎"] for i in SIX]
        ),
        6,
        6,
        (0, 0, 1, 1, 1, 1),
    ),
    UnknownLog(
        "pairs.csv",
        table(
            columns("question", "better_answer", "worse_answer")
            + [[QUESTIONS[i], ANSWERS[i], WORSE[i]] for i in SIX]
        ),
        12,
        0,
        pairs=6,
    ),
    UnknownLog(  # two answers, and which one was preferred
        "ab_test.csv",
        table(
            columns("prompt", "response_a", "response_b", "winner")
            + [[QUESTIONS[i], ANSWERS[i], WORSE[i], ("A", "B", "tie")[i % 3]] for i in SIX]
        ),
        12,
        0,
        pairs=4,
    ),
    UnknownLog(
        "log.tsv",
        table(
            columns("user_input", "model_output", "score", "latency_ms")
            + [[QUESTIONS[i], ANSWERS[i], SCORES[i] / 10, 100 + i] for i in SIX],
            "\t",
        ),
        6,
        6,
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.5),
    ),
    UnknownLog(  # a service's own log: objects within objects
        "requests.jsonl",
        lines(
            [
                {
                    "ts": i,
                    "request": {"user": {"question": QUESTIONS[i]}},
                    "result": {"answer": ANSWERS[i], "tokens": 12},
                    "feedback": {"stars": SCORES[i], "comment": None},
                }
                for i in SIX
            ]
        ),
        6,
        6,
        (1, 2, 3, 4, 5, 5),
    ),
    UnknownLog("rated.parquet", parquet, 6, 6, (0.2, 0.4, 0.6, 0.8, 1.0, 1.0)),
    UnknownLog(  # Excel's "Unicode text"
        "unicode.csv",
        table(
            columns("Prompt", "Réponse", "Response", "Note")
            + [[QUESTIONS[i], "é", ANSWERS[i], SCORES[i]] for i in SIX],
            "\t",
            "utf-16",
        ),
        6,
        6,
        (1, 2, 3, 4, 5, 5),
    ),
    UnknownLog(  # pandas: DataFrame.to_json()
        "frame.json",
        lambda path: (
            path.write_text(
                json.dumps(
                    {
                        "query": {str(i): QUESTIONS[i] for i in SIX},
                        "reply": {str(i): ANSWERS[i] for i in SIX},
                        "correct": {str(i): bool(i % 2) for i in SIX},
                    }
                )
            )
            and None
        ),
        6,
        6,
        (0, 0, 0, 1, 1, 1),
    ),
    UnknownLog(  # several answers to one question
        "sampled.jsonl",
        lines(
            [
                {"problem": QUESTIONS[i], "outputs": [ANSWERS[i], WORSE[i]], "scores": [1.0, 0.0], "seed": 7}
                for i in SIX
            ]
        ),
        12,
        12,
        (0,) * 6 + (1,) * 6,
    ),
    UnknownLog(  # words that nobody defined
        "labels.jsonl",
        lines(
            [
                {
                    "query": QUESTIONS[i],
                    "reply": ANSWERS[i],
                    "verdict": ("correct", "partial", "wrong")[i % 3],
                }
                for i in SIX
            ]
        ),
        6,
        6,
        (0, 0, 0.5, 0.5, 1, 1),
    ),
    UnknownLog(  # words of a house: of two one is better, and who is asked says which
        "house.csv",
        table(
            columns("question", "answer", "label")
            + [[QUESTIONS[i], ANSWERS[i], ("ship it", "rework")[i % 2]] for i in SIX]
        ),
        6,
        6,
        (0, 0, 0, 1, 1, 1),
    ),
)
