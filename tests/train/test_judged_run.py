"""A run whose judge's server dies in the middle: unknown rewards with their cause, then the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tiny_runs import metrics, tiny

from agro.api.reporting_trainer import Trainer
from agro.errors import Refused
from agro.rewards import judge
from agro.store import Store


class Handler(BaseHTTPRequestHandler):
    """Scores by the share of 7s. After `alive` replies it closes connections without one."""

    alive = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if Handler.alive <= 0:
            self.close_connection = True
            return
        Handler.alive -= 1
        response = json.loads(body["messages"][1]["content"])["response"]
        score = 10 * response.count("7") / max(1, len(response))
        reply = {"choices": [{"message": {"content": json.dumps({"score": score})}, "finish_reason": "stop"}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *args):
        pass


@contextmanager
def served(alive: int) -> Iterator[str]:
    Handler.alive = alive
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def test_a_judge_that_dies_leaves_rewards_unknown_and_the_run_goes_on(tmp_path: Path, monkeypatch) -> None:
    """12 responses a step: the first step is judged, and 2 of the second. More than half are unknown: the run
    stops with the cause. When the server is back it is resumed, and ends."""
    monkeypatch.setitem(judge.__globals__["JudgeReward"].score.__globals__, "FIRST_PAUSE", 0.001)
    with served(14) as url:
        options = {"url": url, "model": "m", "retries": 1}
        config = tiny(tmp_path, reward={"name": "judge", "options": options}, train__steps=3)
        with pytest.raises(Refused, match=r"10 of 12 .* could not be scored"):
            Trainer(config, tmp_path / "run").run()
        with Store.open(tmp_path / "run/store.db", read_only=True) as store:
            samples = list(store.samples(redone=True))
        unknown = [s for s in samples if s.reward is None]
        assert (len(samples), len(unknown)) == (24, 10)
        assert all("judge: http://127.0.0.1" in s.meta["reward_error"] for s in unknown)
        Handler.alive = 10**6
        Trainer(config, tmp_path / "run", resume=True).run()
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if row["step"]] == [1, 2, 3]
    with Store.open(tmp_path / "run/store.db", read_only=True) as store:
        last = list(store.samples())
    assert len(last) == 36
    assert all(s.reward == pytest.approx(10 * s.response.count("7") / max(1, len(s.response))) for s in last)


def test_a_few_unknown_rewards_do_not_stop_a_run(tmp_path: Path, monkeypatch) -> None:
    """2 of the last step's 12 are unknown, and dropped, not 0."""
    monkeypatch.setitem(judge.__globals__["JudgeReward"].score.__globals__, "FIRST_PAUSE", 0.001)
    with served(22) as url:
        options = {"url": url, "model": "m", "retries": 0}
        config = tiny(tmp_path, reward={"name": "judge", "options": options}, train__steps=2)
        folder = Trainer(config, tmp_path / "run").run()
    last = metrics(folder)[-1]
    assert last["rewards_failed"] == 2
    assert last["dropped_reasons"]["no reward"] == 2
