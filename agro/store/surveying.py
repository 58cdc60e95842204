"""Reading all responses of a store, group by group, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from agro.store.rows import of_text
from agro.store.samples import Samples
from agro.strictjson import loads
from agro.types import Text


class Seen(NamedTuple):
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
    finish: str | None  # "length" where it was truncated; None where the record doesn't say
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


# samples_draw has the rows in this order, so that nothing is sorted. Its prompt_id comes first.
BY_GROUP = """
SELECT id, prompt_id, episode, reward, role, source, version, knows_behavior, knows_tokens, action,
  CASE WHEN json_valid(CAST(meta AS TEXT)) THEN json_extract(CAST(meta AS TEXT), '$.finish') END, response
FROM samples INDEXED BY samples_draw WHERE prompt_id <> '' AND NOT redone ORDER BY prompt_id
"""
PROMPTS = """
SELECT prompt, messages FROM samples WHERE id IN (
  SELECT min(id) FROM samples INDEXED BY samples_draw WHERE prompt_id <> '' AND NOT redone GROUP BY prompt_id
)
"""
SCALES = """
SELECT source, min(reward), max(reward) FROM samples
WHERE prompt_id <> '' AND NOT redone AND reward IS NOT NULL GROUP BY source
"""
# The sets of sources that scored responses of one group have.
TOGETHER = """
SELECT names, count(*), min(prompt_id) FROM (
  SELECT prompt_id, json_group_array(DISTINCT CAST(source AS TEXT)) AS names
  FROM samples WHERE {where} AND reward IS NOT NULL GROUP BY prompt_id HAVING min(source) <> max(source)
) GROUP BY names
"""


class Surveying(Samples):
    """The part of a store that describes all that it has."""

    def by_group(self) -> Iterator[list[Seen]]:
        """The rows of each group, without checking that they are as they were written."""
        self.check_once("structure")
        for _, rows in groupby(self._each(BY_GROUP), key=itemgetter(1)):
            yield [_seen(row) for row in rows]

    def prompts(self) -> Iterator[Text]:
        """The prompt of each group."""
        for prompt, messages in self._each(PROMPTS):
            yield of_text(prompt) if messages is None else loads(of_text(messages))

    def scales(self) -> list[Scale]:
        """The range of the known rewards of each source that has any."""
        return [Scale(of_text(source), *rewards) for source, *rewards in self._run(SCALES)]

    def meetings(self, clause: str, args: Sequence[Any]) -> list[tuple[list[str], int, str]]:
        """The sets of sources that have scored responses to one prompt: how many prompts, and one of them."""
        rows = self._run(TOGETHER.format(where=clause), args)
        return [(loads(names), count, of_text(prompt_id)) for names, count, prompt_id in rows]

    def spread_of_rewards(self) -> tuple[float, float] | None:
        """The lowest and the highest known reward."""
        scales = self.scales()
        if not scales:
            return None
        return min(s.lowest for s in scales), max(s.highest for s in scales)


def _seen(row: tuple[Any, ...]) -> Seen:
    i, prompt_id, episode, reward, role, source, version, behavior, tokens, action, finish, response = row
    length = None if action is None else int.from_bytes(action, "big").bit_count()
    return Seen(
        i,
        of_text(prompt_id),
        of_text(episode),
        reward,
        role,
        of_text(source),
        version,
        bool(behavior),
        bool(tokens),
        length,
        finish,
        of_text(response),
    )
