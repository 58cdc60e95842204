"""Draws from the shards of a store: the groups, and their order, are those of one store.

Each shard lists its groups by what the rule orders them by, which depends on prompts and on the run alone,
and the lists are merged. The first shard keeps what a step is about to draw before any shard records its
part: a draw that was cut off is completed as it began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.store.candidates import PlacedGroup
from agro.store.draw_rules import At, Candidate, DrawRule, Selection, pick_groups
from agro.store.drawing import DrawReader, drawn_otherwise, samples_of, too_few
from agro.store.records import Draw, DrawnGroups, RunUse
from agro.store.sample_rows import encode_text
from agro.store.sharding.group import ShardGroup
from agro.store.split import Split
from agro.types import Sample

KEYS: dict[str, Callable[[PlacedGroup], tuple[int, ...]]] = {  # `BY` of agro.store.candidates
    "least_used": lambda group: (group.uses, group.place),
    "uniform": lambda group: (group.place,),
    "closest": lambda group: (group.place,),
    "newest": lambda group: (-group.newest, group.uses, group.place),
    "age_weighted": lambda group: (group.newest, group.place),
}


def text_key(text: str) -> tuple[bool, bytes]:
    """By which SQLite orders texts: those that UTF-8 can't encode are bytes, which come last."""
    stored = encode_text(text)
    return (True, stored) if isinstance(stored, bytes) else (False, stored.encode())


class MergedGroups:
    """The groups of all shards: its `agro.store.draw_rules.DrawableGroups`."""

    def __init__(self, group: ShardGroup, rule: DrawRule, at: At) -> None:
        self._group, self._rule, self._at = group, rule, at
        self._members: dict[int, list[str]] = {}  # by version

    @cached_property
    def versions(self) -> Counter[int]:
        total = Counter[int]()
        for counts in self._each("count_groups"):
            total.update(counts)
        return total

    @property
    def count(self) -> int:
        return self.versions.total()

    def first(self, n: int) -> list[str]:
        return self._merged(self._each("first_groups", n), KEYS[self._rule.data.order])[:n]

    def between(self, slots: Sequence[tuple[int, int, int]]) -> list[str | None]:
        groups: list[str | None] = []
        for (_, _, n), *parts in zip(slots, *self._each("groups_between", slots), strict=True):
            members = self._merged(parts, KEYS["uniform"])
            groups.append(members[n] if n < len(members) else None)
        return groups

    def of_version(self, version: int) -> list[str]:
        if version not in self._members:
            parts = self._each("groups_of_version", version)
            self._members[version] = self._merged(parts, KEYS["uniform"])
        return self._members[version]

    def _each(self, method: str, *args: Any) -> list[Any]:
        return self._group.each(f"draws.{method}", self._rule, self._at, *args)

    def _merged(
        self, parts: Iterable[Iterable[PlacedGroup]], key: Callable[[PlacedGroup], tuple[int, ...]]
    ) -> list[str]:
        groups = sorted(chain(*parts), key=lambda group: (key(group), text_key(group.prompt_id)))
        return [group.prompt_id for group in groups]


class _Share(NamedTuple):
    """What one shard draws."""

    picks: list[Selection]
    made: list[int]

    @property
    def draws(self) -> bool:
        return bool(self.made) or any(picked.groups for picked in self.picks)


class ShardedDraws(DrawReader):
    """What runs drew, and what they may draw. Methods do what those of `agro.store.drawing.Draws` do."""

    def __init__(self, group: ShardGroup, split: Split) -> None:
        self._group, self._split = group, split

    def pick(self, rule: DrawRule, at: At, taken: Collection[str] = ()) -> list[str]:
        self._share_split(rule, at.run)
        picked = pick_groups(MergedGroups(self._group, rule, at), rule, at, taken)
        if len(picked) >= rule.groups or rule.fewer:
            return picked
        waited = f"waited {rule.wait:g} s: " if rule.wait else ""
        raise Refused(waited + self._too_few(rule, len(picked), at))

    def candidates(self, rule: DrawRule, run: str, version: int) -> list[Candidate]:
        is_held_out = self._split.held_out(rule.data, run)
        all_of = replace(rule, data=rule.data.model_copy(update={"hold_out": 0.0}))
        candidates = list(chain(*self._group.each("draws.candidates", all_of, run, version)))
        candidates.sort(key=lambda candidate: text_key(candidate.prompt_id))
        return [candidate for candidate in candidates if not is_held_out(candidate.prompt_id)]

    def require(self, rule: DrawRule, at: At) -> None:
        count = len(self.candidates(rule, at.run, at.version))
        if count < rule.groups:
            raise Refused(self._too_few(rule, count, at))

    def record(self, run: str, step: int, ids: Iterable[int]) -> None:
        parts = self._group.by_known_id(ids)
        self._group.some("draws.record", {number: (run, step, own) for number, own in parts.items()})

    def draw_picked(
        self, picks: Sequence[Selection], at: At, made: Sequence[int] = (), joining: DrawRule | None = None
    ) -> DrawnGroups:
        groups = list(dict.fromkeys(chain(*(picked.groups for picked in picks))))
        shares = self._shares(picks, made)
        planned_groups, planned_made = self._agree(groups, made, at)
        if (planned_groups, planned_made) == (groups, list(made)):
            shares = {number: share for number, share in shares.items() if share.draws}
        else:  # recorded by some, and not by those where it was cut off
            groups, recorded = planned_groups, self._group.each("draws.recorded_groups", at)
            for number in (number for number, rows in enumerate(recorded) if not rows):
                shares[number] = self._missing(shares[number], groups, planned_made, at)
        calls = {number: (share.picks, at, share.made, joining) for number, share in shares.items()}
        drawn = self._group.some("draws.draw_picked", calls)
        for number, part in drawn.items():
            self._group.remember(number, (sample.id or 0 for sample in part.samples))
        samples = in_order([part.samples for part in drawn.values()], groups, set(made))
        damaged = sorted(chain(*(part.damaged for part in drawn.values())))
        pairs = sorted(chain(*(part.pairs for part in drawn.values())), key=samples_of)
        return DrawnGroups(samples, pairs, damaged)

    def look(self, picked: Selection, at: At) -> list[Sample]:
        parts = self._group.by_prompt(picked.groups, str)
        looks = {number: (Selection(picked.rule, own), at) for number, own in parts.items()}
        return in_order(self._group.some("draws.look", looks).values(), picked.groups, frozenset())

    def recorded_groups(self, at: At) -> list[str]:
        recorded = list(chain(*self._group.each("draws.recorded_groups", at)))
        planned = self._group.first.call("shard.plan", at.run, at.step) if recorded else []
        place = {group: number for number, group in enumerate(planned[0] if planned else [])}
        return sorted(recorded, key=lambda group: place.get(group, len(place)))

    def drawn(self, run: str, versions: Mapping[int, int | None] | None = None) -> list[Draw]:
        """Within a step by shard."""
        rows = chain(*self._group.each("draws.drawn", run, versions))
        return sorted(rows, key=lambda draw: draw.step)

    def uses(self, ids: Iterable[int]) -> dict[int, int]:
        ids = list(ids)
        calls = {number: (own,) for number, own in self._group.by_known_id(ids).items()}
        uses: dict[int, int] = {}
        for part in self._group.some("draws.uses", calls).values():
            uses |= part
        return {i: uses[i] for i in ids}

    def trained(self, ids: Sequence[int]) -> list[RunUse]:
        calls = {number: (own,) for number, own in self._group.by_id(ids).items()}
        runs: dict[str, RunUse] = {}
        for use in chain(*self._group.some("draws.trained", calls).values()):
            before = runs.get(use.run, RunUse(use.run, 0, use.first, use.last))
            samples = before.samples + use.samples
            runs[use.run] = RunUse(use.run, samples, min(before.first, use.first), max(before.last, use.last))
        return [runs[run] for run in sorted(runs, key=text_key)]

    def _share_split(self, rule: DrawRule, run: str) -> None:
        """Let each shard hold out the same prompts: near-copies of theirs may be in others."""
        if rule.data.hold_out and self._group.first.call("clusters.of", run) is None:
            self._group.each("clusters.keep", run, self._split.near_copies(rule.data.near_copies))

    def _too_few(self, rule: DrawRule, got: int, at: At) -> str:
        tallies = self._group.each("draws.tally", rule, at)
        return too_few(self._group.name, rule, got, [sum(numbers) for numbers in zip(*tallies, strict=True)])

    def _agree(self, groups: Sequence[str], made: Sequence[int], at: At) -> tuple[list[str], list[int]]:
        """The groups and the samples made that the step draws: others where a shard has recorded those."""
        plan = at.run, at.step, list(groups), list(made)
        agreed = self._group.first.call("shard.agree", *plan)
        if agreed != [*plan[2:]] and not any(self._group.each("draws.recorded_groups", at)):
            self._group.first.call("shard.drop_plan", at.run, at.step)
            agreed = self._group.first.call("shard.agree", *plan)
        return agreed[0], agreed[1]

    def _shares(self, picks: Sequence[Selection], made: Sequence[int]) -> dict[int, _Share]:
        """What each shard draws: of each pick its own groups, and the samples made that it has."""
        made_by = self._group.by_id(made)
        known = set(chain(*made_by.values()))
        made_by[0] = [*made_by.get(0, []), *(i for i in made if i not in known)]  # which it will miss
        groups_by = [self._group.by_prompt(picked.groups, str) for picked in picks]
        shares = {}
        for number in range(len(self._group.shards)):
            own = [groups.get(number, []) for groups in groups_by]
            selections = [Selection(picked.rule, part) for picked, part in zip(picks, own, strict=True)]
            shares[number] = _Share(selections, made_by.get(number, []))
        return shares

    def _missing(self, share: _Share, groups: Sequence[str], made: Sequence[int], at: At) -> _Share:
        """The share of a shard that has recorded nothing of a draw of these groups and samples made.

        Raises `Refused` where it would draw what isn't of them."""
        other = set(share.made) - set(made)
        if other:
            raise Refused(drawn_otherwise(self._group.name, at, min(other)))
        planned = set(groups)
        return _Share(
            [Selection(rule, [group for group in own if group in planned]) for rule, own in share.picks],
            share.made,
        )


def in_order(parts: Iterable[Sequence[Sample]], groups: Sequence[str], made: Collection[int]) -> list[Sample]:
    """The samples of several shards as one store draws them, which are in this order in each part: those of
    the picked groups, those that were made, by number, and what joins these."""
    place = {group: number for number, group in enumerate(groups)}
    picked, fresh, joining = list[Sample](), list[Sample](), list[Sample]()
    for part in parts:
        is_made = [sample.id in made for sample in part]
        last_picked = is_made.index(True) if any(is_made) else len(part)
        for number, sample in enumerate(part):
            if is_made[number]:
                fresh.append(sample)
            elif number < last_picked and (any(is_made) or sample.prompt_id in place or not made):
                picked.append(sample)
            else:
                joining.append(sample)
    picked.sort(key=lambda sample: place.get(sample.prompt_id, len(place)))
    fresh.sort(key=lambda sample: (*_number(sample), sample.id or 0))
    order = {prompt: number for number, prompt in enumerate(dict.fromkeys(s.prompt_id for s in fresh))}
    joining.sort(key=lambda sample: order.get(sample.prompt_id, len(order)))
    return [*picked, *fresh, *joining]


def _number(sample: Sample) -> tuple[bool, int]:
    """Of the response; without one it comes first."""
    index = sample.meta.get("index")
    return (True, index) if isinstance(index, int) else (False, 0)
