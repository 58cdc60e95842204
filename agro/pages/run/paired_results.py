"""Two results compared on the prompts that both answered: matched by their text, prompt by prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from agro.errors import Refused
from agro.io.numbers import chance, fixed
from agro.logs.results import HELD_OUT, REWARD, WAY_OUT, Result
from agro.pages.run.verdict import Verdict
from agro.stats.paired import Comparison, compare, holm

NAMED = 3  # examples of what isn't compared


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


ROW = ("n", "a", "b", "difference", "low", "high", "p", "test", "detectable")  # of a comparison, in JSON


class Matching(NamedTuple):
    """Prompts of both sides, as pairs of their ids, and those of one side alone.

    `other_text`: ids that both sides have, each for another prompt; these are among `only_a` and `only_b`.
    """

    pairs: list[tuple[str, str]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    other_text: tuple[str, ...]

    @classmethod
    def of(cls, a: Mapping[str, str], b: Mapping[str, str]) -> Matching:
        """Match prompts with the same text. `a`, `b`: by id a hash of it.

        Where several have it, first those with the same id, then the others in their order.
        """
        pairs = [(key, key) for key in a if a[key] == b.get(key)]
        both = {key for key, _ in pairs}
        rest: dict[str, list[str]] = {}
        for key, text in b.items():
            if key not in both:
                rest.setdefault(text, []).append(key)
        for key, text in a.items():
            if key not in both and rest.get(text):
                pairs.append((key, rest[text].pop(0)))
        of_a, of_b = ({pair[side] for pair in pairs} for side in (0, 1))
        only_a, only_b = (
            tuple(key for key in side if key not in matched) for side, matched in ((a, of_a), (b, of_b))
        )
        return cls(pairs, only_a, only_b, tuple(key for key in only_a if key in b))


@dataclass(frozen=True)
class PairedResults:
    """What `b` is against `a`, by one metric of both. `unscored`: prompts without a score on one side.

    `p`: of no difference, adjusted (Holm) where it is one of several comparisons.
    """

    a: Result
    b: Result
    metric: str
    comparison: Comparison
    matching: Matching
    unscored: tuple[str, ...]
    p: float
    family: int = 1  # how many comparisons it is one of
    name: str = ""  # among these

    @classmethod
    def of(cls, a: Result, b: Result, metric: str | None = None) -> Self:
        """Raises `Refused` where they have no prompt, metric or reward in common."""
        chosen = metric_of(a, b, metric)
        differing = [key for key in a.scoring if key in b.scoring and a.scoring[key] != b.scoring[key]]
        if differing:
            values = " and ".join(repr(x.scoring[differing[0]]) for x in (a, b))
            raise Refused(
                f"{a.name} and {b.name}: expected the same reward and environment, but these, their options "
                f"or their code differ: {differing[0]} is {values:.300}. {WAY_OUT}"
            )
        matching = Matching.of(a.texts, b.texts)
        if not matching.pairs:
            renamed = f"; {matching.other_text[0]} names another one in each" if matching.other_text else ""
            raise Refused(
                f"{a.name} and {b.name}: expected prompts that both answered, got none{renamed}. {WAY_OUT}"
            )
        pairs = matching.pairs
        scores_a, scores_b = a.scores[chosen], b.scores[chosen]
        before = np.array([scores_a.get(key) for key, _ in pairs], np.float64)  # None is NaN there
        after = np.array([scores_b.get(key) for _, key in pairs], np.float64)
        unscored = tuple(key for (key, _), x in zip(pairs, before + after, strict=True) if math.isnan(x))
        numbers: dict[str, int] = {}
        clusters = [numbers.setdefault(a.clusters.get(key, key), len(numbers)) for key, _ in pairs]
        unknown_a, unknown_b = (
            np.array([side.unscored.get(chosen, {}).get(key, 0.0) for key in keys])
            for side, keys in zip((a, b), zip(*pairs, strict=True), strict=True)
        )
        comparison = compare(before, after, clusters, (unknown_a, unknown_b))
        return cls(
            a, b, chosen, comparison, matching, unscored, comparison.p, name=a.task or b.task or "prompts"
        )

    @property
    def verdict(self) -> Verdict:
        what = "held-out prompts" if HELD_OUT in (self.a.task, self.b.task) else "prompts"
        measure = "mean reward" if self.metric == REWARD else self.metric
        return Verdict.compared(replace(self.comparison, p=self.p), prompts=what, measure=measure)

    @property
    def sentence(self) -> str:
        a, b = (x.name if x.step is None else f"{x.name} at step {x.step}" for x in (self.a, self.b))
        named = f"{self.name}: " if self.family > 1 else ""
        return f"{named}{b} against {a}: {self.verdict.sentence}"

    @property
    def notes(self) -> list[str]:
        """What a reader has to know about the sentence."""
        a, b, x, found, answer = self.a, self.b, self.comparison, self.matching, self.verdict.answer
        copies = f" in {x.clusters} clusters of near-copies" if x.clusters < x.n else ""
        text = f"Matched: {x.n} prompts{copies}."
        if not math.isnan(x.detectable) and answer != "not shown":  # whose sentence says it
            text += f" So many show a difference of {fixed(x.detectable)} or more four times out of five."
        if self.family > 1:
            text += f" p is adjusted for {self.family} comparisons (Holm); alone {chance(x.p)}."
        notes = [text]
        for keys, what in (
            (found.only_a, f"prompts only in {a.name}"),
            (found.only_b, f"prompts only in {b.name}"),
            (self.unscored, "prompts without a score on one side"),
            (a.unreadable, f"records of {a.name} that can't be read"),
            (b.unreadable, f"records of {b.name} that can't be read"),
        ):
            if keys:
                notes.append(f"Not compared: {len(keys)} {what} ({_named(keys)}).")
        if found.other_text:
            notes.append(
                f"{len(found.other_text)} of these have the same id on both sides, but another text "
                f"({', '.join(found.other_text[:NAMED])})."
            )
        notes += self._scored()
        if answer == "not shown" and x.low * x.high > 0:
            notes.append(
                f"The interval leaves 0 out, but p of the test ({x.test}) isn't below .05: not shown."
            )
        if max(a.seeds, b.seeds) > 1:
            notes.append(
                f"Rewards are means over seeds ({a.seeds} and {b.seeds}): the interval is that of the "
                "prompts, and the table has the seeds."
            )
        elif a.step is not None or b.step is not None:
            notes.append(
                "This is about these two models: what another seed would give isn't in the interval."
            )
        return notes

    def _scored(self) -> list[str]:
        texts, a, b = [], self.a, self.b
        others = [name for name in a.scores if name in b.scores and name != self.metric]
        if others:
            texts.append(f"Scored by {self.metric}; both have also {', '.join(others)} (--metric NAME).")
        unsaid = [x.name for x in (a, b) if not x.scoring]
        if self.metric == REWARD and unsaid:
            texts.append(
                f"{' and '.join(unsaid)}: the reward isn't recorded there; it has to be the same on both "
                "sides."
            )
        pairs = self.matching.pairs
        prompted = [k for k, other in pairs if k in a.prompted and a.prompted[k] != b.prompted.get(other)]
        if prompted and b.prompted:
            texts.append(
                f"{len(prompted)} of the prompts were worded differently for the two models (template or "
                f"examples), such as {', '.join(prompted[:NAMED])}: the difference is also that of the "
                "wording."
            )
        return texts

    def row(self) -> dict[str, Any]:
        """As JSON; None where unknown. `p` and `verdict` are adjusted for all comparisons."""
        values = {name: getattr(self.comparison, name) for name in ROW} | {"p": self.p}
        known = {k: None if isinstance(x, float) and math.isnan(x) else x for k, x in values.items()}
        return {"name": self.name, **known, "verdict": self.verdict.answer}

    def to_json(self) -> dict[str, Any]:
        """What is behind the row: both sides, what was matched, and what wasn't compared."""
        p = self.comparison.p
        return {
            "name": self.name,
            "a": {"name": self.a.name, "step": self.a.step},
            "b": {"name": self.b.name, "step": self.b.step},
            "metric": self.metric,
            "sentence": self.verdict.sentence,
            "p_alone": None if math.isnan(p) else p,
            "clusters": self.comparison.clusters,
            "only_a": self.matching.only_a,
            "only_b": self.matching.only_b,
            "other_text": self.matching.other_text,
            "unscored": self.unscored,
            "unreadable": [*self.a.unreadable, *self.b.unreadable],
            "notes": self.notes,
        }


def metric_of(a: Result, b: Result, named: str | None) -> str:
    """The metric that is named, or the first one of `a` that `b` has too. Raises `Refused` without one."""
    both = [name for name in a.scores if name in b.scores]
    if named is None and both:
        return both[0]
    if named is not None and named in both:
        return named
    expected = "a metric that both have" if named is None else f"--metric {named} on both sides"
    sides = "; ".join(f"{x.name} has {', '.join(x.scores) or 'none'}" for x in (a, b))
    raise Refused(
        f"{a.name} and {b.name}: expected {expected}, got different scoring: {sides}. What to do: score both "
        "by one metric"
    )


@dataclass(frozen=True)
class PairedSets:
    """Comparisons with the first of several results, whose p are adjusted for their number.

    `notes`: sets that aren't compared, and why.
    """

    pairs: tuple[PairedResults, ...]
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, sides: Sequence[Sequence[Result]], metric: str | None = None) -> Self:
        """`sides`: of each a result a set of prompts. Raises `Refused` where nothing can be compared."""
        pairs: list[PairedResults] = []
        notes: list[str] = []
        first = sides[0]
        for other in sides[1:]:
            same = {result.task: result for result in other}
            matched = [(result, same[result.task]) for result in first if result.task in same]
            if len(first) == len(other) == 1:  # of one set on each side, whatever their names
                matched = [(first[0], other[0])]
            tasks = {result.task for both in matched for result in both}
            for side, against in ((first, other), (other, first)):
                names = [result.task or "(without a name)" for result in side if result.task not in tasks]
                if names:
                    notes.append(
                        f"{len(names)} sets of {side[0].name} aren't in {against[0].name}: {_named(names)}"
                    )
            for a, b in matched:
                try:
                    paired = PairedResults.of(a, b, metric)
                except Refused as error:
                    notes.append(str(error))
                    continue
                name = paired.name if len(sides) == 2 else f"{b.name}: {paired.name}"
                pairs.append(replace(paired, name=name))
        if not pairs:
            raise Refused("\n".join(notes))
        adjusted = holm([pair.comparison.p for pair in pairs])
        family = len(pairs)
        final = [replace(x, p=p, family=family) for x, p in zip(pairs, adjusted, strict=True)]
        return cls(tuple(final), tuple(notes))

    def to_json(self) -> dict[str, Any]:
        return {
            "sets": [pair.row() for pair in self.pairs],
            "matching": [pair.to_json() for pair in self.pairs],
            "not_compared": self.notes,
        }
