"""What is said of a run at its end: did the model get better, and what was wrong.

Rewards, or blind ratings, of the start's and the result's own responses to the same held-out prompts say
whether it got better. Without them an off-policy estimate may, from a log's responses, where it is possible.
Where there is none of these the verdict says that, whatever else was measured: a model can rank logged
responses well while what it writes has become gibberish.

Problems are found in the metrics: one list for the page, the model card and the terminal.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from agro.config import DataConfig, RunConfig
from agro.errors import Refused
from agro.io.files import write
from agro.io.numbers import chance, count, fixed, is_known, none_if_nan, percent
from agro.objectives import get
from agro.objectives.needs import REWARD
from agro.runs.rundata import GAIN, LOGGED, Row, RunData
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


def latest_difference(run: RunData, metric: str) -> dict[str, Any] | None:
    """By the last row after the start that has the metric, `GAIN` or `LOGGED`; None where none has it.

    It has the `by`, `gain`, `NUMBERS`, `step` and `kl` of `Verdict.to_json`, and the `phase` of the row.
    """
    for row in reversed(run.rows):
        if row.get(metric) is not None and row["step"]:
            numbers = {name: row.get(f"{metric}_{name}") for name in NUMBERS}
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
        found = {name: none_if_nan(getattr(comparison, name)) for name in NUMBERS}
        found |= {"by": "reward", "gain": comparison.difference, "step": None}
        text = difference_text(found, None, prompts, measure)
        return cls(verdict_of(found["p"], found["gain"]), f"{text}.", found)

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


COUNTED = {
    "skipped": "updates skipped",
    "rolled_back": "rollbacks to a checkpoint",
    "rewards_failed": "rewards that failed",
    "requests_failed": "requests to the engine that failed",
    "dropped": "responses dropped",
    "eval_unscored": "held-out without a reward",
}
WINDOW = 20  # steps
# Times the KL that pays: the methods that gain on a log end at up to 2.4 nats where about 1 pays
# (reproductions/offline), those that write gibberish at 20 and more.
FAR = 3.0
FEW = 10  # groups, of fewer than which a mean says nothing
FALLEN = math.log(10)  # nats: the best stored responses are ten times less probable
RATIO = 100.0
HALF = 0.5  # of its promise: what the best single step keeps
STILL = 0.01  # nats: no response became 1 % more or less probable
# Above this the rewards are less than 1/(1 + 10²), 1 %, of the variance of R if log π/π_ref is independent of
# them. The rest is noise.
DWARFED = 10.0
PATIENCE = 3  # steps in a row without a signal that are worth a warning; single ones are common
SPREAD = (
    "where other groups of the store have rewards that differ: data.spread = true, which draws only those. "
    "Otherwise "
)
# Why nothing can be learned from a step (metric `no_signal`), and what to do: for terminal and page.
WAYS_OUT = {
    "no valid response": (
        "see why responses are dropped (dropped_reasons; agro check on the store); correct these records, or "
        "raise train.max_length"
    ),
    "all rewards are 0": (
        "check that the reward of a right response isn't 0 (agro store show, agro score); then easier "
        "prompts, a reward with intermediate values, or sft on good responses first"
    ),
    "all rewards are equal": (
        "see whether the reward tells responses apart (agro store show, agro score): it may be a constant, "
        "or read a column that is always the same. Where each is the highest there is, the task is learned; "
        "else prompts that are solved sometimes, or a reward with intermediate values"
    ),
    "equal rewards within groups": (
        "prompts that are solved sometimes, a reward with intermediate values, or more responses of a prompt "
        "(sampler.n; data.group_size of a store). Where all prompts are solved, the task is learned"
    ),
    "a gradient of 0": (
        "see whether groups of one response are dropped (agro check on the store; agro train feedback takes "
        "them), and whether all weights of responses have fallen to 0; then a new run with a lower train.lr"
    ),
}


@dataclass(frozen=True)
class Problem:
    """A problem in a few words, and as sentences that say what to do.

    `serious`: the policy isn't what a good held-out number suggests, so that the problem is the headline.
    """

    title: str
    value: str
    detail: str = ""
    serious: bool = False

    @property
    def text(self) -> str:
        return f"{self.title}: {self.value}"


@dataclass(frozen=True)
class Shortfall:
    """Steps without something: `count` of `steps`, `in_a_row` of them at most in a row, by reason."""

    count: int
    steps: int
    in_a_row: int
    reasons: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{count(self.count)} of {count(self.steps)}"

    @property
    def is_said(self) -> bool:
        """Whether the run warned about it."""
        return self.in_a_row >= min(PATIENCE, self.steps)


def problems(run: RunData) -> list[Problem]:
    """The problems of a run; those that make the headline first."""
    report: list[Problem] = []
    compared = _compared(run.rows)
    if compared is not None and compared[f"{GAIN}_high"] < 0:
        detail = (
            "The policy is worse than it was before. What to do: a lower train.lr; evaluate.keep_best keeps "
            "the best model, and evaluate.patience ends a run that gets worse"
        )
        reward = compared["eval_reward"]
        value = f"from {fixed(reward - compared[GAIN])} to {fixed(reward)}"
        report.append(Problem("held-out reward fell", value, detail, serious=True))
    phase = run.spans[-1].name
    if phase in run.config.phase_names:
        report += phase_problems([row for row in run.rows if row["phase"] == phase], run.config.phase(phase))
    for name, title in COUNTED.items():
        if total := run.total(name):
            report.append(Problem(title, count(total)))
    signal, share = without_signal(run), without_share(run)
    if signal is not None and signal.is_said:
        value = f"{signal.text}, {signal.reasons[0]}"
        report.append(Problem("steps from which nothing could be learned", value))
    if share is not None and share.is_said:
        report.append(Problem("steps with less of the store than data.replay", share.text))
    return sorted(report, key=lambda problem: not problem.serious)


def phase_problems(rows: Sequence[Row], config: RunConfig) -> list[Problem]:
    """What is wrong at the end of a phase; `rows`: its metrics so far, in order.

    Of a run on others' samples whose held-out reward has risen, the distance from the reference isn't a
    problem, nor is it where the objective uses no rewards: to imitate is to leave a reference that writes
    otherwise.
    """
    report = [_best_that_fall(rows, config), _stillness(rows, config), _overshoot(rows, config)]
    measured_alone = [p.label or p.name for p in config.reward.functions if not p.weight and p.gate is None]
    title = config.reward.title
    if any(title in (row.get("reward_parts") or {}) for row in rows):  # beside one that a source gives
        measured_alone = [title]
    report += [_parted(rows, name) for name in measured_alone]
    compared = _compared(rows)
    has_risen = compared is not None and compared[f"{GAIN}_low"] > 0
    if REWARD in get(config.objective.name).needed(config.objective.options) and not has_risen:
        report += [_distance(rows, config), _ratios(rows, config)]
    return [problem for problem in report if problem is not None]


def _compared(rows: Sequence[Row]) -> Row | None:
    """The last comparison with the start, prompt by prompt, if its interval is known."""
    return next((row for row in reversed(rows) if row.get(f"{GAIN}_low") is not None), None)


def _recent(rows: Sequence[Row], name: str) -> list[float]:
    """The values of a metric in the last steps, where it is known."""
    return [row[name] for row in rows[-WINDOW:] if row.get(name) is not None]


def _kl_error(row: Row) -> float:
    """The standard error of `eval_kl_ref`, 0 where there is none."""
    error = row.get("eval_kl_ref_se")
    return error if error is not None and is_known(error) else 0.0


def _best_that_fall(rows: Sequence[Row], config: RunConfig) -> Problem | None:
    """Where log π/π_ref of the best stored responses is below 0 by more than its error."""
    ratios = [row["log_ratio_best"] for row in rows if row.get("log_ratio_best") is not None][-WINDOW:]
    if len(ratios) < WINDOW:
        return None
    mean, error = fmean(ratios), stdev(ratios) / math.sqrt(WINDOW)
    if mean + 2 * error >= 0:
        return None
    detail = (
        f"over the last {WINDOW} steps log π/π_ref of the best stored responses is {mean:.3g} on average: "
        "the policy moves away from them. That is right only where even the best ones are poor. What to do "
        f"otherwise: {_way_out(rows[-1], config)}"
    )
    value = f"log π/π_ref is {mean:.3g}"
    return Problem("the best stored responses fall", value, detail, serious=mean < -FALLEN)


def _distance(rows: Sequence[Row], config: RunConfig) -> Problem | None:
    """Where the KL to the reference is above that of a policy that writes only the best stored responses."""
    evaluated = [number for number, row in enumerate(rows) if row.get("eval_kl_ref") is not None]
    if not evaluated:
        return None
    row, earlier = rows[evaluated[-1]], rows[: evaluated[-1] + 1]
    if row["step"] == 0 or row.get("staleness_mean") is not None:
        return None
    limit, groups = row.get("eval_kl_of_best"), row.get("eval_auc_groups")
    if limit is None:  # of the last steps, where no groups are held out
        stored = [row for row in earlier if row.get("staleness_mean") is None]
        limits, counts = _recent(stored, "kl_of_best"), _recent(stored, "kl_of_best_groups")
        limit, groups = (fmean(limits) if limits else None), (int(sum(counts)) if counts else None)
    kl = row["eval_kl_ref"]
    if limit is None or kl - 2 * _kl_error(row) <= limit or (groups is not None and groups < FEW):
        return None
    detail = (
        f"eval_kl_ref is {kl:.3g} nats per response. If the reference writes as the store does, a policy "
        f"that writes only the best responses has {limit:.3g} (−log of their share"
        f"{'' if groups is None else f' in {groups} groups'}), and more KL buys nothing that the store "
        f"shows. What to do: {_way_out(rows[-1], config)}"
    )
    value = f"{kl:.3g} nats per response, and the best stored responses have {limit:.3g}"
    return Problem("KL beyond what pays", value, detail, serious=kl > FAR * limit)


def _ratios(rows: Sequence[Row], config: RunConfig) -> Problem | None:
    """Where π/π_ref of stored responses, which is 1 on average for the reference's own, is far above that."""
    on_stored = [row for row in rows if row.get("staleness_mean") is None]
    held_out, trained = _recent(on_stored, "eval_ratio_mean"), _recent(on_stored, "ratio_mean")
    if not held_out and len(trained) < WINDOW:
        return None
    ratio = held_out[-1] if held_out else median(trained)
    if ratio <= RATIO:
        return None
    detail = (
        f"the mean of π/π_ref over stored responses is {ratio:.3g}; it is 1 on samples of the reference. The "
        f"policy has left the reference for a few of them. What to do: {_way_out(rows[-1], config)}"
    )
    return Problem("π/π_ref of stored responses", f"{ratio:.3g} on average", detail, serious=True)


class _Measured(NamedTuple):
    """The reward and one part of it at a step, with their standard errors."""

    step: int
    reward: float
    reward_se: float
    part: float
    part_se: float


def _parted(rows: Sequence[Row], name: str) -> Problem | None:
    """Where a part that isn't trained on has fallen since it was best, and the reward has risen.

    On held-out prompts where these were measured twice, else on `WINDOW` steps each, counted from the last
    one back. The part has to have fallen by 3 standard errors, since its best mean is chosen, and the reward
    to have risen by 2.
    """
    course = []
    for row in rows:
        part, error = ((row.get(f"eval_reward_parts{end}") or {}).get(name) for end in ("", "_se"))
        if part is not None and error is not None and row.get("eval_reward_se") is not None:
            course.append(_Measured(row["step"], row["eval_reward"], row["eval_reward_se"], part, error))
    if len(course) < 2:
        course = []
        known = [
            (row["step"], row["reward_mean"], row["reward_parts"][name])
            for row in rows
            if row.get("reward_mean") is not None and (row.get("reward_parts") or {}).get(name) is not None
        ]
        for end in range(len(known), WINDOW - 1, -WINDOW):
            steps, rewards, parts = zip(*known[end - WINDOW : end], strict=True)
            errors = [stdev(values) / math.sqrt(WINDOW) for values in (rewards, parts)]
            course.insert(0, _Measured(steps[-1], fmean(rewards), errors[0], fmean(parts), errors[1]))
    if len(course) < 2:
        return None
    last, best = course[-1], max(course[:-1], key=lambda at: at.part)
    fall, rise = best.part - last.part, last.reward - best.reward
    has_fallen = fall > 3 * math.hypot(best.part_se, last.part_se)
    if not has_fallen or rise <= 2 * math.hypot(best.reward_se, last.reward_se):
        return None
    value = f"{name} fell by {fall:.3g} since step {best.step}, while the reward rose by {rise:.3g}"
    detail = (
        f"{value}: what is trained on and what {name} measures have parted, so more training makes "
        f"{name} worse. What to do: the model of step {best.step} (train.checkpoint_every, or "
        "evaluate.keep_best), a larger objective.beta, or a better reward"
    )
    return Problem("over-optimized", value, detail, serious=True)


def _stillness(rows: Sequence[Row], config: RunConfig) -> Problem | None:
    """Where the policy is still the reference after many updates, although there was something to learn."""
    trained = [row for row in rows if row.get("loss") is not None and not row.get("no_signal")]
    if config.policy.reference not in ("start", "phase") or len(trained) < config.train.warmup + WINDOW:
        return None
    names = ("log_ratio_best", "log_ratio_worst", "kl_ref")
    moved = [abs(x) for name in names for x in _recent(trained, name)]
    for row in rows[-WINDOW:]:
        if row["step"] != 0 and row.get("eval_kl_ref") is not None:
            moved.append(abs(row["eval_kl_ref"]) + 2 * _kl_error(row))
    if not moved or max(moved) >= STILL:
        return None
    detail = (
        f"after step {rows[-1]['step']} log π/π_ref is still below {STILL:g} nats: the policy is the "
        f"reference. What to do: a larger train.lr (now {config.train.lr}): the smaller the model, the "
        "larger; or more steps"
    )
    return Problem("nothing moves", f"log π/π_ref is below {STILL:g} nats", detail, serious=True)


def kept_share(rows: Sequence[Row]) -> float | None:
    """The median of what the last steps kept of what their gradients promised; None where too few are known.

    A step of length α gains αp − ½κα² of the αp that was promised: the share is 1 − ακ/2p, a half where the
    gain is largest. The median, since a promise near 0, of a step along older gradients, has any share.
    """
    known = [row for row in rows[-WINDOW:] if row.get("kept") is not None and row["promised"] > 0]
    return median(row["kept"] / row["promised"] for row in known) if len(known) >= FEW else None


def _overshoot(rows: Sequence[Row], config: RunConfig) -> Problem | None:
    share = kept_share(rows)
    if share is None or share >= HALF:
        return None
    detail = (
        f"the last steps kept {share:.2g} of what their gradients promised (the median of kept / promised). "
        f"The best single step keeps {HALF}, so shorter ones gain more. What to do: a larger "
        f"train.gain_ratio (now {config.train.gain_ratio}) or a lower train.lr (now {config.train.lr})"
    )
    return Problem("steps overshoot", f"{share:.2g} of what they promise is kept", detail)


def _way_out(row: Row, config: RunConfig) -> str:
    """What keeps a policy that trains on stored data from leaving it."""
    entry = get(config.objective.name)
    option = entry.options.model_fields.get("weight")
    can_weigh = option is not None and "reference" in get_args(option.annotation)
    if can_weigh and (entry.defaults() | config.objective.options)["weight"] != "reference":
        return 'objective.weight = "reference"'
    return toward_reference(row.get("kl_to_reward_spread"))


def toward_reference(ratio: float | None) -> str:
    """What keeps a policy nearer to the reference. `ratio`: `kl_to_reward_spread`, None where it is unknown.

    Where βρ dwarfs the rewards already, a larger β would only let them count less.
    """
    if ratio is not None and ratio > DWARFED:
        return "a lower train.lr"
    return "a larger objective.beta or a lower train.lr"


def way_out(reason: str, data: DataConfig) -> str:
    """What to do about a reason, a key of `WAYS_OUT`; `data`: of the phase."""
    could_spread = "reward" in reason and data.draws_stored and not data.spread
    return (SPREAD if could_spread else "") + WAYS_OUT[reason]


def without_signal(run: RunData) -> Shortfall | None:
    """The steps from which nothing could be learned; None where that wasn't recorded."""
    return _shortfall([row["no_signal"] for row in run.rows if "no_signal" in row and row["step"]])


def without_share(run: RunData) -> Shortfall | None:
    """The steps for which the store had fewer groups than asked for; None where that wasn't recorded."""
    missing = [row["replay_missing"] for row in run.rows if row.get("replay_missing") is not None]
    return _shortfall(["too few groups" if groups else None for groups in missing])


def _shortfall(reasons: Sequence[str | None]) -> Shortfall | None:
    """`reasons`: of each step; None where it lacked nothing."""
    if not reasons:
        return None
    counts = Counter(filter(None, reasons))
    names = tuple(reason for reason, _ in counts.most_common())
    in_a_row = max((len(list(same)) for lacks, same in groupby(reasons, bool) if lacks), default=0)
    return Shortfall(counts.total(), len(reasons), in_a_row, names)
