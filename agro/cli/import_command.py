"""`agro import`: import logs into a store, and propose how to read an unknown one; and `agro check`: the
report before training."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from agro.cli.common import answer, end, opened_log, pairs, policy_config
from agro.config import RunConfig
from agro.errors import Refused
from agro.io.strictjson import dumps
from agro.io.terminal import visible
from agro.logs.guessing import Proposal, propose, propose_unknown
from agro.logs.importing import ImportReport, import_files
from agro.logs.mapping import parse_map
from agro.logs.values import parse_words
from agro.store import Store
from agro.store.copying import to_record
from agro.store.location import exists, url_of

SHOWN = 3  # records of each file in a preview


def import_(
    files: Annotated[list[Path], typer.Argument()],
    store: Path | None = None,
    format: str | None = None,
    map_: Annotated[list[str] | None, typer.Option("--map")] = None,
    prompts: Path | None = None,
    tokenizer: str | None = None,
    policy: list[str] | None = None,
    rewards: Annotated[list[str] | None, typer.Option("--reward")] = None,
    reward_map: list[str] | None = None,
    lower_is_better: bool = False,
    choose: list[str] | None = None,
    join: Path | None = None,
    preview: bool = False,
    replace: bool = False,
    strict: bool = False,
    drop: list[str] | None = None,
    redact: bool = False,
    redact_pattern: list[str] | None = None,
    center_by: Annotated[str | None, typer.Option(metavar="FIELD")] = None,
    license: str | None = None,
    workers: int = 1,
    guess: bool = False,
    yes: bool = False,
    as_json: bool = False,
) -> None:
    """Args:
    files: Files and folders in a format of `agro formats`.
    store: The store; created if it is missing.
    format: The files' format, if it isn't recognized.
    map_: FIELD=COLUMN: a name or JMESPath; the first * expands keys or items.
    prompts: A file of prompts, joined by id to rows without one.
    tokenizer: The model whose tokenizer produced the tokens of responses without a mask.
    rewards: COLUMN or COLUMN=WEIGHT: the reward is the sum of these.
    reward_map: WORD=NUMBER,…: the numbers of rewards that are words, such as up=1,down=0.
    lower_is_better: Store the reward r as -r, and swap the winner and the loser of each pair.
    choose: KIND=NAME, such as filter=strict: which one to take of several of a kind.
    join: The second file of a format that is split over two files.
    preview: Print the first records as they would be stored; store none.
    replace: Import the files again, replacing an earlier import of them.
    strict: If any record is refused, store nothing and exit with 2.
    drop: A field to leave out, such as meta.user; may be repeated.
    redact: Redact keys, tokens, private keys and e-mail addresses.
    redact_pattern: Redact matches of this regular expression too; may be repeated.
    center_by: Center rewards per value of this field, such as a user, task or grader (leave-one-out).
    license: The files' license, recorded with them and in model cards.
    guess: Propose how to read an unknown file, show which responses would be the best and the worst, and
        ask; without a terminal --yes, --reward COLUMN or --lower-is-better decide.
    yes: Accept the proposal of --guess unseen.
    """
    arguments: dict[str, Any] = {
        "mapping": parse_map(map_ or []),
        "prompts": prompts,
        "format": format,
        "rewards": _weights(rewards or []),
        "reward_map": parse_words(",".join(reward_map)) if reward_map else None,
        "choose": pairs(choose, "--choose", "KIND=NAME"),
        "join": join,
        "drop": drop or [],
        "redact": redact,
        "redact_patterns": redact_pattern or [],
        "strict": strict,
        "lower_is_better": lower_is_better,
        "center_by": center_by,
    }
    name = str(store or files[0].with_name(f"{files[0].name.split('.')[0]}.db"))
    proposal = proposed(files, arguments, name, guess=guess or yes, yes=yes, as_json=as_json)
    if proposal is not None:
        arguments |= {"rewards": {}, **proposal.options(), "drop": [*(drop or ()), *proposal.drop]}
        store = Path(name)
    if preview:  # print each file's first records as they would be stored, and refusals
        with TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db") as opened:
            shown = import_files(opened, files, limit=SHOWN, **arguments)
            for sample in opened.samples():
                print(dumps(to_record(sample), "preview"))
        print(shown, file=sys.stderr)
        return
    if store is None:
        raise Refused("--store: expected the store to import into, or --preview, got neither")
    arguments |= {"replace": replace, "license": license, "workers": workers}
    report = _into(store, files, arguments, tokenizer, policy)
    document = report.to_json()
    if proposal is not None:
        document["proposed"] = proposal.to_json(name)
    answer(document, str(report), as_json)


def _into(
    store: Path,
    files: list[Path],
    arguments: dict[str, Any],
    tokenizer: str | None,
    setting: list[str] | None,
) -> ImportReport:
    """Import the files. A refused import leaves no new store."""
    encoder = None
    if tokenizer is not None:
        from agro.models.policy import Policy

        encoder = Policy.load(policy_config(tokenizer, setting)).encoder
    name = "store" if url_of(store) else str(store)
    arguments = {**arguments, "tokenizer": encoder, "refused_file": f"{name}.refused.jsonl"}
    is_new = not exists(store)
    try:
        with Store.open(store) as opened:
            return import_files(opened, files, **arguments)
    except Refused:
        if is_new and store.exists():
            with Store.open(store, read_only=True) as opened:
                is_empty = not opened.counts().samples
            for suffix in ("", "-wal", "-shm") if is_empty else ():
                Path(f"{store}{suffix}").unlink(missing_ok=True)
        raise


def _weights(rewards: list[str]) -> dict[str, float]:
    """Parse COLUMN and COLUMN=WEIGHT to weights by column; the default is 1."""
    weights: dict[str, float] = {}
    for item in rewards:
        column, equals, text = item.partition("=")
        if column in weights:
            raise Refused(f"--reward: {column} is set twice")
        try:
            weights[column] = float(text) if equals else 1.0
        except ValueError:
            raise Refused(f"--reward {item!r}: expected COLUMN, or COLUMN=WEIGHT with a number") from None
    return weights


# Options that say how to read records; with them nothing is guessed.
DECIDED = ("mapping", "format", "reward_map", "choose", "join", "prompts")


def proposed(
    files: Sequence[Path],
    arguments: Mapping[str, Any],
    store: str,
    *,
    guess: bool,
    yes: bool,
    as_json: bool,
) -> Proposal | None:
    """Return the accepted proposal; None if the files are read without one.

    Raises `Refused`, with the proposal, if nobody accepts or rejects it, and if nothing can be proposed.
    """
    decided = [name for name in DECIDED if arguments.get(name)]
    if decided and guess:
        flags = ", ".join("--map" if name == "mapping" else f"--{name.replace('_', '-')}" for name in decided)
        raise Refused(f"--guess: expected no {flags} with it, which say how to read the records")
    rewards, is_lower = arguments["rewards"], arguments["lower_is_better"] or None
    if decided or (rewards and not guess):
        return None
    if guess:
        if len(rewards) > 1 or set(rewards.values()) - {1.0}:
            raise Refused("--guess: expected one --reward COLUMN with it; use --map for several columns")
        proposal = propose(files[0], reward=next(iter(rewards), None), lower_is_better=is_lower)
        if proposal is None:
            print(f"{files[0]}: read as its format says, without --guess", file=sys.stderr)
    else:
        proposal = propose_unknown(files[0], lower_is_better=is_lower)
    if proposal is None:
        return None
    if proposal and (yes or (guess and (rewards or is_lower))):
        print(f"{proposal}\n  {visible(proposal.command(store))}", file=sys.stderr)
        return proposal
    if as_json:
        print(json.dumps(proposal.to_json(store), ensure_ascii=False))
    elif proposal and sys.stdin.isatty() and sys.stdout.isatty():
        return _ask(proposal, store)
    raise proposal.refusal(store)


def _ask(proposal: Proposal, store: str) -> Proposal:
    """Ask the person at the terminal to accept, reverse or change the proposal."""
    while True:
        print(proposal, file=sys.stderr)
        question = "Is the upper one better? y / n (lower is better) / another column / q: "
        if not proposal.is_judged:
            question = "Are these prompts and responses? y / a column that judges them / q: "
        print(question, end="", file=sys.stderr, flush=True)
        typed = (sys.stdin.readline() or "q").strip()
        if typed.lower() in ("y", "yes"):
            return proposal
        if typed.lower() in ("n", "no") and proposal.is_judged:
            return proposal.reversed()
        if typed.lower() in ("n", "no", "q", "quit"):
            raise Refused(f"nothing is imported; as proposed it would be\n  {proposal.command(store)}")
        try:
            proposal = (typed and propose(proposal.path, reward=typed)) or proposal
        except Refused as error:
            print(visible(f"agro: {error}"), file=sys.stderr)


def check(
    path: Annotated[Path, typer.Argument(metavar="LOG-or-STORE")],
    objective: str | None = None,
    model: str | None = None,
    reference: str | None = None,
    policy: list[str] | None = None,
    limit: Annotated[int, typer.Option(min=1)] = 1000,
    held_out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Args:
    path: A store, or a log in a format of `agro formats`.
    objective: The objective to train with. Default: the best for the data.
    model: A model, to measure log π of the responses: ranking (AUC), coverage, weights, β.
    reference: π_ref, such as the model before training, to measure log π/π_ref.
    limit: Maximal number of prompts to measure with the model.
    held_out: A file of prompts to check for overlap.
    """
    if model is None and (reference is not None or policy):
        raise Refused("--reference and --policy need --model, which is missing; add it, or leave them out")
    config = RunConfig.of({"objective": {"name": objective or "agro"}}, "--objective")
    compared = None if reference is None else policy_config(reference, policy)
    if model is not None:
        config = config.model_copy(update={"policy": policy_config(model, policy, config.policy)})
    with opened_log(path) as store:
        # here, so that a missing file is refused at once
        from agro.pages.store import check_store, recommendation_lines

        report = check_store(store, config, path=path, held_out=held_out, as_recommended=objective is None)
        settings = "".join(f" {shlex.quote(f'policy.{item}')}" for item in policy or ())
        commands = [replace(each, command=each.command + settings) for each in report.recommended]
        report = replace(report, recommended=commands)
        if model is not None:
            from agro.models.policy import Policy
            from agro.pages.store.measurements import measure

            subject = Policy.load(config.policy)
            reference_policy = None if compared is None else Policy.load(compared)
            report = replace(report, measured=measure(store, subject, reference_policy, limit))
    recommended = "\n".join(recommendation_lines(report.recommended))
    answer(report.to_json(), f"{report}\n\n{recommended}", as_json)
    problems = [str(verdict) for verdict in report.verdicts if verdict.level == "problem"]
    if problems:
        end(2, "\n".join(f"agro: {problem}" for problem in problems))
