"""Every test has a tier, and what is listed exists."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import PLACES, TESTS, TIERS, first_of_each, tier_of, tier_of_file


class Item(SimpleNamespace):
    path: Path
    markers: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def tier(path: Path, *markers: str) -> str:
    item: Any = Item(path=path, markers=markers)
    return tier_of(item)


def test_every_file_has_a_tier_and_every_place_is_there() -> None:
    assert {path for path in TESTS.rglob("test_*.py") if tier_of_file(path) is None} == set()
    places = [place for tier in TIERS for place in PLACES[tier]]
    assert [place for place in places if not (TESTS / place).exists()] == []
    assert [place for place, times in Counter(places).items() if times > 1] == []


def test_a_file_goes_before_its_folder_and_a_marker_puts_a_case_later() -> None:
    assert tier(TESTS / "formats/test_formats.py") == "check"
    assert tier(TESTS / "formats/test_any_value.py") == "test"
    assert tier(TESTS / "formats/test_any_value.py", "check") == "test"
    assert tier(TESTS / "formats/test_formats.py", "nightly") == "nightly"


@pytest.mark.parametrize(
    "path", [TESTS / "test_nowhere.py", TESTS / "nowhere/test_x.py", TESTS.parent / "test_x.py"]
)
def test_a_file_without_a_tier_is_refused(path: Path) -> None:
    with pytest.raises(pytest.UsageError, match=rf"{path.name}: expected a tier .* got none"):
        tier(path, "nightly")


def test_the_first_case_of_each_kind_stays() -> None:
    marked = first_of_each(len, ["a", "b", "cc", "dd", "e"])
    later = ["nightly"]
    assert [[m.name for m in case.marks] for case in marked] == [[], later, [], later, later]
    assert [case.values for case in first_of_each(sum, [(1, 2)])] == [(1, 2)]
