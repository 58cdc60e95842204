"""The adapter to `verifiers`, on a program of ours that guesses numbers; skipped without the library."""

from __future__ import annotations

import sys

import pytest

from agro.errors import Refused
from agro.rollout.envs.playing import make_environment
from agro.types import Prompt

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
    assert asked[1].text == [
        {"role": "system", "content": "be quick"},
        {"role": "user", "content": "guess 4"},
    ]
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
