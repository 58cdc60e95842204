"""Logged responses into the store, whatever their columns are called; nothing is left out unsaid."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.prompts import load_prompts
from agro.store.conversation import split
from agro.store.exchange import Row, fingerprint, from_record, number, read_rows
from agro.store.mapping import PREFERENCE, Part, check_map, expand, unmapped
from agro.store.records import Pair
from agro.store.rows import Origin
from agro.store.sqlite import Store
from agro.types import Prompt, Role, Sample

FORMATS = ("interchange", "preference", "conversation")
ROWS = 500  # rows of a file that are taken in one transaction
SHOWN = 10  # refusals that a printed report spells out


@dataclass(frozen=True)
class Refusal:
    where: str  # FILE:LINE
    reason: str


@dataclass
class ImportReport:
    """What became of the rows. samples, groups, scored and pairs count what is new in the store."""

    samples: int = 0
    groups: int = 0
    scored: int = 0
    pairs: int = 0
    duplicates: int = 0  # samples that an earlier import of the same file brought
    repeats: int = 0  # new samples whose group holds an equal response; they are kept
    recognised: str = ""
    columns_left: list[str] = field(default_factory=list)  # that the mapping doesn't name
    refused: list[Refusal] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        said = [
            f"recognised: {self.recognised}",
            f"taken: {self.samples} samples ({self.scored} with a reward) in {self.groups} groups, {self.pairs} pairs",
        ]
        if self.duplicates:
            said.append(
                f"not taken again: {self.duplicates} samples that an earlier import of the same file brought"
            )
        if self.repeats:
            said.append(
                f"repeats: {self.repeats} of the new samples equal another response of their group; all are kept"
            )
        if self.columns_left:
            said.append(f"columns without --map, left behind: {', '.join(self.columns_left)}")
        if self.refused:
            said.append(f"refused: {len(self.refused)}")
            said += [f"  {r.where}: {r.reason}" for r in self.refused[:SHOWN]]
            if len(self.refused) > SHOWN:
                said.append(f"  … and {len(self.refused) - SHOWN} more (--json lists all)")
        return "\n".join(said)


@dataclass(frozen=True)
class _Entry:
    """The samples of one record: one, or the chosen and the rejected one with their votes."""

    samples: tuple[Sample, ...]
    origins: tuple[Origin, ...]
    votes: tuple[float | None, float | None] = (None, None)


def import_files(
    store: Store,
    paths: Sequence[str | Path],
    *,
    mapping: Mapping[str, str] | None = None,
    prompts: str | Path | None = None,
    format: str | None = None,
    role: Role = "log",
    source: str | None = None,
    limit: int | None = None,
) -> ImportReport:
    """Take the records of JSON Lines (gzipped or not) and Parquet files into the store.

    A row is an interchange record (`response`, its `prompt`, a `reward` where it is known), a preference record
    (`chosen`, `rejected`) or a conversation (`messages`, see `agro.store.conversation`); `format` names one of them where
    more than one could be read. `mapping`: see `agro.store.mapping`.
    `prompts`: a file of prompts for rows that hold none, joined by `prompt_id` or `id`; its columns go into `meta`.
    `role`, `source` ("file:NAME"): of rows that name none. `limit`: rows of each file.

    A response is known by the content of its file, its row and its column: a second import brings nothing new. Rows
    that can't be used are in the report, the others are taken. Raises `Refused` where a file can't be read, before
    anything is taken, and where no row can be used.
    """
    mapping = dict(mapping or {})
    check_map(mapping)
    if format is not None and format not in FORMATS:
        near = difflib.get_close_matches(format, FORMATS, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"the formats are {', '.join(FORMATS)}"
        raise Refused(f"--format {format}: unknown; {hint}")
    if limit is not None and limit < 1:
        raise Refused(f"limit: expected 1 or more rows, got {limit}")
    known = _by_id(load_prompts(prompts)) if prompts is not None else {}
    files = [(Path(path), fingerprint(path)) for path in paths]
    report = ImportReport()
    kinds: set[str] = set()
    groups: set[str] = set()
    repeats = _Repeats(store)
    for path, digest in files:
        default = f"file:{path.name}" if source is None else source
        rows = islice(read_rows(path), limit)
        while chunk := list(islice(rows, ROWS)):
            entries = []
            for row in chunk:
                for name in unmapped(row.value, mapping):
                    if name not in report.columns_left:
                        report.columns_left.append(name)
                for part in _parts(row, mapping, report):
                    try:
                        kind = _kind(part.record, format)
                        entries.append(
                            _entry(part, kind, Origin(digest, row.number, ""), known, role, default)
                        )
                        kinds.add(kind)
                    except Refused as error:
                        at = part.columns.get("response") or part.columns.get("chosen")
                        report.refused.append(Refusal(row.where, f"{at}: {error}" if at else str(error)))
            with store.transaction():
                there = store.origins(digest, chunk[0].number, chunk[-1].number)
                new = [e for e in entries if e.origins[0] not in there]
                report.duplicates += sum(len(e.samples) for e in entries) - sum(len(e.samples) for e in new)
                repeats.look_up({s.prompt_id for e in new for s in e.samples})
                ids = iter(
                    store.append(
                        [s for e in new for s in e.samples], origins=[o for e in new for o in e.origins]
                    )
                )
                rows_of = [tuple(islice(ids, len(e.samples))) for e in new]
                pairs = [Pair(r[0], r[1], *e.votes) for r, e in zip(rows_of, new, strict=True) if len(r) == 2]
                store.add_pairs(pairs)
            report.pairs += len(pairs)
            for sample in (s for e in new for s in e.samples):
                report.samples += 1
                report.scored += sample.reward is not None
                report.repeats += repeats.seen(sample)
                groups.add(sample.prompt_id)
    report.groups = len(groups)
    report.recognised = " and ".join(f"{k} records" for k in sorted(kinds)) + (", mapped" if mapping else "")
    if not report.samples + report.duplicates:
        raise Refused(_nothing(paths, report))
    return report


def _parts(row: Row, mapping: Mapping[str, str], report: ImportReport) -> Iterator[Part]:
    try:
        if row.error:
            raise Refused(row.error)
        yield from expand(row.value, mapping)
    except Refused as error:
        report.refused.append(Refusal(row.where, str(error)))


def _kind(record: Mapping[str, Any], format: str | None) -> str:
    if format is not None:
        return format
    if "response" in record:
        return "interchange"
    if "chosen" in record and "rejected" in record:
        return "preference"
    if "messages" in record:
        return "conversation"
    raise Refused(
        f"expected response, or chosen and rejected, or messages, got the columns {', '.join(record) or '(none)'}; "
        "name the one of the responses with --map response=COLUMN"
    )


def _entry(
    part: Part, kind: str, origin: Origin, prompts: Mapping[str, Prompt], role: Role, source: str
) -> _Entry:
    if kind == "conversation":
        sample = from_record(split(part.record), role=role, source=source)
        return _Entry((sample,), (origin._replace(part=part.column("messages")),))
    record = _join(part.record, prompts)
    if kind == "interchange":
        sample = from_record(record, role=role, source=source)
        return _Entry((sample,), (origin._replace(part=part.column("response")),))
    both = ("chosen", "rejected")
    rest = {k: v for k, v in record.items() if k not in PREFERENCE and k != "response"}
    samples = []
    for name in both:
        if not isinstance(record.get(name), str):
            raise Refused(f"{name}: expected text, got {record.get(name)!r:.80}")
        samples.append(from_record(rest | {"response": record[name]}, role=role, source=source))
    votes = [_votes(record, f"votes_{name}") for name in both]
    return _Entry(
        tuple(samples), tuple(origin._replace(part=part.column(name)) for name in both), (votes[0], votes[1])
    )


def _join(record: dict[str, Any], prompts: Mapping[str, Prompt]) -> dict[str, Any]:
    """A record with its prompt and the prompt's columns put in, where it has none; what it says itself stands."""
    if record.get("prompt") is not None:
        return record
    key = record.get("prompt_id", record.get("id"))
    if key is None or not prompts:
        raise Refused(
            "prompt: missing; name its column with --map prompt=COLUMN, or join it with --prompts FILE"
        )
    prompt = prompts.get(str(key))
    if prompt is None:
        raise Refused(f"prompt_id: the file of prompts has no {key!r}")
    own = {name: value for name, value in record.items() if name != "id"}
    meta = own.get("meta") or {}
    if not isinstance(meta, dict):
        raise Refused(f"meta: expected an object, got {meta!r:.80}")
    columns = {name: value for name, value in prompt.columns.items() if own.get(name) is None}
    return own | {"prompt": prompt.text, "prompt_id": prompt.id, "meta": {**columns, **meta}}


def _by_id(prompts: Sequence[Prompt]) -> dict[str, Prompt]:
    """By `prompt_id`, and by an `id` among the columns where that is another one."""
    named = {str(p.columns["id"]): p for p in prompts if p.columns.get("id") is not None}
    return named | {p.id: p for p in prompts}


def _votes(record: dict[str, Any], name: str) -> float | None:
    value = number(record, name)
    if value is not None and not 0 <= value < math.inf:
        raise Refused(f"{name}: expected a number of 0 or more, got {value!r:.80}")
    return value


class _Repeats:
    """Which responses a group holds already."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[str, set[int]] = {}

    def look_up(self, prompt_ids: set[str]) -> None:
        """To be called before samples of these groups are appended."""
        for prompt_id in prompt_ids - self._held.keys():
            self._held[prompt_id] = {hash(s.response) for s in self._store.samples(prompt_id=prompt_id)}

    def seen(self, sample: Sample) -> bool:
        held, key = self._held[sample.prompt_id], hash(sample.response)
        again = key in held
        held.add(key)
        return again


def _nothing(paths: Sequence[str | Path], report: ImportReport) -> str:
    names = ", ".join(map(str, paths)) or "(no files)"
    if not report.refused:
        return f"{names}: expected records, got none"
    first = "\n".join(f"  {r.where}: {r.reason}" for r in report.refused[:3])
    return f"{names}: none of the rows can be used ({len(report.refused)} refused), such as\n{first}"
