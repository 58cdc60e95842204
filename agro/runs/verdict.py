"""One sentence at the end of a run: did the model get better?

Only rewards, or blind ratings, of the start's and the result's own responses to the same held-out prompts say
so. Where neither was measured the sentence says that, whatever else was: a model can rank logged responses
well while what it writes has become gibberish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from agro.io.numbers import fixed, percent
from agro.rollout.paired import Comparison
from agro.runs.metrics import GAIN
from agro.runs.ratings import Ratings
from agro.runs.rundata import Row, RunData

Answer = Literal["better", "worse", "not shown", "not measured"]
LEVEL = 0.05  # a smaller p counts as shown
NUMBERS = ("low", "high", "p", "n", "clusters", "detectable")  # of a comparison


@dataclass(frozen=True)
class Verdict:
    """The answer, the sentence that says it with its interval, and the measurement behind it, if any."""

    answer: Answer
    sentence: str
    measured: Row | None = None
    ratings: Ratings | None = None

    @classmethod
    def of(cls, run: RunData) -> Verdict:
        """From the run's last measurement against its start; without one, from blind ratings."""
        for row in reversed(run.rows):
            if row.get(GAIN) is not None and row["step"]:
                sentence = f"{_compared(row, run.steps)}{_distance(row)}.{_chosen(run, row)}"
                return cls(_answer(row), sentence, row)
        ratings = Ratings.load(run.folder)
        if ratings is not None:
            at = "" if ratings.step in (None, run.steps) else f" at step {ratings.step}"
            return cls.rated(ratings, at=at)
        return cls("not measured", f"Not measured whether the model got better{_ranking(run)}. {WAY_OUT}")

    @classmethod
    def compared(cls, comparison: Comparison) -> Verdict:
        """Of a result against its start, which were measured apart from the run."""
        numbers = {name: getattr(comparison, name) for name in NUMBERS}
        row: Row = {"step": None, GAIN: comparison.difference}
        row |= {f"{GAIN}_{name}": None if math.isnan(x) else x for name, x in numbers.items()}
        return cls(_answer(row), f"{_compared(row, None)}.", row)

    @classmethod
    def rated(cls, ratings: Ratings, against: str = "the start", at: str = "") -> Verdict:
        """By blind ratings of a result `at` a step and of what it was compared with."""
        answer: Answer = "not shown"
        if ratings.p < LEVEL:
            answer = "better" if ratings.wins > ratings.losses else "worse"
        return cls(answer, _preference(ratings, answer, against, at), ratings=ratings)

    def to_json(self) -> dict[str, Any]:
        """Answer, sentence and numbers; None where unknown.

        `gain`: mean reward at `step` minus the start's on `n` held-out prompts, which are in so many
        `clusters` of near-copies, with its 95 % interval `low` to `high`; `p`: of no difference;
        `detectable`: the gain that would have been shown with a probability of 80 %; `kl`: to the reference,
        in nats per response. `ratings`: where blind ratings gave the answer.
        """
        row = self.measured or {}
        numbers = {name: row.get(f"{GAIN}_{name}") for name in NUMBERS}
        return {
            "answer": self.answer,
            "sentence": self.sentence,
            "step": row.get("step"),
            "gain": row.get(GAIN),
            **numbers,
            "kl": row.get("eval_kl_ref"),
            "ratings": None if self.ratings is None else self.ratings.to_json(),
        }


WAY_OUT = (
    "What to do: data.eval_prompts and a reward compare it with the start, or agro eval RUN --against start "
    "--prompts FILE --reward NAME; without a reward rate both blind, with --blind sheet.csv in place of "
    "--reward NAME"
)


def _answer(row: Row) -> Answer:
    p = row.get(f"{GAIN}_p")
    if p is None or p >= LEVEL:
        return "not shown"
    return "better" if row[GAIN] > 0 else "worse"


def _compared(row: Row, steps: int | None) -> str:
    """The difference with its interval, and what was compared."""
    answer, prompts = _answer(row), f"{row[f'{GAIN}_n']} held-out prompts"
    clusters = row.get(f"{GAIN}_clusters")
    if clusters is not None and clusters < row[f"{GAIN}_n"]:
        prompts += f" in {clusters} clusters of near-copies"
    at = "" if row["step"] == steps else f" at step {row['step']}"
    if answer == "not shown":
        least = row.get(f"{GAIN}_detectable")
        power = "" if least is None else f", which show {fixed(least)} or more four times out of five"
        change = f"the mean reward changed by {_size(row, 1)}"
        return f"Not shown better{at}: {change} on {prompts}{power}"
    chance = _chance(row[f"{GAIN}_p"])
    size = _size(row, 1 if answer == "better" else -1)
    return f"{answer.capitalize()}{at} by {size} in mean reward on {prompts}, {chance}"


def _chance(p: float) -> str:
    if p >= 1:
        return "p = 1"
    return "p < .001" if p < 0.001 else f"p = {p:.3f}".replace("0.", ".", 1)


def _preference(ratings: Ratings, answer: Answer, against: str, at: str) -> str:
    """Who was preferred on how many prompts, and what else was rated."""
    rest = f"; {_times(ratings.ties, 'tie')}"
    if ratings.unrated:
        rest += f", {_times(ratings.unrated, 'row')} left empty"
    if ratings.interval is None:
        return f"Not shown better{at}: blind ratings preferred neither the result nor {against}{rest}."
    low, high = ratings.interval
    preferred, prefix = ratings.wins, f"Preferred to {against}{at}"
    if answer == "worse":
        low, high, preferred = 1 - high, 1 - low, ratings.losses
        prefix = f"Worse{at}: {against} was preferred"
    if answer == "not shown":
        prefix = f"Not shown better{at}: preferred to {against}"
    share = f"{percent(preferred / ratings.decided)}, {percent(low)} to {percent(high)}"
    prompts = f"{preferred} of {ratings.decided} held-out prompts by blind ratings ({share})"
    return f"{prefix} on {prompts}, {_chance(ratings.p)}{rest}."


def _times(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _size(row: Row, sign: int) -> str:
    """The difference, times `sign`, and its interval where it is known."""
    interval = ""
    if row.get(f"{GAIN}_low") is not None:
        low, high = sorted(sign * row[f"{GAIN}_{end}"] for end in ("low", "high"))
        interval = f" ({fixed(low)} to {fixed(high)})"
    return f"{fixed(sign * row[GAIN])}{interval}"


def _distance(row: Row) -> str:
    kl = row.get("eval_kl_ref")
    return "" if kl is None else f"; KL to the reference {fixed(kl)} nats"


def _chosen(run: RunData, row: Row) -> str:
    """What flatters a model that these prompts chose."""
    best = run.best_model
    if best is None or best.metric != "eval_reward" or best.measured.step == row["step"]:
        return ""
    return (
        f" The model in best/ is of step {best.measured.step}, which was chosen on these prompts; measure it "
        "on others (agro eval)"
    )


def _ranking(run: RunData) -> str:
    """What else was measured, and that it doesn't answer the question."""
    if run.latest("eval_auc") is None:
        return ""
    return (
        ": the only held-out measurement is how it ranks logged responses (AUC), which says nothing about "
        "what it writes"
    )
