"""What is refused before any compute: settings that contradict each other, what the objective needs, or what
is measured. Refusals of one kind are rows: the text, and whether it applies."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence

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
from agro.rollout.engines.capabilities import capabilities, check_section
from agro.runs.metrics import FOLLOWED
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

# Settings that follow a held-out measurement, each with the value that follows none.
DECIDING = {"metric": None, "keep_best": False, "patience": 0, "target": None}


def check_config(config: RunConfig) -> tuple[Phase, ...]:
    """The phases of a run. Raises `Refused` naming the settings, phase by phase."""
    check_texts(config.model_dump())
    if (config.policy.model is None) == (config.policy.new is None):
        got = "neither" if config.policy.model is None else "both"
        raise Refused(
            "policy: expected either policy.model (a folder or hub name) or [policy.new] (random weights), "
            f"got {got}"
        )
    phases = Phase.all(config)
    _check_shared(config, phases)
    _check_policy(phases[0].config, phases)
    for phase in phases:
        prefix = f"phase {phase.name}: " if config.phases else ""
        _check_rules(phase.config, prefix)
        _check_engine(phase.config, prefix)
        if phase.config.source.around or phase.config.source.options:
            check_around(phase, prefix)
        _check_source(config, phase, prefix)
        check_phase(phase, prefix)
        _check_shaped(phase, prefix)
        by_step = options_at(phase.config.objective.options, 0).get("baseline") == "step"
        if by_step and phase.config.train.groups == 1:
            raise Refused(
                f'{prefix}objective.baseline = "step" compares a response with the step\'s other groups, and '
                'train.groups is 1. What to do: raise train.groups, or set objective.baseline = "others"'
            )
    _check_run(config, phases)
    check_followed(phases)
    return phases


def check_sharded(config: RunConfig) -> None:
    """Raise `Refused` for what doesn't work on several ranks: bitsandbytes packs values, which FSDP cuts."""
    phases = [config.phase(name) for name in config.phase_names]
    rows = {
        'train.start = "first" loads a complete model, which several ranks (torchrun) don\'t have. What '
        "to do: train in one process, or a second run from the first model with this run's store": any(
            phase.train.start == "first" for phase in phases
        ),
        "policy.reference_model is a URL, and several ranks (torchrun) shard the reference. What to do: "
        "train in one process, or give a folder": config.policy.reference_is_served,
        'policy.reference = "sampler" needs one process: several ranks (torchrun) have shards of the '
        'reference. What to do: policy.reference = "periodic", or train in one': (
            config.policy.reference == "sampler"
        ),
    }
    refuse(rows)
    for phase in phases:
        around = phase.source.around
        if around is not None and "complete_policy" in wrapper_of(phase)[0].needs:
            raise Refused(
                f"source.around = {around} needs a source that {SOURCE_CAPABILITIES['complete_policy']}, but "
                "several ranks (torchrun) have shards of it. What to do: train in one process"
            )
    packed = [f"policy.quantize = {config.policy.quantize}"] if config.policy.quantize else []
    if any(phase.train.optimizer == "adamw_8bit" for phase in phases):
        packed.append("train.optimizer = adamw_8bit")
    if packed:
        raise Refused(
            f"{packed[0]} doesn't work on several ranks (torchrun): bitsandbytes packs values in blocks, "
            "which FSDP would cut. What to do: remove it, or train in one process"
        )


def _check_shared(config: RunConfig, phases: Sequence[Phase]) -> None:
    """Settings that are used once for the complete run can't differ in a phase. Phases share one policy and
    one reference; only the reference "phase" can begin later."""
    kinds = [phase.config.policy.reference for phase in phases]
    keys = [key for key in type(config.policy).model_fields if key.startswith("reference")]
    references = {key: getattr(config.policy, key) for key in keys}
    elsewhere = ("reward", "policy")  # checked as one
    settings = [(section, key) for section, key in shared() if section not in elsewhere]
    for phase in phases:
        own, policy = phase.config, phase.config.policy
        end = "; remove the change"
        if own.reward != config.reward:
            raise Refused(f"phases: a phase can't change [reward], which is one for the complete run{end}")
        for section, key in settings:
            if getattr(getattr(own, section), key) != getattr(getattr(config, section), key):
                raise Refused(
                    f"phase {phase.name}: a phase can't change {section}.{key}, which is one for the "
                    f"complete run{end}"
                )
        same_phase = policy.model_copy(update={"reference": kinds[0]}) == phases[0].config.policy
        same_run = policy.model_copy(update=references) == config.policy
        if not (same_phase and same_run):
            raise Refused(f"phases: a phase can't change [policy], except for policy.reference{end}")
    begins_later = set(kinds) == {"start", "phase"} and kinds == sorted(kinds, reverse=True)
    if len(set(kinds)) > 1 and not begins_later:
        got = ", ".join(f"{phase.name}: {kind}" for phase, kind in zip(phases, kinds))
        raise Refused(
            'policy.reference: the phases may have "start" first and "phase" then, or all the same; got '
            f"{got}"
        )


def _check_policy(config: RunConfig, phases: Sequence[Phase]) -> None:
    """The adapter, the reference, and what the first phase begins with."""
    policy, source, lora = config.policy, config.source, config.policy.lora
    kind = policy.reference
    resumed = LoRA() if lora is None or lora.start is None else lora
    start_only = LoRA(start=resumed.start, merge=resumed.merge)
    together = {"reference_model": "model", "reference_decay": "ema", "reference_every": "periodic"}
    moves = f'policy.reference = "{kind}" changes during the run; remove one of the two'
    needs_reference = any(REF_LOGP in phase.needs for phase in phases)
    moving_cache = policy.cache_reference and policy.reference_moves
    moving_measure = config.data.has_held_out_groups and policy.reference_moves
    rows = {
        "[policy.lora] adapts a trained model, but policy.new starts from random weights; set "
        "policy.model, or remove one of the two": lora is not None and policy.model is None,
        **{
            f"policy.lora.start has its own rank, alpha and targets, but policy.lora.{key} is set too; "
            "set one of them": getattr(resumed, key) != getattr(start_only, key)
            for key in ("rank", "alpha", "targets")
        },
        **{
            f'policy.{key} and policy.reference = "{needed}" go together: got policy.{key} = '
            f'{getattr(policy, key)} and policy.reference = "{kind}"': (
                (getattr(policy, key) is not None) != (kind == needed)
            )
            for key, needed in together.items()
        },
        f'source.sync_from = {source.sync_from} and source.kind = "elsewhere" exclude each other: '
        "collectors sample with the newest weights that are published. What to do: source.kind = "
        '"inline"': source.kind == "elsewhere" and source.sync_from > 1,
        'policy.reference = "sampler" is the earlier weights that sample: expected source.kind = '
        f'"inline" and source.sync_every or source.sync_from of 2 or more, got "{source.kind}", '
        f"{source.sync_every} and {source.sync_from}": kind == "sampler" and not source.lags,
        'policy.reference = "sampler" and [policy.lora] exclude each other: the copies that sample are '
        'complete models. What to do: train all weights, or policy.reference = "periodic"': (
            kind == "sampler" and lora is not None
        ),
        "policy.cache_reference keeps log-probs of the reference, but no phase's objective needs them; "
        "remove it": policy.cache_reference and not needs_reference,
        f"policy.cache_reference keeps log-probs of one reference, but {moves}": moving_cache,
        "policy.reference_model is a URL, whose model may change: leave policy.cache_reference out": (
            policy.reference_is_served and policy.cache_reference
        ),
        "policy.reference_model is a URL, whose log-probs are those at policy.temperature = 1: set it": (
            policy.reference_is_served and policy.temperature != 1
        ),
        f"data.eval_store and data.hold_out are measured against one reference, but {moves}": moving_measure,
        'policy.reference = "ema" moves by small shares of a difference, which policy.dtype = '
        f'"{policy.dtype}" rounds away, so that it would not move; use float32, an adapter '
        '([policy.lora], whose weights are float32), or "periodic"': (
            kind == "ema" and policy.dtype != "float32" and lora is None
        ),
        'train.start = "first" is for later phases: the first one begins with these weights': (
            config.train.start == "first"
        ),
    }
    refuse(rows)


def _check_rules(config: RunConfig, prefix: str) -> None:
    """Contradictions in the settings of the guard and of prompt_order, and shares of what isn't drawn."""
    data, guard = config.data, config.guard
    if data.prompt_order == "uncertain":
        problems = {
            "data.value_half_life isn't set, by which values are tracked": not data.value_half_life,
            "data.candidates is 1: there is nothing to choose from": data.candidates == 1,
            'source.kind = "elsewhere": collectors choose prompts': config.source.kind == "elsewhere",
        }
        refuse(problems, f'{prefix}data.prompt_order = "uncertain": ', ". What to do: change one")
    excluded = {
        'guard.kl and guard.action = "skip": a policy whose updates are skipped keeps its KL, so every later '
        'step would be skipped; use "stop" or "rollback"': guard.action == "skip" and guard.kl is not None
    }
    for name in filter(None, data.shares_at(0)):
        key = "roles" if name in ROLES else "sources"
        allowed = getattr(data, key)
        excluded[
            f"data.replay has a share of {name}, which data.{key} doesn't name, so nothing of it would be "
            f"drawn; remove the share, or data.{key}"
        ] = allowed is not None and name not in allowed
    refuse(excluded, prefix)


def _check_engine(config: RunConfig, prefix: str) -> None:
    """Settings of a phase that the engine can't serve."""
    engine, can = config.engine, capabilities(config.engine.kind)
    is_sglang = engine.dialect == "sglang"
    for name in ("sampler", "train", "source"):
        check_section(name, getattr(config, name), can, f'engine.kind = "{engine.kind}"', prefix)
    if engine.sleep and (not engine.uses_servers or is_sglang or config.source.kind != "inline"):
        raise Refused(
            "engine.sleep needs a server of vLLM that samples for this process alone, beside the trainer. "
            'What to do: engine.kind = "vllm" and source.kind = "inline", or engine.sleep = false'
        )
    if engine.memory is not None and not engine.starts_server:
        raise Refused(f'engine.memory is of engine.kind = "vllm", got "{engine.kind}"; leave it out')
    if not engine.uses_servers:
        return
    assert engine.starts_server or engine.servers
    names_others = engine.url is not None or engine.urls or is_sglang
    if engine.starts_server and names_others:
        raise Refused(
            'engine.kind = "vllm" starts a server of its own: expected no engine.url, no engine.urls and '
            'engine.dialect = "vllm". What to do: remove them, or use engine.kind = "server"'
        )
    from_environment(engine.api_key, "engine.api_key")
    transfers = is_sglang and engine.push == "transfer"
    generates = is_sglang and engine.api == "generate"
    rows = {
        "engine.push = adapter needs policy.lora: without it all weights are trained. What to do: use "
        "engine.push = reload or transfer": engine.push == "adapter" and config.policy.lora is None,
        "engine.push = transfer and engine.dialect = sglang exclude each other: it is vLLM's way": transfers,
        "engine.api = generate and engine.dialect = sglang exclude each other: it is vLLM's way": generates,
    }
    refuse(rows)


def _check_source(config: RunConfig, phase: Phase, prefix: str) -> None:
    """Settings of a phase that its source can't serve."""
    source, can = phase.config.source, source_abilities(phase.config)
    named = f'source.kind = "{source.kind}"'
    if source.around is not None:
        named += f" and source.around = {source.around}"
    values = {key: getattr(phase.config.data, key) for key in NEEDED_BY}
    values["spread"] = values["spread"] is True  # a number changes nothing about fresh groups
    sampling = phase.config.sampler, phase.config.environment
    refuse(
        {
            f"{prefix}data.{key} = {values[key]} needs a source that {SOURCE_CAPABILITIES[need]}, which one "
            f"with {named} doesn't. What to do: remove it, or change the "
            "source": values[key] and need not in can
            for key, need in NEEDED_BY.items()
        }
        | {
            f"phase {phase.name}: with {named} all phases share [sampler] and [environment], since its "
            "samples may be made ahead of training; remove the change": "follows_phases" not in can
            and sampling != (config.sampler, config.environment)
        }
    )


def _check_shaped(phase: Phase, prefix: str) -> None:
    """What a reward made of its recorded parts loses, and values that are of rewards before shaping."""
    config, reward, needs_parts = phase.config, phase.config.reward, REWARD_PARTS in phase.needs
    whitens, clips = reward.whiten != "none", reward.clip is not None
    maker = "the advantage of gdpo" if needs_parts else f"reward.whiten = {reward.whiten}"
    makes = needs_parts or (whitens and bool(reward.functions))
    lost = {
        "data.reward_scale": makes and config.data.reward_scale,
        "reward.whiten": needs_parts and whitens,
        "reward.clip": needs_parts and clips,
    }
    shaped = "reward.whiten" if whitens else "reward.clip"
    rows = {
        "the advantage of gdpo normalizes each of several rewards, but reward.functions names none. What "
        "to do: list them there, or choose another advantage": needs_parts and not reward.functions,
        **{
            f"{maker} makes the reward of its recorded parts, and {name} would be lost. What to do: "
            "remove one of the two": is_lost
            for name, is_lost in lost.items()
        },
        f"{shaped}: stored values (data.value_store, data.value_half_life) are of rewards as they were "
        "scored. What to do: remove one of the two": phase.takes_stored_value and (whitens or clips),
    }
    refuse(rows, prefix)


def _check_run(config: RunConfig, phases: Sequence[Phase]) -> None:
    """Settings that no phase would use: an environment without prompts, a stored value without an objective
    that reads it and the reverse, measurements and guards that would have no data."""
    data, configs = config.data, [phase.config for phase in phases]
    is_read = any(phase.takes_stored_value for phase in phases)
    keys = [key for key in ("value_store", "value_half_life") if getattr(data, key) is not None]
    got = " and ".join(f"data.{key} = {getattr(data, key)}" for key in keys) or "none of them"
    has_prompts = data.store is not None or data.prompts is not None
    measured = [each for each in configs if each.evaluate.beta is not None]
    watched = [phase for phase in phases if phase.config.guard.kl is not None]
    reads = [
        p.config.data.samples for p in watched if REF_LOGP in p.needs or p.config.evaluate.beta is not None
    ]
    rows = {
        "environment: episodes are played from data.prompts or data.eval_prompts, and neither is set; "
        "set one, or remove [environment]": not (data.prompts or data.eval_prompts)
        and any(each.environment for each in configs),
        "data.value_store, or data.value_half_life, and an objective that reads stored values, such as "
        f'one with baseline = "stored", go together: got {got} and {"such an" if is_read else "another"} '
        "objective": len(keys) != is_read,
        "data.hold_out holds out prompts of data.prompts and data.store: expected one of them and no "
        f"data.eval_store, got data.prompts = {data.prompts}, data.store = {data.store} and "
        f"data.eval_store = {data.eval_store}": data.hold_out
        and (not has_prompts or any(each.data.eval_store for each in configs)),
        "guard.kl: kl_ref is measured on fresh samples (data.replay < 1) where the objective needs the "
        "reference, and no phase has both, so the guard would watch nothing; remove guard.kl, use "
        "guard.loss, or set evaluate.beta, which needs the reference": watched and not any(reads),
    }
    refuse(rows)
    if measured and not any(map(has_groups_to_measure, measured)):
        raise Refused(
            f"evaluate.beta = {measured[0].evaluate.beta:g}: ½ Var(R) and regret are measured in groups, and "
            "no phase has any: fresh ones (data.replay < 1, sampler.n of 2 or more), responses to "
            "data.eval_prompts (evaluate.n of 2 or more, evaluate.kl, evaluate.temperature = "
            "policy.temperature), a data.eval_store or data.hold_out; set one of them, or remove "
            "evaluate.beta"
        )


def check_heldout(
    prompts: Iterable[str], heldout: Collection[str], setting: str = "data.eval_prompts"
) -> None:
    """Raise `Refused` where a held-out prompt (both by id) is trained on."""
    both = sorted(set(prompts) & set(heldout))
    if both:
        raise Refused(
            f"{setting}: {len(both)} of {len(heldout)} held-out prompts are in the training data (for one: "
            f"{', '.join(both[:3])}); remove them from one of the two"
        )


def has_groups_to_measure(config: RunConfig) -> bool:
    """Whether a phase has groups for ½ Var(R) or regret: fresh ones, an evaluation's, or held-out ones."""
    rule, data = config.evaluate, config.data
    fresh = data.samples_fresh and config.sampler.n > 1
    is_on_policy = rule.kl and rule.temperature == config.policy.temperature
    evaluated = config.asks_held_out and rule.n > 1 and is_on_policy
    return fresh or evaluated or data.has_held_out_groups


def follows_log(config: RunConfig) -> bool:
    """Whether settings follow what is measured on held-out groups of a log."""
    is_set = any(getattr(config.evaluate, key) != unset for key, unset in DECIDING.items())
    return is_set and config.followed != "eval_reward"


def check_followed(phases: Sequence[Phase]) -> None:
    """Raise `Refused` where a run would wait for what no phase measures."""
    configs = [phase.config for phase in phases]
    for rule in (config.evaluate for config in configs):
        ways = ", or ".join(f"{FOLLOWED[name].needs} for {name}" for name in ("eval_reward", "eval_auc"))
        for key, unset in DECIDING.items():
            if getattr(rule, key) == unset or any(map(measures_followed, phases)):
                continue
            if rule.metric is not None:
                raise Refused(
                    f"evaluate.metric = {rule.metric} is measured on {FOLLOWED[rule.metric].needs}, and no "
                    "phase has that; set it, follow another metric, or remove evaluate.metric"
                )
            raise Refused(
                f"evaluate.{key} = {getattr(rule, key)} compares held-out measurements, and no phase makes "
                f"any; set {ways}, or remove evaluate.{key}"
            )
    # ½ Var(R) under another β is another measure, in which no best can be chosen.
    measured = [phase for phase in phases if phase.config.data.has_held_out_groups]
    betas = [phase.diagnostic_beta(phase.config.objective.options) for phase in measured]
    values = [beta for beta in betas if beta is not None]
    changes = any(isinstance(beta, Mapping) or beta != values[0] for beta in values)
    compares = any(config.evaluate.metric == "eval_consistency" for config in configs)
    if compares and changes:
        raise Refused(
            "evaluate.metric = eval_consistency compares ½ Var(R) over the run, which needs one β, but "
            f"objective.beta changes: got {', '.join(map(str, values))}. What to do: set evaluate.beta"
        )
    targets = [c.evaluate.target_kl for c in configs if c.evaluate.target_kl is not None]
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


def check_phase(phase: Phase, prefix: str) -> None:
    """Raise `Refused` where the settings of a phase contradict what its objective needs."""
    config, data, objective = phase.config, phase.config.data, phase.config.objective
    needs = phase.entry.needs(phase.resolved(options_at(objective.options, 0)))
    if config.train.steps is not None:  # else it isn't known yet
        phase.resolved(options_at(objective.options, config.train.steps))
    evaluates = bool(config.evaluate.every) and measures_heldout_kl(config)
    measures_kl = REF_LOGP in needs and (data.samples or evaluates)
    rows: dict[str, object] = {
        "objective.beta with target_kl follows kl_ref, the KL to the reference of an objective that "
        f"needs it, got {objective.name}. It is measured on fresh samples, got data.replay = "
        f"{data.replay}, or at evaluations, which need evaluate.every, evaluate.kl, and "
        "evaluate.kl_samples or data.eval_prompts. What to do: set these, or a number for "
        "beta": is_tuned(objective.options.get("beta")) and not measures_kl,
        f"data.replay = {data.replay} samples from prompts, but data.prompts isn't set; set it, or "
        "data.replay = 1": data.samples_fresh and not data.prompts,
        f"data.experts = {data.experts} draws stored responses, but data.store isn't set; set it, or "
        "leave data.experts out": data.experts and data.store is None,
    }
    refuse(rows, prefix)
    _check_origin(config, needs, prefix)
    _check_differences(config, needs, prefix)
    sizes = {}  # of groups, and the least, by the setting that has it
    if data.samples_fresh:
        sizes["sampler.n"] = config.sampler.n, least_responses(needs)
    if data.group_size is not None and data.draws_stored:
        joining = data.complete_groups or 0
        sizes["data.group_size"] = data.group_size, least_responses(needs, "expert") - joining
    for key, (size, minimum) in sizes.items():
        if size < minimum:
            raise Refused(
                f"{prefix}objective {objective.name} needs groups of at least {minimum} responses, but {key} "
                f"is {size}. What to do: {_ways_to_smaller(phase, minimum)}a larger {key}"
            )
    sampler, temperature = config.sampler, config.policy.temperature
    repeats = FRESH in needs and config.train.updates > 1
    rows = {
        f"{MEANING.what}, but reward.meaning isn't set. What to do: {MEANING.way_out}; or set "
        'objective.equivalent = "reward"': (
            MEANING in needs and data.samples and config.reward.meaning is None
        ),
        f"{FRESH.what}, but train.updates = {config.train.updates}. What to do: {FRESH.way_out}.": repeats,
        f"samples of the policy itself: sampler.temperature = policy.temperature ({temperature}), no "
        f"truncation and no skipped layers; got temperature {sampler.temperature}, top_k "
        f"{sampler.top_k}, top_p {sampler.top_p}, min_p {sampler.min_p}, skip_layers "
        f"{sampler.skip_layers}": (FRESH in needs and not sampler.is_of_policy(temperature)),
    }
    refuse(rows, f"{prefix}objective {objective.name} needs ")


def _ways_to_smaller(phase: Phase, minimum: int) -> str:
    """The options without which the objective trains on smaller groups, such as a baseline of the group."""
    options = phase.config.objective.options
    ways = ""
    for key, value in options.items():
        remaining = {name: other for name, other in options.items() if name != key}
        if least_responses(phase.entry.needed(remaining)) < minimum:
            ways += f"remove objective.{key} = {value!r} or give it another value, or "
    return ways


def _check_origin(config: RunConfig, needs: set[Need], prefix: str) -> None:
    """Refuse needs that fresh samples, or stored ones, can't satisfy."""
    data, sampler = config.data, config.sampler
    judges = "judges_pairs" in source_abilities(config)
    has_answers = config.environment is not None or data.store is not None
    # Ratios need the kept sets of truncated samples; to a greedy choice there is none.
    reports = "reports_kept_sets" in capabilities(config.engine.kind)
    records = reports and sampler.keep_sets is not False and sampler.temperature > 0
    record = ', or record which tokens it keeps (engine.kind = "hf" and sampler.keep_sets = true)'
    way = "sample without it" + (record if sampler.temperature > 0 else "")
    begin = f"{prefix}objective {config.objective.name} needs "
    truncates = BEHAVIOR_LOGP in needs and data.samples and sampler.truncation and not records
    rows = {
        f"pairs, which fresh samples don't have, but data.replay = {data.replay}. What to do: "
        "data.replay = 1, from a data.store with judged pairs (agro import) and recipe pairs, "
        'source.around = "rivals" with data.experts, or an objective on rewards.': (
            PAIRS in needs and data.samples_fresh and not judges
        ),
        f"{OBSERVED_LOGP.what}, but there is neither [environment] nor data.store. What to do: "
        f"{OBSERVED_LOGP.way_out}.": OBSERVED_LOGP in needs and not has_answers,
        f"{BEHAVIOR_LOGP} over the same tokens as the trainer's, but sampler has {sampler.truncation}: "
        f"what it excludes makes ratios to the policy biased. What to do: {way}, or use an objective "
        "that doesn't need them, such as agro.": truncates,
    }
    refuse(rows, begin)
    for need in (need for need in ordered(needs) if need.fresh_only):
        if (stale := _stale_by(config)) is not None:
            reason, way = stale
            raise Refused(f"{begin}{need.what}, but with {reason}. What to do: {way}, or {need.way_out}.")
        if data.draws_stored and any(need.applies_to(role) for role in data.roles or ROLES):
            but = f"data.replay = {data.replay} draws stored samples"
            raise Refused(f"{begin}{need.what}, but {but}. What to do: {need.way_out}.")


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


def _check_differences(config: RunConfig, needs: set[Need], prefix: str) -> None:
    """Where rewards are compared that can't differ or aren't looked at, and what data.complete_groups and
    data.reward_scale can't be combined with."""
    data, objective, need = config.data, f"objective {config.objective.name}", grouping(needs)
    if data.best_of_group and need is not None:
        raise Refused(
            f"{prefix}{objective} compares the responses of a group (it needs {need.what}), but "
            "data.best_of_group draws only those of its highest reward. What to do: leave "
            "data.best_of_group out, or use an objective of single responses, such as sft."
        )
    if data.spread:
        problems: dict[str, object] = {
            "data.best_of_group draws only responses of one reward in a group": data.best_of_group,
            f"{objective} draws judged pairs, whatever their rewards": PAIRS in needs,
            "sampler.n = 1 makes groups of one response": (
                data.spread is True and data.samples_fresh and config.sampler.n == 1
            ),
        }
        begin = (
            f"{prefix}data.spread = {json.dumps(data.spread)} chooses groups by whether rewards differ, but "
        )
        refuse(problems, begin, ". What to do: data.spread = false, or change the other")
    if data.reward_scale:
        keys = {"min_reward": data.min_reward is not None}
        keys |= {"best_of_group": data.best_of_group, "spread": bool(data.spread)}
        begin = f"{prefix}data.reward_scale maps rewards after the draw, but data."
        refuse(keys, begin, " compares them as they are stored; remove one of the two")
    if data.complete_groups is not None:
        draws_none = not data.draws_stored or data.store is None
        problems = {
            "completes stored groups, but none is drawn: set data.store and data.replay": draws_none,
            f"samples responses without judgments, but {objective} needs pairs": PAIRS in needs,
            "and data.spread exclude each other: whether rewards differ isn't known before it samples": (
                data.spread
            ),
        }
        begin = f"{prefix}data.complete_groups = {data.complete_groups} "
        refuse(problems, begin, "; change one of the two")
