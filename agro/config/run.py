"""A run's configuration: sections, phases, loading, and what may change on resume or between phases."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from agro.config import sections
from agro.config.aliases import note, renamed, without_aliases
from agro.config.data import DataConfig
from agro.config.override import as_list, check_values, explain, merge, override_all, section_at
from agro.config.secrets import redacted
from agro.errors import Refused

BY_THE_RUN = ("versions", "run", "inputs", "epochs", "started_in")  # keys that a run adds to config.json


class PhaseConfig(BaseModel):
    """A phase's name, and the values of the run's sections that it overrides."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)
    name: str
    """used in metrics, report and overrides: `phases.NAME.section.key=value`"""


class RunConfig(sections.Section):
    policy: sections.PolicyConfig = sections.PolicyConfig()
    data: DataConfig = DataConfig()
    sampler: sections.SamplerConfig = sections.SamplerConfig()
    source: sections.SourceConfig = sections.SourceConfig()
    engine: sections.EngineConfig = sections.EngineConfig()
    reward: sections.RewardConfig = sections.RewardConfig()
    environment: sections.EnvironmentConfig | None = None
    objective: sections.ObjectiveConfig = sections.ObjectiveConfig()
    train: sections.TrainConfig = sections.TrainConfig()
    guard: sections.GuardConfig = sections.GuardConfig()
    evaluate: sections.EvaluateConfig = sections.EvaluateConfig()
    track: sections.TrackConfig = sections.TrackConfig()
    place: sections.PlaceConfig = sections.PlaceConfig()
    phases: tuple[PhaseConfig, ...] = ()

    @classmethod
    def of(
        cls, values: Mapping[str, Any], location: str = "configuration", overrides: Sequence[str] = ()
    ) -> RunConfig:
        """Validate nested values.

        Messages name `location` as their origin, and the command line for those of `overrides` (KEY=VALUE).
        """
        values = without_aliases(values, location, cls)
        check_values(values, location)
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            problems = [explain(e, cls, location, overrides, is_run=True) for e in error.errors()]
            raise Refused("\n".join(problems)) from None
        for phase in config.phases:  # refuse a mistake in any phase before the first one trains
            config.phase(phase.name, location)
        names = [phase.name for phase in config.phases]
        if len(set(names)) < len(names):
            raise Refused(f"{location}: phases: expected different names, got {', '.join(names)}")
        return config

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
        """Load a TOML recipe or a run's config.json, and apply `KEY=VALUE` overrides.

        `path`: a file, or the name of a recipe (`agro.config.recipes`).
        """
        path = Path(path)
        values, items = _user_values(_read(path)), renamed(overrides)
        if not values and not items:
            raise Refused(f"{path}: the file is empty: expected a recipe, or settings such as train.steps=20")
        for text in override_all(values, items, cls):
            note(text)
        return cls.of(values, str(path), items)

    @classmethod
    def of_record(cls, record: Mapping[str, Any], location: str) -> RunConfig:
        """Rebuild a run's configuration from the contents of its config.json."""
        return cls.of(_user_values(record), location)

    def phase(self, name: str, location: str = "configuration") -> RunConfig:
        """Return one phase's configuration: this one with the phase's overrides."""
        if name not in self.phase_names:
            raise Refused(f"phase: expected one of {', '.join(self.phase_names)}, got {name!r}")
        if not self.phases:
            return self
        validated: dict[str, RunConfig] = vars(self).setdefault("_validated", {})  # cached
        if name not in validated:
            location = f"{location}: phase {name}"
            changes = next(dict(phase.model_extra or {}) for phase in self.phases if phase.name == name)
            for key in ("phases", "track"):
                if key in changes:
                    raise Refused(f"{location}: {key}: a phase can't set it; set it for the run")
            changes = without_aliases(changes, location, RunConfig)
            validated[name] = RunConfig.of(merge(self.model_dump(exclude={"phases"}), changes), location)
        return validated[name]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy as pydantic does, without the cached phases, which the update may change."""
        copied = super().model_copy(update=update, deep=deep)
        vars(copied).pop("_validated", None)
        return copied

    def record(self) -> dict[str, Any]:
        """All values, for files that are stored and shared; whatever looks like a secret is redacted."""
        values: dict[str, Any] = redacted(self.model_dump(mode="json"))
        return values

    @property
    def followed(self) -> str | None:
        """The held-out metric that selects a phase's best model; None without held-out data."""
        if self.asks_held_out:
            return "eval_reward"
        return "eval_auc" if self.data.has_held_out_groups else None

    @property
    def asks_held_out(self) -> bool:
        """Whether the policy is evaluated on held-out prompts: data.eval_prompts, or some of
        data.hold_out."""
        data = self.data
        if data.eval_prompts is not None or not data.hold_out:
            return data.eval_prompts is not None
        return data.store is None if data.ask_held_out is None else data.ask_held_out

    @property
    def scores(self) -> bool:
        """Whether responses are scored: fresh ones, held-out ones, or those that complete stored groups."""
        if self.data.prompts is not None or self.asks_held_out:
            return True
        return any(self.phase(name).data.complete_groups for name in self.phase_names)

    @property
    def phase_names(self) -> tuple[str, ...]:
        return tuple(phase.name for phase in self.phases) or ("train",)


def _user_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's values without those that the run added."""
    return {key: value for key, value in record.items() if key not in BY_THE_RUN}


def _read(path: Path) -> dict[str, Any]:
    """Read a file's values; if there is no such file, those of the recipe of that name."""
    expected = "expected a TOML recipe or a run's config.json, or a recipe's name (agro recipes)"
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Refused(f"{path}: can't be read: it isn't UTF-8 text; {expected}") from None
    except OSError as error:
        from agro.config import (
            recipes,  # lazy: objectives, which declare the recipes of methods, import torch
        )

        recipe = None if path.is_file() else recipes.recipes().get(str(path))
        if recipe is None:
            near = recipes.nearest(str(path))
            raise Refused(f"{path}: can't be read: {error.strerror}; {expected}{near}") from None
        text = recipe.text
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # such as an integer of thousands of digits
        raise Refused(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise Refused(f"{path}: expected an object of sections, got {text!r:.80}")
    return values


def marked(mark: str) -> Iterator[tuple[str, str]]:
    """Yield (section, key) of every value with this mark; see `agro.config.sections.field`."""
    for section in RunConfig.model_fields:
        model = section_at(RunConfig, section)
        assert model is not None
        for key, info in model.model_fields.items():
            if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get(mark):
                yield section, key


def shared() -> Iterator[tuple[str, str]]:
    """Yield (section, key) of every value that is fixed for the whole run, so that no phase can change it."""
    return marked("shared")


def deciding(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config.json's values that determines what a step computes."""
    free = set(marked("resume"))

    def part(source: Mapping[str, Any], sections: Iterable[str]) -> dict[str, Any]:
        selected = {}
        for section in sections:
            value = source[section]
            if isinstance(value, dict):
                value = {key: item for key, item in value.items() if (section, key) not in free}
            selected[section] = value
        return selected

    return part(values, RunConfig.model_fields) | {
        "phases": [part(phase, phase) for phase in as_list(values.get("phases"))]
    }


def take_length(values: dict[str, Any]) -> int | None:
    """Remove the last phase's number of steps, which may grow, from the result of `deciding`, and return it.

    None if the last phase doesn't set it.
    """
    phases = values["phases"]
    section = phases[-1].get("train", {}) if phases else values["train"]
    steps: int | None = section.pop("steps", None)
    return steps


def ending(config: RunConfig) -> list[tuple[float | None, ...]]:
    """Each phase's stopping criteria: steps, patience, KL."""
    phases = [config.phase(name) for name in config.phase_names]
    rules = [p.evaluate for p in phases]
    return [(p.train.steps, r.patience, r.target_kl) for p, r in zip(phases, rules, strict=True)]
