"""What `agro import --guess` shows before an import, and who decides: somebody at a terminal or an option."""

from __future__ import annotations

import json
import random
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from running import on_terminal
from unknown_logs import ANSWERS, QUESTIONS, WORSE, rewards, run, write

from agro.errors import Refused
from agro.logs.guessing import propose
from agro.store import Store

WORDS = ("reset", "cancel", "check", "the", "my", "how", "invoice", "order", "folder", "device", "ticket")
PAIRS = {  # how a column says that the first of two responses is better, and the second
    "first_wins": ("true", "false"),
    "winner": ("not B", "not A"),
    "verdict": ("B is worse", "A is worse"),
    "choice": ("A > B", "A < B"),
    "loser": ("B", "A"),
    "preferred": (0, 1),
    "better": (1, 2),
    "preference": (-2, 3),
    "vote": (1, -1),
    "b_better": (0, 1),
}
LANGUAGES = (
    ("question", "answer"),
    ("Frage", "Antwort"),
    ("domanda", "risposta"),
    ("pytanie", "odpowiedz"),
    ("requête", "réponse"),
)
HIGHER = (
    *("score", "rating", "utile", "f1", "valutazione", "Bewertung", "puntuación", "note", "ocena"),
    "human_rating",
)
LOWER = (
    *("toxicity", "error_rate", "latency_ms", "cost_usd", "rank", "Schulnote", "not_helpful", "erreurs"),
    *("num_errors", "harmfulness"),
)
SCALES = (("7", "8/10"), ("85%", "85"), ("★★★★", "4/5"), ("4 stars", "4/5"), ("3/5", "6/10"))


def log_of(kind: str, number: int) -> tuple[list[list[Any]], str]:
    """A table as people have it, and its column of judgments: the score repeats, and differs between
    responses to one prompt; beside it are numbers that count votes, or are of the prompt."""
    draw = random.Random(f"{kind} {number}")
    prompt, response = LANGUAGES[number % len(LANGUAGES)]
    prompts = [" ".join(draw.choices(WORDS, k=5)) + f" {i}?" for i in range(12)]
    rows: list[dict[str, Any]] = []
    for i in range(24):
        said = [" ".join(draw.choices(WORDS, k=draw.randint(4, 15))) + "." for _ in range(2)]
        asked = prompts[i // 2]
        aside = {
            "question_score": len(asked),
            "votes": draw.randint(0, 90),
            "num_ratings": draw.randint(1, 30),
        }
        aside = dict(list(aside.items())[: number % 4])
        if kind == "pairs":
            column = list(PAIRS)[number % len(PAIRS)]
            judged = {f"{response}_a": said[0], f"{response}_b": said[1], column: PAIRS[column][i % 5 % 2]}
            aside.pop("question_score", None)
        elif kind == "scales":
            column = HIGHER[number % len(HIGHER)]
            judged = {response: said[0], column: SCALES[number % len(SCALES)][i % 5 % 2]}
        else:
            column = (LOWER if kind == "lower" else HIGHER)[number // 4 % 10]
            judged = {response: said[0], column: draw.randint(1, 5)}
        rows.append({prompt: asked, **aside, **judged})
    return [list(rows[0]), *[list(row.values()) for row in rows]], column


@pytest.mark.parametrize("kind", ["higher", "lower", "scales", "pairs"])
def test_generated_tables_are_proposed_right_and_never_imported_unasked(kind: str, tmp_path: Path) -> None:
    path, store = tmp_path / "log.csv", tmp_path / "s.db"
    outcomes = Counter[str]()
    for number in range(40):
        rows, column = log_of(kind, number)
        write(path, rows)
        if number < 4:
            said = run(path, "--guess", "--store", store, code=2).stderr
            assert column in said
            assert not store.exists()
        try:
            proposal = propose(path)
        except Refused as error:
            is_shown = f"{column}: expected one scale" in str(error) and str(error).count("log.csv:") == 2
            outcomes["refused" if is_shown else "other"] += 1
            continue
        assert proposal is not None
        if proposal.judged != column:
            outcomes["another column"] += 1
        elif kind != "pairs":
            outcomes["lower" if proposal.lower_is_better else "higher"] += 1
        else:
            won = [row[-3] if row[-1] == PAIRS[column][0] else row[-2] for row in rows[1:]]
            is_right = len(proposal.best) == 3 and all(e.response in won for e in proposal.best)
            outcomes["pairs" if is_right else "reversed"] += 1
    expected = {"scales": "refused"}.get(kind, kind)
    at_least = {"pairs": 40, "scales": 40}.get(kind, 34)  # 85 %
    assert outcomes[expected] >= at_least, outcomes


GIVEN = (3, 1, 2, 6, 5, 4)


def rated(path: Path, column: str) -> Path:
    """With ratings in this column, and those of `stars` in the opposite direction."""
    stars = [7 - rating for rating in GIVEN]
    write(path, {"question": QUESTIONS, "answer": ANSWERS, column: GIVEN, "stars": stars})
    return path


def test_a_flag_decides(tmp_path: Path) -> None:
    path, stores = rated(tmp_path / "log.csv", "toxicity"), [str(tmp_path / f"{i}.db") for i in range(6)]
    shown = json.loads(run(path, "--guess", "--json", code=2).stdout)
    assert (shown["reward"], shown["others"]) == ("stars", ["toxicity"])
    same = shlex.split(shown["command"])[3:]
    opposite = shlex.split(shown["reversed"])[3:]
    as_given, negated = (1, 2, 3, 4, 5, 6), (-6, -5, -4, -3, -2, -1)
    for store, options, expected in zip(
        stores,
        (
            ["--guess", "--yes"],
            ["--guess", "--lower-is-better"],
            ["--guess", "--reward", "stars"],
            ["--guess", "--reward", "toxicity"],  # of which less is better, by its name
            [word for word in same if not word.endswith(".db")],
            [word for word in opposite if not word.endswith(".db")],
        ),
        (as_given, negated, as_given, negated, as_given, negated),
        strict=True,
    ):
        options = [option for option in options if option != "--store"]
        said = run(path, *options, "--store", store).output
        assert rewards(Path(store)) == expected
        assert ("rewards are stored negated" in said) == (expected[0] < 0)
    refused = run(path, "--guess", "--reward", "speed", code=2).stderr
    assert "--reward speed: expected one of the columns question, answer, toxicity, stars" in refused
    refused = run(path, "--guess", "--reward", "stars=2", "--reward", "toxicity", code=2).stderr
    assert "--guess: expected one --reward COLUMN with it" in refused


def test_the_evidence_is_both_ends(tmp_path: Path) -> None:
    proposal = propose(rated(tmp_path / "log.csv", "num_votes"))
    assert proposal is not None
    assert [(e.raw, e.reward, e.response) for e in proposal.best] == [
        (f"{7 - GIVEN[i]}", 7.0 - GIVEN[i], ANSWERS[i]) for i in (1, 2, 0)
    ]
    assert [(e.raw, e.response) for e in proposal.worst] == [
        ("1", ANSWERS[3]),
        ("2", ANSWERS[4]),
        ("3", ANSWERS[5]),
    ]
    shown = str(proposal.reversed())
    assert shown.index("  1 → -1: ") < shown.index("  6 → -6: ")


def test_a_column_may_have_the_name_of_a_field_or_control_characters(tmp_path: Path) -> None:
    """`tokens` counts here what a record lists; a name doesn't clear the terminal."""
    path, store = tmp_path / "log.csv", tmp_path / "s.db"
    numbers = {"tokens": range(10, 16), "score\x1b[2J": GIVEN, "turn\x1b[2J": range(6)}
    write(path, {"question": QUESTIONS, "answer": ANSWERS, **numbers})
    said = run(path, "--guess", "--store", store, code=2).stderr
    assert said.count("--drop tokens") == said.count("--drop") == 2
    assert "proposed: score\\x1b[2J: higher is better" in said
    assert "\x1b" not in said
    said = run(path, "--guess", "--yes", "--drop", "meta", "--store", store).output
    assert "\x1b" not in said
    assert rewards(store) == (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("named", "words"), [("winner", ("A", "B")), ("loser", ("B", "A")), ("winner", ("not B", "B is better"))]
)
def test_lower_is_better_swaps_winner_and_loser(named: str, words: tuple[str, str], tmp_path: Path) -> None:
    path, store = tmp_path / "pairs.csv", tmp_path / "s.db"
    write(path, {"question": QUESTIONS, "answer_a": ANSWERS, "answer_b": WORSE, named: words * 3})
    proposal = propose(path)
    assert proposal is not None
    better = [ANSWERS[0], WORSE[1], ANSWERS[2]]
    assert [e.response for e in proposal.best] == better
    assert [e.response for e in proposal.reversed().worst] == better
    run(*shlex.split(proposal.reversed().command(str(store)))[2:])
    with Store.open(store, read_only=True) as opened:
        texts = {sample.id: sample.response for sample in opened.samples()}
        won = [texts[pair.winner] for pair in opened.pairs()]
    assert won[:3] == [WORSE[0], ANSWERS[1], WORSE[2]]


@pytest.mark.test
@pytest.mark.parametrize(
    ("answers", "stored"),
    [
        (("y",), (1, 2, 3, 4, 5, 6)),
        (("n",), (-6, -5, -4, -3, -2, -1)),
        (("speed", "length", "n"), (-1006, -1005, -1004, -1003, -1002, -1001)),
        (("q",), ()),
    ],
)
def test_a_person_at_a_terminal_decides(
    answers: tuple[str, ...], stored: tuple[float, ...], tmp_path: Path
) -> None:
    path, store = tmp_path / "log.csv", tmp_path / "s.db"
    lengths = [1000 + rating for rating in GIVEN]
    write(path, {"question": QUESTIONS, "answer": ANSWERS, "score": GIVEN, "length": lengths})
    replies = [("another column / q: ", answer) for answer in answers]
    shown, code = on_terminal("import", path, "--guess", "--store", store, replies=replies)
    assert code == (0 if stored else 2), shown
    assert "upper, the best (" in shown
    assert ("--reward speed: expected one of the columns" in shown) == ("speed" in answers)
    assert store.exists() == bool(stored)
    if stored:
        assert rewards(store) == stored


def test_short_prompts_and_empty_files(tmp_path: Path) -> None:
    rows = [{"question": f"{i}*7?", "answer": f"It is {7 * i}.", "stars": i % 5 + 1} for i in range(9)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    proposal = propose(tmp_path / "log.jsonl")
    assert proposal is not None
    assert proposal.mapping == {"prompt": "question", "response": "answer", "reward": "stars"}
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(Refused, match="empty: expected records, got none"):
        propose(tmp_path / "none.jsonl")
