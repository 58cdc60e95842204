"""Blind ratings: a sheet that is written, rated, read back and judged; and a test that holds at any stop."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agro.config import SamplerConfig
from agro.errors import Refused
from agro.pages.run.ratings import (
    Answers,
    Ratings,
    answer_both,
    clopper_pearson,
    fewest_more,
    interval_at_any_stop,
    is_decided,
    key_of,
    log_evidence,
    p_at_any_stop,
    read_key,
    read_ratings,
    write_sheet,
)
from agro.pages.run.verdict import Verdict
from agro.rollout import Rollout
from agro.types import Prompt, Sample

ABOUT = {"model": "run/model", "run": "1f", "step": 6, "test": "sign"}
ANSWERS = [Answers(f'say "{i}",\nplease', f"start {i}\r\nand more", f"result; {i}") for i in range(40)]


@pytest.fixture
def sheet(tmp_path: Path) -> Path:
    write_sheet(tmp_path / "out.csv", ANSWERS, 0, ABOUT)
    return tmp_path / "out.csv"


class Played(Rollout):
    """Episodes of two rows each, the last first; that of prompt `failing` failed."""

    def __init__(self, name: str, failing: int) -> None:
        self.name, self.failing = name, failing

    def sample(self, prompts: Any, n: int, options: SamplerConfig, **given: Any) -> Iterator[Sample]:
        assert (n, options.n) == (1, 1)
        for i in reversed(range(len(prompts))):
            meta = {"index": i} | ({"reward_error": "no answer"} if i == self.failing else {})
            for turn in (1, 2):
                yield Sample(prompts[i].text, f"{self.name}{i}.{turn} ", meta=meta)


def test_a_prompt_needs_a_response_of_both_models() -> None:
    messages = [{"role": "user", "content": "1+1"}]
    prompts = [Prompt("a"), Prompt(messages), Prompt("c"), Prompt("d")]
    answered = answer_both(Played("s", 0), Played("r", 2), prompts, SamplerConfig(n=8), 0)
    assert answered == [
        Answers("user: 1+1", "s1.1 s1.2 ", "r1.1 r1.2 "),
        Answers("d", "s3.1 s3.2 ", "r3.1 r3.2 "),
    ]
    with pytest.raises(Refused, match="nothing to rate"):
        write_sheet(Path("none.csv"), [], 0, ABOUT)


def rows_of(sheet: Path) -> list[dict[str, str]]:
    with sheet.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rewrite(sheet: Path, rows: list[dict[str, Any]], encoding: str = "utf-8") -> None:
    with sheet.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def rate(sheet: Path, better: Callable[[int, dict[str, str]], str]) -> None:
    rewrite(sheet, [row | {"better": better(i, row)} for i, row in enumerate(rows_of(sheet))])


def side_of_result(row: dict[str, str]) -> str:
    return "left" if row["left"].startswith("result") else "right"


def test_a_sheet_has_both_responses_and_doesnt_say_whose_they_are(sheet: Path) -> None:
    rows = rows_of(sheet)
    assert list(rows[0]) == ["prompt", "left", "right", "better"]
    for row, answers in zip(rows, ANSWERS, strict=True):
        assert (row["prompt"], row["better"]) == (answers.prompt, "")
        assert {row["left"], row["right"]} == {answers.start, answers.result}
    sides = [side_of_result(row) for row in rows]
    assert 10 <= sides.count("left") <= 30
    key = json.loads(key_of(sheet).read_text())
    assert key_of(sheet).name == "out.key.json"
    assert [row["result"] for row in key["rows"]] == sides


def test_the_sides_depend_on_seed_and_texts(tmp_path: Path) -> None:
    others = [Answers(a.prompt, a.start, a.result + "!") for a in ANSWERS]
    sides = []
    for i, (answers, seed) in enumerate([(ANSWERS, 0), (ANSWERS, 0), (ANSWERS, 1), (others, 0)]):
        write_sheet(tmp_path / f"{i}.csv", answers, seed, ABOUT)
        sides.append([side_of_result(row) for row in rows_of(tmp_path / f"{i}.csv")])
    assert sides[0] == sides[1]
    assert sides[0] not in (sides[2], sides[3])


def test_ratings_are_read_back(sheet: Path) -> None:
    """As somebody writes them, saved by a spreadsheet with a column of notes."""
    numbers = {"left": "1", "right": "2"}
    other = {"left": "right", "right": "left"}

    def better(i: int, row: dict[str, str]) -> str:
        mine = side_of_result(row)
        given = (mine.upper(), f" {numbers[mine]} ", other[mine], numbers[other[mine]], "Tie", "0", "", " ")
        return given[i % 8]

    rate(sheet, better)
    noted = [row | {"left": row["left"].replace("\r\n", "\n"), "note": "x"} for row in rows_of(sheet)]
    rewrite(sheet, noted, "utf-8-sig")
    expected = np.tile([1, 1, -1, -1, 0, 0, math.nan, math.nan], 5)
    np.testing.assert_array_equal(read_ratings(sheet), expected)
    assert Ratings.of(read_ratings(sheet), 6) == Ratings(10, 10, 10, 10, 6)


def test_a_sheet_starts_no_formula(tmp_path: Path) -> None:
    """What a model writes is a formula to a spreadsheet; ratings come back with or without the quote."""
    texts = ("=HYPERLINK(A1)", "+1", "-1", "@a", "\t=1", "'=1")
    answers = [Answers(f"={i}", f"{text} start", f"{text} result") for i, text in enumerate(texts)]
    sheet = tmp_path / "out.csv"
    write_sheet(sheet, answers, 0, ABOUT)
    rows = rows_of(sheet)
    assert {row[name][0] for row in rows for name in ("prompt", "left", "right")} == {"'"}
    rate(sheet, lambda i, row: "left" if "result" in row["left"] else "right")
    np.testing.assert_array_equal(read_ratings(sheet), np.ones(6))
    rewrite(sheet, [{name: cell.removeprefix("'") for name, cell in row.items()} for row in rows_of(sheet)])
    np.testing.assert_array_equal(read_ratings(sheet), np.ones(6))


@pytest.mark.parametrize("value", ["best", "3", "1.0", "left right"])
def test_another_rating_is_refused_by_its_row(sheet: Path, value: str) -> None:
    rate(sheet, lambda i, _: value if i == 4 else "left")
    with pytest.raises(Refused, match=rf"out\.csv: row 6: better: expected left, right or tie.*'{value}'"):
        read_ratings(sheet)


def test_rows_that_werent_written_are_refused(sheet: Path) -> None:
    rows = rows_of(sheet)
    swapped = [*rows[:3], rows[4], rows[3], *rows[5:]]
    for changed, words in (
        (swapped, "row 5: prompt, left and right aren't what was written"),
        (rows[:-1], "expected the 40 rows that were written, got 39"),
        ([{"a": 1, "b": 2}], "expected the columns prompt, left, right, better"),
    ):
        rewrite(sheet, changed)
        with pytest.raises(Refused, match=words):
            read_ratings(sheet)


def test_a_key_that_is_missing_or_broken_is_refused(sheet: Path) -> None:
    key = key_of(sheet)
    assert read_key(sheet)["test"] == "sign"
    changed = [key.read_text().replace(name, '"other"') for name in ('"step"', '"test"', '"sign"')]
    for text in ("", "[]", '{"rows": 1}', *changed):
        key.write_text(text)
        with pytest.raises(Refused, match="expected the key of a sheet"):
            read_ratings(sheet)
    key.unlink()
    with pytest.raises(Refused, match=r"out\.key\.json: expected the key of .* next to it"):
        read_ratings(sheet)


def test_ratings_arent_overwritten(sheet: Path) -> None:
    write_sheet(sheet, ANSWERS, 1, ABOUT)  # nothing is rated yet
    rate(sheet, lambda i, _: "tie" if i == 7 else "")
    before = sheet.read_bytes(), key_of(sheet).read_bytes()
    with pytest.raises(Refused, match="1 rows of it are rated"):
        write_sheet(sheet, ANSWERS, 2, ABOUT)
    assert (sheet.read_bytes(), key_of(sheet).read_bytes()) == before
    sheet.unlink()
    with pytest.raises(Refused, match="this key belongs to a sheet that is elsewhere"):
        write_sheet(sheet, ANSWERS, 2, ABOUT)
    other = sheet.with_name("other.csv")
    other.write_text("a,b\n1,2\n")
    with pytest.raises(Refused, match="expected the columns"):
        write_sheet(other, ANSWERS, 2, ABOUT)
    with pytest.raises(Refused, match=r"end with \.csv"):
        write_sheet(sheet.with_name("out.txt"), ANSWERS, 2, ABOUT)


def test_the_sign_test_is_exact_and_without_ties() -> None:
    ratings = Ratings(9, 1, 30, 5)
    assert ratings.p == pytest.approx(2 * (1 + 10) / 2**10)
    assert Ratings(1, 0, 0, 0).p == Ratings(0, 0, 3, 0).p == Ratings(0, 0, 1, 0).p == 1
    assert Ratings(1, 9, 0, 0).p == ratings.p
    assert (ratings.share, Ratings(0, 0, 3, 0).share) == (0.9, None)


@pytest.mark.parametrize("n", [1, 2, 5, 20, 301, 2000])
def test_the_interval_agrees_with_the_test(n: int) -> None:
    """It leaves ½ out where p is below .05. At its ends a tail of the binomial distribution has .025."""
    for k in {0, 1, n // 3, n // 2, int(0.53 * n), int(0.75 * n), n - 1, n}:
        low, high = clopper_pearson(k, n)
        assert 0 <= low <= k / n <= high <= 1
        assert (not low <= 0.5 <= high) == (Ratings(k, n - k, 0, 0).p < 0.05)
        mirrored = clopper_pearson(n - k, n)
        assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-12)
    assert clopper_pearson(n, n) == pytest.approx((0.025 ** (1 / n), 1))


@pytest.mark.parametrize(
    ("ratings", "answer", "sentence"),
    [
        (
            Ratings(31, 9, 3, 1),
            "better",
            "Preferred to the start on 31 of 40 held-out prompts by blind ratings (78%, 62% to 89%), "
            "p < .001; 3 ties, 1 row left empty.",
        ),
        (
            Ratings(2, 12, 1, 0),
            "worse",
            "Worse: the start was preferred on 12 of 14 held-out prompts by blind ratings (86%, 57% to 98%), "
            "p = .013; 1 tie.",
        ),
        (
            Ratings(6, 4, 0, 2),
            "not shown",
            "Not shown better: preferred to the start on 6 of 10 held-out prompts by blind ratings (60%, "
            "26% to 88%), p = .754; no ties, 2 rows left empty.",
        ),
        (
            Ratings(0, 0, 4, 0),
            "not shown",
            "Not shown better: blind ratings preferred neither the result nor the start; 4 ties.",
        ),
    ],
)
def test_the_sentence(ratings: Ratings, answer: str, sentence: str) -> None:
    verdict = Verdict.rated(ratings)
    assert (verdict.answer, verdict.sentence) == (answer, sentence)
    assert (verdict.to_json()["ratings"]["p"], verdict.to_json()["gain"]) == (ratings.p, None)


def test_ratings_of_a_run_are_kept(tmp_path: Path) -> None:
    assert Ratings.load(tmp_path) is None
    for ratings in (Ratings(3, 2, 1, 0, 6), Ratings(3, 2, 1, 0), Ratings(3, 2, 1, 0, 6, "sequential")):
        ratings.save(tmp_path)
        assert Ratings.load(tmp_path) == ratings
    counts = '{"wins": 1, "losses": 0, "ties": 0, "unrated": 0, "step": 1'
    (tmp_path / "ratings.json").write_text(counts + "}")
    assert Ratings.load(tmp_path) == Ratings(1, 0, 0, 0, 1, "sign")
    more = [f"{counts}, {end}}}" for end in ('"test": "other"', '"x": 1')]
    for text in ("", "[]", "{}", counts.replace("1", "-1", 1) + "}", *more):
        (tmp_path / "ratings.json").write_text(text)
        with pytest.raises(Refused, match=r"ratings\.json: expected whole numbers"):
            Ratings.load(tmp_path)


MOST = 500  # ratings


def table(share: float) -> NDArray[np.float64]:
    """[n, wins]: log E against `share`, computed anew, as a product: of rating n + 1 the predicted share is
    (wins + 1)/(n + 2) (Laplace's rule of succession)."""
    found = np.full((MOST + 1, MOST + 2), -math.inf)
    found[0, 0] = 0.0
    for n in range(MOST):
        for wins in range(n + 1):
            won, lost = (wins + 1) / (n + 2), (n - wins + 1) / (n + 2)
            found[n + 1, wins + 1] = found[n, wins] + math.log(won / share)
            if wins == 0:
                found[n + 1, 0] = found[n, 0] + math.log(lost / (1 - share))
    return found


def stopped(share: float, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n]: the probability that n ratings, each of which is a win with `share`, have decided; enumerated."""
    alive, total, by_n = np.zeros(MOST + 2), 0.0, []
    alive[0] = 1.0
    for n in range(1, MOST + 1):
        alive = share * np.roll(alive, 1) + (1 - share) * alive
        decides = evidence[n] > math.log(20)
        total += float(alive[decides].sum())
        alive[decides] = 0.0
        by_n.append(total)
    return np.array(by_n)


def test_evidence_is_that_of_the_rule_of_succession() -> None:
    for share in (0.5, 0.3):
        expected = table(share)
        for n, wins in ((1, 0), (1, 1), (8, 8), (40, 13), (500, 300)):
            assert log_evidence(wins, n - wins, share) == pytest.approx(expected[n, wins], abs=1e-9)
    assert p_at_any_stop(8, 0) == pytest.approx(9 / 2**8)
    assert p_at_any_stop(3, 3) == p_at_any_stop(0, 0) == 1.0
    assert (is_decided(8, 0), is_decided(7, 0), is_decided(0, 8)) == (True, False, True)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.95])
def test_who_stops_at_any_time_errs_in_at_most_5_percent(share: float) -> None:
    """The interval leaves out the true share at some time in 1 to 5 % of runs; of 0.5 it is where p < .05. A
    look at the sign test after each of 200 ratings errs in 28 %."""
    error = float(stopped(share, table(share))[-1])
    assert 0.01 < error < 0.05
    if share == 0.5:
        assert error == pytest.approx(0.0340, abs=1e-4)


@pytest.mark.parametrize(("share", "median", "by_128"), [(0.6, 210, 0.30), (0.7, 47, 0.95), (0.8, 19, 1.0)])
def test_power(share: float, median: int, by_128: float) -> None:
    found = stopped(share, table(0.5))
    assert int(np.searchsorted(found, 0.5)) + 1 == median
    assert found[127] == pytest.approx(by_128, abs=0.005)


def test_the_sequential_interval_agrees_with_its_test() -> None:
    for n in (1, 7, 8, 40, 300):
        for wins in {0, 1, n // 3, n // 2, int(0.65 * n), n - 1, n} - {-1}:
            low, high = interval_at_any_stop(wins, n - wins)
            assert 0 <= low <= wins / n <= high <= 1
            is_significant = p_at_any_stop(wins, n - wins) < 0.05
            assert (not low <= 0.5 <= high) == is_significant == is_decided(wins, n - wins)
            assert interval_at_any_stop(n - wins, wins) == pytest.approx((1 - high, 1 - low), abs=1e-12)
            for end in {low, high} - {0.0, 1.0}:
                assert log_evidence(wins, n - wins, end) == pytest.approx(math.log(20), abs=1e-6)


def test_what_is_still_needed() -> None:
    assert fewest_more(0, 0) == fewest_more(1, 0) + 1 == 8
    assert (fewest_more(8, 0), fewest_more(0, 9)) == (0, 0)
    for wins, losses in ((2, 3), (10, 4), (0, 3)):
        least = fewest_more(wins, losses)
        ahead, behind = max(wins, losses), min(wins, losses)
        assert is_decided(ahead + least, behind)
        assert not is_decided(ahead + least - 1, behind)
