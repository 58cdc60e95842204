"""The process in a sandbox: a program that answers calls, or tests that make them.

The program and its tests run in two sandboxes, which exchange only plain values, through the grading
process. So a program can't reach what judges it: it may only return values.

Standard library only. A sandbox runs the text of this file. Messages are lines of JSON. The first message
is {"role": "program", "source", "setup", "arrangement", "entry_point", "limits"}, or {"role": "tests",
"limits"}; then each request is answered:

- to a program: {"id", "name", "args", "kwargs"}, answered by {"id", "value"}, the JSON of a value as text;
  {"id", "stdin"} to run it again as a main program, answered by {"id", "value"} with its output; or
  both by {"id", "error": [type, text]};
- to tests: {"setup", "arrangement", "tests", "entry_point"}, answered by {"results": [null or error, …]} or
  {"unfit": error}; in between they send {"name", "args", "kwargs"}, read the program's answer, send {} and
  receive {}. Only they read values, which may take hours: a set of integers with one hash.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import os
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from itertools import islice
from typing import Any, NamedTuple, NoReturn

LONGEST = 1_000_000  # most values read from an iterator
SMALL = 2**53  # larger integers are sent as text
_SEVERAL: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_READ: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": complex,
    "bytes": bytes.fromhex,
}


class Unfit(Exception):
    """The tests can't judge any program: their own code fails, or they pass a value that isn't plain."""


class Handle:
    """In the tests, a reference to an object of the program. It can only be passed on."""

    def __init__(self, number: int | str) -> None:
        self.number = number


class Named:
    """In the tests, a reference to a name of the program: it can be called, and passed on."""

    def __init__(self, name: str, ask: Callable[[str, Any, Any], Any]) -> None:
        self.name = name
        self._ask = ask

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            sent = encode(list(args)), encode(kwargs)
        except TypeError as error:
            raise Unfit(f"{self.name}: {error} as an argument") from None
        return self._ask(self.name, *sent)


_WRITTEN: tuple[tuple[str, Any, Callable[[Any], Any]], ...] = (
    ("int", int, hex),
    ("float", float, lambda value: repr(float(value))),
    ("complex", complex, lambda value: repr(complex(value))),
    ("bytes", (bytes, bytearray), lambda value: value.hex()),
    ("object", Handle, lambda value: value.number),
    ("name", Named, lambda value: value.name),
)


def encode(value: Any, objects: list[Any] | None = None) -> Any:
    """A value as JSON. A value that isn't plain becomes its index in `objects`; without `objects` it
    raises `TypeError`."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and abs(value) < SMALL:
        return int(value)
    if isinstance(value, list):
        return [encode(item, objects) for item in value]
    kind, inner = _tagged(value, objects)
    return {"t": kind, "v": inner}


def _tagged(value: Any, objects: list[Any] | None) -> tuple[str, Any]:
    """The tag of a value that JSON lacks, and the JSON that it is made from."""
    for tag, type_, write in _WRITTEN:
        if isinstance(value, type_):
            return tag, write(value)
    name = getattr(value, "__name__", None)
    if isinstance(value, type) and vars(builtins).get(name or "") is value:
        return "name", name
    if isinstance(value, Mapping):
        return "dict", [[encode(k, objects), encode(v, objects)] for k, v in value.items()]
    for tag, type_ in _SEVERAL.items():
        if isinstance(value, type_):
            return tag, [encode(item, objects) for item in value]
    if isinstance(value, Iterable) and not hasattr(value, "__len__"):
        return "iterator", [encode(item, objects) for item in islice(value, LONGEST)]
    if objects is None:
        raise TypeError(f"expected a plain value, got a {type(value).__name__}")
    objects.append(value)
    return "object", len(objects) - 1


def decode(value: Any, refer: Callable[[str | int], Any] | None = None) -> Any:
    """A value from JSON. `refer` finds the objects that it refers to by number or name; without it they
    become a `Handle`. Raises `ValueError` for JSON that `encode` doesn't write."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, list):
        return [decode(item, refer) for item in value]
    if not isinstance(value, dict) or set(value) != {"t", "v"}:
        raise ValueError("not a plain value")
    kind: Any = value["t"]
    inner: Any = value["v"]
    if (kind, type(inner)) in (("object", int), ("name", str)):
        return Handle(inner) if refer is None else refer(inner)
    if kind in _READ and isinstance(inner, str):
        return _READ[kind](inner)
    if kind == "dict" and isinstance(inner, list):
        return {decode(k, refer): decode(v, refer) for k, v in inner}
    if kind == "iterator" and isinstance(inner, list):
        return iter([decode(item, refer) for item in inner])
    if kind in _SEVERAL and isinstance(inner, list):
        return _SEVERAL[kind](decode(item, refer) for item in inner)
    raise ValueError("not a plain value")


class Program:
    """A program whose functions are called by name.

    A source that doesn't define the entry point continues the setup, as completions of HumanEval do.
    """

    def __init__(
        self, source: str, setup: str = "", arrangement: str = "", entry_point: str | None = None, **_: Any
    ) -> None:
        is_whole = entry_point is None or entry_point in _defined(source)
        self.source = f"{setup}{is_whole * chr(10)}{source}\n{arrangement}"
        self.objects: list[Any] = []
        self.names: dict[str, Any] | None = None  # the program's, once it has run

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "stdin" in request:
                return {"value": self.run(request["stdin"])}
            with redirect_stdout(io.StringIO()):
                return {"value": json.dumps(encode(self.call(request), self.objects))}
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it must not end this process
            return {"error": [type(error).__name__, str(error)[:500]]}

    def call(self, request: dict[str, Any]) -> Any:
        if self.names is None:
            self.names = {"__name__": "program"}
            exec(compile(self.source, "program.py", "exec"), self.names)
        args, kwargs = decode(request["args"], self.find), decode(request["kwargs"], self.find)
        return self.find(request["name"])(*args, **kwargs)

    def find(self, reference: str | int) -> Any:
        if isinstance(reference, int):
            return self.objects[reference]
        assert self.names is not None
        return self.names[reference] if reference in self.names else getattr(builtins, reference)

    def run(self, stdin: str) -> str:
        """The output of the program, run as a main program."""
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        with redirect_stdout(output):
            try:
                exec(compile(self.source, "program.py", "exec"), {"__name__": "__main__"})
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
        return output.buffer.getvalue().decode("utf-8", "replace")


class Tests:
    """Tests of a program in another process: `ask` calls one of its functions."""

    def __init__(self, ask: Callable[[str, Any, Any], Any]) -> None:
        self.ask = ask

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            names = self._names(request)
            codes = [compile(test, "tests.py", "exec") for test in request["tests"]]
            return {"results": [self._result(code, dict(names)) for code in codes]}
        except Exception as error:  # noqa: BLE001 - tests are arbitrary code
            return {"unfit": f"{type(error).__name__}: {error}"[:500]}

    def _names(self, request: dict[str, Any]) -> dict[str, Any]:
        """The names that the tests see: the setup's, modules, and all others from the program."""
        names: dict[str, Any] = {"__name__": "tests"}
        exec(compile(request["setup"], "setup.py", "exec"), names)
        theirs: set[str] = set()
        try:
            exec(compile(request["arrangement"], "setup.py", "exec"), names)
        except NameError:  # it makes objects of the program's classes
            theirs = _used(request["arrangement"]).stored
        uses = [_used(test) for test in request["tests"]]
        read = set().union(*(use.read - use.stored for use in uses)) - theirs
        missing = read - set(names) - set(dir(builtins))
        modules = {name for name in missing if name in sys.stdlib_module_names}
        names |= {name: importlib.import_module(name) for name in modules - {request["entry_point"]}}
        theirs |= missing - modules
        if not theirs and request["entry_point"] is None:  # the program has the name of a built-in function
            theirs = set.intersection(*(use.called for use in uses))
        names |= {name: Named(name, self.ask) for name in theirs}
        if request["entry_point"] is not None:
            names |= dict.fromkeys(
                ("candidate", request["entry_point"]), Named(request["entry_point"], self.ask)
            )
        return names

    def _result(self, code: Any, names: dict[str, Any]) -> str | None:
        """Why a test fails; None if it passes."""
        try:
            with redirect_stdout(io.StringIO()):
                exec(code, names)
        except Unfit:
            raise
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"[:500]
        return None


def _defined(source: str) -> set[str]:
    """The names of a program's top-level functions and classes; none if it can't be parsed."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return {
        node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }


class Uses(NamedTuple):
    """Names in a piece of code."""

    read: set[str]
    stored: set[str]
    called: set[str]


def _used(source: str) -> Uses:
    uses = Uses(set(), set(), set())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (uses.read if isinstance(node.ctx, ast.Load) else uses.stored).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            uses.stored.add(node.name)
        elif isinstance(node, ast.arg):
            uses.stored.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            uses.stored.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            uses.called.add(node.func.id)
    return uses


def _raise(error: list[str]) -> NoReturn:
    """Raise the program's error, as the built-in exception of its name if there is one."""
    kind = getattr(builtins, error[0], None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = RuntimeError
    raise kind(error[1])


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # keep the program's input and output apart from the protocol's
        os.dup2(null, standard)

    def read() -> Any:
        line = requests.readline()
        if not line:
            os._exit(0)
        return json.loads(line)

    def write(message: Any) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    def ask(name: str, args: Any, kwargs: Any) -> Any:
        write({"name": name, "args": args, "kwargs": kwargs})
        reply = read()
        if "error" in reply:
            _raise(reply["error"])
        try:
            value, error = decode(json.loads(reply["value"])), None
        except Exception as problem:  # noqa: BLE001 - the reply may be any JSON
            value, error = None, ["ValueError", f"its answer isn't a plain value ({type(problem).__name__})"]
        write({})
        read()
        return _raise(error) if error else value

    opening = read()
    for name, limit in opening["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    sys.setrecursionlimit(10_000)
    responder: Program | Tests = Program(**opening) if opening["role"] == "program" else Tests(ask)
    while True:
        request = read()
        reply = responder.answer(request)
        write({"id": request["id"], **reply} if "id" in request else reply)


if __name__ == "__main__":
    main()
