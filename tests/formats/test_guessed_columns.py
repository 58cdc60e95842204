"""What `agro import --guess` takes of logs as they are found: other languages, cells that say that nothing is
known, dates and numbers of records beside what is said, lists inside of lists, and sheets of Excel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_guessing import rewards, run
from unknown_logs import ANSWERS, QUESTIONS, WORSE, lines, table

from agro.errors import Refused
from agro.logs.guessing import propose
from agro.logs.importing import import_files
from agro.logs.unknown_columns import columns_of, is_number, worth_of
from agro.logs.values import parse_words, share_in, written_words
from agro.store import Store

SIX = range(6)
DAYS = [f"0{i + 1}.03.2026 14:0{i}" for i in SIX]


def taken(path: Path) -> dict[str, Any]:
    """The document of an import by the guess, with the rewards that are stored."""
    store = path.with_suffix(".db")
    document = json.loads(run(path, "--guess", "--yes", "--store", store, "--json").stdout)
    return {**document, "rewards": rewards(store)}


TABLES = {  # file: names of columns, rows, the mapping, and the rewards
    "dates_and_ids.csv": (  # German words of several parts; what has a date or an id is no prompt
        ["Eingang", "Vorgang", "Kundenanfrage", "KI-Antwort", "Gesamtbewertung", "Dauer (s)"],
        [[DAYS[i], f"V-10{i}", QUESTIONS[i], ANSWERS[i], f"{i},5", i % 2] for i in SIX],
        {"prompt": "Kundenanfrage", "response": "KI-Antwort", "reward": "Gesamtbewertung"},
        (0.5, 1.5, 2.5, 3.5, 4.5, 5.5),
    ),
    "questions_as_names.csv": (
        ["Was haben Sie gefragt?", "Was hat der Assistent geantwortet?", "Wie bewerten Sie die Antwort?"],
        [[QUESTIONS[i], ANSWERS[i], (1, 2, 3, 4, 5, "k. A.")[i]] for i in SIX],
        {
            "prompt": "Was haben Sie gefragt?",
            "response": "Was hat der Assistent geantwortet?",
            "reward": "Wie bewerten Sie die Antwort?",
        },
        (1, 2, 3, 4, 5),
    ),
    "french.csv": (
        ["Date", "Question de l'usager", "Réponse", "Note (sur 20)", "Commentaire"],
        [
            [DAYS[i], QUESTIONS[i], ANSWERS[i], ("12,5", 8, 15, 20, 9, "non noté")[i], "trop long"]
            for i in SIX
        ],
        {"prompt": "Question de l'usager", "response": "Réponse", "reward": "Note (sur 20)"},
        (8, 9, 12.5, 15, 20),
    ),
    "postgres.csv": (
        ["question", "sql", "execution_success", "latency_ms"],
        [[QUESTIONS[i], ANSWERS[i], "tf"[i % 2], i] for i in SIX],
        {"prompt": "question", "response": "sql", "reward": "execution_success"},
        (0, 0, 0, 1, 1, 1),
    ),
    "graded_words.csv": (  # whatever the column is called
        ["Frage", "Antwort", "Befund"],
        [[QUESTIONS[i], ANSWERS[i], ("gut", "partly right", "wrong")[i % 3]] for i in SIX],
        {"prompt": "Frage", "response": "Antwort", "reward": "Befund"},
        (0, 0, 0.5, 0.5, 1, 1),
    ),
    "not_rated.csv": (  # one word among judgments that is none
        ["prompt", "reply", "verdict"],
        [[QUESTIONS[i], ANSWERS[i], ("good", "bad", "good", "bad", "good", "ask Jim")[i]] for i in SIX],
        {"prompt": "prompt", "response": "reply", "reward": "verdict"},
        (0, 0, 1, 1, 1),
    ),
    "levels.csv": (  # the last word of a name says what it is
        ["grade_level", "question", "answer", "rubric_score"],
        [[i % 3, QUESTIONS[i], ANSWERS[i], f"{10 * i}%"] for i in SIX],
        {"prompt": "question", "response": "answer", "reward": "rubric_score"},
        (0, 0.1, 0.2, 0.3, 0.4, 0.5),
    ),
    "comments.csv": (  # longer than the answers
        ["Brief", "Copy", "Stars", "Reviewer comment"],
        [[QUESTIONS[i], "short " * (i + 1), i % 5, ANSWERS[i] * 3] for i in SIX],
        {"prompt": "Brief", "response": "Copy", "reward": "Stars"},
        (0, 0, 1, 2, 3, 4),
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_comes_in(name: str, tmp_path: Path) -> None:
    names, rows, mapping, expected = TABLES[name]
    table([names, *rows])(tmp_path / name)
    proposal = propose(tmp_path / name)
    assert proposal is not None
    assert proposal.mapping == mapping
    document = taken(tmp_path / name)
    assert (document["samples"], document["refused_count"]) == (6, 0)
    assert document["rewards"] == pytest.approx(expected)


def test_what_is_taken_as_unknown_is_said(tmp_path: Path) -> None:
    names, rows, *_ = TABLES["not_rated.csv"]
    table([names, *rows])(tmp_path / "log.csv")
    proposal = propose(tmp_path / "log.csv")
    assert proposal is not None
    assert "of verdict taken as unknown: ask Jim" in proposal.reasons
    assert "'good=1,bad=0,ask Jim=null'" in proposal.command()
    rows = [[*row[:2], ("good", "bad", "so lala")[i % 3]] for i, row in enumerate(rows)]
    table([names, *rows])(tmp_path / "log.csv")  # too often to be none
    proposal = propose(tmp_path / "log.csv")
    assert proposal is not None
    assert proposal.undefined is not None
    assert "so lala=NUMBER" in proposal.command()


@pytest.mark.parametrize(
    ("winners", "pairs"),
    [
        (("A", "B", "A ", "b", "A", "B"), 6),
        (("A is much better", "B is better", "about the same", "A is better", "Both bad", "B is better"), 4),
        (("1", "2", "1", "2", "tie", "2"), 5),
        (("first", "second", "first", "second", "first", ""), 5),
        (("A > B", "B > A", "A < B", "A = B", "A > B", "B > A"), 5),
    ],
)
def test_a_column_says_which_of_two_is_better(winners: tuple[str, ...], pairs: int, tmp_path: Path) -> None:
    path = tmp_path / "sides.csv"
    models = [("gpt", "own"), ("own", "gpt")]
    rows = [[QUESTIONS[i], *models[i % 2], ANSWERS[i], WORSE[i], winners[i]] for i in SIX]
    table([["Prompt", "Model A", "Model B", "Answer A", "Answer B", "Winning model"], *rows])(path)
    document = taken(path)
    assert (document["pairs"], document["refused_count"]) == (pairs, winners.count(""))
    if winners.count(""):
        assert "where Winning model is empty" in document["refused"][0]["reason"]


def test_lists_inside_of_lists_keep_in_step(tmp_path: Path) -> None:
    """Every candidate has its own rating, not its question's; an unknown one stays so, and one item without a
    response is refused alone."""
    items = [
        {
            "title": QUESTIONS[i],
            "score": 7,
            "answers": [{"body": ANSWERS[i], "score": i}, {"body": WORSE[i], "score": None if i else -2}],
        }
        for i in SIX
    ]
    items[3]["answers"][0]["body"] = None
    path = tmp_path / "dump.json"
    path.write_text(json.dumps({"exported": "2026-03-01", "items": items}))
    document = taken(path)
    assert document["rewards"] == (-2, 0, 1, 2, 4, 5)
    assert (document["samples"], document["refused_count"]) == (11, 1)
    proposal = propose(path)
    assert proposal is not None
    assert proposal.mapping["reward"] == "items[*].answers[*].score"
    assert proposal.mapping["prompt"] == "items[*].title"


def test_an_item_without_its_rating_or_response_leaves_the_others_alone(tmp_path: Path) -> None:
    entries = [{"userPrompt": QUESTIONS[i], "assistantReply": ANSWERS[i], "stars": i % 5} for i in SIX]
    del entries[1]["stars"], entries[2]["assistantReply"]
    path = tmp_path / "export.json"
    path.write_text(json.dumps({"schema": 2, "page": {"entries": entries}}))
    document = taken(path)
    assert (document["samples"], document["refused_count"], document["rewards"]) == (5, 1, (0, 0, 3, 4))
    assert "page.entries[2].assistantReply, which other fields have" in document["refused"][0]["reason"]


def test_several_responses_in_a_row_with_their_stars(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    rows = [[QUESTIONS[i], ANSWERS[i], "★★★★☆", WORSE[i], "★☆☆☆☆"] for i in SIX]
    table([["Prompt", "Response 1", "Stars 1", "Response 2", "Stars 2"], *rows])(path)
    assert taken(path)["rewards"] == (0.2,) * 6 + (0.8,) * 6


def test_parts_of_text(tmp_path: Path) -> None:
    path = tmp_path / "parts.jsonl"
    part = [{"type": "text", "text": "Where"}, {"type": "text", "text": " to?"}]
    turns = [{"role": "user", "content": part}, {"role": "assistant", "content": part}]
    lines([{"chat_log": turns, "feedback": {"rating": "positive" if i % 2 else "negative"}} for i in SIX])(
        path
    )
    assert taken(path)["rewards"] == (0, 0, 0, 1, 1, 1)


def test_words_with_more_than_two_steps(tmp_path: Path) -> None:
    """What isn't in English has to be said, but of two words: one of them is better."""
    for words, expected in (
        (("good", "ok", "bad", "good", "ok", "pending"), (0, 0.5, 0.5, 1, 1)),
        (("ok", "not ok", "ok", "not ok", "ok", "ok"), (0, 0, 1, 1, 1, 1)),
        (("Aprovada", "Reprovada", "Aprovada", "Reprovada", "Pending", "Aprovada"), (0, 0, 1, 1, 1)),
    ):
        path = tmp_path / f"{words[0]}.csv"
        rows = [[QUESTIONS[i % 6], ANSWERS[i % 6] + str(i), words[i % 6]] for i in range(12)]
        table([["question", "answer", "Note"], *rows])(path)
        assert taken(path)["rewards"] == tuple(sorted(expected * 2))
    marks = ("sehr gut", "gut", "befriedigend", "ausreichend", "mangelhaft", "sehr gut")
    path = tmp_path / "marks.csv"
    table([["question", "answer", "Note"], *[[QUESTIONS[i], ANSWERS[i], marks[i]] for i in SIX]])(path)
    assert "befriedigend=NUMBER" in run(path, "--guess", "--yes", code=2).stderr


def test_tables_as_excel_and_databases_write_them(tmp_path: Path) -> None:
    """A line that names the delimiter, empty rows at the end, and quotes that belong to what is said."""
    rows = "".join(f"{QUESTIONS[i]};{ANSWERS[i].replace(';', ',')};{i},5\n" for i in SIX)
    path = tmp_path / "excel.csv"
    path.write_text(f"sep=;\nquestion;answer;score\n{rows};;\n;;\n")
    document = taken(path)
    assert (document["samples"], document["refused_count"]) == (6, 0)
    path = tmp_path / "plain.tsv"
    path.write_text("question\tanswer\tscore\n" + '"Why" he asked\tSo "it" is\t1\n"Who?\tHe\t2\n')
    assert taken(path)["rewards"] == (1, 2)
    path = tmp_path / "pipes.txt"
    path.write_text(
        f"id|question|answer|match\n1|{QUESTIONS[0]}|Press it, then wait|87,5 %\n2|What?|No|80%\n"
    )
    assert taken(path)["rewards"] == (0.8, 0.875)


def test_a_sheet_with_a_title_beside_a_small_one(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (["Survey of March"], [], ["Question", "Answer", "Rating"]):
        book.active.append(row)
    for i in SIX:
        book.active.append([QUESTIONS[i], ANSWERS[i], f"{i % 5} - as said"])
    legend = book.create_sheet("Legend")
    legend.append(["Stars", "Meaning"])
    book.save(tmp_path / "survey.xlsx")
    assert taken(tmp_path / "survey.xlsx")["rewards"] == (0, 0, 1, 2, 3, 4)


def test_the_types_that_are_no_text() -> None:
    rows = [{"id": f"req_{i}a", "at": DAYS[i], "mail": f"u{i}@x.org", "n": ["3", "NULL"][i % 2]} for i in SIX]
    rows += [{"n": "4"}] * 6
    assert {c.path: c.type for c in columns_of(rows)} == {
        "id": "id",
        "at": "date",
        "mail": "id",
        "n": "number",
    }


def test_words_with_commas_are_written_as_json() -> None:
    worth = {"Yes, fully": "1", "No": "0", "-": "null"}
    assert parse_words(written_words(worth)) == {"Yes, fully": 1.0, "No": 0.0, "-": None}
    assert written_words({"up": "1"}) == "up=1"
    with pytest.raises(Refused, match="or an object of JSON"):
        parse_words("{up: 1}")


def test_worth_in_other_words() -> None:
    said = ["4 von 5", "not helpful", "partly correct", "sehr gut", "bad: wrong tone", "(none)", "3,5/5"]
    assert [worth_of(word) for word in said] == [0.8, 0.0, 0.5, 1.0, 0.0, None, 0.7]
    assert not any(is_number(text) or worth_of(text) for text in ("0/0", "4/0"))
    assert [share_in(text) for text in ("85%", "4/5", "1/0", "4", "a/b")] == [0.85, 0.8, None, None, None]


SHARES = {
    "4/5": 0.8,
    "4 / 5": 0.8,
    "80%": 0.8,
    "80 %": 0.8,
    "87,5 %": 0.875,
    "80 percent": 0.8,
    "3 von 5": 0.6,
    "4 out of 5": 0.8,
    "4 of 5 stars": 0.8,
    "4.5/5 stars": 0.9,
    "3 Sterne von 5": 0.6,
    "★★☆☆☆": 0.4,
    "☆☆☆☆☆": 0.0,
    "★★★★★": 1.0,
    "⭐⭐⭐⭐⭐": 1.0,
}
MAPPING = {"prompt": "prompt", "response": "response", "reward": "rating"}


def rated(path: Path, said: Sequence[Any]) -> Path:
    rows = [{"prompt": "q", "response": f"a{i}", "rating": value} for i, value in enumerate(said)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_ratings_that_say_of_how_much(tmp_path: Path) -> None:
    path = rated(tmp_path / "log.jsonl", list(SHARES))
    with Store.open(tmp_path / "s.db") as store:
        import_files(store, [path], mapping=MAPPING, strict=True)
        rewards = [sample.reward for sample in store.samples()]
    assert dict(zip(SHARES, rewards, strict=True)) == pytest.approx(SHARES)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        (["3 stars", "4 stars"], "reward: '3 stars' doesn't say of how many; say what each is worth"),
        (["★★★"], "reward: '★★★' doesn't say of how many"),
        (["4/5", 85], "reward: expected one scale, got 85.*, and '4/5' before it"),
        (["85", "80%"], "reward: expected one scale, got '80%', and '85' before it"),
        (["4/5", "so-so"], "reward: expected a finite number, or one of the words"),
    ],
)
def test_ratings_of_no_scale_or_two_are_refused(said: list[Any], refused: str, tmp_path: Path) -> None:
    path = rated(tmp_path / "log.jsonl", said)
    with Store.open(tmp_path / "s.db") as store, pytest.raises(Refused, match=refused):
        import_files(store, [path], mapping=MAPPING, strict=True)


def test_stars_without_a_whole_are_proposed_as_shares(tmp_path: Path) -> None:
    for name, said, expected in (
        ("words", ("3 stars", "5 stars", "1 star"), (0.2, 0.2, 0.6, 0.6, 1.0, 1.0)),
        ("signs", ("★★★", "★", "★★☆☆☆"), (0.2, 0.2, 0.4, 0.4, 0.6, 0.6)),
        ("ten", ("8 points", "4 points", "1 point"), (0.1, 0.1, 0.4, 0.4, 0.8, 0.8)),
    ):
        path = tmp_path / f"{name}.csv"
        table([["question", "answer", "rating"], *[[QUESTIONS[i], ANSWERS[i], said[i % 3]] for i in SIX]])(
            path
        )
        assert taken(path)["rewards"] == expected


def test_public_reports_of_ratings(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "../shared/data/reports/stars.jsonl"
    if not path.exists():
        pytest.skip(f"{path} isn't there: this test needs those ratings")
    with Store.open(tmp_path / "s.db") as store:
        report = import_files(store, [path], mapping=MAPPING)
        assert [sample.reward for sample in store.samples()] == [0.8, 0.4, 0.8]
    assert ["'3 stars' doesn't say of how many" in refusal.reason for refusal in report.refused] == [True]
