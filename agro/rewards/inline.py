"""Calls of a Python function in this process, for one that no other process can import."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agro.errors import Refused
from agro.io.worker import CALLS, OneValue, describe, explain, file_of
from agro.rewards.workers import How, Outcome

PREFIX = "object:"  # of the names that configurations have for such functions


class Inline:
    """As `agro.rewards.workers.Pool`, without processes: there is no time limit, and a crash ends the run."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, dict(options)
        described = describe(function)
        self.parameters: frozenset[str] = frozenset(described["parameters"])
        self.required: frozenset[str] = frozenset(described["required"])
        self.any_parameter: bool = described["any"]
        self.maximum: float | None = described["maximum"]

    def accepts(self, parameter: str) -> bool:
        """Whether the function has a parameter of this name."""
        return self.any_parameter or parameter in self.parameters

    def call(self, columns: Mapping[str, Sequence[Any]], n: int, *, how: How = "rows") -> list[Outcome]:
        """Call the function on `n` rows; those without a valid number are called again one by one."""
        outcomes = self._outcomes(columns, n, how)
        if n == 1:
            return outcomes
        for row, (value, error) in enumerate(outcomes):
            if value is None and error != "returned None":
                alone = {name: [values[row]] for name, values in columns.items()}
                [outcomes[row]] = self._outcomes(alone, 1, how)
        return outcomes

    def _outcomes(self, columns: Mapping[str, Sequence[Any]], n: int, how: How) -> list[Outcome]:
        arguments = {name: list(values) for name, values in columns.items()}
        try:
            outcomes = _outside_a_loop(CALLS[how], self._function, arguments, self._options, n)
        except OneValue as error:
            raise Refused(f"reward: the function {error}") from None
        except Exception as error:  # noqa: BLE001 any function may raise anything
            return [(None, explain(error, file_of(self._function)))] * n
        return [(value, error) for value, error in outcomes]

    def close(self) -> None:
        """Nothing is open."""


def _outside_a_loop(function: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
    """Call where an event loop can be started: a notebook's thread runs one already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*arguments)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()
