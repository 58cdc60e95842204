"""The shards of a store: each is asked by a thread of its own, all of them at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from agro.errors import Refused
from agro.store.draw_rules import noise
from agro.store.location import url_of
from agro.store.parts import parts_of_file
from agro.store.serving.remote import RemoteExperience, RemoteSurvey, parts_of_owner

T = TypeVar("T")
REMEMBERED = 100_000  # samples of which a process knows the shard
MISSING = 3  # ids that a message names


def shard_of(prompt_id: str, count: int) -> int:
    """Which of `count` shards has the samples of a prompt."""
    return noise(0, 0, "shard", prompt_id) % count


class Shard:
    """One of the shards, and the thread that it belongs to."""

    def __init__(self, location: Path | str, *, read_only: bool, create: bool, timeout: float | None) -> None:
        """Raises `Refused` as `Store.open` does."""
        self.url = str(location)
        self._thread = ThreadPoolExecutor(1, "shard")  # connections belong to one thread
        try:
            opened = partial(parts_of_file, Path(location), create=create)
            if url_of(location) is not None:
                opened = partial(parts_of_owner, str(location))
            self._parts = self._thread.submit(opened, read_only=read_only, timeout=timeout).result()
        except BaseException:
            self._thread.shutdown()
            raise
        self.experience, self.survey = RemoteExperience("experience", self), RemoteSurvey("survey", self)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        part, name = method.split(".")
        return self._thread.submit(getattr(getattr(self._parts, part), name), *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.submit(method, *args, **kwargs).result()

    def close(self) -> None:
        self._thread.submit(self._parts.close).result()
        self._thread.shutdown()


class ShardGroup:
    """All shards of a store, in order. Nothing is written while a call before it is still at work."""

    def __init__(self, shards: Sequence[Shard], name: str) -> None:
        """`name`: of the store, in messages."""
        self.shards, self.name = shards, name
        self.first = shards[0]  # it has what isn't of a prompt: claims, commits, leases, plans, the last id
        self._shard_of_ids: dict[int, int] = {}

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def each(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What each shard returns to the same call. Raises the first one's error where several have one."""
        return list(self.some(method, dict.fromkeys(range(len(self.shards)), args), **kwargs).values())

    def some(self, method: str, args: Mapping[int, Sequence[Any]], **kwargs: Any) -> dict[int, Any]:
        """What some shards return, each to arguments of its own."""
        calls = {
            number: self.shards[number].submit(method, *own, **kwargs) for number, own in sorted(args.items())
        }
        wait(calls.values())
        return {number: call.result() for number, call in calls.items()}

    def then_first(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Have the others do it, and then the first one, whose answer counts."""
        self.some(method, dict.fromkeys(range(1, len(self.shards)), args), **kwargs)
        return self.first.call(method, *args, **kwargs)

    def of(self, prompt_id: str) -> int:
        return shard_of(prompt_id, len(self.shards))

    def by_prompt(self, items: Iterable[T], prompt_id: Callable[[T], str]) -> dict[int, list[T]]:
        """Items by the shard of their prompt."""
        parts: dict[int, list[T]] = defaultdict(list)
        for item in items:
            parts[self.of(prompt_id(item))].append(item)
        return parts

    def by_id(self, ids: Iterable[int]) -> dict[int, list[int]]:
        """Ids of samples by shard; those that aren't there are left out."""
        ids = list(ids)
        unknown = [i for i in ids if i not in self._shard_of_ids]
        if unknown:
            for number, known in enumerate(self.each("experience.known_ids", unknown)):
                self.remember(number, known)
        parts: dict[int, list[int]] = defaultdict(list)
        for i in ids:
            with suppress(KeyError):
                parts[self._shard_of_ids[i]].append(i)
        return parts

    def by_known_id(self, ids: Iterable[int]) -> dict[int, list[int]]:
        """The same. Raises `Refused` for ids that aren't there."""
        ids = list(ids)
        parts = self.by_id(ids)
        known = set(chain(*parts.values()))
        missing = [str(i) for i in ids if i not in known]
        if missing:
            raise Refused(f"{self.name}: no sample has the id {', '.join(missing[:MISSING])}")
        return parts

    def remember(self, number: int, ids: Iterable[int]) -> None:
        """Know that a shard has these samples."""
        if len(self._shard_of_ids) > REMEMBERED:
            self._shard_of_ids.clear()
        self._shard_of_ids |= dict.fromkeys(ids, number)
