"""Logged responses into the store, whatever their columns are called; whatever is not taken is reported."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

from agro.errors import Refused
from agro.io.jsonlines import Line
from agro.logs.datasets import on_hub
from agro.logs.entries import Entry, EntryWriter, Repeat, Repeats
from agro.logs.fields import summed
from agro.logs.format_table import Recognizer, format_at, joined, lines_of
from agro.logs.import_report import SHOWN, ImportReport, Options, reading
from agro.logs.interchange import from_record
from agro.logs.labels import as_reward
from agro.logs.mapping import OPTIONAL, Part, check_map, expand, unmapped
from agro.logs.normalizing import normalize
from agro.logs.privacy import Privacy
from agro.logs.prompts import load_prompts
from agro.logs.protocol import RECORD_ERRORS, Context, Format, Item, SkipRecord, reason_of
from agro.logs.record_files import fingerprint
from agro.store.sample_rows import Origin
from agro.store.sqlite import Store
from agro.types import Prompt, Sample

CHUNK = 5000  # records of a file that are taken in one transaction, fewer where they are large:
CHUNK_BYTES = 1 << 24


def import_files(store: Store, paths: Sequence[str | Path], **options: Unpack[Options]) -> ImportReport:
    """Take the records of files into the store, of JSON Lines, Parquet or whatever `agro.logs.formats` knows.

    A response is identified by the content of its file, its record and its column: a second import adds
    nothing. Records that are refused are in the report, the others are taken. Raises `Refused` where a file
    can't be read, or was read with other options before, and takes nothing then; and where all records are
    refused.
    """
    limit = options.get("limit")
    if limit is not None and limit < 1:
        raise Refused(f"limit: expected 1 or more rows, got {limit}")
    reader = _Reader(store, options)
    files = [(Path(path), fingerprint(path)) for path in paths]
    read_options = reading(options)
    writer = EntryWriter(store, reader.report, read_options, options.get("license"))
    replacing, strict = options.get("replace", False), options.get("strict", False)
    for path, digest in files:
        writer.check(path, digest, replacing=replacing)
    group_by = options.get("group_by")
    is_whole = strict or replacing or group_by or reader.may_refuse
    with _uncollected(), store.transaction() if is_whole else nullcontext():
        for path, digest in files:
            if replacing:
                reader.report.replaced += store.imports.take_back(digest)
            lines = islice(reader.lines(path), limit)
            for chunk in _chunks(lines):
                entries = reader.entries(chunk, path, digest)
                writer.write(entries, path, digest, (chunk[0].number, chunk[-1].number))
                del entries
                gc.collect(0)
        writer.finish([digest for _, digest in files])
        report = reader.finished()
        if limit is None:
            reader.check_used()
        if strict and report.refused:
            raise Refused(_strictly(report))
        if not (report.samples or report.duplicates or report.repeated or report.forgotten):
            raise Refused(_nothing(paths, report))
        if group_by and limit is None:
            report.normalized = str(normalize(store, [digest for _, digest in files], group_by))
    return report


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


def _chunks(lines: Iterator[Line]) -> Iterator[list[Line]]:
    """The records in lists of `CHUNK`, or of `CHUNK_BYTES`, so that memory doesn't grow with a file."""
    chunk: list[Line] = []
    size = 0
    for line in lines:
        chunk.append(line)
        size += line.size
        if len(chunk) == CHUNK or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Reader:
    """Records as samples, with a report of what was recognized and refused."""

    def __init__(self, store: Store, options: Options) -> None:
        self.report = ImportReport(refused_file=f"{store.path}.refused.jsonl")
        self._store, self._options = store, options
        self._mapping = dict(options.get("mapping") or {})
        if "reward" in self._mapping and options.get("rewards"):
            raise Refused("--map reward=… and --reward: both say what the reward is; give one of them")
        self._kinds: set[str] = set()
        check_map(self._mapping)
        self._recognizer = Recognizer(options.get("format"), mapped=bool(self._mapping))
        prompts, join = options.get("prompts"), options.get("join")
        self._prompts = _prompts_by_id(load_prompts(prompts)) if prompts is not None else {}
        self._joined = joined(Path(join)) if join is not None else {}
        self._privacy = Privacy(
            options.get("drop") or (), options.get("redact", False), options.get("redact_patterns") or ()
        )
        self._repeats = Repeats(store)
        self._file: Format | None = None  # of the file that is read, where it holds no plain records
        self._context = self._text_context = Context(Path())
        self._source = ""
        self._parts_read, self._has_words = 0, False

    @property
    def may_refuse(self) -> bool:
        """Whether `check_used` may."""
        return bool(self._options.get("reward_map")) or not self._mapping.keys().isdisjoint(OPTIONAL)

    def check_used(self) -> None:
        """Raise `Refused` where no record has a mapped column, or a reward that is a word of --reward-map."""
        for name, count in self.report.without_column.items():
            if count == self._parts_read:
                raise Refused(
                    f"--map {name}={self._mapping[name]}: no record has this column; correct it, or leave "
                    f"{name} out"
                )
        word_rewards = self._options.get("reward_map")
        if word_rewards and self._parts_read and not self._has_words:
            raise Refused(
                f"--reward-map: no record has a reward that is {' or '.join(word_rewards)}; name its column "
                "with --map reward=COLUMN, or leave --reward-map out"
            )

    def finished(self) -> ImportReport:
        """The report, with what was recognized."""
        kinds = " and ".join(f"{kind} records" for kind in sorted(self._kinds))
        self.report.recognized = kinds + (", mapped" if self._mapping else "")
        self.report.dropped = self._privacy.dropped
        self.report.redacted = dict(self._privacy.redacted)
        self.report.tokens_dropped = self._privacy.tokens
        return self.report

    def lines(self, path: Path) -> Iterator[Line]:
        """The records of a file."""
        self._file = format_at(path) or self._recognizer.recognize_file(path)
        self._repeats = Repeats(self._store)
        self._context = Context(
            path,
            self._options.get("rewards") or {},
            self._options.get("choose") or {},
            self._joined,
            tokenizer=self._options.get("tokenizer"),
            word_rewards=self._options.get("reward_map") or {},
        )
        self._text_context = replace(self._context, is_text=True)
        source = self._options.get("source")
        self._source = _origin(path) if source is None else source
        return lines_of(path, self._file)

    def entries(self, lines: Sequence[Line], path: Path, digest: str) -> list[Entry]:
        """The entries of some records of a file; what is refused goes into the report."""
        entries, repeats = list[Entry](), list[Repeat]()
        for line in lines:
            try:
                parts = self._parts(line)
            except RECORD_ERRORS as error:
                self.report.refuse(line.where, reason_of(error))
                continue
            for part in parts:
                self._parts_read += 1
                for name in part.missing:
                    self.report.without_column[name] = self.report.without_column.get(name, 0) + 1
                try:
                    format = self._format(part)
                    items = self._items(format, part, line)
                    same = self._repeats.of(format, part.record)
                    new = [self._entry(item, part, line, digest, same) for item in items]
                    _check_origins(new)
                    entries += new
                    if same is not None:
                        repeats.append(same)
                except SkipRecord as rule:
                    self.report.left_out[str(rule)] = self.report.left_out.get(str(rule), 0) + 1
                except RECORD_ERRORS as error:
                    column = part.columns.get("response") or part.columns.get("chosen")
                    reason = reason_of(error)
                    self.report.refuse(line.where, f"{column}: {reason}" if column else reason)
        if repeats:
            self._repeats.number(repeats)
        self._has_words |= "words" in self._context.notes
        return entries

    def _parts(self, line: Line) -> Sequence[Part]:
        if line.error:
            self.report.refuse(line.where, line.error)
            return ()
        if not self._mapping:
            return (Part(line.value),)
        for name in unmapped(line.value, self._mapping):
            if name not in self.report.columns_left:
                self.report.columns_left.append(name)
        return expand(line.value, self._mapping)

    def _format(self, part: Part) -> Format:
        format = self._file or self._recognizer.recognize(part.record)
        if format is None:
            raise Refused(
                f"expected a format of `agro formats`, got the columns {', '.join(part.record) or '(none)'}; "
                "name the one of the responses with --map response=COLUMN, or the format with --format"
            )
        if format.kind == "prompts":
            raise Refused(
                f"these are prompts ({format.title}) and no responses: set data.prompts to this file, or "
                "sample responses to them (agro sample). Where a column has responses, name it: --map "
                f"response=COLUMN, of {', '.join(part.record)}"
            )
        return format

    def _items(self, format: Format, part: Part, line: Line) -> list[Item]:
        context = self._text_context if line.is_text else self._context
        for name in context.choose:
            choices = format.chooses.split(", ")
            if name not in choices:
                expected = ", ".join(f"--choose {choice}=NAME" for choice in choices if choice) or "none"
                raise Refused(f"--choose {name}: no such choice for {format.title}; expected {expected}")
        items = format.read(part.record, context)
        if context.rewards and not format.weighs:
            items = summed(items, {**line.value, **part.record}, context)
        self._kinds.add(format.name)
        return items

    def _entry(self, item: Item, part: Part, line: Line, digest: str, same: Repeat | None) -> Entry:
        samples = [self._sample(record, line) for record in item.records]
        origins = [Origin(digest, line.number, part.column(name)) for name in item.names]
        return Entry(line.where, tuple(samples), tuple(origins), item.judgments, same)

    def _sample(self, record: dict[str, Any], line: Line) -> Sample:
        if record.get("prompt") is None:
            record = _join(record, self._prompts)
        if isinstance(record.get("reward"), str) or self._context.word_rewards:
            record = {**record, "reward": as_reward(record.get("reward"), self._context, "reward")}
        return from_record(
            self._privacy.apply(record),
            role=self._options.get("role", "log"),
            source=self._source,
            tokenizer=self._options.get("tokenizer"),
            is_json=line.is_json,
        )


def _check_origins(entries: Sequence[Entry]) -> None:
    """Raise `Refused` for two responses of one record that couldn't be told apart later."""
    parts = [origin.part for entry in entries for origin in entry.origins]
    if len(set(parts)) < len(parts):
        twice = next(part for part in parts if parts.count(part) > 1)
        raise Refused(f"{twice}: expected one response of this name in a record, got {parts.count(twice)}")


def _origin(path: Path) -> str:
    return str(path) if on_hub(path) else f"file:{path.name}"


def _join(record: dict[str, Any], prompts: Mapping[str, Prompt]) -> dict[str, Any]:
    """A record without a prompt, with its own and that one's columns."""
    key = record.get("prompt_id", record.get("id"))
    if key is None or not prompts:
        raise Refused(
            "prompt: missing; name its column with --map prompt=COLUMN, or join it with --prompts FILE"
        )
    prompt = prompts.get(str(key))
    if prompt is None:
        raise Refused(f"prompt_id: the file of prompts has no {key!r}")
    fields = {name: value for name, value in record.items() if name != "id"}
    meta = fields.get("meta") or {}
    if not isinstance(meta, dict):
        raise Refused(f"meta: expected an object, got {meta!r:.80}")
    columns = {name: value for name, value in prompt.columns.items() if fields.get(name) is None}
    return fields | {"prompt": prompt.text, "prompt_id": prompt.id, "meta": {**columns, **meta}}


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
        return f"{names}: expected records, got none"
    examples = "\n".join(f"  {r.where}: {r.reason}" for r in report.refused[:3])
    return f"{names}: all records are refused ({report.refused_count}), such as\n{examples}"
