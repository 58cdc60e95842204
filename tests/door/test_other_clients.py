"""Agents and evaluations that people have, unchanged, against the door: `make test-clients` installs them.

They live in an environment of their own, AGRO_CLIENTS, since they ask for other versions of much.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from asking import TOKEN, stored

from agro.config import EnvironmentConfig, SamplerConfig
from agro.door.harness import Harness
from agro.rollout.rollout import Rollout
from agro.types import Prompt

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent / "clients"
CLIENTS = Path(os.environ.get("AGRO_CLIENTS", ""))
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 1}}\n</tool_call>'
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1", "HF_HUB_OFFLINE": "1"}


def need(package: str) -> None:
    if not list(CLIENTS.glob(f"lib/*/site-packages/{package}")):
        pytest.skip(f"AGRO_CLIENTS names no environment with {package}: make test-clients")


@pytest.fixture
def run(serving, says, tmp_path):
    """A function: a package, what the model says, a command -> what it printed, and the rows of the store."""

    def start(package: str, texts: list[str], *command: str) -> tuple[str, list]:
        need(package)
        says(*texts)
        with serving(tmp_path / "s.db") as url:
            variables = {"OPENAI_BASE_URL": f"{url}/s/work/v1", "OPENAI_API_KEY": TOKEN}
            command = tuple(part.replace("URL", variables["OPENAI_BASE_URL"]) for part in command)
            done = subprocess.run(
                [str(CLIENTS / "bin" / command[0]), *command[1:]],
                env={**os.environ, **QUIET, **variables},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        assert done.returncode == 0, done.stderr[-2000:]
        rows = stored(tmp_path)
        assert all(row.behavior_logp is not None for row in rows)
        return done.stdout, rows

    return start


def turns(rows: list) -> list[list[str]]:
    """Who speaks in each row, after what it was asked."""
    return [[message["role"] for message in row.meta["continuation"]] for row in rows]


def test_langchain(run) -> None:
    said, rows = run(
        "langchain_openai", [f"so {ADD}", "it is 4", "one two"], "python", str(HERE / "langchain_chat.py")
    )
    assert said == "it is 4\none two\n"
    assert turns(rows) == [["assistant", "tool", "assistant"], ["assistant"]]


def test_openai_agents(run) -> None:
    said, rows = run("agents", [ADD, "it is 4"] * 3, "python", str(HERE / "openai_agents.py"))
    assert said == "it is 4\n" * 3
    assert turns(rows) == [["assistant", "tool", "assistant"]] * 3
    assert [[m["role"] for m in row.prompt] for row in rows] == [["tools", "system", "user"]] * 3


def test_mini_swe_agent(run) -> None:
    """It leaves a turn without a command out of its history, which begins a row."""
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 7"
    calls = [
        f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"
        for command in ("echo hi", end)
    ]
    said, rows = run("minisweagent", [calls[0], "hm", calls[1]], "python", str(HERE / "mini_swe.py"))
    assert said.strip().endswith("7")
    assert turns(rows) == [["assistant", "tool", "assistant"], ["assistant"]]
    assert "hi" in rows[0].meta["continuation"][1]["content"]


def test_inspect(run, tmp_path) -> None:
    shutil.copy(HERE / "inspect_task.py", tmp_path)  # it takes relative paths alone
    asked = ("eval", "inspect_task.py", "--model", "openai/m", "--log-dir", "logs")
    said, rows = run("inspect_ai", ["four"] * 2, "inspect", *asked, "--display", "plain")
    assert "0.500" in said
    assert turns(rows) == [["assistant"]] * 2


def test_lm_evaluation_harness(run, tmp_path) -> None:
    questions = [{"question": "2 + 2?", "answer": "four"}, {"question": "1 + 1?", "answer": "two"}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    model = "model=m,base_url=URL/chat/completions,max_retries=1"
    asked = ("--model", "local-chat-completions", "--model_args", model, "--apply_chat_template")
    said, rows = run(
        "lm_eval", ["four"] * 2, "lm_eval", *asked, "--tasks", "sums", "--include_path", str(HERE)
    )
    assert "0.5" in said
    assert [row.response for row in rows] == ["four", "four"]


@pytest.mark.parametrize(
    ("package", "script"),
    [("inspect_ai", "inspect_episode.py"), ("verifiers", "verifiers_episode.py vf_sums")],
)
def test_a_task_of_others_is_an_environment(engine, says, package, script) -> None:
    need(package)
    path = f"{CLIENTS.absolute() / 'bin'}:{os.environ['PATH']}"
    options = {"reward": "file", "seconds": 240, "workers": 1}
    options["env"] = {"PATH": path, "PYTHONPATH": str(HERE)}
    folder = Path(__file__).parents[2] / "examples/agents"
    config = EnvironmentConfig(name=f"harness:{CLIENTS / 'bin/python'} {folder}/{script}", options=options)
    harness = Harness(config.name.removeprefix("harness:"), options, config)
    says("it is four", "no")
    asked = [Prompt("2 + 2?", f"p{i}", {"answer": "four", "idx": 1}) for i in range(2)]
    rollout = Rollout(engine.policy.encoder, engine, harness, 8)
    samples = list(rollout.sample(asked, 1, SamplerConfig(max_new=16, batch=2), seed=0))
    assert [(s.reward, s.meta.get("reward_error")) for s in samples] == [(1.0, None), (0.0, None)]
    assert [s.response for s in samples] == ["it is four", "no"]
