"""Blind ratings: a person says which of two answers is better without knowing which model wrote which.

The sheet is a CSV file with the columns prompt, left, right and better, the last one empty. The key, a JSON
file next to it, says which side is the result's. Raters don't open it.

A complete sheet is tested with the sign test. That test fails for a rater who looks after each rating and may
stop at any time: with 200 coins, looking after each, its error rate is 28%. Such ratings are tested with the
evidence E. Of n ratings, w prefer the result and l the start. If neither is better, they are fair coins. E is
their likelihood ratio between a result's share q uniform in [0, 1] and q = ½:
E = ∫ q^w (1−q)^l dq / ½^n = 2^n w! l! / (n+1)!. For fair coins E is a martingale with mean 1, at any stopping
time, so E ≥ 20 has a probability of at most 5 % (Ville, 1939; Ramdas et al., arXiv 2210.01948). Hence p = 1/E
holds at any stop, and the interval contains every share against which the same evidence is below 20.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from agro.errors import Refused
from agro.io.files import write
from agro.io.strictjson import loads
from agro.io.terminal import csv_cell, plain, text_of_cell
from agro.stats.intervals import bisected
from agro.stats.paired import LEVEL, sign_test
from agro.types import Prompt, Sample

if TYPE_CHECKING:
    from agro.config import SamplerConfig
    from agro.rollout import Rollout

COUNTS = ("wins", "losses", "ties", "unrated")
Test = Literal["sign", "sequential"]  # of a complete sheet, or of ratings that may stop at any time
COLUMNS = ("prompt", "left", "right", "better")
SIDES = ("left", "right")
MEANING = {"left": "left", "1": "left", "right": "right", "2": "right", "tie": "tie", "0": "tie"}
FIRST_ROW = 2  # number of the first row in a spreadsheet, below the titles


@dataclass(frozen=True)
class Answers:
    """The answers of two models to one prompt."""

    prompt: str
    start: str
    result: str


def answer_both(
    start: Rollout, result: Rollout, prompts: Sequence[Prompt], sampler: SamplerConfig, seed: int
) -> list[Answers]:
    """Sample one response per model and prompt. Prompts whose environment failed on a side are left out."""
    one = sampler.model_copy(update={"n": 1})
    befores, afters = (_texts(r.sample(prompts, 1, one, seed=seed)) for r in (start, result))
    return [
        Answers(plain(prompt.text), befores[i], afters[i])
        for i, prompt in enumerate(prompts)
        if i in befores and i in afters
    ]


def _texts(samples: Iterator[Sample]) -> dict[int, str]:
    """Collect texts by prompt number; an episode's is everything after the prompt."""
    texts: dict[int, str] = {}
    failed: set[int] = set()
    for sample in samples:
        number = int(sample.meta["index"])
        texts[number] = texts.get(number, "") + sample.response
        if sample.meta.get("reward_error") is not None:
            failed.add(number)
    return {number: text for number, text in texts.items() if number not in failed}


def key_of(sheet: Path) -> Path:
    """Return the key's path, next to its sheet. Raises `Refused` for a sheet not named *.csv."""
    if sheet.suffix.lower() != ".csv":
        raise Refused(f"{sheet}: expected the name of a sheet to end with .csv")
    return sheet.with_suffix(".key.json")


def check_free(sheet: Path) -> None:
    """Raise `Refused` if writing a sheet would lose ratings, a key, or another file."""
    key = key_of(sheet)
    if not sheet.exists():
        if key.exists():
            raise Refused(
                f"{key}: this key belongs to a sheet that is elsewhere; use another name, or remove it"
            )
        return
    rated = sum(bool(row["better"].strip()) for row in read_sheet(sheet))
    if rated:
        raise Refused(f"{sheet}: {rated} rows of it are rated; use another name, or remove it")


def write_sheet(sheet: Path, answers: Sequence[Answers], seed: int, about: dict[str, Any]) -> None:
    """Write a sheet and its key, which also holds `about`.

    A fair coin per row decides the sides, so that a rater with a preferred side prefers no model. The coins
    depend on the seed and on the responses: no two sheets have the same order.
    """
    if not answers:
        raise Refused(f"{sheet}: no prompt has a response of both models, so there is nothing to rate")
    check_free(sheet)
    noise = hashlib.sha256(
        "".join(_digest((a.prompt, a.start, a.result)) for a in answers).encode()
    ).digest()[:8]
    rng = np.random.default_rng([seed, int.from_bytes(noise)])
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    rows = []
    for answered, side in zip(answers, rng.integers(0, 2, len(answers)).tolist(), strict=True):
        pair = (answered.start, answered.result) if side else (answered.result, answered.start)
        writer.writerow((*map(csv_cell, (answered.prompt, *pair)), ""))
        rows.append({"result": SIDES[side], "digest": _digest((answered.prompt, *pair))})
    sheet.parent.mkdir(parents=True, exist_ok=True)
    write(key_of(sheet), json.dumps({**about, "seed": seed, "rows": rows}, indent=1) + "\n")
    write(sheet, text.getvalue())


def read_key(sheet: Path) -> dict[str, Any]:
    path = key_of(sheet)
    if not path.is_file():
        raise Refused(f"{path}: expected the key of {sheet} next to it, got no such file; put it there")
    try:
        key = dict(loads(path.read_bytes()))
        complete = {"model", "run", "step"} <= key.keys() and key["test"] in get_args(Test)
        for row in key["rows"]:
            complete = complete and row["result"] in SIDES and isinstance(row["digest"], str)
    except (ValueError, TypeError, KeyError, AttributeError):
        complete = False
    if not complete:
        raise Refused(f"{path}: expected the key of a sheet, as --blind writes it; write a sheet again")
    return key


def read_ratings(sheet: Path) -> NDArray[np.float64]:
    """Read ratings [M]: 1 if the result is preferred, −1 if the start is, 0 for a tie, NaN for an empty row.

    Raises `Refused`, naming the row, for any other rating and for a row whose texts have changed.
    """
    rows, written = read_sheet(sheet), read_key(sheet)["rows"]
    if len(rows) != len(written):
        raise Refused(
            f"{sheet}: expected the {len(written)} rows that were written, got {len(rows)}; leave "
            "the column better of a row empty instead of removing the row"
        )
    ratings = np.full(len(rows), math.nan)
    for i, (row, original) in enumerate(zip(rows, written, strict=True)):
        location = f"{sheet}: row {i + FIRST_ROW}"
        texts = [row[name] for name in COLUMNS[:3]]
        # Some spreadsheets drop the quotes before a formula.
        if original["digest"] not in (_digest(tuple(texts)), _digest(tuple(map(text_of_cell, texts)))):
            raise Refused(
                f"{location}: prompt, left and right aren't what was written; keep the rows in order and "
                "change only the column better (a spreadsheet keeps 007 if columns are read as text)"
            )
        rating = row["better"].strip().lower()
        if not rating:
            continue
        if rating not in MEANING:
            raise Refused(
                f"{location}: better: expected left, right or tie (or 1, 2, 0), or nothing, got "
                f"{row['better']!r:.80}"
            )
        preferred = MEANING[rating]
        ratings[i] = 0 if preferred == "tie" else 1 if preferred == original["result"] else -1
    return ratings


def rate_rows(sheet: Path, ratings: Mapping[int, str]) -> None:
    """Write ratings of rows, counted from 0, to the sheet, durably."""
    with sheet.open(encoding="utf-8-sig", newline="") as file:
        table = [row for row in csv.reader(file) if row]
    column = table[0].index("better")
    for number, better in ratings.items():
        row = table[number + 1]
        row += [""] * (column + 1 - len(row))
        row[column] = better
    text = io.StringIO(newline="")
    csv.writer(text).writerows(table)
    write(sheet, text.getvalue())


def read_sheet(sheet: Path) -> list[dict[str, str]]:
    """Read the rows by column. Added columns, and cells beyond the titles, are left alone."""
    try:
        with sheet.open(encoding="utf-8-sig", newline="") as file:
            titles, *cells = [row for row in csv.reader(file) if row] or [[]]
            rows = [dict(zip_longest(titles, row[: len(titles)], fillvalue="")) for row in cells]
    except (UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{sheet}: expected a sheet as --blind writes it, CSV in UTF-8: {error}") from None
    if not set(COLUMNS) <= set(titles):
        raise Refused(
            f"{sheet}: expected the columns {', '.join(COLUMNS)}, separated by commas, got "
            f"{', '.join(titles)!r:.80}"
        )
    return rows


def _digest(texts: tuple[str, ...]) -> str:
    """Hash texts, ignoring line ends and spaces, which a spreadsheet may change."""
    tokens = [text.split() for text in texts]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Ratings:
    """Blind ratings, stored in ratings.json: numbers of prompts on which the result, the start, or neither
    was preferred; `unrated`: rows left empty.

    `step`: the run's step when the responses were sampled; None for a model that isn't the run's. `test`:
    "sequential" if the rater saw the state after each rating and could stop (`agro rate`).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    wins: NonNegativeInt
    losses: NonNegativeInt
    ties: NonNegativeInt
    unrated: NonNegativeInt
    step: int | None = None
    test: Test = "sign"

    @classmethod
    def of(cls, ratings: NDArray[np.float64], step: int | None = None, test: Test = "sign") -> Ratings:
        """`ratings`: [M], 1, −1, 0 or NaN per prompt; see `read_ratings`."""
        wins, losses, ties = (int((ratings == value).sum()) for value in (1, -1, 0))
        return cls(wins, losses, ties, int(np.isnan(ratings).sum()), step, test)

    @property
    def decided(self) -> int:
        """The number of prompts without ties."""
        return self.wins + self.losses

    @property
    def p(self) -> float:
        """The two-sided p-value of no difference, without ties: the exact sign test, or 1/E at any stop."""
        if self.test == "sequential":
            return p_at_any_stop(self.wins, self.losses)
        return sign_test(self.wins, self.losses)

    @property
    def share(self) -> float | None:
        """The share of prompts without ties on which the result was preferred."""
        return self.wins / self.decided if self.decided else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of that share, consistent with the test: it excludes ½ if p is below .05."""
        if not self.decided:
            return None
        if self.test == "sequential":
            return interval_at_any_stop(self.wins, self.losses)
        return clopper_pearson(self.wins, self.decided)

    def to_json(self) -> dict[str, Any]:
        """Return counts, the share with its interval, p and its test; None where unknown."""
        low, high = self.interval or (None, None)
        counts = {name: getattr(self, name) for name in COUNTS}
        return {**counts, "share": self.share, "low": low, "high": high, "p": self.p, "test": self.test}

    def save(self, folder: Path) -> None:
        write(folder / "ratings.json", json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Ratings | None:
        """Load a run's ratings; None if it has none. Raises `Refused` for a malformed file."""
        path = folder / "ratings.json"
        if not path.is_file():
            return None
        try:
            return TypeAdapter(Ratings).validate_json(path.read_bytes(), strict=True)
        except ValidationError:
            raise Refused(
                f"{path}: expected whole numbers {', '.join(COUNTS)} and step, and a test; read the sheet "
                "again with agro eval RUN --ratings"
            ) from None


def log_evidence(wins: int, losses: int, share: float = 0.5) -> float:
    """Return log E against a true `share` of the result."""
    likelihood = wins * math.log(share) + losses * math.log1p(-share)
    return math.lgamma(wins + 1) + math.lgamma(losses + 1) - math.lgamma(wins + losses + 2) - likelihood


def p_at_any_stop(wins: int, losses: int) -> float:
    """Return the two-sided p-value of no difference, valid at any stop."""
    return min(1.0, math.exp(-log_evidence(wins, losses)))


def is_decided(wins: int, losses: int) -> bool:
    return log_evidence(wins, losses) > -math.log(LEVEL)


def interval_at_any_stop(wins: int, losses: int) -> tuple[float, float]:
    """Return the result's 95% interval, valid at any stop. It excludes ½ exactly if p is below .05."""
    return _lowest(wins, losses), 1 - _lowest(losses, wins)


def _lowest(wins: int, losses: int) -> float:
    """Find the smallest share that the ratings don't exclude, by bisection."""
    if not wins:
        return 0.0

    def is_excluded(share: float) -> bool:
        return share == 0 or log_evidence(wins, losses, share) > -math.log(LEVEL)

    return bisected(0.0, wins / (wins + losses), is_excluded)[1]


def fewest_more(wins: int, losses: int) -> int:
    """Count the further ratings needed to decide if all favor the side that is ahead."""
    ahead, behind, more = max(wins, losses), min(wins, losses), 0
    while not is_decided(ahead + more, behind):
        more += 1
    return more


def clopper_pearson(k: int, n: int) -> tuple[float, float]:
    """Return the exact 95% interval of the probability behind k of n trials (Clopper and Pearson, 1934).

    It excludes ½ exactly if twice the smaller tail of the binomial distribution at ½ is below .05.
    """
    return _smallest_share(k, n), 1 - _smallest_share(n - k, n)


def _smallest_share(k: int, n: int) -> float:
    """Find the success probability at which k or more of n trials succeed with probability .025."""
    if k == 0:
        return 0.0
    i = np.arange(k, n + 1)
    ways = np.array([math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1) for j in i])

    def tail(share: float) -> float:
        return float(np.exp(ways + i * math.log(share) + (n - i) * math.log1p(-share)).sum())

    low, high = bisected(0.0, 1.0, lambda share: tail(share) < 0.025)
    return (low + high) / 2
