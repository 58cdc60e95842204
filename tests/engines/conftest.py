"""A model for trainer and servers, and what a test opens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from stand_in import NEW

from agro.config import PolicyConfig
from agro.models.policy import Policy
from agro.rollout.engines import connection


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.001)


@pytest.fixture
def start(tmp_path: Path) -> str:
    """The folder of a model, whose output layer is tied to the embedding."""
    Policy.load(PolicyConfig(new=NEW), seed=0).save(tmp_path / "start")
    return str(tmp_path / "start")


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
