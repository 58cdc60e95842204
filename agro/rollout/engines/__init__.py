"""Engines generate tokens. An engine sees token ids only, no prompts and no records.

It continues token ids and returns log-probs and the weights' version. `ENGINES` declares what else an engine
can do. A setting that needs anything undeclared is refused before any computation, so that a new engine
starts with nothing.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from agro.config import EngineConfig, SamplerConfig
from agro.config.sections import Section
from agro.errors import Refused
from agro.io import plugins
from agro.types.kept_sets import Ids

Capability = Literal["shares_weights", "reports_kept_sets", "skips_layers", "serves_collectors"]


class NoServer(Refused):
    """No server is left, but none needs to be fixed by a person: the next push may find one."""


@dataclass(frozen=True)
class Request:
    """A request for one continuation."""

    number: int  # of the response; it determines the noise, together with the seed
    ids: list[int]  # of the context; all responses to it share the list object
    room: int  # the most tokens that the response may have
    position: int = 0  # of its first token in the noise: number of tokens in earlier turns of the episode


@dataclass(frozen=True)
class Continuation:
    """One continuation."""

    request: Request
    tokens: NDArray[np.int64]  # [T]
    logp: NDArray[np.float64]  # [T] nats, under the distribution sampled from; NaN where unknown
    version: int | NDArray[np.int32]  # optimizer steps of the weights, or [T] of each token's; -1: unknown
    sampling: Mapping[str, Any] = field(default_factory=dict)  # added to `Sample.sampling`
    kept: Sequence[Ids] | None = None
    """[T] the ids that each token was chosen from, as in `agro.types.kept_sets.flat`."""


class Engine(Protocol):
    """Continues token ids. `version` is the number of optimizer steps of its weights; -1: not the trainer's.

    `can`: its capabilities beyond decoding, see `CAPABILITIES`; a setting that needs another one is refused.
    `measured`: its metrics, of `agro/runs/metrics.md`; counts, such as requests_failed, are those of the last
    call of `decode`. `check` is called repeatedly while the engine decodes, and may raise `Interrupted`.

    A run makes a user's engine as `Class(encoder, say, **engine.options)`, or as `Class(policy, version,
    **engine.options)` if it can share weights.
    """

    can: ClassVar[frozenset[Capability]]
    version: int
    check: Callable[[], None]

    @property
    def measured(self) -> Mapping[str, Any]: ...

    def decode(self, waiting: deque[Request], sampler: SamplerConfig, seed: int) -> Iterator[Continuation]:
        """Serve the requests from the left of `waiting`; yield each response when it finishes.

        The caller may add requests while it iterates; take requests only then. A response ends with an end
        token, a text of `sampler.stop` (whose tokens it includes), or when its room is used up. No setting of
        `sampler` needs a capability that the engine lacks.
        """
        ...

    def load(self, weights: Path, version: int) -> None:
        """Load the weights that a learner published in a folder (transformers format)."""
        ...

    def close(self) -> None:
        """Release memory, processes and connections."""
        ...


CAPABILITIES: dict[Capability, str] = {
    "shares_weights": "decodes with the learner's own weights, in its process",
    "reports_kept_sets": "reports which tokens truncation kept",
    "skips_layers": "decodes without some layers of the policy",
    "serves_collectors": "is loaded by each collector (agro collect)",
}
ENGINES: dict[str, frozenset[Capability]] = {  # the capabilities of each engine.kind
    "hf": frozenset(CAPABILITIES),
    "vllm": frozenset(("serves_collectors",)),
    "server": frozenset(("serves_collectors",)),
}


class Requirement(NamedTuple):
    """A setting that needs a capability, unless its value is `unset`, None, False or 0."""

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
    """The capabilities of this `engine.kind`. Raises `Refused` if there is no such engine."""
    return ENGINES[kind] if kind in ENGINES else declared(engine_of_user(kind))


def engine_of_user(kind: str) -> Callable[..., Engine]:
    """Load the class that `engine.kind` names, from an installed package or a file.

    Raises `Refused` if there is no such class, or if it lacks a method of `Engine`.
    """
    engine = plugins.load("engines", kind, "engine.kind")
    missing = [name for name in ("decode", "load", "close") if not callable(getattr(engine, name, None))]
    if missing:
        raise Refused(
            f"engine.kind: {kind}: expected a class like agro.rollout.engines.Engine, got {engine!r:.80} "
            f"without {', '.join(missing)}"
        )
    maker: Callable[..., Engine] = engine
    return maker


def declared(engine: Any) -> frozenset[Capability]:
    """The capabilities that an engine or its class declares, by default none.

    Raises `Refused` for anything but a set of `CAPABILITIES`.
    """
    can: Any = getattr(engine, "can", frozenset())
    name = getattr(engine, "__name__", type(engine).__name__)
    plugins.check_names(f"engine {name}: can", can, CAPABILITIES)
    return frozenset(can)


def called_with(settings: EngineConfig) -> str:
    """The arguments of a user's engine class, in words, for messages."""
    arguments = "policy, version" if "shares_weights" in capabilities(settings.kind) else "encoder, say"
    options = ", ".join(settings.options) or "none"
    return f"engine.options: {settings.kind} was called with ({arguments}) and the options {options}"


def check_options(settings: EngineConfig) -> None:
    """Raise `Refused` if a user's engine class doesn't accept its arguments, before it is called."""
    if settings.kind not in ENGINES:
        make = engine_of_user(settings.kind)
        with plugins.errors_of(make, called_with(settings)):
            inspect.signature(make).bind(None, None, **settings.options)


def check_section(
    name: str, section: Section, can: Collection[Capability], engine: str, prefix: str = ""
) -> None:
    """Raise `Refused` if a setting of a section, such as "sampler", needs a capability that an engine lacks.

    `engine`: its name in messages; `prefix`: the start of messages.
    """
    for setting, needed, way_out, unset in REQUIREMENTS:
        table, key = setting.split(".")
        value = getattr(section, key) if table == name else None
        if value in (None, False, 0, unset) or needed in can:
            continue
        raise Refused(
            f"{prefix}{setting} and {engine} exclude each other: {setting} = {value} needs an engine that "
            f'{CAPABILITIES[needed]}. What to do: {way_out}, or use engine.kind = "hf"'
        )
