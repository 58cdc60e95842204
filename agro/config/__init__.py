"""The configuration of a run: frozen, typed, each value with its unit and meaning; an unknown key is refused.

A recipe is TOML. `RunConfig.load(path, overrides)` reads one, or a run's own `config.json`; an override is
`section.key=value` with a TOML value (a bare word is text), or `phases.NAME.section.key=value`. A run has one
phase, or those listed under `[[phases]]`, each of which changes some values of the sections above it.
"""

from agro.config.data import Data
from agro.config.messages import check_values
from agro.config.override import override, parse
from agro.config.policy import Chat, LoRA, NewModel, Policy
from agro.config.resume import deciding, ending, shared, take_length
from agro.config.reward import Reward, RewardPart
from agro.config.rollout import Engine, Environment, Sampler, Source
from agro.config.run import Phase, RunConfig
from agro.config.secrets import check_texts, from_environment
from agro.config.section import Count, Positive, Section, Share, field
from agro.config.train import Evaluate, Guard, Objective, Track, Train

__all__ = ["Chat", "Count", "Data", "Engine", "Environment", "Evaluate", "Guard", "LoRA", "NewModel"]
__all__ += ["Objective", "Phase", "Policy", "Positive", "Reward", "RewardPart", "RunConfig", "Sampler"]
__all__ += ["Section", "Share", "Source", "Track", "Train"]
__all__ += ["check_texts", "from_environment"]
__all__ += ["check_values", "deciding", "ending", "field", "override", "parse", "shared", "take_length"]
