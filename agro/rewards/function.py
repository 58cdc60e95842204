"""Python functions as rewards, with the signature that TRL's or verl's trainers call.

    def reward(prompts, completions, **columns) -> list[float | None]

All arguments are passed by name, each a list with one value per response:
- `prompts`: text, or messages; `completions`: text, or for messages [{"role": "assistant", "content": …}];
- `completion_ids`: the response's tokens with the end token, None if they are unknown;
- every column of the prompts file (the samples' `meta`), None if a sample has no value. agro's own entries
  (`RESERVED`) are not passed;
- `ends`: "finished", "cut" or "unknown"; `thoughts`: "open" (it isn't closed) or "closed", None without one.
  Only a function that names them gets them, and a column of the same name has precedence;
- `reward.options` of the configuration.
A function without `**columns` gets the arguments that it names. It may be `async`. It should score each
response independently: which responses share a call is undefined, and a failed call is repeated per response.

    def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict

A function that names `solution_str` and `ground_truth` is called as verl does: once per response, with all
arguments by name. `solution_str` is the response; `data_source` and `extra_info` are the columns of these
names (default None and {}); `ground_truth` is that column, or `reward_model.ground_truth`, or `answer`. If it
returns a dict, "score" is the reward. It may be `async`: a worker awaits all of its responses together.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from agro.errors import Refused
from agro.io import plugins
from agro.io.peers import did_you_mean
from agro.io.worker import CALLS, OneValue, describe, explain, file_of
from agro.rewards.protocol import Score, score_known
from agro.rewards.shaping import TOKEN, TURN, steps, turn_ends
from agro.rewards.workers import Caller, Mode, Outcome, Pool
from agro.types import Sample

PASSED = ("prompts", "completions", "completion_ids")
ENDINGS: dict[str, Callable[[Sample], Any]] = {"ends": lambda s: s.end, "thoughts": lambda s: s.thought}
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
RESERVED = frozenset(
    (
        *("prompt", "completion", "finish", "index", "meaning", "thought"),
        *("reward_error", "reward_parts", "reward_details", "place_rewards"),
        *PASSED,
    )
)
PREFIX = "object:"  # in configurations, of functions in this process


class Inline(Caller):
    """Like `agro.rewards.workers.Pool` without processes: no time limit, and a crash ends the run."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, dict(options)
        self.learn(describe(function))

    def _begin(self, arguments: Mapping[str, Sequence[Any]], n: int, mode: Mode) -> Future[list[Outcome]]:
        future: Future[list[Outcome]] = Future()
        try:
            outcomes = outside_a_loop(CALLS[mode], self._function, dict(arguments), self._options, n)
            future.set_result([(value, error) for value, error in outcomes])
        except OneValue as error:
            raise Refused(f"reward: the function {error}") from None
        except Exception as error:  # noqa: BLE001 any function may raise anything
            future.set_result([(None, explain(error, file_of(self._function)))] * n)
        return future

    def close(self) -> None:
        """Nothing to release."""


def outside_a_loop(function: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
    """Call in a thread that can start an event loop: a notebook's thread already runs one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*arguments)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()


class FunctionReward:
    """A function called in `workers` processes, with at most `timeout` seconds per response.

    `function` is module:function, file.py:function, the name of an installed one, or a function at the top
    level of a module or file. With `inline` it is any callable, called in this process without a time limit.
    With `places` it returns a list per response, see `reward.places`. `maximum` is the function's attribute
    of that name, which may declare its largest value. Raises `Refused` if the function can't be imported or
    has other parameters, and at its first batch if it returns one value for several responses. A response on
    which it raises an error, hangs, crashes or returns no finite number gets `Score(None, error)`; the other
    responses of the call keep their scores.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        options: Mapping[str, Any] | None = None,
        *,
        timeout: float = 10.0,
        workers: int = 1,
        inline: bool = False,
        places: str | None = None,
    ) -> None:
        self._places = places
        self._options = dict(options or {})
        self._pool: Pool | Inline
        if inline:
            assert callable(function)
            self.name = inline_name(function)
            self._pool = Inline(function, self._options)
        else:
            self.name = function if isinstance(function, str) else name_of(function)
            location = plugins.absolute("rewards", self.name, "reward.name")
            self._pool = Pool(location, self._options, timeout=timeout, workers=workers)
        self.maximum: float | None = self._pool.maximum
        self._is_verl = self._pool.parameters >= {"solution_str", "ground_truth"}
        try:
            self._check()
        except Refused:
            self.close()
            raise

    def _check(self) -> None:
        parameters = sorted(self._pool.parameters)
        passed = VERL if self._is_verl else PASSED
        reserved = sorted(self._options.keys() & set(passed))
        if reserved:
            raise Refused(
                f"reward.options.{reserved[0]}: {', '.join(passed)} come from the samples; remove it"
            )
        if not self._is_verl and not self._pool.accepts("completions"):
            raise Refused(
                f"reward.name: {self.name}: expected f(prompts, completions, **columns) or "
                f"f(data_source, solution_str, ground_truth, extra_info), got f({', '.join(parameters)})"
            )
        for option in self._options:
            if not self._pool.accepts(option):
                hint = did_you_mean(option, parameters) or f"it takes {', '.join(parameters)}"
                raise Refused(f"reward.options.{option}: {self.name} takes no such argument; {hint}")

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        if self._is_verl:
            return score_known(samples, lambda s: _ground_truth_in(s.meta), self._compute_scores)
        columns, n = self._columns(samples), len(samples)
        if self._places is not None:
            outcomes = self._pool.call(columns, n, mode="lists")
            return [
                _placed(sample, self._places, *outcome)
                for sample, outcome in zip(samples, outcomes, strict=True)
            ]
        return [Score(value, error) for value, error in self._pool.call(columns, n)]

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        if self._is_verl:
            try:
                _ground_truth_in(columns)
            except LookupError as error:
                return str(error.args[0])
            return None
        available = {*columns, *self._options, *PASSED, *RESERVED, *ENDINGS}
        missing = sorted(set(self._pool.required) - available)
        return f"the sample has no {missing[0]}, which {self.name} takes" if missing else None

    def _compute_scores(self, samples: list[Sample], ground_truths: list[Any]) -> list[Score]:
        columns: dict[str, list[Any]] = {
            "data_source": [s.meta.get("data_source") for s in samples],
            "solution_str": [s.response for s in samples],
            "ground_truth": ground_truths,
            "extra_info": [s.meta.get("extra_info") or {} for s in samples],
        }
        accepted = {name: values for name, values in columns.items() if self._pool.accepts(name)}
        return [Score(value, error) for value, error in self._pool.call(accepted, len(samples), mode="each")]

    def _columns(self, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        names = dict.fromkeys(key for s in samples for key in s.meta if key not in RESERVED)
        for name in names:
            if name in self._options:
                raise Refused(
                    f"reward.options.{name}: the samples have a column of this name too; rename one of them"
                )
        columns: dict[str, list[Any]] = {name: [s.meta.get(name) for s in samples] for name in names}
        for name in ENDINGS.keys() & self._pool.parameters - columns.keys() - self._options.keys():
            columns[name] = [ENDINGS[name](s) for s in samples]
        columns["prompts"] = [s.prompt for s in samples]
        columns["completions"] = [
            s.response if isinstance(s.prompt, str) else [{"role": "assistant", "content": s.response}]
            for s in samples
        ]
        columns["completion_ids"] = [_completion_ids(s) for s in samples]
        return {name: values for name, values in columns.items() if self._pool.accepts(name)}

    def close(self) -> None:
        self._pool.close()


def _placed(sample: Sample, places: str, values: list[float] | None, error: str | None) -> Score:
    """Score a response by the rewards of its tokens, turns or steps, see `reward.places`."""
    if values is None:
        return Score(None, error)
    if sample.episode is not None:
        return Score(None, "the template rewrote the episode's history: it has several sequences of tokens")
    if places == TOKEN:
        expected, unit = len(_completion_ids(sample) or ()), "tokens"
    elif places == TURN:
        expected, unit = len(turn_ends(sample)), "turns"
    elif len(turn_ends(sample)) > 1:
        return Score(None, f"the response has several turns; set reward.places = {TURN!r}")
    else:
        expected, unit = len(steps(sample.response, places)), "steps"
    if len(values) != expected:
        return Score(None, f"returned {len(values)} numbers for {expected} {unit}")
    return Score(math.fsum(values), places=values)


def _completion_ids(sample: Sample) -> list[int] | None:
    if sample.tokens is None or sample.action is None:
        return None
    return [int(token) for token in sample.tokens[sample.action]]


def _ground_truth_in(columns: Mapping[str, Any]) -> Any:
    nested = columns.get("reward_model")
    places = (columns, "ground_truth"), (nested, "ground_truth"), (columns, "answer")
    for values, name in places:
        if isinstance(values, Mapping) and values.get(name) is not None:
            return values[name]
    raise LookupError("the sample has no ground_truth, reward_model.ground_truth or answer")


def inline_name(function: Callable[..., Any]) -> str:
    """The name of a function of this process in configurations and messages."""
    name = getattr(function, "__name__", type(function).__name__)
    return PREFIX + name.strip("<>")


def name_of(function: Callable[..., Any]) -> str:
    """module:function or file.py:function. Raises `Refused` if another process can't import it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or not name or "<" in name:
        raise Refused(
            f"reward: {function!r} can't be imported by another process; expected a function at the top "
            "level of a module or file"
        )
    if module != "__main__":
        return f"{module}:{name}"
    try:
        return f"{inspect.getfile(function)}:{name}"
    except (TypeError, OSError):
        raise Refused(f"reward: {name} isn't in a file; write it to one and give file.py:{name}") from None
