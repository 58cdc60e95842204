"""Logged responses into the store, whatever their columns are called; whatever is not taken is reported."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Unpack

from agro.errors import Refused
from agro.io.datasets import on_hub
from agro.io.record_files import Block, encoding_of, fingerprint, is_table, read_records, record_block
from agro.logs.format_table import Recognizer, blocks_of, format_at, joined
from agro.logs.import_report import SHOWN, ImportReport, Options, Reading, Refusal, difference, reading
from agro.logs.labels import scale_of
from agro.logs.mapping import MAPPABLE, OPTIONAL, check_map
from agro.logs.normalizing import center_rewards
from agro.logs.reading import Entry, LogFile, Reader, Readers
from agro.rollout.prompts import load_prompts
from agro.store.imports import ImportedFile, Place, forgotten
from agro.store.records import OtherPrompt, Pair
from agro.store.sample_rows import Origin
from agro.store.store import Store
from agro.types import Prompt

LOOKED_AT = 100  # records, for columns that might have been the reward
NOT_UTF8 = {"cp1252": "Windows-1252", "utf-16": "UTF-16"}  # encodings of tables


def import_files(store: Store, paths: Sequence[str | Path], **options: Unpack[Options]) -> ImportReport:
    """Take the records of files into the store, of JSON Lines, Parquet or whatever `agro.logs.formats` knows.

    A response is identified by the content of its file, its record and its column: a second import adds
    nothing. Records that are refused are in the report, the others are taken. Raises `Refused` where a file
    can't be read, or was read with other options before, and takes nothing then; and where all records are
    refused.
    """
    _check(options)
    prompts_file, join = options.get("prompts"), options.get("join")
    prompts: dict[str, Prompt] = {}  # by `prompt_id`, and by an `id` among the columns where that is another
    if prompts_file is not None:
        loaded = load_prompts(prompts_file)
        prompts = {str(p.columns["id"]): p for p in loaded if p.columns.get("id") is not None}
        prompts |= {p.id: p for p in loaded}
    reader = Reader(options, prompts, joined(Path(join)) if join is not None else {})
    report = ImportReport(refused_file=options.get("refused_file", f"{store.path}.refused.jsonl"))
    report.lower_is_better = options.get("lower_is_better", False)
    files = [(Path(path), fingerprint(path)) for path in paths]
    writer = EntryWriter(store, report, reading(options), options.get("license"))
    replacing, strict = options.get("replace", False), options.get("strict", False)
    for path, digest in files:
        writer.check(path, digest, replacing=replacing)
    encodings = {path.name: encoding_of(path) for path, _ in files if is_table(path)}
    report.encodings = {name: NOT_UTF8[code] for name, code in encodings.items() if code in NOT_UTF8}
    center_by, limit = options.get("center_by"), options.get("limit")
    may_refuse = options.get("reward_map") or not set(OPTIONAL).isdisjoint(options.get("mapping") or {})
    is_whole = strict or replacing or center_by or may_refuse  # see `_check_used`
    # Other processes read, but where it takes one that has seen all records before, or few.
    workers = options.get("workers", 1)
    others = 0 if workers == 1 or join is not None or limit is not None else workers
    kinds, parts, current = set[str](), 0, LogFile("", "", None)
    with (
        _uncollected(),
        store.transaction() if is_whole else nullcontext(),
        Readers(reader, options, prompts, others) as readers,
    ):
        for file, block, found in readers.read(_blocks(files, options)):
            if file is not current:
                writer.begin(Path(file.path), file.digest, replacing=replacing)
                current = file
            refused = found.refused + writer.write(found.entries, block.numbers)
            for _, refusal in sorted(refused, key=lambda each: each[0]):
                report.refuse(refusal)
            report.count(found)
            kinds |= found.kinds
            parts += found.parts
            del block, found
            gc.collect(0)
        writer.finish([digest for _, digest in files])
        report.recognized = " and ".join(f"{kind} records" for kind in sorted(kinds))
        report.recognized += ", mapped" if options.get("mapping") else ""
        report.unused = _unused(report, paths, options.get("mapping") or {})
        if limit is None:
            _check_used(options, report, parts, has_words=readers.has_words)
        _check_taken(report, paths, strict=strict)
        if center_by and limit is None:
            report.normalized = center_rewards(store, center_by, [digest for _, digest in files])
    return report


def _check(options: Options) -> None:
    limit, workers = options.get("limit"), options.get("workers", 1)
    if limit is not None and limit < 1:
        raise Refused(f"limit: expected 1 or more rows, got {limit}")
    if workers < 1:
        raise Refused(f"workers: expected 1 or more processes, got {workers}")
    mapping = options.get("mapping") or {}
    if "reward" in mapping and options.get("rewards"):
        raise Refused("--map reward=… and --reward: both say what the reward is; give one of them")
    check_map(mapping)


def _blocks(files: Sequence[tuple[Path, str]], options: Options) -> Iterator[tuple[LogFile, Block]]:
    recognizer = Recognizer(options.get("format"), mapped=bool(options.get("mapping")))
    limit = options.get("limit")
    for path, digest in files:
        format = format_at(path) or recognizer.recognize_file(path)
        file = LogFile(str(path), digest, None if format is None else format.name)
        blocks = blocks_of(path, format)
        for block in blocks if limit is None else _first(blocks, limit):
            yield file, block


def _first(blocks: Iterator[Block], limit: int) -> Iterator[Block]:
    """Blocks with the first `limit` records."""
    for block in blocks:
        records = list(islice(block.lines(), limit))
        limit -= len(records)
        if records:
            yield record_block(records)
        if not limit:
            return


def _unused(report: ImportReport, paths: Sequence[str | Path], mapping: Mapping[str, str]) -> list[str]:
    """Where no sample has a reward: the columns of the first records with numbers, true and false, or
    ratings, that aren't taken."""
    if not report.samples or report.scored or report.pairs:
        return []
    path = Path(paths[0])
    if on_hub(path) or format_at(path) is not None:
        return []
    names: dict[str, None] = {}
    for line in islice(read_records(path), LOOKED_AT):
        for name, value in line.value.items():
            if (name == "reward" or name not in MAPPABLE) and scale_of(value) is not None:
                names[name] = None
    return [name for name in names if name not in mapping.values()]


def _check_used(options: Options, report: ImportReport, parts: int, *, has_words: bool) -> None:
    """Raise `Refused` where no record has a mapped column, or a reward that is a word of --reward-map."""
    mapping, word_rewards = options.get("mapping") or {}, options.get("reward_map")
    for name, count in report.without_column.items():
        if count == parts:
            raise Refused(
                f"--map {name}={mapping[name]}: no record has this column; correct it, or leave {name} out"
            )
    if word_rewards and parts and not has_words:
        raise Refused(
            f"--reward-map: no record has a reward that is {' or '.join(word_rewards)}; name its column "
            "with --map reward=COLUMN, or leave --reward-map out"
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's own garbage collections: looking for cycles among thousands of records, which have
    none, takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_taken(report: ImportReport, paths: Sequence[str | Path], *, strict: bool) -> None:
    """Raise `Refused` where no record was taken, and with `strict` where any is refused."""
    examples = [f"  {refusal.where}: {refusal.reason}" for refusal in report.refused]
    if strict and report.refused:
        several = "\n".join(examples[:SHOWN])
        raise Refused(
            f"--strict: expected all records to be taken, got {report.refused_count} refused, such as\n"
            f"{several}\n"
            "Nothing is stored. What to do: mend them, or import without --strict, which leaves them out"
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
    """Adds entries to the store, and reports what is new.

    `options`: the options that files are read with. `license`: of the files; None keeps what is known.
    """

    def __init__(self, store: Store, report: ImportReport, options: Reading, license: str | None) -> None:
        self._store, self._report, self._options, self._license = store, report, options, license
        self._last = store.tables.last_id()

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
        numbered = self._counts.add([repeat.key for repeat in repeats]) if repeats else ()
        for repeat, number in zip(repeats, numbered, strict=True):
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
                    repeated = self._report.repeated
                    repeated[same.rule] = repeated.get(same.rule, 0) + len(entry.samples)
                    continue
                try:
                    ids = append.add(entry.samples)
                except OtherPrompt as error:
                    refused.append((entry.record[1], Refusal(entry.location, str(error))))
                    continue
                judged = [Pair(ids[j.winner], ids[j.loser], *j.votes) for j in entry.judgments]
                ties = sum(pair.is_tie for pair in judged)
                self._report.ties += ties
                self._report.pairs += len(judged) - ties
                pairs += judged
                self._report.samples += len(entry.samples)
                self._report.scored += entry.scored
                if same:
                    added[same.identity] = entry.record
            append.write()
            if pairs:
                self._store.add_pairs(pairs)
            self._store.imports.note_identities(added)
            prior = self._store.imports.imported(self._digest)
            name, license = (self._path.name, None) if prior is None else (prior.name, prior.license)
            file = ImportedFile(self._digest, name, self._options, self._license or license)
            if file != prior and (new or prior is not None):  # once anything of it was read
                self._store.imports.note_import(file)
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
