"""A sheet on which somebody rates two models' responses without knowing which model wrote which.

The sheet is a CSV file with the columns prompt, left, right and better, the last one empty. Which side is the
result's stands in the key, a JSON file beside it, which whoever rates doesn't open.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from agro.errors import Refused
from agro.io.files import write
from agro.io.strictjson import loads
from agro.io.terminal import csv_cell, text_of_cell

Test = Literal["sign", "sequential"]  # of ratings: after all of them, or by somebody who may stop at any time
COLUMNS = ("prompt", "left", "right", "better")
SIDES = ("left", "right")
MEANING = {"left": "left", "1": "left", "right": "right", "2": "right", "tie": "tie", "0": "tie"}
FIRST_ROW = 2  # of the sheet, as a spreadsheet counts them: the titles are row 1


@dataclass(frozen=True)
class Answers:
    """What two models answered to one prompt."""

    prompt: str
    start: str
    result: str


def key_of(sheet: Path) -> Path:
    """The key is beside its sheet. Raises `Refused` for a sheet that isn't named as a CSV file."""
    if sheet.suffix.lower() != ".csv":
        raise Refused(f"{sheet}: expected the name of a sheet to end with .csv")
    return sheet.with_suffix(".key.json")


def check_free(sheet: Path) -> None:
    """Raise `Refused` where writing a sheet would lose ratings, a key, or another file."""
    key = key_of(sheet)
    if not sheet.exists():
        if key.exists():
            raise Refused(
                f"{key}: there is the key of a sheet that is elsewhere; give another name, or remove it"
            )
        return
    rated = sum(bool(row["better"].strip()) for row in read_sheet(sheet))
    if rated:
        raise Refused(f"{sheet}: {rated} rows of it are rated; give another name, or remove it")


def write_sheet(sheet: Path, answers: Sequence[Answers], seed: int, about: dict[str, Any]) -> None:
    """Write a sheet and its key, which has `about` too.

    A fair coin decides the sides of each row on its own, so that who always prefers one side prefers no
    model. Its noise depends on the seed and on the responses: no two sheets have the same order.
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
        raise Refused(f"{path}: expected the key of {sheet} beside it, got no such file; put it there")
    try:
        key = {"test": "sign"} | loads(path.read_bytes())
        complete = {"model", "against", "run", "step"} <= key.keys() and key["test"] in get_args(Test)
        for row in key["rows"]:
            complete = complete and row["result"] in SIDES and isinstance(row["digest"], str)
    except (ValueError, TypeError, KeyError, AttributeError):
        complete = False
    if not complete:
        raise Refused(f"{path}: expected the key of a sheet, as --blind writes it; write a sheet again")
    return dict(key)


def read_ratings(sheet: Path) -> NDArray[np.float64]:
    """[M]: 1 where the result is preferred, −1 where the start is, 0 for a tie, NaN for a row without rating.

    Raises `Refused` naming the row for another rating, and where a row isn't the one that was written.
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
        # A sheet of an earlier version has no quotes before a formula; some spreadsheets drop them.
        if original["digest"] not in (_digest(tuple(texts)), _digest(tuple(map(text_of_cell, texts)))):
            raise Refused(
                f"{location}: prompt, left and right aren't what was written; keep the rows in order and "
                "change the column better alone (a spreadsheet keeps 007 where columns are read as text)"
            )
        given = row["better"].strip().lower()
        if not given:
            continue
        if given not in MEANING:
            raise Refused(
                f"{location}: better: expected left, right or tie (or 1, 2, 0), or nothing, got "
                f"{row['better']!r:.80}"
            )
        preferred = MEANING[given]
        ratings[i] = 0 if preferred == "tie" else 1 if preferred == original["result"] else -1
    return ratings


def rate_rows(sheet: Path, ratings: Mapping[int, str]) -> None:
    """Put ratings of rows, which are counted from 0, into the sheet; they are on the disk afterwards."""
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
    """Its rows by column. Columns that somebody added, and remarks beyond the titles, are left alone."""
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
    """Of texts whose line ends and spaces a spreadsheet may have changed."""
    words = [text.split() for text in texts]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
