"""Environments in a process of their own, those of the library verifiers, and what is refused."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing

import pytest

from agro import config
from agro.errors import Refused
from agro.io.worker import WrongResult
from agro.rollout.envs import Turn
from agro.rollout.envs.playing import make_environment
from agro.rollout.envs.process import load_environment
from agro.types import Prompt

COUNT = '''
import os, signal, sys, time
from agro.rollout.envs import Turn
class Count:
    """Counts turns, beginning at the prompt's number."""
    name, stop, maximum = "count", ("!",), 5.0
    def __init__(self, drifts=False):
        self.offset = os.getpid() if drifts else 0
    def reset(self, prompt):
        return [prompt.columns["from"] + self.offset]
    def step(self, state, text):
        state[0] += 1
        if text == "hang": time.sleep(60)
        if text == "die": os.kill(os.getpid(), signal.SIGKILL)
        if text == "exit": os._exit(0)
        if text == "raise": raise KeyError("no such key")
        if text == "set": return Turn(">", info={"a": {1}})
        if text == "words": return "higher"
        if text == "tell": print("not the protocol's"); sys.stdout.flush()
        return Turn(f"{state[0]} {os.getpid()}" if text == "who" else str(state[0]), 0.5)
'''


@pytest.fixture
def count(tmp_path):
    (tmp_path / "count.py").write_text(COUNT)

    def opened(timeout=1.0, **options):
        name = f"{tmp_path / 'count.py'}:Count"
        return load_environment(config.EnvironmentConfig(name=name, options=options, timeout=timeout))

    return opened


def start(environment, number):
    return environment.reset(Prompt("p", columns={"from": number}))


def test_it_is_played_in_another_process(count):
    with closing(count()) as environment:
        assert (environment.name, environment.stop, environment.maximum) == ("count", ("!",), 5.0)
        episodes = [start(environment, n) for n in (10, 20)]
        said = [environment.step(e, "tell") for e in (*episodes, episodes[0])]
        assert [turn.observation for turn in said] == ["11", "21", "12"]
        assert said[0] == Turn("11", 0.5)
        assert int(environment.step(episodes[1], "who").observation.split()[1]) != os.getpid()


@pytest.mark.parametrize(
    ("text", "cause"),
    [("hang", "timed out after 1 s"), ("die", "killed by SIGKILL"), ("exit", "ended with status 0")],
)
def test_one_that_hangs_or_dies_fails_its_episode_alone(count, text, cause):
    with closing(count()) as environment:
        first, second = start(environment, 10), start(environment, 20)
        assert [environment.step(second, "a").observation for _ in range(2)] == ["21", "22"]
        began = time.monotonic()
        with pytest.raises(WrongResult, match=cause):
            environment.step(first, text)
        assert time.monotonic() - began < 8
        assert environment.step(second, "a").observation == "23"  # 21 and 22 are played again before it
        assert environment.step(start(environment, 30), "a").observation == "31"


def test_other_errors_leave_the_process_as_it_is(count):
    with closing(count()) as environment:
        episode = start(environment, 0)
        pid = environment.step(episode, "who").observation.split()[1]
        for text, error in (
            ("raise", r"KeyError: 'no such key' \(count.py:\d+\)"),
            ("set", "info"),
            ("words", "expected agro.rollout.envs.Turn"),
        ):
            with pytest.raises(WrongResult, match=error):
                environment.step(episode, text)
        assert environment.step(episode, "who").observation == f"5 {pid}"


def test_one_that_answers_otherwise_when_played_again_fails(count):
    with closing(count(drifts=True)) as environment:
        first, second = start(environment, 0), start(environment, 0)
        environment.step(second, "a")
        with pytest.raises(WrongResult, match="its process was killed by SIGKILL"):
            environment.step(first, "die")
        with pytest.raises(WrongResult, match="gave other replies"):
            environment.step(second, "a")


def test_what_it_is_told_at_its_start_is_refused(count):
    with pytest.raises(Refused, match="doesn't take wrong"):
        count(wrong=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("calculator", {}, "verifiers:ENV_ID, module:Class or file.py:Class"),
        ("agro.rollout.envs:Tool", {"cal": 1}, "unexpected keyword argument 'cal'"),
        ("agro.rollout.envs:Tool", {"call": ["a"]}, "options.call: expected the two texts"),
        ("agro.rollout.envs:Tool", {"error": 1}, "options.error: expected text, got 1"),
        ("agro.rollout.envs:Tool", {"result": "x"}, r"options.result: expected text with \{\}"),
        ("agro.rollout.envs:Nothing", {}, "has no 'Nothing'"),
        ("agro.types:Prompt", {"text": "x"}, "has no name, stop, reset, step"),
        ("nothing.py:A", {}, "environment.name: there is no file .*nothing.py"),
    ],
)
def test_what_cannot_be_loaded_is_refused(name, options, message):
    with pytest.raises(Refused, match=message):
        make_environment(name, options)


def test_ones_own_environment_is_loaded_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from agro.rollout.envs import Tool\nclass Shout(Tool):\n    name = 'shout'\n"
        "    def use(self, state, call):\n        return call.upper()\n"
    )
    found = make_environment(f"{tmp_path / 'mine.py'}:Shout", {"result": "{}"})
    assert found.step(None, "<call>hey</call>") == Turn("HEY", info={"tool": "shout"})


PROGRAM = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        last = messages[-1]["content"] if isinstance(messages[-1], dict) else messages[-1].content
        if last == "crash":
            raise vf.Error("the program broke")
        if last == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if last < state["answer"] else "lower"}]

async def found(completion, answer):
    last = [m for m in completion if (m["role"] if isinstance(m, dict) else m.role) == "assistant"][-1]
    return float((last["content"] if isinstance(last, dict) else last.content) == answer)

def load_environment(max_turns=3):
    data = Dataset.from_list([{"question": f"guess {i}", "answer": str(i)} for i in range(3, 6)])
    return Guess(dataset=data, system_prompt="be quick", rubric=vf.Rubric(funcs=[found]), max_turns=max_turns)
"""


@pytest.fixture
def guess(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.clients", reason="verifiers isn't installed: pip install '.[envs]'")
    (tmp_path / "guess_number.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return make_environment("verifiers:guess-number", {"max_turns": 3})


def prompt(guess, number):
    row = guess.prompts()[number]
    return Prompt(row.pop("prompt"), row.pop("prompt_id"), row)


def test_rollouts_are_played_turn_by_turn_beside_each_other(guess):
    asked = [prompt(guess, i) for i in range(3)]
    said = {"system": "be quick", "user": "guess 4"}
    assert asked[1].text == [{"role": role, "content": text} for role, text in said.items()]
    states = [guess.reset(p) for p in asked]
    first = [guess.step(s, "4") for s in states]
    assert [(t.observation, t.role, t.reward, t.done) for t in first] == [
        ("lower", "user", 0.0, False),
        (None, "user", 1.0, True),
        ("higher", "user", 0.0, False),
    ]
    second = [guess.step(states[i], "3") for i in (0, 2)]
    assert [(t.reward, t.done) for t in second] == [(1.0, True), (0.0, False)]
    last = guess.step(states[2], "1")  # the program's own max_turns
    assert (last.reward, last.done) == (0.0, True)


def test_an_error_of_the_program_is_the_episodes(guess):
    state = guess.reset(prompt(guess, 0))
    with pytest.raises(RuntimeError, match="the program broke"):
        guess.step(state, "crash")
    del state
    again = guess.reset(prompt(guess, 0))
    assert guess.step(again, "9").observation == "lower"
    del again  # in the middle: the rollout is given up without a word


def test_a_program_that_begins_otherwise_than_its_prompt_fails(guess, monkeypatch):
    async def setup_state(state):
        state["prompt"] = state["prompt"][:1]

    monkeypatch.setattr(guess.program, "setup_state", setup_state)
    with pytest.raises(ValueError, match=r"begins with .*be quick.*, not with the prompt"):
        guess.reset(prompt(guess, 0))


def test_without_the_library_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(Refused, match=r"pip install 'verifiers>=0\.1\.14,<0\.2'"):
        make_environment("verifiers:anything", {})
