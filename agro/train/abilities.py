"""What sources can do beyond their protocol, and the settings that need it.

What a setting takes from the source of `source.kind` is declared here, as that of engines is in
`agro.rollout.engines.capabilities`; what is around it says what remains (`agro.train.around`). Settings that
need what is missing are refused before anything is computed.
"""

from __future__ import annotations

from typing import Literal

from agro.config import RunConfig, SourceConfig
from agro.rollout.engines.capabilities import capabilities

SourceCapability = Literal[
    "follows_phases",
    "samples_current_weights",
    "samples_chosen_prompts",
    "shares_engine",
    "shares_weights",
    "complete_policy",
    "single_turns",
    "whole_groups",
    "unjudged",
    "judges_pairs",
]
Abilities = frozenset[SourceCapability]

SOURCE_CAPABILITIES: dict[SourceCapability, str] = {
    "follows_phases": "samples each phase with its own [sampler] and [environment]",
    "samples_current_weights": "samples each step with the weights that it moves",
    "samples_chosen_prompts": "samples to prompts that the step chooses, such as those of stored groups",
    "shares_engine": "samples in the trainer's process, whose engine monitors can use too",
    "shares_weights": "samples with the policy's own model",
    "complete_policy": "is in one process with the complete policy",
    "single_turns": "samples responses that aren't episodes",
    "whole_groups": "returns one group for each prompt that a step asks for",
    "unjudged": "adds no judgments of its responses",
    "judges_pairs": "adds judgments of its responses, on which objectives on pairs train",
}

# What a setting of data needs of the source, and what to do where it can't.
NEEDED_BY: dict[str, SourceCapability] = {
    "complete_groups": "samples_chosen_prompts",
    "spread": "whole_groups",
    "experts": "whole_groups",
}

# What those of each source.kind can do, where no other setting takes it from them.
SOURCES: dict[str, Abilities] = {
    "inline": frozenset(SOURCE_CAPABILITIES),
    "elsewhere": frozenset(("complete_policy", "single_turns", "whole_groups", "unjudged", "judges_pairs")),
}


def lacking(config: RunConfig) -> dict[SourceCapability, str]:
    """What the source of `source.kind` can't do in a phase, each with the setting that is why."""
    kind, engine, judges = config.source.kind, config.engine.kind, config.data.experts_win
    found = {c: f'source.kind is "{kind}"' for c in SOURCE_CAPABILITIES if c not in SOURCES[kind]}
    reasons: tuple[tuple[SourceCapability, str, bool], ...] = (
        (
            "samples_current_weights",
            "source.sync_every or source.sync_from is above 1",
            lags(config.source),
        ),
        ("shares_weights", f'engine.kind is "{engine}"', "shares_weights" not in capabilities(engine)),
        ("single_turns", "[environment] is set", config.environment is not None),
        ("unjudged", "data.experts_win is set", judges),
        ("judges_pairs", "data.experts_win isn't set", not judges),
    )
    for capability, reason, is_there in reasons:
        if is_there:
            found.setdefault(capability, reason)
    return found


def inner_abilities(config: RunConfig) -> Abilities:
    """What the source of `source.kind` can do in a phase."""
    return frozenset(SOURCE_CAPABILITIES) - lacking(config).keys()


def lags(source: SourceConfig) -> bool:
    """Whether fresh samples in this process may be of earlier weights."""
    return source.kind == "inline" and max(source.sync_every, source.sync_from) > 1
