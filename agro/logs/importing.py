"""Import logged responses into the store, whatever their columns are called, and report what isn't imported.

`--center-by FIELD` centers rewards among the records that share a value of a field.

A log with one response per prompt has nothing to compare a response with. If rewards are comparable within a
user, task or grader, a response is compared with the other responses of that user, task or grader. This is no
baseline per prompt: prompts that are easier than the others of their value keep higher rewards.

A reward becomes reward − λ (m − m̄), with m the mean of the value's *other* records and m̄ that of all records.
The shift doesn't depend on the record's own reward, so that its noise doesn't count twice. λ = n τ² / (n τ² +
σ²) for n other records, with σ² the variance of rewards within values and τ² between them (Searle, Casella
and McCulloch, Variance Components, 1992): rewards of a value with few records hardly move, and none moves if
values don't differ. Rewards stay on their scale.

`meta["normalizer"]` of each sample records the normalizer: the `field` and its `value`, the `shift`, and the
original `reward`. `agro import FILE --replace` without the option restores it.
"""

from __future__ import annotations

import gc
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from multiprocessing import current_process
from pathlib import Path
from typing import Any, Unpack

from agro.errors import Refused
from agro.io import plugins
from agro.io.files import digest_of_module
from agro.io.json_values import problem_of
from agro.io.record_files import Block, encoding_of, fingerprint, is_table, on_hub, read_records, record_block
from agro.io.strictjson import dumps
from agro.logs.format_table import Recognizer, blocks_of, format_at, joined, lines_of
from agro.logs.mapping import MAPPABLE, check_expressions, check_map
from agro.logs.reading import Counts, Entry, LogFile, Options, Reader, Refusal, read_in_order
from agro.logs.values import scale_of
from agro.rollout.prompts import load_prompts
from agro.store.ledger import ImportedFile, KeyCounts, Place, forgotten
from agro.store.samples import AppendTransaction, OtherPrompt, Pair
from agro.store.store import Store
from agro.types import Prompt, Sample

SHOWN = 10  # refusals that a printed report spells out
LISTED = 1000  # refusals kept in memory; if there are more, all are written to a file
SHORT = 12  # characters of a hash that people read
LOOKED_AT = 100  # records that are searched for a column of rewards
CHUNK = 500  # samples whose rewards are set at once
NOT_UTF8 = {"cp1252": "Windows-1252", "utf-16": "UTF-16"}  # other encodings of tables


@dataclass
class ImportReport(Counts):
    """The report of an import. samples, groups, scored, pairs and ties count what is new in the store."""

    samples: int = 0
    groups: int = 0
    scored: int = 0
    pairs: int = 0
    ties: int = 0  # judgments with equal votes, which have no winner
    duplicates: int = 0  # samples that an earlier import of the same file stored
    repeats: int = 0  # new samples whose response equals another one of their group; they are stored too
    repeated: Counter[str] = field(default_factory=Counter)  # repeated samples, by their format's rule
    replaced: int = 0  # samples of an earlier import that this one erased
    before: dict[str, int] = field(default_factory=dict)  # samples of other files, by equal file name
    forgotten: int = 0  # samples that `agro forget` deleted
    absent: str = ""  # fields of --map that no record has
    wordless: bool = False  # whether no reward was a word of --reward-map
    recognized: str = ""
    lower_is_better: bool = False
    encodings: dict[str, str] = field(default_factory=dict)  # of tables that aren't UTF-8, by file name
    unused: list[str] = field(default_factory=list)  # columns of numbers, if no sample has a reward
    normalized: str = ""  # what --center-by did
    refused: list[Refusal] = field(default_factory=list)  # the first `LISTED` refusals
    refused_count: int = 0
    refused_file: str = ""  # lists all refusals as JSON Lines, if there are more than `LISTED`

    def refuse(self, refusal: Refusal) -> None:
        self.refused_count += 1
        if self.refused_count <= LISTED:
            self.refused.append(refusal)
            return
        is_first = self.refused_count == LISTED + 1
        with Path(self.refused_file).open("w" if is_first else "a") as file:
            for each in [*self.refused, refusal] if is_first else [refusal]:
                file.write(dumps(each._asdict(), "refusal", ascii=True) + "\n")

    def to_json(self) -> dict[str, Any]:
        values = vars(self) | {"refused": [refusal._asdict() for refusal in self.refused]}
        values["columns_left"] = list(self.columns_left)
        del values["kinds"], values["with_value"]
        if self.refused_count <= LISTED:
            del values["refused_file"]
        return values

    def __str__(self) -> str:
        samples = f"{self.samples} samples ({self.scored} with a reward)"
        lines = [
            f"recognized: {self.recognized}",
            f"taken: {samples} in {self.groups} groups, {self.pairs} pairs",
        ]
        for name, line in LINES.items():
            value = getattr(self, name)
            if isinstance(value, dict):
                lines += [line.format(*item) for item in value.items()]
            elif value:
                lines.append(line.format(value))
        if self.unused:
            lines.append(
                f"no reward: columns of numbers that aren't used: {', '.join(self.unused)}; use one with "
                f"--map reward={self.unused[0]}, or without --map with --reward {self.unused[0]}"
            )
        if self.unknown_ends:
            ends = [f"{word} ({count})" for word, count in self.unknown_ends.items()]
            more = f" and {len(ends) - SHOWN} others" if len(ends) > SHOWN else ""
            lines.append(
                f"end unknown: {self.unknown_ends.total()} samples report an end that agro doesn't know: "
                f"{', '.join(ends[:SHOWN])}{more}; if it means that they were cut, write length instead"
            )
        if self.columns_left:
            lines.append(f"columns without --map, dropped: {', '.join(self.columns_left)}")
        if self.refused:
            lines.append(f"refused: {self.refused_count}")
            lines += [f"  {refusal.where}: {refusal.reason}" for refusal in self.refused[:SHOWN]]
        if self.refused_count > SHOWN:
            hint = f"all are in {self.refused_file}" if self.refused_count > LISTED else "--json lists all"
            lines.append(f"  … and {self.refused_count - SHOWN} more ({hint})")
        return "\n".join(lines)


LINES = {  # lines of a printed report, by field of `ImportReport`; a dict has one line per item
    "lower_is_better": "lower is better: rewards are stored negated, pairs with winner and loser swapped",
    "encodings": "{}: isn't UTF-8; read as {}",
    "ties": "ties: {} judgments with equal votes; they are pairs only for an objective that uses votes",
    "duplicates": "not taken again: {} samples of an earlier import of the same file",
    "repeats": "repeats: {} of the new samples equal another one of their group; all are kept",
    "normalized": "{}",
    "cut": "cut: {} samples; no end is learned behind them",
    "unseen": "{} of {} samples: no model reads it, unless a chat template shows it",
    "repeated": "repeats of {}: {} not taken again",
    "replaced": "replaced: {} samples of an earlier import of the same file",
    "before": "{}: another file of this name was imported before ({} samples). If this is a newer version "
    "of it, the records in both are stored twice: import it into a new store instead",
    "forgotten": "not taken again: {} samples that were deleted by agro forget",
    "dropped": "dropped {}: in {} records",
    "redacted": "redacted {}: {} times",
    "tokens_dropped": "tokens dropped from {} samples, whose text was changed",
    "left_out": "left out: {1} records: {0}",
    "without_value": "--map {}: {} records have no value there: unknown",
    "absent": "--map {}: no record has a value there; correct it with --replace",
    "wordless": "--reward-map: no reward was one of its words",
}


def import_files(store: Store, paths: Sequence[str | Path], **options: Unpack[Options]) -> ImportReport:
    """Import the records of files (JSON Lines, Parquet, or any format of `agro formats`) into the store.

    A response is identified by the content of its file, its record and its column, so that a second import
    adds nothing. The report lists the records that are refused; the others are imported. Raises `Refused`,
    and imports nothing, if a file can't be read or was imported with other options before, or if all records
    are refused.

    Each process of `workers` runs the calling script again, except for what stands under
    `if __name__ == "__main__":`, where this call therefore has to be.
    """
    mapping, limit, workers = options.get("mapping") or {}, options.get("limit"), options.get("workers", 1)
    join, prompts_file, prompts = options.get("join"), options.get("prompts"), dict[str, Prompt]()
    _check(options)
    if prompts_file is not None:
        loaded = load_prompts(prompts_file)
        # By `prompt_id`, and by a differing `id` among the columns.
        prompts = {str(p.columns["id"]): p for p in loaded if p.columns.get("id") is not None}
        prompts |= {p.id: p for p in loaded}
    reader = Reader(options, prompts, joined(Path(join)) if join is not None else {})
    files = [(Path(path), fingerprint(path)) for path in paths]
    report = ImportReport(refused_file=options.get("refused_file", f"{store.path}.refused.jsonl"))
    report.lower_is_better = options.get("lower_is_better", False)
    for path, _ in files:
        if is_table(path) and (name := NOT_UTF8.get(encoding_of(path))):
            report.encodings[path.name] = name
    writer = EntryWriter(store, report, options)
    for path, digest in files:
        writer.check(path, digest)
    center_by = options.get("center_by")
    is_whole = options.get("strict") or options.get("replace") or center_by
    # This process reads alone if it holds joined records, or if a limit leaves few.
    readers = 0 if workers == 1 or join is not None or limit is not None else workers
    current = LogFile("", "", None)
    with (
        _uncollected(),
        store.transaction() if is_whole else nullcontext(),
        closing(read_in_order(reader, _blocks(files, options), options, prompts, readers)) as results,
    ):
        for file, block, result in results:
            if file is not current:
                writer.begin(Path(file.path), file.digest)
                current = file
            refused = result.refused + writer.write(result.entries, block.numbers)
            for _, refusal in sorted(refused, key=lambda each: each[0]):
                report.refuse(refusal)
            report.count(result)
            del block, result
            gc.collect(0)
        digests = [digest for _, digest in files]
        report.groups, report.repeats = store.imports.repeats(digests, writer.last)
        report.absent = ", ".join(name for name in report.without_value if not report.with_value[name])
        report.wordless = bool(options.get("reward_map")) and not report.with_value["--reward-map"]
        report.recognized = " and ".join(f"{kind} records" for kind in sorted(report.kinds))
        report.recognized += ", mapped" if mapping else ""
        if report.samples and not (report.scored or report.pairs):
            report.unused = [name for name in _ratings(Path(paths[0])) if name not in mapping.values()]
        _check_taken(report, paths, strict=options.get("strict", False))
        if center_by and limit is None:
            report.normalized = center_rewards(store, center_by, digests)
    return report


def _check(options: Options) -> None:
    limit, workers = options.get("limit"), options.get("workers", 1)
    mapping = options.get("mapping") or {}
    if limit is not None and limit < 1:
        raise Refused(f"limit: expected 1 or more rows, got {limit}")
    if workers < 1:
        raise Refused(f"workers: expected 1 or more processes, got {workers}")
    if workers > 1 and getattr(current_process(), "_inheriting", False):  # as multiprocessing itself tells
        raise Refused(
            "workers: a reader process of this import ran the script again, and came to the import. What to "
            'do: put what the script does under `if __name__ == "__main__":`, or import with workers = 1'
        )
    if "reward" in mapping and options.get("rewards"):
        raise Refused("--map reward=… and --reward: both say what the reward is; give one of them")
    check_map(mapping)


def _blocks(files: Sequence[tuple[Path, str]], options: Options) -> Iterator[tuple[LogFile, Block]]:
    recognizer = Recognizer(options.get("format"), mapped=bool(options.get("mapping")))
    limit, mapping = options.get("limit"), options.get("mapping") or {}
    for path, digest in files:
        format = recognizer.recognize_file(path)
        if any(map(problem_of, mapping.values())):  # but a column may have that name
            names = {name for line in islice(lines_of(path, format), LOOKED_AT) for name in line.value}
            check_expressions(mapping, "--map ", names)
        file, remaining = LogFile(str(path), digest, None if format is None else format.name), limit
        for block in blocks_of(path, format):
            if remaining is None:
                yield file, block
                continue
            records = list(islice(block.lines(), remaining))
            remaining -= len(records)
            if records:
                yield file, record_block(records)
            if not remaining:
                break


def _ratings(path: Path) -> list[str]:
    """The unused columns of a file's first records that hold numbers, flags or ratings."""
    if on_hub(path) or format_at(path) is not None:
        return []
    names: dict[str, None] = {}
    for line in islice(read_records(path), LOOKED_AT):
        for name, value in line.value.items():
            if (name == "reward" or name not in MAPPABLE) and scale_of(value) is not None:
                names[name] = None
    return list(names)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable Python's garbage collection: its search for cycles among thousands of records, which have none,
    takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_taken(report: ImportReport, paths: Sequence[str | Path], *, strict: bool) -> None:
    """Raise `Refused` if no record was imported, and with `strict` if any is refused."""
    examples = [f"  {refusal.where}: {refusal.reason}" for refusal in report.refused[:SHOWN]]
    if strict and report.refused:
        several = "\n".join(examples)
        raise Refused(
            f"--strict: expected all records to be taken, got {report.refused_count} refused, such as\n"
            f"{several}\n"
            "Nothing is stored. What to do: correct them, or import without --strict, which leaves them out"
        )
    if report.samples or report.duplicates or report.repeated or report.forgotten:
        return
    problem = "empty: expected records, got none"
    if report.refused:
        several = "\n".join(examples[:3])
        problem = f"all records are refused ({report.refused_count}), such as\n{several}"
    elif report.left_out:
        rules = "\n".join(f"  {count} records: {rule}" for rule, count in report.left_out.items())
        problem = f"all records are left out\n{rules}"
    raise Refused(f"{', '.join(map(str, paths)) or '(no files)'}: {problem}")


class EntryWriter:
    """Writes entries to the store, and reports what is new."""

    def __init__(self, store: Store, report: ImportReport, options: Options) -> None:
        self._store, self._report = store, report
        self._options, self._license = reading(options), options.get("license")
        self._is_replacing = options.get("replace", False)
        self.last = store.tables.last_id()  # before this import

    def check(self, path: Path, digest: str) -> None:
        """Raise `Refused` for a file that was imported with other options, or that can't be replaced."""
        prior = self._store.imports.imported(digest)
        if prior is None:
            earlier = self._store.imports.samples_of_others(path.name, digest)
            self._report.before |= {path.name: earlier} if earlier else {}
        ids, deleted = self._store.imports.file_samples(digest) if self._is_replacing else ([], 0)
        if deleted or (prior is not None and not prior.name):
            raise Refused(
                f"{path}: {deleted or 'all'} of its samples were deleted by agro forget, and this import "
                "might bring them back; remove them from the file, or import it into another store"
            )
        differs = differing(prior.options, self._options) if prior is not None else []
        if prior is not None and differs and not self._is_replacing:
            previous = {name: value for name, value in prior.options.items() if f"--{name}" in differs}
            raise Refused(
                f"{path}: imported before with other options ({', '.join(differs)}). They were "
                f"{previous or 'none'}. What to do: give the same, or --replace, which imports its records "
                "again and replaces what is stored of them"
            )
        runs = self._store.draws.trained(ids)
        if runs:
            raise Refused(
                f"{path}: --replace would change what runs trained on: {'; '.join(map(str, runs))}. What to "
                "do: import it into another store"
            )

    def begin(self, path: Path, digest: str) -> None:
        self._path, self._digest = path, digest
        self._counts = KeyCounts(self._store.tables)
        if self._is_replacing:
            self._report.replaced += self._store.imports.take_back(digest)

    def write(self, entries: Sequence[Entry], numbers: tuple[int, int]) -> list[tuple[int, Refusal]]:
        """Add the entries of records `numbers` (first and last) that aren't in the store yet.

        Returns refusals with their records' numbers, for entries whose prompt isn't that of their group.
        """
        store, report, refused, pairs = self._store, self._report, [], list[Pair]()
        repeats = list({id(entry.same): entry.same for entry in entries if entry.same}.values())
        numbered = self._counts.add([repeat.key for repeat in repeats]) if repeats else ()
        for repeat, number in zip(repeats, numbered, strict=True):
            repeat.number = number
        with store.transaction():
            stored, new = store.imports.origins(self._digest, *numbers), list[Entry]()
            for entry in entries:
                if stored and entry.origins[0] in stored:
                    report.duplicates += len(entry.samples)
                elif stored and not stored.isdisjoint(map(forgotten, entry.origins)):
                    report.forgotten += len(entry.samples)
                else:
                    new.append(entry)
            append = AppendTransaction(store.tables, {s.prompt_id for entry in new for s in entry.samples})
            identities = store.imports.identities({entry.same.identity for entry in new if entry.same})
            added: dict[str, Place] = {}
            for entry in new:
                same = entry.same
                if same and (identities | added).get(same.identity, entry.record) != entry.record:
                    report.repeated[same.rule] += len(entry.samples)
                    continue
                try:
                    ids = append.add(entry.samples)
                except OtherPrompt as error:
                    refused.append((entry.record[1], Refusal(entry.location, str(error))))
                    continue
                judged = [Pair(ids[j.winner], ids[j.loser], *j.votes) for j in entry.judgments]
                ties = sum(pair.is_tie for pair in judged)
                report.ties += ties
                report.pairs += len(judged) - ties
                pairs += judged
                report.samples += len(entry.samples)
                report.scored += entry.scored
                if same:
                    added[same.identity] = entry.record
            append.write()
            if pairs:
                store.add_pairs(pairs)
            store.imports.note_identities(added)
            prior = store.imports.imported(self._digest)
            name, license = (self._path.name, None) if prior is None else (prior.name, prior.license)
            file = ImportedFile(self._digest, name, self._options, self._license or license)
            if file != prior and (new or prior is not None):  # once any record was imported
                store.imports.note_import(file)
        return refused


def reading(options: Options) -> dict[str, Any]:
    """The options that decide what is made of a record, by their command-line names, without unset ones.

    Files are identified by their content; patterns by a hash, since they may contain what must not be stored.
    """
    tokenizer, format = options.get("tokenizer"), options.get("format")
    if format is not None and (format.endswith(".toml") or plugins.is_reference(format)):
        # A user's format is identified by its content too.
        content = fingerprint(format) if format.endswith(".toml") else digest_of_module(format) or ""
        format = f"{Path(format).name} {content[:SHORT]}".strip()
    values: dict[str, Any] = {
        "map": dict(options.get("mapping") or {}),
        "format": format,
        "reward": dict(options.get("rewards") or {}),
        "reward-map": dict(options.get("reward_map") or {}),
        "lower-is-better": options.get("lower_is_better"),
        "choose": dict(options.get("choose") or {}),
        "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
        "drop": sorted(options.get("drop") or ()),
        "redact": options.get("redact"),
        "center-by": options.get("center_by"),
        "redact-pattern": sorted(
            blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:SHORT]
            for text in options.get("redact_patterns") or ()
        ),
    }
    for name, path in (("prompts", options.get("prompts")), ("join", options.get("join"))):
        values[name] = None if path is None else fingerprint(path)[:SHORT]
    return {name: value for name, value in values.items() if value}


def differing(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The command-line names of the options that differ."""
    names = dict.fromkeys((*previous, *current))
    return [f"--{name}" for name in names if previous.get(name) != current.get(name)]


@dataclass
class Statistics:
    """Running statistics of the rewards with one value of the field (Welford's algorithm)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared differences from the mean

    def add(self, reward: float) -> None:
        self.count += 1
        difference = reward - self.mean
        self.mean += difference / self.count
        self.squares += difference * (reward - self.mean)


@dataclass(frozen=True)
class Components:
    """Variance components of rewards: between the values of a field, and within them.

    `surprise`: by how many standard errors the variance of the values' means exceeds that of chance.
    """

    mean: float
    between: float
    within: float
    surprise: float

    @classmethod
    def of(cls, values: Iterable[Statistics]) -> Components:
        """Estimate by the method of moments for unbalanced data; a negative variance is 0.

        With one value, or without a value that has two rewards, `between` is 0.
        """
        every = list(values)
        n, groups = sum(v.count for v in every), len(every)
        mean = sum(v.count * v.mean for v in every) / n if n else 0.0
        if groups < 2 or n == groups:
            return cls(mean, 0.0, 0.0, 0.0)
        within = sum(v.squares for v in every) / (n - groups)
        among = sum(v.count * (v.mean - mean) ** 2 for v in every) / (groups - 1)
        typical = (n - sum(v.count**2 for v in every) / n) / (groups - 1)  # records per value
        error = within * math.sqrt(2 / (groups - 1) + 2 / (n - groups))
        surprise = (among - within) / error if error else math.inf * (among > within)
        return cls(mean, max(0.0, (among - within) / typical), within, surprise)

    @property
    def share(self) -> float:
        """The share of the variance that is between values."""
        total = self.between + self.within
        return self.between / total if total else 0.0

    def shift(self, value: Statistics, reward: float) -> float:
        """The amount to subtract from a reward, which is one of `value`."""
        peers = value.count - 1
        if not peers or not self.between:
            return 0.0
        mean = value.mean + (value.mean - reward) / peers
        return (mean - self.mean) * peers * self.between / (peers * self.between + self.within)


def center_rewards(store: Store, field: str, files: Sequence[str] | None = None) -> str:
    """Center the rewards of the samples that aren't centered yet, and return a summary.

    `files`: hashes of the imported files to center, by default the whole store. `field`: source, role, or a
    field of `meta`, dotted if it is nested. Raises `Refused` for a scored sample without the field. All
    rewards change, or none.
    """
    statistics: dict[str, Statistics] = {}
    for sample, key in _scored(store, files, field):
        assert sample.reward is not None
        statistics.setdefault(key, Statistics()).add(sample.reward)
    components, done = Components.of(statistics.values()), 0
    with store.transaction():
        samples = _scored(store, files, field)
        while part := list(islice(samples, CHUNK)):
            scores = []
            for sample, key in part:
                assert sample.id is not None
                assert sample.reward is not None
                shift = components.shift(statistics[key], sample.reward)
                normalizer = {"field": field, "value": json.loads(key), "shift": shift}
                entries: dict[str, Any] = {"normalizer": normalizer | {"reward": sample.reward}}
                if "reward_parts" in sample.meta:  # or setting the reward would drop them
                    entries["reward_parts"] = sample.meta["reward_parts"]
                scores.append((sample.id, sample.reward - shift, entries))
            store.set_rewards(scores)
            done += len(part)
    summary = f"{done} rewards by {len(statistics)} values of {field}"
    return f"centered: {summary}, between which {components.share:.0%} of their variance was"


def _scored(store: Store, files: Sequence[str] | None, field: str) -> Iterator[tuple[Sample, str]]:
    """The scored samples that aren't centered yet, each with its value of the field as JSON."""
    ids = None if files is None else [i for file in files for i in store.imports.file_samples(file)[0]]
    column = field.removeprefix("meta.")
    for sample in store.samples(ids=ids, scored=True):
        if "normalizer" in sample.meta:
            continue
        value: Any = sample.meta
        if field in ("source", "role"):
            value = getattr(sample, field)
        else:
            for name in column.split("."):
                value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            names = ", ".join(("source", "role", *sample.meta))
            raise Refused(
                f"--center-by {field}: sample {sample.id} (prompt {sample.prompt_id}) has a reward and no "
                f"such field; it has {names}. What to do: name one that all scored records have; beside "
                f"--map, map it too: --map meta.{column}=COLUMN"
            )
        yield sample, json.dumps(value, sort_keys=True)
