"""Samples that are added together: each is checked by itself, and all are written at once."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from agro.store import queries
from agro.store.database import Database
from agro.store.groups import OtherPrompt
from agro.store.rows import INSERT, Origin, from_row, is_valid_sample, prompt_columns, to_row, to_text
from agro.types import Sample, Text

TOGETHER = "added together with it"


class _Known(NamedTuple):
    """The prompt of a group, and where it is."""

    prompt: Text
    place: str
    columns: tuple[Any, Any]


class Adding:
    """What is added to a store in one transaction, from the first `add` to `write`.

    `prompt_ids`: those that will be added; which of them the store has is asked once for all.
    """

    def __init__(self, store: Database, prompt_ids: Collection[str]) -> None:
        self._store = store
        self._new = set(filter(_is_plain, prompt_ids))
        rows = store._run(queries.STORED_PROMPTS, [json.dumps(list(self._new))])
        self._new -= {prompt_id for (prompt_id,) in rows}
        [(self._last,)] = store._run("SELECT ifnull(max(id), 0) FROM samples")
        self._known: dict[str, _Known] = {}
        self._rows: list[tuple[Any, ...]] = []

    def add(
        self,
        samples: Sequence[Sample],
        origins: Sequence[Origin | None],
        run: str | None = None,
        step: int | None = None,
    ) -> list[int]:
        """The ids of these samples, which `write` will store; all or none of them.

        Raises `OtherPrompt` where a prompt_id names another prompt, in the store or among what is added.
        """
        known = self._prompts((sample.prompt_id, sample.prompt) for sample in samples)
        rows = []
        for i, (sample, origin) in enumerate(zip(samples, origins, strict=True), self._last + 1):
            rows.append(to_row(i, sample, known[sample.prompt_id].columns, run, step, origin))
        self._known |= known
        self._rows += rows
        self._last += len(rows)
        return [row[0] for row in rows]

    def check(self, prompts: Iterable[tuple[str, Text]]) -> None:
        """Raise `OtherPrompt` as `add` does, for samples with these prompts by their prompt_ids."""
        self._prompts(prompts)

    def write(self) -> list[int]:
        """Store what was added, and return its ids."""
        self._store._run_many(INSERT, self._rows)
        ids = [row[0] for row in self._rows]
        self._rows = []
        return ids

    def _prompts(self, prompts: Iterable[tuple[str, Text]]) -> dict[str, _Known]:
        found: dict[str, _Known] = {}
        for prompt_id, prompt in prompts:
            known = found.get(prompt_id) or self._known.get(prompt_id) or self._look_up(prompt_id, prompt)
            if known.prompt != prompt:
                raise OtherPrompt(prompt_id, known.prompt, known.place, prompt)
            found[prompt_id] = known
        return found

    def _look_up(self, prompt_id: str, prompt: Text) -> _Known:
        """The prompt of a group in the store, where it isn't stored as this one is. Damaged ones don't
        count."""
        columns = prompt_columns(prompt, f"prompt {prompt_id}")
        if prompt_id in self._new:
            return _Known(prompt, TOGETHER, columns)
        rows = self._store._run(queries.IS_PROMPT, [to_text(prompt_id), *columns])
        if rows and not rows[0][1]:
            [row] = self._store._run(queries.BY_ID, [rows[0][0]])
            if is_valid_sample(row):
                other = from_row(row)
                return _Known(other.prompt, f"sample {other.id}, of {other.source}", columns)
        return _Known(prompt, TOGETHER, columns)


def _is_plain(prompt_id: str) -> bool:
    """Whether SQLite reads the text from JSON as it is."""
    return prompt_id.isascii() and prompt_id.isprintable()
