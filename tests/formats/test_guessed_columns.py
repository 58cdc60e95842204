"""What `agro import --guess` takes of logs as they are found: other languages, cells that say that nothing is
known, dates and numbers of records beside what is said, lists inside of lists, and sheets of Excel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from unknown_logs import ANSWERS, HALVES, LOGS, QUESTIONS, SIX, WORSE, run, taken, write

from agro.errors import Refused
from agro.logs.guessing import Proposal, propose
from agro.logs.importing import import_files
from agro.logs.unknown_columns import columns_of, is_number, worth_of
from agro.logs.values import parse_words, share_in, written_words
from agro.store import Store


def test_what_is_taken_as_unknown_is_said(tmp_path: Path) -> None:
    log, path = LOGS["not_rated.csv"], tmp_path / "log.csv"
    log.write(path)
    proposal = propose(path)
    assert proposal is not None
    assert "of verdict taken as unknown: ask Jim" in proposal.reasons
    assert "'good=1,bad=0,ask Jim=null'" in proposal.command()
    write(path, log.content | {"verdict": ("good", "bad", "so lala") * 2})  # too often to be none
    with pytest.raises(Refused, match=r"(?s)verdict: .* --reward-map '.*so lala=NUMBER'"):
        propose(path)


def test_words_of_a_known_format(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    content = {"prompt": QUESTIONS, "response": ANSWERS, "grade": ("gut", "so lala", "naja") * 2}
    write(path, content | {"score": (1, 2, 3, 1, 2, 3)})
    with pytest.raises(Refused) as refusal:
        propose(path, reward="grade")
    said = str(refusal.value)
    assert f"agro import {path} --store STORE.db --reward grade --reward-map " in said
    assert "or another column: --guess --reward COLUMN, of score" in said
    write(path, {"prompt": QUESTIONS, "response": ANSWERS})
    assert propose(path) is None
    write(path, {"x": SIX})
    assert "--reward ''" not in str(propose(path))


def test_a_winner_beside_scores_of_each(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    answers = {"question": QUESTIONS, "gpt_answer": ANSWERS, "llama_answer": WORSE}
    write(path, answers | {"gpt_score": (0, 2, 1) * 2, "llama_score": (2, 1, 0) * 2})
    assert propose(path) == Proposal(path, propose(path).columns)
    winners = {"winner": ("gpt", "llama") * 3}
    write(path, answers | {"gpt_score": (0, 2, 1) * 2, "llama_score": (2, 1, 0) * 2} | winners)
    assert propose(path).judged == "winner"


def test_two_columns_of_one_response(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    codes = {"response_text": ANSWERS, "response_code": [f"print({i}) and more" for i in SIX]}
    write(path, {"question": QUESTIONS, **codes, "score": (1, 2, 3) * 2})
    assert propose(path).judged == "score"


def test_objects_that_are_no_tables() -> None:
    rows = [{"meta": {"0": i}, "more": {}} for i in SIX]
    assert [column.path for column in columns_of(rows)] == ['meta."0"']
    assert not columns_of([{"0": {"x": 1}, "1": {"x": 2}}])


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
    models = {"Model A": ("gpt", "own") * 3, "Model B": ("own", "gpt") * 3}
    answers = {"Answer A": ANSWERS, "Answer B": WORSE}
    write(path, {"Prompt": QUESTIONS, **models, **answers, "Winning model": winners})
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
    write(path, {"exported": "2026-03-01", "items": items})
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
    write(path, {"schema": 2, "page": {"entries": entries}})
    document = taken(path)
    assert (document["samples"], document["refused_count"], document["rewards"]) == (5, 1, (0, 0, 3, 4))
    assert "page.entries[2].assistantReply, which other fields have" in document["refused"][0]["reason"]


def test_parts_of_text(tmp_path: Path) -> None:
    path = tmp_path / "parts.jsonl"
    part = [{"type": "text", "text": "Where"}, {"type": "text", "text": " to?"}]
    turns = [{"role": "user", "content": part}, {"role": "assistant", "content": part}]
    feedback = [{"rating": "negative"}, {"rating": "positive"}] * 3
    write(path, {"chat_log": [turns] * 6, "feedback": feedback})
    assert taken(path)["rewards"] == (0, 0, 0, 1, 1, 1)


def test_words_with_more_than_two_steps(tmp_path: Path) -> None:
    """What isn't in English has to be said, but of two words: one of them is better."""
    for words, expected in (
        (("good", "ok", "bad", "good", "ok", "pending"), (0, 0.5, 0.5, 1, 1)),
        (("ok", "not ok", "ok", "not ok", "ok", "ok"), (0, 0, 1, 1, 1, 1)),
        (("Aprovada", "Reprovada", "Aprovada", "Reprovada", "Pending", "Aprovada"), (0, 0, 1, 1, 1)),
    ):
        path = tmp_path / f"{words[0]}.csv"
        answers = [f"{answer}{i}" for i, answer in enumerate(ANSWERS * 2)]
        write(path, {"question": QUESTIONS * 2, "answer": answers, "Note": words * 2})
        assert taken(path)["rewards"] == tuple(sorted(expected * 2))
    marks = ("sehr gut", "gut", "befriedigend", "ausreichend", "mangelhaft", "sehr gut")
    path = tmp_path / "marks.csv"
    write(path, {"question": QUESTIONS, "answer": ANSWERS, "Note": marks})
    said = run(path, "--guess", "--yes", "--store", tmp_path / "s.db", code=2).stderr
    assert "Note: the worth of its words is unknown" in said
    assert "befriedigend=NUMBER" in said


def test_tables_as_excel_and_databases_write_them(tmp_path: Path) -> None:
    """A line that names the delimiter, empty rows at the end, and quotes that belong to what is said."""
    rows = "".join(f"{QUESTIONS[i]};{ANSWERS[i].replace(';', ',')};{HALVES[i]}\n" for i in SIX)
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


def test_words_with_commas_are_written_as_json() -> None:
    worth = {"Yes, fully": "1", "No": "0", "-": "null"}
    assert parse_words(written_words(worth)) == {"Yes, fully": 1.0, "No": 0.0, "-": None}
    assert written_words({"up": "1"}) == "up=1"
    with pytest.raises(Refused, match="or an object of JSON"):
        parse_words("{up: 1}")


WORTH = {
    "4/5": 0.8,
    "80%": 0.8,
    "★★★☆☆": 0.6,
    "3 - fair": 3.0,
    "2 stars": 2.0,
    "thumbs up": 1.0,
    "partial": 0.5,
    "4 von 5": 0.8,
    "3,5/5": 0.7,
    "(none)": None,
    "ship it": None,
    "0/0": None,
    "4/0": None,
}


def test_the_worth_of_words() -> None:
    assert {word: worth_of(word) for word in WORTH} == WORTH
    assert not any(is_number(text) for text in ("0/0", "4/0"))
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
    write(path, [{"prompt": "q", "response": f"a{i}", "rating": value} for i, value in enumerate(said)])
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
        (["3 stars", "4 stars"], "reward: '3 stars' doesn't say out of how many; say what each is worth"),
        (["★★★"], "reward: '★★★' doesn't say out of how many"),
        (["4/5", 1], "reward: expected one scale, got 1, and '4/5' before it"),  # below one is no share alone
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
        write(path, {"question": QUESTIONS, "answer": ANSWERS, "rating": said * 2})
        assert taken(path)["rewards"] == expected


def test_public_reports_of_ratings(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "../shared/data/reports/stars.jsonl"
    if not path.exists():
        pytest.skip(f"{path} isn't there: this test needs those ratings")
    with Store.open(tmp_path / "s.db") as store:
        report = import_files(store, [path], mapping=MAPPING)
        assert [sample.reward for sample in store.samples()] == [0.8, 0.4, 0.8]
    assert ["'3 stars' doesn't say out of how many" in refusal.reason for refusal in report.refused] == [True]
