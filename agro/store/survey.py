"""What there is in a store: counts, groups, and what is known of each sample, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple, Unpack

from agro.errors import Refused
from agro.io.strictjson import loads
from agro.store import queries
from agro.store.database import PAGE_ENTRIES, PAGE_GROUPS, PAGE_RESPONSES
from agro.store.queries import Filter
from agro.store.records import Counts, Group, SampleSummary
from agro.store.sample_rows import STATES, decode_text
from agro.store.tables import Tables
from agro.types import Text, truncation


class SurveyRow(NamedTuple):
    """One row of a group, as far as a survey reads it."""

    id: int
    prompt_id: str
    episode: str | None
    reward: float | None
    role: str
    source: str
    version: int  # -1: unknown
    knows_behavior: bool
    knows_tokens: bool
    length: int | None  # actions; None without tokens
    finish: Any  # see `agro.types.end_in`; None where the record doesn't say
    response: str


class Scale(NamedTuple):
    """The known rewards of one source."""

    source: str
    lowest: float
    highest: float

    @property
    def size(self) -> float:
        """The largest |reward|."""
        return max(abs(self.lowest), abs(self.highest))


# Of some groups, in the order of samples_draw, so that nothing is sorted.
GROUP_ROWS = f"""
SELECT id, prompt_id, episode, reward, role, source, version, knows_behavior, knows_tokens, action,
  meta, response
FROM samples INDEXED BY samples_draw WHERE {queries.BETWEEN_GROUPS} AND redone = 0 ORDER BY prompt_id
"""
PROMPTS = """
SELECT id, prompt_id, prompt, messages FROM samples WHERE id IN (SELECT value FROM json_each(?))
"""
SCALES = """
SELECT source, min(reward), max(reward) FROM samples
WHERE prompt_id <> '' AND redone = 0 AND reward IS NOT NULL GROUP BY source
"""
# The sets of sources that scored responses of one group have.
TOGETHER = """
SELECT names, count(*), min(prompt_id) FROM (
  SELECT prompt_id, json_group_array(DISTINCT CAST(source AS TEXT)) AS names
  FROM samples WHERE {where} AND reward IS NOT NULL GROUP BY prompt_id HAVING min(source) <> max(source)
) AS sets GROUP BY names
"""


class Survey:
    """What there is in a store, without the samples themselves."""

    def __init__(self, tables: Tables) -> None:
        self._tables, self._database = tables, tables.database

    def each_group_rows(self) -> Iterator[list[SurveyRow]]:
        """The rows of each group, by prompt_id, without checking that they are as they were written."""
        self._tables.check_once("structure")
        for cursor, ids in self._each_page():
            rows = self._database.run(GROUP_ROWS, [cursor, ids[-1]])
            groups = groupby(map(_to_survey_row, rows), key=attrgetter("prompt_id"))
            yield from (list(group) for _, group in groups)

    def each_prompt(self) -> Iterator[tuple[str, Text]]:
        """The id and the prompt of each group."""
        for _, ids in self._each_page():
            rows = self._database.run(PROMPTS, [self._database.listed(ids)])
            prompts: dict[int, tuple[str, Text]] = {}
            for i, name, prompt, messages in rows:
                text = decode_text(prompt) if messages is None else loads(decode_text(messages))
                prompts[i] = decode_text(name), text
            yield from (prompts[i] for i in ids)

    def each_group(self, **chosen: Unpack[Filter]) -> Iterator[Group]:
        """The groups of the chosen samples by prompt_id."""
        clause, args = queries.build_condition(**chosen)
        sql = queries.GROUPS.format(where=f"{queries.BETWEEN_GROUPS} AND {clause}", order="prompt_id")
        for cursor, ids in self._each_page(**chosen):
            yield from map(_to_group, self._database.run(sql, [cursor, ids[-1], *args]))

    def summaries(self, **chosen: Unpack[Filter]) -> list[SampleSummary]:
        """What is known of each of the chosen samples, without reading it."""
        return list(self.each_summary(**chosen))

    def each_summary(self, **chosen: Unpack[Filter]) -> Iterator[SampleSummary]:
        """The same one by one, in constant memory."""
        clause, args = queries.build_condition(**chosen)
        sql = (
            f"SELECT id, prompt_id, state = {queries.SCORED}, knows_behavior, sampling, knows_kept, episode, "
            f"role FROM samples WHERE {clause} AND id > ? ORDER BY id"
        )
        return map(_to_summary, chain.from_iterable(self._database.pages(sql, args, rows=PAGE_ENTRIES)))

    def spread_of_rewards(self) -> tuple[float, float] | None:
        """The lowest and the highest known reward."""
        scales = self.scales()
        if not scales:
            return None
        return min(s.lowest for s in scales), max(s.highest for s in scales)

    def groups(self, **chosen: Unpack[Filter]) -> list[Group]:
        """The groups of the chosen samples in the order in which they began."""
        clause, args = queries.build_condition(**chosen)
        rows = self._database.run(queries.GROUPS.format(where=clause, order="min(first)"), args)
        return list(map(_to_group, rows))

    def _each_page(self, **chosen: Unpack[Filter]) -> Iterator[tuple[int, list[int]]]:
        """A sample of each of the next groups, by prompt_id, and one of the group before them.

        Raises `Refused` where that one was erased meanwhile.
        """
        clause, args = queries.build_condition(**chosen)
        sql, before = queries.NEXT_GROUPS.format(where=clause), 0
        while True:
            if self._database.run("SELECT 1 FROM samples WHERE id = ? AND prompt_id = ''", [before]):
                raise Refused(
                    f"{self._database.path}: samples were replaced or forgotten while the store was read. "
                    "What to do: start again"
                )
            ids, responses = list[int](), 0
            for i, count in self._database.run(sql, [before, *args, PAGE_GROUPS]):
                ids.append(i)
                responses += count
                if responses >= PAGE_RESPONSES:
                    break
            if ids:
                yield before, ids
            if len(ids) < PAGE_GROUPS and responses < PAGE_RESPONSES:
                return
            before = ids[-1]

    def counts(self) -> Counts:
        self._tables.check_once("structure")
        [(samples, tokens, behavior)] = self._database.run(
            "SELECT count(*), sum(knows_tokens), sum(knows_behavior) FROM samples WHERE redone = 0"
        )
        # Alone it reads only samples_draw, in its order.
        [(groups,)] = self._database.run("SELECT count(DISTINCT prompt_id) FROM samples WHERE redone = 0")
        counts: dict[str, dict[Any, int]] = {}
        for column in ("state", "source", "role"):
            sql = f"SELECT {column}, count(*) FROM samples WHERE redone = 0 GROUP BY {column}"
            counts[column] = dict(self._database.run(sql))
        [(pairs, ties)] = self._database.run(
            f"SELECT count(*), count(CASE WHEN NOT {queries.WON} THEN 1 END) FROM pairs"
        )
        return Counts(
            samples=samples,
            groups=groups,
            with_tokens=int(tokens or 0),
            with_behavior=int(behavior or 0),
            pairs=pairs - ties,
            ties=ties,
            sources={decode_text(k): n for k, n in counts["source"].items()},
            roles=counts["role"],
            **{name: counts["state"].get(i, 0) for i, name in enumerate(STATES)},
        )

    def scales(self) -> list[Scale]:
        """The range of the known rewards of each source that has any."""
        return [Scale(decode_text(source), *rewards) for source, *rewards in self._database.run(SCALES)]

    def meetings(self, **chosen: Unpack[Filter]) -> list[tuple[list[str], int, str]]:
        """The sets of sources that have scored responses to one prompt, of the chosen ones: how many prompts,
        and one of them."""
        clause, args = queries.build_condition(**chosen)
        rows = self._database.run(TOGETHER.format(where=clause), args)
        return [(loads(names), count, decode_text(prompt_id)) for names, count, prompt_id in rows]


def _to_group(row: tuple[Any, ...]) -> Group:
    prompt_id, *numbers = row
    return Group(decode_text(prompt_id), *numbers)


def _to_summary(row: tuple[Any, ...]) -> SampleSummary:
    i, prompt_id, scored, knows_behavior, sampling, knows_kept, episode, role = row
    truncated = "" if sampling is None else _truncation(sampling, knows_kept)
    known = bool(scored), bool(knows_behavior)
    return SampleSummary(i, decode_text(prompt_id), *known, truncated, decode_text(episode), role)


def _to_survey_row(row: tuple[Any, ...]) -> SurveyRow:
    values = dict(zip(SurveyRow._fields, row, strict=True))
    for name in ("prompt_id", "episode", "source", "response"):
        values[name] = decode_text(values[name])
    values["finish"] = _finish(values["finish"])
    for name in ("knows_behavior", "knows_tokens"):
        values[name] = bool(values[name])
    if values["length"] is not None:  # of the bits of `action`
        values["length"] = int.from_bytes(values["length"], "big").bit_count()
    return SurveyRow(**values)


def _finish(meta: Any) -> Any:
    """`meta["finish"]`; None where the text is damaged."""
    try:
        return loads(decode_text(meta)).get("finish") if meta != "{}" else None
    except (TypeError, ValueError, AttributeError):
        return None


@lru_cache(maxsize=1024)
def _truncation(sampling: str | bytes, knows_kept: int) -> str:
    """`Sample.truncation`, from the JSON text of `sampling` and whether there are kept sets.

    Empty where the text is damaged: the row is refused when it is read.
    """
    try:
        return truncation(loads(decode_text(sampling)), recorded=bool(knows_kept))
    except (TypeError, ValueError):
        return ""
