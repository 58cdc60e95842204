"""What can train on a store: the recipe for it first, then every objective by what it needs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from agro.config import PolicyConfig, RunConfig
from agro.errors import Refused
from agro.objectives import names
from agro.objectives.needs import PAIRS, REWARD, grouping
from agro.store import Group, Store
from agro.train import trainable
from agro.train.check import check_config
from agro.train.phases import Phase, options_at
from agro.train.trainable import judged_prompts, kind_of, train_command

FRESH = "fresh samples, which a log has none of"
EQUAL = "rewards that differ: they can run, with nothing to learn"
MISSING = (  # of refusals: what they say, and what is missing
    (r"old_logp|staleness|\[again\]|\[search\]|fresh samples|fresh responses|data\.prompts isn't set", FRESH),
    ("behavior_logp", "log-probs of who wrote the responses"),
    ("groups of at least 2", "two responses or more to a prompt"),
    ("reward_parts", "the parts of several rewards"),
    ("value_store", "stored values of the prompts (data.value_store)"),
    ("reference_model", "a teacher (policy.reference_model)"),
    ("has no samples that", "samples of another role, such as expert"),
    ("expected .* groups with", "more groups than the store has"),
)
REASONS = {
    "log": "rewards of several responses to a prompt: they are compared, whoever wrote them",
    "feedback": "one response to a prompt: it is compared with those to other prompts",
    "dro": "the same, compared with a value that is learned",
    "kto": "the same, by who is above and below the middle of the rewards",
    "pairs": "judged pairs: the winner's regularized reward is to be 1 above the loser's",
    "dpo": "judged pairs, as most people train on them",
    "sft": "neither rewards nor pairs: the responses are imitated; agro score adds rewards",
}
RECOMMENDED = {"log": ("log",), "feedback": ("feedback", "dro", "kto"), "pairs": ("pairs", "dpo")}


@dataclass(frozen=True)
class Candidate:
    """A recipe, which most often is an objective's. `reason`: why it is recommended, or what is missing."""

    name: str
    reason: str = ""
    command: str = ""
    changes: tuple[str, ...] = ()  # of the recipe, KEY=VALUE

    def to_json(self) -> dict[str, Any]:
        shown = {"name": self.name, "reason": self.reason, "command": self.command}
        return {name: value for name, value in shown.items() if value}

    def config(self, policy: PolicyConfig, changes: Sequence[str]) -> RunConfig:
        """Of a run that holds nothing out, with further changes."""
        found = RunConfig.load(self.name, [*self.changes, *changes])
        return _holding_nothing(found).model_copy(update={"policy": policy})


@dataclass(frozen=True)
class Ranking:
    """What is recommended, the best first, and all other objectives."""

    recommended: tuple[Candidate, ...]
    possible: tuple[Candidate, ...]
    impossible: tuple[Candidate, ...]

    def missing(self) -> dict[str, list[str]]:
        """Objectives that can't train on it by what is missing."""
        by_reason: dict[str, list[str]] = {}
        for candidate in self.impossible:
            by_reason.setdefault(candidate.reason, []).append(candidate.name)
        return by_reason

    def to_json(self) -> dict[str, Any]:
        parts = ("recommended", "possible", "impossible")
        return {part: [each.to_json() for each in getattr(self, part)] for part in parts}

    def lines(self, width: int = 80, *, whole: bool = False) -> Iterator[str]:
        """For the terminal. The last line is the command to run next; `whole`: all objectives before it."""
        for each in self.recommended[1:]:
            yield from _wrapped(f"also {each.name}: {each.reason}", "", width)
            yield f"  {each.command}"
        if whole:
            if self.possible:
                yield "possible"
                yield from _wrapped(", ".join(each.name for each in self.possible), "  ", width)
                yield f"    such as: {self.possible[0].command}"
            if self.impossible:
                yield "impossible, since they need"
            for reason, missing in self.missing().items():
                yield from _wrapped(f"{reason}: {', '.join(missing)}", "  ", width)
        else:
            possible, impossible = len(self.possible), len(self.impossible)
            yield f"{possible} other objectives can train on it, {impossible} can't: --all names them"
        if not self.recommended:
            yield "recommended: nothing"
            return
        best = self.recommended[0]
        yield ""
        yield from _wrapped(f"recommended: {best.name}, {best.reason}", "", width)
        if "policy.model=MODEL " in best.command:
            yield "MODEL is your model, a folder or a name on the Hugging Face hub; --model NAME fills it in"
        yield f"  {best.command} --fit 30min"


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=f"{indent}  ")


def rank(store: Store, log: Path | None = None, model: str | None = None) -> Ranking:
    """Try the recipes of all objectives on what a store has. `log`, `model`: as of `train_command`."""
    return _Trial(store, log, model).ranking()


@dataclass
class _Trial:
    store: Store
    log: Path | None
    model: str | None
    refusals: dict[str, str] = field(default_factory=dict)  # of the store, by what it was asked for

    def ranking(self) -> Ranking:
        kind, _ = kind_of(self.store)
        counts = self.store.counts()
        wanted = RECOMMENDED[kind] if counts.scored or counts.pairs else ("sft",)
        recommended, possible, impossible = [], [], []
        for name in dict.fromkeys((*wanted, *names())):
            found = self._candidate(name)
            if not found.command:
                impossible.append(found)
            elif name in wanted:
                recommended.append(found)
            else:
                possible.append(found)
        return Ranking(tuple(recommended), tuple(possible), tuple(impossible))

    def _candidate(self, name: str) -> Candidate:
        """With the first changes of its recipe by which it can train on the store."""
        if self.is_equal and REWARD in Phase.all(RunConfig.load(name))[0].needs:
            return Candidate(name, EQUAL)
        refused = ""
        for changes in self._changes(name):
            settings = [f"data.store={self.store.path}", "policy.model=MODEL", *changes]
            try:
                refused = self._refusal(RunConfig.load(name, settings))
            except Refused as error:
                refused = str(error)
            if not refused:
                command = train_command(name, self.model, self.store, self.log, changes)
                return Candidate(name, REASONS.get(name, ""), command, tuple(changes))
        return Candidate(name, _missing(refused))

    @cached_property
    def is_equal(self) -> bool:
        """Whether there are rewards, and all are the same."""
        low, high = self.store.survey.spread_of_rewards() or (0.0, 1.0)
        return low == high

    @cached_property
    def groups(self) -> list[Group]:
        return list(self.store.survey.each_group())

    def _changes(self, name: str) -> Iterator[list[str]]:
        """Of the recipe: all groups from the store, as many as there are, and small ones left out."""
        config = RunConfig.load(name)
        changes = [] if config.data.replay == 1 else ["data.replay=1"]
        if name == "kto":
            low, high = self.store.survey.spread_of_rewards() or (0.0, 1.0)
            changes.append(f"objective.threshold={(low + high) / 2:g}")
        available = self._groups(config)
        if 0 < available < config.train.groups:
            changes.append(f"train.groups={available}")
        yield changes
        if config.objective.options.get("singletons", "drop") != "drop" or grouping(
            Phase.all(config)[0].needs
        ):
            yield [*changes, "objective.singletons=drop"]

    def _groups(self, config: RunConfig) -> int:
        """Groups that it may draw of the store."""
        phase = Phase("", config, 0, 1)
        need = grouping(phase.needs)
        if PAIRS in phase.needs:
            return judged_prompts(self.store)
        least = 1 if need is None else need.least
        groups = self.groups
        if config.data.spread is True:
            groups = [group for group in groups if group.reward_min != group.reward_max]
        return sum((group.scored if REWARD in phase.needs else group.size) >= least for group in groups)

    def _refusal(self, config: RunConfig) -> str:
        """Why it can't train on the store; "" where it can."""
        if config.source.around is not None:
            return FRESH
        for phase in check_config(_holding_nothing(config)):
            options = options_at(phase.config.objective.options, 0)
            data, groups = phase.config.data, phase.config.train.groups
            asked = f"{sorted(phase.needs)} {options.get('singletons')} {data} {groups}"
            if asked not in self.refusals:
                self.refusals[asked] = ""
                try:
                    trainable.check_store(phase, self.store, fills=False)
                    trainable.check_enough([phase], self.store.path)
                except Refused as error:
                    self.refusals[asked] = str(error)
            refused = self.refusals[asked]
            if refused:
                return refused
        return ""


def _holding_nothing(config: RunConfig) -> RunConfig:
    """Held-out prompts are those that a step doesn't need."""
    return config.model_copy(update={"data": config.data.model_copy(update={"hold_out": 0.0})})


def _missing(refused: str) -> str:
    """What is missing, in a few words, of a refusal."""
    for pattern, words in MISSING:
        if re.search(pattern, refused):
            return words
    found = re.match(r"objective \S+ needs ([^:(]+)", refused)
    return found[1].strip() if found else refused.partition("\n")[0].partition(". What to do")[0][:120]
