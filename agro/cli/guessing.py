"""`agro import FILE` of an unknown log: the proposal, what it would make of the responses, and whether to take it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agro.errors import Refused

if TYPE_CHECKING:
    from agro.logs.guessing import Proposal

# Options that say how records are read: nothing is guessed beside them.
DECIDED = ("mapping", "format", "reward_map", "choose", "join", "prompts")


def proposed(
    files: Sequence[Path],
    arguments: Mapping[str, Any],
    stores: Sequence[str],
    *,
    guess: bool,
    yes: bool,
    as_json: bool,
) -> Proposal | None:
    """The proposal that was taken; None where the files are to be read as they are.

    Raises `Refused` with the proposal where nobody says whether to take it, and where there is none.
    """
    from agro.io.terminal import visible
    from agro.logs.guessing import propose, propose_unknown

    decided = [name for name in DECIDED if arguments.get(name)]
    if decided and guess:
        flags = ", ".join("--map" if name == "mapping" else f"--{name.replace('_', '-')}" for name in decided)
        raise Refused(f"--guess: expected no {flags} beside it, which say how to read the records")
    rewards, is_lower = arguments["rewards"], arguments["lower_is_better"]
    if decided or (rewards and not guess):
        return None
    if guess:
        proposal = propose(files[0], rewards=rewards, lower_is_better=is_lower or None)
    else:
        proposal = propose_unknown(files[0], lower_is_better=is_lower or None)
    if proposal is None:
        return None
    if proposal and proposal.undefined is None and (yes or (guess and (rewards or is_lower))):
        print(visible(str(proposal)), file=sys.stderr)
        return proposal
    if as_json:
        print(json.dumps(proposal.to_json(*stores), ensure_ascii=False))
        raise SystemExit(2)
    refusal = proposal.refusal(*stores)
    while proposal and proposal.undefined is None and sys.stdin.isatty() and sys.stdout.isatty():
        print(visible(f"{files[0]}:\n{proposal}"), file=sys.stderr)
        print(
            "Is the upper one better? y / n (lower is better) / another column / q: ",
            end="",
            file=sys.stderr,
            flush=True,
        )
        answer = (sys.stdin.readline() or "q").strip()
        if answer.lower() in ("y", "yes"):
            return proposal
        if answer.lower() in ("n", "no"):
            return proposal.reversed()
        if answer.lower() in ("q", "quit"):
            raise Refused(f"nothing is imported; as proposed it would be\n  {proposal.command(*stores)}")
        try:
            proposal = propose(files[0], rewards={answer: 1.0}) if answer else proposal
        except Refused as error:
            print(visible(f"agro: {error}"), file=sys.stderr)
        assert proposal is not None  # none is proposed only where no column is named
        refusal = proposal.refusal(*stores)
    raise refusal


def default_store(file: Path) -> str:
    """The store that is proposed for a file: beside it, of its name."""
    return str(file.with_name(f"{file.name.split('.')[0]}.db"))
