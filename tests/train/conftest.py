from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _without_report(request, monkeypatch) -> None:
    """Most runs here are of training; drawing their figures would take half of the time."""
    if "report" not in request.keywords:
        monkeypatch.setattr("agro.api.reporting_trainer.report", lambda folder: folder)
