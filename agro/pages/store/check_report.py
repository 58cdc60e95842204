"""All that `agro check` reports of a store, as JSON and as a summary for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from agro.config import RunConfig
from agro.errors import Refused
from agro.io.numbers import count, fixed, percent, short, with_error
from agro.objectives.needs import REWARD
from agro.pages.store.check_survey import StoreSurvey, survey
from agro.pages.store.ranking import rank
from agro.pages.store.raters import explaining
from agro.pages.store.verdicts import DataVerdict, Findings, verdicts
from agro.store import Counts, Store
from agro.store.location import Location, url_of
from agro.train import trainable
from agro.train.phases import Phase, options_at
from agro.train.reward_scales import find_scale_conflicts

SHOWN = 8  # sources


class Report(Findings):
    """With verdicts, as JSON and as text."""

    @cached_property
    def verdicts(self) -> list[DataVerdict]:
        return verdicts(self)

    def to_json(self) -> dict[str, Any]:
        values = self.counts.to_json() | self.survey.to_json()
        values |= {
            "objective": self.objective,
            "recipe": self.recipe or None,
            "trainable": self.trainable,
            "problem": self.problem or None,
            "licenses": self.licenses,
            "scales_apart": [
                {"sources": [a.lower.source, a.higher.source], "groups": a.groups} for a in self.scales_apart
            ],
        }
        if self.explaining is not None:
            values["explaining"] = self.explaining.to_json()
        if self.measured is not None:
            values |= self.measured.to_json()
        if self.own_reward is not None:
            values["own_reward"] = self.own_reward.to_json()
        if self.ranking is not None:
            values["ranking"] = self.ranking.to_json()
        verdicts_json = [{"level": v.level, "text": v.text, "todo": v.todo} for v in self.verdicts]
        return values | {"verdicts": verdicts_json}

    def __str__(self) -> str:
        """A summary of some lines, then the verdicts, without what can train on it."""
        lines = [*_survey_lines(self), *_source_lines(self), *_model_lines(self), *_own_reward_lines(self)]
        width = max(len(name) for name, _ in lines)
        text = [f"{name:<{width}}  {value}" for name, value in lines]
        text += ["", *(f"{v.level}: {v}" for v in self.verdicts if v.level != "problem")]
        return "\n".join(text)


def check_store(
    store: Store,
    config: RunConfig,
    *,
    path: Location | None = None,
    held_out: Path | None = None,
    licenses: dict[str, str | None] | None = None,
    changes: Sequence[str] | None = None,
) -> Report:
    """Report on a store, for a configuration's objective; `measure` adds what a model says.

    Args:
        config: its first phase that draws from a store is what counts.
        path: as it is called in messages; the store's own where it isn't given.
        held_out: a file of prompts that the store shouldn't have.
        changes: given where no objective is asked for: the recipe that is best for the data is what counts,
            changed by these.

    Raises `Refused` for options that the objective doesn't have or take.
    """
    counts, recipe = store.counts(), ""
    if path is not None and url_of(path):
        path = store.path
    log = path if isinstance(path, Path) and path != store.path else None
    ranking = rank(store, log, config.policy.model) if counts.samples else None
    if changes is not None and ranking is not None and ranking.recommended:
        best = ranking.recommended[0]
        config, recipe = best.config(config.policy, changes), best.name
    phases = map(config.phase, config.phase_names)
    config = next((phase_config for phase_config in phases if phase_config.data.draws_stored), config)
    phase = Phase("", config, 0, 1)
    objective, options = config.objective.name, options_at(config.objective.options, 0)
    phase.entry.checked(objective, options)
    problem = ""
    try:
        trainable.check_names(config.data, counts, store.path, adds=config.data.samples)
        trainable.check_store(phase, store, fills=False)
        if not config.data.samples_fresh:  # else the default number of groups, which nobody chose
            trainable.check_enough([phase], store.path)
    except Refused as error:
        problem = str(error).replace(str(store.path), str(path or store.path)).strip()
    uses_rewards = REWARD in phase.entry.needed(options)
    surveyed = survey(store, counts.groups, held_out, config.data.near_copies)
    is_single = surveyed.sizes[1] > 0.5 * surveyed.groups
    return Report(
        path or store.path,
        objective,
        counts,
        surveyed,
        problem,
        find_scale_conflicts(config.data, store) if uses_rewards else [],
        licenses or {},
        options=options,
        completes=config.data.complete_groups,
        explaining=explaining(store) if uses_rewards and is_single else None,
        recipe=recipe,
        ranking=ranking,
    )


def _survey_lines(report: Report) -> Iterator[tuple[str, str]]:
    counts, survey = report.counts, report.survey
    yield "samples", f"{count(counts.samples)} of {count(counts.groups)} prompts"
    yield "groups", _sizes(survey)
    scored, unscored = count(counts.scored), count(counts.unscored)
    yield "rewards", f"{scored} scored, {unscored} unscored, {count(counts.failed)} failed"
    if survey.scored_groups:
        share = percent(survey.equal / survey.scored_groups)
        yield "equal rewards", f"{count(survey.equal)} of {count(survey.scored_groups)} groups ({share})"
    if counts.pairs:
        yield "pairs", count(counts.pairs)
    if counts.ties:
        yield "ties", f"{count(counts.ties)} judgments with equal votes"
    yield "lengths", _lengths(survey)
    yield "truncated", _share(survey.total("truncated"), survey.total("ended"), counts.samples)
    if survey.coverage.count:
        near = f"{count(survey.near_repeats)} of {count(survey.inspected)} nearly equal one"
        yield "repeats", f"{count(survey.repeats)} equal an earlier response of their group; {near}"
        answers = ""
        if survey.answers.count:
            answers = f", {fixed(survey.answers.mean)} distinct final answers"
        yield "coverage", f"{fixed(survey.coverage.mean)} distinct responses per response{answers} (SACo)"
    if survey.quality.count:
        yield "quality", f"{fixed(survey.quality.mean)} from worst (0) to best (1) of a group (TQ)"
    parts = {
        "tokens": counts.with_tokens,
        "log-probs": counts.with_behavior,
        "version": survey.total("with_version"),
    }
    yield "known", ", ".join(f"{name} of {_part(part, counts)}" for name, part in parts.items())
    if survey.copies is not None and survey.copies.prompts:
        yield "near-copies", str(survey.copies)
    if survey.held_out is not None:
        yield "held-out", f"{len(survey.held_out.prompts_seen)} of {survey.held_out.prompts} prompts overlap"


def _source_lines(report: Report) -> Iterator[tuple[str, str]]:
    for name in report.sources[:SHOWN]:
        source = report.survey.sources[name]
        text = f"{count(source.rows)} {'/'.join(sorted(source.roles))}"
        if source.rewards.count:
            rewards = source.rewards
            text += f", reward {short(rewards.mean)} ({short(rewards.lowest)} to {short(rewards.highest)})"
        if report.licenses.get(name):
            text += f", license {report.licenses[name]}"
        yield f"  {name:.40}", text
    if len(report.sources) > SHOWN:
        yield "  …", f"and {count(len(report.sources) - SHOWN)} more sources"


def _model_lines(report: Report) -> Iterator[tuple[str, str]]:
    if report.measured is None:
        return
    values = report.measured.to_json()
    yield "measured", f"{count(values['measured_groups'])} of {count(report.measured.total)} prompts"
    if values["template"]:
        yield "template", ", ".join(f"{kind} {how}" for kind, how in values["template"].items())
    for reason, number in values["invalid"].items():
        yield "left out", f"{count(number)} responses: {reason}"
        yield "  such as", report.measured.examples.get(reason, "")[:300]
    yield "log π", f"{short(values['logp'])} nats a response, {short(values['logp_per_token'])} a token"
    if report.measured.against_reference:
        per_token = short(values["ref_logp_per_token"])
        yield "log π_ref", f"{short(values['ref_logp'])} nats a response, {per_token} a token"
    if values["auc"] is not None:
        auc = with_error(values["auc"], values["auc_se"])
        yield "AUC", f"{auc} of {values['auc_of']}, in {count(values['auc_groups'])} groups"
    if values["ranked_pairs"]:
        yield "pairs ranked", f"{percent(values['ranked_share'])} of {count(values['ranked_pairs'])}"
    yield "coverage of π", f"{short(values['policy_coverage'])} of its probability on the stored responses"
    if values["ess"] is not None:
        yield "ESS", f"{percent(values['ess'], 1)} of {count(values['ess_responses'])} responses"


def _own_reward_lines(report: Report) -> Iterator[tuple[str, str]]:
    own = report.own_reward
    if own is not None:
        means = (
            f"{with_error(own.log, own.log_se)} of the log, {with_error(own.own, own.own_se)} of the model's"
        )
        yield "mean reward", f"{means} own responses to {count(own.prompts)} of its prompts"


def _sizes(survey: StoreSurvey) -> str:
    if not survey.sizes:
        return "none"
    smallest, largest = min(survey.sizes), max(survey.sizes)
    text = f"of {smallest} responses" if smallest == largest else f"of {smallest} to {largest} responses"
    return f"{text}, {count(survey.sizes[1])} of one; {count(survey.mixed)} with several sources"


def _lengths(survey: StoreSurvey) -> str:
    sources = survey.sources.values()
    total = sum(s.lengths.count for s in sources)
    if not total:
        return "unknown"
    mean = sum((s.lengths.mean or 0.0) * s.lengths.count for s in sources) / total
    longest = max(s.lengths.highest or 0.0 for s in sources)
    text = f"{count(mean)} characters on average, at most {count(longest)}"
    tokens = sum(s.tokens.count for s in sources)
    if tokens:
        mean = sum((s.tokens.mean or 0.0) * s.tokens.count for s in sources) / tokens
        text += f"; {count(mean)} tokens"
    return text


def _share(part: int, recorded: int, total: int) -> str:
    if not recorded:
        return "unknown"
    text = f"{count(part)} of {count(recorded)} ({percent(part / recorded)})"
    return text if recorded == total else f"{text}; unknown of {count(total - recorded)}"


def _part(part: int, counts: Counts) -> str:
    if part == counts.samples:
        return "all"
    return count(part) if part else "none"
