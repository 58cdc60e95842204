"""Folders of a made-up run."""

import json

import pytest
from made_up_run import CONFIG, write_run


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "demo"
    write_run(folder)
    return folder


@pytest.fixture
def bare_folder(tmp_path):
    """A run of which nothing was measured: its page has no figures, so it is written at once."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "sft"}\n')
    return tmp_path
