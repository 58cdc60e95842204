"""The engine behind HTTP, against a stand-in that samples with the embedded engine."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rounding import rounding
from sampling import check_behavior
from stand_in import NEW, StandIn, decoded

from agro.api.reporting_trainer import Trainer
from agro.config import PolicyConfig, RunConfig, SamplerConfig
from agro.errors import Refused
from agro.io.connection import Connection
from agro.models.policy import Policy
from agro.rollout import Rollout, Task, collect
from agro.rollout.engines import Request
from agro.rollout.engines.server import Server
from agro.rollout.envs import Turn
from agro.runs.rundata import load_run
from agro.store import Store
from agro.types import Prompt


@pytest.fixture
def policy() -> Policy:
    return Policy.load(PolicyConfig(new=NEW), seed=0)


@pytest.fixture
def state(bench, policy: Policy) -> StandIn:
    """A server of the policy."""
    return bench.server(policy)


@pytest.fixture
def connect(bench, policy: Policy, state: StandIn) -> Callable[..., Server]:
    """A function: settings -> an engine at the server."""

    def connect(**settings: object) -> Server:
        return bench.engine(policy, state, version=7, **settings)

    return connect


def test_tokens_and_log_probs_are_those_of_the_servers_weights(policy, state, connect) -> None:
    engine = connect()
    rollout = Rollout(policy.encoder, engine)
    samples = list(rollout.sample([Prompt("12>"), Prompt("3>")], 5, SamplerConfig(max_new=4, batch=4)))
    assert sorted(s.meta["index"] for s in samples) == list(range(10))
    assert all(s.version == 7 and s.role == "policy" for s in samples)
    check_behavior(policy, samples)
    assert len({body["seed"] for _, body in state.asked}) == 10
    assert engine.measured["requests_failed"] == 0


@pytest.mark.parametrize("how", ["status", "hang up", "abort"])
def test_a_request_that_fails_is_counted_and_sent_again(state, connect, how: str) -> None:
    state.fail, state.how = 3, how
    engine = connect(retries=3)
    assert {d.request.number for d in decoded(engine, 4, batch=2)} == {0, 1, 2, 3}
    assert engine.measured["requests_failed"] == 3


def test_failures_are_counted_over_decodings_within_each_other(state, connect) -> None:
    state.fail, engine = 2, connect(retries=2)
    outer = engine.decode(deque(Request(i, [1, 2], 3) for i in range(2)), SamplerConfig(batch=1), seed=0)
    next(outer)
    decoded(engine)
    assert len(list(outer)) == 1
    assert engine.measured["requests_failed"] == 2
    decoded(engine)
    assert engine.measured["requests_failed"] == 0


@pytest.mark.parametrize(
    ("how", "words"),
    [("status", r"(?s)engine\.url.*3 times.*503"), ("abort", '3 times, finally with finish_reason "abort"')],
)
def test_retries_are_bounded(state, connect, how: str, words: str) -> None:
    state.fail, state.how = 100, how
    engine = connect(retries=2)
    with pytest.raises(Refused, match=words):
        decoded(engine)
    assert engine.measured["requests_failed"] == 3


def test_a_reply_has_a_largest_size(state, connect, monkeypatch) -> None:
    monkeypatch.setattr(Connection, "longest", 1 << 20)
    state.spoil, state.change = 0, lambda choice: choice.update(text="!" * (2 << 20))
    with pytest.raises(Refused, match="a reply of more than 1 MiB"):
        decoded(connect(retries=0))


def test_the_reader_may_append_requests(connect) -> None:
    waiting = deque([Request(0, [1], 2)])
    numbers = []
    for done in connect().decode(waiting, SamplerConfig(), seed=0):
        numbers.append(done.request.number)
        if done.request.number < 3:
            waiting.append(Request(done.request.number + 1, [1], 2))
    assert numbers == [0, 1, 2, 3]


class Twice:
    """Answers the first turn with a digit and ends after the second."""

    name, stop = "twice", (">",)

    def reset(self, prompt: Prompt) -> list[str]:
        return []

    def step(self, state: list[str], text: str) -> Turn:
        state.append(text)
        return Turn(done=True, reward=1.0) if len(state) == 2 else Turn("7", reward=0.0)


def test_environments_work_on_it(policy, connect) -> None:
    rollout = Rollout(policy.encoder, connect(), Twice(), max_turns=3)
    samples = list(rollout.sample([Prompt("1")], 8, SamplerConfig(max_new=6, batch=4), seed=3))
    assert sorted(s.meta["index"] for s in samples) == list(range(8))
    played = [s for s in samples if s.meta["turns"] == 2]
    assert played
    check_behavior(policy, samples)
    prompt = len(policy.encoder.prompt("1"))
    assert all(not s.action[prompt:].all() for s in played)  # the answer is no action


def test_new_weights_change_what_is_sampled(policy, state, connect, bench) -> None:
    other = Policy.load(PolicyConfig(new=NEW), seed=1)
    engine = connect()
    engine.load(bench.moved(other, 8, "reload"), 8)
    assert engine.version == 8
    probed = ["/v1/completions"] * 4
    assert [path for path, _ in state.asked] == ["/collective_rpc", "/reset_prefix_cache", *probed]
    served = dict(policy.model.named_parameters())
    assert all(torch.equal(p, served[name]) for name, p in other.model.named_parameters())


EOS, STOP = 2, 11  # ids of the end token and of "7"


def choice(ids: Sequence[Any], logprobs: Sequence[Any] | None = None, **changes: Any) -> dict[str, Any]:
    """What a server says of a response that was truncated at these tokens."""
    logprobs = [-1.5] * len(ids) if logprobs is None else logprobs
    found = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "length"}
    return {**found, **changes}


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        (choice([5] * 7), r"token_ids: expected 1 to 6 tokens \(max_tokens\), got 7"),
        (choice([]), "token_ids: expected 1 to 6 tokens"),
        (choice([5, 97.7]), r"token_ids\.1: .*valid integer.*97\.7"),
        (choice([5, 6.0]), r"token_ids\.1: .*valid integer.*6\.0"),
        (choice([True, 6]), r"token_ids\.0: .*valid integer.*True"),
        (choice(["5", 6]), r"token_ids\.0: .*valid integer.*'5'"),
        (choice([None, 6]), r"token_ids\.0: .*valid integer.*None"),
        (choice([[5], [6]]), r"token_ids\.0: .*valid integer.*\[5\]"),
        (choice([5, -2]), r"token_ids\.1: expected an id of the policy's vocabulary, 0 to \d+, got -2"),
        (choice([5, 1000]), r"token_ids\.1: expected an id .*, got 1000"),
        (choice([5, 10**30]), r"token_ids\.1: expected an id .*, got 10{30}"),
        (choice([5, 6], [-1.0]), "token_logprobs: expected one for each of 2 tokens, got 1"),
        (choice([5, 6], [-1.0, 0.3]), r"token_logprobs\.1: expected a log-prob, at most 0, got 0\.3"),
        (choice([5, 6], [-1.0, math.nan]), "expected JSON.*NaN"),
        (choice([5, 6], [-1.0, -math.inf]), "expected JSON.*-Infinity"),
        (choice([5, 6], [-1.0, "-1"]), r"token_logprobs\.1: .*valid number.*'-1'"),
        (choice([5, 6], [-1.0, [-1.0]]), r"token_logprobs\.1: .*valid number"),
        (choice([5, 6], finish_reason=None), "finish_reason: .*string, got None"),
        (choice([5, 6], finish_reason="content_filter"), 'expected "stop" or "length", got .content_filter'),
        (choice([5, 6], finish_reason="error"), 'finish_reason: expected "stop" or "length", got .error'),
        (choice([5, EOS, 6], finish_reason="stop"), "nothing after the end token 2 at 1, got 1 more"),
        (choice([EOS, EOS], finish_reason="stop"), "nothing after the end token 2 at 0, got 1 more"),
        (choice([5, 6], finish_reason="stop"), 'an end token .* since finish_reason is "stop", got 6'),
        (choice([STOP, 5, 6]), "token_ids: expected nothing after a text of sampler.stop"),
        (choice([5, 6], token_ids=None), r"token_ids: .*valid list, got None.*return_token_ids"),
        (choice([5, 6]) | {"logprobs": None}, r"logprobs\.token_logprobs: field required, got None"),
        ({"text": "7"}, "finish_reason: field required"),
    ],
)
def test_a_wrong_reply_is_refused_by_name_and_what_is_right_beside_it_is_stored(
    policy, state, connect, tmp_path: Path, spoiled: dict[str, Any], words: str
) -> None:
    """Of six responses that are sampled at once the third one is spoiled."""
    assert (policy.eos_ids, policy.encoder.ids("7")) == ((EOS,), [STOP])
    state.spoil = 2

    def change(answer: dict[str, Any]) -> None:
        answer.clear()
        answer.update(spoiled)

    state.change = change
    rollout, sampler = Rollout(policy.encoder, connect()), SamplerConfig(n=6, max_new=6, stop=("7",))
    with Store.open(tmp_path / "s.db") as store:
        with pytest.raises(Refused, match=words) as refused:
            collect(rollout, [Prompt("12>")], sampler, store, Task())
        samples = list(store.samples())
    assert f"{state.url}/v1/completions" in str(refused.value)
    assert len(samples) == 5
    check_behavior(policy, samples)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"choices": []}, "choices: .*at least 1 item"),
        ({"choices": [choice([1]), choice([1])]}, "choices: .*at most 1 item"),
        ({"choices": None}, "choices: .*valid list"),
        ({"error": "no such model"}, "choices: field required.*no such model"),
        ([1], r"reply: .*got \[1\]"),
        (None, "reply: .*got None"),
    ],
)
def test_a_reply_has_one_choice(state, connect, monkeypatch, answer: Any, words: str) -> None:
    monkeypatch.setattr(state, "answer", lambda *_: answer)
    with pytest.raises(Refused, match=words):
        decoded(connect())


def test_a_log_prob_that_rounding_put_above_0_is_0_and_null_is_unknown(state, connect) -> None:
    state.spoil = 0
    state.change = lambda answer: answer.update(choice([5, 6, 7], [5e-4, None, -1.0]))
    [done] = decoded(connect())
    np.testing.assert_array_equal(done.logp, [0.0, np.nan, -1.0])


@pytest.mark.parametrize("how", ["drip the head", "drip the body"])
def test_a_request_ends_at_its_deadline_whatever_drips_in(state, connect, how: str) -> None:
    """A byte every tenth of a second: the head would take 100 seconds."""
    state.fail, state.how = 1, how
    engine = connect(timeout=0.5, retries=0)
    began = time.monotonic()
    with pytest.raises(Refused, match=r"no complete reply in engine\.timeout = 0\.5 s"):
        decoded(engine)
    assert time.monotonic() - began < 50


def served_run(tmp_path: Path, url: str, **changes: Any) -> RunConfig:
    """Three steps on prompts 0> to 7> from the model at `tmp_path`/model."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}>", "answer": f"{i}"}) + "\n" for i in range(8)))
    values = {
        "policy": {"model": str(tmp_path / "model")},
        "data": {"prompts": str(prompts)},
        "engine": {"kind": "server", "urls": [url]},
        "sampler": {"n": 2, "max_new": 3},
        "objective": {"name": "agro", "beta": 0.1},
        "train": {"steps": 3, "groups": 2, "lr": 1e-2},
    }
    for section, more in changes.items():
        values[section] = {**values.get(section, {}), **more}
    return RunConfig.of(values)


COLD = {"temperature": 0.25}
OWN_SETTINGS = r"4 fresh responses.*\("  # as those of the trainer are at temperature 1


@pytest.mark.parametrize(
    ("of_policy", "sampler", "raw", "stops"),
    [
        (COLD, COLD, False, None),
        (COLD, COLD, True, ""),
        ({}, COLD, False, None),
        ({}, COLD, True, OWN_SETTINGS),
        ({}, {"top_p": 0.6}, False, None),
        ({}, {"top_p": 0.6}, True, OWN_SETTINGS),
        ({}, {"temperature": 0.5, "top_k": 3, "min_p": 0.1}, False, None),
        ({}, {"temperature": 0.0}, True, None),
    ],
)
def test_raw_log_probs_stop_the_run_before_the_weights_move(
    bench, policy, tmp_path: Path, of_policy, sampler, raw: bool, stops: str | None
) -> None:
    """Raw ones are at temperature 1 of all tokens. Samplers that aren't the policy's are compared at their
    own settings: the step's own comparison has no such token."""
    for weights in policy.model.parameters():
        weights.data *= 3  # so that some tokens are likelier than others
    policy.save(tmp_path / "model")
    state = bench.server(Policy.load(PolicyConfig(model=str(tmp_path / "model"))))
    state.raw = raw
    run = tmp_path / "run"
    trainer = Trainer(served_run(tmp_path, state.url, policy=of_policy, sampler=sampler), run)
    if stops is not None:
        words = rf"step 1: .*{stops}guard\.logp_diff = 0\.1.*--logprobs-mode processed"
        with pytest.raises(Refused, match=words):
            trainer.run()
        assert not list((run / "checkpoints").glob("step-*[1-9]"))
        return
    trainer.run()
    if not of_policy:
        assert {m["logp_diff_fresh"] for m in load_run(run).rows} == {None}
    if sampler.get("temperature") == 0:
        with Store.open(run / "store.db", read_only=True) as store:
            assert all((s.behavior_logp[s.action] == 0).all() for s in store.samples())


def test_a_run_that_samples_behind_http(bench, tmp_path: Path) -> None:
    """The server gets each version's weights; its log-probs are the learner's."""
    Policy.load(PolicyConfig(new=NEW), seed=3).save(tmp_path / "model")
    state = bench.server(Policy.load(PolicyConfig(model=str(tmp_path / "model"))))
    state.fail = 2
    run = Trainer(served_run(tmp_path, state.url), tmp_path / "run").run()
    rows = load_run(run).rows
    assert [m["staleness_max"] for m in rows] == [0, 0, 0]
    with Store.open(run / "store.db", read_only=True) as store:
        largest = rounding(*(s.behavior_logp for s in store.samples()))["atol"]
    assert all(m["logp_diff_max"] < largest for m in rows)
    assert sum(path == "/collective_rpc" for path, _ in state.asked) >= 3
    assert all(0 <= m["push_error"] < largest and m["servers"] == 1 for m in rows)
    assert [folder.name for folder in (run / "weights/served").iterdir()] == ["v00000003"]
