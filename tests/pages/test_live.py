"""A run's page while it trains: what the server answers, and that it changes with the metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from agro.errors import Refused
from agro.pages.local_server import LocalServer, behind_a_port
from agro.pages.run.live import LivePage, live_app, watch
from agro.runs.folder import STAGE


@pytest.fixture
def live(bare_folder: Path) -> LivePage:
    return LivePage(bare_folder)


@pytest.fixture
def url(live: LivePage) -> Iterator[str]:
    with behind_a_port(live_app(live)) as url:
        yield url


def ask(url: str, path: str = "/", **headers: str) -> tuple[int, str, str]:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers.get("ETag", "")


def test_the_page_follows_the_metrics(url: str, live: LivePage, bare_folder: Path) -> None:
    status, text, tag = ask(url)
    assert (status, "trained for 1 step" in text) == (200, True)
    assert ask(url, **{"If-None-Match": tag})[:2] == (304, "")
    with (bare_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "phase": "sft"}) + "\n")
    live._ready = 0.0  # without the rest that spares the training
    status, text, changed = ask(url, **{"If-None-Match": tag})
    assert (status, "trained for 2 steps" in text, changed != tag) == (200, True, True)


def test_before_the_first_step_it_says_so(url: str, live: LivePage, bare_folder: Path) -> None:
    os.remove(bare_folder / "metrics.jsonl")
    status, text, _ = ask(url)
    assert status == 200
    assert "There is nothing to show yet." in text
    assert "metrics.jsonl" in text
    (bare_folder / STAGE).write_text("sampling 3/64")
    live._ready = 0.0
    assert "The run has no step yet. Now: sampling 3/64." in ask(url)[1]


def test_only_this_machine_is_answered_and_only_the_page(url: str) -> None:
    """A page of another site that resolves its own name to 127.0.0.1 is refused."""
    assert ask(url, Host="example.org:80")[0] == 403
    assert ask(url, "/config.json")[0] == 404
    assert ask(url, "/../metrics.jsonl")[0] == 404


def test_what_cannot_be_served_is_refused(url: str, live: LivePage, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="expected a run folder"):
        watch(tmp_path / "missing", 0)
    for port in (int(url.rpartition(":")[2]), 70_000):
        with pytest.raises(Refused, match=f"--port {port}: .*use another one"):
            LocalServer(live_app(live), port)
