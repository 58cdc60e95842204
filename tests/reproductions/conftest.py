from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the reproductions aren't installed


@pytest.fixture(autouse=True)
def _without_report(monkeypatch) -> None:
    """The page of each run would take half of the time."""
    monkeypatch.setattr("agro.train.saving.report", lambda folder: folder)
