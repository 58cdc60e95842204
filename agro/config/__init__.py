"""A run's configuration: frozen and typed, each value with unit and meaning. Unknown keys are refused.

A recipe is TOML. `RunConfig.load(path, overrides)` reads one, or a run's own `config.json`; an override is
`section.key=value` with a TOML value (a bare word is text), or `phases.NAME.section.key=value`. A run has one
phase, or those listed under `[[phases]]`, each of which overrides some values of the sections above.
"""

from agro.config.data import DataConfig
from agro.config.override import check_values, override, parse, read_options
from agro.config.run import PhaseConfig, RunConfig, deciding, ending, shared, take_length
from agro.config.secrets import check_texts, from_environment
from agro.config.sections import (
    ChatConfig,
    Count,
    EngineConfig,
    EnvironmentConfig,
    EvaluateConfig,
    GuardConfig,
    LoRA,
    NewModel,
    NoOptions,
    ObjectiveConfig,
    PlaceConfig,
    PolicyConfig,
    Positive,
    RewardConfig,
    RewardPart,
    SamplerConfig,
    Section,
    Share,
    SourceConfig,
    TrackConfig,
    TrainConfig,
    field,
)

__all__ = ["ChatConfig", "Count", "DataConfig", "EngineConfig", "EnvironmentConfig"]
__all__ += ["EvaluateConfig", "GuardConfig", "LoRA", "NewModel", "NoOptions"]
__all__ += ["ObjectiveConfig", "PhaseConfig", "PlaceConfig", "PolicyConfig", "Positive"]
__all__ += ["RewardConfig", "RewardPart", "RunConfig", "SamplerConfig", "Section", "Share"]
__all__ += ["SourceConfig", "TrackConfig", "TrainConfig", "check_texts", "from_environment"]
__all__ += ["check_values", "deciding", "ending", "field", "override", "parse", "read_options"]
__all__ += ["shared", "take_length"]
