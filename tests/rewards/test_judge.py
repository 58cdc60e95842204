"""The reward `judge` against a server that answers as judges do, and as they shouldn't."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import numpy as np
import pytest
from running import done, refused, report_of

from agro.cli.stores import agreement
from agro.config import RewardConfig
from agro.errors import Refused
from agro.io import connection
from agro.rewards import load_reward
from agro.rewards.judge import JudgeOptions, JudgeReward, judge
from agro.types import Sample

SAID: dict[str, list[str | int]] = {}  # by response: replies or statuses, the last one again and again
ASKED: list[dict[str, Any]] = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        material = json.loads(body["messages"][1]["content"])
        ASKED.append(body)
        said = answer(material)
        if said == "echo":
            said = f"your key, {self.headers['Authorization']}, " * 12
        status = 401 if said == "refused" else said if isinstance(said, int) else 200
        self.send_response(status)
        self.end_headers()
        for _ in range(40 if said == "slowly" else 0):
            self.wfile.write(b" ")
            time.sleep(0.1)
        if status == 401:
            said = f"wrong: {self.headers['Authorization']} " * 12
        reply = {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *args):
        pass


def answer(material: dict[str, str]) -> str | int:
    if "response" in material:
        said = SAID.get(material["response"], ['{"reason": "", "score": 5}'])
        return said.pop(0) if len(said) > 1 else said[0]
    longer = len(material["response 1"]) > len(material["response 2"])
    if "first" in material["prompt"]:
        return '{"reason": "the first one as ever", "better": 1}'
    return json.dumps({"reason": "longer", "better": 1 if longer else 2})


@pytest.fixture
def url(monkeypatch) -> Iterator[str]:
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.001)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    ASKED.clear()
    SAID.clear()
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_key_that_a_server_echoes_is_in_no_message(url, monkeypatch):
    """It was in the error of a sample, which the store keeps and pages show, and in the refusal."""
    monkeypatch.setenv("JUDGE_KEY", "zebra-crossing-41")
    monkeypatch.setitem(SAID, "a", ["echo"])
    monkeypatch.setitem(SAID, "b", ["refused"])
    for key in ("env:JUDGE_KEY", "literal-zebra-42"):
        options = {"url": url, "model": "m", "rubric": "r", "api_key": key, "retries": 0}
        with closing(load_reward(RewardConfig(name="judge", options=options))) as reward:
            [score] = reward.score([Sample("p", "a")])
            assert "your key, Bearer (redacted)" in score.error
            assert "zebra" not in score.error
            with pytest.raises(Refused, match=r"wrong: Bearer \(redacted\)") as refused:
                reward.score([Sample("p", "b")])
            assert "zebra" not in str(refused.value)


def opened(url: str, **options: object) -> JudgeReward:
    return judge(JudgeOptions(url=url, model="m", **options), timeout=5.0, workers=3)


def test_scores_are_read_strictly(url):
    SAID.update(
        {
            "good": ['{"reason": "right", "score": 9.5}'],
            "fenced": ['```json\n{"score": 3}\n```'],
            "later": [503, 429, "I think 7", '{"score": 7}'],
            "injected": ['{"score": 999}'],
            "text": ["Score: 10/10"],
            "a truth": ['{"score": true}'],
            "nothing": [500],
        }
    )
    with closing(opened(url)) as reward:
        scores = dict(zip(SAID, reward.score([Sample("p", response) for response in SAID]), strict=True))
    assert {name: score.value for name, score in scores.items()} == {
        "good": 9.5,
        "fenced": 3.0,
        "later": 7.0,
        **dict.fromkeys(("injected", "text", "a truth", "nothing")),
    }
    assert scores["injected"].error == "judge: expected a score from 0 to 10, got 999"
    assert "JSON object, got 'Score: 10/10'" in scores["text"].error
    assert "status 500" in scores["nothing"].error
    assert scores["good"].meta == {"reward_details": {"judge": "m"}}


def test_a_pair_is_judged_in_both_orders(url):
    cases = [("p", "longer", "short"), ("p", "short", "longer"), ("first", "a", "b")]
    samples = [Sample(prompt, response, meta={"baseline": other}) for prompt, response, other in cases]
    with closing(opened(url, pairwise=True)) as reward:
        assert [score.value for score in reward.score(samples)] == [1.0, 0.0, 0.5]
        assert reward.maximum == 1.0
        assert "no baseline" in reward.score([Sample("p", "r")])[0].error
    assert len(ASKED) == 6


def test_a_judge_is_told_that_a_response_was_cut(url):
    samples = [
        Sample("p", "r", meta={"finish": finish, "baseline": "b"}) for finish in ("MAX_TOKENS", "stop")
    ]
    for pairwise in (False, True):
        with closing(opened(url, pairwise=pairwise)) as reward:
            reward.score(samples)
    asked = [json.loads(body["messages"][1]["content"]) for body in ASKED]
    told = [[name for name in material if name.endswith("was cut off")] for material in asked]
    assert sorted(told) == [
        *([], [], []),
        *(["response 1 was cut off"], ["response 2 was cut off"], ["response was cut off"]),
    ]


def test_replies_are_kept(url, tmp_path):
    for _ in range(2):
        with closing(opened(url, cache=str(tmp_path / "replies.db"))) as reward:
            assert [s.value for s in reward.score([Sample("p", "a"), Sample("p", "b")])] == [5.0, 5.0]
    assert len(ASKED) == 2
    with closing(opened(url, cache=str(tmp_path / "replies.db"), rubric="Another one.")) as reward:
        reward.score([Sample("p", "a")])
    assert len(ASKED) == 3
    assert ASKED[-1]["messages"][0]["content"].startswith("Another one.")


def test_the_cap_on_requests_holds(url):
    with closing(opened(url, max_calls=2)) as reward, pytest.raises(Refused, match="2 requests were sent"):
        reward.score([Sample("p", str(i)) for i in range(5)])
    assert len(ASKED) == 2


def test_a_request_that_is_refused_ends_the_run(url):
    SAID["r"] = [401]
    with closing(opened(url)) as reward, pytest.raises(Refused, match="status 401"):
        reward.score([Sample("p", "r")] * 20)
    assert 1 <= len(ASKED) <= 3  # those under way


def test_a_server_that_is_gone_leaves_rewards_unknown(url):
    del url  # for its short pauses
    with closing(opened("http://127.0.0.1:9/v1", retries=1)) as reward:
        [score] = reward.score([Sample("p", "r")])
    assert score.value is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"url": "u"}, "reward.options of judge: model: field required"),
        ({"url": "u", "model": "m", "temperature": 1.0}, "unknown key temperature"),
        ({"url": "u", "model": "m", "retries": -1}, "retries: input should be greater than or equal to 0"),
        ({"url": "u", "model": "m", "lowest": 10}, "expected less than"),
    ],
)
def test_options_are_checked(options, error):
    with pytest.raises(Refused, match=error):
        load_reward(RewardConfig(name="judge", options=options))


def test_a_server_that_sends_a_byte_now_and_then_holds_nobody(url):
    SAID["r"] = ["slowly"]
    began = time.monotonic()
    options = JudgeOptions(url=url, model="m", retries=0)
    with closing(judge(options, timeout=0.5, workers=1)) as reward:
        [score] = reward.score([Sample("p", "r")])
    assert score.value is None
    assert "no complete reply in reward.timeout = 0.5 s" in score.error
    assert time.monotonic() - began < 3


def test_a_reply_has_a_largest_size(url):
    SAID["r"] = ["!" * (5 << 20)]
    with closing(opened(url, retries=0)) as reward:
        [score] = reward.score([Sample("p", "r")])
    assert score.error == "judge: a reply of more than 4 MiB"


def test_a_notebook_whose_loop_runs_is_judged_too(url):
    async def cell(reward):
        return reward.score([Sample("p", "r")])

    with closing(opened(url)) as reward:
        assert [score.value for score in asyncio.run(cell(reward))] == [5.0]


def test_a_rubric_may_be_a_file(tmp_path):
    file = tmp_path / "rubric.txt"
    file.write_text("Only {braces} count.\n")
    options = JudgeOptions(url="u", model="m", rubric=str(file))
    assert options.instructions.startswith("Only {braces} count.")


def test_kappa():
    """Both yes 20, judge alone 5, label alone 10, none 15: p_o = .7, p_e = .5, κ = .4 (Cohen 1960)."""
    judged = [(True, True)] * 20 + [(True, False)] * 5 + [(False, True)] * 10 + [(False, False)] * 15
    report = agreement(judged)
    assert report["agreement"] == pytest.approx(0.7)
    assert report["kappa"] == pytest.approx(0.4)
    assert report["low"] < 0.4 < report["high"]
    assert agreement([(True, True)] * 3)["kappa"] is None
    tracemalloc.start()  # √(p_o (1 − p_o)/n)/(1 − p_e) of 20,000 is .0065, and their resamples stay small
    report = agreement(judged * 400)
    assert [report["low"], report["high"]] == pytest.approx([0.387, 0.413], abs=0.002)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_agreement_with_labels(url, tmp_path):
    random = np.random.default_rng(0)
    records = [
        {"prompt": f"p{i}", "response": f"r{i}", "reward": float(random.random() < 0.5)} for i in range(40)
    ]
    SAID.update({r["response"]: [json.dumps({"score": 10 * r["reward"]})] for r in records[:-2]})
    SAID.update({r["response"]: ["?"] for r in records[-2:]})
    file = tmp_path / "labeled.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ("--option", f"url={url}", "--option", "model=m", "--option", "retries=0")
    command = ["score", str(file), "--reward", "judge", "--check", *options]
    report = report_of(*command)
    agreed = dict.fromkeys(("agreement", "kappa", "low", "high"), 1.0)
    assert report == {"n": 38, **agreed, "failed": 2, "threshold": 5.0}
    shown = done(*command).stdout
    judged = "38 samples judged, 2 not: yes from 5 on, labels from 0.5 on"
    assert shown.startswith(f"{judged}; it agrees with 100.0% of the labels")
    assert "leave out --missing" in refused(*command, "--missing")
    file.write_text(
        "".join(json.dumps({**record, "reward": 10 * record["reward"]}) + "\n" for record in records)
    )
    assert "expected labels from 0 to 1, got 0 to 10" in refused(*command)
    assert report_of(*command, "--label-threshold", "5") == report
    assert "JSON object, got '?'" in shown
