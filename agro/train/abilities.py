"""What sources can do beyond their protocol, and the settings that need it.

`SOURCES` declares it, as `ENGINES` does (`agro.rollout.engines.capabilities`): a new one begins with nothing.
Settings that need what isn't declared are refused before anything is computed.
"""

from __future__ import annotations

from typing import Literal

from agro.config import SourceConfig

SourceCapability = Literal[
    "follows_phases", "samples_current_weights", "samples_chosen_prompts", "shares_engine"
]

SOURCE_CAPABILITIES: dict[SourceCapability, str] = {
    "follows_phases": "samples each phase with its own [sampler] and [environment]",
    "samples_current_weights": "samples each step with the weights that it moves",
    "samples_chosen_prompts": "samples to prompts that the step chooses, such as those of stored groups",
    "shares_engine": "samples in the trainer's process, whose engine monitors can use too",
}

# Settings that need a source which samples to chosen prompts, and what to remove where it doesn't.
ON_CHOSEN_PROMPTS = {"data.complete_groups": "it", "again.by": "[again]", "search.by": "[search]"}

# By source.kind; lagging: inline with source.sync_every or sync_from; props: inline with source.props.
SOURCES: dict[str, frozenset[SourceCapability]] = {
    "inline": frozenset(SOURCE_CAPABILITIES),
    "lagging": frozenset(SOURCE_CAPABILITIES) - {"samples_current_weights"},
    "props": frozenset(SOURCE_CAPABILITIES) - {"samples_current_weights"},
    "elsewhere": frozenset(),
}


def source_capabilities(source: SourceConfig) -> frozenset[SourceCapability]:
    """What the source that the configuration names can do."""
    kind: str = "lagging" if lags(source) else source.kind
    return SOURCES[kind if source.props is None else "props"]


def lags(source: SourceConfig) -> bool:
    """Whether fresh samples in this process may be of earlier weights."""
    return source.kind == "inline" and max(source.sync_every, source.sync_from) > 1
