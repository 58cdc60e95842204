"""`agro import FILE` of an unknown log: the proposal with its evidence, and who takes it."""

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
    rewards, is_lower = arguments["rewards"], arguments["lower_is_better"] or None
    if decided or (rewards and not guess):
        return None
    if guess:
        proposal = propose(files[0], rewards=rewards, lower_is_better=is_lower)
    else:
        proposal = propose_unknown(files[0], lower_is_better=is_lower)
    if proposal is None:
        return None
    can_be_taken = proposal and proposal.undefined is None
    if can_be_taken and (yes or (guess and (rewards or is_lower))):
        print(f"{proposal}\n  {visible(proposal.command(*stores))}", file=sys.stderr)
        return proposal
    if as_json:
        print(json.dumps(proposal.to_json(*stores), ensure_ascii=False))
        raise SystemExit(2)
    if can_be_taken and sys.stdin.isatty() and sys.stdout.isatty():
        return _asked(proposal, stores)
    raise proposal.refusal(*stores)


def _asked(proposal: Proposal, stores: Sequence[str]) -> Proposal:
    """As the person at the terminal says."""
    from agro.io.terminal import visible
    from agro.logs.guessing import propose

    while True:
        print(proposal, file=sys.stderr)
        if proposal.undefined is not None:
            raise proposal.refusal(*stores)
        question = "Is the upper one better? y / n (lower is better) / another column / q: "
        if not proposal.is_judged:
            question = "Are these prompts and responses? y / a column that judges them / q: "
        print(question, end="", file=sys.stderr, flush=True)
        answer = (sys.stdin.readline() or "q").strip()
        if answer.lower() in ("y", "yes"):
            return proposal
        if answer.lower() in ("n", "no") and proposal.is_judged:
            return proposal.reversed()
        if answer.lower() in ("n", "no", "q", "quit"):
            raise Refused(f"nothing is imported; as proposed it would be\n  {proposal.command(*stores)}")
        try:
            proposal = (answer and propose(proposal.path, rewards={answer: 1.0})) or proposal
        except Refused as error:
            print(visible(f"agro: {error}"), file=sys.stderr)


def default_store(file: Path) -> str:
    """The store that is proposed for a file: beside it, of its name."""
    return str(file.with_name(f"{file.name.split('.')[0]}.db"))
