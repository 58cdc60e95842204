"""`agro import FILE` of an unknown log: what its columns are, the command that is proposed, and whether to
take it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agro.cli.common import table
from agro.cli.listing import width
from agro.errors import Refused

if TYPE_CHECKING:
    from agro.logs.guessing import Proposal

# Options that say how records are read: with one of them nothing is guessed.
DECIDED = ("mapping", "format", "rewards", "reward_map", "choose", "join", "prompts")


def proposed(
    files: Sequence[Path], arguments: Mapping[str, Any], stores: Sequence[str], *, guess: bool, as_json: bool
) -> Proposal | None:
    """The proposal to import by; None where the files are to be read as they are.

    Raises `Refused` with the proposal where nobody says whether to take it, and where there is none.
    """
    from agro.logs.guessing import propose

    decided = [name for name in DECIDED if arguments.get(name)]
    if decided and guess:
        flags = ", ".join("--map" if name == "mapping" else f"--{name.replace('_', '-')}" for name in decided)
        raise Refused(f"--guess: expected no {flags} beside it, which say how to read the records")
    kind = "" if guess else _kind(files[0])
    if decided or kind not in ("", "prompts"):
        return None
    proposal = propose(files[0])
    if proposal is None or (kind == "prompts" and not proposal.is_judged):
        return None
    command = proposal.command(*(stores or [default_store(files[0])]))
    if guess and not stores:
        _print(proposal, command, as_json)
        raise SystemExit(0 if proposal else 2)
    if not proposal:
        raise Refused(
            f"{files[0]}: of no known format. Its columns:\n{described(proposal)}\n{_nothing(proposal)}"
        )
    is_asked = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    if not guess and not is_asked:
        raise Refused(
            f"{files[0]}: of no known format. Its columns:\n{described(proposal)}\n"
            f"Proposed, and not done:\n  {command}\n"
            "What to do: run it, corrected where it is wrong, or take it with --guess"
        )
    print(described(proposal), file=sys.stderr)
    print(f"\n  {command}", file=sys.stderr)
    if not guess and input("Import so? [y/N] ").strip().lower() not in ("y", "yes"):
        raise Refused("nothing is imported; run the command above, corrected where it is wrong")
    return proposal


def default_store(file: Path) -> str:
    """The store that is proposed for a file: beside it, of its name."""
    return str(file.with_name(f"{file.name.split('.')[0]}.db"))


def _kind(path: Path) -> str:
    """Of the format of a file's first record; "" where it is of none, "unread" where it can't be read."""
    from agro.io.record_files import read_records
    from agro.logs.format_table import Recognizer, format_at

    at = format_at(path)
    if at is not None:
        return at.kind
    line = next(read_records(path), None)
    if line is None or line.error:
        return "unread"
    format = Recognizer(None).recognize(line.value)
    return "" if format is None else format.kind


def _print(proposal: Proposal, command: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(proposal.to_json(), ensure_ascii=False))
        return
    print(described(proposal))
    print(f"\n  {command}" if proposal else _nothing(proposal))


def _nothing(proposal: Proposal) -> str:
    names = ", ".join(column.path for column in proposal.columns) or "none"
    return (
        f"{proposal.path}: no column says that it is the prompt or the response; name them: --map "
        f"prompt=COLUMN --map response=COLUMN --map reward=COLUMN, of {names}"
    )


def described(proposal: Proposal) -> str:
    """The columns with their types and first values, and what the proposal rests on."""
    from io import StringIO

    from rich.console import Console

    shown = table("column", "type", "first values", wrap_names=True)
    for column in proposal.columns:
        about = column.about()
        shown.add_row(column.path, about["type"], "\n".join(about["first"]))
    text = StringIO()
    Console(file=text, width=width(), markup=False, highlight=False, emoji=False).print(shown)
    lines = [text.getvalue().rstrip(), *proposal.reasons]
    return "\n".join([*lines, *([f"tried on {proposal.tried}"] if proposal.tried else [])])
