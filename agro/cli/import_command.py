"""`agro import`: logs into a store."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import Json, PolicySetting, Workers, pairs, policy_config
from agro.errors import Refused

SHOWN = 3  # records of each file in a preview

if TYPE_CHECKING:
    from agro.logs.import_report import ImportReport
    from agro.models.encoding import Encoder
    from agro.store import Store


def import_(
    files: Annotated[list[Path], typer.Argument(help="Files and folders of `agro formats`.")],
    store: Annotated[
        Path | None, typer.Option("--store", help="The store; created where it is missing.")
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="The files' format, where it isn't recognized.")
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", help="FIELD=COLUMN: a name or JMESPath; the first * expands keys or items."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Prompts of rows without one, joined by their id.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="Count what this model can't be trained on. Its tokenizer made tokens without a mask.",
        ),
    ] = None,
    setting: PolicySetting = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option("--reward", help="COLUMN or COLUMN=WEIGHT: the reward is the sum of these."),
    ] = None,
    reward_map: Annotated[
        list[str] | None,
        typer.Option("--reward-map", help="WORD=NUMBER,…: rewards that are words, such as up=1,down=0."),
    ] = None,
    lower_is_better: Annotated[
        bool,
        typer.Option(
            "--lower-is-better", help="Store the reward r as -r; of a pair the named one is the worse."
        ),
    ] = False,
    choose: Annotated[
        list[str] | None,
        typer.Option("--choose", help="KIND=NAME, where there are several of a kind, such as filter=strict"),
    ] = None,
    join: Annotated[
        Path | None, typer.Option("--join", help="The second file of a format that is split over two.")
    ] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Print the first records as they would be stored; store none.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the files anew, in place of an earlier import of them.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Store nothing, and exit 2, where any record is refused.")
    ] = False,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", help="A field that isn't stored, such as meta.user; may be repeated."),
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Store no keys, tokens, private keys and e-mail addresses.")
    ] = False,
    redact_pattern: Annotated[
        list[str] | None,
        typer.Option("--redact-pattern", help="Nor what matches this regular expression; may be repeated."),
    ] = None,
    group_by: Annotated[
        str | None,
        typer.Option("--group-by", help="Normalize rewards over the records with the same value of a field."),
    ] = None,
    center_by: Annotated[
        str | None,
        typer.Option(
            "--center-by",
            metavar="FIELD",
            help="Subtract from rewards what the user, task or grader in this field gives to others.",
        ),
    ] = None,
    license: Annotated[
        str | None, typer.Option("--license", help="Of the files: kept with them, and in model cards.")
    ] = None,
    workers: Workers = 1,
    guess: Annotated[
        bool,
        typer.Option(
            "--guess",
            help="Of an unknown file: propose how to read it, show which responses would be the best and the "
            "worst, and ask; without a terminal --yes, --reward COLUMN or --lower-is-better decide.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Take what --guess proposes, unseen.")] = False,
    as_json: Json = False,
) -> None:
    from agro.cli.guessing import default_store, proposed
    from agro.logs.labels import parse_words
    from agro.logs.mapping import parse_map

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
        "group_by": group_by,
        "center_by": center_by,
    }
    name = str(store or default_store(files[0]))
    proposal = proposed(files, arguments, name, guess=guess or yes, yes=yes, as_json=as_json)
    if proposal is not None:
        arguments |= {"rewards": {}, **proposal.options(), "drop": [*(drop or ()), *proposal.drop]}
        store = Path(name)
    if preview:
        _preview(files, arguments)
        return
    if store is None:
        raise Refused("--store: expected the store to import into, or --preview, got neither")
    arguments |= {"replace": replace, "license": license, "workers": workers}
    report, encoding = _into(store, files, arguments, tokenizer, setting)
    if as_json:
        more: dict[str, Any] = {} if encoding is None else {"encoding": encoding}
        more |= {} if proposal is None else {"proposed": proposal.to_json(name)}
        print(json.dumps({**report.to_json(), **more}, ensure_ascii=False))
        return

    print(report)
    if encoding is not None:
        print("encoding: " + ", ".join(f"{k} {v}" for k, v in encoding.items()))


def _into(
    store: Path,
    files: list[Path],
    arguments: dict[str, Any],
    tokenizer: str | None,
    setting: list[str] | None,
) -> tuple[ImportReport, dict[str, int] | None]:
    """What came of the files, and with a tokenizer of the encoding. A refused import leaves no new store."""
    from agro.logs.importing import import_files
    from agro.store import Store
    from agro.store.location import exists, url_of

    encoder = None
    if tokenizer is not None:
        from agro.models.policy import Policy

        encoder = Policy.load(policy_config(tokenizer, setting)).encoder
    name = "store" if url_of(store) else str(store)
    arguments = {**arguments, "tokenizer": encoder, "refused_file": f"{name}.refused.jsonl"}
    is_new = not exists(store)
    try:
        with Store.open(store) as opened:
            report = import_files(opened, files, **arguments)
            return report, None if encoder is None else _encoding(opened, encoder)
    except Refused:
        if is_new and not _has_samples(store):
            for suffix in ("", "-wal", "-shm"):
                Path(f"{store}{suffix}").unlink(missing_ok=True)
        raise


def _weights(rewards: list[str]) -> dict[str, float]:
    """Weights by column, of COLUMN and COLUMN=WEIGHT; 1 without."""
    weights: dict[str, float] = {}
    for item in rewards:
        column, equals, text = item.partition("=")
        if column in weights:
            raise Refused(f"--reward: {column} is given twice")
        try:
            weights[column] = float(text) if equals else 1.0
        except ValueError:
            raise Refused(f"--reward {item!r}: expected COLUMN, or COLUMN=WEIGHT with a number") from None
    return weights


def _preview(files: list[Path], arguments: dict[str, Any]) -> None:
    """The first records of each file as they would be stored, one a line, and what is refused."""
    import tempfile

    from agro.io.strictjson import dumps
    from agro.logs.importing import import_files
    from agro.store import Store
    from agro.store.export import to_record

    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db") as store:
        report = import_files(store, files, limit=SHOWN, **arguments)
        for sample in store.samples():
            print(dumps(to_record(sample), "preview"))
    print(report, file=sys.stderr)


def _has_samples(path: Path) -> bool:
    from agro.store import Store

    if not path.exists():
        return False
    with Store.open(path, read_only=True) as store:
        return store.counts().samples > 0


def _encoding(store: Store, encoder: Encoder) -> dict[str, int]:
    """How many samples a policy with this encoder could train on, and why not the others."""
    from agro.models.encoding import InvalidSample

    counts = Counter[str]()
    for sample in store.samples():
        try:
            encoder.rows(sample)
            counts["valid"] += 1
        except InvalidSample as error:
            counts[error.reason] += 1
    return dict(counts)
