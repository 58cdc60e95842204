"""The report on a store before training (`agro check`): what its numbers mean for an objective, in sentences
and as JSON, and the recipes that can train on it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from agro.config import PolicyConfig, RunConfig
from agro.errors import Refused
from agro.io.numbers import count, fixed, percent, short, with_error
from agro.io.terminal import first_of
from agro.objectives import Objective, get
from agro.objectives.needs import PAIRS, REWARD, grouping
from agro.pages.store.check_survey import Explaining, StoreSurvey, explaining, spread, survey
from agro.store import Counts, Group, Store
from agro.store.location import Location, url_of
from agro.train import trainable
from agro.train.check import check_config
from agro.train.phases import Phase, options_at
from agro.train.trainable import ScaleConflict, find_scale_conflicts, judged_prompts, kind_of, train_command

if TYPE_CHECKING:
    from agro.pages.store.measurements import Measurements


Level = Literal["problem", "warning", "note"]

# Shares from which a warning is due. They are rules of thumb, not theorems.
MANY_EQUAL = 0.5  # of groups
MANY_REPEATS = 0.3  # of responses
MANY_TRUNCATED = 0.1
FEW_GROUPS = 50
SMALL_ESS = 0.1
UNLIKELY = -3.0  # mean nats per token
SHOWN = 8  # sources listed


@dataclass(frozen=True)
class DataVerdict:
    """A sentence about the data, and what to do; "problem": the objective can't train on them."""

    level: Level
    text: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.todo}".rstrip()


@dataclass(frozen=True)
class Report:
    """The contents of a store, whether an objective can train on it, and a model's measurements of it."""

    objective: str
    counts: Counts
    survey: StoreSurvey
    problem: str = ""  # why the objective can't train on it
    scales_apart: list[ScaleConflict] = field(default_factory=list)  # sources with different scales
    measured: Measurements | None = None
    options: dict[str, Any] = field(default_factory=dict)  # options of the objective that aren't its defaults
    explaining: Explaining | None = None  # a field that explains rewards of single responses
    recipe: str = ""  # chosen for the data, if no objective was requested
    recommended: Sequence[Recommendation] = ()  # recipes, the best first

    @property
    def trainable(self) -> bool:
        return not self.problem

    @property
    def sources(self) -> list[str]:
        """Sources, the most frequent first."""
        return sorted(self.survey.sources, key=lambda name: (-self.survey.sources[name].counts["rows"], name))

    @cached_property
    def verdicts(self) -> list[DataVerdict]:
        """Verdicts, the worst first."""
        levels = ("problem", "warning", "note")
        verdicts = [*_data_verdicts(self), *_model_verdicts(self)]
        return sorted(verdicts, key=lambda verdict: levels.index(verdict.level))

    def to_json(self) -> dict[str, Any]:
        values = self.counts.to_json() | self.survey.to_json()
        values |= {
            "objective": self.objective,
            "recipe": self.recipe or None,
            "trainable": self.trainable,
            "problem": self.problem or None,
            "scales_apart": [
                {"sources": [a.lower.source, a.higher.source], "groups": a.groups} for a in self.scales_apart
            ],
        }
        if self.explaining is not None:
            values["explaining"] = asdict(self.explaining)
        if self.measured is not None:
            values |= self.measured.values
        values["recommended"] = [each.to_json() for each in self.recommended]
        verdicts_json = [{"level": v.level, "text": v.text, "todo": v.todo} for v in self.verdicts]
        return values | {"verdicts": verdicts_json}

    def __str__(self) -> str:
        """Format a summary, then the verdicts, without the recommendations."""
        lines = list(survey_lines(self))
        for name in self.sources[:SHOWN]:
            source = self.survey.sources[name]
            text = f"{count(source.counts['rows'])} {'/'.join(sorted(source.roles))}"
            rewards = spread(source.rewards)
            if rewards["count"]:
                ends = f"{short(rewards['min'])} to {short(rewards['max'])}"
                text += f", reward {short(rewards['mean'])} ({ends})"
            lines.append((f"  {name:.40}", text))
        if len(self.sources) > SHOWN:
            lines.append(("  …", f"and {count(len(self.sources) - SHOWN)} more sources"))
        lines += model_lines(self)
        width = max(len(name) for name, _ in lines)
        shown = [f"{name:<{width}}  {value}" for name, value in lines]
        shown += ["", *(f"{v.level}: {v}" for v in self.verdicts if v.level != "problem")]
        return "\n".join(shown)


def _data_verdicts(report: Report) -> Iterator[DataVerdict]:
    """Yield what keeps the objective from training on the data, and whatever else needs attention."""
    survey, counts, entry = report.survey, report.counts, get(report.objective)
    nothing = _nothing_to_learn(report, entry)
    if report.problem and not nothing:
        yield DataVerdict("problem", report.problem)
    elif nothing:  # solving the other problem wouldn't help
        but = "There" if report.problem else f"{report.objective} can run on this, but there"
        yield DataVerdict(
            "problem",
            f"{but} is nothing to learn: {nothing}.",
            "Use a graded reward, or add responses of which some are better (agro score, agro sample).",
        )
    else:
        subject = f"Recipe {report.recipe}" if report.recipe else report.objective
        yield DataVerdict("note", f"{subject} can train on this.")
    yield from _groups(report, entry)
    cause = report.explaining
    if cause is not None:
        yield DataVerdict(
            "note",
            f"{percent(cause.share)} of the variance of {count(cause.rewards)} rewards is between the "
            f"{count(cause.values)} values of {cause.field}.",
            f"If {cause.field} identifies who asks or rates, independent of the response, agro import "
            f"--center-by {cause.field} compares a response with their other ratings.",
        )
    is_reported = report.problem.startswith("rewards of different scales")
    for difference in report.scales_apart[int(is_reported) :]:
        low, high = difference.lower, difference.higher
        yield DataVerdict(
            "problem",
            f"In {count(difference.groups)} groups rewards of different scales meet: those of {low.source} "
            f"go from {low.lowest:g} to {low.highest:g}, those of {high.source} from {high.lowest:g} to "
            f"{high.highest:g}.",
            "Map both to one scale (data.reward_scale), or train on one of them (data.sources).",
        )
    if survey.repeats > MANY_REPEATS * survey.responses:
        yield DataVerdict(
            "warning",
            f"{percent(survey.repeats / survey.responses)} of the responses equal an earlier one to the same "
            "prompt.",
            "They count, as a policy's responses should, but add little: a higher temperature or another "
            "source covers more.",
        )
    recorded, truncated = survey.total("ended"), survey.total("truncated")
    if truncated > MANY_TRUNCATED * recorded:
        yield DataVerdict(
            "warning",
            f"{percent(truncated / recorded)} of the responses were cut off before their end.",
            "Allow longer responses, or reward truncated ones lower.",
        )
    held_out = survey.held_out
    if held_out is not None and held_out.exact + held_out.near:
        yield DataVerdict(
            "warning",
            f"{count(len(held_out.exact))} of {count(held_out.prompts)} held-out prompts are prompts of the "
            f"store, and {count(len(held_out.near))} are near-copies of one "
            f"({first_of((*held_out.exact, *held_out.near))}).",
            "Remove them from the file of held-out prompts; these are its ids.",
        )
    if counts.unscored or counts.failed:
        yield DataVerdict(
            "warning" if REWARD in entry.needed(report.options) else "note",
            f"{count(counts.unscored)} responses have no reward, and the reward of {count(counts.failed)} "
            "failed.",
            "agro score fills them in.",
        )


def _nothing_to_learn(report: Report, entry: Objective) -> str:
    """Say why an objective on rewards has no signal; "" if it has one."""
    survey, needs = report.survey, entry.needed(report.options)
    if REWARD not in needs:
        return ""
    rewards = {reward for source in survey.sources.values() for reward in source.rewards}
    if len(rewards) == 1 and report.counts.scored > 1:
        return f"all {count(report.counts.scored)} rewards are {rewards.pop():g}"
    if grouping(needs) is None or report.options.get("singletons") == "pool":
        return ""
    if survey.scored_groups and survey.equal == survey.scored_groups:
        return f"in all {count(survey.equal)} groups the rewards are equal"
    return ""


def _groups(report: Report, entry: Objective) -> Iterator[DataVerdict]:
    """Yield verdicts on single responses, few prompts, and groups of equal rewards."""
    survey, needs = report.survey, entry.needed(report.options)
    singletons = report.options.get("singletons")
    alone = f"{count(survey.sizes[1])} of {count(survey.groups)} prompts have one response"
    if survey.sizes[1] and grouping(needs) is not None and PAIRS not in needs and singletons != "pool":
        if singletons == "drop":
            text = f"{alone}, and are left out (objective.singletons=drop)."
            yield DataVerdict("note", text, "data.complete_groups=3 samples responses to these prompts.")
        else:
            yield DataVerdict(
                "warning",
                f"{alone}, but {report.objective} compares the responses to a prompt.",
                "data.complete_groups=3 samples fresh responses to these prompts; objective.singletons=drop "
                "leaves them out.",
            )
    if 0 < survey.groups < FEW_GROUPS:
        yield DataVerdict(
            "warning",
            f"The number of prompts is small: {survey.groups}.",
            "A model can memorize them; hold some out (data.hold_out), and stop early (evaluate.patience).",
        )
    if REWARD in needs and survey.equal:
        is_common = survey.equal > MANY_EQUAL * survey.scored_groups
        yield DataVerdict(
            "warning" if is_common else "note",
            f"In {percent(survey.equal / survey.scored_groups)} of the groups with two or more rewards "
            f"({count(survey.equal)} of {count(survey.scored_groups)}) all rewards are equal: "
            f"{equal_means(entry, report.options)}.",
            "Few groups teach anything: data.spread=true draws only the others; prompts of medium difficulty "
            "or a graded reward are better."
            if is_common
            else "",
        )


def equal_means(entry: Objective, options: Mapping[str, Any]) -> str:
    """Say what a group of equal rewards contributes to an objective on rewards."""
    if grouping(entry.needed(options)) is None:
        return "each response counts by its own reward, so they teach too, but not which response is better"
    if entry.anchor({**entry.defaults(), **options, "beta": 1.0}) is not None:
        return "there is nothing to compare in them, and β pulls the policy back toward the reference there"
    return "their gradient is 0"


def _model_verdicts(report: Report) -> Iterator[DataVerdict]:
    measured = report.measured
    if measured is None:
        return
    values = measured.values
    if values["invalid"]:
        reasons = ", ".join(f"{count(number)} ({reason})" for reason, number in values["invalid"].items())
        yield DataVerdict(
            "warning" if values["measured_groups"] else "problem",
            f"The model can't be trained on some of the measured responses: {reasons}.",
            f"Such as {next(iter(measured.examples.values()), '')[:400]}",
        )
    ess, responses = values["ess"], values["ess_responses"]
    best, worst = values["best_logp_per_token"], values["worst_logp_per_token"]
    if best is not None and best < UNLIKELY:
        yield DataVerdict(
            "warning",
            f"The model gives the tokens of the best responses {best:.2f} nats on average (the worst "
            f"{worst:.2f}): it would hardly write them.",
            "Imitate them first (sft), or add fresh samples (recipe mixed).",
        )
    if ess is not None and ess < SMALL_ESS:
        yield DataVerdict(
            "warning",
            f"Weighted by π/μ, {count(responses)} responses count as {count(ess * responses)} "
            f"({percent(ess, 1)}).",
            "Importance ratios of complete responses are too noisy here; agro doesn't use them.",
        )


def check_store(
    store: Store,
    config: RunConfig,
    *,
    path: Location | None = None,
    held_out: Path | None = None,
    as_recommended: bool = False,
) -> Report:
    """Report on a store for a configuration's objective; `measure` adds a model's measurements.

    Args:
        config: its first phase that draws from a store is checked.
        path: the store's name in messages; by default its path.
        held_out: a file of prompts that the store shouldn't contain.
        as_recommended: check the best recipe for the data instead, if there is one.

    Raises `Refused` for unknown or invalid options of the objective.
    """
    counts, recipe = store.counts(), ""
    if path is not None and url_of(path):
        path = store.path
    log = path if isinstance(path, Path) and path != store.path else None
    recommended = recommend(store, log, config.policy.model) if counts.samples else []
    if as_recommended and recommended:
        config, recipe = recommended[0].config(config.policy), recommended[0].name
    phases = map(config.phase, config.phase_names)
    config = next((phase_config for phase_config in phases if phase_config.data.draws_stored), config)
    phase = Phase("", config, 0, 1)
    objective, options = config.objective.name, options_at(config.objective.options, 0)
    phase.entry.checked(objective, options)
    problem = ""
    try:
        trainable.check_names(config.data, counts, store.path, adds=config.data.samples)
        trainable.check_store(phase, store, fills=False)
        if not config.data.samples_fresh:  # otherwise the number of groups is a default
            trainable.check_enough([phase], store.path)
    except Refused as error:
        problem = str(error).replace(str(store.path), str(path or store.path)).strip()
    uses_rewards = REWARD in phase.entry.needed(options)
    surveyed = survey(store, held_out, config.data.near_copies)
    is_single = surveyed.sizes[1] > 0.5 * surveyed.groups
    return Report(
        objective,
        counts,
        surveyed,
        problem,
        find_scale_conflicts(config.data, store) if uses_rewards else [],
        options=options,
        explaining=explaining(store) if uses_rewards and is_single else None,
        recipe=recipe,
        recommended=recommended,
    )


def survey_lines(report: Report) -> Iterator[tuple[str, str]]:
    """Yield facts about the store as names and values."""
    counts, survey = report.counts, report.survey
    yield "samples", f"{count(counts.samples)} of {count(counts.groups)} prompts"
    sizes = "none"
    if survey.sizes:
        smallest, largest = min(survey.sizes), max(survey.sizes)
        numbers = str(smallest) if smallest == largest else f"{smallest} to {largest}"
        sizes = f"of {numbers} responses, {count(survey.sizes[1])} of one"
    yield "groups", sizes
    scored, unscored = count(counts.scored), count(counts.unscored)
    yield "rewards", f"{scored} scored, {unscored} unscored, {count(counts.failed)} failed"
    if survey.scored_groups:
        share = percent(survey.equal / survey.scored_groups)
        yield "equal rewards", f"{count(survey.equal)} of {count(survey.scored_groups)} groups ({share})"
    if counts.pairs:
        yield "pairs", count(counts.pairs)
    if counts.ties:
        yield "ties", f"{count(counts.ties)} judgments with equal votes"
    sources = survey.sources.values()
    lengths = [length for source in sources for length in source.lengths]
    tokens = [length for source in sources for length in source.tokens]
    length_text = (
        f"{count(fmean(lengths or [0]))} characters on average, at most {count(max(lengths, default=0))}"
    )
    if counts.with_tokens:
        length_text += f"; {count(fmean(tokens or [0]))} tokens"
    yield "lengths", length_text if counts.samples else "unknown"
    recorded, truncated = survey.total("ended"), "unknown"
    if recorded:
        cut = survey.total("truncated")
        truncated = f"{count(cut)} of {count(recorded)} ({percent(cut / recorded)})"
        if recorded < counts.samples:
            truncated += f"; unknown of {count(counts.samples - recorded)}"
    yield "truncated", truncated
    if survey.coverage:
        yield "repeats", f"{count(survey.repeats)} equal an earlier response of their group"
        yield "coverage", f"{fixed(fmean(survey.coverage))} distinct responses per response (SACo)"
    if survey.quality:
        yield "quality", f"{fixed(fmean(survey.quality))} from worst (0) to best (1) of a group (TQ)"
    parts = {
        "tokens": counts.with_tokens,
        "log-probs": counts.with_behavior,
        "version": survey.total("with_version"),
    }
    special = {0: "none", counts.samples: "all"}
    yield "known", ", ".join(f"{name} of {special.get(part, count(part))}" for name, part in parts.items())
    if survey.copies is not None and survey.copies.prompts:
        yield "near-copies", f"{count(survey.copies.prompts)} in {count(survey.copies.clusters)} clusters"
    if survey.held_out is not None:
        copied = len(survey.held_out.exact) + len(survey.held_out.near)
        yield "held-out", f"{copied} of {survey.held_out.prompts} prompts are in the store, or a near-copy is"


def model_lines(report: Report) -> Iterator[tuple[str, str]]:
    """Yield a model's measurements as names and values."""
    if report.measured is None:
        return
    values = report.measured.values
    yield "measured", f"{count(values['measured_groups'])} of {count(report.measured.total)} prompts"
    if values["template"]:
        yield "template", ", ".join(f"{kind} {ability}" for kind, ability in values["template"].items())
    yield "log π", f"{short(values['logp'])} nats per response, {short(values['logp_per_token'])} per token"
    if values["ref_logp"] is not None:
        per_token = short(values["ref_logp_per_token"])
        yield "log π_ref", f"{short(values['ref_logp'])} nats per response, {per_token} per token"
    if values["auc"] is not None:
        auc = with_error(values["auc"], values["auc_se"])
        yield (
            "AUC",
            f"{auc}: {values['auc_of']} ranks the better of two responses to a prompt higher in "
            f"{percent(values['auc'])} of the comparisons, in {count(values['auc_groups'])} groups",
        )
    if values["ranked_pairs"]:
        yield "pairs ranked", f"{percent(values['ranked_share'])} of {count(values['ranked_pairs'])}"
    yield "coverage of π", f"{short(values['policy_coverage'])} of its probability on the stored responses"
    if values["ess"] is not None:
        yield "ESS", f"{percent(values['ess'], 1)} of {count(values['ess_responses'])} responses"
    beta = values["beta"]
    if beta["groups"]:
        meaning = "β times the log-ratio varies as much as the rewards; below, the rewards dominate"
        if beta["of"] == "log π":
            meaning = "the optimum moves the log-probs of a group as far apart as they are now"
        yield (
            "β",
            f"{beta['low']:.2g} to {beta['high']:.2g}, median {beta['middle']:.2g} (the middle half of "
            f"{count(beta['groups'])} groups): {meaning}",
        )


REASONS = {
    "log": "several rewarded responses per prompt: it compares them, whoever wrote them",
    "feedback": "one response per prompt: it compares responses to different prompts",
    "dro": "the same, but it compares each response with a learned value",
    "kto": "the same, but it splits responses at the middle of the rewards",
    "pairs": "judged pairs: it moves the winner's regularized reward 1 above the loser's",
    "dpo": "judged pairs, by the most common method",
    "sft": "neither rewards nor pairs: it imitates the responses; agro score adds rewards",
}
RECOMMENDED = {"log": ("log",), "feedback": ("feedback", "dro", "kto"), "pairs": ("pairs", "dpo")}


@dataclass(frozen=True)
class Recommendation:
    """A recipe that can train on a store as it is, with its `changes` (KEY=VALUE) and the command."""

    name: str
    reason: str
    command: str
    changes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "reason": self.reason, "command": self.command}

    def config(self, policy: PolicyConfig) -> RunConfig:
        """Load the recipe, holding nothing out."""
        config = RunConfig.load(self.name, self.changes)
        return _holding_nothing(config).model_copy(update={"policy": policy})


def recommend(store: Store, log: Path | None, model: str | None) -> list[Recommendation]:
    """List the recipes for this kind of data that can train on the store, the best first. `log`, `model`: as
    for `train_command`."""
    kind = kind_of(store)
    counts, groups = store.counts(), list(store.survey.each_group())
    low, high = store.survey.spread_of_rewards() or (0.0, 1.0)
    recommendations = []
    for name in RECOMMENDED[kind] if counts.scored or counts.pairs else ("sft",):
        config = RunConfig.load(name)
        if low == high and REWARD in Phase.all(config)[0].needs:
            continue  # it could run, but not learn
        changes = [] if config.data.replay == 1 else ["data.replay=1"]  # all groups from the store
        if name == "kto":
            changes.append(f"objective.threshold={(low + high) / 2:g}")
        available = _drawn_groups(store, config, groups)
        if 0 < available < config.train.groups:
            changes.append(f"train.groups={available}")
        settings = [f"data.store={store.path}", "policy.model=MODEL", *changes]
        try:
            for phase in check_config(_holding_nothing(RunConfig.load(name, settings))):
                trainable.check_store(phase, store, fills=False)
                trainable.check_enough([phase], store.path)
        except Refused:
            continue
        command = train_command(name, model, store, log, changes)
        recommendations.append(Recommendation(name, REASONS[name], command, tuple(changes)))
    return recommendations


def recommendation_lines(recommended: Sequence[Recommendation]) -> Iterator[str]:
    """Format recommendations for the terminal. The last line is the command to run next."""
    for each in recommended[1:]:
        yield from textwrap.wrap(f"also {each.name}: {each.reason}", 80, subsequent_indent="  ")
        yield f"  {each.command}"
    if not recommended:
        yield "recommended: nothing"
        return
    best = recommended[0]
    if len(recommended) > 1:
        yield ""
    yield from textwrap.wrap(f"recommended: {best.name}, {best.reason}", 80, subsequent_indent="  ")
    if "policy.model=MODEL " in best.command:
        yield "MODEL is your model, a folder or a name on the Hugging Face hub; --model NAME fills it in"
    yield f"  {best.command} --fit 30min"


def _drawn_groups(store: Store, config: RunConfig, groups: Sequence[Group]) -> int:
    """Count the stored groups that a recipe may draw."""
    needs = Phase("", config, 0, 1).needs
    if PAIRS in needs:
        return judged_prompts(store)
    need = grouping(needs)
    minimum = 1 if need is None else need.least
    is_any = config.data.spread is not True
    candidates = [group for group in groups if is_any or group.reward_min != group.reward_max]
    return sum((group.scored if REWARD in needs else group.size) >= minimum for group in candidates)


def _holding_nothing(config: RunConfig) -> RunConfig:
    """Disable hold-out, which only takes prompts that the steps don't need."""
    return config.model_copy(update={"data": config.data.model_copy(update={"hold_out": 0.0})})
