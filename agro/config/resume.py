"""What of a configuration may change: when a run is resumed, and from phase to phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agro.config.messages import section_at
from agro.config.override import as_list
from agro.config.run import RunConfig


def marked(mark: str) -> Iterator[tuple[str, str]]:
    """(section, key) of every value that is declared with a mark, see `agro.config.section.field`."""
    for section in RunConfig.model_fields:
        model = section_at(RunConfig, section)
        assert model is not None
        for key, info in model.model_fields.items():
            if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get(mark):
                yield section, key


def shared() -> Iterator[tuple[str, str]]:
    """(section, key) of every value that is one for the complete run, so that a phase can't change it."""
    return marked("shared")


def deciding(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration, as in `config.json`, that decides what a step computes."""
    free = set(marked("resume"))
    sections = {section: _without(free, section, values[section]) for section in RunConfig.model_fields}
    phases = []
    for phase in as_list(values.get("phases")):
        phases.append({section: _without(free, section, value) for section, value in phase.items()})
    return sections | {"phases": phases}


def take_length(values: dict[str, Any]) -> int | None:
    """Take the last phase's number of steps, which may grow, out of what `deciding` returns.

    None where the last phase has none of its own.
    """
    phases = values["phases"]
    section = phases[-1].get("train", {}) if phases else values["train"]
    steps: int | None = section.pop("steps", None)
    return steps


def ending(config: RunConfig) -> list[tuple[float | None, ...]]:
    """What decides when each phase, or the run in it, ends: steps, patience, target, KL."""
    phases = [config.phase(name) for name in config.phase_names]
    rules = [p.evaluate for p in phases]
    return [(p.train.steps, r.patience, r.target, r.target_kl) for p, r in zip(phases, rules, strict=True)]


def _without(free: set[tuple[str, str]], section: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if (section, key) not in free}
