"""The store: every sample that was ever seen, in one SQLite file that processes share."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from agro.errors import AgroWarning, Refused
from agro.store import queries
from agro.store.database import BUSY_TIMEOUT
from agro.store.exchange import write_samples
from agro.store.records import Damaged
from agro.store.rows import of_text, to_text
from agro.store.samples import Samples
from agro.store.select import Candidate, DrawRule, pick_groups, pick_pairs, pick_responses
from agro.types import UNKNOWN_VERSION, Sample


class Store(Samples):
    """Samples in the order in which they came. Open with `Store.open`, one connection a process and thread.

    A method that writes does so in one transaction, on the disk when it returns; `transaction()` joins
    several. A sample is never deleted: what a resumed run makes anew is marked `redone` and dropped unless
    asked for. A sample that isn't as it was written is never returned: reading it is refused, or reported to
    `on_damaged`.
    """

    @classmethod
    def open(
        cls, path: str | Path, *, read_only: bool = False, create: bool = True, timeout: float = BUSY_TIMEOUT
    ) -> Self:
        """Open a store, or make one. `timeout`: seconds to wait for another writer.

        Raises `Refused` for what isn't a store, has another schema, can't be written to, or is missing.
        """
        return cls(path, read_only=read_only, create=create, timeout=timeout)

    def candidates(self, rule: DrawRule, *, run: str, version: int) -> list[Candidate]:
        """The groups that `draw` picks from."""
        self.check_uses()
        fits, args = queries.eligible(rule, run, version)
        if rule.pairs:
            found = self._run(queries.JUDGED.format(eligible=fits), [*args, to_text(run)])
        else:
            found = self._run(queries.DRAWABLE.format(eligible=fits), [*args, rule.min_group, to_text(run)])
        return [Candidate(of_text(prompt_id), uses) for prompt_id, uses in found]

    def draw(
        self,
        rule: DrawRule,
        *,
        run: str,
        step: int,
        seed: int,
        version: int,
        on_damaged: Callable[[Damaged], None] | None = None,
    ) -> list[Sample]:
        """Groups of samples by `rule`, group after group, and a note that `run` drew them at `step`.

        `version`: optimiser steps of the weights now, which ages are counted from. A sample's age is unknown where its
        version is, or where this run didn't produce it: it comes back with version -1. Raises `Refused` when the
        store has fewer such groups than asked for, and for drawn samples that aren't as they were written, unless
        `on_damaged` takes them; they are missing then from what is returned.
        """
        fits, args = queries.eligible(rule, run, version)
        with self.transaction():
            candidates = self.candidates(rule, run=run, version=version)
            if len(candidates) < rule.groups:
                raise Refused(self._too_few(rule, len(candidates), run, version))
            drawn: dict[int, Damaged] = {}  # what is said of a row where it turns out to be damaged
            groups = {
                prompt_id: self._usable(prompt_id, fits, args)
                for prompt_id in pick_groups(candidates, rule, seed=seed, step=step)
            }
            judged = (
                list(self.pairs(i for g in groups.values() for rows in g.values() for i in rows))
                if rule.pairs
                else []
            )
            for prompt_id, usable in groups.items():
                if rule.pairs:
                    at = {i: k for k, rows in enumerate(usable.values()) for i in rows}
                    both = [(at[p.winner], at[p.loser]) for p in judged if p.winner in at and p.loser in at]
                    chosen = pick_pairs(
                        [p for p in both if p[0] != p[1]], rule, seed=seed, step=step, prompt_id=prompt_id
                    )
                else:
                    chosen = pick_responses(len(usable), rule, seed=seed, step=step, prompt_id=prompt_id)
                responses = list(usable.items())
                for key, rows in (responses[k] for k in chosen):
                    drawn |= {i: Damaged(i, prompt_id, None if isinstance(key, int) else key) for i in rows}
            ids = list(drawn)
            self.record_draws(run, step, ids)
            tell = None if on_damaged is None else lambda i: on_damaged(drawn[i])
            whole_samples = {s.id: s for s in self.samples(ids=ids, redone=True, on_damaged=tell)}
            others = {
                i
                for (i,) in self._run(
                    "SELECT id FROM samples WHERE run IS NOT ? AND id IN (SELECT value FROM json_each(?))",
                    [to_text(run), json.dumps(ids)],
                )
            }
        found = [whole_samples[i] for i in ids if i in whole_samples]
        return [s.replace(version=UNKNOWN_VERSION) if s.id in others else s for s in found]

    def _usable(self, prompt_id: str, fits: str, args: Sequence[Any]) -> dict[str | int, list[int]]:
        """The rows of each eligible response of a group, by episode or, outside of one, by row; oldest first."""
        responses: dict[str | int, list[int]] = {}
        broken: set[str | int] = set()
        for i, episode, ok in self._run(
            f"SELECT id, episode, {fits} FROM samples WHERE prompt_id = ? AND NOT redone ORDER BY id",
            [*args, to_text(prompt_id)],
        ):
            key = i if episode is None else of_text(episode)
            responses.setdefault(key, []).append(i)
            if not ok:
                broken.add(key)
        return {key: rows for key, rows in responses.items() if key not in broken}

    def export(self, path: str | Path) -> int:
        """Write the samples to a .jsonl, .jsonl.gz or .parquet file, and return how many; judgements aren't written."""
        [(pairs,)] = self._run("SELECT count(*) FROM pairs")
        if pairs:
            text = f"{path}: the store's {pairs} pairs aren't part of an export"
            warnings.warn(text, AgroWarning, stacklevel=2)
        return write_samples(path, self.samples())

    def _too_few(self, rule: DrawRule, found: int, run: str, version: int) -> str:
        clause, args = queries.where(roles=rule.roles, sources=rule.sources)
        fits, more = queries.eligible(rule, run, version)
        [(rows, groups, chosen, unscored, failed, fit)] = self._run(
            f"""
            SELECT count(*), count(DISTINCT prompt_id), total({clause}), total({clause} AND state = {queries.UNSCORED}),
              total({clause} AND state = {queries.FAILED}), total({fits}) FROM samples WHERE NOT redone
            """,
            [*args, *args, *args, *more],
        )
        wanted = "a pair of" if rule.pairs else f"{rule.min_group} or more"
        scores = (
            f", {unscored:.0f} of them not scored and {failed:.0f} with a failed reward"
            if rule.scored_only
            else ""
        )
        add = f"add {'pairs' if rule.pairs else 'samples'}{', score them' if rule.scored_only else ''}"
        return (
            f"{self.path}: expected {rule.groups} groups with {wanted} eligible responses to draw from, "
            f"got {found}. The store has {rows} samples in {groups} groups; {chosen:.0f} are of the roles and sources "
            f"asked for{scores}; {fit:.0f} are eligible"
            + (f" (at most {rule.max_age} steps old)" if rule.max_age is not None else "")
            + f". Ask for fewer groups, {add}, or widen the choice"
        )
