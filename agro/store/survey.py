"""An overview of a store in constant memory: counts, groups, and a summary of each sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple, Unpack

from agro.errors import Refused
from agro.io.strictjson import loads
from agro.store.database import PAGE_ENTRIES, PAGE_GROUPS, PAGE_RESPONSES, Database
from agro.store.sample_rows import SCORED, STATES, count_actions, decode_text, prompt_of
from agro.store.samples import WON, Filter, build_condition
from agro.types import Text, truncation


@dataclass(frozen=True)
class Group:
    """All responses to one prompt. The rows of an episode are one response, scored when all of them are."""

    prompt_id: str
    size: int  # responses
    scored: int  # responses with a reward
    reward_mean: float | None  # over those; None without any
    reward_min: float | None
    reward_max: float | None


@dataclass(frozen=True)
class Counts:
    """Counts of a store's rows by what is known about them; samples = scored + unscored + failed."""

    samples: int
    groups: int
    scored: int
    unscored: int
    failed: int  # the reward has an error instead of a value
    with_tokens: int
    with_behavior: int  # every action has its behavior log-prob
    pairs: int  # judgments with a winner
    ties: int  # judgments with equal votes
    sources: dict[str, int]
    roles: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class SampleSummary(NamedTuple):
    """What is known about a sample without reading it."""

    id: int
    prompt_id: str
    scored: bool
    knows_behavior: bool  # every action has its behavior log-prob
    truncation: str  # see `agro.types.Sample.truncation`
    episode: str | None
    role: str


class SurveyRow(NamedTuple):
    """The part of a group's row that a survey reads."""

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
    finish: Any  # see `agro.types.end_in`; None if the record has none
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


# An episode is one response, scored when all of its rows are.
GROUPS = f"""
SELECT prompt_id, count(*), count(CASE WHEN scored THEN 1 END), avg(reward), min(reward), max(reward) FROM (
  SELECT prompt_id, min(id) AS first, min(state) = {SCORED} AS scored,
    CASE WHEN min(state) = {SCORED} THEN min(reward) END AS reward
  FROM samples WHERE {{where}} GROUP BY prompt_id, episode, CASE WHEN episode IS NULL THEN id END
) AS responses GROUP BY prompt_id ORDER BY {{order}}
"""
# The groups after that of a sample, by prompt_id, each with one of its samples: the order of samples_draw.
AFTER_GROUP = "prompt_id > coalesce((SELECT prompt_id FROM samples WHERE id = ?), '')"
NEXT_GROUPS = f"""
SELECT min(id), count(*) FROM samples INDEXED BY samples_draw WHERE {AFTER_GROUP} AND {{where}}
GROUP BY prompt_id ORDER BY prompt_id LIMIT ?
"""
# The condition that a row belongs to a group after that of one sample, up to that of another one.
BETWEEN_GROUPS = f"{AFTER_GROUP} AND prompt_id <= (SELECT prompt_id FROM samples WHERE id = ?)"


class Survey:
    """An overview of a store, without the samples themselves."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def groups(self, **chosen: Unpack[Filter]) -> list[Group]:
        """The groups of the chosen samples, in the order of their first samples."""
        clause, args = build_condition(**chosen)
        rows = self._db.run(GROUPS.format(where=clause, order="min(first)"), args)
        return [Group(decode_text(prompt_id), *numbers) for prompt_id, *numbers in rows]

    def each_group(self, **chosen: Unpack[Filter]) -> Iterator[Group]:
        """The groups of the chosen samples by prompt_id, in constant memory."""
        clause, args = build_condition(**chosen)
        sql = GROUPS.format(where=f"{BETWEEN_GROUPS} AND {clause}", order="prompt_id")
        for cursor, ids in self._each_page(**chosen):
            for prompt_id, *numbers in self._db.run(sql, [cursor, ids[-1], *args]):
                yield Group(decode_text(prompt_id), *numbers)

    def each_group_rows(self) -> Iterator[list[SurveyRow]]:
        """The rows of each group, by prompt_id, without checking that they are as they were written."""
        self._db.check_once("structure")
        sql = (  # in the order of samples_draw, so that nothing is sorted
            "SELECT id, prompt_id, episode, reward, role, source, version, knows_behavior, knows_tokens, "
            f"action, meta, response FROM samples INDEXED BY samples_draw WHERE {BETWEEN_GROUPS} "
            "AND redone = 0 ORDER BY prompt_id"
        )
        for cursor, ids in self._each_page():
            rows = map(_to_survey_row, self._db.run(sql, [cursor, ids[-1]]))
            yield from (list(group) for _, group in groupby(rows, key=attrgetter("prompt_id")))

    def each_prompt(self) -> Iterator[tuple[str, Text]]:
        """The id and the prompt of each group."""
        sql = (
            "SELECT id, prompt_id, prompt, messages FROM samples WHERE id IN (SELECT value FROM json_each(?))"
        )
        for _, ids in self._each_page():
            rows = self._db.run(sql, [self._db.listed(ids)])
            prompts = {
                i: (decode_text(name), prompt_of((text, messages))) for i, name, text, messages in rows
            }
            yield from (prompts[i] for i in ids)

    def _each_page(self, **chosen: Unpack[Filter]) -> Iterator[tuple[int, list[int]]]:
        """Yield pages of groups by prompt_id: a sample of the group before it, and one of each of its groups.

        Raises `Refused` if the former was erased meanwhile.
        """
        clause, args = build_condition(**chosen)
        sql, previous = NEXT_GROUPS.format(where=clause), 0
        while True:
            if self._db.run("SELECT 1 FROM samples WHERE id = ? AND prompt_id = ''", [previous]):
                raise Refused(
                    f"{self._db.path}: samples were replaced or forgotten while the store was read. "
                    "What to do: start again"
                )
            ids, responses = list[int](), 0
            for i, count in self._db.run(sql, [previous, *args, PAGE_GROUPS]):
                ids.append(i)
                responses += count
                if responses >= PAGE_RESPONSES:
                    break
            if ids:
                yield previous, ids
            if len(ids) < PAGE_GROUPS and responses < PAGE_RESPONSES:
                return
            previous = ids[-1]

    def summaries(self, **chosen: Unpack[Filter]) -> list[SampleSummary]:
        """A summary of each of the chosen samples, without reading them."""
        return list(self.each_summary(**chosen))

    def each_summary(self, **chosen: Unpack[Filter]) -> Iterator[SampleSummary]:
        """Yield these summaries, in constant memory."""
        clause, args = build_condition(**chosen)
        sql = (
            f"SELECT id, prompt_id, state = {SCORED}, knows_behavior, sampling, knows_kept, episode, "
            f"role FROM samples WHERE {clause} AND id > ? ORDER BY id"
        )
        for row in chain.from_iterable(self._db.pages(sql, args, rows=PAGE_ENTRIES)):
            i, prompt_id, scored, behavior, sampling, with_kept, episode, role = row
            cut = "" if sampling is None else _truncation(sampling, with_kept)
            flags = bool(scored), bool(behavior)
            yield SampleSummary(i, decode_text(prompt_id), *flags, cut, decode_text(episode), role)

    def counts(self) -> Counts:
        """The numbers of rows, by what is known about them."""
        self._db.check_once("structure")
        run = self._db.run
        [(samples, tokens, behavior)] = run(
            "SELECT count(*), sum(knows_tokens), sum(knows_behavior) FROM samples WHERE redone = 0"
        )
        # As its own query, it reads only samples_draw, in its order.
        [(groups,)] = run("SELECT count(DISTINCT prompt_id) FROM samples WHERE redone = 0")
        counts: dict[str, dict[Any, int]] = {}
        for column in ("state", "source", "role"):
            rows = run(f"SELECT {column}, count(*) FROM samples WHERE redone = 0 GROUP BY {column}")
            counts[column] = dict(rows)
        [(pairs, ties)] = run(f"SELECT count(*), count(CASE WHEN NOT {WON} THEN 1 END) FROM pairs")
        return Counts(
            samples=samples,
            groups=groups,
            with_tokens=int(tokens or 0),
            with_behavior=int(behavior or 0),
            pairs=pairs - ties,
            ties=ties,
            sources={decode_text(source): n for source, n in counts["source"].items()},
            roles=counts["role"],
            **{name: counts["state"].get(i, 0) for i, name in enumerate(STATES)},
        )

    def scales(self) -> list[Scale]:
        """The range of the known rewards of each source with any."""
        rows = self._db.run(
            "SELECT source, min(reward), max(reward) FROM samples "
            "WHERE prompt_id <> '' AND redone = 0 AND reward IS NOT NULL GROUP BY source"
        )
        return [Scale(decode_text(source), *rewards) for source, *rewards in rows]

    def spread_of_rewards(self) -> tuple[float, float] | None:
        """The lowest and the highest known reward."""
        scales = self.scales()
        return (min(s.lowest for s in scales), max(s.highest for s in scales)) if scales else None

    def meetings(self, **chosen: Unpack[Filter]) -> list[tuple[list[str], int, str]]:
        """The sets of sources with scored responses to the same prompt, among the chosen ones: each with the
        number of prompts, and one of them."""
        clause, args = build_condition(**chosen)
        rows = self._db.run(
            f"""
            SELECT names, count(*), min(prompt_id) FROM (
              SELECT prompt_id, json_group_array(DISTINCT CAST(source AS TEXT)) AS names
              FROM samples WHERE {clause} AND reward IS NOT NULL
              GROUP BY prompt_id HAVING min(source) <> max(source)
            ) AS sets GROUP BY names
            """,
            args,
        )
        return [(loads(names), count, decode_text(prompt_id)) for names, count, prompt_id in rows]


def _to_survey_row(row: tuple[Any, ...]) -> SurveyRow:
    i, prompt_id, episode, reward, role, source, version, behavior, tokens, action, meta, response = row
    try:
        finish = loads(decode_text(meta)).get("finish") if meta != "{}" else None
    except (TypeError, ValueError, AttributeError):
        finish = None  # the text is damaged
    return SurveyRow(
        i,
        decode_text(prompt_id),
        decode_text(episode),
        reward,
        role,
        decode_text(source),
        version,
        bool(behavior),
        bool(tokens),
        count_actions(action),
        finish,
        decode_text(response),
    )


@lru_cache(maxsize=1024)
def _truncation(sampling: str | bytes, knows_kept: int) -> str:
    """`Sample.truncation`, from the JSON text of `sampling` and whether there are kept sets.

    Empty if the text is damaged: the row is refused when it is read.
    """
    try:
        return truncation(loads(decode_text(sampling)), recorded=bool(knows_kept))
    except (TypeError, ValueError):
        return ""


def are_repeats(responses: Iterable[str | bytes]) -> list[bool]:
    """Whether each of the responses of a group, in the order of their ids, equals an earlier one."""
    seen = set[str | bytes]()
    repeats = []
    for response in responses:
        repeats.append(response in seen)
        seen.add(response)
    return repeats
