"""The tier of each test: the quickest of `make check`, `make test` and `make nightly` that runs it.

CONTRIBUTING.md says what each of them promises. A file has the tier of its folder here, or its own if it is
listed itself. A marker `test` or `nightly` puts a test, or some of its cases, into a later tier.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
TIERS = ("check", "test", "nightly")
PLACES = {
    "check": (
        *("evaluate", "formats", "grade", "io", "objectives", "rewards", "store", "types"),
        *("cli/test_cli_docs.py", "cli/test_objectives_command.py", "docs/test_words.py"),
        *("train/test_schedule.py", "train/test_secrets.py", "train/test_signal.py"),
        *("place/test_placement.py", "test_config.py", "test_config_docs.py", "test_methods_docs.py"),
        *("test_rooms.py", "test_tiers.py"),
    ),
    "test": (
        *(
            "api",
            "cli",
            "docs",
            "door",
            "engines",
            "envs",
            "examples",
            "integrations",
            "models",
            "pages",
            "place",
        ),
        *("papers", "proof", "rollout", "train"),
        *("formats/test_any_value.py", "formats/test_formats_page.py", "objectives/test_reads.py"),
        *("grade/test_alone.py", "grade/test_code.py", "grade/test_hostile.py", "grade/test_math.py"),
        *("rewards/test_function.py", "rewards/test_judge.py"),
        *("rewards/test_model.py",),
        *("store/test_candidates.py", "store/test_damage.py", "store/test_exchange.py"),
        *("store/test_fuzz.py", "store/test_postgres.py", "store/test_processes.py"),
        *("store/test_sharing.py",),
        *("test_install_hints.py", "test_recipes.py", "test_size.py"),
    ),
    "nightly": (
        *("vllm_server", "reproductions", "docs/test_site.py", "docs/test_wheel.py", "examples/test_demo.py"),
        *("train/test_torture.py",),
    ),
}
TIER_OF = {place: tier for tier, places in PLACES.items() for place in places}


@cache  # it is asked once a test
def tier_of_file(path: Path) -> str | None:
    """None if neither the file nor its folder is listed."""
    if not path.is_relative_to(TESTS):
        return None
    file = path.relative_to(TESTS)
    listed = [place.as_posix() for place in (file, *file.parents) if place.as_posix() in TIER_OF]
    return TIER_OF[listed[0]] if listed else None


def tier_of(item: pytest.Item) -> str:
    """The latest of its file's and its markers'."""
    of_file = tier_of_file(item.path)
    if of_file is None:
        raise pytest.UsageError(
            f"{item.path}: expected a tier ({', '.join(TIERS)}) of this file or its folder; "
            "got none. Add it to PLACES in tests/tiers.py."
        )
    marked = [tier for tier in TIERS if item.get_closest_marker(tier)]
    return max([of_file, *marked], key=TIERS.index)


def first_of_each(kind: Callable[[Any], Hashable], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`: the first of each kind has its file's tier, the others are nightly."""
    seen: set[Hashable] = set()
    marked = []
    for case in cases:
        later = [pytest.mark.nightly] if kind(case) in seen else []
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=later))
        seen.add(kind(case))
    return marked


def some(cases: Iterable[Any], *, every: int) -> list[Any]:
    """Cases for `parametrize`: each `every`-th has its file's tier, the others are nightly.

    For cases of which each guards the same promise.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.nightly] if number % every else [],
        )
        for number, case in enumerate(cases)
    ]
