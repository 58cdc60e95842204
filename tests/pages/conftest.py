"""Folders of a made-up run."""

import json

import pytest
from browser import Browser, find
from made_up_run import CONFIG, write_run


@pytest.fixture
def run_folder(tmp_path):
    return write_run(tmp_path / "demo")


@pytest.fixture
def bare_folder(tmp_path):
    """A run of which nothing was measured: its page has no figures, so it is written at once."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "sft"}\n')
    return tmp_path


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium."""
    if find() is None:
        pytest.skip("no Chromium in PATH (Debian: apt-get install chromium)")
    found = Browser(find())
    yield found
    found.close()
