"""A store to import into. A test of a terminal uses `running` of tests/cli."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agro.store import Store

sys.path.append(str(Path(__file__).parents[1] / "cli"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as store:
        yield store
