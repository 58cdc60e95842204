"""Sources around a source: what `source.around` names, and what the source of a configuration can do then.

One is declared by a `SourceWrapper`, in a file or module that `source.around` names as file.py:NAME or
module:NAME, or in an installed package, by an entry point `agro.sources`. It says what it needs of the source
that it is put around, and what it can do itself: settings that need anything else are refused.
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
    "whole_groups": "returns one group for each prompt that a step asks for",
    "judges_pairs": "adds judgments of its responses, on which objectives on pairs train",
}

# What settings of data need of the source.
NEEDED_BY: dict[str, SourceCapability] = {
    "complete_groups": "samples_chosen_prompts",
    "spread": "whole_groups",
    "experts": "whole_groups",
}

# What those of each source.kind can do, where no other setting takes it from them.
SOURCES: dict[str, Abilities] = {
    "inline": frozenset(SOURCE_CAPABILITIES) - {"judges_pairs"},
    "elsewhere": frozenset(("complete_policy", "single_turns", "whole_groups")),
}


def lacking(config: RunConfig) -> dict[SourceCapability, str]:
    """What the source of `source.kind` can't do in a phase, each with the setting that is why."""
    kind, engine = config.source.kind, config.engine.kind
    found = {c: f'source.kind is "{kind}"' for c in SOURCE_CAPABILITIES if c not in SOURCES[kind]}
    if config.source.lags:
        found.setdefault("samples_current_weights", "source.sync_every or source.sync_from is above 1")
    if "shares_weights" not in capabilities(engine):
        found.setdefault("shares_weights", f'engine.kind is "{engine}"')
    if config.environment is not None:
        found.setdefault("single_turns", "[environment] is set")
    return found


@dataclass(frozen=True)
class Context:
    """What a source that is put around another one may use."""

    config: RunConfig  # of the phase
    here: InlineSource | None  # see `inline`
    copying: Callable[[InlineSource], Source]
    """The source of the configuration in place of `inline`, for one that is made of it: with its lag."""
    prompts: Sequence[Prompt]  # that are trained on, with all of their columns
    policy: Policy
    store: Store
    folder: Run
    environment: Environment | None
    say: Callable[[str], None]

    @property
    def inline(self) -> InlineSource:
        """The source in this process, without a lag, of which others can be made (`dataclasses.replace`)."""
        assert self.here is not None, 'needs = {"shares_engine"} refuses a source in other processes'
        return self.here


@dataclass(frozen=True)
class SourceWrapper:
    """A source that is put around another one.

    `make(source, context, options)` is a `Source`. One that is a `Monitor` too has its state in checkpoints.
    """

    make: Callable[[Source, Context, Any], Source]
    options: type[BaseModel] = NoOptions
    """That source.options are an object of; pydantic's, each value with its bounds."""
    needs: Abilities = frozenset()
    """What the source has to be able to do that it is put around."""
    can: Callable[[Abilities, Any], Abilities] = lambda inner, options: frozenset()
    """What it can do itself, from what that source can do, and options; one that doesn't say it: nothing."""
    problems: Callable[[Phase, Any], Mapping[str, object]] = lambda phase, options: {}
    """What else it can't be combined with, as the end of a sentence that it begins, and whether it is so."""

    def __post_init__(self) -> None:
        plugins.check_names("SourceWrapper: needs", self.needs, SOURCE_CAPABILITIES)
        if not callable(self.can):
            raise Refused(f"SourceWrapper: can: expected a function, got {self.can!r:.80}")


@dataclass(frozen=True)
class CheckedSource:
    """A source that another one was put into. What it raises, or returns, may be wrong: it is refused."""

    made: Source
    begin: str  # of messages
    store: Store

    def fill(self, wanted: FillRequest) -> CollectResult:
        with plugins.errors_of(self.made.fill, f"{self.begin}: fill"):
            filled = self.made.fill(wanted)
        if not isinstance(filled, CollectResult):
            raise Refused(f"{self.begin}: fill: expected a CollectResult (agro.rollout), got {filled!r:.80}")
        try:
            self.store.tables.check_ids(list(filled.ids))
        except Refused as error:
            raise Refused(f"{self.begin}: fill: expected ids of samples: {error}") from None
        return filled

    def publish(self, learner: Learner) -> None:
        with plugins.errors_of(self.made.publish, f"{self.begin}: publish"):
            self.made.publish(learner)


def wrapper_of(config: RunConfig, prefix: str = "") -> tuple[SourceWrapper, Any]:
    """What `source.around` names, and its options.

    Raises `Refused` where there is no such source, and for options that it doesn't have.
    """
    name, given = config.source.around, config.source.options
    if name is None:
        raise Refused(f"{prefix}source.options are those of source.around, which isn't set; set it")
    wrapper = plugins.load("sources", name, f"{prefix}source.around")
    if not isinstance(wrapper, SourceWrapper):
        raise Refused(
            f"{prefix}source.around = {name}: expected a SourceWrapper (agro.train.around), got "
            f"{wrapper!r:.80}"
        )
    return wrapper, read_options(wrapper.options, given, f"{prefix}source.options of {name}")


def source_abilities(config: RunConfig) -> Abilities:
    """What the source of a phase can do, with what is around it."""
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
    """What `source.around` makes of a source. Raises `Refused` where it can't, or it isn't a `Source`."""
    wrapper, options = wrapper_of(context.config)
    begin = f"source.around = {context.config.source.around}"
    with plugins.errors_of(wrapper.make, f"{begin} was called with (source, context, options)"):
        made = wrapper.make(source, context, options)
    missing = [name for name in ("fill", "publish") if not callable(getattr(made, name, None))]
    if missing:
        raise Refused(
            f"{begin}: expected a source (agro.train.source.Source), got {made!r:.80} without "
            f"{' and '.join(missing)}"
        )
    return made


def check_around(phase: Phase, prefix: str) -> None:
    """Raise `Refused` where what is around the source needs what the source can't do, or says so itself."""
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
