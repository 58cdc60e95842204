"""The options of an import, and the report of what became of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from agro.io import plugins
from agro.io.files import digest_of_module
from agro.io.record_files import fingerprint
from agro.io.strictjson import dumps
from agro.logs.interchange import Tokenizer
from agro.types import Role

SHOWN = 10  # refusals that a printed report spells out
LISTED = 1000  # refusals that are kept in memory; all of more are written to a file
SHORT = 12  # characters of a hash that people read


class Refusal(NamedTuple):
    where: str  # FILE:LINE
    reason: str


@dataclass
class Counts:
    """What readers count, each of some of the records."""

    left_out: Counter[str] = field(default_factory=Counter)  # records by the rule of their format
    without_column: Counter[str] = field(default_factory=Counter)  # records, by the field of --map
    columns_left: list[str] = field(default_factory=list)  # that the mapping doesn't name
    dropped: Counter[str] = field(default_factory=Counter)  # records that had the field
    redacted: Counter[str] = field(default_factory=Counter)  # by kind
    unknown_ends: Counter[str] = field(default_factory=Counter)  # samples, by what is said of their end
    cut: int = 0  # samples whose record says so
    tokens_dropped: int = 0  # samples without their tokens, since their text was changed

    def count(self, other: Counts) -> None:
        """Add those of records that follow."""
        for name in ("left_out", "without_column", "dropped", "redacted", "unknown_ends"):
            getattr(self, name).update(getattr(other, name))
        self.columns_left = list(dict.fromkeys(self.columns_left + other.columns_left))
        self.cut += other.cut
        self.tokens_dropped += other.tokens_dropped


@dataclass
class ImportReport(Counts):
    """samples, groups, scored, pairs and ties count what is new in the store."""

    samples: int = 0
    groups: int = 0
    scored: int = 0
    pairs: int = 0
    ties: int = 0  # judgments with equal votes, which have no winner
    duplicates: int = 0  # samples of an earlier import of the same file
    repeats: int = 0  # new samples whose response equals another one of their group; they are kept
    repeated: Counter[str] = field(default_factory=Counter)  # samples by their format's rule
    replaced: int = 0  # samples of an earlier import that were erased for this one
    before: dict[str, int] = field(default_factory=dict)  # samples of other files of the same names
    forgotten: int = 0  # samples that were deleted by `agro forget`
    recognized: str = ""
    lower_is_better: bool = False
    encodings: dict[str, str] = field(default_factory=dict)  # of tables that aren't in UTF-8
    unused: list[str] = field(default_factory=list)  # where no sample has a reward: columns of numbers
    normalized: str = ""  # which rewards were, by --center-by
    refused: list[Refusal] = field(default_factory=list)  # the first `LISTED` of them
    refused_count: int = 0
    refused_file: str = ""  # where all are written, one JSON object a line, if they are more than `LISTED`

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
        if self.refused_count <= LISTED:
            del values["refused_file"]
        return values

    def __str__(self) -> str:
        samples = f"{self.samples} samples ({self.scored} with a reward)"
        lines = [
            f"recognized: {self.recognized}",
            f"taken: {samples} in {self.groups} groups, {self.pairs} pairs",
        ]
        if self.lower_is_better:
            lines.append("lower is better: of a reward r the negative -r is stored; of a pair the loser wins")
        lines += [f"{name}: isn't UTF-8; read as {encoding}" for name, encoding in self.encodings.items()]
        if self.unused:
            lines.append(
                f"no reward: columns of numbers that aren't used: {', '.join(self.unused)}; take one with "
                f"--map reward={self.unused[0]}, or with --reward {self.unused[0]} where there is no --map"
            )
        if self.ties:
            lines.append(
                f"ties: {self.ties} judgments with equal votes, no pairs but to an objective that reads votes"
            )
        if self.duplicates:
            lines.append(f"not taken again: {self.duplicates} samples of an earlier import of the same file")
        if self.repeats:
            lines.append(
                f"repeats: {self.repeats} of the new samples equal another one of their group; all are kept"
            )
        lines += [self.normalized] if self.normalized else []
        if self.cut:
            lines.append(f"cut: {self.cut} samples; no end is learned behind them")
        if self.unknown_ends:
            words = [f"{word} ({count})" for word, count in self.unknown_ends.items()]
            more = f" and {len(words) - SHOWN} others" if len(words) > SHOWN else ""
            lines.append(
                f"end unknown: of {self.unknown_ends.total()} samples it isn't known what their record says: "
                f"{', '.join(words[:SHOWN])}{more}; where they are cut, write length there"
            )
        return "\n".join(lines + self._about_records())

    def _about_records(self) -> list[str]:
        """What was taken before, changed, left out or refused."""
        lines = [f"repeats of {rule}: {count} not taken again" for rule, count in self.repeated.items()]
        if self.replaced:
            lines.append(f"replaced: {self.replaced} samples of an earlier import of the same file")
        for name, count in self.before.items():
            lines.append(
                f"{name}: another file of this name was imported before ({count} samples). Where this is a "
                "newer version of it, records of both are there twice: import it into a new store instead"
            )
        if self.forgotten:
            lines.append(f"not taken again: {self.forgotten} samples that were deleted by agro forget")
        lines += [f"dropped {name}: in {count} records" for name, count in self.dropped.items()]
        lines += [f"redacted {kind}: {count} times" for kind, count in self.redacted.items()]
        if self.tokens_dropped:
            lines.append(f"tokens dropped, since their text was changed: of {self.tokens_dropped} samples")
        lines += [f"left out: {count} records: {rule}" for rule, count in self.left_out.items()]
        for name, count in self.without_column.items():
            lines.append(f"{name}: {count} records don't have its column: unknown")
        if self.columns_left:
            lines.append(f"columns without --map, dropped: {', '.join(self.columns_left)}")
        if self.refused:
            lines.append(f"refused: {self.refused_count}")
            lines += [f"  {refusal.where}: {refusal.reason}" for refusal in self.refused[:SHOWN]]
        if self.refused_count > SHOWN:
            where = f"all are in {self.refused_file}" if self.refused_count > LISTED else "--json lists all"
            lines.append(f"  … and {self.refused_count - SHOWN} more ({where})")
        return lines


class Options(TypedDict, total=False):
    """How `import_files` reads records."""

    mapping: Mapping[str, str] | None  # see `agro.logs.mapping`
    prompts: str | Path | None  # a file of prompts, joined by `prompt_id` or `id`; its columns go into `meta`
    format: str | None  # a name of `agro.logs.format_table.FORMATS`, where several fit a record
    rewards: Mapping[str, float] | None  # weights of the columns whose sum is the reward
    reward_map: Mapping[str, float | None] | None  # rewards of words, see `agro.logs.labels`
    lower_is_better: bool  # a reward r becomes -r, and of a pair the loser wins
    choose: Mapping[str, str] | None  # what to take where a format has several of a kind
    join: str | Path | None  # the second file of a format that is split over two
    role: Role  # of records without; "log" by default
    source: str | None  # of records without; "file:NAME" by default
    limit: int | None  # records of each file
    tokenizer: Tokenizer | None  # of tokens without a mask, see `from_record`
    replace: bool  # take the files anew, in place of what was imported from them
    strict: bool  # take nothing where any record is refused
    license: str | None  # of the files, for people
    workers: int  # processes that read records, beside this one that writes; 1 by default: this one does both
    drop: Sequence[str]  # fields of the record that aren't stored, see `agro.logs.privacy`
    redact: bool  # keys and e-mail addresses
    redact_patterns: Sequence[str]  # other regular expressions
    center_by: str | None  # the field by whose values rewards are centered, see `agro.logs.normalizing`
    refused_file: str  # for records that are refused, if they are many; beside the store by default


def reading(options: Options) -> dict[str, Any]:
    """What a record becomes depends on these options, by the names of the command line; without unset ones.

    Files are known by their content, and patterns, which may have what isn't to be stored, by a hash.
    """
    tokenizer, format = options.get("tokenizer"), options.get("format")
    if format is not None and (format.endswith(".toml") or plugins.is_reference(format)):
        # One of the user's own is known by its content too.
        content = fingerprint(format) if format.endswith(".toml") else digest_of_module(format) or ""
        format = f"{Path(format).name} {content[:SHORT]}".strip()
    values: dict[str, Any] = {
        "map": dict(options.get("mapping") or {}),
        "format": format,
        "reward": dict(options.get("rewards") or {}),
        "reward-map": dict(options.get("reward_map") or {}),
        "lower-is-better": options.get("lower_is_better"),
        "choose": dict(options.get("choose") or {}),
        "role": options.get("role"),
        "source": options.get("source"),
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


def difference(previous: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Which options differ, as they are written on the command line; empty where none does."""
    texts = []
    for name in dict.fromkeys((*previous, *current)):
        if previous.get(name) != current.get(name):
            texts.append(f"--{name} was {_shown(previous.get(name))}, is {_shown(current.get(name))} now")
    return "; ".join(texts)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in sorted(value.items()))
    if isinstance(value, list):
        return " ".join(map(str, value))
    if value is True:
        return "set"
    return "not set" if value is None else str(value)
