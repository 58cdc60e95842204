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
from agro.cli.common import guarded
from agro.cli.evaluation import eval_
from agro.cli.explain import objectives
from agro.cli.forgetting import forget
from agro.cli.formats import formats
from agro.cli.importing import import_
from agro.cli.models import sample
from agro.cli.proving import prove
from agro.cli.runs import collect, compare, report, train
from agro.cli.stores import recover, score
from agro.version import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Reinforcement learning for language models from any generation: fresh, replayed, logged or taught.",
)

COMMANDS = (  # name, function, example of its arguments
    ("train", train, "recipes/fresh.toml policy.model=MODEL data.prompts=prompts.jsonl --out runs/first"),
    ("collect", collect, "runs/first"),
    ("sample", sample, "--model runs/first/model --prompts prompts.jsonl --out more.db -n 4"),
    ("import", import_, "log.jsonl.gz --store logs.db --map prompt=question --map response=output"),
    ("formats", formats, "trl-completions"),
    ("check", check, "logs.db --objective grpo"),
    ("show", show, "runs/first/store.db --groups --reward 0.5: --limit 3"),
    ("score", score, "logs.db --reward rewards.py:length"),
    ("forget", forget, "logs.db --meta user=alice --yes"),
    ("recover", recover, "damaged.db --out recovered.db"),
    ("eval", eval_, "--model runs/first/model --prompts held_out.jsonl --reward exact -n 8"),
    ("compare", compare, "runs/agro-0 runs/agro-1 runs/rloo-0 runs/rloo-1"),
    ("report", report, "runs/first"),
    ("objectives", objectives, "agro"),
    ("prove", prove, "agro kl_pg --figure proof.png"),
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


for name, command, example in COMMANDS:
    app.command(name, epilog=f"Example: `agro {name} {example}`")(guarded(command))


def main() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for module:NAME of the user's, as `python -m agro` has it
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # half of a surrogate pair in a user's text is printed escaped
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="agro")
