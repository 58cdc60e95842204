"""Rewards in a run: of several parts, which GDPO (arXiv 2601.05242) normalizes, and of a judge whose server
dies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from tiny_runs import metrics, tiny, write_prompts

from agro import Batch
from agro.api.reporting_trainer import Trainer
from agro.config import RewardPart, RunConfig
from agro.errors import Refused
from agro.pages.run.page import page
from agro.rewards import judge
from agro.runs.rundata import load_run
from agro.store import Store
from agro.train.collate import with_reward_parts
from agro.train.phases import Phase
from agro.train.trainable import check_store
from agro.train.trainer import BaseTrainer
from agro.types import Sample

PARTS = """
def sevens(completions):
    return [text.count("7") / 3 for text in completions]
def sober(completions):
    \"\"\"Best at one 7.\"\"\"
    return [1 - abs(text.count("7") - 1) / 2 for text in completions]
"""


def run(folder: Path, **changes) -> Path:
    (folder / "parts.py").write_text(PARTS)
    sevens = {"name": f"{folder / 'parts.py'}:sevens", "label": "sevens"}
    sober = {"name": f"{folder / 'parts.py'}:sober", "label": "sober"} | changes.pop("sober")
    reward = {"functions": [sevens, sober], **changes.pop("reward", {})}
    held = write_prompts(folder / "held.jsonl", range(60, 80))
    config = tiny(
        folder,
        reward=reward,
        data__eval_prompts=held,
        sampler__n=4,
        train__lr=2e-2,
        evaluate__every=5,
        **changes,
    )
    return Trainer(config, folder / "run").run()


def test_a_reward_that_is_optimized_too_far_is_said(tmp_path: Path) -> None:
    """All 7s earn 1 and are sober 0; a sober response has one of them. The policy passes the peak."""
    folder = run(tmp_path, sober={"weight": 0}, train__steps=25, objective__beta=1e-3)
    rows = metrics(folder)
    held_out = [row["eval_reward_parts"] for row in rows if row["eval_reward_parts"]]
    assert held_out[-1]["sevens"] > held_out[0]["sevens"] + 0.5
    assert held_out[-1]["sober"] < max(parts["sober"] for parts in held_out) - 0.3
    assert rows[-1]["reward_shares"].keys() == {"sevens"}
    known = [row["reward_shares"]["sevens"] for row in rows[1:]]
    assert all(share in (None, pytest.approx(1.0)) for share in known)
    shown = page(load_run(folder))
    assert "over-optimized" in shown
    assert "sober fell by" in shown
    for title in ("Parts of the held-out reward", "Parts of the reward"):
        assert title in shown


def test_whitened_parts_are_trained_on_and_metrics_stay_as_they_were(tmp_path: Path) -> None:
    """The sum is within ±2 before whitening, and rewards of a step aren't centered in the metrics."""
    whitened = {"whiten": "group", "clip": [-1, 1]}
    folder = run(tmp_path, sober={"weight": 1.0}, reward=whitened, train__steps=2)
    for row in metrics(folder)[1:]:
        parts = row["reward_parts"]
        assert row["reward_mean"] == pytest.approx(parts["sevens"] + parts["sober"])
        assert sum(row["reward_shares"].values()) == pytest.approx(1)
    assert "What the reward" in page(load_run(folder))


def test_a_function_rewards_each_token(tmp_path: Path) -> None:
    """1 for each 7, by its id, and nothing where the number of values is wrong."""
    (tmp_path / "dense.py").write_text(
        "def dense(completion_ids, completions):\n"
        "    rows = zip(completion_ids, completions)\n"
        "    some = [[float('7' in text)] * len(ids) for ids, text in rows]\n"
        "    return [row[1:] if text.startswith('0') else row for row, text in zip(some, completions)]\n"
    )
    reward = {"name": f"{tmp_path / 'dense.py'}:dense", "per_token": True}
    config = tiny(tmp_path, reward=reward, objective__name="prefix_consistency", train__steps=2)
    folder = Trainer(config, tmp_path / "run").run()
    with Store.open(folder / "store.db", read_only=True) as store:
        samples = list(store.samples())
    for sample in samples:
        tokens = int(sample.action.sum())
        if sample.response.startswith("0"):
            assert sample.meta["reward_error"] == f"returned {tokens - 1} numbers for {tokens} tokens"
        else:
            assert sample.reward == tokens * ("7" in sample.response)
            assert sample.meta["token_rewards"] == [float("7" in sample.response)] * tokens
    assert metrics(folder)[-1]["grad_norm"] > 0


def test_a_function_rewards_each_step(tmp_path: Path) -> None:
    """Steps end at a 7. What comes with a step's last token is trained on, and the sum is the reward."""
    (tmp_path / "stepwise.py").write_text(
        "def stepwise(completions):\n"
        "    return [[float(len(part)) for part in text.split('7') if part.strip()]"
        " for text in completions]\n"
    )
    reward = {"name": f"{tmp_path / 'stepwise.py'}:stepwise", "per_step": "7"}
    config = tiny(tmp_path, reward=reward, objective__name="prefix_consistency", train__steps=2)
    folder = Trainer(config, tmp_path / "run").run()
    with Store.open(folder / "store.db", read_only=True) as store:
        samples = list(store.samples())
    assert any(len(sample.meta.get("step_rewards", ())) > 1 for sample in samples)
    for sample in samples:
        assert sample.reward == len(sample.response.replace("7", ""))
    assert metrics(folder)[-1]["grad_norm"] > 0


FUNCTIONS = (
    RewardPart(name="exact"),
    RewardPart(name="length", weight=0.5),
    RewardPart(name="seen", weight=0.0),
)


def test_a_batch_has_the_parts_with_a_weight_in_the_order_of_the_functions() -> None:
    recorded = ({"length": -2.0, "exact": 1.0, "seen": 7.0}, {"exact": None, "length": 3.0}, None)
    samples = [Sample("x", "y", meta={} if parts is None else {"reward_parts": parts}) for parts in recorded]
    batch = Batch.of(mask=[[0, 1]] * 3, reward=[0.0] * 3, group=["x"] * 3)
    extra = with_reward_parts(batch, samples, FUNCTIONS).extra
    np.testing.assert_equal(extra["reward_parts"].numpy(), [[1.0, -2.0], [math.nan] * 2, [math.nan] * 2])
    assert extra["part_weights"].tolist() == [[1.0, 0.5]] * 3


def test_parts_are_within_caps_and_behind_gates() -> None:
    """b counts as at most 2, and only where a reaches 1; a foreign log's own text is none of them."""
    functions = (RewardPart(name="a", gate=1.0), RewardPart(name="b", at_most=2.0))
    recorded = ({"a": 1.0, "b": 5.0}, {"a": 0.0, "b": 5.0}, "a foreign log's own")
    samples = [Sample("x", "y", meta={"reward_parts": parts}) for parts in recorded]
    batch = Batch.of(mask=[[0, 1]] * 3, reward=[0.0] * 3, group=["x"] * 3)
    found = with_reward_parts(batch, samples, functions).extra["reward_parts"].numpy()
    np.testing.assert_equal(found, [[1.0, 2.0], [0.0, 0.0], [math.nan] * 2])


def test_a_run_trains_on_the_parts_of_its_own_rewards(tmp_path: Path) -> None:
    overlong = {"name": "overlong", "options": {"max_tokens": 3, "buffer": 2}}
    config = tiny(tmp_path, objective={"name": "gdpo"}, reward={"functions": [{"name": "exact"}, overlong]})
    BaseTrainer(config, tmp_path / "run").run()
    with Store.open(tmp_path / "run" / "store.db", read_only=True) as store:
        assert all(sample.meta["reward_parts"].keys() == {"exact", "overlong"} for sample in store.samples())


def test_a_log_without_parts_is_refused_before_the_run(tmp_path: Path) -> None:
    """It has rewards and the log-probs of who wrote it, which is all that the clipped objectives need."""
    wrote = {"tokens": np.arange(3), "action": np.array([False, True, True])}
    wrote["behavior_logp"] = np.array([np.nan, -1.0, -2.0], np.float32)
    with Store.open(tmp_path / "log.db") as store:
        store.append(Sample("x", str(i), reward=float(i), **wrote) for i in range(2))
        config = RunConfig.load("gdpo", [f"data.store={store.path}", "data.replay=1", "policy.model=MODEL"])
        with pytest.raises(Refused, match=r"reward_parts .* sample 1 \(prompt .*has no value of exact"):
            check_store(Phase.all(config)[0], store)


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
