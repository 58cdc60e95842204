"""What is refused before any compute: settings that contradict each other or the objective."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from agro.config import LoRA, RunConfig, check_texts, from_environment, shared
from agro.errors import Refused
from agro.objectives.needs import REF_LOGP, REWARD_PARTS
from agro.rollout.engines.capabilities import capabilities, check_section
from agro.train.around import (
    NEEDED_BY,
    SOURCE_CAPABILITIES,
    check_around,
    source_abilities,
    wrapper_of,
)
from agro.train.check_objective import check_followed, check_phase, refuse_first
from agro.train.phases import Phase, options_at
from agro.types import ROLES


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
    _check_references(config, phases)
    _check_adapter(phases[0].config)
    _check_reference(phases[0].config, phases)
    if phases[0].config.train.start == "first":
        raise Refused('train.start = "first" is for later phases: the first one begins with these weights')
    for phase in phases:
        prefix = f"phase {phase.name}: " if config.phases else ""
        _check_rules(phase.config, prefix)
        _check_engine(phase.config, prefix)
        if phase.config.source.around or phase.config.source.options:
            check_around(phase, prefix)
        _check_source(config, phase, prefix)
        check_phase(phase, prefix)
        _check_shaped(phase, prefix)
        if (
            options_at(phase.config.objective.options, 0).get("baseline") == "step"
            and phase.config.train.groups == 1
        ):
            raise Refused(
                f'{prefix}objective.baseline = "step" compares a response with the step\'s other groups, and '
                'train.groups is 1. What to do: raise train.groups, or set objective.baseline = "others"'
            )
    _check_used(config, phases)
    _check_measured(config, phases)
    check_followed(phases)
    return phases


def check_sharded(config: RunConfig) -> None:
    """Raise `Refused` for what doesn't work on several ranks: bitsandbytes packs values, which FSDP cuts."""
    if any(config.phase(name).train.start == "first" for name in config.phase_names):
        raise Refused(
            'train.start = "first" loads a complete model, which several ranks (torchrun) don\'t have. What '
            "to do: train in one process, or a second run from the first model with this run's store"
        )
    packed: dict[str, str | None] = {"policy.quantize": config.policy.quantize}
    for name in config.phase_names:
        if config.phase(name).train.optimizer == "adamw_8bit":
            packed["train.optimizer"] = "adamw_8bit"
    if config.policy.reference == "sampler":
        raise Refused(
            'policy.reference = "sampler" needs one process: several ranks (torchrun) have shards of the '
            'reference. What to do: policy.reference = "periodic", or train in one'
        )
    for name in config.phase_names:
        around = config.phase(name).source.around
        if around is not None and "complete_policy" in wrapper_of(config.phase(name))[0].needs:
            raise Refused(
                f"source.around = {around} needs a source that "
                f"{SOURCE_CAPABILITIES['complete_policy']}, but several ranks (torchrun) have shards of it. "
                "What to do: train in one process"
            )
    for key, value in packed.items():
        if value is not None:
            raise Refused(
                f"{key} = {value} doesn't work on several ranks (torchrun): bitsandbytes packs values in "
                "blocks, which FSDP would cut. What to do: remove it, or train in one process"
            )


def _check_engine(config: RunConfig, prefix: str) -> None:
    """Settings of a phase that the engine can't serve."""
    engine, can = config.engine, capabilities(config.engine.kind)
    for name in ("sampler", "train", "source"):
        check_section(name, getattr(config, name), can, f'engine.kind = "{engine.kind}"', prefix)
    if not engine.uses_servers:
        return
    if not engine.starts_server:
        assert engine.servers
    elif engine.url is not None or engine.urls or engine.dialect == "sglang":
        raise Refused(
            'engine.kind = "vllm" starts a server of its own: expected no engine.url, no engine.urls and '
            'engine.dialect = "vllm". What to do: remove them, or use engine.kind = "server"'
        )
    from_environment(engine.api_key, "engine.api_key")
    if engine.push == "adapter" and config.policy.lora is None:
        raise Refused(
            "engine.push = adapter needs policy.lora: without it all weights are trained. What to do: use "
            "engine.push = reload or transfer"
        )
    for setting, value in {"push": "transfer", "api": "generate"}.items():
        if engine.dialect == "sglang" and getattr(engine, setting) == value:
            raise Refused(
                f"engine.{setting} = {value} and engine.dialect = sglang exclude each other: it is vLLM's way"
            )


def _check_source(config: RunConfig, phase: Phase, prefix: str) -> None:
    """Settings of a phase that its source can't serve."""
    source = phase.config.source
    named = f'source.kind = "{source.kind}"'
    if source.around is not None:
        named += f" and source.around = {source.around}"
    for key, need in NEEDED_BY.items():
        value = getattr(phase.config.data, key)
        if value and need not in source_abilities(phase.config):
            raise Refused(
                f"{prefix}data.{key} = {value} needs a source that {SOURCE_CAPABILITIES[need]}, which one "
                f"with {named} doesn't. What to do: remove it, or change the source"
            )
    sampling = phase.config.sampler, phase.config.environment
    is_other = sampling != (config.sampler, config.environment)
    if is_other and "follows_phases" not in source_abilities(phase.config):
        raise Refused(
            f"phase {phase.name}: with {named} all phases share [sampler] and [environment], since its "
            "samples may be made ahead of training; remove the change"
        )


def _check_used(config: RunConfig, phases: Sequence[Phase]) -> None:
    """Refuse settings that no phase would use: an environment without prompts, a stored value without an
    objective that reads it, and the reverse."""
    has_prompts = config.data.prompts or config.data.eval_prompts
    if not has_prompts and any(phase.config.environment for phase in phases):
        raise Refused(
            "environment: episodes are played from data.prompts or data.eval_prompts, and neither is set; "
            "set one, or remove [environment]"
        )
    is_read = any(phase.takes_stored_value for phase in phases)
    keys = [key for key in ("value_store", "value_half_life") if getattr(config.data, key) is not None]
    if len(keys) != is_read:
        got = " and ".join(f"data.{key} = {getattr(config.data, key)}" for key in keys) or "none of them"
        raise Refused(
            "data.value_store, or data.value_half_life, and an objective that reads stored values, such as "
            f'one with baseline = "stored", go together: got {got} and '
            f"{'such an' if is_read else 'another'} objective"
        )


def _check_measured(config: RunConfig, phases: Sequence[Phase]) -> None:
    """Measurements and guards that would have no data."""
    data = config.data
    has_prompts = data.store is not None or data.prompts is not None
    if data.hold_out and (not has_prompts or any(phase.config.data.eval_store for phase in phases)):
        raise Refused(
            "data.hold_out holds out prompts of data.prompts and data.store: expected one of them and no "
            f"data.eval_store, got data.prompts = {data.prompts}, data.store = {data.store} and "
            f"data.eval_store = {data.eval_store}"
        )
    measured = [phase.config for phase in phases if phase.config.evaluate.beta is not None]
    if measured and not any(map(has_groups_to_measure, measured)):
        raise Refused(
            f"evaluate.beta = {measured[0].evaluate.beta:g}: ½ Var(R) and regret are measured in groups, and "
            "no phase has any: fresh ones (data.replay < 1, sampler.n of 2 or more), responses to "
            "data.eval_prompts (evaluate.n of 2 or more, evaluate.kl, evaluate.temperature = "
            "policy.temperature), a data.eval_store or data.hold_out; set one of them, or remove "
            "evaluate.beta"
        )
    watched = [phase for phase in phases if phase.config.guard.kl is not None]
    reads = [
        p.config.data.samples for p in watched if REF_LOGP in p.needs or p.config.evaluate.beta is not None
    ]
    if watched and not any(reads):
        raise Refused(
            "guard.kl: kl_ref is measured on fresh samples (data.replay < 1) where the objective needs the "
            "reference, and no phase has both, so the guard would watch nothing; remove guard.kl, use "
            "guard.loss, or set evaluate.beta, which needs the reference"
        )


def _check_shared(config: RunConfig, phases: Sequence[Phase]) -> None:
    """Settings that are used once for the complete run can't differ in a phase."""
    for phase in phases:
        if phase.config.reward != config.reward:
            raise Refused(
                "phases: a phase can't change [reward], which is one for the complete run; remove the change"
            )
        for section, key in shared():
            if section in ("reward", "policy"):  # checked as one, above and in `_check_references`
                continue
            if getattr(getattr(phase.config, section), key) != getattr(getattr(config, section), key):
                raise Refused(
                    f"phase {phase.name}: a phase can't change {section}.{key}, which is one for the "
                    "complete run; remove the change"
                )


def _check_adapter(config: RunConfig) -> None:
    policy = config.policy
    if policy.lora is not None and policy.model is None:
        raise Refused(
            "[policy.lora] adapts a trained model, but policy.new starts from random weights; set "
            "policy.model, or remove one of the two"
        )
    if policy.lora is not None and policy.lora.start is not None:
        start_only = LoRA(start=policy.lora.start, merge=policy.lora.merge)
        both = [
            key
            for key in ("rank", "alpha", "targets")
            if getattr(policy.lora, key) != getattr(start_only, key)
        ]
        if both:
            raise Refused(
                f"policy.lora.start has its own rank, alpha and targets, but policy.lora.{both[0]} is set "
                "too; set one of them"
            )


def _check_reference(config: RunConfig, phases: Sequence[Phase]) -> None:
    policy = config.policy
    for key, kind in (
        ("reference_model", "model"),
        ("reference_decay", "ema"),
        ("reference_every", "periodic"),
    ):
        value = getattr(policy, key)
        if (value is not None) != (policy.reference == kind):
            raise Refused(
                f'policy.{key} and policy.reference = "{kind}" go together: got policy.{key} = {value} and '
                f'policy.reference = "{policy.reference}"'
            )
    if policy.reference == "sampler" or config.source.sync_from > 1:
        _check_rival(config)
    if policy.cache_reference and not any(REF_LOGP in phase.needs for phase in phases):
        raise Refused(
            "policy.cache_reference keeps log-probs of the reference, but no phase's objective needs them; "
            "remove it"
        )
    if policy.cache_reference and policy.reference_moves:
        raise Refused(
            "policy.cache_reference keeps log-probs of one reference, but policy.reference = "
            f'"{policy.reference}" changes during the run; remove one of the two'
        )
    if config.data.has_held_out_groups and policy.reference_moves:
        raise Refused(
            "data.eval_store and data.hold_out are measured against one reference, but policy.reference = "
            f'"{policy.reference}" changes during the run; remove one of the two'
        )
    if policy.reference == "ema" and policy.dtype != "float32" and policy.lora is None:
        raise Refused(
            'policy.reference = "ema" moves by small shares of a difference, which '
            f'policy.dtype = "{policy.dtype}" rounds away, so that it would not move; use float32, '
            'an adapter ([policy.lora], whose weights are float32), or "periodic"'
        )


def _check_rival(config: RunConfig) -> None:
    """Refuse earlier weights that no source keeps, and those that can't become the reference's."""
    source, policy = config.source, config.policy
    if source.kind == "elsewhere" and source.sync_from > 1:
        raise Refused(
            f'source.sync_from = {source.sync_from} and source.kind = "elsewhere" exclude each other: '
            'collectors sample with the newest weights that are published. What to do: source.kind = "inline"'
        )
    if policy.reference != "sampler":
        return
    if not source.lags:
        raise Refused(
            'policy.reference = "sampler" is the earlier weights that sample: expected source.kind = '
            f'"inline" and source.sync_every or source.sync_from of 2 or more, got "{source.kind}", '
            f"{source.sync_every} and {source.sync_from}"
        )
    if policy.lora is not None:
        raise Refused(
            'policy.reference = "sampler" and [policy.lora] exclude each other: the copies that sample are '
            'complete models. What to do: train all weights, or policy.reference = "periodic"'
        )


def _check_shaped(phase: Phase, prefix: str) -> None:
    """What a reward made of its recorded parts loses, and values that are of rewards before shaping."""
    config, reward = phase.config, phase.config.reward
    whitens, clips = reward.whiten != "none", reward.clip is not None
    lost: dict[str, object] = {"data.reward_scale": config.data.reward_scale}
    makers = {f"reward.whiten = {reward.whiten}": lost if whitens and reward.functions else {}}
    if REWARD_PARTS in phase.needs:
        if not reward.functions:
            raise Refused(
                f"{prefix}the advantage of gdpo normalizes each of several rewards, but reward.functions "
                "names none. What to do: list them there, or choose another advantage"
            )
        more = {"reward.whiten": whitens, "reward.clip": clips}
        makers["the advantage of gdpo"] = {**lost, **more}
    for maker, others in makers.items():
        for name, value in others.items():
            if value:
                raise Refused(
                    f"{prefix}{maker} makes the reward of its recorded parts, and {name} would be lost. What "
                    "to do: remove one of the two"
                )
    if phase.takes_stored_value and (whitens or clips):
        raise Refused(
            f"{prefix}{'reward.whiten' if whitens else 'reward.clip'}: stored values (data.value_store, "
            "data.value_half_life) are of rewards as they were scored. What to do: remove one of the two"
        )


def _check_rules(config: RunConfig, prefix: str) -> None:
    """Contradictions in the settings of the guard and of prompt_order, and shares of what isn't drawn."""
    if config.data.prompt_order == "uncertain":
        problems = {
            "data.value_half_life isn't set, by which values are tracked": not config.data.value_half_life,
            "data.candidates is 1: there is nothing to choose from": config.data.candidates == 1,
            'source.kind = "elsewhere": collectors choose prompts': config.source.kind == "elsewhere",
        }
        refuse_first(f'{prefix}data.prompt_order = "uncertain": ', problems, ". What to do: change one")
    guard = config.guard
    if guard.action == "skip" and guard.kl is not None:
        raise Refused(
            f'{prefix}guard.kl and guard.action = "skip": a policy whose updates are skipped keeps its KL, '
            'so every later step would be skipped; use "stop" or "rollback"'
        )
    for name in filter(None, config.data.shares_at(0)):
        key = "roles" if name in ROLES else "sources"
        allowed = getattr(config.data, key)
        if allowed is not None and name not in allowed:
            raise Refused(
                f"{prefix}data.replay has a share of {name}, which data.{key} doesn't name, so nothing of it "
                f"would be drawn; remove the share, or data.{key}"
            )


def _check_references(config: RunConfig, phases: Sequence[Phase]) -> None:
    """Phases share the run's policy and one reference. Only the reference "phase" can begin later."""
    policies = [phase.config.policy for phase in phases]
    kinds = [p.reference for p in policies]
    keys = [key for key in type(config.policy).model_fields if key.startswith("reference")]
    references = {key: getattr(config.policy, key) for key in keys}
    for policy in policies:
        same_phase = policy.model_copy(update={"reference": kinds[0]}) == policies[0]
        if not same_phase or policy.model_copy(update=references) != config.policy:
            raise Refused(
                "phases: a phase can't change [policy], except for policy.reference; remove the change"
            )
    if len(set(kinds)) > 1 and (set(kinds) != {"start", "phase"} or kinds != sorted(kinds, reverse=True)):
        raise Refused(
            'policy.reference: the phases may have "start" first and "phase" then, or all the same; got '
            + ", ".join(f"{phase.name}: {kind}" for phase, kind in zip(phases, kinds))
        )


def check_heldout(
    prompts: Iterable[str], heldout: Collection[str], setting: str = "data.eval_prompts"
) -> None:
    """Raise `Refused` where a held-out prompt (both by id) is trained on."""
    shared = set(prompts) & set(heldout)
    if shared:
        raise Refused(
            f"{setting}: {len(shared)} of {len(heldout)} held-out prompts are in the training data "
            f"(for one: {', '.join(sorted(shared)[:3])}); remove them from one of the two"
        )


def measures_consistency(phase: Phase) -> bool:
    """Whether a phase has a β for R = r − βρ: evaluate.beta, or that of an objective with a reference."""
    return phase.diagnostic_beta(phase.config.objective.options) is not None  # a schedule is one


def has_groups_to_measure(config: RunConfig) -> bool:
    """Whether a phase has groups for ½ Var(R) or regret: fresh ones, an evaluation's, or held-out ones."""
    rule, data = config.evaluate, config.data
    fresh = data.samples_fresh and config.sampler.n > 1
    is_on_policy = rule.kl and rule.temperature == config.policy.temperature
    evaluated = config.asks_held_out and rule.n > 1 and is_on_policy
    return fresh or evaluated or data.has_held_out_groups
