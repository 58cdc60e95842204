"""A store to import into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agro.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as store:
        yield store
