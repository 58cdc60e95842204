"""Environments around a tool, and what can't be loaded."""

from __future__ import annotations

import pytest

from agro.errors import Refused
from agro.rollout.envs import Turn
from agro.rollout.envs.playing import make_environment


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
