"""Tables of the verdicts and of the parts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from reproductions.paper import rules
from reproductions.paper.experiments import PAPER, PARTS, Part, Sentence, judge
from reproductions.paper.rules import Found, Verdict, end
from reproductions.paper.statements import PROVED, magnitudes

BEGIN, END = "<!-- begin: made by run.py --record -->", "<!-- end: made by run.py --record -->"
WITHOUT_FIGURE = ("single", "long")  # all other numbers are in result.json
Judged = tuple[Part, Sentence, Verdict]


def judged(found: Mapping[str, Found]) -> list[Judged]:
    """Every sentence of the parts that were run."""
    return [
        (part, sentence, judge(sentence, found[part.name]))
        for part in PARTS.values()
        if part.name in found
        for sentence in part.sentences
    ]


def tables(found: Mapping[str, Found], cost: Mapping[str, tuple[int, float]]) -> str:
    """The paper's sentences in its order, ours, and the tables of each part.

    `cost`: of each part the number of runs and their CPU seconds.
    """
    verdicts = judged(found)
    of_paper = sorted((row for row in verdicts if row[1].whose == PAPER), key=lambda row: row[1].claim.text)
    beyond = [row for row in verdicts if row[1].whose != PAPER]
    runs, minutes = sum(n for n, _ in cost.values()), sum(seconds for _, seconds in cost.values()) / 60
    parts = [
        f"{runs} runs, {minutes:.0f} CPU minutes. The paper's sentences: {_counted(of_paper)}. "
        f"What follows from it, what others say and what we say: {_counted(beyond)}, each in result.json.",
        "### What the paper says",
        _proved(),
        _verdicts(of_paper),
        "### Accuracy at the end (KL to the start, in nats), means of the seeds",
    ]
    for name, of_part in found.items():
        if name in WITHOUT_FIGURE:
            parts += [f"{PARTS[name].title}:", _table(PARTS[name], of_part)]
        missing = [
            f"{method} on {plan.replace(', n = ', ' ×')} {why}" for method, plan, why in PARTS[name].missing
        ]
        parts += [f"Not run: {'; '.join(missing)}."] if missing else []
    return "\n\n".join(parts)


def others(found: Mapping[str, Found]) -> str:
    """What follows from the paper, what others say, what we say."""
    return _verdicts([row for row in judged(found) if row[1].whose != PAPER])


def _counted(rows: Sequence[Judged]) -> str:
    counts = Counter(verdict.word for _, _, verdict in rows)
    words = (rules.HOLDS, rules.FAILS, rules.EQUAL, rules.UNKNOWN)
    return ", ".join(f"{counts[word]} {word}" for word in words if counts[word])


def _proved() -> str:
    lines = ["| proved | measured by |", "|---|---|"]
    return "\n".join([*lines, *(f"| {of.text} | {of.where} |" for of in (*PROVED, *magnitudes()))])


def _verdicts(rows: Sequence[Judged]) -> str:
    """A line for each sentence, with all data that it was tested on."""
    lines = ["| sentence: what is higher if it holds | on: verdict, measured (95 %) |", "|---|---|"]
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for _, of, verdict in rows:
        line = f"{of.on.replace(', n = ', ' ×')}: **{verdict.word}**, {verdict.why}"
        grouped.setdefault((*of.claim, of.whose), []).append(line)
    for (text, ruled, whose), of_data in grouped.items():
        said = "" if whose == PAPER else f" ({whose})"
        lines.append(f"| {text}{said}: {ruled} | {'<br>'.join(of_data)} |")
    return "\n".join(lines)


def _table(part: Part, found: Found) -> str:
    names = list(dict.fromkeys((name, beta) for name, _, beta in found))
    plans = [plan for plan in part.plans if any(key[1] == plan for key in found)]
    lines = [f"| method | {' | '.join(plans).replace(', n = ', ' ×')} |", "|---" * (1 + len(plans)) + "|"]
    for name, beta in sorted(names, key=lambda of: (of[0], of[1] or 0.0)):
        cells = [_end(found.get((name, plan, beta))) for plan in plans]
        lines.append(f"| {name}{'' if beta is None else f', β = {beta:g}'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _end(runs: Sequence[rules.Run] | None) -> str:
    if not runs:
        return "–"
    kl = statistics.mean(run["curve"][-1]["kl"] for run in runs)
    return f"{statistics.mean(map(end, runs)):.3f} ({kl:.2f})"
