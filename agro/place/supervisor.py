"""`agro train CONFIG --place WHERE`: start the processes of a run, and restart those that die.

A process that is killed or crashes restarts: the trainer with `--resume` from its last checkpoint, a
collector under its name, so that it takes over its own claims. A refusal (exit code 2) needs a person: that
of the trainer, a server or the last collector ends the run. The number of restarts is bounded, see
`Supervised`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.numbers import duration
from agro.io.processes import LocalProcess
from agro.place.on_ray import RayLauncher, RayProcess, connect
from agro.place.placement import (
    LOST,
    PlacedProcess,
    PlacedRecord,
    Placement,
    Role,
    TrainCommand,
    log_file,
    plan,
)
from agro.runs.folder import lines_by_step

POLL_SECONDS = 0.2
STOP_SECONDS = 60.0  # to write a checkpoint after SIGTERM, before SIGKILL
END_SECONDS = 30.0  # for collectors to notice that the run has ended
REFUSED, INTERRUPTED = 2, 130  # exit codes of agro
SHELL_SIGNALS = 128  # a shell adds it to the signal number
DEATH_EFFECTS: dict[Role, str] = {
    "server": "others sample; it is used again after its probe",
    "trainer": "collectors continue as far as they may be ahead; it resumes from its last checkpoint",
    "collector": "the others continue; it takes over its unfinished claims",
}  # what happens when one of them dies


# A started process. `poll`: the exit code, negative for a signal; `pid`: None if unknown.
Started = LocalProcess | RayProcess
# Finds a host for a process and starts it there. The flag tells a restart.
Launch = Callable[[PlacedProcess, bool], Started]


def launch_here(logs: Path, environment: Mapping[str, str]) -> Launch:
    """Start processes on this host. The trainer writes to the terminal, the others to files.
    `environment`: additional variables."""

    def launch(process: PlacedProcess, restarted: bool) -> LocalProcess:
        log = None if process.role == "trainer" else log_file(logs, process)
        variables = {**os.environ, **environment}
        return LocalProcess(process.argv(sys.executable, restarted), variables, log, socket.gethostname())

    return launch


@dataclass
class Supervised:
    """A process under supervision.

    Only its deaths since the run's last step count, so that a run of weeks may lose a process a day, and a
    run whose process dies at once ends soon.
    """

    process: PlacedProcess
    maximum: int  # restarts allowed without a step in between
    started: Started | None = None
    since: float = 0.0  # seconds since the epoch
    ended: str = ""  # how it ended, if it has
    deaths: int = 0
    in_vain: int = 0
    step: int = -1  # the run's step at the last death

    def die(self, step: int) -> bool:
        """Count a death, and return whether a restart is allowed. `step`: the run's last step."""
        self.in_vain = self.in_vain + 1 if step <= self.step else 1
        self.step = max(step, self.step)
        self.deaths += 1
        return self.in_vain <= self.maximum

    def runs(self) -> bool:
        return self.started is not None and self.started.poll() is None

    def location(self) -> str:
        """Describe the started process for a message."""
        assert self.started is not None
        host, pid = self.started.host, self.started.pid
        return host if pid is None else f"pid {pid} on {host}"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.process.name,
            "role": self.process.role,
            "host": self.started.host if self.started else None,
            "pid": self.started.pid if self.started else None,
            "since": self.since or None,
            "restarts": self.deaths,
            "ended": self.ended,
        }


class Supervisor:
    """Runs the processes of a run until the trainer is done."""

    def __init__(
        self,
        processes: Sequence[PlacedProcess],
        launch: Launch,
        restarts: int,
        step: Callable[[], int],
        record: Callable[[Sequence[Supervised]], None],
        say: Callable[[str], None],
    ) -> None:
        """`step`: returns the run's last step. `record` is called whenever a process begins or ends, or its
        location becomes known.
        """
        self.launch, self.step, self.record, self.say = launch, step, record, say
        self.processes = [Supervised(process, restarts) for process in processes]
        self._furthest = -1
        self._recorded: list[dict[str, Any]] = []
        self._signal = 0  # the signal that requested a stop

    def run(self) -> int:
        """Supervise the run, and return its exit code: the trainer's, or 1 if a process died too often."""

        def note(number: int, frame: object) -> None:
            self._signal = number

        with ExitStack() as handlers:  # Ctrl-C and SIGTERM stop the run, as they stop a trainer
            for number in (signal.SIGINT, signal.SIGTERM):
                handlers.callback(signal.signal, number, signal.signal(number, note))
            try:
                for supervised in self.processes:
                    self._start(supervised)
                return self._watch()
            finally:
                self._stop_all()

    def _watch(self) -> int:
        """Watch until the trainer ends, or a person must act."""
        while True:
            for supervised in self.processes:
                code = self._look(supervised)
                if code is not None:
                    return code
            self._record_changes()
            if self._signal:
                self.say("stopping: the trainer writes its checkpoint")
                return INTERRUPTED
            time.sleep(POLL_SECONDS)

    def _record_changes(self) -> None:
        """Record the processes if one began, ended, or was located by its launcher."""
        state = [supervised.to_json() for supervised in self.processes]
        if state != self._recorded:
            self._recorded = state
            self.record(self.processes)

    def _look(self, supervised: Supervised) -> int | None:
        """Restart a dead process, or return the run's exit code if the run ends with it."""
        assert supervised.started is not None
        code = None if supervised.ended else supervised.started.poll()
        if code is None:
            return None
        name, role = supervised.process.name, supervised.process.role
        if (role == "trainer" and code in (0, INTERRUPTED)) or (role != "collector" and code == REFUSED):
            supervised.ended = ended_words(code)
            return code
        if role == "collector" and code in (0, REFUSED):
            supervised.ended = ended_words(code)
            self.say(f"{name} has ended: {supervised.ended}")
            # The last collector's refusal ends the run; when collectors are done, the trainer soon is.
            collectors = [s for s in self.processes if s.process.role == "collector"]
            if code == 0 or not all(s.ended for s in collectors):
                return None
            self.say("no collector is left: the run ends, and resumes with --resume")
            return REFUSED
        self._furthest = max(self._furthest, self.step())
        lived = duration(time.time() - supervised.since)
        subject = f"{name} ({supervised.location()}) {death_words(code)} after {lived}"
        if not supervised.die(self._furthest):
            supervised.ended = death_words(code)
            self.say(
                f"{subject}, {supervised.in_vain} times without a step in between: the run ends. What to "
                "do: find the cause (RUN/logs), then continue with --resume"
            )
            return 1
        self.say(f"{subject}: {DEATH_EFFECTS[role]}")
        self._start(supervised)
        remaining = supervised.maximum - supervised.in_vain
        self.say(f"{name} is started again ({supervised.location()}); {remaining} more without a step end it")
        return None

    def _start(self, supervised: Supervised) -> None:
        supervised.started = self.launch(supervised.process, supervised.deaths > 0)
        supervised.since = time.time()
        self._record_changes()

    def _stop_all(self) -> None:
        """Stop all processes, first the trainer, which may write a checkpoint."""
        is_done = any(s.process.role == "trainer" and s.ended == "done" for s in self.processes)
        for role in ("trainer", "collector", "server"):
            # Include those that ended since the last check, to record how.
            remaining = [s for s in self.processes if s.process.role == role and s.started and not s.ended]
            if role == "collector" and is_done:
                _wait(remaining, END_SECONDS)
            for supervised in remaining:
                assert supervised.started is not None
                code = supervised.started.poll()
                if code is None:
                    supervised.started.stop()
                supervised.ended = "stopped" if code is None else ended_words(code)
            _wait(remaining, STOP_SECONDS)
            for supervised in [s for s in remaining if s.runs()]:
                assert supervised.started is not None
                self.say(f"{supervised.process.name} didn't end within {STOP_SECONDS:g} s and is killed")
                supervised.started.kill()
        self._record_changes()


def _wait(processes: Sequence[Supervised], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(s.runs() for s in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 4)


def death_words(code: int) -> str:
    """Describe a death by its exit code: -9, or 137 from a shell, is SIGKILL."""
    if code == LOST:
        return "was lost with its host"
    number = -code if code < 0 else code - SHELL_SIGNALS
    if 0 < number < signal.NSIG:
        return f"was killed by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


def ended_words(code: int) -> str:
    return {0: "done", REFUSED: "refused", INTERRUPTED: "interrupted"}.get(code, death_words(code))


def place(placement: Placement, command: TrainCommand) -> int:
    """Run all processes until the trainer is done, and return the run's exit code."""
    file = command.config  # or a recipe's name
    file = file.absolute() if file.is_file() else file  # processes may run in other folders
    command = replace(command, config=file, out=command.out.absolute())
    folder, logs = command.out, command.out / "logs"
    if (folder / "metrics.jsonl").exists() and not command.resume:
        raise Refused(
            f"{folder}: there is a run in this folder; continue it with the same command and --resume, "
            "or set another --out"
        )
    processes, notes = plan(placement, command)
    settings, variables = command.load().place, {"PYTHONUNBUFFERED": "1"}
    folder.mkdir(parents=True, exist_ok=True)

    def record(supervised: Sequence[Supervised]) -> None:
        PlacedRecord(str(placement), [each.to_json() for each in supervised]).write(folder)

    def furthest_step() -> int:
        """Return the last step in the run's metrics; -1 if there is none."""
        steps = [step for _, step in lines_by_step(folder / "metrics.jsonl") if step is not None]
        return max(steps, default=-1)

    with ExitStack() as cleanup:
        launch = launch_here(logs, variables)
        if placement.kind == "ray":  # Ray places all of them; this process supervises
            ray = connect(placement)
            cleanup.callback(ray.shutdown)
            launch = RayLauncher(ray, processes, settings.ranks, logs, variables)
            say(f"the trainer writes to {logs / 'trainer.log'}")
        for note in notes:
            say(f"note: {note}")
        names = ", ".join(process.name for process in processes)
        say(f"processes: {names}; agro ps {folder} shows them")
        return Supervisor(processes, launch, settings.restarts, furthest_step, record, say).run()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
