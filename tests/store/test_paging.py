"""Results in pages: all rows once, nothing held between two pages, and pages of limited length."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from making import group, of_file, sample

from agro.errors import Refused
from agro.store import Pair, Store

GROUPS, SIZE = 300, 3  # more samples, groups and pairs than the pages of the tests have


@pytest.fixture
def store(store: Store) -> Store:
    fill(store)
    return store


def fill(store: Store) -> None:
    ids = store.append([s for k in range(GROUPS) for s in group(f"{k}>", [0.0, 1.0, None])])
    store.add_pairs([Pair(ids[k + 1], ids[k]) for k in range(0, GROUPS * SIZE, SIZE)])


RESULTS: dict[str, Callable[[Store], Iterator[Any]]] = {
    "samples": lambda store: store.samples(),
    "samples of ids": lambda store: store.samples(ids=range(1, GROUPS * SIZE + 1)),
    "pairs": lambda store: store.pairs(),
    "groups": lambda store: store.survey.each_group(),
    "rows of groups": lambda store: store.survey.each_group_rows(),
    "prompts": lambda store: store.survey.each_prompt(),
    "summaries": lambda store: store.survey.each_summary(),
}


@pytest.fixture
def small_pages(monkeypatch) -> None:
    for module in ("samples", "database", "survey"):
        for name, rows in (("PAGE_ROWS", 64), ("PAGE_ENTRIES", 64), ("PAGE_GROUPS", 32)):
            monkeypatch.setattr(f"agro.store.{module}.{name}", rows, raising=False)


@of_file
@pytest.mark.parametrize("name", RESULTS)
def test_nothing_is_held_between_two_pages(store: Store, small_pages: None, name: str) -> None:
    """A query that is open keeps SQLite from emptying the write-ahead log (busy is 1 then)."""
    items = RESULTS[name](store)
    assert len(list(islice(items, 1))) == 1
    with sqlite3.connect(store.tables.path, timeout=0.1) as other:
        other.execute("UPDATE commits SET step = step")
        other.commit()
        [(busy, _, _)] = other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert busy == 0
    store.append([sample("new>")])  # nor is the store locked against its own writes
    assert len(list(items)) >= GROUPS - 1


@pytest.mark.parametrize("name", RESULTS)
def test_pages_have_each_item_once(store: Store, request, name: str) -> None:
    in_large_pages = list(RESULTS[name](store))
    request.getfixturevalue("small_pages")
    assert list(RESULTS[name](store)) == in_large_pages
    assert len(in_large_pages) == (GROUPS * SIZE if "sam" in name or name == "summaries" else GROUPS)


def test_groups_are_whole_and_those_that_are_listed_at_once(store: Store, small_pages: None) -> None:
    assert sorted(store.survey.each_group(), key=repr) == sorted(store.groups(), key=repr)
    chosen = {"scored": True, "min_reward": 0.5}
    groups = list(store.survey.each_group(**chosen))
    assert [g.prompt_id for g in groups] == sorted(g.prompt_id for g in store.groups())
    assert {(g.size, g.scored, g.reward_mean) for g in groups} == {(1, 1, 1.0)}
    assert {len(rows) for rows in store.survey.each_group_rows()} == {SIZE}


@of_file
def test_a_page_ends_where_its_rows_are_long(store: Store, monkeypatch) -> None:
    ids = store.append([sample("long>", "x" * 1000) for _ in range(10)])
    monkeypatch.setattr("agro.store.database.PAGE_BYTES", 2500)
    pages = list(store.tables.sample_pages(ids=ids))
    assert [row[0] for page in pages for row in page] == ids
    assert [len(page) for page in pages] == [3, 3, 3, 1]  # 3 of 1000 characters are the first over 2500


def test_groups_that_were_erased_meanwhile_end_the_reading(path: Path, small_pages: None) -> None:
    with Store.open(path) as store:
        fill(store)
        groups = store.survey.each_group()
        *_, last = islice(groups, 32)  # a page
        store.imports.forget([s.id for s in store.samples(prompt_id=last.prompt_id)])
        with pytest.raises(Refused, match="start again"):
            list(groups)
