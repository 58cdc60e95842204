"""An environment that hangs, crashes or dies ends with its episode; the others are played again."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest

from agro import config
from agro.errors import Refused
from agro.io.worker import WrongResult
from agro.rollout.envs import Turn, load_environment
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
        with pytest.raises(WrongResult):
            environment.step(first, "die")
        with pytest.raises(WrongResult, match="answered otherwise"):
            environment.step(second, "a")


def test_what_it_is_told_at_its_start_is_refused(count):
    with pytest.raises(Refused, match="doesn't take wrong"):
        count(wrong=1)
