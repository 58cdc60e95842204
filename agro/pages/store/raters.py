"""Fields of a log's records that explain its rewards, whatever the responses: users, tasks, graders."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from agro.logs.normalizing import Components, Statistics
from agro.store import Store

MOST = 20_000  # rewards that are looked at
LEAST = 0.05  # share of the variance that is worth a word
CLEAR = 4.0  # standard errors above chance
# What agro itself writes of a response.
OF_RESPONSES = ("finish", "index", "last_turn", "reward_parts", "thought")


@dataclass(frozen=True)
class Explaining:
    """A field, how many values it has in so many rewards, and the share of their variance between these."""

    field: str
    values: int
    rewards: int
    share: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explaining(store: Store) -> Explaining | None:
    """The field of `meta` that explains the most; None where none does clearly, and of rewards that are
    relative to a field already. A field has two rewards a value at least, on average."""
    by_field: dict[str, dict[Any, Statistics]] = {}
    for sample in islice(store.samples(scored=True), MOST):
        if "normalizer" in sample.meta:
            return None
        assert sample.reward is not None
        for field, value in sample.meta.items():
            if isinstance(value, str | int) and field not in OF_RESPONSES:
                by_field.setdefault(field, {}).setdefault(value, Statistics()).add(sample.reward)
    found = []
    for field, values in by_field.items():
        rewards = sum(each.count for each in values.values())
        components = Components.of(values.values())
        if 2 * len(values) <= rewards and components.surprise > CLEAR and components.share >= LEAST:
            found.append(Explaining(field, len(values), rewards, components.share))
    return max(found, key=lambda each: each.share, default=None)
