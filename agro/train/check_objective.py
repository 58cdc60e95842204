"""Settings of a phase against the needs of its objective, and those that follow a held-out measurement
against what is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agro.config import RunConfig
from agro.errors import Refused
from agro.objectives import Need, least_responses
from agro.objectives.needs import (
    BEHAVIOR_LOGP,
    FRESH,
    MEANING,
    OBSERVED_LOGP,
    PAIRS,
    REF_LOGP,
    grouping,
    ordered,
)
from agro.rollout.engines.capabilities import capabilities
from agro.runs.metrics import FOLLOWED
from agro.train.around import lacking, source_abilities
from agro.train.phases import Phase, is_tuned, lr_at, options_at
from agro.types.sample import ROLES

# Settings that follow a held-out measurement, each with the value that follows none.
DECIDING = {"metric": None, "keep_best": False, "patience": 0, "target": None}


def follows_log(config: RunConfig) -> bool:
    """Whether settings follow what is measured on held-out groups of a log."""
    is_set = any(getattr(config.evaluate, key) != unset for key, unset in DECIDING.items())
    return is_set and config.followed != "eval_reward"


def check_followed(phases: Sequence[Phase]) -> None:
    """Raise `Refused` where a run would wait for what no phase measures."""
    configs = [phase.config for phase in phases]
    for config in configs:
        for key, unset in DECIDING.items():
            value = getattr(config.evaluate, key)
            if value != unset and not any(map(measures_followed, phases)):
                raise _nothing_to_follow(key, value, config)
    if any(config.evaluate.metric == "eval_consistency" for config in configs):
        # ½ Var(R) under another β is another measure, in which no best can be chosen.
        measured = [phase for phase in phases if phase.config.data.has_held_out_groups]
        betas = [phase.diagnostic_beta(phase.config.objective.options) for phase in measured]
        values = [beta for beta in betas if beta is not None]
        changes = [beta for beta in values if isinstance(beta, Mapping) or beta != values[0]]
        if changes:
            raise Refused(
                "evaluate.metric = eval_consistency compares ½ Var(R) over the run, which needs one β, but "
                f"objective.beta changes: got {', '.join(map(str, values))}. What to do: set evaluate.beta"
            )
    targets = [config.evaluate.target_kl for config in configs if config.evaluate.target_kl is not None]
    if targets and not any(map(measures_heldout_kl, configs)):
        raise Refused(
            f"evaluate.target_kl = {targets[0]:g} is compared with eval_kl_ref, which no phase measures: it "
            "needs evaluate.kl, and data.eval_prompts at evaluate.temperature = policy.temperature or "
            "evaluate.kl_samples and stored data; set them, or remove evaluate.target_kl"
        )
    for key in ("patience", "target_kl"):
        rules = [config.evaluate for config in configs if getattr(config.evaluate, key)]
        if rules and not any(rule.every for rule in rules):
            raise Refused(
                f"evaluate.{key} = {getattr(rules[0], key):g} acts at evaluations, but evaluate.every = 0 "
                "makes them at the ends of phases only; set evaluate.every"
            )


def measures_followed(phase: Phase) -> bool:
    """Whether a phase measures the metric that it follows."""
    name, config = phase.config.followed, phase.config
    if name == "eval_reward":
        return config.asks_held_out
    if name == "eval_consistency" and phase.diagnostic_beta(config.objective.options) is None:
        return False
    return name is not None and config.data.has_held_out_groups


def measures_heldout_kl(config: RunConfig) -> bool:
    """Whether a phase measures eval_kl_ref, on held-out prompts or on a few prompts of the store."""
    rule = config.evaluate
    is_on_policy = rule.temperature == config.policy.temperature
    return samples_kl(config) or (rule.kl and config.data.eval_prompts is not None and is_on_policy)


def samples_kl(config: RunConfig) -> bool:
    """Whether a phase on stored data samples responses for the KL, provided that the run has a reference.

    It doesn't where held-out prompts measure it, where the engine isn't in this process, or where
    responses are episodes, whose prompts need more than the store has.
    """
    wanted = config.data.draws_stored and config.evaluate.kl and config.evaluate.kl_samples > 0
    shares_weights = "shares_weights" in capabilities(config.engine.kind)
    if not (wanted and shares_weights and "shares_engine" in source_abilities(config)):
        return False
    return config.environment is None and not config.asks_held_out


def _nothing_to_follow(key: str, value: Any, phase: RunConfig) -> Refused:
    name = phase.evaluate.metric
    if name is None:
        ways = [f"{FOLLOWED[m].needs} for {m}" for m in ("eval_reward", "eval_auc")]
        return Refused(
            f"evaluate.{key} = {value} compares held-out measurements, and no phase makes any; set "
            f"{', or '.join(ways)}, or remove evaluate.{key}"
        )
    return Refused(
        f"evaluate.metric = {name} is measured on {FOLLOWED[name].needs}, and no phase has that; set it, "
        "follow another metric, or remove evaluate.metric"
    )


def check_phase(phase: Phase, prefix: str) -> None:
    """Raise `Refused` where the settings of a phase contradict what its objective needs."""
    config, entry = phase.config, phase.entry
    name, data = config.objective.name, config.data
    needs = entry.needs(phase.resolved(options_at(config.objective.options, 0)))
    if is_tuned(config.objective.options.get("beta")):
        _check_tuned(config, needs, prefix)
    if config.train.steps is not None:  # else it isn't known yet
        phase.resolved(options_at(config.objective.options, config.train.steps))
        lr_at(config.train, 0, config.train.steps)
    _check_data(config, needs, prefix)
    _check_origin(config, needs, prefix)
    _check_differences(config, needs, prefix)
    if data.samples_fresh:
        _check_size(phase, prefix, "sampler.n", config.sampler.n, least_responses(needs))
    if MEANING in needs and data.samples and config.reward.meaning is None:
        raise Refused(
            f"{prefix}objective {name} needs {MEANING.what}, but reward.meaning isn't set. What to do: "
            f'{MEANING.way_out}; or set objective.equivalent = "reward"'
        )
    _check_completing(config, needs, prefix)
    if data.group_size is not None and data.draws_stored:
        minimum = least_responses(needs, "expert") - (data.complete_groups or 0)
        _check_size(phase, prefix, "data.group_size", data.group_size, minimum)
    if FRESH in needs:
        _check_on_policy(config, prefix)


def _check_data(config: RunConfig, needs: set[Need], prefix: str) -> None:
    """Refuse a phase whose prompts or stored responses aren't configured."""
    data = config.data
    if data.samples_fresh and not data.prompts:
        raise Refused(
            f"{prefix}data.replay = {data.replay} samples from prompts, but data.prompts isn't set; set it, "
            "or data.replay = 1"
        )
    if data.experts and data.store is None:
        raise Refused(
            f"{prefix}data.experts = {data.experts} draws stored responses, but data.store isn't set; set "
            "it, or leave data.experts out"
        )


def _check_size(phase: Phase, prefix: str, key: str, size: int, minimum: int) -> None:
    """Refuse groups that are smaller than the objective needs; `key`: the setting that has their size."""
    if size < minimum:
        raise Refused(
            f"{prefix}objective {phase.config.objective.name} needs groups of at least {minimum} responses, "
            f"but {key} is {size}. What to do: {_ways_to_smaller(phase, minimum)}a larger {key}"
        )


def refuse_first(name: str, problems: Mapping[str, object], way_out: str = "") -> None:
    """Refuse the first of the problems that is there; the message begins with `name`."""
    for problem, is_there in problems.items():
        if is_there:
            raise Refused(f"{name}{problem}{way_out}")


def _ways_to_smaller(phase: Phase, minimum: int) -> str:
    """The options without which the objective trains on smaller groups, such as a baseline of the group."""
    options = phase.config.objective.options
    ways = ""
    for key, value in options.items():
        remaining = {name: other for name, other in options.items() if name != key}
        if least_responses(phase.entry.needed(remaining)) < minimum:
            ways += f"remove objective.{key} = {value!r} or give it another value, or "
    return ways


def _check_tuned(config: RunConfig, needs: set[Need], prefix: str) -> None:
    """Refuse a β that follows the KL where no KL is measured after the first step."""
    evaluates = bool(config.evaluate.every) and measures_heldout_kl(config)
    if REF_LOGP not in needs or not (config.data.samples or evaluates):
        raise Refused(
            f"{prefix}objective.beta with target_kl follows kl_ref, the KL to the reference of an objective "
            f"that needs it, got {config.objective.name}. It is measured on fresh samples, got data.replay = "
            f"{config.data.replay}, or at evaluations, which need evaluate.every, evaluate.kl, and "
            "evaluate.kl_samples or data.eval_prompts. What to do: set these, or a number for beta"
        )


def _check_origin(config: RunConfig, needs: set[Need], prefix: str) -> None:
    """Refuse needs that fresh samples, or stored ones, can't satisfy."""
    name, data = config.objective.name, config.data
    if PAIRS in needs and data.samples_fresh and "judges_pairs" not in source_abilities(config):
        raise Refused(
            f"{prefix}objective {name} needs pairs, which fresh samples don't have, but data.replay = "
            f"{data.replay}. What to do: data.replay = 1, from a data.store with judged pairs (agro import) "
            'and recipe pairs, source.around = "rivals" with data.experts, or an objective on rewards.'
        )
    if OBSERVED_LOGP in needs and config.environment is None and data.store is None:
        raise Refused(
            f"{prefix}objective {name} needs {OBSERVED_LOGP.what}, but there is neither [environment] nor "
            f"data.store. What to do: {OBSERVED_LOGP.way_out}."
        )
    if BEHAVIOR_LOGP in needs and data.samples:
        _check_truncation(config, prefix)
    for need in ordered(needs):
        if need.fresh_only and (stale := _stale_by(config)) is not None:
            reason, way = stale
            raise Refused(
                f"{prefix}objective {name} needs {need.what}, but with {reason}. What to do: {way}, or "
                f"{need.way_out}."
            )
        stored = [role for role in data.roles or ROLES if need.applies_to(role)]
        if need.fresh_only and data.draws_stored and stored:
            raise Refused(
                f"{prefix}objective {name} needs {need.what}, but data.replay = {data.replay} draws stored "
                f"samples. What to do: {need.way_out}."
            )


def _stale_by(config: RunConfig) -> tuple[str, str] | None:
    """Why samples of a run may be stale, and the way out; None where they are of the current weights."""
    source, max_age = config.source, config.data.max_age
    if "samples_current_weights" in source_abilities(config):
        return None
    if "samples_current_weights" not in lacking(config):
        return f"source.around = {source.around} samples are of another policy", "no source.around"
    if source.sync_from > 1:
        return f"source.sync_from = {source.sync_from} samples are stale", "source.sync_from = 1"
    if source.lags:
        return f"source.sync_every = {source.sync_every} samples are stale", "source.sync_every = 1"
    if max_age == 0:
        return None
    reason = f'source.kind = "{source.kind}" samples may be stale (data.max_age = {max_age})'
    return reason, "data.max_age = 0"


def _check_completing(config: RunConfig, needs: set[Need], prefix: str) -> None:
    """What data.complete_groups and data.reward_scale can't be combined with."""
    data = config.data
    compared = {
        "min_reward": data.min_reward is not None,
        "best_of_group": data.best_of_group,
        "spread": data.spread,
    }
    if data.reward_scale:
        name = f"{prefix}data.reward_scale maps rewards after the draw, but data."
        refuse_first(name, compared, " compares them as they are stored; remove one of the two")
    problems = {
        "completes stored groups, but none is drawn: set data.store and data.replay": (
            not data.draws_stored or data.store is None
        ),
        f"samples responses without judgments, but objective {config.objective.name} needs pairs": (
            PAIRS in needs
        ),
        "and data.spread exclude each other: whether rewards differ isn't known before it samples": (
            data.spread
        ),
    }
    if data.complete_groups is not None:
        name = f"{prefix}data.complete_groups = {data.complete_groups} "
        refuse_first(name, problems, "; change one of the two")


def _check_truncation(config: RunConfig, prefix: str) -> None:
    """Ratios need the kept sets of truncated samples; to a greedy choice there is none."""
    sampler = config.sampler
    reports = "reports_kept_sets" in capabilities(config.engine.kind)
    can_record = reports and sampler.keep_sets is not False and sampler.temperature > 0
    if not sampler.truncation or can_record:
        return
    way = "sample without it"
    if sampler.temperature > 0:
        way += ', or record which tokens it keeps (engine.kind = "hf" and sampler.keep_sets = true)'
    raise Refused(
        f"{prefix}objective {config.objective.name} needs {BEHAVIOR_LOGP} over the same tokens as the "
        f"trainer's, but sampler has {sampler.truncation}: what it excludes makes ratios to the policy "
        f"biased. What to do: {way}, or use an objective that doesn't need them, such as agro."
    )


def _check_differences(config: RunConfig, needs: set[Need], prefix: str) -> None:
    """Where rewards are compared that can't differ, or that aren't looked at."""
    data, name, need = config.data, config.objective.name, grouping(needs)
    if data.best_of_group and need is not None:
        raise Refused(
            f"{prefix}objective {name} compares the responses of a group (it needs {need.what}), but "
            "data.best_of_group draws only those of its highest reward. What to do: leave "
            "data.best_of_group out, or use an objective of single responses, such as sft."
        )
    problems = {
        "data.best_of_group draws only responses of one reward in a group": data.best_of_group,
        f"objective {name} draws judged pairs, whatever their rewards": PAIRS in needs,
        "sampler.n = 1 makes groups of one response": data.samples_fresh and config.sampler.n == 1,
    }
    if data.spread:
        name = f"{prefix}data.spread = true trains only on groups whose rewards differ, but "
        refuse_first(name, problems, ". What to do: data.spread = false, or change the other")


def _check_on_policy(config: RunConfig, prefix: str) -> None:
    """Samples have to be of the policy itself, with its current weights."""
    name, sampler, updates = config.objective.name, config.sampler, config.train.updates
    if updates > 1:
        raise Refused(
            f"{prefix}objective {name} needs {FRESH.what}, but train.updates = {updates}. What to do: "
            f"{FRESH.way_out}."
        )
    if not sampler.is_of_policy(config.policy.temperature):
        raise Refused(
            f"{prefix}objective {name} needs samples of the policy itself: sampler.temperature = "
            f"policy.temperature ({config.policy.temperature}), no truncation and no skipped layers; got "
            f"temperature {sampler.temperature}, top_k {sampler.top_k}, top_p {sampler.top_p}, min_p "
            f"{sampler.min_p}, skip_layers {sampler.skip_layers}"
        )
