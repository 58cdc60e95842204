"""Runs with servers: they sample, with adapters, by collectors, and beside a learner on two ranks; and one of
a teacher teaches as one in the process does."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "engines"))
from stand_in import serving
from test_ranks import torchrun
from tiny_runs import metrics, tiny, write_prompts, write_toml

from agro.api.reporting_trainer import Trainer
from agro.config import PolicyConfig, RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.place.collector import Collector
from agro.rollout import Activity
from agro.rollout.engines.connection import ServedReference
from agro.store import Store
from agro.train.check import check_config
from agro.train.inputs import fingerprints
from agro.train.learner import Learner
from agro.train.publications import ProcessReport, Publications

ROUNDED = 1e-5  # nats, and weights after three steps of Adam: float32 in batches of other shapes


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    Policy.load(tiny(folder).policy, seed=0).save(folder / "start")
    return str(folder / "start")


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The rows of three steps whose samples are of the weights of the time, with the trainer's log-probs."""
    rows = [row for row in metrics(run) if row["step"]]
    assert [row["staleness_max"] for row in rows] == [0, 0, 0]
    assert all(row["logp_diff_max"] < ROUNDED for row in rows)
    return rows


ELSEWHERE = {"source": {"kind": "elsewhere", "wait_seconds": 60}, "data__max_age": 0}


def collect(config: RunConfig, run: Path, say: Callable[[str], None], begin: Callable[[], None]) -> None:
    """A run that a collector of this process samples for, once `begin` was called."""
    trained = threading.Thread(target=Trainer(config, run).run)
    trained.start()
    try:
        while not (run / "weights/latest.json").exists():
            trained.join(0.05)
        begin()
        activity = Activity()
        activity.say = say
        assert Collector.of(str(run), activity).serve() > 0
    finally:
        trained.join(60)


def run_of(tmp_path: Path, start: str, url: str, **changes: Any) -> RunConfig:
    """Of three steps of four responses, each of which is a request."""
    policy = {"model": start, **changes.pop("policy", {})}
    engine = {"kind": "server", "urls": [url], **changes.pop("engine", {})}
    few = {"sampler__n": 2, "train__groups": 2, "train__steps": 3}
    return tiny(tmp_path, policy=policy, engine=engine, **few | changes)


@pytest.mark.parametrize("push", ["adapter", "reload"])
def test_a_run_of_adapters(tmp_path: Path, start: str, push: str) -> None:
    """Adapters are the default of such runs; with reload the merged model is pushed."""
    with serving(Policy.load(PolicyConfig(model=start))) as (url, state):
        engine = {} if push == "adapter" else {"push": push}
        changes = {"policy": {"lora": {"rank": 2}}, "engine": engine}
        run = Trainer(run_of(tmp_path, start, url, **changes), tmp_path / "run").run()
    assert all(row["push_error"] < ROUNDED for row in steps_of(run))
    loaded = [body["lora_name"] for path, body in state.asked if path == "/v1/load_lora_adapter"]
    names = [name.partition("-")[0] for name in loaded]
    assert names == (["agro@0", "agro@1", "agro@2", "agro@3"][: len(names)] if push == "adapter" else [])
    assert len(names) >= 3 or push == "reload"


def test_a_server_sleeps_while_the_weights_move(tmp_path: Path, start: str, monkeypatch) -> None:
    """At each gradient and move; and it samples what held-out prompts get, too."""
    asleep: list[int] = []
    for name in ("gradient", "move"):
        method = getattr(Learner, name)

        def seen(*given: Any, method: Any = method, **options: Any) -> Any:
            asleep.append(state.asleep)
            return method(*given, **options)

        monkeypatch.setattr(Learner, name, seen)
    with serving(Policy.load(PolicyConfig(model=start))) as (url, state):
        changes = {"policy": {"lora": {"rank": 2}}, "engine": {"sleep": True}}
        held = write_prompts(tmp_path / "held.jsonl", range(60, 64))
        changes |= {"data__eval_prompts": held, "evaluate__every": 1}
        run = Trainer(run_of(tmp_path, start, url, **changes), tmp_path / "run").run()
    assert asleep == [1] * 6
    steps_of(run)
    order = [path for path, _ in state.asked if "completions" not in path]
    assert order[:3] == ["/wake_up", "/v1/load_lora_adapter", "/sleep?level=1"]
    assert order.count("/wake_up") == order.count("/sleep?level=1") >= 3
    with pytest.raises(Refused, match=r"engine\.sleep needs a vLLM server"):
        check_config(run_of(tmp_path, start, url, engine={"kind": "hf", "urls": [], "sleep": True}))


@pytest.mark.parametrize("policy", [{}, {"lora": {"rank": 2}}])
def test_collectors_sample_with_a_server(tmp_path: Path, start: str, policy, monkeypatch) -> None:
    """By whole weights, and by adapters; `agro ps` shows the last probe."""
    reports: list[ProcessReport] = []
    report = Publications.report
    monkeypatch.setattr(Publications, "report", lambda self, own: (reports.append(own), report(self, own)))
    with serving(Policy.load(PolicyConfig(model=start))) as (url, state):
        config = run_of(tmp_path, start, url, policy=policy, **ELSEWHERE)
        collect(config, tmp_path / "run", say=lambda text: None, begin=lambda: None)
    steps_of(tmp_path / "run")
    probes = [own.push_error for own in reports if own.role == "collector"]
    assert probes
    assert all(error is not None and error < ROUNDED for error in probes)
    pushed = "/v1/load_lora_adapter" if policy else "/collective_rpc"
    assert sum(path == pushed for path, _ in state.asked) >= 3
    with Store.open(tmp_path / "run/store.db", read_only=True) as store:
        assert {s.version for s in store.samples()} >= {0, 1, 2}


def test_a_collector_waits_for_a_server_that_is_away(tmp_path: Path, start: str) -> None:
    """It hangs up at the beginning, and again in the middle, when it is started again without weights."""
    with serving(Policy.load(PolicyConfig(model=start))) as (url, state):
        twelve = {"sampler__n": 3, "train__groups": 4}
        config = run_of(tmp_path, start, url, engine={"retries": 0}, **twelve, **ELSEWHERE)
        state.dead = True
        base = {name: weight.clone() for name, weight in state.engine.policy.model.state_dict().items()}

        def start_again(choice: dict[str, Any]) -> None:
            state.engine.policy.model.load_state_dict(base)
            state.fail, state.how = 1, "hang up"

        state.spoil, state.change = 3, start_again  # after the fourth response of twelve

        def appear() -> None:
            while not said:
                time.sleep(0.01)
            state.dead = False

        said: list[str] = []
        collect(config, tmp_path / "run", said.append, threading.Thread(target=appear, daemon=True).start)
    steps_of(tmp_path / "run")
    assert sum("isn't used" in text for text in said) == 2
    assert sum("is used again" in text for text in said) == 2


@pytest.mark.nightly
def test_two_ranks_sample_with_a_server(tmp_path: Path, start: str) -> None:
    with serving(Policy.load(PolicyConfig(model=start))) as (url, _):
        file = write_toml(tmp_path / "config.json", run_of(tmp_path, start, url))
        torchrun("-m", "agro", "train", str(file), "--out", str(tmp_path / "run"), cwd=tmp_path)
    assert all(row["push_error"] < ROUNDED for row in steps_of(tmp_path / "run"))


def test_a_key_is_not_in_the_run_folder(tmp_path: Path, start: str, monkeypatch) -> None:
    monkeypatch.setenv("AGRO_TEST_KEY", "s3cret-of-the-server")
    with serving(Policy.load(PolicyConfig(model=start))) as (url, _):
        config = run_of(tmp_path, start, url, engine={"api_key": "env:AGRO_TEST_KEY"}, train__steps=1)
        run = Trainer(config, tmp_path / "run").run()
    assert json.loads((run / "config.json").read_text())["engine"]["api_key"] == "env:AGRO_TEST_KEY"
    for file in run.rglob("*.json*"):
        assert "s3cret" not in file.read_text()


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    Policy.load(tiny(tmp_path).policy, seed=7).save(tmp_path / "teacher")
    return str(tmp_path / "teacher")


def distilling(folder: Path, teacher: str, **changes: Any) -> RunConfig:
    policy = tiny(folder).policy.model_dump() | {"reference": "model", "reference_model": teacher}
    policy |= changes.pop("policy", {})
    values = {"objective": {"name": "distill"} | changes.pop("objective", {}), "train__steps": 3}
    return tiny(folder, policy=policy, evaluate={"kl": False}, **values, **changes)


def test_a_teacher_on_a_server_equals_one_in_the_process(tmp_path: Path, teacher: str) -> None:
    """Log-probs, gradients and weights; the server scores each sample of each step once."""
    here = Trainer(distilling(tmp_path, teacher), tmp_path / "here")
    rows = metrics(here.run())
    with serving(Policy.load(PolicyConfig(model=teacher))) as (url, state):
        served = Trainer(distilling(tmp_path, url), tmp_path / "served")
        found = metrics(served.run())
    scored = [body for path, body in state.asked if "prompt_logprobs" in body]
    assert len(scored) == 3 * 4 * 3  # steps, groups, responses
    for ours, theirs in zip(rows, found, strict=True):
        for name in ("loss", "grad_norm", "kl_ref"):
            assert theirs[name] == (None if ours[name] is None else pytest.approx(ours[name], abs=1e-5))
    assert any(row["loss"] for row in rows)
    before = Policy.load(here.config.policy, seed=0).weights()
    for name, weight in here.policy.weights().items():
        torch.testing.assert_close(served.policy.weights()[name], weight, atol=ROUNDED, rtol=0)
    assert any((here.policy.weights()[name] - w).abs().max() > 100 * ROUNDED for name, w in before.items())


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path: Path, teacher: str) -> None:
    other = tiny(tmp_path).policy.model_dump()
    other["new"]["alphabet"] = "9876543210>"
    with (
        serving(Policy.load(PolicyConfig(**other))) as (url, _),
        pytest.raises(Refused, match=r"reference_model = http.*: expected the tokenizer of policy\.model"),
    ):
        Trainer(distilling(tmp_path, url), tmp_path / "run").run()
    with pytest.raises(Refused, match=r"failed with .*start vLLM there"):
        Trainer(distilling(tmp_path, url, engine={"retries": 0}), tmp_path / "run").run()


def test_phases_may_name_the_teacher_on_a_server(tmp_path: Path, teacher: str) -> None:
    """Not [policy], which all phases change: there is no folder of the URL's name."""
    with serving(Policy.load(PolicyConfig(model=teacher))) as (url, _):
        taught = {"name": "one", "policy": {"reference": "model", "reference_model": url}}
        objective = {"name": "distill"}
        config = tiny(tmp_path, objective=objective, evaluate={"kl": False}, train__steps=3, phases=[taught])
        with Trainer(config, tmp_path / "run").loaded() as machine:
            assert isinstance(machine.reference, ServedReference)
            assert "policy.reference_model" in fingerprints(config, machine.policy, machine.reference, {})


def test_a_log_prob_of_a_teacher_above_0_is_refused(tmp_path: Path, teacher: str, monkeypatch) -> None:
    with serving(Policy.load(PolicyConfig(model=teacher))) as (url, state):
        score = state._score

        def spoiled(ids: list[int]) -> dict[str, Any]:
            reply = score(ids)
            reply["choices"][0]["prompt_logprobs"][-1][str(ids[-1])]["logprob"] = 0.5
            return reply

        monkeypatch.setattr(state, "_score", spoiled)
        with pytest.raises(Refused, match=r"expected log-probs, at most 0, got 0\.5"):
            Trainer(distilling(tmp_path, url), tmp_path / "run").run()


def test_a_teacher_on_a_server_has_no_whole_distribution(tmp_path: Path, teacher: str) -> None:
    with serving(Policy.load(PolicyConfig(model=teacher))) as (url, _):
        config = distilling(tmp_path, url, objective={"over": "vocabulary"})
        message = r'log-probs of the sampled tokens alone.*objective\.over = "samples"'
        with pytest.raises(Refused, match=message):
            Trainer(config, tmp_path / "run").run()
