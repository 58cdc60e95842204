"""`agro train CONFIG --place WHERE`: starts the processes of a run, and starts again what dies.

A process that is killed, or fails by an error of ours, is started again: the trainer with `--resume` from its
last checkpoint, a collector under its name, which takes up its own claims. What a person must mend isn't
started again: a refusal (exit code 2) of any but a collector ends the run, and so does that of the last
collector. The number of restarts is bounded, see `Supervised`.
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
STOP_SECONDS = 60.0  # for a process to write its checkpoint after SIGTERM, before it is killed
END_SECONDS = 30.0  # for collectors to see that the run has ended
REFUSED, INTERRUPTED = 2, 130  # exit codes of agro
SHELL_SIGNALS = 128  # a shell adds it to the number of the signal
GOES_ON: dict[Role, str] = {
    "server": "others sample; it is used again after its probe",
    "trainer": "collectors go on as far as they may be ahead; it resumes from its last checkpoint",
    "collector": "the others go on; it takes up what it had begun",
}  # when one of them dies


# What a launcher has started. `poll`: the exit code, negative for a signal; `pid`: None where it is unknown.
Started = LocalProcess | RayProcess
# Finds a host for a process and starts it there; whether it is started again.
Launch = Callable[[PlacedProcess, bool], Started]


def launch_here(logs: Path, environment: Mapping[str, str]) -> Launch:
    """Start processes beside this one. The trainer writes to the terminal, the others into files.
    `environment`: variables that they have besides this one's."""

    def launch(process: PlacedProcess, again: bool) -> LocalProcess:
        log = None if process.role == "trainer" else log_file(logs, process)
        variables = {**os.environ, **environment}
        return LocalProcess(process.argv(sys.executable, again), variables, log, socket.gethostname())

    return launch


@dataclass
class Supervised:
    """A process, and what became of it.

    Its deaths are counted since the run made its last step, so that a run of weeks may lose a process a day,
    and one whose process dies at once ends soon.
    """

    process: PlacedProcess
    maximum: int  # deaths without a step in between after which it is started again
    started: Started | None = None
    since: float = 0.0  # seconds since the epoch
    ended: str = ""  # why it doesn't run any more
    deaths: int = 0
    in_vain: int = 0
    step: int = -1  # of the run, when it died last

    def die(self, step: int) -> bool:
        """Whether it may be started again. `step`: the furthest one that the run has made."""
        self.in_vain = self.in_vain + 1 if step <= self.step else 1
        self.step = max(step, self.step)
        self.deaths += 1
        return self.in_vain <= self.maximum

    def runs(self) -> bool:
        return self.started is not None and self.started.poll() is None

    def where(self) -> str:
        """The process that was started, for a message."""
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
        """`step`: the furthest step of the run. `record` is called whenever a process began or ended, and
        when it becomes known where it is.
        """
        self.launch, self.step, self.record, self.say = launch, step, record, say
        self.processes = [Supervised(process, restarts) for process in processes]
        self._furthest = -1
        self._recorded: list[dict[str, Any]] = []
        self._signal = 0  # that asked for a stop

    def run(self) -> int:
        """The exit code of the run: the trainer's, or 1 where a process died too often."""

        def note(number: int, frame: object) -> None:
            self._signal = number

        with ExitStack() as handlers:  # Ctrl-C and SIGTERM stop the run as the trainer's do
            for number in (signal.SIGINT, signal.SIGTERM):
                handlers.callback(signal.signal, number, signal.signal(number, note))
            try:
                for supervised in self.processes:
                    self._start(supervised)
                return self._watch()
            finally:
                self._stop_all()

    def _watch(self) -> int:
        """Until the trainer has ended, or nothing goes on without a person."""
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
        """A launcher may learn only later where a process is, and a process may have begun or ended."""
        state = [supervised.to_json() for supervised in self.processes]
        if state != self._recorded:
            self._recorded = state
            self.record(self.processes)

    def _look(self, supervised: Supervised) -> int | None:
        """Start a process that died again; the exit code of the run where it ends with this process."""
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
            # The last collector's refusal ends the run; where they are done, so will the trainer be.
            collectors = [s for s in self.processes if s.process.role == "collector"]
            if code == 0 or not all(s.ended for s in collectors):
                return None
            self.say("no collector is left: the run ends, and resumes with --resume")
            return REFUSED
        self._furthest = max(self._furthest, self.step())
        lived = duration(time.time() - supervised.since)
        who = f"{name} ({supervised.where()}) {death_words(code)} after {lived}"
        if not supervised.die(self._furthest):
            supervised.ended = death_words(code)
            self.say(
                f"{who}, {supervised.in_vain} times without a step in between: the run ends. What to "
                "do: see why (RUN/logs), then continue with --resume"
            )
            return 1
        self.say(f"{who}: {GOES_ON[role]}")
        self._start(supervised)
        left = supervised.maximum - supervised.in_vain
        self.say(f"{name} is started again ({supervised.where()}); {left} more without a step end it")
        return None

    def _start(self, supervised: Supervised) -> None:
        supervised.started = self.launch(supervised.process, supervised.deaths > 0)
        supervised.since = time.time()
        self._record_changes()

    def _stop_all(self) -> None:
        """The trainer first, which may write a checkpoint."""
        is_done = any(s.process.role == "trainer" and s.ended == "done" for s in self.processes)
        for role in ("trainer", "collector", "server"):
            # Also those that ended by themselves since the last look, of which that is to be recorded.
            left = [s for s in self.processes if s.process.role == role and s.started and not s.ended]
            if role == "collector" and is_done:
                _wait(left, END_SECONDS)
            for supervised in left:
                assert supervised.started is not None
                code = supervised.started.poll()
                if code is None:
                    supervised.started.stop()
                supervised.ended = "stopped" if code is None else ended_words(code)
            _wait(left, STOP_SECONDS)
            for supervised in [s for s in left if s.runs()]:
                assert supervised.started is not None
                self.say(f"{supervised.process.name} didn't end within {STOP_SECONDS:g} s and is killed")
                supervised.started.kill()
        self._record_changes()


def _wait(processes: Sequence[Supervised], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(s.runs() for s in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 4)


def death_words(code: int) -> str:
    """How a process died, by its exit code: -9, or of a shell 137, is SIGKILL."""
    if code == LOST:
        return "was lost with its host"
    number = -code if code < 0 else code - SHELL_SIGNALS
    if 0 < number < signal.NSIG:
        return f"was killed by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


def ended_words(code: int) -> str:
    return {0: "done", REFUSED: "refused", INTERRUPTED: "interrupted"}.get(code, death_words(code))


def place(placement: Placement, command: TrainCommand) -> int:
    """Run all processes until the trainer is done; the exit code of the run."""
    file = command.config  # or the name of a recipe
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
        """In the metrics of the run; -1 where there is none."""
        steps = [step for _, step in lines_by_step(folder / "metrics.jsonl") if step is not None]
        return max(steps, default=-1)

    with ExitStack() as ended:
        launch = launch_here(logs, variables)
        if placement.kind == "ray":  # which places all of them; this process supervises
            ray = connect(placement)
            ended.callback(ray.shutdown)
            launch = RayLauncher(ray, processes, settings.ranks, logs, variables)
            say(f"the trainer writes to {logs / 'trainer.log'}")
        for note in notes:
            say(f"note: {note}")
        names = ", ".join(process.name for process in processes)
        say(f"processes: {names}; agro ps {folder} shows them")
        return Supervisor(processes, launch, settings.restarts, furthest_step, record, say).run()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
