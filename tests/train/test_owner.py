"""A trainer and a collector that share a store through its owner, which is killed while they work."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_elsewhere import check, start, wait_for_step, write_run

TOKEN = "a token of the tests"


def start_owner(folder: Path, port: int) -> subprocess.Popen[str]:
    """The owner, which answers at that port."""
    command = [sys.executable, "-m", "agro", "store", "serve", "served.db", "--port", str(port)]
    owner = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == f"serving http://127.0.0.1:{port}\n"
    return owner


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_the_run_goes_on_after_its_owner_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGRO_TOKEN", TOKEN)
    port, run = free_port(), tmp_path / "run"
    owner = start_owner(tmp_path, port)
    url = f"http://127.0.0.1:{port}"
    trainer = start(*write_run(tmp_path, data__store=url, source__lease_seconds=2.0), cwd=tmp_path)
    while not (run / "config.json").exists():
        assert trainer.poll() is None
    collector = start("collect", "run", cwd=tmp_path)
    wait_for_step(run, 3)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner = start_owner(tmp_path, port)
    assert trainer.wait(240) == 0, [p.read_text()[-800:] for p in tmp_path.glob("*.log")]
    assert collector.wait(60) == 0
    check(run, 8, tmp_path / "served.db")
    assert not (run / "store.db").exists()
    owner.send_signal(signal.SIGTERM)
    assert owner.wait(30) == 0
