"""Collectors on other hosts: the file of hosts, and what stand-ins of ssh, srun and sbatch are given."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agro.config import PlaceConfig
from agro.errors import Refused
from agro.io.processes import LocalProcess
from agro.place import slurm
from agro.place.placement import PlacedProcess, TrainCommand
from agro.place.remote import Host, RemoteLauncher, read_hosts

# Runs the command on this host, as a login shell on another one would, and leaves its arguments.
SSH = """#!/bin/sh
printf '%s\\n' "$@" > "$ARGUMENTS"
while [ "$1" = -o ]; do shift 2; done
shift
exec env -u AGRO_TOKEN sh -c "$*"
"""
SRUN = """#!/bin/sh
printf '%s\\n' "$@" > "$ARGUMENTS"
while [ "$1" != sh ]; do shift; done
exec env -u AGRO_TOKEN "$@"
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts a program on PATH; returns the file that it leaves its arguments in."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("ARGUMENTS", str(tmp_path / "arguments"))

    def make(name: str, text: str) -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path / "arguments"

    return make


def write_hosts(folder: Path, text: str) -> Path:
    (folder / "hosts.txt").write_text(text)
    return folder / "hosts.txt"


def test_a_file_of_hosts(tmp_path: Path) -> None:
    text = "# cluster\nuser@a collectors=4 python=/opt/agro/bin/python dir=/data/run\n\nb  # the small one\n"
    assert read_hosts(write_hosts(tmp_path, text)) == [
        Host("user@a", 4, "/opt/agro/bin/python", "/data/run"),
        Host("b", 1, sys.executable, ""),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a host a line, got none"),
        ("a\nb collectors=0", r"hosts\.txt:2: .*collectors=N"),
        ("a collectors=x", r"hosts\.txt:1: .*collectors=N"),
        ("a ranks=2", r"hosts\.txt:1: 'ranks=2'"),
        ("a dir=x dir=y", r"hosts\.txt:1: 'dir=y'"),
        ("-oProxyCommand=x", r"hosts\.txt:1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        read_hosts(write_hosts(tmp_path, text))
    with pytest.raises(Refused, match="can't be read"):
        read_hosts(tmp_path / "nothing.txt")


def wait(process: LocalProcess) -> int | None:
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return process.poll()


def collector(code: str, name: str = "collector-1") -> PlacedProcess:
    """Its Python is that of the host."""
    return PlacedProcess(name, "collector", None, (sys.executable, "-c", code))


@pytest.mark.parametrize("kind", ["ssh", "srun"])
def test_a_process_on_another_host(
    tmp_path: Path, program: Callable[[str, str], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the token, which isn't in the command line, and its exit code comes back."""
    monkeypatch.setenv("PYTHONPATH", "/a b")
    arguments = program(kind, SSH if kind == "ssh" else SRUN)
    (tmp_path / "there").mkdir()
    hosts = [Host("a", 1, "python", str(tmp_path / "there"))]
    launcher = RemoteLauncher(hosts, tmp_path / "logs", {"AGRO_TOKEN": "secret"}, kind)  # type: ignore[arg-type]
    shown = "os.getcwd(), os.environ['AGRO_TOKEN'], os.environ['PYTHONPATH']"
    code = f"import os; print({shown}); raise SystemExit(3)"
    process = launcher.start(collector(code), again=False)
    assert (process.host, process.pid) == ("a", None)
    assert wait(process) == 3
    log = (tmp_path / "logs" / "collector-1.log").read_text()
    assert log == f"{tmp_path / 'there'} secret /a b\n"
    words = arguments.read_text().splitlines()
    assert "secret" not in arguments.read_text()
    assert ("BatchMode=yes" in words) == (kind == "ssh")
    assert ("--nodelist=a" in words) == (kind == "srun")


def test_a_process_ends_when_its_connection_does(tmp_path: Path, program: Callable[[str, str], Path]) -> None:
    """As where the supervisor stops it, and where it or its host dies."""
    program("ssh", SSH)
    launcher = RemoteLauncher([Host("a")], tmp_path / "logs", {"AGRO_TOKEN": "secret"})
    file = tmp_path / "pid"
    process = launcher.start(
        collector(f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"),
        again=False,
    )
    while not file.exists() or not file.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.stop()
    assert wait(process) == 128 + 15
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_collectors_take_turns_on_the_hosts_and_stay(
    tmp_path: Path, program: Callable[[str, str], Path]
) -> None:
    program("ssh", SSH)
    hosts = [Host("a", 2), Host("b", 1)]
    launcher = RemoteLauncher(hosts, tmp_path / "logs", {"AGRO_TOKEN": "secret"})
    names = ["collector-1", "collector-2", "collector-3", "collector-4", "collector-2"]
    processes = [launcher.start(collector("pass", name), again=False) for name in names]
    assert [process.host for process in processes] == ["a", "a", "b", "a", "a"]
    assert [wait(process) for process in processes] == [0] * 5
    owner = launcher.start(PlacedProcess("owner", "owner", None, ("true",)), again=False)
    assert owner.pid is not None  # here
    assert wait(owner) == 0


def train_command(folder: Path) -> TrainCommand:
    return TrainCommand(folder / "recipe.toml", ("train.steps=3",), folder / "run")


def test_a_job_is_submitted_where_sbatch_exists(tmp_path: Path, program: Callable[[str, str], Path]) -> None:
    said: list[str] = []
    slurm.submit(train_command(tmp_path), PlaceConfig(), said.append)
    script = tmp_path / "run" / "place.sbatch"
    assert said == [f"sbatch isn't here; submit the run on a login node: sbatch {script}"]
    arguments = program("sbatch", '#!/bin/sh\necho "$@" > "$ARGUMENTS"\necho Submitted batch job 7\n')
    slurm.submit(train_command(tmp_path), PlaceConfig(), said.append)
    assert said[1] == "Submitted batch job 7"
    assert arguments.read_text().strip() == str(script)
    program("sbatch", "#!/bin/sh\necho invalid partition >&2\nexit 1\n")
    with pytest.raises(Refused, match="invalid partition"):
        slurm.submit(train_command(tmp_path), PlaceConfig(), said.append)


def test_the_nodes_of_a_job_have_the_collectors(
    program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    with pytest.raises(Refused, match="scontrol show hostnames"):
        slurm.hosts_of_job(5)
    arguments = program(
        "scontrol", '#!/bin/sh\necho "$@" > "$ARGUMENTS"\nprintf "node1\\nnode2\\nnode3\\n"\n'
    )
    assert [(host.name, host.collectors) for host in slurm.hosts_of_job(5)] == [
        ("node1", 2),
        ("node2", 2),
        ("node3", 1),
    ]
    assert arguments.read_text().strip() == "show hostnames node[1-3]"
    assert [host.name for host in slurm.hosts_of_job(2)] == ["node1", "node2"]
