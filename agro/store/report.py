"""What became of the records of an import."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SHOWN = 10  # refusals that a printed report spells out


@dataclass(frozen=True)
class Refusal:
    where: str  # FILE:LINE
    reason: str


@dataclass
class ImportReport:
    """samples, groups, scored and pairs count what is new in the store."""

    samples: int = 0
    groups: int = 0
    scored: int = 0
    pairs: int = 0
    duplicates: int = 0  # samples of an earlier import of the same file
    repeats: int = 0  # new samples whose response equals another one of their group; they are kept
    repeated: dict[str, int] = field(default_factory=dict)  # samples by their format's rule
    replaced: int = 0  # samples of an earlier import that were erased for this one
    forgotten: int = 0  # samples that were deleted by `agro forget`
    dropped: dict[str, int] = field(default_factory=dict)  # records that had the field
    redacted: dict[str, int] = field(default_factory=dict)  # by kind
    tokens_dropped: int = 0  # samples without their tokens, since their text was changed
    recognized: str = ""
    normalized: str = ""  # which rewards were, by --group-by
    left_out: dict[str, int] = field(default_factory=dict)  # records by the rule of their format
    columns_left: list[str] = field(default_factory=list)  # that the mapping doesn't name
    refused: list[Refusal] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        samples = f"{self.samples} samples ({self.scored} with a reward)"
        lines = [
            f"recognized: {self.recognized}",
            f"taken: {samples} in {self.groups} groups, {self.pairs} pairs",
        ]
        if self.duplicates:
            lines.append(f"not taken again: {self.duplicates} samples of an earlier import of the same file")
        if self.repeats:
            lines.append(
                f"repeats: {self.repeats} of the new samples equal another one of their group; all are kept"
            )
        lines += [self.normalized] if self.normalized else []
        lines += self._about_repeats() + self._about_privacy()
        lines += [f"left out: {count} records: {rule}" for rule, count in self.left_out.items()]
        if self.columns_left:
            lines.append(f"columns without --map, dropped: {', '.join(self.columns_left)}")
        if self.refused:
            lines.append(f"refused: {len(self.refused)}")
            lines += [f"  {r.where}: {r.reason}" for r in self.refused[:SHOWN]]
            if len(self.refused) > SHOWN:
                lines.append(f"  … and {len(self.refused) - SHOWN} more (--json lists all)")
        return "\n".join(lines)

    def _about_repeats(self) -> list[str]:
        lines = [f"repeats of {rule}: {count} not taken again" for rule, count in self.repeated.items()]
        if self.replaced:
            lines.append(f"replaced: {self.replaced} samples of an earlier import of the same file")
        if self.forgotten:
            lines.append(f"not taken again: {self.forgotten} samples that were deleted by agro forget")
        return lines

    def _about_privacy(self) -> list[str]:
        lines = [f"dropped {name}: in {count} records" for name, count in self.dropped.items()]
        lines += [f"redacted {kind}: {count} times" for kind, count in self.redacted.items()]
        if self.tokens_dropped:
            lines.append(f"tokens dropped, since their text was changed: of {self.tokens_dropped} samples")
        return lines
