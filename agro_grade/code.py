"""Does the program in a response pass its tests?

The program runs in one sandbox, its tests in another. This process passes calls from the tests to the program
and plain values back, so that a program can only pass by returning what the tests expect.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Self

from agro_grade.sandbox import Guest, GuestEnded, Level, LocalSandbox, Sandbox, Session

GRACE = 10.0  # seconds that tests may take beside the program
READING = 2.0  # seconds in which they read a value of the program's, at least: it may be made to take hours


@dataclass(frozen=True)
class Case:
    """What judges programs: tests that call their functions, or (input, output) of their main programs."""

    setup: str = ""  # code before the program and before the tests
    arrangement: str = ""  # code after the program and before the tests
    tests: tuple[str, ...] = ()
    entry_point: str | None = None
    runs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, columns: Mapping[str, Any], prompt: Any = None) -> Self:
        """From the columns `tests`, `entry_point` and `setup`, or those of HumanEval (`test`, and the prompt
        as setup), MBPP (`test_list`, `test_setup_code`), or `inputs` and `outputs`.

        Raises `LookupError` where they have no test.
        """
        tests = columns.get("tests") or columns.get("test_list")
        setup = columns.get("setup") or ""
        arrangement = columns.get("test_setup_code") or ""
        entry_point = columns.get("entry_point")
        if not tests and columns.get("test") and entry_point:  # HumanEval's check(candidate)
            given = columns.get("setup", prompt)
            setup = given if isinstance(given, str) else ""
            tests = [f"{columns['test']}\ncheck({entry_point})"]
        tests = [tests] if isinstance(tests, str) else tests or []
        texts = [*tests, setup, arrangement, "" if entry_point is None else entry_point]
        if not all(isinstance(text, str) for text in texts):
            raise LookupError("expected tests, setup and entry_point as text")
        inputs, outputs = columns.get("inputs") or (), columns.get("outputs") or ()
        if len(inputs) != len(outputs):
            raise LookupError(f"expected as many outputs as inputs, got {len(outputs)} for {len(inputs)}")
        runs = tuple(zip(inputs, outputs, strict=True))
        if not tests and not runs:
            raise LookupError(
                "the sample has no tests, test and entry_point, test_list, or inputs and outputs"
            )
        if not all(isinstance(text, str) for run in runs for text in run):
            raise LookupError("expected inputs and outputs as lists of text")
        return cls(setup, arrangement, tuple(tests), entry_point, runs)


@dataclass(frozen=True)
class Verdict:
    """On one program. `failures`: of each test why it fails, or None. `problem`: why the tests can't judge
    it, where they can't."""

    failures: tuple[str | None, ...] = ()
    problem: str = ""

    @property
    def passed(self) -> float | None:
        """The share of tests that pass; None where that is unknown."""
        return None if self.problem else self.failures.count(None) / len(self.failures)


class ProgramGrader:
    """Runs programs and their tests in sandboxes. It must not be closed while it grades."""

    def __init__(
        self, sandbox: Sandbox, judges: LocalSandbox, *, timeout: float = 10.0, workers: int = 1
    ) -> None:
        """
        Args:
            sandbox: of the programs.
            judges: of their tests.
            timeout: seconds a program may take for all tests.
            workers: programs at a time.
        """
        self.sandbox, self.timeout = sandbox, timeout
        self._judges = judges
        self._threads = ThreadPoolExecutor(workers)  # a sandbox ends with the thread that started it
        self._idle: SimpleQueue[Guest | None] = SimpleQueue()
        for _ in range(workers):
            self._idle.put(None)  # started when first used

    @classmethod
    def local(cls, level: Level = "full", *, timeout: float = 10.0, workers: int = 1) -> Self:
        """On this machine. Raises `NoSandbox` where it can't stop what the level has to."""
        sandbox = LocalSandbox.probed(level)
        return cls(sandbox, sandbox, timeout=timeout, workers=workers)

    def grade(self, response: str, case: Case) -> Verdict:
        return self.grade_all([response], [case])[0]

    def grade_all(self, responses: Sequence[str], cases: Sequence[Case]) -> list[Verdict]:
        """Of each response whether its program passes the tests of its case."""
        return list(self._threads.map(self._grade, responses, cases))

    def close(self) -> None:
        self._threads.shutdown()
        while not self._idle.empty():
            judge = self._idle.get()
            if judge is not None:
                judge.close()

    def _grade(self, response: str, case: Case) -> Verdict:
        first: dict[str, Any] = {
            "source": last_block(response),
            "setup": case.setup,
            "arrangement": case.arrangement,
        }
        first |= {"role": "program", "entry_point": case.entry_point}
        try:
            with closing(_Program(self.sandbox, first, self.timeout)) as program:
                failures = [program.failure(*run) for run in case.runs]
                if case.tests:
                    try:
                        with self._judge() as judge:
                            failures += _judged(judge, case, program)
                    except _Unreadable as error:
                        failures += [str(error)] * len(case.tests)
        except (_Unfit, ConnectionError) as error:
            return Verdict(problem=str(error))
        return Verdict(tuple(failures))

    @contextmanager
    def _judge(self) -> Iterator[Guest]:
        """A process for tests, kept for the next ones unless something goes wrong."""
        judge = self._idle.get()
        try:
            if judge is None:
                judge = self._judges.start({"role": "tests"})
            yield judge
        except BaseException:
            if judge is not None:
                judge.close()
            judge = None
            raise
        finally:
            self._idle.put(judge)


class _Unfit(Exception):
    """The tests can't say anything about the program."""


class _Unreadable(Exception):
    """The process of the tests ended, or took too long, as it read a value of the program's."""


class _Program:
    """A program in a sandbox. After its end, each request has the cause of it as its error."""

    def __init__(self, sandbox: Sandbox, first: Mapping[str, Any], timeout: float) -> None:
        self._sandbox, self._first = sandbox, first
        self._session: Session | None = None
        self.deadline = time.monotonic() + timeout
        self._end: str | None = None

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """{"value": text} or {"error": [type, text]}. No value is read in this process."""
        if self._end is None:
            try:
                return self._answer(request)
            except GuestEnded as error:
                self._end = str(error)
                self.close()
        return {"error": ["RuntimeError", self._end]}

    def failure(self, stdin: str, expected: str) -> str | None:
        """Why what it prints isn't what is expected, but for white space at the ends of lines."""
        reply = self.call({"stdin": stdin})
        if "error" in reply:
            return ": ".join(reply["error"])
        printed = reply["value"]
        same = _lines(printed) == _lines(expected)
        return None if same else f"expected {expected[:80]!r}, got {printed[:80]!r}"

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is None:
            self._session = self._sandbox.start(self._first)
        number = secrets.token_hex(8)  # of this request: what was written before it is no answer
        reply = self._session.ask({"id": number, **request}, self.deadline)
        if reply.get("id") != number or len(reply) != 2:
            raise GuestEnded("it answered another request")
        if "error" in reply:
            error = reply["error"]
            if not (isinstance(error, list) and len(error) == 2 and all(isinstance(e, str) for e in error)):
                raise GuestEnded("its answer isn't an error")
            return {"error": error}
        if not isinstance(reply.get("value"), str):
            raise GuestEnded("its answer isn't a value")
        return {"value": reply["value"]}


def _judged(judge: Guest, case: Case, program: _Program) -> list[str | None]:
    """Of each test why it fails, or None. Raises `_Unfit` where the tests fail by themselves, `_Unreadable`
    where a value of the program's can't be read."""
    end = program.deadline + GRACE
    message: Mapping[str, Any] = {
        "setup": case.setup,
        "arrangement": case.arrangement,
        "tests": case.tests,
        "entry_point": case.entry_point,
    }
    try:
        while True:
            asked = judge.ask(message, end)
            if "results" in asked:
                results = list(asked["results"])
                if len(results) != len(case.tests):
                    raise _JudgeEnded(f"expected {len(case.tests)} results of tests, got {len(results)}")
                return results
            if "unfit" in asked:
                raise _Unfit(f"the sample's tests can't be run: {asked['unfit']}")
            message = program.call(asked)
            if "value" in message:
                judge.write(message, end)
                try:
                    message = judge.read(max(program.deadline, time.monotonic() + READING))
                except GuestEnded as error:
                    raise _Unreadable(f"its answer can't be read: {error}") from None
    except GuestEnded as error:
        raise _JudgeEnded(f"the sample's tests didn't end: {error}") from None


class _JudgeEnded(_Unfit):
    """The process of the tests can't be used again."""


def last_block(response: str) -> str:
    """The program in a response: its last block of Python, or of no language, else all of it."""
    lines = response.split("\n")
    opened: int | None = None  # the first line of a block
    language, block = "", slice(None)
    for i, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened, language = i + 1, line[3:].strip(" \t\r").lower()
            continue
        if language in ("", "py", "python"):
            block = slice(opened, i)
        opened = None
    return "\n".join(lines[block])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
