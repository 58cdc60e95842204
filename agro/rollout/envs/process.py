"""An environment in its own process, which may hang or crash without harm to the run."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from agro import config
from agro.config import from_environment
from agro.errors import Refused
from agro.io import plugins
from agro.io.worker import WrongResult
from agro.rewards.workers import START_SECONDS, Pool
from agro.rollout.envs import LOST, Turn
from agro.types import Prompt


@dataclass(eq=False)
class PlayedEpisode:
    """An episode whose state is in the process, with the data to replay it in another one."""

    number: int
    prompt: Prompt
    turns: list[tuple[str, Any]] = field(default_factory=list)  # each text and its reply


class EnvironmentProcess:
    """An environment whose calls have a time limit.

    If a call hangs or the process dies, its episode fails with the cause. The other episodes are replayed in
    a new process, since the same prompt and turns give the same observations.
    """

    def __init__(self, name: str, options: dict[str, Any], timeout: float) -> None:
        """`timeout`: seconds per call. Raises `Refused` if there is no such environment."""
        self._timeout = timeout
        self._numbers = count()
        self._over: list[int] = []  # numbers of episodes that ended since the last call
        arguments = {"name": name, "options": options}
        file = Path(__file__).resolve().with_name("playing.py")  # named by path, it starts without torch
        self._pool = Pool(f"{file}:play", arguments, timeout=timeout, setting="environment.name")
        opened = self._open()
        self.name: str = opened["name"]
        self.stop: tuple[str, ...] = tuple(opened["stop"])
        self.maximum: float | None = opened["maximum"]

    def reset(self, prompt: Prompt) -> PlayedEpisode:
        episode = PlayedEpisode(next(self._numbers), prompt)
        weakref.finalize(episode, self._over.append, episode.number)
        self._reset(episode)
        return episode

    def step(self, state: PlayedEpisode, text: str) -> Turn:
        request = {"do": "step", "episode": state.number}
        reply = self._call({**request, "text": text})
        if reply == LOST:
            self._reset(state)
            for earlier, recorded in state.turns:
                if self._call({**request, "text": earlier}) != recorded:
                    raise WrongResult(
                        "its process ended in another episode, and replaying the turns of this one in a new "
                        "process gave other replies"
                    )
            reply = self._call({**request, "text": text})
        state.turns.append((text, reply))
        return Turn(**reply)

    def close(self) -> None:
        self._pool.close()

    def _reset(self, episode: PlayedEpisode) -> None:
        prompt = {**vars(episode.prompt), "columns": dict(episode.prompt.columns)}
        request = {"do": "reset", "episode": episode.number, "prompt": prompt}
        if self._call(request) == LOST:
            self._open()
            self._call(request)

    def _open(self) -> dict[str, Any]:
        self._pool.timeout = START_SECONDS
        try:
            opened: dict[str, Any] = self._call({"do": "open"})
        except WrongResult as error:
            raise Refused(f"environment.name: {error}") from None
        finally:
            self._pool.timeout = self._timeout
        if "refused" in opened:
            raise Refused(opened["refused"])
        return opened

    def _call(self, request: dict[str, Any]) -> Any:
        over, self._over[:] = list(self._over), []
        [(reply, error)] = self._pool.call({"request": [{**request, "over": over}]}, 1, mode="value")
        if error is not None:
            raise WrongResult(error)
        return reply


def load_environment(config: config.EnvironmentConfig) -> Any:
    """Start the configured environment in its process.

    KIND:TEXT with an installed KIND, such as "harness", is an environment that plays complete episodes: its
    class is called with the text, the options and the section. Raises `Refused` if there is no such
    environment or option.
    """
    options = from_environment(config.options, "environment.options")
    kind, _, text = config.name.partition(":")
    if text and kind in plugins.installed("environments"):
        return plugins.load("environments", kind, "environment.name")(text, options, config)
    return EnvironmentProcess(config.name, options, config.timeout)
