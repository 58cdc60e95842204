"""A secret among the options isn't in any file of a run; `env:NAME` is the supported way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import interrupted, metrics, tiny

from agro.api.reporting_trainer import Trainer
from agro.config import EnvironmentConfig, RewardConfig, RunConfig
from agro.config.secrets import REDACTED, redacted
from agro.errors import Refused
from agro.place.collector import Collector
from agro.rewards import load_reward
from agro.rollout.envs.process import load_environment
from agro.types import Sample

SECRET = "correct-horse-battery-9"
REWARD = f'''
def judged(completions, api_key, headers=None):
    """1 for the right key."""
    assert headers is None or headers["Authorization"] == "{SECRET}"
    return [float(api_key == "{SECRET}") for _ in completions]
'''


@pytest.fixture
def function(tmp_path: Path) -> str:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "judge.py").write_text(REWARD)
    return f"{tmp_path / 'code' / 'judge.py'}:judged"


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({"api_key": SECRET}, {"api_key": REDACTED}),
        ({"openai-api-key": SECRET}, {"openai-api-key": REDACTED}),
        ({"apiKeys": [SECRET]}, {"apiKeys": [REDACTED]}),
        ({"headers": {"Authorization": SECRET}}, {"headers": {"Authorization": REDACTED}}),
        ({"hf_token": SECRET}, {"hf_token": REDACTED}),
        ({"judge": "sk-proj-0123456789"}, {"judge": REDACTED}),
        ({"x": [{"y": "Bearer abcdefgh12345678"}]}, {"x": [{"y": REDACTED}]}),
        ({"url": "https://me:hunter2@host/v1"}, {"url": REDACTED}),
        ({"api_key": "env:JUDGE_KEY"}, None),
        ({"api_key": "", "max_token": 3, "token": None}, None),
        ({"author": "Ann", "marker": "####"}, None),
        ({"eos_token": "</s>", "key": "answer"}, None),
        ({"url": "http://127.0.0.1:8000"}, None),
        ({"text": "Basic arithmetic, sk-learn-style; AKIA"}, None),
        ({"model": "models/sk-like-name"}, None),
    ],
    ids=str,
)
def test_what_looks_like_a_secret(options: dict[str, Any], stored: dict[str, Any] | None) -> None:
    """Without `stored` none of it does."""
    stored = options if stored is None else stored
    assert redacted(options) == stored
    environment = {"name": "some:Environment", "options": options}
    phases = [{"name": "a", "environment": environment}]
    kept = RunConfig.of({"reward": {"options": options}, "phases": phases}).record()
    assert kept["reward"]["options"] == kept["phases"][0]["environment"]["options"] == stored


def files_with(text: str, folder: Path) -> list[str]:
    return [str(p) for p in folder.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]


@pytest.mark.test
@pytest.mark.report
def test_a_literal_secret_is_in_no_file(tmp_path: Path, function: str) -> None:
    reward = {"name": function, "options": {"api_key": SECRET, "headers": {"Authorization": SECRET}}}
    config = tiny(tmp_path, reward=reward, train__steps=3, source__kind="inline")
    interrupted(config, tmp_path / "run", 1)
    folder = Trainer(config, tmp_path / "run", resume=True).run()
    assert (folder / "model" / "run_config.json").exists()
    assert files_with(SECRET, folder) == []
    assert files_with(REDACTED, folder / "model")
    again = RunConfig.load(folder / "config.json")
    with pytest.raises(Refused, match=r"reward\.options\.(api_key|headers\.Authorization): .*env:NAME"):
        Trainer(again, tmp_path / "again")


@pytest.mark.test
@pytest.mark.report
def test_a_variable_is_stored_by_its_name(tmp_path: Path, function: str, monkeypatch) -> None:
    options = {"api_key": "env:JUDGE_KEY"}
    config = tiny(tmp_path, reward={"name": function, "options": options}, train__steps=1)
    with pytest.raises(Refused, match=r"reward\.options\.api_key: expected JUDGE_KEY in the environment"):
        Trainer(config, tmp_path / "run").run()
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    folder = Trainer(config, tmp_path / "run").run()
    assert metrics(folder)[0]["reward_mean"] == 1.0
    assert files_with(SECRET, folder) == []
    again = RunConfig.load(folder / "config.json")
    assert again.reward.options == options
    Trainer(again, tmp_path / "again").plan()


@pytest.mark.test
def test_a_variable_in_a_list_and_in_the_options_of_an_environment(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "keyed_options.py").write_text(
        "def keyed(completions, keys):\n    return [float(keys == ['plain', 'value'])] * len(completions)\n"
        "class Keyed:\n"
        "    name, stop, reset, step = 'keyed', (), None, None\n"
        "    def __init__(self, key, fails=False):\n"
        "        self.name = 'keyed with ' + key\n"
        "        if fails:\n"
        "            raise ValueError('no')\n"
    )
    monkeypatch.setenv("SOME_KEY", "value")
    options = {"keys": ["plain", "env:SOME_KEY"]}
    reward = load_reward(RewardConfig(name=f"{tmp_path / 'keyed_options.py'}:keyed", options=options))
    assert [s.value for s in reward.score([Sample("a", "b")])] == [1.0]
    reward.close()
    name = f"{tmp_path / 'keyed_options.py'}:Keyed"
    made: Any = load_environment(EnvironmentConfig(name=name, options={"key": "env:SOME_KEY"}))
    assert made.name == "keyed with value"
    with pytest.raises(Refused) as caught:
        load_environment(EnvironmentConfig(name=name, options={"key": "env:SOME_KEY", "fails": True}))
    assert "ValueError: no" in str(caught.value)
    assert "value" not in str(caught.value)


@pytest.mark.parametrize("options", [{"a": "\ud800"}, {"a": [{"\ud800": 1}]}], ids=repr)
def test_text_that_no_file_can_have_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=r"reward\.options\.a.*: expected Unicode text"):
        Trainer(tiny(tmp_path, reward={"options": options}), tmp_path / "run")


def test_a_collector_does_not_go_on_with_a_redacted_value(tmp_path: Path) -> None:
    values = tiny(tmp_path, source__kind="elsewhere", data__max_age=1).record()
    values["reward"]["options"] = {"api_key": REDACTED}
    (tmp_path / "config.json").write_text(json.dumps({**values, "run": "r"}))
    with pytest.raises(Refused, match=r"reward\.options\.api_key"):
        Collector.of(str(tmp_path), None)  # type: ignore[arg-type]
