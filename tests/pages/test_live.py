"""A run's page while it trains: what the server answers, and that it changes with the metrics."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from agro.errors import Refused
from agro.pages.run.live import PageServer
from agro.runs.folder import STAGE


@pytest.fixture
def server(bare_folder: Path) -> Iterator[PageServer]:
    with PageServer(bare_folder, 0) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def ask(server: PageServer, path: str = "/", **headers: str) -> tuple[int, str, str]:
    connection = HTTPConnection(*server.server_address, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers.get("ETag", "")


def test_the_page_follows_the_metrics(server: PageServer, bare_folder: Path) -> None:
    assert server.address.startswith("http://127.0.0.1:")
    status, text, tag = ask(server)
    assert (status, "trained for 1 step" in text) == (200, True)
    assert ask(server, **{"If-None-Match": tag})[:2] == (304, "")
    with (bare_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "phase": "sft"}) + "\n")
    server.live._ready = 0.0  # without the rest that spares the training
    status, text, changed = ask(server, **{"If-None-Match": tag})
    assert (status, "trained for 2 steps" in text, changed != tag) == (200, True, True)


def test_before_the_first_step_it_says_so(server: PageServer, bare_folder: Path) -> None:
    os.remove(bare_folder / "metrics.jsonl")
    status, text, _ = ask(server)
    assert status == 200
    assert "There is nothing to show yet." in text
    assert "metrics.jsonl" in text
    (bare_folder / STAGE).write_text("sampling 3/64")
    server.live._ready = 0.0
    assert "The run has no step yet. Now: sampling 3/64." in ask(server)[1]


def test_only_this_machine_is_answered_and_only_the_page(server: PageServer) -> None:
    """A page of another site that resolves its own name to 127.0.0.1 is refused."""
    assert ask(server, Host="example.org:80")[0] == 403
    assert ask(server, "/config.json")[0] == 404
    assert ask(server, "/../metrics.jsonl")[0] == 404


def test_what_cannot_be_served_is_refused(server: PageServer, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="expected a run folder"):
        PageServer(tmp_path / "missing", 0)
    with pytest.raises(Refused, match="give another one"):
        PageServer(tmp_path, server.server_address[1])
    with pytest.raises(Refused, match="give another one"):
        PageServer(tmp_path, 70_000)
