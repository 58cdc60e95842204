"""Tests of the sources of papers use the tiny run of tests/train."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "train"))


@pytest.fixture(autouse=True)
def _without_report(monkeypatch) -> None:
    """Runs here are of training; drawing their figures would take half of the time."""
    monkeypatch.setattr("agro.api.reporting_trainer.report", lambda folder: folder)
