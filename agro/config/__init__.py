"""The configuration of a run: frozen, typed, each value with its unit and meaning; an unknown key is refused.

A recipe is TOML. `RunConfig.load(path, overrides)` reads one, or a run's own `config.json`; an override is
`section.key=value` with a TOML value (a bare word is text), or `phases.NAME.section.key=value`. A run has one
phase, or those listed under `[[phases]]`, each of which changes some values of the sections above it.
"""

from agro.config.data import DataConfig
from agro.config.messages import check_values
from agro.config.override import override, parse
from agro.config.policy_config import ChatConfig, LoRA, NewModel, PolicyConfig
from agro.config.reward_config import RewardConfig, RewardPart
from agro.config.rollout_config import (
    EngineConfig,
    EnvironmentConfig,
    PlaceConfig,
    SamplerConfig,
    SourceConfig,
)
from agro.config.run import PhaseConfig, RunConfig, deciding, ending, shared, take_length
from agro.config.secrets import check_texts, from_environment
from agro.config.section import Count, Positive, Section, Share, field
from agro.config.train import EvaluateConfig, GuardConfig, ObjectiveConfig, TrackConfig, TrainConfig

__all__ = ["ChatConfig", "Count", "DataConfig", "EngineConfig", "EnvironmentConfig"]
__all__ += ["EvaluateConfig", "GuardConfig", "LoRA", "NewModel"]
__all__ += ["ObjectiveConfig", "PhaseConfig", "PlaceConfig", "PolicyConfig", "Positive"]
__all__ += ["RewardConfig", "RewardPart", "RunConfig", "SamplerConfig", "Section", "Share"]
__all__ += ["SourceConfig", "TrackConfig", "TrainConfig", "check_texts", "from_environment"]
__all__ += ["check_values", "deciding", "ending", "field", "override", "parse", "shared", "take_length"]
