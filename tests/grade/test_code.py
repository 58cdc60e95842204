"""The reward `code`: right programs pass, and no program passes without solving its task."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from email.message import Message
from pathlib import Path
from subprocess import PIPE, run
from typing import Any

import pytest
from loopback import answering

from agro import config
from agro.errors import Refused
from agro.rewards import Score, load_reward
from agro.types import Sample
from agro_grade import sandbox
from agro_grade.code import Case, ProgramGrader, last_block
from agro_grade.guest import Program, decode, encode
from agro_grade.rewards import CodeOptions, CodeReward, code
from agro_grade.sandbox import ATTACKS, FILES, LEVELS, PROCESSES, LocalSandbox

ATTACKING = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/code/attacks.py"))
FORGERIES, ESCAPES, HONEST, TESTS, HOARDS = (
    ATTACKING[name] for name in ("FORGERIES", "ESCAPES", "HONEST", "TESTS", "HOARDS")
)


def opened(level: str, timeout: float = 2.0, **options: object) -> CodeReward:
    try:
        return code(CodeOptions(level=level, **options), timeout=timeout, workers=4)
    except Refused as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    with closing(opened("limits")) as reward:
        yield reward


def scored(reward: CodeReward, sources: dict[str, str]) -> dict[str, Score]:
    samples = [Sample("p", source, meta={"tests": TESTS}) for source in sources.values()]
    return dict(zip(sources, reward.score(samples), strict=True))


def test_no_program_forges_a_pass_or_costs_the_scoring_process_time(reward):
    began = time.process_time()
    scores = scored(reward, FORGERIES | {"honest": HONEST})
    assert time.process_time() - began < 10.0  # a set of colliding integers took 60 s
    assert {name: score.value for name, score in scores.items()} == {
        **dict.fromkeys(FORGERIES, 0.0),
        "honest": 1.0,
    }


def test_no_program_leaves_its_sandbox():
    with closing(opened("full")) as reward:
        scores = scored(reward, ESCAPES | {"honest": HONEST})
        assert {name: score.value for name, score in scores.items()} == {
            **dict.fromkeys(ESCAPES, 0.0),
            "honest": 1.0,
        }
        assert reward.score([Sample("p", HONEST, meta={"tests": TESTS})])[0].meta["reward_details"] == {
            "sandbox": "full"
        }


MB = 1 << 20


@pytest.mark.parametrize(("level", "kinds"), [("full", list(HOARDS)), ("namespaces", ["files", "processes"])])
def test_what_programs_hold_beside_their_memory_is_bounded(level, kinds):
    """256 MiB of shared memory and 300 processes were had before. A thread counts as a process."""
    most = dict.fromkeys(kinds, 2 * FILES) | {"processes": PROCESSES}
    with closing(opened(level, 10.0, memory_mb=128)) as reward:
        for kind in kinds:
            with closing(reward.grader.sandbox.start({"role": "program", "source": HOARDS[kind]})) as guest:
                reply = guest.ask(
                    {"id": "1", "name": "hoard", "args": [], "kwargs": {"t": "dict", "v": []}},
                    time.monotonic() + 20,
                )
            assert json.loads(reply["value"]) <= most[kind], (kind, reply)


def test_a_control_group_bounds_a_sandbox_from_its_start(tmp_path, monkeypatch):
    """In a plain folder: no machine of ours lets a test make a group of version 2."""
    monkeypatch.setattr(sandbox, "GROUPS", tmp_path)
    monkeypatch.setattr(sandbox.Path, "rmdir", shutil.rmtree)
    own = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    parent = (tmp_path / own).parent if own else tmp_path
    parent.mkdir(parents=True, exist_ok=True)
    (parent / "cgroup.subtree_control").write_text("cpu memory")
    bounded = LocalSandbox("limits", 128, _interpreter())
    with closing(bounded.start({"role": "program", "source": HONEST})):
        assert not list(parent.glob("agro-*"))  # nothing bounds the processes
    (parent / "cgroup.subtree_control").write_text("cpu memory pids")
    with closing(bounded.start({"role": "program", "source": HONEST})) as guest:
        [group] = parent.glob("agro-*")
        assert {file.name: int(file.read_text()) for file in group.iterdir()} == {
            "memory.max": 192 << 20,
            "memory.swap.max": 0,
            "memory.oom.group": 1,
            "pids.max": 128,
            "cgroup.procs": guest.pid,
        }
    assert not list(parent.glob("agro-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives each program a user of its own")
def test_at_limits_of_root_no_program_reaches_its_judge(reward):
    """Of one user, it could write the judge's reply through /proc/PID/fd."""
    forging = """
import glob, os
def add(a, b):
    reached = 0
    for process in glob.glob("/proc/[0-9]*"):
        if process != f"/proc/{os.getpid()}":
            try: reached += len(os.listdir(f"{process}/fd")) > 0
            except OSError: pass
    if reached: raise SystemExit(f"reached {reached}")
    return a + b
"""
    assert scored(reward, {"forging": forging})["forging"].value == 1.0


def test_a_layer_that_fails_is_named(monkeypatch):
    """A process with limits alone can reach the network, which it is then found to do."""
    found, interpreter = set(), _interpreter()
    for name, (_, deed) in list(ATTACKS.items()):
        monkeypatch.setitem(ATTACKS, name, ("limits", deed))
        if LocalSandbox("limits", 1024, interpreter).weakness() == f"a program in it {deed}":
            found.add(name)
        monkeypatch.setitem(ATTACKS, name, ("full", deed))
    assert found >= {"network", "read", "write", "process", "fork"}
    assert not found & {"environment", "memory"}


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_that_is_not_reached_is_refused(monkeypatch, level):
    monkeypatch.setattr(LocalSandbox, "weakness", lambda self: f"no {level}" if self.level == level else None)
    weaker = {"limits": "", "namespaces": "", "full": "level = 'namespaces'"}[level]
    with pytest.raises(Refused, match=rf"sandbox of the level 'full', but no {level}.*{weaker}"):
        code(CodeOptions(interpreter="/usr/bin/python3"), timeout=1.0, workers=1)


def _interpreter() -> str:
    with closing(opened("limits")) as reward:
        return reward.grader.sandbox.interpreter


TASKS = {  # columns, the prompt, a right response, a wrong one
    "functions": ({"tests": TESTS}, "", HONEST, "def add(a, b): return a"),
    "a block of a chat": ({"tests": TESTS}, "", f"Like this:\n```python\n{HONEST}```\nDone.", HONEST[:20]),
    "HumanEval": (
        {"entry_point": "half", "test": "def check(candidate):\n    assert candidate(twice(3)) == 3\n"},
        "def twice(x):\n    return 2 * x\n\n\ndef half(x):\n    '''x / 2'''\n",
        "    return x // 2\n",
        "    return x\n",
    ),
    "objects of the program": (
        {"test_list": ["assert depth(root) == 2"], "test_setup_code": "root = Node(1)\nroot.left = Node(2)"},
        "",
        "class Node:\n    left = None\n    def __init__(self, x): pass\n"
        "def depth(n): return 1 + depth(n.left) if n else 0",
        "class Node:\n    def __init__(self, x): pass\ndef depth(n): return 1",
    ),
    "the name of a built-in function": (
        {"test_list": ["assert sum(4, 6) == 3", "assert sum(1, 1) == 0"]},
        "",
        "def sum(a, b): return {4: 3, 1: 0}[a]",
        "def sum(a, b): return 3",
    ),
    "a class as an argument": (
        {"test_list": ["assert of_type([1, 'a'], str) == ['a']"]},
        "",
        "def of_type(xs, t): return [x for x in xs if isinstance(x, t)]",
        "def of_type(xs, t): return xs",
    ),
    "a main program": (
        {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]},
        "",
        "print(sum(map(int, input().split())), ' ')\nraise SystemExit",
        "print(3)",
    ),
    "an error": (
        {"test_list": ["try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False"]},
        "",
        "def f(x): raise ValueError('negative')",
        "def f(x): return 0",
    ),
    "an iterator": (
        {"test_list": ["assert list(f(3)) == [0, 1, 2]"]},
        "",
        "def f(n): yield from range(n)",
        "",
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_right_programs_pass(reward, name):
    columns, prompt, right, wrong = TASKS[name]
    samples = [Sample(prompt, response, meta=columns) for response in (right, wrong)]
    assert [score.value for score in reward.score(samples)] == [1.0, 0.0]
    assert [score.value for score in through_a_server(samples)] == [1.0, 0.0]


def as_piston(path: str, body: bytes, headers: Message) -> tuple[int, Any]:
    """What a server answers that runs programs as Piston does, though without a sandbox."""
    assert headers["Authorization"] == "Bearer secret"
    asked = json.loads(body)
    command = ["/usr/bin/python3", "-I", "-c", asked["files"][0]["content"]]
    done = run(command, input=asked["stdin"].encode(), stdout=PIPE, timeout=20, check=False)
    return 200, {"run": {"stdout": done.stdout.decode(), "code": done.returncode}}


def through_a_server(samples: list[Sample]) -> list[Score]:
    with (
        answering(as_piston) as url,
        closing(opened("limits", 30.0, url=f"{url}/api/v2/execute", api_key="secret")) as reward,
    ):
        return reward.score(samples)


def test_a_server_that_fails_leaves_the_reward_unknown():
    with closing(opened("limits", url="http://127.0.0.1:9/api/v2/execute")) as reward:
        [score] = reward.score([Sample("p", HONEST, meta={"tests": TESTS})])
    assert score.value is None
    assert "127.0.0.1:9" in score.error


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({}, "no tests"),
        ({"tests": [1]}, "as text"),
        ({"inputs": ["1"], "outputs": []}, "0 for 1"),
        ({"tests": ["assert f(lambda: 0) == 1"]}, "plain value"),
        ({"tests": ["assert f( == 1"]}, "SyntaxError"),
    ],
)
def test_tests_that_judge_nothing_leave_the_reward_unknown(reward, columns, error):
    [score, known] = reward.score(
        [Sample("p", HONEST, meta=columns), Sample("p", HONEST, meta={"tests": TESTS})]
    )
    assert score.value is None
    assert error in score.error
    assert known.value == 1.0


def test_tests_that_never_end_leave_the_reward_unknown(monkeypatch):
    monkeypatch.setitem(ProgramGrader.grade.__globals__, "GRACE", 0.5)
    with closing(opened("limits", 0.5)) as reward:
        [score] = reward.score([Sample("p", HONEST, meta={"tests": ["while True: pass"]})])
    assert score.value is None
    assert "didn't end" in score.error


def test_the_share_of_tests_that_pass():
    with closing(opened("limits", partial=True)) as reward:
        [score] = reward.score([Sample("p", "def add(a, b): return 5", meta={"tests": TESTS})])
    assert score.value == pytest.approx(1 / 3)
    assert score.parts == {"passed": pytest.approx(1 / 3)}


def test_options_are_checked():
    wrong = (
        ({"sandbox": 1}, "reward.options of code: unknown key sandbox"),
        ({"level": "none"}, "level: input should be 'limits', 'namespaces' or 'full', got 'none'"),
    )
    for options, error in wrong:
        with pytest.raises(Refused, match=error):
            load_reward(config.RewardConfig(name="code", options=options))


def test_it_is_loaded_by_its_name():
    opened("limits").close()
    with closing(load_reward(config.RewardConfig(name="code", options={"level": "limits"}))) as reward:
        assert reward.problem({"tests": TESTS}) is None
        assert "no tests" in reward.problem({})


PLAIN = [None, True, 1, -(2**70), 1.5, float("inf"), 2j, "ü\ud800", b"\0", [1, (2, {3})], {(1,): frozenset()}]


def test_plain_values_travel():
    assert decode(json.loads(json.dumps(encode(PLAIN)))) == PLAIN
    assert [type(value) for value in decode(encode([1, True, 1.0]))] == [int, bool, float]
    assert list(decode(encode(map(abs, [-1])))) == [1]
    with pytest.raises(TypeError, match="plain value, got a object"):
        encode(object())


@pytest.mark.parametrize(
    "value", [1.5, {"t": "int"}, {"t": "int", "v": 1}, {"t": "eval", "v": "1"}, {"a": 1}]
)
def test_nothing_else_is_a_plain_value(value):
    with pytest.raises(ValueError, match="plain"):
        decode(value)


def test_the_program_of_a_response():
    texts = {
        "a": "a",
        "```python\na\n```": "a",
        "```py\na\n```\n``` Python\r\nb\n```": "b",
        "```\na\n```": "a",
        "```json\n{}\n```\nso\n```python\na\n```": "a",
        "```python\na": "```python\na",  # it was cut
        "```python\n```": "",
    }
    assert {text: last_block(text) for text in texts} == texts


@pytest.mark.parametrize("piece", [" ", "\t", "```", "```\n", "```py\n", "``` ", "```py\r"])
def test_a_program_is_found_in_linear_time(piece):
    """A fence with 8,000 spaces took .67 s: two runs of spaces side by side were tried in all ways."""
    began = time.process_time()
    for text in (
        piece * (100_000 // len(piece)),
        "```" + piece * (100_000 // len(piece)),
        "```" + piece * 50 + "x\n```\n",
    ):
        last_block(text)
    assert time.process_time() - began < 0.3


def test_the_columns_of_known_sets():
    assert Case.of({"tests": "assert f()"}).tests == ("assert f()",)
    case = Case.of({"test": "def check(c): pass", "entry_point": "f"}, "def f():\n")
    assert case.tests == ("def check(c): pass\ncheck(f)",)
    continued = Program("    return 1", case.setup, case.arrangement, case.entry_point)
    assert continued.source == "def f():\n    return 1\n"
    assert Program("def f(): return 2", case.setup, "", "f").source == "def f():\n\ndef f(): return 2\n"
