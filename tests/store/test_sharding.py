"""Stores that are one together: the order of groups, who may be one of them, a draw that was cut off."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from making import group, sample

from agro.config import DataConfig
from agro.config.data import Order
from agro.errors import Refused
from agro.store import At, DrawRule, Pair, Selection, Store
from agro.store.location import Shards

AT = At("r", 1, 0, 3)


def shards_in(folder: Path, count: int = 3) -> Shards:
    return Shards(tuple(folder / f"{number}.db" for number in range(count)))


@pytest.mark.parametrize("order", get_args(Order))
def test_many_groups_are_picked_as_from_one_store(tmp_path: Path, order: Order) -> None:
    """400 groups: more than the 160 below which "uniform" sorts all of them. Five steps, each a use."""
    rule = DrawRule(8, DataConfig(order=order, max_uses=2), min_group=2)
    with Store.open(tmp_path / "one.db") as one, Store.open(shards_in(tmp_path)) as several:
        for store in (one, several):
            for version in range(4):
                for i in range(100):
                    samples = group(f"{version} {i}", [0.0, 1.0], role="policy", version=version)
                    store.append(samples, run="r", step=version)
        for step in range(5, 10):
            at = At("r", step, 7, 3)
            picked = one.draws.pick(rule, at, {"taken"})
            assert several.draws.pick(rule, at, {"taken"}) == picked
            assert several.draw(rule, at) == one.draw(rule, at)


def test_each_store_has_its_place(tmp_path: Path) -> None:
    shards = shards_in(tmp_path)
    with Store.open(shards) as store:
        store.append(group("a", [0.0]) + group("b", [1.0]))
    for locations, message in (
        (shards.locations[::-1], "expected store 1 of 3, got store 3 of 3"),
        (shards.locations[:2], "expected store 1 of 2, got store 1 of 3"),
    ):
        with pytest.raises(Refused, match=message):
            Store.open(Shards(locations), read_only=True)
    with (
        Store.open(shards.locations[1]) as alone,
        pytest.raises(Refused, match="store 2 of 3, and samples are added"),
    ):
        alone.append([sample("c")])
    with Store.open(tmp_path / "full.db") as full:
        full.append([sample("c")])
    with pytest.raises(Refused, match="got one with samples"):
        Store.open(Shards((tmp_path / "full.db", tmp_path / "new.db")))
    with pytest.raises(Refused, match="expected different stores"):
        Shards((tmp_path / "full.db", tmp_path / "full.db"))


def test_a_draw_that_was_cut_off_is_completed_as_it_began(tmp_path: Path) -> None:
    """Only the first of the stores that draw has recorded its part, and other groups were added since."""
    with Store.open(shards_in(tmp_path)) as store:
        store.append([s for i in range(12) for s in group(f"p{i}", [0.0, 1.0])])
        rule = DrawRule(6, min_group=2)
        picked = store.draws.pick(rule, AT)
        stores = store.draws._group
        parts = stores.by_prompt(picked, str)
        first = min(parts)
        assert len(parts) > 1
        stores.first.call("shard.agree", "r", 1, picked, [])
        stores.shards[first].call("draws.draw_picked", [Selection(rule, parts[first])], AT)
        store.append([s for i in range(12, 40) for s in group(f"p{i}", [0.0, 1.0])])
        drawn = store.draws.draw_picked([Selection(rule, picked)], AT)
        assert list(dict.fromkeys(s.prompt_id for s in drawn.samples)) == picked
        assert store.draws.draw_picked([Selection(rule, picked)], AT) == drawn
        assert len(store.draws.drawn("r")) == len(drawn.samples) == 12


def test_a_judgment_of_two_prompts_is_refused(tmp_path: Path) -> None:
    with Store.open(shards_in(tmp_path)) as store:
        ids = store.append([sample(f"p{i}") for i in range(9)])
        assert ids == list(range(1, 10))  # given by the first, for all of them
        parts = list(store.experience._group.by_id(ids).values())
        with pytest.raises(Refused, match="expected responses to one prompt"):
            store.add_pairs([Pair(parts[0][0], parts[1][0])])
