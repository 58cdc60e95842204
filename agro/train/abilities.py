"""What learners and sources can do beyond their protocols, and the settings that need it.

Each class declares it in `can`, as engines do (`agro.rollout.engines.capabilities`): a new one begins with
nothing. Settings that need what isn't declared are refused before anything is computed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from agro.config import RunConfig, SourceConfig
from agro.errors import Refused

LearnerCapability = Literal[
    "trains_adapters",
    "caches_reference",
    "offloads",
    "recomputes_activations",
    "mixes_precision",
    "averages_weights",
]
SourceCapability = Literal[
    "follows_phases", "samples_current_weights", "samples_chosen_prompts", "shares_engine"
]

LEARNER_CAPABILITIES: dict[LearnerCapability, str] = {
    "trains_adapters": "trains an adapter in place of all weights",
    "caches_reference": "takes log-probs of the reference from a cache",
    "offloads": "moves activations or the optimizer's state to the CPU",
    "recomputes_activations": "computes activations again in the backward pass",
    "mixes_precision": "computes products in bfloat16 from float32 weights",
    "averages_weights": "averages the weights over steps",
}
SOURCE_CAPABILITIES: dict[SourceCapability, str] = {
    "follows_phases": "samples each phase with its own [sampler] and [environment]",
    "samples_current_weights": "samples each step with the weights that it moves",
    "samples_chosen_prompts": "samples to prompts that the step chooses, such as those of stored groups",
    "shares_engine": "samples in the trainer's process, whose engine monitors can use too",
}

SOURCES = {
    "inline": ("agro.train.source", "InlineSource"),
    "lagging": ("agro.train.lagging", "LaggingSource"),
    "elsewhere": ("agro.train.elsewhere", "CollectorSource"),
}  # by source.kind; lagging: inline with source.sync_every


def learner_capabilities(ranks: int) -> frozenset[LearnerCapability]:
    """What the learner of a run on so many ranks can do; 1: in one process."""
    module, name = ("agro.train.learner", "Local") if ranks == 1 else ("agro.train.ranks", "Ranks")
    can: frozenset[LearnerCapability] = _declared(module, name)
    return can


def source_capabilities(source: SourceConfig) -> frozenset[SourceCapability]:
    """What the source that the configuration names can do."""
    kind = "lagging" if lags(source) else source.kind
    can: frozenset[SourceCapability] = _declared(*SOURCES[kind])
    return can


def lags(source: SourceConfig) -> bool:
    """Whether fresh samples in this process may be of earlier weights."""
    return source.kind == "inline" and source.sync_every > 1


def _declared(module: str, name: str) -> Any:
    return getattr(import_module(module), name).can


UNSET = (None, False, 0, ())


@dataclass(frozen=True)
class LearnerRequirement:
    """A setting that needs a capability. `values`: those that do; None: all but those of `UNSET`."""

    setting: str
    needs: LearnerCapability
    way_out: str = "remove it"
    values: Collection[Any] | None = None


@dataclass(frozen=True)
class SourceRequirement:
    """The same of a source."""

    setting: str
    needs: SourceCapability
    way_out: str
    values: Collection[Any] | None = None


LEARNER_REQUIREMENTS = (
    LearnerRequirement("policy.lora", "trains_adapters"),
    LearnerRequirement("policy.cache_reference", "caches_reference"),
    LearnerRequirement("train.offload", "offloads"),
    LearnerRequirement("train.gradient_checkpointing", "recomputes_activations"),
    LearnerRequirement("policy.dtype", "mixes_precision", "use float32 or bfloat16", values=("mixed",)),
    LearnerRequirement("train.weights_average", "averages_weights"),
)
SOURCE_REQUIREMENTS = (SourceRequirement("data.complete_groups", "samples_chosen_prompts", "remove it"),)


def check_learner(config: RunConfig, can: Collection[LearnerCapability], learner: str) -> None:
    """Raise `Refused` for a setting that needs what a learner can't do. `learner`: its name in messages."""
    for requirement in LEARNER_REQUIREMENTS:
        if requirement.needs not in can and _is_needed(requirement, config):
            raise Refused(
                f"{requirement.setting} doesn't work {learner}: it needs a learner that "
                f"{LEARNER_CAPABILITIES[requirement.needs]}. What to do: {requirement.way_out}, or train in "
                "one process"
            )


def check_source(config: RunConfig, can: Collection[SourceCapability], prefix: str = "") -> None:
    """Raise `Refused` for a setting that needs what the source of `source.kind` can't do."""
    kind = config.source.kind
    for requirement in SOURCE_REQUIREMENTS:
        if requirement.needs not in can and _is_needed(requirement, config):
            raise Refused(
                f"{prefix}{requirement.setting} = {_value(requirement, config)} needs a source that "
                f'{SOURCE_CAPABILITIES[requirement.needs]}, but source.kind is "{kind}". What to do: '
                f'{requirement.way_out}, or use source.kind = "inline"'
            )


def _value(requirement: LearnerRequirement | SourceRequirement, config: RunConfig) -> Any:
    section, key = requirement.setting.split(".")
    return getattr(getattr(config, section), key)


def _is_needed(requirement: LearnerRequirement | SourceRequirement, config: RunConfig) -> bool:
    value = _value(requirement, config)
    if requirement.values is None:
        return value not in UNSET
    return value in requirement.values
