"""One sentence at the end of a run: did the model get better?

Rewards, or blind ratings, of the start's and the result's own responses to the same held-out prompts say so.
Without them an off-policy estimate may, from a log's responses, where it is possible. Where there is none of
these the sentence says that, whatever else was measured: a model can rank logged responses well while what it
writes has become gibberish.
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
    """By the last row after the start that has the metric, `GAIN` or `LOGGED`; None where none has it.

    It has the `by`, `gain`, `COMPARED`, `step` and `kl` of `Verdict.to_json`, and the `phase` of the row.
    """
    for row in reversed(run.rows):
        if row.get(metric) is not None and row["step"]:
            numbers = {name: row.get(f"{metric}_{name}") for name in COMPARED}
            by = "reward" if metric == GAIN else "off-policy"
            about = {"by": by, "step": row["step"], "phase": row["phase"], "kl": row.get("eval_kl_ref")}
            return {"gain": row[metric], **numbers, **about}
    return None


def difference_text(
    x: Mapping[str, Any],
    steps: int | None,
    prompts: str = "held-out prompts",
    measure: str = "mean reward",
) -> str:
    """A difference with its interval, and what was compared.

    `x`: as of `latest_difference`. `steps`: of the run, None apart from one.
    """
    answer, at = verdict_of(x["p"], x["gain"]), "" if x["step"] == steps else f" at step {x['step']}"
    on = f"{x['n']} {prompts}"
    if x["clusters"] is not None and x["clusters"] < x["n"]:
        on += f" in {x['clusters']} clusters of near-copies"
    unknown = ""
    if x["unknown_a"] or x["unknown_b"]:
        before, after = percent(x["unknown_a"] or 0.0), percent(x["unknown_b"] or 0.0)
        counted = "which differ" if x["p"] is None else "in the interval as the worst and the best"
        unknown = f"; unknown are {before} of the rewards before and {after} after, {counted}"
    sign = -1 if answer == "worse" else 1
    size = fixed(sign * x["gain"])
    if x["low"] is not None and x["high"] is not None:
        low, high = sorted((sign * x["low"], sign * x["high"]))
        size += f" ({fixed(low)} to {fixed(high)}"
        if x["p"] is not None and x["p"] >= LEVEL and not low <= 0 <= high:
            size += f", {chance(x['p'])}"  # slightly above .05, which the interval doesn't say
        size += ")"
    if answer != "not shown":
        return f"{answer.capitalize()}{at} by {size} in {measure} on {on}, {chance(x['p'])}{unknown}"
    if x["gain"] == x["low"] == x["high"] == 0:
        return f"Not shown better{at}: the {measure} is the same on each of {on}"
    power = ""
    if x["detectable"] is not None:
        power = f", which show {fixed(x['detectable'])} or more four times out of five"
    elif x["by"] == "reward":
        power = ", too few to show a difference"
    return f"Not shown better{at}: the {measure} changed by {size} on {on}{power}{unknown}"


@dataclass(frozen=True)
class Verdict:
    """The answer, the sentence that says it with its interval, and the measurement behind it, if any.

    `measured`: as of `latest_difference`.
    """

    answer: Answer
    sentence: str
    measured: Mapping[str, Any] | None = None
    ratings: Ratings | None = None

    @classmethod
    def of(cls, run: RunData) -> Verdict:
        """From the run's last measurement against its start; without one from blind ratings; without these
        from the last off-policy estimate."""
        found = latest_difference(run, GAIN)
        if found is None and (ratings := Ratings.load(run.folder)):
            at = "" if ratings.step in (None, run.steps) else f" at step {ratings.step}"
            return cls.rated(ratings, at=at)
        found = found or latest_difference(run, LOGGED)
        if found is None:
            way_out = SET_ASIDE.format(run.set_aside) if run.set_aside else WAY_OUT
            said = f"Not measured whether the model got better{_ranking(run)}. {way_out}."
            return cls("not measured", said)
        sentence = f"{difference_text(found, run.steps)}{_kl_text(found, run)}."
        best = run.best_model
        if found["by"] == "off-policy":
            sentence += f" {ESTIMATED}"
        elif best is not None and best.metric == "eval_reward" and best.step != found["step"]:
            sentence += (  # what flatters a model that these prompts chose
                f" The model in best/ is of step {best.step}, which was chosen on these "
                "prompts; measure it on others (agro eval)"
            )
        return cls(verdict_of(found["p"], found["gain"]), sentence, found)

    @classmethod
    def compared(
        cls, comparison: Comparison, prompts: str = "held-out prompts", measure: str = "mean reward"
    ) -> Verdict:
        """Of two results that were measured apart from a run, by a `measure` of these `prompts`."""
        found = {name: none_if_nan(getattr(comparison, name)) for name in COMPARED}
        found |= {"by": "reward", "gain": comparison.difference, "step": None}
        text = difference_text(found, None, prompts, measure)
        return cls(verdict_of(found["p"], found["gain"]), f"{text}.", found)

    @classmethod
    def rated(cls, ratings: Ratings, at: str = "") -> Verdict:
        """By blind ratings of a result, `at` a step, and of the start."""
        answer = verdict_of(ratings.p, ratings.wins - ratings.losses)
        rest = f"; {_times(ratings.ties, 'tie')}"
        if ratings.unrated:
            rest += f", {_times(ratings.unrated, 'row')} left empty"
        if ratings.interval is None:
            neither = "blind ratings preferred neither the result nor the start"
            return cls(answer, f"Not shown better{at}: {neither}{rest}.", ratings=ratings)
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
        names = ("step", "by", "gain", *COMPARED, "kl")
        numbers = {name: (self.measured or {}).get(name) for name in names}
        if self.ratings is not None:
            numbers["by"] = "ratings"
        ratings = None if self.ratings is None else self.ratings.to_json()
        return {"answer": self.answer, "sentence": self.sentence, **numbers, "ratings": ratings}


def _times(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _kl_text(difference: Mapping[str, Any], run: RunData) -> str:
    """The KL to the reference. Where that isn't the start, which the gain is against, both are named."""
    kl, phase = difference["kl"], difference["phase"]
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
