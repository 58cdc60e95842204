"""Processes of `agro serve`: killed (SIGKILL) while clients ask, what was answered is in the store, each call
once; and they follow the weights of a loop."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress

import forked
import httpx
import pytest
import torch
from asking import HEADERS, TOKEN, ask, stored
from processes import until
from safetensors.torch import load_file, save_file

from agro.api.loop import Loop, Turn
from agro.cli import serve_command
from agro.cli.serve_command import _newest
from agro.config import RunConfig
from agro.door import app
from agro.errors import Refused
from agro.store.shared import LocalFolder
from agro.train.publications import Publications, PublishedWeights

CLIENTS = 8


def started(folder, store) -> tuple[forked.Process, str]:
    """The process, and the URL that it prints."""
    options = ["--store", str(store), "--port", "0", "--batch", "4"]
    said = store.with_name(f"stdout-{time.monotonic_ns()}")
    errors = said.with_suffix(".errors")
    process = forked.Process(
        [sys.executable, "-m", "agro", "serve", str(folder), *options],
        stdout=said,
        stderr=errors,
        env={**os.environ, "AGRO_TOKEN": TOKEN},
    )
    deadline = time.monotonic() + 60
    while not (said.exists() and said.read_text().endswith("\n")):
        assert process.poll() is None, errors.read_text()
        if time.monotonic() > deadline:
            process.send_signal(signal.SIGKILL)
            raise AssertionError("it printed no URL, or doesn't flush it")
        time.sleep(0.02)
    line = said.read_text()
    assert line.startswith("serving http://127.0.0.1:"), errors.read_text()
    return process, line.split()[1]


def test_what_was_answered_is_stored_once(engine, tmp_path) -> None:
    engine.policy.save(tmp_path / "model")
    answered: list[str] = []
    ended = threading.Event()

    def client(number: int, url: str) -> None:
        with suppress(httpx.HTTPError), httpx.Client(timeout=30) as http:
            while not ended.is_set():
                body = {"model": "m", "messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 8}
                reply = http.post(f"{url}/v1/chat/completions", json=body, headers=HEADERS)
                answered.append(reply.raise_for_status().json()["id"].removeprefix("chatcmpl-"))

    for _ in range(2):
        process, url = started(tmp_path / "model", tmp_path / "s.db")
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(client, number, url) for number in range(CLIENTS)]
            before, deadline = len(answered), time.monotonic() + 60
            while len(answered) < before + 40 and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
            for each in running:
                each.result()
    calls = Counter(call for sample in stored(tmp_path) for call in sample.meta["calls"])
    assert len(answered) >= 80
    assert set(answered) <= set(calls)
    assert set(calls.values()) == {1}
    assert len(calls) - len(answered) <= 2 * CLIENTS  # were stored, and their answers cut off


def test_it_follows_a_loop_to_the_next_model_and_back(engine, tmp_path) -> None:
    folder = tmp_path / "s.loop"
    for name in (tmp_path / "model", folder / "1" / "model"):
        engine.policy.save(name)
    loop = Loop(str(tmp_path / "s.db"), str(tmp_path / "model"), None, [], print)
    with loop._edited() as record:
        record.turns.append(Turn(number=1, start=0, rewarded=9, recipe="log", overrides=[], version=30))
    process, url = started(folder, tmp_path / "s.db")

    def version() -> int | None:
        ask(url, max_tokens=2)
        *_, sample = stored(tmp_path)
        assert sample.source == str(folder)
        return sample.version if isinstance(sample.version, int) else None  # in its midst others came

    with ExitStack() as ending:
        ending.callback(process.wait)
        ending.callback(process.send_signal, signal.SIGTERM)
        assert version() == -1  # no run of agro's made the first model
        with loop._edited() as record:
            record.served.append(1)
        until(lambda: version() == 30)
        loop.roll_back()
        until(lambda: version() == -1)


def test_another_model_that_policy_names_stays(engine, tmp_path, monkeypatch) -> None:
    for name in ("model", "other"):
        engine.policy.save(tmp_path / name)
    tensors = load_file(tmp_path / "other/model.safetensors")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(zeros, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    loop = Loop(str(tmp_path / "s.db"), str(tmp_path / "model"), None, [], print)
    given = []

    def opened(engine, size, keeping, source, seconds, newest):
        given.append((engine.policy.model.lm_head.weight.sum().item(), engine.version, newest))
        return nullcontext()

    monkeypatch.setattr(app, "opened", opened)
    monkeypatch.setattr(serve_command, "_run", lambda *args: None)
    serve_command.serve(str(loop.folder), policy=[f"model={tmp_path / 'other'}"])
    assert given == [(0.0, -1, None)]


def test_the_weights_that_a_run_publishes_are_served_with_their_versions(engine, tmp_path) -> None:
    config = RunConfig.load("fresh", ["policy.model=m", "data.prompts=p", "source.kind=elsewhere"])
    record = {**config.record(), "run": "r", "data": {**config.record()["data"], "store": "s.db"}}
    (tmp_path / "metrics.jsonl").touch()
    publications = Publications(LocalFolder(tmp_path))
    publications.begin(record, [])
    newest = _newest(str(tmp_path))
    with pytest.raises(Refused, match="hasn't published weights yet"):
        newest()
    for step in (5, 6):
        publications.publish(PublishedWeights(step, "", step), engine.policy.save)
        version, opening = newest()
        with opening as folder:
            assert (folder / "model.safetensors").is_file()
            assert (folder.name, version) == (f"v{step:08d}", step)
