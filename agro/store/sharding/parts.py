"""The parts of a store in shards: each method asks the shards that it concerns, and joins their answers.

What a method does is said where a store of one file has it: in `Experience`, `Survey` and so on.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Unpack, cast

from agro.errors import Refused
from agro.store.imports import Provenance
from agro.store.location import Shards
from agro.store.parts import Parts
from agro.store.queries import Filter
from agro.store.records import Commit, Counts, Damage, Group, LedgerSample, Pair, Rewind, SampleSummary
from agro.store.sample_rows import Origin, SampleRow
from agro.store.samples import SampleReader, scored_columns
from agro.store.serving.remote import RemotePart
from agro.store.sharding.draws import ShardedDraws, text_key
from agro.store.sharding.group import Shard, ShardGroup
from agro.store.split import Clusters, Split
from agro.store.survey import Scale, SurveyReader, SurveyRow
from agro.types import Sample, Text


class ShardedExperience(SampleReader):
    """Samples, and judgments of them. A sample is in the shard of its prompt."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group

    def samples(
        self, *, ids: Iterable[int] | None = None, skip_damaged: bool = False, **chosen: Unpack[Filter]
    ) -> Iterator[Sample]:
        shards = [shard.experience for shard in self._group.shards]
        prompt_id = chosen.get("prompt_id")
        if ids is not None:
            parts = self._group.by_known_id(sorted(set(ids))).items()
            readers = [shards[k].samples(ids=own, skip_damaged=skip_damaged, **chosen) for k, own in parts]
        elif prompt_id is not None:
            readers = [shards[self._group.of(prompt_id)].samples(skip_damaged=skip_damaged, **chosen)]
        else:
            readers = [shard.samples(skip_damaged=skip_damaged, **chosen) for shard in shards]
        yield from heapq.merge(*readers, key=attrgetter("id"))

    def append(
        self,
        samples: Iterable[Sample | SampleRow],
        *,
        run: str | None = None,
        step: int | None = None,
        origins: Sequence[Origin] | None = None,
    ) -> list[int]:
        """Add samples and return their ids, see `Experience.append`. Of those that several processes add at
        once under one origin, or with different prompts under one id, a shard takes the first; it refuses the
        others, when another shard may have taken its part of them already.
        """
        rows = [s if isinstance(s, SampleRow) else SampleRow.of(s) for s in samples]
        stored = self.ids_of(origins) if origins is not None else [None] * len(rows)
        keys: Sequence[Any] = origins if origins is not None else range(len(rows))
        new: dict[Any, SampleRow] = {}
        for key, row, known in zip(keys, rows, stored, strict=True):
            if known is None:
                new.setdefault(key, row)
        self.check_prompts((row.prompt_id, row.prompt) for row in new.values())
        ids = dict(zip(keys, stored, strict=True)) | (self._append(new, run, step, origins) if new else {})
        return [cast(int, ids[key]) for key in keys]

    def _append(
        self, new: Mapping[Any, SampleRow], run: str | None, step: int | None, origins: Any
    ) -> dict[Any, int]:
        """The ids of new samples, by their keys, which are their origins where there are `origins`."""
        first = self._group.first.call("shard.reserve", len(new))
        numbered = [(key, row, first + i) for i, (key, row) in enumerate(new.items())]
        parts = self._group.by_prompt(numbered, lambda entry: entry[1].prompt_id)
        calls = []
        for number, part in parts.items():
            keys, rows, ids = map(list, zip(*part, strict=True))
            options = {"run": run, "step": step, "ids": ids, "origins": keys if origins is not None else None}
            shard = self._group.shards[number]
            calls.append((number, keys, shard.submit("experience.append", rows, **options)))
        added: dict[Any, int] = {}
        for number, keys, call in calls:
            ids = call.result()
            self._group.remember(number, ids)
            added |= zip(keys, ids, strict=True)
        return added

    def last_id(self) -> int:
        return int(max(self._group.each("experience.last_id")))

    def check_ids(self, ids: list[int]) -> None:
        self._group.by_known_id(ids)

    def known_ids(self, ids: Sequence[int]) -> list[int]:
        return list(chain(*self._group.by_id(ids).values()))

    def ids_of(self, origins: Sequence[Origin]) -> list[int | None]:
        parts = self._group.each("experience.ids_of", list(origins))
        return [next((i for i in ids if i is not None), None) for ids in zip(*parts, strict=True)]

    def check_prompts(self, prompts: Iterable[tuple[str, Text]]) -> None:
        parts = self._group.by_prompt(prompts, lambda prompt: prompt[0])
        self._group.some("experience.check_prompts", {number: (part,) for number, part in parts.items()})

    def find(self, **chosen: Any) -> list[int]:
        return sorted(chain(*self._group.each("experience.find", **chosen)))

    def in_ledger(self, ledger: str, numbers: Sequence[int]) -> list[LedgerSample]:
        return sorted(chain(*self._group.each("experience.in_ledger", ledger, list(numbers))))

    def rewards(
        self, run: str, prompt_ids: Iterable[str], *, without: Collection[int]
    ) -> dict[str, list[tuple[int, float]]]:
        prompt_ids = list(prompt_ids)
        parts = self._group.by_prompt(prompt_ids, str)
        calls = {number: (run, own) for number, own in parts.items()}
        rewards: dict[str, list[tuple[int, float]]] = {}
        for part in self._group.some("experience.rewards", calls, without=without).values():
            rewards |= part
        return {prompt_id: rewards[prompt_id] for prompt_id in prompt_ids}

    def next_number(self, seed: int) -> int:
        return int(max(self._group.each("experience.next_number", seed)))

    def set_rewards(
        self, scores: Iterable[tuple[int, float | None, Mapping[str, Any]]], *, once: bool = False
    ) -> None:
        scores = list(scores)
        parts = self._group.by_known_id(i for i, _, _ in scores)
        for i, reward, entries in scores:
            scored_columns(i, reward, dict(entries))  # raises before anything is written
        chosen = {i: number for number, ids in parts.items() for i in ids}
        calls: dict[int, tuple[list[Any]]] = {number: ([],) for number in parts}
        for score in scores:
            calls[chosen[score[0]]][0].append(score)
        self._group.some("experience.set_rewards", calls, once=once)

    def add_pairs(self, pairs: Iterable[Pair]) -> None:
        """Add judgments. Raises `Refused` for ids that aren't there, and for a pair of two shards."""
        pairs = list(pairs)
        parts = self._group.by_known_id(i for pair in pairs for i in (pair.winner, pair.loser))
        shard_of = {i: number for number, ids in parts.items() for i in ids}
        calls: dict[int, tuple[list[Pair]]] = {}
        for pair in pairs:
            if shard_of[pair.winner] != shard_of[pair.loser]:
                raise Refused(
                    f"{self._group.name}: pair of {pair.winner} and {pair.loser}: expected responses to one "
                    "prompt, which are in one of the stores, got two prompts'"
                )
            calls.setdefault(shard_of[pair.winner], ([],))[0].append(pair)
        self._group.some("experience.add_pairs", calls)

    def pairs(self, ids: Iterable[int] | None = None) -> Iterator[Pair]:
        """Judgments, by shard, and then in the order in which they came; see `SampleReader.pairs`."""
        if ids is None:
            return chain(*(shard.experience.pairs() for shard in self._group.shards))
        calls = {number: (own,) for number, own in self._group.by_id(ids).items()}
        return chain(*self._group.some("experience.pairs_between", calls).values())


class ShardedSurvey(SurveyReader):
    """What there is in all shards."""

    def __init__(self, group: ShardGroup) -> None:
        self._group, self._shards = group, [shard.survey for shard in group.shards]

    def each_group_rows(self) -> Iterator[list[SurveyRow]]:
        readers = [shard.each_group_rows() for shard in self._shards]
        return heapq.merge(*readers, key=lambda rows: text_key(rows[0].prompt_id))

    def each_prompt(self) -> Iterator[tuple[str, Text]]:
        readers = [shard.each_prompt() for shard in self._shards]
        return heapq.merge(*readers, key=lambda prompt: text_key(prompt[0]))

    def each_group(self, **chosen: Unpack[Filter]) -> Iterator[Group]:
        readers = [shard.each_group(**chosen) for shard in self._shards]
        return heapq.merge(*readers, key=lambda group: text_key(group.prompt_id))

    def each_summary(self, **chosen: Unpack[Filter]) -> Iterator[SampleSummary]:
        return heapq.merge(*(shard.each_summary(**chosen) for shard in self._shards), key=attrgetter("id"))

    def begun_groups(self, **chosen: Unpack[Filter]) -> list[tuple[int, Group]]:
        groups = chain(*self._group.each("survey.begun_groups", **chosen))
        return sorted(groups, key=lambda begun: begun[0])

    def counts(self) -> Counts:
        """Those of all shards together."""
        parts = [counts.to_json() for counts in self._group.each("survey.counts")]
        total: dict[str, Any] = {}
        for name, value in parts[0].items():
            values = [part[name] for part in parts]
            total[name] = (
                dict(sum(map(Counter, values), Counter())) if isinstance(value, dict) else sum(values)
            )
        return Counts(**total)

    def scales(self) -> list[Scale]:
        scales: dict[str, Scale] = {}
        for scale in chain(*self._group.each("survey.scales")):
            other = scales.get(scale.source, scale)
            low, high = min(scale.lowest, other.lowest), max(scale.highest, other.highest)
            scales[scale.source] = Scale(scale.source, low, high)
        return [scales[source] for source in sorted(scales, key=text_key)]

    def meetings(self, **chosen: Unpack[Filter]) -> list[tuple[list[str], int, str]]:
        met: dict[tuple[str, ...], tuple[int, str]] = {}
        for names, count, prompt_id in chain(*self._group.each("survey.meetings", **chosen)):
            total, first = met.get(tuple(names), (0, prompt_id))
            met[tuple(names)] = total + count, min(first, prompt_id, key=text_key)
        return [(list(names), *rest) for names, rest in met.items()]


class ShardedPart(RemotePart):
    """A part of all shards. What it doesn't say otherwise, the first one does alone."""

    def __init__(self, name: str, group: ShardGroup) -> None:
        super().__init__(name, group.first)
        self._group = group


class ShardedRequests(ShardedPart):
    """Requests are at the first shard. The others know which are claimed, and at which step one was taken:
    what waits to be fresh isn't drawn as stored."""

    def claim(self, run: str, collector: str, **options: Any) -> list[int]:
        numbers: list[int] = self._group.first.call("requests.claim", run, collector, **options)
        if numbers:
            others = dict.fromkeys(range(1, len(self._group.shards)), (run, collector, numbers))
            self._group.some("requests.note", others)
        return numbers

    def take(self, run: str, step: int, numbers: Collection[int]) -> None:
        self._group.then_first("requests.take", run, step, list(numbers))

    def reopen(self, run: str, numbers: Collection[int]) -> None:
        """The first shard begins: a part that is missing is found too stale again."""
        self._group.first.call("requests.reopen", run, list(numbers))
        self._group.then_first("requests.reopen", run, list(numbers))


class ShardedLedger(ShardedPart):
    """Each shard has the commits of runs, those at the first count. Cached log-probs are there alone."""

    def commit(self, run: str, step: int, digest: str, *, files: Mapping[str, str] | None = None) -> None:
        cursor = max(self._group.each("experience.last_id"))
        self._group.then_first("ledger.commit", run, step, digest, files=files, cursor=cursor)

    def rewind(self, run: str, step: int | None = None, *, to: Commit | None = None) -> Rewind:
        done = self._group.first.call("ledger.rewind", run, step, to=to)
        target = self._group.first.call("ledger.committed", run)
        others = dict.fromkeys(range(1, len(self._group.shards)), (run, step, target))
        rewinds = [done, *self._group.some("ledger.follow", others).values()]
        return Rewind(sum(r.draws for r in rewinds), sum(r.samples for r in rewinds))

    def knows(self, run: str) -> bool:
        return any(self._group.each("ledger.knows", run))

    def fingerprint(self) -> str:
        """Those of the shards, one after the other."""
        return " ".join(self._group.each("ledger.fingerprint"))


class ShardedClusters(ShardedPart):
    """The clusters of runs, by which each shard draws for them."""

    def keep(self, run: str, clusters: Clusters) -> None:
        self._group.then_first("clusters.keep", run, clusters)


class ShardedImports(ShardedPart):
    """What was imported into the shards."""

    def provenance(self, run: str | None = None) -> list[Provenance]:
        found: dict[tuple[str, str], Provenance] = {}
        for part in chain(*self._group.each("imports.provenance", run)):
            key = part.source, part.sha256
            samples = part.samples + (found[key].samples if key in found else 0)
            found[key] = Provenance(part.source, samples, part.file, part.sha256, part.license)
        return sorted(found.values(), key=lambda part: text_key(part.source))


class ShardedTables(ShardedPart):
    """Whether all shards are as they were written."""

    def check(self) -> None:
        self._group.each("tables.check")

    def damage(self) -> Damage:
        """Of all shards; rowids of tables other than samples are those of their shard."""
        found = [vars(damage) for damage in self._group.each("tables.damage")]
        return Damage(**{part: list(chain(*(damage[part] for damage in found))) for part in found[0]})

    def damaged(self, table: str) -> list[int]:
        return sorted(chain(*self._group.each("tables.damaged", table)))


KINDS = {
    "requests": ShardedRequests,
    "ledger": ShardedLedger,
    "clusters": ShardedClusters,
    "imports": ShardedImports,
    "tables": ShardedTables,
    "leases": ShardedPart,
    "shard": ShardedPart,
}


def parts_of_shards(location: Shards, *, read_only: bool, create: bool, timeout: float | None) -> Parts:
    """Raises `Refused` as `Store.open` does, and for a store that isn't this one of them."""
    shards: list[Shard] = []
    try:
        for each in location.locations:
            shards.append(Shard(each, read_only=read_only, create=create, timeout=timeout))
        _join(shards, read_only=read_only)
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    group = ShardGroup(shards, str(location))
    survey: Any = ShardedSurvey(group)
    parts: dict[str, Any] = {name: kind(name, group) for name, kind in KINDS.items()}
    parts["split"] = Split(survey, parts["clusters"])
    parts["draws"] = ShardedDraws(group, parts["split"])
    experience: Any = ShardedExperience(group)
    return Parts(location=location, close=group.close, experience=experience, survey=survey, **parts)


def _join(shards: Sequence[Shard], *, read_only: bool) -> None:
    """Raise `Refused` unless each is, or becomes, the one of its number."""
    for number, shard in enumerate(shards):
        is_joined = shard.call("shard.fits", number, len(shards))
        if not is_joined and not read_only:
            shard.call("shard.join", number, len(shards))
