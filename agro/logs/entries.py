"""Adding what was read of files to the store: once, however often it is imported or repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from agro.errors import Refused
from agro.logs.import_report import ImportReport, Reading, Refusal, difference
from agro.logs.protocol import Format, Judgment, Row
from agro.store.imports import ImportedFile, Place, forgotten
from agro.store.records import OtherPrompt, Pair
from agro.store.sample_rows import Origin, SampleRow
from agro.store.store import Store


@dataclass
class Repeat:
    """What tells a response that other records may repeat, and the rule by which they do."""

    key: str
    rule: str
    once: bool  # whether records of one file with the same key are the same response
    number: int = 0  # of those in the file so far, where they aren't

    @property
    def identity(self) -> str:
        return self.key if self.once else _hash(f"{self.key} {self.number}")


class Entry(NamedTuple):
    """Samples of one record, and which of them are better than which."""

    location: str  # FILE:LINE
    record: Place  # the file, by its hash, and the number of the record in it
    samples: tuple[SampleRow, ...]
    scored: int  # samples with a reward
    judgments: tuple[Judgment, ...] = ()
    same: Repeat | None = None

    @property
    def origins(self) -> list[Origin]:
        return [sample.origin for sample in self.samples if sample.origin is not None]


def repeat_of(format: Format, row: Row) -> Repeat | None:
    """What tells the response of a record; see `Format.identity`."""
    if format.identity is None:
        return None
    key = _hash(f"{format.name} {format.identity(row)}")
    return Repeat(key, format.repeats or format.title, format.once)


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class EntryWriter:
    """Adds entries to the store, and reports what is new.

    `options`: the options that files are read with. `license`: of the files; None keeps what is known.
    """

    def __init__(self, store: Store, report: ImportReport, options: Reading, license: str | None) -> None:
        self._store, self._report, self._options, self._license = store, report, options, license
        self._last = store.experience.last_id()

    def check(self, path: Path, digest: str, *, replacing: bool) -> None:
        """Raise `Refused` for a file that was read with other options, and for one that can't be replaced."""
        prior = self._store.imports.imported(digest)
        if prior is None:
            earlier = self._store.imports.samples_of_others(path.name, digest)
            self._report.before |= {path.name: earlier} if earlier else {}
        ids, deleted = self._store.imports.file_samples(digest) if replacing else ([], 0)
        if deleted or (prior is not None and not prior.name):
            raise Refused(
                f"{path}: {deleted or 'all'} of its samples were deleted by agro forget, and this import "
                "might bring them back; remove them from the file, or import it into another store"
            )
        differs = difference(prior.options, self._options) if prior is not None else ""
        if differs and not replacing:
            raise Refused(
                f"{path}: imported before with other options: {differs}. What to do: give the same options, "
                "or --replace, which takes its records anew in place of what is stored of them"
            )
        runs = self._store.draws.trained(ids)
        if runs:
            raise Refused(
                f"{path}: --replace would change what runs trained on: {'; '.join(map(str, runs))}. What to "
                "do: import it into another store"
            )

    def begin(self, path: Path, digest: str, *, replacing: bool) -> None:
        """Begin with the records of a file."""
        self._path, self._digest = path, digest
        self._counts = self._store.imports.count_keys()
        if replacing:
            self._report.replaced += self._store.imports.take_back(digest)

    def write(self, entries: Sequence[Entry], numbers: tuple[int, int]) -> list[tuple[int, Refusal]]:
        """Add the entries of records `numbers` (first and last) that aren't in the store yet.

        Returns those that are refused, with their number: their prompt isn't that of their group.
        """
        refused = []
        repeats = list({id(entry.same): entry.same for entry in entries if entry.same}.values())
        if repeats:
            for repeat, number in zip(repeats, self._counts.add([r.key for r in repeats]), strict=True):
                repeat.number = number
        with self._store.transaction():
            new = self._new(entries, self._store.imports.origins(self._digest, *numbers))
            pairs = list[Pair]()
            prompt_ids = {sample.prompt_id for entry in new for sample in entry.samples}
            append = self._store.experience.begin_append(prompt_ids)
            identities = self._store.imports.identities({entry.same.identity for entry in new if entry.same})
            added: dict[str, Place] = {}
            for entry in new:
                same = entry.same
                if same and (identities | added).get(same.identity, entry.record) != entry.record:
                    self._count(self._report.repeated, same.rule, entry)
                    continue
                try:
                    pairs += self._pairs(entry, append.add(entry.samples))
                except OtherPrompt as error:
                    refused.append((entry.record[1], Refusal(entry.location, str(error))))
                    continue
                self._report.samples += len(entry.samples)
                self._report.scored += entry.scored
                if same:
                    added[same.identity] = entry.record
            append.write()
            if pairs:
                self._store.add_pairs(pairs)
            self._store.imports.note_identities(added)
            self._note(is_new=bool(new))
        return refused

    def finish(self, digests: Sequence[str]) -> None:
        """Count the groups of what was added of these files, and the responses that equal an earlier one of
        their group."""
        self._report.groups, self._report.repeats = self._store.imports.repeats(digests, self._last)

    def _new(self, entries: Sequence[Entry], stored: set[Origin]) -> Sequence[Entry]:
        if not stored:
            return entries
        new = []
        for entry in entries:
            if entry.origins[0] in stored:
                self._report.duplicates += len(entry.samples)
            elif not stored.isdisjoint(map(forgotten, entry.origins)):
                self._report.forgotten += len(entry.samples)
            else:
                new.append(entry)
        return new

    def _pairs(self, entry: Entry, ids: Sequence[int]) -> list[Pair]:
        """The judgments of an entry, whose samples have these ids."""
        pairs = []
        for judgment in entry.judgments:
            pair = Pair(ids[judgment.winner], ids[judgment.loser], *judgment.votes)
            pairs.append(pair)
            self._report.ties += pair.is_tie
            self._report.pairs += not pair.is_tie
        return pairs

    def _note(self, *, is_new: bool) -> None:
        """Remember the file, once anything of it was read."""
        prior = self._store.imports.imported(self._digest)
        license = self._license or (prior.license if prior else None)
        file = ImportedFile(self._digest, self._path.name, self._options, license)
        if prior is None and not is_new:
            return
        if prior is not None:
            file = file._replace(name=prior.name)
        if file != prior:
            self._store.imports.note_import(file)

    @staticmethod
    def _count(counts: dict[str, int], name: str, entry: Entry) -> None:
        counts[name] = counts.get(name, 0) + len(entry.samples)
