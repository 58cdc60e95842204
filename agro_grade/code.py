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

GRACE = 10.0  # seconds that tests may take in addition to the program
READING = 2.0  # least seconds for tests to read a program's value, which may be built to take hours


@dataclass(frozen=True)
class Case:
    """Tests that call a program's functions, or (input, output) pairs of its main program."""

    setup: str = ""  # code before the program and before the tests
    arrangement: str = ""  # code after the program and before the tests
    tests: tuple[str, ...] = ()
    entry_point: str | None = None
    runs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, columns: Mapping[str, Any], prompt: Any = None) -> Self:
        """The case in the columns `tests`, `entry_point` and `setup`, those of HumanEval (`test`, and the
        prompt as setup) or MBPP (`test_list`, `test_setup_code`), or `inputs` and `outputs`.

        Raises `LookupError` if they have no test.
        """
        tests = columns.get("tests") or columns.get("test_list")
        setup = columns.get("setup") or ""
        arrangement = columns.get("test_setup_code") or ""
        entry_point = columns.get("entry_point")
        if not tests and columns.get("test") and entry_point:  # HumanEval's check(candidate)
            preamble = columns.get("setup", prompt)
            setup = preamble if isinstance(preamble, str) else ""
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
    """The verdict on one program. `failures`: for each test why it fails, or None. `problem`: why the tests
    can't judge the program, or empty."""

    failures: tuple[str | None, ...] = ()
    problem: str = ""

    @property
    def passed(self) -> float | None:
        """The share of tests that pass; None if unknown."""
        return None if self.problem else self.failures.count(None) / len(self.failures)


class ProgramGrader:
    """Run programs and their tests in sandboxes. Don't close the grader while it grades."""

    def __init__(
        self, sandbox: Sandbox, judges: LocalSandbox, *, timeout: float = 10.0, workers: int = 1
    ) -> None:
        """
        Args:
            sandbox: runs the programs.
            judges: runs their tests.
            timeout: seconds a program may take for all tests.
            workers: programs graded at a time.
        """
        self.sandbox, self.timeout = sandbox, timeout
        self._judges = judges
        self._threads = ThreadPoolExecutor(workers)  # a sandbox ends with the thread that started it
        self._idle: SimpleQueue[Guest | None] = SimpleQueue()
        for _ in range(workers):
            self._idle.put(None)  # started when first used

    @classmethod
    def local(cls, level: Level = "full", *, timeout: float = 10.0, workers: int = 1) -> Self:
        """A grader on this machine. Raises `NoSandbox` if it can't stop what the level must."""
        sandbox = LocalSandbox.probed(level)
        return cls(sandbox, sandbox, timeout=timeout, workers=workers)

    def grade(self, response: str, case: Case) -> Verdict:
        return self.grade_all([response], [case])[0]

    def grade_all(self, responses: Sequence[str], cases: Sequence[Case]) -> list[Verdict]:
        """The verdict on each response's program by the tests of its case."""
        return list(self._threads.map(self._grade, responses, cases))

    def close(self) -> None:
        self._threads.shutdown()
        while not self._idle.empty():
            judge = self._idle.get()
            if judge is not None:
                judge.close()

    def _grade(self, response: str, case: Case) -> Verdict:
        opening: dict[str, Any] = {
            "source": last_block(response),
            "setup": case.setup,
            "arrangement": case.arrangement,
        }
        opening |= {"role": "program", "entry_point": case.entry_point}
        try:
            with closing(_Program(self.sandbox, opening, self.timeout)) as program:
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
        """A process for tests, reused for the next tests unless something goes wrong."""
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
    """The tests can't judge the program."""


class _Unreadable(Exception):
    """The tests' process ended, or took too long, while it read a value of the program."""


class _Program:
    """A program in a sandbox. Once it has ended, each request returns the cause as its error."""

    def __init__(self, sandbox: Sandbox, opening: Mapping[str, Any], timeout: float) -> None:
        self._sandbox, self._opening = sandbox, opening
        self._session: Session | None = None
        self.deadline = time.monotonic() + timeout
        self._end: str | None = None

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """{"value": text} or {"error": [type, text]}. This process reads no values."""
        if self._end is None:
            try:
                return self._answer(request)
            except GuestEnded as error:
                self._end = str(error)
                self.close()
        return {"error": ["RuntimeError", self._end]}

    def failure(self, stdin: str, expected: str) -> str | None:
        """Why the output differs from the expected one, ignoring white space at line ends."""
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
            self._session = self._sandbox.start(self._opening)
        number = secrets.token_hex(8)  # the request's id: earlier output isn't its answer
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
    """For each test why it fails, or None. Raises `_Unfit` if the tests themselves fail, `_Unreadable`
    if they can't read a value of the program."""
    end = program.deadline + GRACE
    message: Mapping[str, Any] = {
        "setup": case.setup,
        "arrangement": case.arrangement,
        "tests": case.tests,
        "entry_point": case.entry_point,
    }
    try:
        while True:
            reply = judge.ask(message, end)
            if "results" in reply:
                results = list(reply["results"])
                if len(results) != len(case.tests):
                    raise _JudgeEnded(f"expected {len(case.tests)} results of tests, got {len(results)}")
                return results
            if "unfit" in reply:
                raise _Unfit(f"the sample's tests can't be run: {reply['unfit']}")
            message = program.call(reply)
            if "value" in message:
                judge.write(message, end)
                try:
                    message = judge.read(max(program.deadline, time.monotonic() + READING))
                except GuestEnded as error:
                    raise _Unreadable(f"its answer can't be read: {error}") from None
    except GuestEnded as error:
        raise _JudgeEnded(f"the sample's tests didn't end: {error}") from None


class _JudgeEnded(_Unfit):
    """The tests' process can't be reused."""


def last_block(response: str) -> str:
    """The program in a response: its last code block in Python or without a language, else all of it."""
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
