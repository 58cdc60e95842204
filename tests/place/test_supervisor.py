"""Processes that die are started again, as often as is sensible."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import is_running, until

from agro.place import supervisor
from agro.place.placement import LOST, PlacedProcess, Role
from agro.place.supervisor import Supervised, Supervisor, death_words, launch_here

SLEEP = "import time; time.sleep(60)"


def process(role: Role, code: str, name: str = "", *arguments: str, again: str = "") -> PlacedProcess:
    """Python that runs `code`; when it is started again it finds `again` in its arguments."""
    more = (again,) if again else ()
    return PlacedProcess(name or role, role, None, (sys.executable, "-c", code, *arguments), more)


class Watched:
    """A supervised run: what was said and recorded, and a step that tests set."""

    def __init__(self, folder: Path, *processes: PlacedProcess, restarts: int = 2) -> None:
        self.said: list[str] = []
        self.records: list[list[dict[str, object]]] = []
        self.step = 0
        launcher = launch_here(folder / "logs", {"VARIABLE": "1"})
        self.supervisor = Supervisor(
            processes, launcher, restarts, lambda: self.step, self._record, self.said.append
        )

    def _record(self, processes: Sequence[Supervised]) -> None:
        self.records.append([supervised.to_json() for supervised in processes])

    def last(self, name: str) -> dict[str, object]:
        return next(record for record in self.records[-1] if record["name"] == name)


def test_the_run_ends_with_its_trainer_and_its_exit_code(tmp_path: Path) -> None:
    for code in (0, 2, 130):
        trainer = process("trainer", f"import os; assert os.environ['VARIABLE'] == '1'; os._exit({code})")
        watched = Watched(tmp_path, process("server", SLEEP), trainer, process("collector", "pass"))
        assert watched.supervisor.run() == code
        assert watched.last("server")["ended"] == "stopped"
        with pytest.raises(ProcessLookupError):
            os.kill(int(str(watched.last("server")["pid"])), 0)


class AlreadyEnded:
    """A process that had ended by itself before anybody looked."""

    host, pid = "here", None

    def poll(self) -> int:
        return 0

    def stop(self) -> None:
        raise AssertionError("it has ended")

    kill = stop


def test_a_process_that_ends_in_the_same_moment_as_the_trainer_is_recorded_as_done(tmp_path: Path) -> None:
    """The trainer's end is seen first, and nobody looks at the collector after it."""
    watched = Watched(tmp_path, process("trainer", ""), process("collector", ""))
    watched.supervisor.launch = lambda placed, again: AlreadyEnded()
    assert watched.supervisor.run() == 0
    assert [record["ended"] for record in watched.records[-1]] == ["done", "done"]


def test_what_dies_is_started_again_and_said(tmp_path: Path) -> None:
    """The trainer dies once by a signal, and finds that it is started again."""
    code = "import os, sys; os.kill(os.getpid(), 0 if sys.argv[1:] == ['--resume'] else 9)"
    watched = Watched(tmp_path, process("trainer", code, again="--resume"))
    assert watched.supervisor.run() == 0
    died, again = watched.said
    assert re.search(r"trainer \(pid .*was killed by SIGKILL after .*resumes from its last checkpoint", died)
    assert "trainer is started again (pid " in again
    assert (watched.last("trainer")["restarts"], watched.last("trainer")["ended"]) == (1, "done")


def test_deaths_without_a_step_are_bounded(tmp_path: Path) -> None:
    server = process("server", "raise SystemExit(1)")
    watched = Watched(tmp_path, process("trainer", SLEEP), server, restarts=2)
    assert watched.supervisor.run() == 1
    assert watched.last("server")["restarts"] == 3
    assert "3 times without a step in between: the run ends" in watched.said[-1]


def test_deaths_count_since_the_last_step() -> None:
    lives = Supervised(process("server", ""), maximum=1)
    assert lives.die(step=4)
    assert not lives.die(step=4)
    assert lives.die(step=5)  # the run went on in between
    assert not lives.die(step=3)  # a trainer that went back to its checkpoint has made no step
    assert lives.deaths == 4


def test_a_refusal_isnt_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.1)
    sleeps = process("trainer", SLEEP)
    collector, server = (process(role, "raise SystemExit(2)") for role in ("collector", "server"))
    watched = Watched(tmp_path, sleeps, collector)
    assert watched.supervisor.run() == 2
    assert watched.said[-1].startswith("no collector is left")
    assert Watched(tmp_path, sleeps, server).supervisor.run() == 2
    other = process("collector", SLEEP, "collector-2")
    watched = Watched(tmp_path, process("trainer", "import time; time.sleep(2)"), collector, other)
    assert watched.supervisor.run() == 0  # the other one goes on
    assert watched.last("collector")["ended"] == "refused"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_trainer_first(tmp_path: Path, number: signal.Signals) -> None:
    """The servers live until the trainer has written its checkpoint."""
    marks = tmp_path / "marks"
    checkpoint = (
        "import os, signal, sys, time\n"
        "def end(*_):\n"
        "    time.sleep(.3)\n"
        f"    open({str(marks)!r}, 'a').write(sys.argv[1] + '\\n')\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"open({str(marks)!r} + sys.argv[1], 'w').close()\n"
        "time.sleep(60)"
    )
    roles: list[Role] = ["server", "trainer", "collector"]
    watched = Watched(tmp_path, *(process(role, checkpoint, role, role) for role in roles))

    def interrupt() -> None:
        while not all(Path(f"{marks}{role}").exists() for role in roles):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    assert watched.supervisor.run() == 130
    assert marks.read_text().split() == ["trainer", "collector", "server"]


def test_processes_end_with_the_supervisor(tmp_path: Path) -> None:
    """Also where it is killed: nothing goes on by itself."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from agro.place import supervisor
from agro.place.supervisor import launch_here
from agro.place.placement import PlacedProcess
sleep = PlacedProcess("server", "server", None, (sys.executable, "-c", "import time; time.sleep(60)"))
child = launch_here(Path({str(tmp_path)!r}), {{}})(sleep, False)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    until(lambda: not is_running(int(done.stdout)), 10)


def test_deaths_in_words() -> None:
    assert death_words(-9) == death_words(137) == "was killed by SIGKILL"
    assert death_words(1) == "ended with exit code 1"
    assert death_words(LOST) == "was lost with its host"
