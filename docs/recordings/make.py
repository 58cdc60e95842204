"""Recordings as text: commands and their real output, with the wheel of this checkout.

    python docs/recordings/make.py [first log commands ratings trl] [--out docs/recordings]
                                   [--environment DIR]
    python docs/recordings/make.py chat --model DIR

`first`: a stranger's first ten minutes, from `pip install` in an empty environment to a rising curve
(first.txt). `log`: from a JSONL log of another model to a better model, compared (log.txt). `chat`: the same
of a real chat model, examples/chat_model (chat.txt); DIR is what reproductions/chat/model.py writes.
`ratings`: from a table of ratings to a verdict. `trl`:
a script for TRL's trainer, then with agro's, then its log; the environment has TRL.
`commands`: the example of every command (commands.txt), which `python tools/docs/cli_docs.py` shows on the
page of the commands.

All but the first run in an environment that has agro: --environment, or else one that is made for them. …
stands for lines that a command repeats for each step, except those with a held-out value, and for the middle
of a long output. pip is quiet.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL = "pip install --constraint constraints.txt {wheel}"
FIRST = (
    "agro --version",
    "agro init first",
    "cd first",
    "head -n 3 prompts.jsonl",
    "agro train recipe.toml --out runs/first",
    "agro eval runs/first",
    "agro store show runs/first/store.db --groups --newest --limit 1",
    "ls runs/first",
)
LOG = (
    "agro init log --task own-log",
    "cd log",
    "head -n 4 log.jsonl",
    "agro import log.jsonl --store log.db --map prompt=question --map response=output --map reward=score",
    "agro check log.db",
    "agro train recipe.toml --out runs/agro",
    "agro train recipe.toml 'phases.learn.objective={name=\"sft\"}' phases.learn.data.min_reward=1.0 "
    "--out runs/sft",
    "agro eval runs/agro",
    "agro eval runs/sft",
    "agro compare runs/agro runs/sft",
)
CHAT = (
    "python examples/chat_model/make_log.py smollm2",
    "head -n 2 log.jsonl",
    "agro import log.jsonl --store log.db",
    "agro check log.db",
    "agro train examples/chat_model/laptop.toml --out runs/log",
)
RATINGS = (  # a form's export, of the task's log
    "agro init ratings --task own-log",
    "cd ratings",
    '(echo \'Question;Answer;Stars (1-5)\'; sed -E \'s/.*: "(.*)", .*: "(.*)", .*: 1.0.*/\\1;\\2;5/; '
    's/.*: "(.*)", .*: "(.*)", .*: 0.0.*/\\1;\\2;2/\' log.jsonl) > ratings.csv',
    "head -n 4 ratings.csv",
    "agro import ratings.csv --guess --yes --store ratings.db",
    "agro check ratings.db",
    'agro train sft \'policy.new={alphabet="0123456789>", hidden=64, layers=2, heads=4, context=16, '
    "initializer_range=0.1}' data.store=ratings.db train.steps=100 train.groups=64 train.lr=3e-3 "
    "--out runs/start",
    "agro train log policy.model=runs/start/model data.store=ratings.db data.eval_prompts=held_out.jsonl "
    "reward.name=reward.py:right sampler.max_new=5 train.lr=1e-3 train.steps=60 train.groups=64 "
    "evaluate.every=20 --out runs/log",
    "agro eval runs/log --against start",
)
TRL = (
    "agro init digits --task digits",
    "cd digits",
    "agro train recipe.toml train.steps=20 --out runs/start",
    "cat ../trl_script.py",
    "cp ../trl_script.py train.py",
    "python train.py",
    "sed -e 's/GRPOConfig, GRPOTrainer/GRPOConfig/; s/GRPOTrainer/AGROTrainer/' "
    "-e '3a from agro.api.trl import AGROTrainer' "
    '-e \'s/"out",/"out", beta=0.002, scale_rewards="none",/\' train.py > with_agro.py',
    "diff train.py with_agro.py || true",
    "python with_agro.py",
    "agro eval --model runs/start/model --prompts held_out.jsonl --reward reward.py:prefix --max-new 4 -n 2",
    "agro eval --model out/model --prompts held_out.jsonl --reward reward.py:prefix --max-new 4 -n 2",
    "agro import out/completions/*.parquet --store log.db",
    "agro check log.db",
)
MADE_FIRST = ("init", "train")  # the other examples are about what these make
FIRST_LINES, LAST_LINES = 60, 20  # of a longer output
BEFORE = {  # what the example of a command takes for granted
    "train": ("cd first",),
    "collect": (
        "agro train recipe.toml source.kind=elsewhere data.max_age=2 train.steps=40 --out runs/async "
        "> trainer.txt 2>&1 &",
        "until [ -e runs/async/config.json ]; do sleep 1; done",
    ),
    "chat": ("printf '520731>\\n1\\n998877>\\n0\\n' > lines.txt",),
    "compare": tuple(
        f"agro train recipe.toml {options}train.seed={seed} train.steps=40 --out runs/{name}-{seed}"
        for name, options in (("agro", ""), ("rloo", "objective.name=rloo objective.beta=0 "))
        for seed in (0, 1)
    ),
    "import": (
        'sed -E \'s/.*"(...)>".*"((..).)".*/'
        r'{"question": "\1>", "answer": "\2", "output": "\2", "score": 1, "user": "alice"}\n'
        r'{"question": "\1>", "answer": "\2", "output": "\3", "score": 0, "user": "bob"}'
        "/' held_out.jsonl > log.jsonl",
        "head -n 2 log.jsonl",
        "gzip log.jsonl",
    ),
}


def examples() -> tuple[str, ...]:
    """The example of every command, after what it takes for granted."""
    from agro.cli.commands import COMMANDS

    commands: list[str] = []
    for entry in sorted(COMMANDS, key=lambda entry: entry.name not in MADE_FIRST):
        commands += [*BEFORE.get(entry.name, ()), f"agro {entry.name} {entry.example}"]
    return tuple(commands)


WALKS = {"first": FIRST, "log": LOG, "chat": CHAT, "ratings": RATINGS, "trl": TRL}


class Shell:
    """Runs commands one after the other in a folder, with the programs of an environment first."""

    def __init__(self, folder: Path, environment: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "PIP_CONFIG_FILE") if name in os.environ}
        path = f"{environment.absolute() / 'bin'}:{os.environ['PATH']}"
        self.environment = {**kept, "PATH": path, "COLUMNS": "100", "PIP_QUIET": "2"}

    def run(self, command: str) -> None:
        self.say(f"$ {command}")
        if command.startswith("cd "):
            self.folder /= command[3:]
            self.say("")
            return
        began, before = time.monotonic(), _cpu_seconds()
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        assert process.stdout is not None
        serves = False
        for line in shortened(process.stdout):
            self.say(line)
            if line.startswith("serving "):  # until it is ended, as by Ctrl-C
                serves = True
                os.killpg(process.pid, signal.SIGINT)
        if process.wait() and not serves:
            sys.exit(f"{command}: ended with {process.returncode}")
        seconds, cpu = time.monotonic() - began, _cpu_seconds() - before
        self.say(f"[{seconds:.0f} s by the clock, {cpu:.0f} s of processor time]\n")


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shortened(lines: Iterator[str]) -> Iterator[str]:
    """The first FIRST_LINES and the last LAST_LINES that `without_steps` leaves; … stands for the others."""
    left = without_steps(lines)
    yield from itertools.islice(left, FIRST_LINES)
    last: deque[str] = deque(maxlen=LAST_LINES)
    for count, line in enumerate(left):
        if count == LAST_LINES:
            yield "…"
        last.append(line)
    yield from last


def without_steps(lines: Iterator[str]) -> Iterator[str]:
    """`lines` without those of steps that measured nothing, the kernel and where checkout, packages and model
    are (…), and without other programs' bars of progress."""
    left_out = False
    for line in lines:
        line = line.rstrip().replace(platform.release(), "…").replace(str(ROOT), "…")
        line = re.sub(r"/\S*/(site-packages|smollm2)", r"…/\1", line)
        if re.search(r"\d+%\|.*\|", line):
            continue
        if "tok/s" in line and "held-out" not in line:
            left_out = True
            continue
        if left_out:
            yield "…"
            left_out = False
        yield line


def machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"{model}, {os.cpu_count()} cores, load {load} by other programs; Python {platform.python_version()}"
    )


def record(name: str, out: Path, environment: Path | None, model: Path | None) -> None:
    with (
        tempfile.TemporaryDirectory() as temporary,
        (out / f"{name}.txt").open("w", encoding="utf-8") as file,
    ):

        def say(line: str) -> None:
            print(line, flush=True)
            file.write(f"{line}\n")
            file.flush()

        folder = Path(temporary)
        shutil.copy(ROOT / "docs/recordings/trl_script.py", folder)
        (folder / "origin").symlink_to(ROOT)
        if name == "chat" and model is not None:
            (folder / "examples").symlink_to(ROOT / "examples")
            (folder / "smollm2").symlink_to(model.resolve())
        say(f"# Made by: python docs/recordings/make.py {name}")
        say(f"# {time.strftime('%Y-%m-%d')}, {machine()}\n")
        shell = Shell(folder, environment or folder / "env", say)
        commands = examples() if name == "commands" else WALKS[name]
        if name == "first":
            commands = (*installation(folder), *commands)
        elif environment is None:
            for command in installation(folder):
                Shell(folder, folder / "env", lambda line: None).run(command)
        for command in commands:
            shell.run(command)


def installation(folder: Path) -> tuple[str, str]:
    """Build the wheel into `folder`; returns the commands that install it in an environment there."""
    shutil.copy(ROOT / "constraints.txt", folder)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(pip, check=True)
    [wheel] = folder.glob("agro_rl-*.whl")
    return "python3 -m venv env", INSTALL.format(wheel=wheel.name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/recordings")
    parser.add_argument("--environment", type=Path, help="of `log` and `commands`: one that has agro")
    parser.add_argument("--model", type=Path, help="of `chat`: the folder of the model")
    args = parser.parse_args()
    for name in args.names or ("first", "log", "commands"):
        if name == "chat" and args.model is None:
            parser.error("chat needs --model, a folder that reproductions/chat/model.py writes")
        record(name, args.out, None if name == "first" else args.environment, args.model)


if __name__ == "__main__":
    main()
