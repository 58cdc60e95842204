"""What engines can do beyond decoding, and the settings that need it.

`ENGINES` declares what one can do. Whatever it doesn't declare is refused before anything is computed, so
that a new engine begins with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from agro.config.sections import Section
from agro.errors import Refused
from agro.io import plugins
from agro.rollout.engines.protocol import Capability, Engine

CAPABILITIES: dict[Capability, str] = {
    "shares_weights": "decodes with the learner's own weights, in its process",
    "reports_kept_sets": "reports which tokens truncation kept",
    "skips_layers": "decodes without some layers of the policy",
    "serves_collectors": "is loaded by each collector (agro collect)",
}
ENGINES: dict[str, frozenset[Capability]] = {  # what those of each engine.kind can do
    "hf": frozenset(CAPABILITIES),
    "vllm": frozenset(("serves_collectors",)),
    "server": frozenset(("serves_collectors",)),
}


class Requirement(NamedTuple):
    """A setting that needs a capability, unless its value is `unset`, or says that it isn't wanted."""

    setting: str
    needs: Capability
    way_out: str
    unset: Any = None


REQUIREMENTS = (
    Requirement("train.weights_average", "shares_weights", "remove it"),
    Requirement("sampler.keep_sets", "reports_kept_sets", "remove it, or sample without truncation"),
    Requirement("sampler.skip_layers", "skips_layers", "sample with all layers"),
    Requirement("source.sync_every", "shares_weights", "sample with the newest weights", 1),
    Requirement("source.sync_from", "shares_weights", "sample with the newest weights", 1),
    Requirement("source.kind", "serves_collectors", 'use source.kind = "inline"', "inline"),
)


def capabilities(kind: str) -> frozenset[Capability]:
    """What the engines of this `engine.kind` can do. Raises `Refused` where there is none."""
    return ENGINES[kind] if kind in ENGINES else declared(engine_of_user(kind))


def engine_of_user(kind: str) -> Callable[..., Engine]:
    """What makes the engine that `engine.kind` names: a class of an installed package, or of a file.

    Raises `Refused` where there is no such class, or where it isn't as `Engine` says.
    """
    engine = plugins.load("engines", kind, "engine.kind")
    missing = [name for name in ("decode", "load", "close") if not callable(getattr(engine, name, None))]
    if missing:
        raise Refused(
            f"engine.kind: {kind}: expected a class as agro.rollout.engines.Engine, got {engine!r:.80} "
            f"without {', '.join(missing)}"
        )
    maker: Callable[..., Engine] = engine
    return maker


def declared(engine: Any) -> frozenset[Capability]:
    """What an engine, or a class of engines, can do; nothing where it says nothing."""
    can: frozenset[Capability] = getattr(engine, "can", frozenset())
    return can


def check_section(
    name: str, section: Section, can: Collection[Capability], engine: str, where: str = ""
) -> None:
    """Raise `Refused` for a setting of a section, such as "sampler", that needs what an engine can't do.

    `engine`: its name in messages; `where`: what they begin with.
    """
    for setting, needed, way_out, unset in REQUIREMENTS:
        of, key = setting.split(".")
        value = getattr(section, key) if of == name else None
        if value in (None, False, 0, unset) or needed in can:
            continue
        raise Refused(
            f"{where}{setting} and {engine} exclude each other: {setting} = {value} needs an engine that "
            f'{CAPABILITIES[needed]}. What to do: {way_out}, or use engine.kind = "hf"'
        )
