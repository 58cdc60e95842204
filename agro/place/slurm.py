"""A run as one job of Slurm: the first node has owner and trainer, all of them have collectors.

Outside of a job the script of one is written, and submitted where sbatch exists. In the job the same command
runs again and starts its processes by srun.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable

from agro.config import PlaceConfig
from agro.errors import Refused
from agro.io.files import write
from agro.place.placement import TrainCommand
from agro.place.remote import Host

JOB = "SLURM_JOB_ID"
NODES = "SLURM_JOB_NODELIST"
SCRIPT = """#!/bin/sh
# Made by agro train --place slurm. Add what your cluster wants: --partition, --account, --gpus, --time.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --output={log}
#SBATCH --open-mode=append
#SBATCH --requeue
{exports}cd {folder}
[ -e {metrics} ] && resume=--resume
exec {command} $resume
"""


def is_job() -> bool:
    """Whether this process runs in a job."""
    return JOB in os.environ


def submit(command: TrainCommand, config: PlaceConfig, say: Callable[[str], None]) -> None:
    """Write RUN/place.sbatch, and submit it where sbatch exists."""
    path = command.out / "place.sbatch"
    command.out.mkdir(parents=True, exist_ok=True)
    write(path, script(command, config))
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        say(f"sbatch isn't here; submit the run on a login node: sbatch {shlex.quote(str(path))}")
        return
    done = subprocess.run([sbatch, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(
            f"sbatch {path}: {done.stderr.strip()}; change the script's #SBATCH lines, and submit it"
        )
    say(done.stdout.strip())


def script(command: TrainCommand, config: PlaceConfig) -> str:
    """A node for each collector; the first one also has the owner of the store and the trainer."""
    accept = [word for key in command.accept for word in ("--accept", key)] if command.resume else []
    words = [sys.executable, "-m", "agro", "train", str(command.config), *command.overrides]
    words += ["--out", str(command.out), "--place", "slurm", *accept]
    passed = [name for name in ("PYTHONPATH", "HF_HOME") if name in os.environ]
    return SCRIPT.format(
        name=f"agro-{command.out.name}",
        nodes=config.collectors,
        log=command.out / "slurm.log",
        exports="".join(f"export {name}={shlex.quote(os.environ[name])}\n" for name in passed),
        folder=shlex.quote(os.getcwd()),
        metrics=shlex.quote(str(command.out / "metrics.jsonl")),
        command=shlex.join(words),
    )


def hosts_of_job(collectors: int) -> list[Host]:
    """The nodes of this job, with as many collectors as are wanted spread over them."""
    nodes = os.environ.get(NODES, "")
    command = ["scontrol", "show", "hostnames", nodes]  # node[1-3] as names
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(f"--place slurm: {NODES}={nodes}: {shlex.join(command)} fails: {error}") from None
    counts = [collectors // len(names) + (i < collectors % len(names)) for i in range(len(names))]
    return [Host(name, count) for name, count in zip(names, counts, strict=True) if count]
