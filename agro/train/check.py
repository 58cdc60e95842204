"""Refuses, before any compute, settings that contradict each other or the objective's needs. Also notes on
valid settings that may be unintended.

Refusals are rows of tables: a text, and whether it applies. The first row that applies is raised.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence

from agro.config import LoRA, RunConfig, check_texts, from_environment, shared
from agro.errors import Refused, refuse
from agro.objectives import Need, least_responses
from agro.objectives.needs import (
    BEHAVIOR_LOGP,
    FRESH,
    MEANING,
    OBSERVED_LOGP,
    PAIRS,
    REF_LOGP,
    REWARD_PARTS,
    grouping,
    ordered,
)
from agro.rollout.engines import capabilities, check_options, check_section
from agro.train.around import (
    NEEDED_BY,
    SOURCE_CAPABILITIES,
    check_around,
    lacking,
    source_abilities,
    wrapper_of,
)
from agro.train.phases import Phase, is_tuned, options_at
from agro.types.sample import ROLES

DECIDING = ("keep_best", "patience")  # settings that follow a held-out metric


def check_config(config: RunConfig) -> tuple[Phase, ...]:
    """Return the phases of a run. Raises `Refused` that names the phase and the settings."""
    check_texts(config.model_dump())
    config.policy.check_weights()
    phases = Phase.all(config)
    _check_shared(config, phases)
    _check_policy(phases)
    for phase in phases:
        prefix = f"phase {phase.name}: " if config.phases else ""
        _check_data(phase.config, prefix)
        _check_engine(phase.config, prefix)
        _check_source(config, phase, prefix)
        _check_objective(phase, prefix)
        _check_reward(phase, prefix)
    _check_run(config, phases)
    _check_followed(phases)
    return phases


def check_sharded(config: RunConfig) -> None:
    """Raise `Refused` for settings that don't work on several ranks, which shard policy and reference."""
    phases = [config.phase(name) for name in config.phase_names]
    policy = phases[0].policy
    fails = "doesn't work on several ranks (torchrun)"
    cut = "bitsandbytes packs values in blocks, which FSDP would cut; remove it"
    rows: dict[str, object] = {
        f'train.start = "first" {fails}: it loads a complete model; start a second run from the first model '
        "with this run's store instead": any(phase.train.start == "first" for phase in phases),
        f"policy.reference_model {fails}, which shard the reference, as a URL; give a folder": (
            policy.reference_is_served
        ),
        f'policy.reference = "sampler" {fails}, which shard the reference; set "periodic"': (
            policy.reference == "sampler"
        ),
        f"policy.quantize = {policy.quantize} {fails}: {cut}": policy.quantize,
        f"train.optimizer = adamw_8bit {fails}: {cut}": any(
            phase.train.optimizer == "adamw_8bit" for phase in phases
        ),
    }
    for phase in phases:
        if phase.source.around is not None:
            need = SOURCE_CAPABILITIES["complete_policy"]
            text = (
                f"source.around = {phase.source.around} needs a source that {need}, so it {fails}; remove it"
            )
            rows[text] = "complete_policy" in wrapper_of(phase)[0].needs
    refuse(rows, end=". Or train in one process")


def _check_shared(config: RunConfig, phases: Sequence[Phase]) -> None:
    """Refuse changes of settings that all phases share. Only the reference "phase" may start later."""
    first = phases[0].config
    same = [(config, section, key) for section, key in shared()]
    same += [(first, "policy", key) for key in ("reference_model", "reference_decay", "reference_every")]
    for phase in phases:
        for other, section, key in same:
            if getattr(getattr(phase.config, section), key) != getattr(getattr(other, section), key):
                raise Refused(
                    f"phase {phase.name}: a phase can't change {section}.{key}, which has one value for the "
                    "complete run; remove the change"
                )
    kinds = [phase.config.policy.reference for phase in phases]
    begins_later = set(kinds) == {"start", "phase"} and kinds == sorted(kinds, reverse=True)
    if len(set(kinds)) > 1 and not begins_later:
        got = ", ".join(f"{phase.name}: {kind}" for phase, kind in zip(phases, kinds))
        raise Refused(
            'policy.reference: expected "start" in the first phases and "phase" in the others, or the same '
            f"in all phases, got {got}"
        )


def _check_policy(phases: Sequence[Phase]) -> None:
    """Check the adapter, the reference, and the weights that the first phase starts from."""
    config, policy, source = phases[0].config, phases[0].config.policy, phases[0].config.source
    lora, kind, served = policy.lora, policy.reference, policy.reference_is_served
    together = {"reference_model": "model", "reference_decay": "ema", "reference_every": "periodic"}
    moves = f'policy.reference = "{kind}" changes during the run, but'
    rows: dict[str, object] = {
        "[policy.lora] adapts a trained model, but policy.new starts from random weights": lora
        and policy.new,
        "policy.lora.start has its own rank, alpha and targets; remove either those of [policy.lora] or "
        "policy.lora.start": (lora and lora.start and lora != LoRA(start=lora.start, merge=lora.merge)),
        **{
            f'policy.{key} and policy.reference = "{needed}" go together: got policy.{key} = '
            f'{getattr(policy, key)} and policy.reference = "{kind}"': (
                (getattr(policy, key) is not None) != (kind == needed)
            )
            for key, needed in together.items()
        },
        f'source.sync_from = {source.sync_from} and source.kind = "elsewhere" exclude each other: '
        "collectors sample with the newest weights": source.kind == "elsewhere" and source.sync_from > 1,
        'policy.reference = "sampler" uses the earlier weights that sample: expected source.kind = '
        f'"inline" and source.sync_every or source.sync_from of 2 or more, got "{source.kind}", '
        f"{source.sync_every} and {source.sync_from}": kind == "sampler" and not source.lags,
        'policy.reference = "sampler" copies complete models, and [policy.lora] trains an adapter; remove '
        'it, or set policy.reference = "periodic"': kind == "sampler" and lora,
        f"{moves} policy.cache_reference stores the log-probs of a fixed one; remove one of the two": (
            policy.reference_moves and policy.cache_reference
        ),
        f"{moves} data.eval_store and data.hold_out need a fixed one; remove one of the two": (
            policy.reference_moves and config.data.has_held_out_groups
        ),
        "policy.reference_model is a URL, whose model may change and reports log-probs at temperature 1: "
        f"expected no policy.cache_reference and policy.temperature = 1, got {policy.temperature:g} and "
        f"cache_reference = {str(policy.cache_reference).lower()}": (
            served and (policy.cache_reference or policy.temperature != 1)
        ),
        'policy.reference = "ema" moves in small steps, which policy.dtype = '
        f'"{policy.dtype}" rounds away; use float32, an adapter ([policy.lora], whose weights are float32), '
        'or "periodic"': kind == "ema" and policy.dtype != "float32" and lora is None,
        'train.start = "first" is for later phases: the first phase begins with these weights anyway': (
            config.train.start == "first"
        ),
    }
    refuse(rows)


def _check_data(config: RunConfig, prefix: str) -> None:
    """Check what a phase draws and samples to, and refuse a guard that would skip every step."""
    data, guard, source = config.data, config.guard, config.source
    uncertain, completes = data.prompt_order == "uncertain", data.complete_groups is not None
    spread = f"data.spread = {json.dumps(data.spread)} selects groups by whether rewards differ, but"
    joins = f"data.complete_groups = {data.complete_groups}"
    compares = {"min_reward": data.min_reward is not None, "best_of_group": data.best_of_group}
    shares = {name: "roles" if name in ROLES else "sources" for name in data.shares_at(0) if name}
    rows: dict[str, object] = {
        'data.prompt_order = "uncertain" selects prompts in this process by tracked values: expected '
        'data.value_half_life, data.candidates of 2 or more and source.kind = "inline", got '
        f'{data.value_half_life}, {data.candidates} and "{source.kind}"': uncertain
        and not (data.value_half_life and data.candidates > 1 and source.kind == "inline"),
        'guard.kl and guard.action = "skip": a policy whose updates are skipped keeps its KL, so every later '
        'step would be skipped; use "stop" or "rollback"': guard.action == "skip" and guard.kl,
        f"data.replay = {data.replay} samples from prompts, but data.prompts isn't set; set it, or "
        "data.replay = 1": data.samples_fresh and not data.prompts,
        f"data.experts = {data.experts} draws stored responses, but data.store isn't set; set it": (
            data.experts and data.store is None
        ),
        **{
            f"data.replay has a share of {name}, which data.{key} doesn't name, so no such sample would be "
            f"drawn; remove the share, or data.{key}": name not in (getattr(data, key) or [name])
            for name, key in shares.items()
        },
        f"{spread} data.best_of_group draws only a group's responses of one reward; remove one of the two": (
            data.spread and data.best_of_group
        ),
        f"{spread} sampler.n = 1 makes groups of one response; raise it, or data.spread = false": (
            data.spread is True and data.samples_fresh and config.sampler.n == 1
        ),
        **{
            f"data.reward_scale maps rewards after the draw, but data.{key} compares them as stored; "
            "remove one of the two": data.reward_scale and is_set
            for key, is_set in {**compares, "spread": data.spread}.items()
        },
        f"{joins} completes stored groups, but none is drawn: set data.store and data.replay": (
            completes and (not data.draws_stored or data.store is None)
        ),
        f"{joins} and data.spread exclude each other: before sampling it is unknown whether rewards differ; "
        "remove one of the two": completes and data.spread,
    }
    refuse(rows, prefix)


def _check_engine(config: RunConfig, prefix: str) -> None:
    """Refuse settings of a phase that the engine can't serve."""
    engine, can = config.engine, capabilities(config.engine.kind)
    check_options(engine)
    for name in ("sampler", "train", "source"):
        check_section(name, getattr(config, name), can, f'engine.kind = "{engine.kind}"', prefix)
    sglang = engine.dialect == "sglang"
    rows = {
        "engine.sleep needs a vLLM server next to the trainer that samples only for this process: "
        'expected engine.kind = "vllm" and source.kind = "inline"': engine.sleep
        and (not engine.uses_servers or sglang or config.source.kind != "inline"),
        f'engine.memory needs engine.kind = "vllm", got "{engine.kind}"; remove it': (
            engine.memory and not engine.starts_server
        ),
        'engine.kind = "vllm" starts a server of its own: expected no engine.urls and '
        'engine.dialect = "vllm"; or use engine.kind = "server"': engine.starts_server
        and (engine.urls or sglang),
        "engine.push = adapter needs policy.lora, but all weights are trained; use reload or transfer": (
            engine.uses_servers and engine.push == "adapter" and not config.policy.lora
        ),
        **{
            f"engine.{key} = {value} and engine.dialect = sglang exclude each other: only vLLM has it": (
                engine.uses_servers and sglang and getattr(engine, key) == value
            )
            for key, value in {"push": "transfer", "api": "generate"}.items()
        },
    }
    refuse(rows)
    if engine.uses_servers:
        assert engine.starts_server or engine.servers  # `servers` refuses an empty list and duplicates
        from_environment(engine.api_key, "engine.api_key")


def _check_source(config: RunConfig, phase: Phase, prefix: str) -> None:
    """Refuse settings of a phase that its source, or the wrapper around it, can't serve."""
    phase_config, source = phase.config, phase.config.source
    if source.around or source.options:
        check_around(phase, prefix)
    can = source_abilities(phase_config)
    named = f'source.kind = "{source.kind}"'
    if source.around is not None:
        named += f" and source.around = {source.around}"
    rows: dict[str, object] = {}
    for key, need in NEEDED_BY.items():
        value = getattr(phase_config.data, key)
        is_set = value is True if key == "spread" else value  # a number changes nothing about fresh groups
        rows[
            f"{prefix}data.{key} = {value} needs a source that {SOURCE_CAPABILITIES[need]}, but one with "
            f"{named} doesn't. What to do: remove it, or change the source"
        ] = is_set and need not in can
    rows[
        f"phase {phase.name}: with {named} all phases share [sampler] and [environment], since samples may "
        "be generated ahead of training; remove the change"
    ] = "follows_phases" not in can and (
        (phase_config.sampler, phase_config.environment) != (config.sampler, config.environment)
    )
    refuse(rows)


def _check_objective(phase: Phase, prefix: str) -> None:
    """Refuse what contradicts the objective of a phase, or its needs."""
    config, data, sampler = phase.config, phase.config.data, phase.config.sampler
    options, name = config.objective.options, config.objective.name
    initial = options_at(options, 0)
    needs = phase.entry.needs(phase.resolved(initial))
    if config.train.steps is not None:  # None: not known yet
        phase.resolved(options_at(options, config.train.steps))
    temperature, compared = config.policy.temperature, grouping(needs)
    follows = REF_LOGP in needs and (data.samples or (config.evaluate.every and measures_heldout_kl(config)))
    rows: dict[str, object] = {
        f"objective.beta with target_kl follows kl_ref: expected an objective that needs the reference, got "
        f"{name}, and fresh samples, got data.replay = {data.replay}, or evaluations with evaluate.every, "
        "evaluate.kl, evaluate.temperature = policy.temperature, and evaluate.kl_samples or "
        "data.eval_prompts; set these, or a number for beta": is_tuned(options.get("beta")) and not follows,
        'objective.baseline = "step" compares a response with the step\'s other groups, and train.groups '
        'is 1; raise it, or set objective.baseline = "others"': initial.get("baseline") == "step"
        and config.train.groups == 1,
        f"objective {name} compares the responses of a group (it needs {compared and compared.what}), but "
        "data.best_of_group draws only those of its highest reward; remove it, or use an objective of single "
        "responses, such as sft": data.best_of_group and compared,
        f"data.spread = {json.dumps(data.spread)} selects groups by whether rewards differ, but objective "
        f"{name} draws judged pairs; remove it": data.spread and PAIRS in needs,
        f"objective {name} needs samples of the policy itself: sampler.temperature = policy.temperature "
        f"({temperature}), no truncation and no skipped layers; got temperature {sampler.temperature}, top_k "
        f"{sampler.top_k}, top_p {sampler.top_p}, min_p {sampler.min_p}, skip_layers "
        f"{sampler.skip_layers}": FRESH in needs and not sampler.is_of_policy(temperature),
    }
    refuse(rows, prefix)
    _check_needs(config, needs, f"{prefix}objective {name} needs ")
    _check_sizes(phase, needs, prefix)


def _check_needs(config: RunConfig, needs: set[Need], begin: str) -> None:
    """Refuse needs that the samples of a phase can't meet."""
    data, sampler = config.data, config.sampler
    judges = "judges_pairs" in source_abilities(config)
    # Ratios need the kept sets of truncated samples; for a greedy choice there is no ratio.
    reports = "reports_kept_sets" in capabilities(config.engine.kind)
    records = reports and sampler.keep_sets is not False and sampler.temperature > 0
    unjudged, updates = "samples responses without judgments", config.train.updates
    reasons: dict[str, dict[str, object]] = {
        PAIRS: {
            f"data.complete_groups = {data.complete_groups} {unjudged}": data.complete_groups,
            f"data.replay = {data.replay} {unjudged} (1 draws stored pairs, as recipe pairs does; "
            'source.around = "rivals" with data.experts judges fresh ones)': data.samples_fresh
            and not judges,
        },
        OBSERVED_LOGP: {
            "there is neither [environment] nor data.store": not (config.environment or data.store)
        },
        BEHAVIOR_LOGP: {
            f"sampler has {sampler.truncation}: excluding tokens biases ratios to the policy": (
                data.samples and sampler.truncation and not records
            ),
        },
        MEANING: {
            'reward.meaning isn\'t set (objective.equivalent = "reward" needs none)': (
                data.samples and config.reward.meaning is None
            )
        },
        FRESH: {f"train.updates = {updates}": updates > 1},
    }
    stale, roles = _stale_by(config), data.roles or ROLES
    for need in ordered(needs):
        rows = reasons.get(need, {})
        if need.fresh_only:
            rows[f"with {stale}"] = stale
            stored = data.draws_stored and any(map(need.applies_to, roles))
            rows[f"data.replay = {data.replay} draws stored samples"] = stored
        refuse(rows, f"{begin}{need.what}, but ", f". What to do: {need.way_out}")


def _stale_by(config: RunConfig) -> str:
    """Why samples of a run may be stale; "" if they are from the current weights."""
    source, max_age = config.source, config.data.max_age
    if "samples_current_weights" in source_abilities(config):
        return ""
    if "samples_current_weights" not in lacking(config):
        return f"source.around = {source.around} samples are of another policy"
    if source.lags:
        key = "sync_from" if source.sync_from > 1 else "sync_every"
        return f"source.{key} = {getattr(source, key)} samples are stale (with 1 they aren't)"
    if max_age == 0:
        return ""
    return (
        f'source.kind = "{source.kind}" samples may be stale (data.max_age = {max_age}; with 0 they aren\'t)'
    )


def _check_sizes(phase: Phase, needs: set[Need], prefix: str) -> None:
    """Refuse groups with fewer responses than the objective compares."""
    data, options = phase.config.data, phase.config.objective.options
    sizes = {}  # by setting, the size of groups and its minimum
    if data.samples_fresh:
        sizes["sampler.n"] = phase.config.sampler.n, least_responses(needs)
    if data.group_size is not None and data.draws_stored:
        joining = data.complete_groups or 0
        sizes["data.group_size"] = data.group_size, least_responses(needs, "expert") - joining
    for key, (size, minimum) in sizes.items():
        if size >= minimum:
            continue
        ways = ""
        for option, value in options.items():  # such as a baseline of the group
            remaining = {name: other for name, other in options.items() if name != option}
            if least_responses(phase.entry.needed(remaining)) < minimum:
                ways += f"remove objective.{option} = {value!r} or give it another value, or "
        raise Refused(
            f"{prefix}objective {phase.config.objective.name} needs groups of at least {minimum} responses, "
            f"but {key} is {size}. What to do: {ways}a larger {key}"
        )


def _check_reward(phase: Phase, prefix: str) -> None:
    """Refuse settings that a reward from recorded parts would lose, and stored values of unshaped rewards."""
    reward, needs_parts = phase.config.reward, REWARD_PARTS in phase.needs
    whitens, clips = reward.whiten != "none", reward.clip is not None
    maker = "the advantage of gdpo" if needs_parts else f"reward.whiten = {reward.whiten}"
    lost = {
        "data.reward_scale": phase.config.data.reward_scale and (needs_parts or reward.functions),
        "reward.whiten": needs_parts and whitens,
        "reward.clip": needs_parts and clips,
    }
    rows: dict[str, object] = {
        "the advantage of gdpo normalizes each of several rewards, but reward.functions names none": (
            needs_parts and not reward.functions
        ),
        **{
            f"{maker} computes the reward from its recorded parts, so {key} would be lost; remove one of the "
            "two": is_set and (needs_parts or whitens)
            for key, is_set in lost.items()
        },
        f"reward.{'whiten' if whitens else 'clip'}: stored values (data.value_store, data.value_half_life) "
        "estimate the unshaped reward; remove one of the two": (
            phase.takes_stored_value and (whitens or clips)
        ),
    }
    refuse(rows, prefix)


def _check_run(config: RunConfig, phases: Sequence[Phase]) -> None:
    """Refuse an environment without prompts, a stored value without an objective that reads it or the
    reverse, a held-out share without data, and a guard's KL that no phase measures."""
    data, configs = config.data, [phase.config for phase in phases]
    is_read = any(phase.takes_stored_value for phase in phases)
    values = {f"data.{key}": getattr(data, key) for key in ("value_store", "value_half_life")}
    got = " and ".join(f"{key} = {value}" for key, value in values.items() if value is not None)
    watched = [phase for phase in phases if phase.config.guard.kl is not None]
    rows: dict[str, object] = {
        "environment: episodes are played from data.prompts or data.eval_prompts, and neither is set": (
            any(each.environment for each in configs) and not (data.prompts or data.eval_prompts)
        ),
        "data.value_store, or data.value_half_life, and an objective that reads stored values, such as "
        f'one with baseline = "stored", go together: got {got or "none of them"} and '
        f"{'such an' if is_read else 'another'} objective": (
            sum(value is not None for value in values.values()) != is_read
        ),
        "data.hold_out holds out prompts of data.prompts and data.store: expected one of them and no "
        f"data.eval_store, got data.prompts = {data.prompts}, data.store = {data.store} and "
        f"data.eval_store = {data.eval_store}": data.hold_out
        and (not (data.prompts or data.store) or any(each.data.eval_store for each in configs)),
        "guard.kl: kl_ref needs fresh samples (data.replay < 1) and an objective that needs the reference, "
        "but no phase has both, so the guard would watch nothing; use guard.loss, or set evaluate.beta, "
        "which needs the reference": watched and not any(map(_measures_fresh_kl, watched)),
    }
    refuse(rows)


def _measures_fresh_kl(phase: Phase) -> bool:
    needs_reference = REF_LOGP in phase.needs or phase.config.evaluate.beta is not None
    return phase.config.data.samples and needs_reference


def check_heldout(
    prompts: Iterable[str], heldout: Collection[str], setting: str = "data.eval_prompts"
) -> None:
    """Raise `Refused` if a held-out prompt (both are ids) is in the training data."""
    both = sorted(set(prompts) & set(heldout))
    if both:
        raise Refused(
            f"{setting}: {len(both)} of {len(heldout)} held-out prompts are in the training data (such as "
            f"{', '.join(both[:3])}); remove them from one of the two"
        )


def follows_log(config: RunConfig) -> bool:
    """Whether settings follow a metric of held-out groups of a log."""
    return config.followed == "eval_auc" and any(getattr(config.evaluate, key) for key in DECIDING)


def _check_followed(phases: Sequence[Phase]) -> None:
    """Raise `Refused` if a run would wait for a metric that no phase measures."""
    rules = [phase.config.evaluate for phase in phases]
    follows = any(phase.config.followed for phase in phases)
    measures_kl = any(measures_heldout_kl(phase.config) for phase in phases)
    for rule in rules:
        rows: dict[str, object] = {
            **{
                f"{key} = {getattr(rule, key)} follows a metric of data.eval_prompts or of held-out groups "
                "(data.hold_out or data.eval_store), but no phase has that; set one of them, or remove "
                f"evaluate.{key}": getattr(rule, key) and not follows
                for key in DECIDING
            },
            f"target_kl = {rule.target_kl} is compared with eval_kl_ref, which no phase measures: it needs "
            "evaluate.kl, evaluate.temperature = policy.temperature, and data.eval_prompts or "
            "evaluate.kl_samples and stored data; set them, or remove evaluate.target_kl": (
                rule.target_kl and not measures_kl
            ),
            **{
                f"{key} = {getattr(rule, key)} acts at evaluations, but evaluate.every = 0 evaluates only at "
                "the ends of phases; set evaluate.every": getattr(rule, key)
                and not any(other.every for other in rules if getattr(other, key))
                for key in ("patience", "target_kl")
            },
        }
        refuse(rows, "evaluate.")


def measures_heldout_kl(config: RunConfig) -> bool:
    """Whether a phase measures eval_kl_ref, on held-out prompts or on a few prompts of the store."""
    return samples_kl(config) or (may_measure_kl(config) and config.data.eval_prompts is not None)


def may_measure_kl(config: RunConfig) -> bool:
    """Whether held-out responses are samples of the policy, and evaluate.kl requests their KL."""
    return config.evaluate.kl and config.evaluate.temperature == config.policy.temperature


def samples_kl(config: RunConfig) -> bool:
    """Whether a phase on stored data samples responses for the KL, provided that the run has a reference.

    It doesn't if held-out prompts measure the KL, if evaluate.temperature isn't policy.temperature, if the
    engine isn't in this process, or if responses are episodes, whose prompts need more than the store has.
    """
    wanted = config.data.draws_stored and config.evaluate.kl_samples > 0 and may_measure_kl(config)
    shares_weights = "shares_weights" in capabilities(config.engine.kind)
    if not (wanted and shares_weights and "shares_engine" in source_abilities(config)):
        return False
    return config.environment is None and not config.asks_held_out


def unscored(config: RunConfig, *, has_reference: bool) -> int:
    """Number of responses that a phase samples at evaluations if no reward scores held-out ones."""
    rule = config.evaluate
    for_kl = rule.kl_samples if has_reference and samples_kl(config) else 0
    return max(rule.side_by_side, for_kl) if config.data.draws_stored else 0


def notes_on_settings(phases: Sequence[Phase]) -> list[str]:
    """Notes that follow from the settings alone, before anything is loaded."""
    lines = []
    for phase in phases:
        config, entry, name = phase.config, phase.entry, phase.config.objective.name
        options = entry.defaults() | options_at(config.objective.options, 0)
        unweighted = name == "agro" and options.get("weight") == "none" and config.data.draws_stored
        stale = _stale_in(config)
        rows = {
            entry.warnings.options_warning(options) or "": True,
            "agro trains on stored responses without a weight, so responses that became improbable are "
            "pushed down further and take the good ones with them. On the log of reproductions/offline 0.62 "
            "of the answers were right at the end, and 0.92 with a weight. What to do: objective.weight = "
            '"reference", with weight_power = 0.5, weight_normalize = "group" and weight_baseline = '
            '"optimal", as in the recipe log': unweighted,
            f'objective.baseline = "step" keeps the optimum only on fresh samples, but with {stale} some '
            "aren't fresh, so training converges elsewhere. What to do: objective.baseline = "
            '"others", which keeps it on any samples': stale and options.get("baseline") == "step",
        }
        lines += [f"phase {phase.name}: {text}" for text, applies in rows.items() if text and applies]
    return lines


def _stale_in(config: RunConfig) -> str:
    """The settings that make some samples of a phase stale; "" if all are from the policy that it updates."""
    is_current = "samples_current_weights" in source_abilities(config)
    stale = {
        "data.replay": config.data.draws_stored,
        f"train.updates = {config.train.updates}": config.train.updates > 1,
        f"source.kind = {config.source.kind}, whose samples may be of earlier weights": not is_current,
    }
    return " and ".join(name for name, is_so in stale.items() if is_so)
