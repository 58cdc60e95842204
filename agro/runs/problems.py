"""Problems of a run, found in its metrics: one list for the page, the model card and the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median, stdev
from typing import NamedTuple, get_args

from agro.config import DataConfig, RunConfig
from agro.io.numbers import count, fixed, is_known
from agro.objectives import get
from agro.objectives.needs import REWARD
from agro.runs.rundata import GAIN, Row, RunData

COUNTED = {
    "skipped": "updates skipped",
    "rolled_back": "rollbacks to a checkpoint",
    "rewards_failed": "rewards that failed",
    "requests_failed": "requests to the engine that failed",
    "dropped": "responses dropped",
    "eval_unscored": "held-out without a reward",
}
WINDOW = 20  # steps
# Multiple of the KL that pays: methods that gain on a log end at up to 2.4 nats if about 1 pays
# (reproductions/offline), those that write gibberish at 20 and more.
FAR = 3.0
FEW = 10  # groups: a mean over fewer says nothing
FALLEN = math.log(10)  # nats: the best stored responses are ten times less probable
RATIO = 100.0
HALF = 0.5  # share of its promised gain that the best single step keeps
STILL = 0.01  # nats: no response became 1% more or less probable
# Ratio above which rewards make up less than 1/(1 + 10²), 1%, of the variance of R if log π/π_ref is
# independent of them. The rest is noise.
DWARFED = 10.0
PATIENCE = 3  # steps in a row without a signal that cause a warning; single ones are common
SPREAD = (
    "where other groups of the store have rewards that differ: data.spread = true, which draws only those. "
    "Otherwise "
)
# What to do if nothing can be learned from a step, by reason (metric `no_signal`), for terminal and page.
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
    """A problem in a few words, and in sentences with the way out.

    `serious`: whether it is the headline, because the policy is worse than a good held-out number suggests.
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
    """Steps that lacked something: `count` of `steps`, at most `in_a_row` in a row, and the reasons."""

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
    """The problems of a run, serious ones first."""
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
            is_still = name == "skipped" and run.total("lr") is None
            detail = "No update moved the policy" if is_still else ""
            report.append(Problem(title, count(total), detail, serious=is_still))
    signal, share = without_signal(run), without_share(run)
    if signal is not None and signal.is_said:
        value = f"{signal.text}, {signal.reasons[0]}"
        report.append(Problem("steps from which nothing could be learned", value))
    if share is not None and share.is_said:
        report.append(Problem("steps with less of the store than data.replay", share.text))
    return sorted(report, key=lambda problem: not problem.serious)


def phase_problems(rows: Sequence[Row], config: RunConfig) -> list[Problem]:
    """The problems at the end of a phase; `rows`: its metrics so far, in order.

    The distance from the reference isn't a problem if a run on stored samples has raised the held-out reward,
    or if the objective uses no rewards: to imitate is to leave a reference that writes otherwise.
    """
    report = [_best_that_fall(rows, config), _stillness(rows, config), _overshoot(rows, config)]
    measured_alone = [p.label or p.name for p in config.reward.functions if not p.weight and p.gate is None]
    title = config.reward.title
    if any(title in (row.get("reward_parts") or {}) for row in rows):  # in addition to a source's reward
        measured_alone = [title]
    report += [_parted(rows, name) for name in measured_alone]
    compared = _compared(rows)
    has_risen = compared is not None and compared[f"{GAIN}_low"] > 0
    if REWARD in get(config.objective.name).needed(config.objective.options) and not has_risen:
        report += [_distance(rows, config), _ratios(rows, config)]
    return [problem for problem in report if problem is not None]


def _compared(rows: Sequence[Row]) -> Row | None:
    """The latest paired comparison with the start whose interval is known."""
    return next((row for row in reversed(rows) if row.get(f"{GAIN}_low") is not None), None)


def _recent(rows: Sequence[Row], name: str) -> list[float]:
    """The known values of a metric in the last steps."""
    return [row[name] for row in rows[-WINDOW:] if row.get(name) is not None]


def _kl_error(row: Row) -> float:
    """The standard error of `eval_kl_ref`, or 0."""
    error = row.get("eval_kl_ref_se")
    return error if error is not None and is_known(error) else 0.0


def _best_that_fall(rows: Sequence[Row], config: RunConfig) -> Problem | None:
    """A problem if log π/π_ref of the best stored responses is below 0 by more than its error."""
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
    """A problem if the KL to the reference exceeds that of a policy that writes only the best responses."""
    evaluated = [number for number, row in enumerate(rows) if row.get("eval_kl_ref") is not None]
    if not evaluated:
        return None
    row, earlier = rows[evaluated[-1]], rows[: evaluated[-1] + 1]
    if row["step"] == 0 or row.get("staleness_mean") is not None:
        return None
    limit, groups = row.get("eval_kl_of_best"), row.get("eval_auc_groups")
    if limit is None:  # no groups are held out: use the last steps
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
    """A problem if the mean π/π_ref of stored responses is far above 1, its mean on the reference's own."""
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
    """A problem if a part that isn't trained on has fallen since its best value, and the reward has risen.

    Compares evaluations on held-out prompts if there are two, otherwise means over `WINDOW` steps, counted
    back from the last one. The part has to fall by 3 standard errors, since its best mean is selected, and
    the reward to rise by 2.
    """
    course = []
    for row in rows:
        part, error = ((row.get(f"eval_reward_parts{end}") or {}).get(name) for end in ("", "_se"))
        if part is not None and error is not None and row.get("eval_reward_se") is not None:
            course.append(_Measured(row["step"], row["eval_reward"], row["eval_reward_se"], part, error))
    if len(course) < 2:
        course = []
        measured = [
            (row["step"], row["reward_mean"], row["reward_parts"][name])
            for row in rows
            if row.get("reward_mean") is not None and (row.get("reward_parts") or {}).get(name) is not None
        ]
        for end in range(len(measured), WINDOW - 1, -WINDOW):
            steps, rewards, parts = zip(*measured[end - WINDOW : end], strict=True)
            errors = [stdev(values) / math.sqrt(WINDOW) for values in (rewards, parts)]
            course.insert(0, _Measured(steps[-1], fmean(rewards), errors[0], fmean(parts), errors[1]))
    if len(course) < 2:
        return None
    latest, best = course[-1], max(course[:-1], key=lambda point: point.part)
    fall, rise = best.part - latest.part, latest.reward - best.reward
    has_fallen = fall > 3 * math.hypot(best.part_se, latest.part_se)
    if not has_fallen or rise <= 2 * math.hypot(best.reward_se, latest.reward_se):
        return None
    value = f"{name} fell by {fall:.3g} since step {best.step}, while the reward rose by {rise:.3g}"
    detail = (
        f"{value}: what is trained on and what {name} measures have parted, so more training makes "
        f"{name} worse. What to do: the model of step {best.step} (train.checkpoint_every, or "
        "evaluate.keep_best), a larger objective.beta, or a better reward"
    )
    return Problem("over-optimized", value, detail, serious=True)


def _stillness(rows: Sequence[Row], config: RunConfig) -> Problem | None:
    """A problem if the policy still equals the reference after many updates with something to learn."""
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
    """The median share of the promised gain that the last steps kept; None if too few are known.

    A step of length α gains αp − ½κα² of the promised αp: the share is 1 − ακ/2p, a half at the largest gain.
    The median is used since a promise near 0, as of a step along older gradients, can have any share.
    """
    recorded = [row for row in rows[-WINDOW:] if row.get("kept") is not None and row["promised"] > 0]
    return median(row["kept"] / row["promised"] for row in recorded) if len(recorded) >= FEW else None


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
    """The setting that keeps a policy which trains on stored data from leaving it."""
    entry = get(config.objective.name)
    option = entry.options.model_fields.get("weight")
    can_weigh = option is not None and "reference" in get_args(option.annotation)
    if can_weigh and (entry.defaults() | config.objective.options)["weight"] != "reference":
        return 'objective.weight = "reference"'
    return toward_reference(row.get("kl_to_reward_spread"))


def toward_reference(ratio: float | None) -> str:
    """The setting that keeps a policy nearer to the reference. `ratio`: `kl_to_reward_spread`, or None.

    If βρ already dwarfs the rewards, a larger β would only make them count less.
    """
    if ratio is not None and ratio > DWARFED:
        return "a lower train.lr"
    return "a larger objective.beta or a lower train.lr"


def way_out(reason: str, data: DataConfig) -> str:
    """What to do about a reason, a key of `WAYS_OUT`; `data`: the phase's section."""
    could_spread = "reward" in reason and data.draws_stored and not data.spread
    return (SPREAD if could_spread else "") + WAYS_OUT[reason]


def without_signal(run: RunData) -> Shortfall | None:
    """The steps from which nothing could be learned; None if that wasn't recorded."""
    return _shortfall([row["no_signal"] for row in run.rows if "no_signal" in row and row["step"]])


def without_share(run: RunData) -> Shortfall | None:
    """The steps for which the store had too few groups; None if that wasn't recorded."""
    missing = [row["replay_missing"] for row in run.rows if row.get("replay_missing") is not None]
    return _shortfall(["too few groups" if groups else None for groups in missing])


def _shortfall(reasons: Sequence[str | None]) -> Shortfall | None:
    """The shortfall, if steps were recorded. `reasons`: one per step, None if it lacked nothing."""
    if not reasons:
        return None
    counts = Counter(filter(None, reasons))
    names = tuple(reason for reason, _ in counts.most_common())
    in_a_row = max((len(list(same)) for lacks, same in groupby(reasons, bool) if lacks), default=0)
    return Shortfall(counts.total(), len(reasons), in_a_row, names)
