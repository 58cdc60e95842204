"""Tables of the parts and of the verdicts."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from reproductions.paper.experiments import PARTS, Part, Sentence
from reproductions.paper.rules import Found, Verdict, end, start, trained
from reproductions.paper.statements import PROVED

BEGIN, END = "<!-- begin: made by run.py --record -->", "<!-- end: made by run.py --record -->"
Run = Mapping[str, Any]
Judged = tuple[Part, Sentence, Verdict]
NOT_RUN = "not run"


def judged(found: Mapping[str, Found]) -> list[Judged]:
    """Every sentence of the parts that were run."""
    return [
        (part, sentence, _judge(sentence, found[part.name]))
        for part in PARTS.values()
        if part.name in found
        for sentence in part.sentences
    ]


def _judge(sentence: Sentence, found: Found) -> Verdict:
    """Where a plan isn't complete there is none."""
    try:
        return sentence.rule(found)
    except KeyError as missing:
        return Verdict(NOT_RUN, f"{missing.args[0][1]} isn't complete")


def tables(found: Mapping[str, Found], cost: Mapping[str, tuple[int, float]]) -> str:
    """The paper's sentences in its order, ours, and the tables of each part.

    `cost`: of each part the number of runs and their CPU seconds.
    """
    verdicts = judged(found)
    of_paper = [row for row in verdicts if row[1].whose == "the paper"]
    of_paper.sort(key=lambda row: _figure(row[1].text))
    others = [row for row in verdicts if row[1].whose != "the paper"]
    parts = [
        "### The paper's sentences, in its order",
        _proved(),
        _verdicts(of_paper, whose=False),
        "### What follows from them, what others say, and what we say",
        _verdicts(others, whose=True),
    ]
    for name, of_part in found.items():
        parts += [f"### {PARTS[name].title}", _extent(cost[name]), _table(of_part)]
        missing = [f"{method} on {plan} {why}" for method, plan, why in PARTS[name].missing]
        parts += [f"Not run: {'; '.join(missing)}."] if missing else []
    return "\n\n".join(parts)


def _figure(text: str) -> int:
    number = re.search(r"figure (\d)", text)
    assert number, text
    return int(number[1])


def _proved() -> str:
    lines = ["| sentence | measured by |", "|---|---|"]
    return "\n".join([*lines, *(f"| {of.text} | {of.where} |" for of in PROVED)])


def _verdicts(rows: Sequence[Judged], *, whose: bool) -> str:
    head = ["sentence", *(["whose"] if whose else []), "rule", "verdict", "measured"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for _, sentence, verdict in rows:
        of = [sentence.whose] if whose else []
        words = [sentence.text, *of, sentence.ruled, f"**{verdict.word}**", verdict.why]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def _extent(cost: tuple[int, float]) -> str:
    runs, seconds = cost
    return f"{runs} runs, {seconds / 60:.1f} CPU minutes. Means with the lowest and the highest seed."


def _table(found: Found) -> str:
    head = (
        "| method | data | lr | β | seeds | accuracy: start | best on the way | end | KL at the end, nats "
        "| training reward |"
    )
    lines = [head, "|---" * 10 + "|"]
    for (name, plan, _), runs in sorted(found.items(), key=lambda item: _place(item[0])):
        first = runs[0]
        beta = "–" if first["beta"] is None else f"{first['beta']:g}"
        peaks = [max(point["accuracy"] for point in run["curve"]) for run in runs]
        words = [
            *(name, plan, f"{first['rate']:.0e}".replace("e-0", "e-"), beta, str(len(runs))),
            f"{start(first):.3f}",
            _spread(peaks),
            _spread([end(run) for run in runs]),
            _spread([run["curve"][-1]["kl"] for run in runs], 2),
            _spread([trained(run) for run in runs]) if first["rewards"] else "–",
        ]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def _place(key: tuple[str, str, float | None]) -> tuple[int, str, float]:
    plans = [plan for part in PARTS.values() for plan in part.plans]
    return plans.index(key[1]), key[0], key[2] or 0.0


def _spread(values: Sequence[float], digits: int = 3) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if low == high else f"{mean} ({low} to {high})"
