"""The command line.

Exit codes: 0 done, 2 refused, 1 an error of agro, 130 interrupted, with everything saved for --resume.
"""

import io
import os
import sys
from typing import Annotated

import typer

from agro.cli.browse import show
from agro.cli.checking import check
from agro.cli.common import Command, Group, guarded
from agro.cli.doctor import doctor
from agro.cli.evaluation import eval_
from agro.cli.explain import objectives
from agro.cli.first import init, recipes
from agro.cli.forgetting import forget
from agro.cli.formats import formats
from agro.cli.importing import import_
from agro.cli.models import sample
from agro.cli.proving import prove
from agro.cli.runs import collect, compare, report, train
from agro.cli.stores import export, recover, score
from agro.version import __version__

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Reinforcement learning for language models from any generation: fresh, replayed, logged or taught.",
)

COMMANDS = (  # name, function, example of its arguments, page of the guide
    ("init", init, "first --task digits", "guide/getting-started.md"),
    ("recipes", recipes, "fresh", "guide/getting-started.md"),
    (
        "train",
        train,
        "fresh policy.model=MODEL data.prompts=prompts.jsonl --out runs/first",
        "guide/the-run.md",
    ),
    ("collect", collect, "runs/first", "guide/the-run.md"),
    (
        "sample",
        sample,
        "--model runs/first/model --prompts prompts.jsonl --out more.db -n 4",
        "guide/getting-started.md",
    ),
    (
        "import",
        import_,
        "log.jsonl.gz --store logs.db --map prompt=question --map response=output",
        "guide/your-data.md",
    ),
    ("formats", formats, "trl-completions", "formats.md"),
    ("check", check, "logs.db --objective grpo", "guide/your-data.md"),
    ("show", show, "runs/first/store.db --groups --reward 0.5: --limit 3", "guide/the-run.md"),
    ("score", score, "logs.db --reward rewards.py:length", "guide/your-reward.md"),
    ("export", export, "runs/first/store.db samples.jsonl.gz", "guide/your-data.md"),
    ("forget", forget, "logs.db --meta user=alice --yes", "guide/your-data.md"),
    ("recover", recover, "damaged.db --out recovered.db", "guide/the-run.md"),
    (
        "eval",
        eval_,
        "--model runs/first/model --prompts held_out.jsonl --reward exact -n 8",
        "guide/getting-started.md",
    ),
    ("compare", compare, "runs/agro-0 runs/agro-1 runs/rloo-0 runs/rloo-1", "guide/reading-the-report.md"),
    ("report", report, "runs/first", "guide/reading-the-report.md"),
    ("objectives", objectives, "agro", "guide/choosing.md"),
    ("doctor", doctor, "runs/first", "guide/the-run.md"),
    ("prove", prove, "agro kl_pg --figure proof.png", "guide/choosing.md"),
)


def _version(asked: bool) -> None:
    if asked:
        print(f"agro-rl {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="The version of agro-rl.")
    ] = False,
) -> None:
    """Reinforcement learning for language models from any generation."""


for name, command, example, page in COMMANDS:
    epilog = f"Example: `agro {name} {example}`\n\nGuide: `docs/{page}`"
    app.command(name, cls=Command, epilog=epilog)(guarded(command))


def main() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for module:NAME of the user's, as `python -m agro` has it
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # half of a surrogate pair in a user's text is printed escaped
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="agro")
