"""`environment.name = "harness:COMMAND"`: use any program that calls a model as an environment.

For each response a process runs the command against a door on the weights under training, with

- OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY: the process's own session
- AGRO_PROMPT: the prompt, text or messages as JSON; AGRO_COLUMNS: the row's columns as JSON
- AGRO_RESULT: the file of the reward, `{"reward": …}`, where `reward = "file"`

Its calls are the rows of one episode (`agro.door.sessions`). The run's sampler sets temperature and
truncation, whatever the program requests. If the program hangs or dies, the episode fails and its reward is
unknown.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agro.config import EnvironmentConfig, SamplerConfig, read_options
from agro.config.secrets import redacted
from agro.config.sections import Count, Positive, Section
from agro.config.sections import field as setting
from agro.door.app import Application, Serving
from agro.door.batch import Batch
from agro.door.door import Door, hashed
from agro.door.sessions import THUMBS, Call, Sessions
from agro.door.wire import Outcome, Problem
from agro.errors import Refused, without_secrets
from agro.io.processes import LocalProcess
from agro.io.strictjson import loads
from agro.pages.local_server import HOST, behind_a_port
from agro.rollout.engines.hf import HF
from agro.rollout.rollout import Rollout, before_stop, recorded
from agro.types import Prompt, Sample

POLL_SECONDS = 0.02
LOG_BYTES, RESULT_BYTES = 300, 1 << 16  # bytes read of a program's files


@dataclass(eq=False)
class Attempt:
    """A process, and the answers to its calls."""

    index: int  # of the response
    prompt: Prompt
    folder: Path
    process: LocalProcess
    deadline: float
    rows: dict[int, Call] = field(default_factory=dict)  # the last call of each
    outcomes: list[tuple[Call, Outcome]] = field(default_factory=list)
    reward: Any = None  # None after an error, or if the run's reward scores the episode
    error: str | None = None


class Options(Section):
    """`environment.options`."""

    env: dict[str, str] = setting({})
    seconds: Positive = 300.0
    reward: Literal["run", "file", "feedback", "exit"] = "run"
    workers: Count = 8


class Harness:
    """An environment that plays complete episodes itself (`Rollout.sample`)."""

    stop: tuple[str, ...] = ()
    command: Sequence[str] = ()

    def __init__(self, command: str, options: Mapping[str, Any], config: EnvironmentConfig) -> None:
        """Raises `Refused` for a missing command or an invalid option."""
        self.name = f"harness:{command}"
        self.options = read_options(Options, options, "environment.options")
        with suppress(ValueError):  # an unclosed quote: the command stays empty
            self.command = shlex.split(command)
        if not self.command or shutil.which(self.command[0]) is None:
            raise Refused(f"environment.name: {self.name}: expected an installed command after the colon")

    def play(
        self, rollout: Rollout, prompt_of: Mapping[int, Prompt], sampler: SamplerConfig, seed: int
    ) -> Iterator[Sample]:
        """Yield an episode's samples when it ends. Raises `Refused` for an engine in another process."""
        if not isinstance(rollout.engine, HF):
            raise Refused(
                f"environment.name: {self.name}: expected an engine in this process, got "
                f"{type(rollout.engine).__name__}. What to do: use engine.kind = hf; agro proxy can store a "
                "server's answers"
            )
        waiting, running = deque(prompt_of.items()), dict[str, Attempt]()
        with (
            tempfile.TemporaryDirectory(prefix="agro-harness-") as folder,
            self._door(rollout, running, sampler, seed) as (url, token),
        ):
            try:
                while waiting or running:
                    rollout.engine.check()
                    while waiting and len(running) < self.options.workers:
                        name = f"{waiting[0][0]}-{secrets.token_hex(8)}"
                        running[name] = self._start(*waiting.popleft(), Path(folder) / name, url, token)
                    time.sleep(POLL_SECONDS)
                    finished = [name for name, attempt in running.items() if self._has_ended(attempt)]
                    for attempt in [running.pop(name) for name in finished]:
                        yield from self._samples(rollout, attempt, sampler, seed)
            finally:
                for attempt in running.values():
                    _kill(attempt)

    @contextmanager
    def _door(
        self, rollout: Rollout, running: Mapping[str, Attempt], sampler: SamplerConfig, seed: int
    ) -> Iterator[tuple[str, str]]:
        """Open a door on the engine's weights, and yield its URL and token."""
        engine: Any = rollout.engine

        def number(call: Call, _: int | None, choice: int) -> int:
            index = call.episode.name.partition("-")[0]
            text = f"{seed} {index} {call.number} {call.answers} {choice}"
            return hashed(text)

        with closing(
            Batch(engine.policy, sampler.batch, fused=engine.fused, version=engine.version)
        ) as batch:
            sessions, playing = Sessions(rollout.encoder), _Playing(running)
            door = Door(engine.policy, batch, sessions, keep=playing.keep, seconds=self.options.seconds)
            door.sampler, door.number, token = sampler, number, secrets.token_urlsafe(24)
            with behind_a_port(Application(Serving(door, "policy", playing), HOST, token).app) as url:
                yield url, token

    def _start(self, index: int, prompt: Prompt, folder: Path, url: str, token: str) -> Attempt:
        folder.mkdir()
        text = prompt.text if isinstance(prompt.text, str) else json.dumps(prompt.text, ensure_ascii=False)
        base = f"{url}/s/{folder.name}"
        variables = {name: value for name, value in os.environ.items() if redacted(value, name) == value}
        variables |= {
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_KEY": token,
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": token,
            "AGRO_PROMPT": text,
            "AGRO_COLUMNS": json.dumps(dict(prompt.columns), ensure_ascii=False),
            "AGRO_RESULT": str(folder / "result.json"),
            **self.options.env,
        }
        process = LocalProcess(self.command, variables, folder / "log", HOST, death_signal=signal.SIGKILL)
        return Attempt(index, prompt, folder, process, time.monotonic() + self.options.seconds)

    def _has_ended(self, attempt: Attempt) -> bool:
        """Return whether a process has ended, and set its reward or error."""
        code, source = attempt.process.poll(), self.options.reward
        if code is None and time.monotonic() < attempt.deadline:
            return False
        if code is None:
            attempt.error = f"it exceeded environment.options.seconds = {self.options.seconds:g}"
        elif code != 0 and not (source == "exit" and code == 1):
            attempt.error = f"exit status {code}"
        elif not attempt.outcomes:
            attempt.error = "the program didn't call the model"
        elif source == "exit":
            attempt.reward = 1.0 - code
        elif source == "file":
            with suppress(OSError, ValueError, LookupError, TypeError):
                attempt.reward = loads(_end_of(attempt.folder / "result.json", RESULT_BYTES))["reward"]
        value = attempt.reward
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if attempt.error is not None or source == "run":
            attempt.reward = None
        elif not is_number or not abs(value) <= sys.float_info.max:  # nor NaN
            attempt.reward = None
            attempt.error = f'no reward: expected a number by environment.options.reward = "{source}"'
        _kill(attempt)
        return True

    def _samples(
        self, rollout: Rollout, attempt: Attempt, sampler: SamplerConfig, seed: int
    ) -> Iterator[Sample]:
        """Yield an episode's rows, or one without tokens if the model wasn't called."""
        prompt = attempt.prompt
        meta = {**prompt.columns, "index": attempt.index, "turns": len(attempt.outcomes)}
        meta |= {"finish": "error", "last_turn": "", "tool_calls": 0}
        if attempt.outcomes:
            call, outcome = attempt.outcomes[-1]
            meta["last_turn"] = before_stop(call.last_turn, sampler.stop)[0]
            meta["tool_calls"] = sum(len(outcome.calls) for _, outcome in attempt.outcomes)
            meta["finish"] = outcome.finish if attempt.error is None else "error"
        if attempt.error is not None:
            log = _end_of(attempt.folder / "log", LOG_BYTES).decode("utf-8", "replace").strip()
            output = f"; its output: {log}" if log else ""
            meta["reward_error"] = without_secrets(f"{self.name}: {attempt.error}{output}")
        shared: dict[str, Any] = {"prompt": prompt.text, "prompt_id": prompt.id, "reward": attempt.reward}
        shared |= {"sampling": recorded(sampler, seed), "source": rollout.source, "role": rollout.role}
        if not attempt.rows:
            yield Sample(response="", meta=meta, **shared)
        episode = attempt.folder.name if len(attempt.rows) > 1 else None
        for _, call in sorted(attempt.rows.items()):
            # A number above 0: the context is what the program sent, not the prompt.
            yield call.row.sample(rollout.encoder, number=1, meta=meta, episode=episode, **shared)


class _Playing:
    """Collects answers and feedback of running episodes. `running`: attempts by session name."""

    def __init__(self, running: Mapping[str, Attempt]) -> None:
        self._running = running

    async def keep(self, call: Call, outcome: Outcome, *_: Any) -> None:
        attempt = self._running.get(call.episode.name)
        if attempt is not None:
            attempt.rows[call.number] = call
            attempt.outcomes.append((call, outcome))

    def measures(self) -> dict[str, float]:
        return {}

    async def open_session(self, name: str | None) -> None:
        if name not in self._running:
            raise Problem(404, "expected the session of a running episode")

    async def feedback(self, feedback: dict[str, Any]) -> dict[str, Any]:
        await self.open_session(feedback["episode"])
        if feedback.keys().isdisjoint(("reward", "thumb")):
            raise Problem(400, "expected a reward or a thumb: a run keeps no comments and corrections")
        reward = feedback["reward"] if "reward" in feedback else THUMBS[feedback["thumb"]]
        self._running[feedback["episode"]].reward = reward
        return {"episode": feedback["episode"], "reward": reward}


def _end_of(path: Path, count: int) -> bytes:
    """Read the last bytes. Raises `OSError` unless it is a regular file: a pipe could block forever."""
    if not path.is_file():
        raise FileNotFoundError(path)
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - count, 0))
        return file.read(count)


def _kill(attempt: Attempt) -> None:
    """Kill the process with its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(attempt.process.pid, signal.SIGKILL)
    attempt.process.kill()
