"""The child process of `agro.rewards.workers`: loads one function and calls it, JSON lines in and out.

Its parent process only waits for it (`supervise`), so that everything a function started ends with it. It
uses only the standard library until a name is wrong, so it starts in about 50 ms. Its crashes don't affect
the trainer, which imports this module only to call functions in its own process. The first line of its input
is {"function", "path", "options", "limit"}, the others are {"id", "arguments", "n", "how", "limit"}, `how` a
key of `CALLS`. It replies to each with one line: {"parameters", "any", "maximum"} or {"refused"}, then {"id",
"scores": [[value, error], …]}, {"id", "error"}, or {"id", "refused"} if the function is wrong for every
batch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from operator import attrgetter
from typing import Any

Function = Callable[..., Any]
Columns = dict[str, Any]
INNER = (__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
KILL_SECONDS = 5.0  # for killed processes to end
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux
GRACE = 5.0  # seconds after a limit until the worker ends itself, if its parent died


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # keep the function's input and output out of the protocol
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("800")  # out of memory, Linux kills this process and not the trainer

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    setup = json.loads(requests.readline())
    sys.path[:] = setup["path"]
    name = setup["function"]
    with time_limit(setup["limit"]):
        function, problem = find(name)
    if inspect.isclass(function):
        problem = f"{name} is a class; give a function, or a callable instance of the class"
    elif not problem and not callable(function):
        problem = f"{name} is of type {type(function).__name__}, not a function"
    if problem:
        return reply(refused=problem)
    reply(**describe(function))
    for line in requests:
        request = json.loads(line)
        try:
            with time_limit(request["limit"]):
                scores = CALLS[request["how"]](function, request["arguments"], setup["options"], request["n"])
        except OneValue as error:
            reply(id=request["id"], refused=str(error))
        except BaseException as error:  # noqa: BLE001 any function may raise anything, SystemExit too
            own_file = "" if request["how"] == "value" else file_of(function)
            reply(id=request["id"], error=explain(error, own_file))
        else:
            reply(id=request["id"], scores=scores)
    return None


@contextlib.contextmanager
def time_limit(seconds: float) -> Any:
    """A time limit by the kernel, even without the parent and in C code; usually the parent acts first."""
    signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def find(name: str) -> tuple[Any, str]:
    """What `name` (module:NAME or file.py:NAME) stands for, or None and the reason."""
    module_name, _, path = name.rpartition(":")
    try:
        module = (
            load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
        )
    except BaseException as error:  # noqa: BLE001 a module may do anything when it is imported
        near = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            import pkgutil

            from agro.io.peers import did_you_mean

            modules = sorted({m.name for m in pkgutil.iter_modules() if not m.name.startswith("_")})
            near = f"; {did_you_mean(module_name, modules) or f'the working directory is {os.getcwd()}'}"
        return None, f"{module_name} can't be imported: {explain(error, module_name)}{near}"
    try:
        return attrgetter(path)(module), ""
    except AttributeError:
        from agro.io.peers import did_you_mean

        names = public_names(module)
        near = did_you_mean(path, names) or f"it has {', '.join(names) or 'no public name'}"
        return None, f"{module_name} has no {path!r}; {near}"


def public_names(module: Any) -> list[str]:
    """The public names that a module defines itself."""
    foreign = [vars(other) for other in list(sys.modules.values()) if other is not module]

    def is_own(name: str, value: Any) -> bool:
        defined_here = getattr(value, "__module__", module.__name__) == module.__name__
        return defined_here or not any(name in other and other[name] is value for other in foreign)

    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return [name for name, value in public.items() if not inspect.ismodule(value) and is_own(name, value)]


def load_file(path: str) -> Any:
    name = "reward_file_" + os.path.basename(path)[:-3]  # shadows no module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(path))
    spec.loader.exec_module(module)
    return module


def describe(function: Function) -> dict[str, Any]:
    """The function's parameters, whether it takes any (`**columns`), and the `maximum` that it declares."""
    maximum = number(getattr(function, "maximum", None))[0]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return {"parameters": [], "required": [], "any": True, "maximum": maximum}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        "parameters": [p.name for p in parameters if p.kind in named],
        "required": [p.name for p in parameters if p.kind in named and p.default is p.empty],
        "any": any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
        "maximum": maximum,
    }


def call(function: Function, arguments: Columns, options: Columns, n: int) -> list[Any]:
    result = finished(function(**arguments, **options))
    if isinstance(result, (str, bytes, dict)) or not hasattr(result, "__iter__"):
        if n > 1 and number(result)[0] is not None:
            raise OneValue(result, n)
        raise WrongResult(f"returned {result!r:.80}, expected a list with a number for each of {n} responses")
    values = list(result)
    if len(values) == 1 and n > 1:
        raise OneValue(values[0], n)
    if len(values) != n:
        raise WrongResult(f"returned {len(values)} values for {n} responses")
    return [number(value) for value in values]


def finished(result: Any) -> Any:
    """A function's result, awaited if it is a coroutine."""
    if not inspect.iscoroutine(result):
        return result
    import asyncio

    return asyncio.run(result)


def call_each(function: Function, arguments: Columns, options: Columns, n: int) -> list[Any]:
    """One call per row, with its values. Coroutines are awaited together; "score" of a dict is the number."""
    results: list[Any] = []
    for i in range(n):
        try:
            results.append(function(**{name: values[i] for name, values in arguments.items()}, **options))
        except Exception as error:  # noqa: BLE001 any function may raise anything
            results.append(error)
    if any(map(inspect.isawaitable, results)):
        import asyncio

        async def awaited(result: Any) -> Any:
            return await result if inspect.isawaitable(result) else result

        async def together() -> list[Any]:
            return await asyncio.gather(*map(awaited, results), return_exceptions=True)

        results = asyncio.run(together())
    return [outcome(result, function) for result in results]


def call_for_value(function: Function, arguments: Columns, options: Columns, n: int) -> list[Any]:
    """One call on one row, whose result must be JSON."""
    assert n == 1
    value = function(**{name: values[0] for name, values in arguments.items()}, **options)
    json.dumps(value)  # raises here, as an error of the call
    return [(value, None)]


def call_for_lists(function: Function, arguments: Columns, options: Columns, n: int) -> list[Any]:
    """A list of numbers for each row, or None if it is unknown."""
    rows = list(finished(function(**arguments, **options)))
    if len(rows) != n:
        raise WrongResult(f"returned {len(rows)} values for {n} responses")
    return [numbers(row) for row in rows]


def numbers(row: Any) -> tuple[list[float] | None, str | None]:
    if row is None or not hasattr(row, "__iter__") or isinstance(row, (str, bytes, dict)):
        return None, f"returned {row!r:.80}, expected a list of numbers"
    values = [number(value) for value in row]
    problem = next((error for _, error in values if error), None)
    return (None, problem) if problem else ([value for value, _ in values if value is not None], None)


CALLS = {"rows": call, "each": call_each, "value": call_for_value, "lists": call_for_lists}


def outcome(result: Any, function: Function) -> tuple[float | None, str | None]:
    if isinstance(result, Exception):
        return None, explain(result, file_of(function))
    return number(result["score"] if isinstance(result, dict) and "score" in result else result)


class WrongResult(Exception):
    pass


class OneValue(Exception):
    """One value for several responses: a mean, or the reward of one of them, that would count for all."""

    def __init__(self, value: Any, n: int) -> None:
        super().__init__(
            f"returned one value, {value!r:.40}, for {n} responses; expected a list with a number for each, "
            "such as [score(text) for text in completions]"
        )


def number(value: Any) -> tuple[float | None, str | None]:
    """(value, None) for a number or a NumPy or torch scalar, else (None, problem)."""
    if value is None:
        return None, "returned None"
    with contextlib.suppress(Exception):  # an array of several numbers has no item
        value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, (int, float)):
        return None, f"returned {value!r:.80}, expected a number"
    try:
        value = float(value)
    except OverflowError:
        return None, "returned an integer too large for a float"
    return (value, None) if math.isfinite(value) else (None, f"returned {value}")


def file_of(function: Function) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return str(code.co_filename) if code else ""


def explain(error: BaseException, file: str) -> str:
    """The exception's type and message, and the last line in the function's own file."""
    if isinstance(error, WrongResult):
        return str(error)
    location: tuple[str | None, int | None] = (None, None)
    if isinstance(error, SyntaxError):
        location = (error.filename, error.lineno)
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in INNER]
        for frame in [f for f in frames if f.filename == file][-1:] or frames[-1:]:
            location = (frame.filename, frame.lineno)
    try:
        text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    except Exception:  # noqa: BLE001 an exception whose __str__ fails
        text = ""
    suffix = f" ({os.path.basename(location[0])}:{location[1]})" if location[0] else ""
    return type(error).__name__ + (f": {text:.300}" if text else "") + suffix


def supervise() -> None:
    """Fork, and return in the child. This process then ends as the child does, and kills its descendants.

    Linux makes it the parent of orphaned descendants, also in other sessions. It ends on SIGTERM too, or when
    the input closes because the trainer died. On other systems this does nothing. A PID namespace would need
    privileges, and give all workers' functions the same process id, which they may use in file names.
    """
    import ctypes

    if sys.platform != "linux" or ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0):
        return
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)  # on SIGCHLD
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.close(wakes)
        os.close(wake)
        os.setpgid(0, 0)  # signals for the function's process group don't reach this process
        return
    os.dup2(2, 1)  # the worker's end closes the replies
    status = None
    try:
        status = wait_for(worker, wakes)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_children()
        end_like(status)


def wait_for(worker: int, wakes: int) -> int | None:
    """The worker's status when it ends; None when the input closes."""
    events = select.poll()
    events.register(0, 0)  # reports only its end
    events.register(wakes, select.POLLIN)
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == worker:
            return status
        if pid:
            continue  # an orphan
        for descriptor, _ in events.poll():
            if descriptor == 0:
                return None
            os.read(wakes, 4096)


def kill_children() -> None:
    """Kill the children, then those that they leave behind, until none is left."""
    end = time.monotonic() + KILL_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            for pid in children():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.002)


def children() -> list[int]:
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                pids.append(int(name))
    return pids


def end_like(status: int | None) -> None:
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    supervise()
    with contextlib.suppress(BrokenPipeError):  # the parent died while the function ran
        main()
