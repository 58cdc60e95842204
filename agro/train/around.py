"""Sources that wrap another source (`source.around`), and what a configuration's source can do.

A `SourceWrapper` declares one, in a file or module that `source.around` names as file.py:NAME or module:NAME,
or in an installed package, by an entry point `agro.sources`. It declares what it needs of the source inside
and what it can do itself: settings that need anything else are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from agro.config import NoOptions, RunConfig, read_options
from agro.errors import Refused, refuse
from agro.io import plugins
from agro.rollout import CollectResult
from agro.rollout.engines import capabilities

if TYPE_CHECKING:
    from agro.models.policy import Policy
    from agro.rollout.envs import Environment
    from agro.runs.folder import Run
    from agro.store import Store
    from agro.train.learner import Learner
    from agro.train.phases import Phase
    from agro.train.source import FillRequest, InlineSource, Source
    from agro.types import Prompt

SourceCapability = Literal[
    "follows_phases",
    "samples_current_weights",
    "samples_chosen_prompts",
    "shares_engine",
    "shares_weights",
    "complete_policy",
    "single_turns",
    "whole_groups",
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
    "whole_groups": "returns one group for each prompt that a step requests",
    "judges_pairs": "adds judgments of its responses, on which objectives on pairs train",
}

# The ability that each setting of [data] needs.
NEEDED_BY: dict[str, SourceCapability] = {
    "complete_groups": "samples_chosen_prompts",
    "spread": "whole_groups",
    "experts": "whole_groups",
}

# The abilities of each source.kind; other settings may remove some.
SOURCES: dict[str, Abilities] = {
    "inline": frozenset(SOURCE_CAPABILITIES) - {"judges_pairs"},
    "elsewhere": frozenset(("complete_policy", "single_turns", "whole_groups")),
}


def lacking(config: RunConfig) -> dict[SourceCapability, str]:
    """What the source of `source.kind` can't do in a phase, each with the setting that prevents it."""
    kind, engine = config.source.kind, config.engine.kind
    limits = {c: f'source.kind is "{kind}"' for c in SOURCE_CAPABILITIES if c not in SOURCES[kind]}
    if config.source.lags:
        limits.setdefault("samples_current_weights", "source.sync_every or source.sync_from is above 1")
    if "shares_weights" not in capabilities(engine):
        limits.setdefault("shares_weights", f'engine.kind is "{engine}"')
    if config.environment is not None:
        limits.setdefault("single_turns", "[environment] is set")
    return limits


@dataclass(frozen=True)
class Context:
    """What a source that wraps another one may use."""

    config: RunConfig  # of the phase
    here: InlineSource | None  # see `inline`
    copying: Callable[[InlineSource], Source]
    """Gives a source that was derived from `inline` the configuration's lag."""
    prompts: Sequence[Prompt]  # the training prompts, with all of their columns
    policy: Policy
    store: Store
    folder: Run
    environment: Environment | None
    say: Callable[[str], None]

    @property
    def inline(self) -> InlineSource:
        """The source in this process, without a lag, to derive others from (`dataclasses.replace`)."""
        assert self.here is not None, 'needs = {"shares_engine"} refuses a source in other processes'
        return self.here


@dataclass(frozen=True)
class SourceWrapper:
    """A source that wraps another one.

    `make(source, context, options)` returns a `Source`. If that is a `Monitor` too, checkpoints store its
    state.
    """

    make: Callable[[Source, Context, Any], Source]
    options: type[BaseModel] = NoOptions
    """The pydantic model of source.options, each value with its bounds."""
    needs: Abilities = frozenset()
    """What the source inside must be able to do."""
    can: Callable[[Abilities, Any], Abilities] = lambda inner, options: frozenset()
    """What it can do itself, given the abilities of the source inside and the options; default: nothing."""
    problems: Callable[[Phase, Any], Mapping[str, object]] = lambda phase, options: {}
    """Other settings it can't be combined with: the ends of sentences about it, and whether each applies."""

    def __post_init__(self) -> None:
        plugins.check_names("SourceWrapper: needs", self.needs, SOURCE_CAPABILITIES)
        if not callable(self.can):
            raise Refused(f"SourceWrapper: can: expected a function, got {self.can!r:.80}")


@dataclass(frozen=True)
class CheckedSource:
    """Checks a source that wraps another one: a wrong result or an exception of it is refused."""

    source: Source
    begin: str  # the start of messages
    store: Store

    def fill(self, wanted: FillRequest) -> CollectResult:
        with plugins.errors_of(self.source.fill, f"{self.begin}: fill"):
            filled = self.source.fill(wanted)
        if not isinstance(filled, CollectResult):
            raise Refused(f"{self.begin}: fill: expected a CollectResult (agro.rollout), got {filled!r:.80}")
        try:
            self.store.tables.check_ids(list(filled.ids))
        except Refused as error:
            raise Refused(f"{self.begin}: fill: expected ids of samples: {error}") from None
        return filled

    def publish(self, learner: Learner) -> None:
        with plugins.errors_of(self.source.publish, f"{self.begin}: publish"):
            self.source.publish(learner)


def wrapper_of(config: RunConfig, prefix: str = "") -> tuple[SourceWrapper, Any]:
    """The wrapper that `source.around` names, and its options.

    Raises `Refused` if there is no such source, and for options that it doesn't have.
    """
    name, options = config.source.around, config.source.options
    if name is None:
        raise Refused(f"{prefix}source.options are those of source.around, which isn't set; set it")
    wrapper = plugins.load("sources", name, f"{prefix}source.around")
    if not isinstance(wrapper, SourceWrapper):
        raise Refused(
            f"{prefix}source.around = {name}: expected a SourceWrapper (agro.train.around), got "
            f"{wrapper!r:.80}"
        )
    return wrapper, read_options(wrapper.options, options, f"{prefix}source.options of {name}")


def source_abilities(config: RunConfig) -> Abilities:
    """What the source of a phase can do, including its wrapper."""
    inner = frozenset(SOURCE_CAPABILITIES) - lacking(config).keys()
    if config.source.around is None:
        return inner
    wrapper, options = wrapper_of(config)
    begin = f"source.around = {config.source.around}: can"
    with plugins.errors_of(wrapper.can, f"{begin} was called with (inner, options)"):
        can = wrapper.can(inner, options)
    plugins.check_names(begin, can, SOURCE_CAPABILITIES)
    return frozenset(can)


def put_around(source: Source, context: Context) -> Source:
    """Wrap a source in `source.around`. Raises `Refused` if that fails or doesn't return a `Source`."""
    wrapper, options = wrapper_of(context.config)
    begin = f"source.around = {context.config.source.around}"
    with plugins.errors_of(wrapper.make, f"{begin} was called with (source, context, options)"):
        wrapped = wrapper.make(source, context, options)
    missing = [name for name in ("fill", "publish") if not callable(getattr(wrapped, name, None))]
    if missing:
        raise Refused(
            f"{begin}: expected a source (agro.train.source.Source), got {wrapped!r:.80} without "
            f"{' and '.join(missing)}"
        )
    return wrapped


def check_around(phase: Phase, prefix: str) -> None:
    """Raise `Refused` if the wrapper needs what the source can't do, or reports a problem itself."""
    config = phase.config
    wrapper, options = wrapper_of(config, prefix)
    begin = f"{prefix}source.around = {config.source.around} "
    problems: dict[str, object] = {
        "changes fresh samples, but data.replay = 1 has none. What to do: remove it, or set it in the phases "
        "that sample": not config.data.samples_fresh,
    }
    for need, setting in lacking(config).items():
        text = f"needs a source that {SOURCE_CAPABILITIES[need]}, but {setting}"
        problems[f"{text}. What to do: change one of the two"] = need in wrapper.needs
    with plugins.errors_of(wrapper.problems, f"{begin}: problems"):
        problems |= wrapper.problems(phase, options)
    refuse(problems, begin)
