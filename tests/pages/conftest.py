"""Folders of a made-up run."""

import json

import pytest
from made_up_run import CONFIG, write_run


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "demo"
    write_run(folder)
    return folder


@pytest.fixture(scope="session")
def unchanged(tmp_path_factory):
    """The text of the page of the made-up run, to compare with that of changed ones."""
    from test_page import read

    folder = tmp_path_factory.mktemp("unchanged") / "demo"
    write_run(folder)
    return read(folder).text


@pytest.fixture
def bare_folder(tmp_path):
    """A run of which nothing was measured: its page has no figures, so it is written at once."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "sft"}\n')
    return tmp_path
