"""What happens to a run of two ranks and two servers when one of them dies, or the ranks are cut off."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from failures import ENDLESS, Failure, Result, note
from network import HOSTS, has_namespaces, on_host, plug, two_hosts
from placed import ENVIRONMENT, HERE, PATIENCE, PlacedRun, configuration, findings, last_step, tail, wait

from agro.io.processes import LocalProcess, free_port

RANKS, SERVERS = 2, 2
RANK_SECONDS = 5.0
EXACT = 1e-4  # nats a token, between a server's log-probs and the trainer's of the same weights


def served(folder: Path) -> Path:
    """A recipe of two ranks, and a collector whose responses two servers sample.

    Each step waits for responses of its own weights, so that one of others would be seen.
    """
    ports = [free_port("127.0.0.1") for _ in range(SERVERS)]
    program = [sys.executable, str(HERE / "server.py"), str(folder / "recipe.json")]
    return configuration(
        folder,
        ENDLESS,
        max_age=0,
        engine={"kind": "server", "urls": [f"http://127.0.0.1:{port}" for port in ports], "model": "model"},
        place={"ranks": RANKS, "servers": [shlex.join([*program, str(port)]) for port in ports]},
    )


def ranks_and_servers(folder: Path, kills: int, seed: int) -> Result:
    """A rank, a server and the launcher of the ranks, killed in random order at random times."""
    rng = random.Random(seed)
    run = PlacedRun(folder, served(folder), "local:1", (f"train.rank_seconds={RANK_SECONDS}",))
    strikes = {"rank": kill_rank, "server": kill_server, "launcher of ranks": kill_launcher}
    failures = {role: Failure(f"{role} killed", "local") for role in strikes}
    roles = [list(strikes)[i % len(strikes)] for i in range(kills)]
    rng.shuffle(roles)
    run.wait_for(3)
    for role in roles:
        time.sleep(rng.uniform(0, 1.0))
        step, began = run.step(), time.monotonic()
        strikes[role](run, rng)
        note(failures[role], run.step() - step, time.monotonic() - began)
    run.wait_for(run.step() + 3)
    run.process.stop()
    code = run.end(120)
    assert code == 130, (code, tail(run.log))
    found = findings(run.folder, last_step(run.folder))
    return Result("ranks and servers", [*failures.values()], {**found, **log_probs(run.folder)})


def cut_ranks(folder: Path, count: int) -> Result:
    """A rank on each of two hosts (network namespaces); the cable is pulled, and both ranks must end."""
    assert has_namespaces(), "network namespaces need root"
    failure = Failure("cable between ranks cut", "gloo")
    recipe = configuration(folder, ENDLESS, max_age=0, source={"kind": "inline"})
    run = folder / "run"
    with two_hosts():
        ranks = start_ranks(folder, recipe)
        for _ in range(count):
            wait_for_step(ranks, run, last_step(run) + 4)
            plug(False)
            began, step = time.monotonic(), last_step(run)
            codes = [wait(rank, PATIENCE) for rank in ranks]
            assert codes == [1, 1], (codes, [tail(log) for log in logs(folder)])
            took = time.monotonic() - began
            assert took <= RANK_SECONDS + 2, took  # 2: processes end, on a busy machine
            failure.ended_after.append(round(took, 2))
            plug(True)
            began, steps = time.monotonic(), last_step(run) - step
            ranks = start_ranks(folder, recipe, "--resume")
            wait_for_step(ranks, run, last_step(run) + 1)
            note(failure, steps, time.monotonic() - began)
        wait_for_step(ranks, run, last_step(run) + 2)
        for rank in ranks:
            rank.stop()
        codes = [wait(rank, 120) for rank in ranks]
        assert codes[0] == 130, (codes, [tail(log) for log in logs(folder)])
    return Result("cut ranks", [failure], findings(run, last_step(run)))


def start_ranks(folder: Path, recipe: Path, *words: str) -> list[LocalProcess]:
    """One on each host, as a launcher there would."""
    master = {"MASTER_ADDR": HOSTS["agro-a"], "MASTER_PORT": str(free_port("127.0.0.1"))}
    started = []
    for rank, host in enumerate(HOSTS):
        numbers = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(HOSTS))}
        environment = ENVIRONMENT | master | numbers | {"GLOO_SOCKET_IFNAME": f"agro-v{host[-1]}"}
        command = on_host(host, sys.executable, "-m", "agro", "train", str(recipe))
        command += [f"train.rank_seconds={RANK_SECONDS}", "--out", str(folder / "run"), *words]
        started.append(LocalProcess(command, environment, logs(folder)[rank], host))
    return started


def logs(folder: Path) -> list[Path]:
    return [folder / f"rank-{rank}.log" for rank in range(len(HOSTS))]


def wait_for_step(ranks: Sequence[LocalProcess], run: Path, step: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while last_step(run) < step:
        assert all(rank.poll() is None for rank in ranks), [tail(log) for log in logs(run.parent)]
        assert time.monotonic() < deadline, [tail(log) for log in logs(run.parent)]
        time.sleep(0.05)


def log_probs(run: Path) -> dict[str, Any]:
    """Whether all responses came from the weights that were pushed: by the servers' log-probs."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    largest = max(row["logp_diff_max"] for row in rows if row["step"] > 0)
    return {"sampled_by_what_was_pushed": largest < EXACT, "logp_diff_max": largest}


def ranks_of(launcher: int) -> dict[int, int]:
    """The processes of the ranks that torchrun has started, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        number = next((v[5:] for v in variables if v.startswith(b"RANK=")), None)
        if parent == launcher and number is not None:
            found[int(number)] = int(process.name)
    return found


def kill_rank(run: PlacedRun, rng: random.Random) -> None:
    (launcher,) = run.pids("trainer").values()
    ranks, step = ranks_of(launcher), run.step()
    assert len(ranks) == RANKS, ranks
    os.kill(ranks[rng.randrange(RANKS)], signal.SIGKILL)
    run.wait_for(step + 2)


def kill_launcher(run: PlacedRun, rng: random.Random) -> None:
    """The ranks are left without it, and must end by themselves."""
    (launcher,) = run.pids("trainer").values()
    ranks, step = ranks_of(launcher), run.step()
    os.kill(launcher, signal.SIGKILL)
    run.wait_for(step + 2)
    left = [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
    assert not left, f"ranks of a launcher that died still run: {left}"


def kill_process(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_server(run: PlacedRun, rng: random.Random, strike: Callable[[int], None] = kill_process) -> None:
    """Until it is used again, after its probe."""
    name, pid = rng.choice(sorted(run.pids("server").items()))
    log = run.folder / "logs" / "collector-1.log"
    before = len(log.read_text())
    strike(pid)
    deadline = time.monotonic() + PATIENCE
    while "is used again: it passed its probe" not in log.read_text()[before:]:
        assert time.monotonic() < deadline, (name, log.read_text()[before:], tail(run.log))
        assert run.process.poll() is None, tail(run.log)
        time.sleep(0.05)
    assert "isn't used: " in log.read_text()[before:], name
