"""`agro serve` is killed (SIGKILL) while clients ask: what was answered is in the store, each call once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx

from agro.store import Store

TOKEN = "the-token-of-tests"
CLIENTS = 8


def started(folder, store, port: int = 0) -> tuple[subprocess.Popen, str]:
    options = ["--store", str(store), "--port", str(port), "--batch", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "agro", "serve", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "AGRO_TOKEN": TOKEN},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving http://127.0.0.1:"), process.stderr and process.stderr.read()
    return process, line.split()[1]


def test_what_was_answered_is_stored_once(engine, tmp_path) -> None:
    engine.policy.save(tmp_path / "model")
    answered: list[str] = []
    ended = threading.Event()

    def client(number: int, url: str) -> None:
        with suppress(httpx.HTTPError), httpx.Client(timeout=30) as http:
            while not ended.is_set():
                body = {"model": "m", "messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 8}
                headers = {"authorization": f"Bearer {TOKEN}"}
                reply = http.post(f"{url}/v1/chat/completions", json=body, headers=headers)
                answered.append(reply.raise_for_status().json()["id"].removeprefix("chatcmpl-"))

    for _ in range(2):
        process, url = started(tmp_path / "model", tmp_path / "s.db")
        with process, ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(client, number, url) for number in range(CLIENTS)]
            before, deadline = len(answered), time.monotonic() + 60
            while len(answered) < before + 40 and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            for each in running:
                each.result()
    with Store.open(tmp_path / "s.db") as store:
        stored = Counter(call for sample in store.samples() for call in sample.meta["calls"])
    assert len(answered) >= 80
    assert set(answered) <= set(stored)
    assert set(stored.values()) == {1}
    assert len(stored) - len(answered) <= 2 * CLIENTS  # were stored, and their answers cut off
