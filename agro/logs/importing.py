"""Logged responses into the store, whatever their columns are called; whatever is not taken is reported."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Unpack

from agro.errors import Refused
from agro.io.blocks import Block, RecordBlock
from agro.io.datasets import on_hub
from agro.io.record_files import encoding_of, fingerprint, is_table, read_records
from agro.logs.entries import EntryWriter
from agro.logs.format_table import Recognizer, blocks_of, format_at, joined
from agro.logs.import_report import SHOWN, ImportReport, Options, reading
from agro.logs.labels import scale_of
from agro.logs.mapping import MAPPABLE, OPTIONAL, check_map
from agro.logs.normalizing import normalize
from agro.logs.reading import Found, LogFile, Reader
from agro.logs.sharing import Readers
from agro.rollout.prompts import load_prompts
from agro.store.store import Store
from agro.types import Prompt

LOOKED_AT = 100  # records, for columns that might have been the reward


def import_files(store: Store, paths: Sequence[str | Path], **options: Unpack[Options]) -> ImportReport:
    """Take the records of files into the store, of JSON Lines, Parquet or whatever `agro.logs.formats` knows.

    A response is identified by the content of its file, its record and its column: a second import adds
    nothing. Records that are refused are in the report, the others are taken. Raises `Refused` where a file
    can't be read, or was read with other options before, and takes nothing then; and where all records are
    refused.
    """
    _check(options)
    prompts_file, join = options.get("prompts"), options.get("join")
    prompts = {} if prompts_file is None else _prompts_by_id(load_prompts(prompts_file))
    reader = Reader(options, prompts, joined(Path(join)) if join is not None else {})
    report = ImportReport(refused_file=options.get("refused_file", f"{store.path}.refused.jsonl"))
    report.lower_is_better = options.get("lower_is_better", False)
    files = [(Path(path), fingerprint(path)) for path in paths]
    writer = EntryWriter(store, report, reading(options), options.get("license"))
    replacing, strict = options.get("replace", False), options.get("strict", False)
    for path, digest in files:
        writer.check(path, digest, replacing=replacing)
    report.encodings = _encodings([path for path, _ in files])
    center_by, limit = options.get("center_by"), options.get("limit")
    relative_to = options.get("group_by") or center_by
    is_whole = strict or replacing or relative_to or _may_refuse(options)
    total, current = Found(), LogFile("", "", None)
    with (
        _uncollected(),
        store.transaction() if is_whole else nullcontext(),
        Readers(reader, options, prompts, _others(options)) as readers,
    ):
        for file, block, found in readers.read(_blocks(files, options)):
            if file is not current:
                writer.begin(Path(file.path), file.digest, replacing=replacing)
                current = file
            refused = found.refused + writer.write(found.entries, block.numbers)
            for _, refusal in sorted(refused, key=lambda each: each[0]):
                report.refuse(refusal)
            total.count(found)
            del block, found
            gc.collect(0)
        writer.finish([digest for _, digest in files])
        # Set what the records of all files were recognized as and counted by.
        mapped = bool(options.get("mapping"))
        kinds = " and ".join(f"{kind} records" for kind in sorted(total.kinds))
        report.recognized = kinds + (", mapped" if mapped else "")
        report.left_out, report.without_column = total.left_out, total.without_column
        report.columns_left = list(total.columns_left)
        report.dropped, report.redacted = total.dropped, total.redacted
        report.tokens_dropped = total.tokens_dropped
        report.cut, report.unknown_ends = total.cut, total.unknown_ends
        report.unused = _unused(report, paths, options.get("mapping") or {})
        if limit is None:
            _check_used(options, total, has_words=readers.has_words)
        if strict and report.refused:
            raise Refused(_strictly(report))
        if not (report.samples or report.duplicates or report.repeated or report.forgotten):
            raise Refused(_nothing(paths, report))
        if relative_to and limit is None:
            digests = [digest for _, digest in files]
            report.normalized = str(normalize(store, relative_to, digests, center=center_by is not None))
    return report


def _check(options: Options) -> None:
    limit, workers = options.get("limit"), options.get("workers", 1)
    if limit is not None and limit < 1:
        raise Refused(f"limit: expected 1 or more rows, got {limit}")
    if workers < 1:
        raise Refused(f"workers: expected 1 or more processes, got {workers}")
    if options.get("group_by") and options.get("center_by"):
        raise Refused("--group-by and --center-by both change rewards by the values of a field: give one")
    mapping = options.get("mapping") or {}
    if "reward" in mapping and options.get("rewards"):
        raise Refused("--map reward=… and --reward: both say what the reward is; give one of them")
    check_map(mapping)


def _others(options: Options) -> int:
    """How many other processes read. None where it takes one that has seen all records before, or few."""
    workers = options.get("workers", 1)
    is_one = options.get("join") is not None or options.get("limit") is not None
    return 0 if is_one or workers == 1 else workers


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
            yield RecordBlock(records)
        if not limit:
            return


def _encodings(paths: Sequence[Path]) -> dict[str, str]:
    """Of tables that aren't in UTF-8."""
    names = {"cp1252": "Windows-1252", "utf-16": "UTF-16"}
    of_tables = {path.name: encoding_of(path) for path in paths if is_table(path)}
    return {name: names[encoding] for name, encoding in of_tables.items() if encoding in names}


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


def _may_refuse(options: Options) -> bool:
    """Whether `_check_used` may."""
    return bool(options.get("reward_map")) or not set(OPTIONAL).isdisjoint(options.get("mapping") or {})


def _check_used(options: Options, total: Found, *, has_words: bool) -> None:
    """Raise `Refused` where no record has a mapped column, or a reward that is a word of --reward-map."""
    mapping, word_rewards = options.get("mapping") or {}, options.get("reward_map")
    for name, count in total.without_column.items():
        if count == total.parts:
            raise Refused(
                f"--map {name}={mapping[name]}: no record has this column; correct it, or leave {name} out"
            )
    if word_rewards and total.parts and not has_words:
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


def _prompts_by_id(prompts: Sequence[Prompt]) -> dict[str, Prompt]:
    """By `prompt_id`, and by an `id` among the columns where that is another one."""
    named = {str(p.columns["id"]): p for p in prompts if p.columns.get("id") is not None}
    return named | {p.id: p for p in prompts}


def _strictly(report: ImportReport) -> str:
    examples = "\n".join(f"  {r.where}: {r.reason}" for r in report.refused[:SHOWN])
    return (
        f"--strict: expected all records to be taken, got {report.refused_count} refused, such as\n"
        f"{examples}\n"
        "Nothing is stored. What to do: mend them, or import without --strict, which leaves them out"
    )


def _nothing(paths: Sequence[str | Path], report: ImportReport) -> str:
    names = ", ".join(map(str, paths)) or "(no files)"
    if not report.refused and report.left_out:
        rules = "\n".join(f"  {count} records: {rule}" for rule, count in report.left_out.items())
        return f"{names}: all records are left out\n{rules}"
    if not report.refused:
        return f"{names}: empty: expected records, got none"
    examples = "\n".join(f"  {r.where}: {r.reason}" for r in report.refused[:3])
    return f"{names}: all records are refused ({report.refused_count}), such as\n{examples}"
