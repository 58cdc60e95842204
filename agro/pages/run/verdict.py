"""One sentence at the end of a run: did the model get better?

The evidence is rewards, or else blind ratings, of the start's and the result's own responses to the same
held-out prompts, or else an off-policy estimate from a log's responses. Without these the sentence says that
it wasn't measured, whatever else was: a model can rank logged responses well while it writes gibberish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agro.io.numbers import chance, fixed, none_if_nan, percent
from agro.pages.run.ratings import Ratings
from agro.runs.rundata import COMPARED, GAIN, LOGGED, RunData
from agro.stats.off_policy import LEAST
from agro.stats.paired import LEVEL, Comparison, verdict_of

Answer = Literal["better", "worse", "not shown", "not measured"]
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


def latest_difference(run: RunData, metric: str) -> dict[str, Any] | None:
    """Return the last row's difference to the start by a metric, `GAIN` or `LOGGED`; None if no row has it.

    It has the `by`, `gain`, `COMPARED`, `step` and `kl` of `Verdict.to_json`, and the `phase` of the row.
    """
    for row in reversed(run.rows):
        if row.get(metric) is not None and row["step"]:
            numbers = {name: row.get(f"{metric}_{name}") for name in COMPARED}
            source = "reward" if metric == GAIN else "off-policy"
            details = {"by": source, "step": row["step"], "phase": row["phase"], "kl": row.get("eval_kl_ref")}
            return {"gain": row[metric], **numbers, **details}
    return None


def difference_text(
    x: Mapping[str, Any],
    steps: int | None,
    prompts: str = "held-out prompts",
    measure: str = "mean reward",
) -> str:
    """Format a difference with its interval, and what was compared.

    `x`: as from `latest_difference`. `steps`: the run's steps; None outside of a run.
    """
    answer, step_text = verdict_of(x["p"], x["gain"]), "" if x["step"] == steps else f" at step {x['step']}"
    on = f"{x['n']} {prompts}"
    if x["clusters"] is not None and x["clusters"] < x["n"]:
        on += f" in {x['clusters']} clusters of near-copies"
    unknown = ""
    if x["unknown_a"] or x["unknown_b"]:
        start_share, end_share = percent(x["unknown_a"] or 0.0), percent(x["unknown_b"] or 0.0)
        counted = "which differ" if x["p"] is None else "in the interval as the worst and the best"
        unknown = f"; unknown are {start_share} of the rewards before and {end_share} after, {counted}"
    sign = -1 if answer == "worse" else 1
    size = fixed(sign * x["gain"])
    if x["low"] is not None and x["high"] is not None:
        low, high = sorted((sign * x["low"], sign * x["high"]))
        size += f" ({fixed(low)} to {fixed(high)}"
        if x["p"] is not None and x["p"] >= LEVEL and not low <= 0 <= high:
            size += f", {chance(x['p'])}"  # slightly above .05, unlike the interval suggests
        size += ")"
    if answer != "not shown":
        return f"{answer.capitalize()}{step_text} by {size} in {measure} on {on}, {chance(x['p'])}{unknown}"
    if x["gain"] == x["low"] == x["high"] == 0:
        return f"Not shown better{step_text}: the {measure} is the same on each of {on}"
    power = ""
    if x["detectable"] is not None:
        power = f", which show {fixed(x['detectable'])} or more four times out of five"
    elif x["by"] == "reward":
        power = ", too few to show a difference"
    return f"Not shown better{step_text}: the {measure} changed by {size} on {on}{power}{unknown}"


@dataclass(frozen=True)
class Verdict:
    """The answer, its sentence with an interval, and the measurement behind it, if any.

    `measured`: as from `latest_difference`.
    """

    answer: Answer
    sentence: str
    measured: Mapping[str, Any] | None = None
    ratings: Ratings | None = None

    @classmethod
    def of(cls, run: RunData) -> Verdict:
        """Use the run's last measurement against its start, else blind ratings, else the last off-policy
        estimate."""
        difference = latest_difference(run, GAIN)
        if difference is None and (ratings := Ratings.load(run.folder)):
            at = "" if ratings.step in (None, run.steps) else f" at step {ratings.step}"
            return cls.rated(ratings, at=at)
        difference = difference or latest_difference(run, LOGGED)
        if difference is None:
            way_out = SET_ASIDE.format(run.set_aside) if run.set_aside else WAY_OUT
            sentence = f"Not measured whether the model got better{_ranking(run)}. {way_out}."
            return cls("not measured", sentence)
        sentence = f"{difference_text(difference, run.steps)}{_kl_text(difference, run)}."
        best = run.best_model
        if difference["by"] == "off-policy":
            sentence += f" {ESTIMATED}"
        elif best is not None and best.metric == "eval_reward" and best.step != difference["step"]:
            sentence += (  # the model that these prompts chose is flattered by them
                f" The model in best/ is from step {best.step}, which was chosen on these "
                "prompts; measure it on others (agro eval)"
            )
        return cls(verdict_of(difference["p"], difference["gain"]), sentence, difference)

    @classmethod
    def compared(
        cls, comparison: Comparison, prompts: str = "held-out prompts", measure: str = "mean reward"
    ) -> Verdict:
        """Compare two results outside of a run, by a `measure` on these `prompts`."""
        difference = {name: none_if_nan(getattr(comparison, name)) for name in COMPARED}
        difference |= {"by": "reward", "gain": comparison.difference, "step": None}
        text = difference_text(difference, None, prompts, measure)
        return cls(verdict_of(difference["p"], difference["gain"]), f"{text}.", difference)

    @classmethod
    def rated(cls, ratings: Ratings, at: str = "") -> Verdict:
        """Use blind ratings of a result against the start. `at`: text that names the result's step."""
        answer = verdict_of(ratings.p, ratings.wins - ratings.losses)
        suffix = f"; {_times(ratings.ties, 'tie')}"
        if ratings.unrated:
            suffix += f", {_times(ratings.unrated, 'row')} left empty"
        if ratings.interval is None:
            neither = "blind ratings preferred neither the result nor the start"
            return cls(answer, f"Not shown better{at}: {neither}{suffix}.", ratings=ratings)
        low, high = ratings.interval
        preferred, prefix = ratings.wins, f"Preferred to the start{at}"
        if answer == "worse":
            low, high, preferred = 1 - high, 1 - low, ratings.losses
            prefix = f"Worse{at}: the start was preferred"
        if answer == "not shown":
            prefix = f"Not shown better{at}: preferred to the start"
        share = f"{percent(preferred / ratings.decided)}, {percent(low)} to {percent(high)}"
        on = f"{preferred} of {ratings.decided} held-out prompts by blind ratings ({share})"
        test = " by a test that holds at any stop" if ratings.test == "sequential" else ""
        return cls(answer, f"{prefix} on {on}, {chance(ratings.p)}{test}{suffix}.", ratings=ratings)

    def to_json(self) -> dict[str, Any]:
        """Return answer, sentence and numbers; None where unknown.

        `gain`: mean reward at `step` minus the start's on `n` held-out prompts in `clusters` clusters of
        near-copies, with its 95% interval `low` to `high`; `p`: p-value of no difference;
        `detectable`: the gain that would have been shown with a probability of 80%;
        `unknown_a`, `unknown_b`: the shares of unknown rewards at the start and at that step;
        `kl`: to the reference, in nats per response. `by`: "reward", "ratings" or "off-policy".
        `ratings`: the ratings, if they gave the answer.
        """
        names = ("step", "by", "gain", *COMPARED, "kl")
        numbers = {name: (self.measured or {}).get(name) for name in names}
        if self.ratings is not None:
            numbers["by"] = "ratings"
        ratings = None if self.ratings is None else self.ratings.to_json()
        return {"answer": self.answer, "sentence": self.sentence, **numbers, "ratings": ratings}


def _times(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _kl_text(difference: Mapping[str, Any], run: RunData) -> str:
    """Format the KL to the reference. If that isn't the start, which the gain refers to, name both."""
    kl, phase = difference["kl"], difference["phase"]
    if kl is None:
        return ""
    reference = run.config.phase(phase).policy.reference
    if reference == "start" or (reference == "phase" and phase == run.config.phase_names[0]):
        return f"; KL to the reference {fixed(kl)} nats per response"
    start = "the run's start" if run.config.policy.new is None else "random weights"
    names = {"phase": f"the start of phase {phase}", "model": "the reference model"}
    name = names.get(reference, "a moving reference")
    return f" (against {start}); KL to {name} {fixed(kl)} nats per response"


def _ranking(run: RunData) -> str:
    """Name a ranking measurement, which doesn't answer the question."""
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
