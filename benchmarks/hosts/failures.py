"""What happens to a run when one of its processes dies, stops or can't be reached."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from network import HOSTS, LossyProxy, has_namespaces, on_host, plug, two_hosts
from placed import ENVIRONMENT, PATIENCE, PlacedRun, configuration, findings, last_step, tail, wait

from agro.io.processes import LocalProcess, free_port

ENDLESS = 100_000  # steps of a run that is stopped when enough was killed
CUT_SECONDS = 12.0
STOPPED_SECONDS = 10.0  # longer than the lease


@dataclass
class Failure:
    """A row of the table: one kind of failure, as often as it happened."""

    what: str
    way: str  # HTTP or Ray
    count: int = 0
    steps_meanwhile: list[int] = field(default_factory=list)  # of the run, until all was back
    back_after: list[float] = field(default_factory=list)  # seconds
    ended_after: list[float] = field(default_factory=list)  # seconds, of ranks without the other one


@dataclass
class Result:
    """Failures of one run, and what held of it in the end."""

    name: str
    failures: list[Failure]
    found: dict[str, Any]
    seconds: float = 0.0


def report_of(run: Path, name: str) -> dict[str, Any]:
    """What a process last said of itself; empty where it has said nothing."""
    for file in run.glob(f"store.db.shared/*/processes/{name}.json"):
        try:
            return dict(json.loads(file.read_text()))
        except (FileNotFoundError, ValueError):
            return {}
    return {}


def kill(run: PlacedRun, role: str, rng: random.Random) -> tuple[int, float]:
    """Kill a process of a role; returns the steps that were made, and the seconds, until it was back."""
    pids = run.pids(role)
    name = rng.choice(sorted(pids))
    step, began = run.step(), time.monotonic()
    os.kill(pids[name], signal.SIGKILL)
    if role == "collector":
        wait_for_collector(run, name, pids[name])
    else:
        run.wait_for(step + 2)  # a step's samples may have been there already
    return run.step() - step, time.monotonic() - began


def wait_for_collector(run: PlacedRun, name: str, pid: int) -> None:
    """Until a collector samples again in another process."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        report = report_of(run.folder, name)
        if report.get("pid", pid) != pid and report.get("responses"):
            return
        assert run.process.poll() is None, tail(run.log)
        time.sleep(0.05)
    raise AssertionError(f"{name} wasn't back within {PATIENCE:g} s: {tail(run.log)}")


def random_kills(folder: Path, kills: int, seed: int) -> Result:
    """Owner, trainer and two collectors, killed in random order at random times."""
    rng = random.Random(seed)
    run = PlacedRun(folder, configuration(folder, ENDLESS, max_age=2), "local:2")
    failures = {role: Failure(f"{role} killed", "HTTP") for role in ("owner", "trainer", "collector")}
    run.wait_for(3)
    roles = [list(failures)[i % 3] for i in range(kills)]
    rng.shuffle(roles)
    for role in roles:
        time.sleep(rng.uniform(0, 1.0))
        steps, seconds = kill(run, role, rng)
        note(failures[role], steps, seconds)
    run.wait_for(run.step() + 3)
    run.process.stop()
    code = run.end(120)
    assert code == 130, (code, tail(run.log))
    return Result("random kills", [*failures.values()], findings(run.folder, last_step(run.folder)))


def equal_weights(folder: Path, kills: int, seed: int) -> Result:
    """Staleness 0 and one collector: a run with kills ends with the weights of one without, bit for bit."""
    rng = random.Random(seed)
    steps, models = 12 + 4 * kills, []
    failures = {role: Failure(f"{role} killed", "HTTP") for role in ("owner", "trainer", "collector")}
    for name in ("undisturbed", "killed"):
        (folder / name).mkdir()
        run = PlacedRun(folder / name, configuration(folder / name, steps, max_age=0), "local:1")
        if name == "killed":
            run.wait_for(2)
            for i in range(kills):
                role = list(failures)[i % 3]
                note(failures[role], *kill(run, role, rng))
        assert run.end() == 0, tail(run.log)
        models.append((run.folder / "model" / "model.safetensors").read_bytes())
    found = findings(run.folder, steps)
    return Result("equal weights", [*failures.values()], {**found, "equal_weights": models[0] == models[1]})


def stopped_collector(folder: Path, count: int) -> Result:
    """A collector is stopped for longer than its lease: another one takes its prompts; then it goes on."""
    run = PlacedRun(folder, configuration(folder, ENDLESS, max_age=2), "local:2")
    failure = Failure("collector stopped for longer than its lease", "HTTP")
    run.wait_for(3)
    for _ in range(count):
        name, pid = sorted(run.pids("collector").items())[0]
        step, before = run.step(), report_of(run.folder, name).get("responses", 0)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        steps, began = run.step() - step, time.monotonic()
        os.kill(pid, signal.SIGCONT)
        while report_of(run.folder, name).get("responses", 0) <= before:
            assert time.monotonic() - began < PATIENCE, tail(run.log)
            time.sleep(0.05)
        note(failure, steps, time.monotonic() - began)
    run.process.stop()
    assert run.end(120) == 130, tail(run.log)
    return Result("stopped collector", [failure], findings(run.folder, last_step(run.folder)))


def lost_answers(folder: Path, steps: int) -> Result:
    """Trainer and two collectors reach the owner through a proxy that loses every 7th answer."""
    port = free_port("127.0.0.1")
    out, environment = folder / "run", {**ENVIRONMENT, "AGRO_TOKEN": "benchmark"}
    out.mkdir()
    recipe = str(configuration(folder, steps, max_age=2))
    with LossyProxy(port, every=7) as proxy:
        serve = ("store", "serve", str(out / "store.db"), "--port", str(port))
        train = ("train", recipe, "--out", str(out), "--owner", proxy.url)
        commands = [serve, train, *[("collect", proxy.url, "--name", f"collector-{i}") for i in (1, 2)]]
        processes = [_agro(folder, environment, number, *words) for number, words in enumerate(commands)]
        assert wait(processes[1], 900) == 0, tail(folder / "1.log")
        assert [wait(process, 60) for process in processes[2:]] == [0, 0]
        processes[0].stop()
        assert wait(processes[0], 60) == 0, tail(folder / "0.log")
        proxy.shutdown()
        failure = Failure("answer of the owner lost after its commit", "HTTP", proxy.lost)
    return Result("lost answers", [failure], findings(out, steps))


def cut_cable(folder: Path, count: int) -> Result:
    """Owner and trainer on one host, collectors on another (network namespaces); the cable is pulled."""
    assert has_namespaces(), "network namespaces need root"
    failure = Failure("cable between collectors and owner cut", "HTTP")
    recipe, out = str(configuration(folder, ENDLESS, max_age=2)), folder / "run"
    environment = {**ENVIRONMENT, "AGRO_TOKEN": "benchmark"}
    out.mkdir()
    address, port = HOSTS["agro-a"], str(free_port("127.0.0.1"))
    url = f"http://{address}:{port}"
    serve = ("store", "serve", str(out / "store.db"), "--host", address, "--port", port)
    with two_hosts():
        owner = _agro(folder, environment, 0, *serve, host="agro-a")
        train = (sys.executable, "-m", "agro", "train", recipe, "--out", str(out), "--owner", url)
        run = PlacedRun.of(folder, on_host("agro-a", *train), environment)
        names = ("collector-1", "collector-2")
        collectors = [
            _agro(folder, environment, number, "collect", url, "--name", name, host="agro-b")
            for number, name in enumerate(names, 1)
        ]
        run.wait_for(3)
        for _ in range(count):
            step = run.step()
            plug(False)
            time.sleep(CUT_SECONDS)
            steps, before = run.step() - step, run.step()
            plug(True)
            note(failure, steps, run.wait_for(before + 2))
        run.process.stop()
        assert run.end(120) == 130, tail(run.log)
        for process in (*collectors, owner):
            process.stop()
            wait(process, 60)
    return Result("cut cable", [failure], findings(run.folder, last_step(run.folder)))


def _agro(
    folder: Path, environment: dict[str, str], number: int, *words: str, host: str = ""
) -> LocalProcess:
    command = [sys.executable, "-m", "agro", *words]
    command = on_host(host, *command) if host else command
    return LocalProcess(command, environment, folder / f"{number}.log", "")


def note(failure: Failure, steps: int, seconds: float) -> None:
    failure.count += 1
    failure.steps_meanwhile.append(steps)
    failure.back_after.append(round(seconds, 2))
