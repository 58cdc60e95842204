"""Tests of the sources of papers use the tiny run of tests/train."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "train"))


@pytest.fixture(autouse=True, scope="module")
def _without_report() -> Iterator[None]:
    """Runs here are of training; drawing their figures would take half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agro.api.reporting_trainer.report", lambda folder: folder)
        yield
