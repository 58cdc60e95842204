"""One sentence at the end of a run: did the model get better?

Rewards, or blind ratings, of the start's and the result's own responses to the same held-out prompts say so.
Without them an off-policy estimate may, from a log's responses, where it is possible. Where there is none of
these the sentence says that, whatever else was measured: a model can rank logged responses well while what it
writes has become gibberish.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from agro.errors import Refused
from agro.io.files import write
from agro.io.numbers import chance, fixed, none_if_nan, percent
from agro.runs.metrics import GAIN, LOGGED
from agro.runs.rundata import RunData
from agro.stats import sequential
from agro.stats.blind import Test
from agro.stats.intervals import clopper_pearson
from agro.stats.off_policy import LEAST
from agro.stats.paired import LEVEL, Comparison, mcnemar, verdict_of

Answer = Literal["better", "worse", "not shown", "not measured"]
COUNTS = ("wins", "losses", "ties", "unrated")
NUMBERS = ("low", "high", "p", "n", "clusters", "detectable", "unknown_a", "unknown_b")  # of a comparison
RATE = "agro rate RUN{} shows a person the answers of both, blind, and says when it is decided"
ESTIMATED = (
    "This is an off-policy estimate from responses of the log, not of the model's own; agro eval RUN "
    f"--against start compares these with a reward, or {RATE.format('')}"
)
WAY_OUT = (
    "What to do: data.eval_prompts and a reward compare it with the start, or agro eval RUN --against start "
    f"--prompts FILE --reward NAME; without a reward {RATE.format(' --prompts FILE')}"
)
SET_ASIDE = (
    "What to do: agro eval RUN --against start --reward NAME compares the answers to the {} held-out prompts "
    f"that the run set aside; without a reward {RATE.format('')}"
)


@dataclass(frozen=True)
class Ratings:
    """Blind ratings, kept in ratings.json: on how many prompts the result was preferred (`wins`), the start,
    neither; `unrated`: rows left empty.

    `step`: the run's, when the responses were sampled; None for a model that isn't the run's own. `test`:
    "sequential" where whoever rated saw after each rating what is known, and could stop (`agro rate`).
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
        """`ratings`: [M], 1, −1, 0 or NaN a prompt; see `agro.stats.blind.read_ratings`."""
        wins, losses, ties = (int((ratings == value).sum()) for value in (1, -1, 0))
        return cls(wins, losses, ties, int(np.isnan(ratings).sum()), step, test)

    @property
    def decided(self) -> int:
        """Prompts without ties."""
        return self.wins + self.losses

    @property
    def p(self) -> float:
        """Of no difference over prompts without ties, two-sided: the exact sign test, or 1/E at any stop."""
        if self.test == "sequential":
            return sequential.p_value(self.wins, self.losses)
        if self.decided < 2:
            return 1.0
        return mcnemar(np.repeat([1.0, -1.0], [self.wins, self.losses]))

    @property
    def share(self) -> float | None:
        """Of the prompts without ties, where the result was preferred."""
        return self.wins / self.decided if self.decided else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % of that share, exact as the test: without ½ where p is below .05."""
        if not self.decided:
            return None
        if self.test == "sequential":
            return sequential.interval(self.wins, self.losses)
        return clopper_pearson(self.wins, self.decided)

    def to_json(self) -> dict[str, Any]:
        """Counts, the share with its interval, p and its test; None where unknown."""
        low, high = self.interval or (None, None)
        counts = {name: getattr(self, name) for name in COUNTS}
        return {**counts, "share": self.share, "low": low, "high": high, "p": self.p, "test": self.test}

    def save(self, folder: Path) -> None:
        write(folder / "ratings.json", json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Ratings | None:
        """Of a run; None where it has none. Raises `Refused` for a file that isn't what `save` writes."""
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


@dataclass(frozen=True)
class Difference:
    """What was measured of the result against the start, as in `Comparison`; None where it is unknown.

    `step`: the result's; None apart from a run. `kl`: to the reference, in nats per response.
    """

    by: Literal["reward", "off-policy"]
    gain: float
    n: int
    low: float | None
    high: float | None
    p: float | None
    clusters: int | None
    detectable: float | None
    unknown_a: float | None
    unknown_b: float | None
    step: int | None = None
    phase: str = ""
    kl: float | None = None

    @classmethod
    def latest(cls, run: RunData, metric: str) -> Self | None:
        """By the last row after the start that has the metric, `GAIN` or `LOGGED`."""
        for row in reversed(run.rows):
            if row.get(metric) is not None and row["step"]:
                by: Any = "reward" if metric == GAIN else "off-policy"
                numbers: dict[str, Any] = {name: row.get(f"{metric}_{name}") for name in NUMBERS}
                numbers |= {"step": row["step"], "phase": row["phase"], "kl": row.get("eval_kl_ref")}
                return cls(by, row[metric], **numbers)
        return None

    @property
    def answer(self) -> Answer:
        return verdict_of(self.p, self.gain)

    def sentence(
        self, steps: int | None, prompts: str = "held-out prompts", measure: str = "mean reward"
    ) -> str:
        """The difference with its interval, and what was compared. `steps`: of the run."""
        answer, at = self.answer, "" if self.step == steps else f" at step {self.step}"
        on = f"{self.n} {prompts}"
        if self.clusters is not None and self.clusters < self.n:
            on += f" in {self.clusters} clusters of near-copies"
        unknown = ""
        if self.unknown_a or self.unknown_b:
            before, after = percent(self.unknown_a or 0.0), percent(self.unknown_b or 0.0)
            counted = "which differ" if self.p is None else "in the interval as the worst and the best"
            unknown = f"; unknown are {before} of the rewards before and {after} after, {counted}"
        sign = -1 if answer == "worse" else 1
        size = fixed(sign * self.gain)
        if self.low is not None and self.high is not None:
            low, high = sorted((sign * self.low, sign * self.high))
            size += f" ({fixed(low)} to {fixed(high)}"
            if self.p is not None and self.p >= LEVEL and not low <= 0 <= high:
                size += f", {chance(self.p)}"  # slightly above .05, which the interval doesn't say
            size += ")"
        if answer != "not shown":
            assert self.p is not None
            return f"{answer.capitalize()}{at} by {size} in {measure} on {on}, {chance(self.p)}{unknown}"
        if self.gain == self.low == self.high == 0:
            return f"Not shown better{at}: the {measure} is the same on each of {on}"
        power = ""
        if self.detectable is not None:
            power = f", which show {fixed(self.detectable)} or more four times out of five"
        elif self.by == "reward":
            power = ", too few to show a difference"
        return f"Not shown better{at}: the {measure} changed by {size} on {on}{power}{unknown}"


@dataclass(frozen=True)
class Verdict:
    """The answer, the sentence that says it with its interval, and the measurement behind it, if any."""

    answer: Answer
    sentence: str
    measured: Difference | None = None
    ratings: Ratings | None = None

    @classmethod
    def of(cls, run: RunData) -> Verdict:
        """From the run's last measurement against its start; without one from blind ratings; without these
        from the last off-policy estimate."""
        if difference := Difference.latest(run, GAIN):
            sentence = f"{difference.sentence(run.steps)}{_distance(difference, run)}."
            best = run.best_model
            if best is not None and best.metric == "eval_reward" and best.step != difference.step:
                sentence += (  # what flatters a model that these prompts chose
                    f" The model in best/ is of step {best.step}, which was chosen on these "
                    "prompts; measure it on others (agro eval)"
                )
            return cls(difference.answer, sentence, difference)
        if ratings := Ratings.load(run.folder):
            return cls.rated(
                ratings, at="" if ratings.step in (None, run.steps) else f" at step {ratings.step}"
            )
        if difference := Difference.latest(run, LOGGED):
            sentence = f"{difference.sentence(run.steps)}{_distance(difference, run)}. {ESTIMATED}"
            return cls(difference.answer, sentence, difference)
        way_out = SET_ASIDE.format(run.set_aside) if run.set_aside else WAY_OUT
        return cls("not measured", f"Not measured whether the model got better{_ranking(run)}. {way_out}.")

    @classmethod
    def compared(
        cls, comparison: Comparison, prompts: str = "held-out prompts", measure: str = "mean reward"
    ) -> Verdict:
        """Of two results that were measured apart from a run, by a `measure` of these `prompts`."""
        numbers = {name: none_if_nan(getattr(comparison, name)) for name in NUMBERS}
        difference = Difference("reward", comparison.difference, **numbers)
        return cls(difference.answer, f"{difference.sentence(None, prompts, measure)}.", difference)

    @classmethod
    def rated(cls, ratings: Ratings, against: str = "the start", at: str = "") -> Verdict:
        """By blind ratings of a result `at` a step and of what it was compared with."""
        answer = verdict_of(ratings.p, ratings.wins - ratings.losses)
        rest = f"; {_times(ratings.ties, 'tie')}"
        if ratings.unrated:
            rest += f", {_times(ratings.unrated, 'row')} left empty"
        if ratings.interval is None:
            neither = f"blind ratings preferred neither the result nor {against}"
            return cls(answer, f"Not shown better{at}: {neither}{rest}.", ratings=ratings)
        low, high = ratings.interval
        preferred, prefix = ratings.wins, f"Preferred to {against}{at}"
        if answer == "worse":
            low, high, preferred = 1 - high, 1 - low, ratings.losses
            prefix = f"Worse{at}: {against} was preferred"
        if answer == "not shown":
            prefix = f"Not shown better{at}: preferred to {against}"
        share = f"{percent(preferred / ratings.decided)}, {percent(low)} to {percent(high)}"
        on = f"{preferred} of {ratings.decided} held-out prompts by blind ratings ({share})"
        test = " by a test that holds at any stop" if ratings.test == "sequential" else ""
        return cls(answer, f"{prefix} on {on}, {chance(ratings.p)}{test}{rest}.", ratings=ratings)

    def to_json(self) -> dict[str, Any]:
        """Answer, sentence and numbers; None where unknown.

        `gain`: mean reward at `step` minus the start's on `n` held-out prompts, which are in so many
        `clusters` of near-copies, with its 95 % interval `low` to `high`; `p`: of no difference;
        `detectable`: the gain that would have been shown with a probability of 80 %;
        `unknown_a`, `unknown_b`: the shares of rewards of the start and at that step that are unknown;
        `kl`: to the reference, in nats per response. `by`: "reward", "ratings" or "off-policy".
        `ratings`: where these gave the answer.
        """
        names = ("step", "by", "gain", *NUMBERS, "kl")
        numbers = {name: getattr(self.measured, name, None) for name in names}
        if self.ratings is not None:
            numbers["by"] = "ratings"
        ratings = None if self.ratings is None else self.ratings.to_json()
        return {"answer": self.answer, "sentence": self.sentence, **numbers, "ratings": ratings}


def _times(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _distance(difference: Difference, run: RunData) -> str:
    """The KL to the reference. Where that isn't the start, which the gain is against, both are named."""
    kl, phase = difference.kl, difference.phase
    if kl is None:
        return ""
    reference = run.config.phase(phase).policy.reference
    if reference == "start" or (reference == "phase" and phase == run.config.phase_names[0]):
        return f"; KL to the reference {fixed(kl)} nats a response"
    start = "the run's start" if run.config.policy.new is None else "random weights"
    names = {"phase": f"the start of phase {phase}", "model": "the reference model"}
    return (
        f" (against {start}); KL to {names.get(reference, 'a moving reference')} {fixed(kl)} nats a response"
    )


def _ranking(run: RunData) -> str:
    """What else was measured, and that it doesn't answer the question."""
    if run.latest("eval_auc") is None:
        return ""
    text = (
        ": the only held-out measurement is how it ranks logged responses (AUC), which says nothing about "
        "what it writes"
    )
    ess, weight = run.latest(f"{LOGGED}_ess"), run.latest(f"{LOGGED}_weight")
    if ess is None or weight is None:  # the log has no behavior log-probs
        return text
    return (
        f"{text}; the log says nothing either, off-policy: {fixed(ess, 0)} of its responses count, and their "
        f"mean weight is {weight:.2g}, instead of {LEAST:g} or more and 1"
    )
