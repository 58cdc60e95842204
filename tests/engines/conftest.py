"""A model for trainer and servers, and what a test opens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from stand_in import NEW

from agro.config import PolicyConfig
from agro.models.policy import Policy
from agro.rollout.engines import connection


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.001)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model, whose output layer is tied to the embedding."""
    folder = tmp_path_factory.mktemp("model") / "start"
    Policy.load(PolicyConfig(new=NEW), seed=0).save(folder)
    return str(folder)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
