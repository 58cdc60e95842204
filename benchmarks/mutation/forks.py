"""A mutant's life: a fork in which it stands in the place of the code, and the tests that call it.

Forks share what was loaded before: torch, and of a session the collected tests.
"""

from __future__ import annotations

import gc
import inspect
import os
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["AGRO_MUTANTS"] = "1"  # else autograd has threads, without which no fork can go backward
os.environ["TOKENIZERS_PARALLELISM"] = "false"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import hypothesis  # noqa: E402, F401  (these take seconds: loaded once, before the forks)
import libcst as cst  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.profiler  # noqa: E402, F401
from _pytest.runner import runtestprotocol  # noqa: E402
from mutants import Mutant  # noqa: E402
from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: E402, F401


def named(folder: str, names: str) -> list[str]:
    """Files of tests."""
    return [f"tests/{folder}/test_{name}.py" for name in names.split()]


STEP = named("train", "step")
HF = named("engines", "hf fused")
OBJECTIVES = [
    *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests/objectives").glob("test_*.py"))),
    "tests/proof/test_expectation.py",
    "tests/proof/test_claims.py",
]
# The tests of each file or folder.
AREAS = {
    "agro/objectives": OBJECTIVES,
    "agro_papers/methods": OBJECTIVES,
    "agro/train/step.py": STEP,
    "agro/models/logprobs.py": named("models", "logprobs policy"),
    "agro/rollout/engines/draw.py": named("engines", "draw"),
    "agro/rollout/engines/hf.py": HF,
    "agro/rollout/engines/decoding_rows.py": HF,
    "agro/store/draw_rules.py": named("store", "draw_rules pairs drawing candidates split"),
    "agro/train/collate.py": [
        *STEP,
        *named("train", "references value kept reward_parts feed preferences mixture_rules"),
    ],
    "agro/train/phases.py": named(
        "train", "schedule plan trust_region feed consistency reward_parts mixture_rules"
    ),
}
FILES = [p for area in AREAS for p in (sorted((ROOT / area).glob("*.py")) or [ROOT / area])]
TESTS = list(dict.fromkeys(test for tests in AREAS.values() for test in tests))
# Seconds of CPU of tests for a mutant; one that only a later test would notice counts as survived.
BUDGET = 8.0
SPARE = 10  # seconds of CPU that a test may take beyond five times what it takes of the code as it is
MISPLACED = 70  # exit status of a fork that couldn't put its mutant in place
# A profiler, and several threads, hang in a fork where they ran before it. So do complete runs.
LEFT_OUT = (
    *("memory_beside_logits", "peak_bytes", "threads_are_set"),
    *("the_path_is_that_of", "cannot_follow", "computed_once", "another_run", "killed_run"),
)
OPTIONS = [
    "-o",
    "addopts=",
    "-q",
    "-q",
    "-x",
    "--assert=plain",
    "-p",
    "no:cacheprovider",
    "-k",
    " and ".join(f"not {name}" for name in LEFT_OUT),
]


def tests_of(path: Path) -> list[str]:
    return next(tests for area, tests in AREAS.items() if path.is_relative_to(ROOT / area))


def outermost(qualified: str) -> str:
    return qualified.split(".<locals>")[0]


@contextmanager
def calls(seen: set[tuple[str, str]]) -> Iterator[None]:
    """Note (file, function) of every call in FILES; a nested function counts as the one that it stands in."""
    files = {str(p) for p in FILES}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            seen.add((frame.f_code.co_filename, outermost(frame.f_code.co_qualname)))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def forked(work: Callable[[], bool]) -> str:
    """ "killed" where `work` is false or raises, "survived" where it is true, "timeout" at the time limit."""
    pid = os.fork()
    if pid == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            os._exit(0 if work() else 1)
        except BaseException:  # noqa: BLE001  a mutant may raise anything
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code != MISPLACED
    return "survived" if code == 0 else "timeout" if code in (-signal.SIGXCPU, -signal.SIGALRM) else "killed"


def limit(seconds: float) -> None:
    """Kill this process after so many more seconds of CPU, or ten times as many of waiting."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1, resource.RLIM_INFINITY))
    signal.alarm(int(10 * seconds) + 1)


class Session:
    """A pytest plugin: in the place of the tests' run, the mutants of functions and of tables."""

    def __init__(self, todo: list[Mutant], keep: Callable[[Mutant, str, float, str], None]) -> None:
        self.todo, self.keep = todo, keep
        self.early: set[tuple[str, str]] = set()  # called at import and at collection
        self.called: dict[pytest.Item, set[tuple[str, str]]] = {}
        self.seconds: dict[pytest.Item, float] = {}  # of CPU
        self.killers: dict[tuple[str, str], Counter[pytest.Item]] = defaultdict(Counter)
        self.failed: Callable[[pytest.Item], None] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """The first failure ends a mutant, before pytest has made its pages of it."""
        if self.failed and call.excinfo and not call.excinfo.errisinstance(pytest.skip.Exception):
            self.failed(item)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        sys.setprofile(None)
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            start, self.called[item] = time.process_time(), set()
            with calls(self.called[item]):
                reports = runtestprotocol(item, nextitem=following, log=False)
            self.seconds[item] = time.process_time() - start
            if any(r.failed for r in reports):
                raise SystemExit(f"{item.nodeid} fails of the code as it is")
        gc.collect()
        gc.freeze()  # so that collections of garbage in the forks don't copy what they share
        for first in {(m.path, m.function): m for m in self.todo}.values():
            if outcome := self.attempt(replace(first, new=first.old), 0.0):
                assert outcome[0] == "survived", (
                    f"{first.path}: {first.function}: not killed by its change: {outcome}"
                )
        for mutant in self.todo:
            start = time.monotonic()
            if outcome := self.attempt(mutant, BUDGET):
                self.keep(mutant, outcome[0], time.monotonic() - start, outcome[1])
        return True

    def chosen(self, where: tuple[str, str], every: bool, budget: float) -> list[pytest.Item]:
        """Tests that call it, or `every` one of its file, up to a budget.

        First those that killed most, then those that call it, of these one of each test function, then the
        quickest.
        """
        often = self.killers[where]
        files = tests_of(Path(where[0])) if every else []
        calling = [i for i, f in self.called.items() if where in f or i.nodeid.split("::")[0] in files]
        items = sorted(calling, key=lambda i: self.seconds[i])
        firsts = set({i.nodeid.split("[")[0]: i for i in reversed(items)}.values())
        called = self.called
        items.sort(key=lambda i: (-often[i], where not in called[i], i not in firsts, self.seconds[i]))
        spent = list(accumulate(self.seconds[i] for i in items))
        return [i for i, total in zip(items, spent, strict=True) if total <= budget + self.seconds[i]]

    def attempt(self, mutant: Mutant, budget: float) -> tuple[str, str] | None:
        """Outcome and the test that killed it; None where the mutant would have to be imported anew."""
        where = (str(mutant.path), mutant.function or "")
        early = mutant.function is None or where in self.early
        if early and any(isinstance(x, cst.ClassDef) for x in mutant.module.body):
            return None  # to execute the file once more would leave objects of its old classes
        if (
            mutant.function is None
            and mutant.path.parent.name == "objectives"
            and mutant.path.stem != "table"
        ):
            return None  # and the options that were made of the old signatures
        items = self.chosen(where, early, budget)
        read, write = os.pipe()

        def failed(item: pytest.Item) -> None:
            os.write(write, str(items.index(item)).encode())
            os._exit(1)

        def work() -> bool:
            self.failed = failed
            (execute if early else swap)(mutant)
            for item, following in zip(items, [*items[1:], None]):
                limit(SPARE + 5 * self.seconds[item])
                runtestprotocol(item, nextitem=following, log=False)
            return True

        outcome = forked(work)
        os.close(write)
        number = os.read(read, 20)
        os.close(read)
        killer = items[int(number)] if number else None
        if killer:
            self.killers[where][killer] += 1
        return outcome, killer.nodeid if killer else ""


def swap(mutant: Mutant) -> None:
    """Put the mutant's code into the function that is there."""
    assert mutant.function is not None
    found: Any = sys.modules[name_of(mutant.path)]
    try:
        for part in mutant.function.split("."):
            found = inspect.getattr_static(found, part)
        while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
            found = next(getattr(found, k) for k in ("__wrapped__", "fget", "func") if hasattr(found, k))
        found.__code__ = code_of(compile(mutant.source(), str(mutant.path), "exec"), mutant.function)
    except (AttributeError, StopIteration, ValueError):
        os._exit(MISPLACED)


def execute(mutant: Mutant) -> None:
    """Execute the mutant's file in the module that is loaded.

    Its tables and functions stay the objects that others have imported.
    """
    names = vars(sys.modules[name_of(mutant.path)])
    before = dict(names)
    exec(compile(mutant.source(), str(mutant.path), "exec"), names)
    for name, old in before.items():
        changed = names[name]
        if changed is old:
            continue
        if isinstance(old, dict) and name.isupper():
            old.clear()
            old.update(changed)
        elif isinstance(old, FunctionType) and isinstance(changed, FunctionType) and not old.__closure__:
            old.__code__, old.__defaults__ = changed.__code__, changed.__defaults__
            old.__kwdefaults__ = changed.__kwdefaults__
        else:
            continue
        names[name] = old


def code_of(code: CodeType, qualified: str) -> CodeType:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    for c in inner:
        if c.co_qualname == qualified:
            return c
    return next(
        code_of(c, qualified)
        for c in inner
        if qualified.startswith(c.co_qualname + ".") and c.co_name != "<lambda>"
    )


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
