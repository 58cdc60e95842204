"""`agro store`: the owner of a store, for processes on other hosts; several stores from one, and one from
several."""

from __future__ import annotations

import os
import secrets
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from agro.errors import Refused, remember_secret

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Action(Enum):
    serve = "serve"
    split = "split"
    merge = "merge"


def store(
    action: Annotated[
        Action,
        typer.Argument(
            help="serve: answer the processes that share the store; split: share its prompts out to several; "
            "merge: make one of several."
        ),
    ],
    files: Annotated[
        list[Path],
        typer.Argument(help="The store; serve makes it where it is missing. merge: all, in order."),
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", help="The new store; of split several times, in order."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Of serve: the address to listen at; 127.0.0.1 where it isn't given, 0.0.0.0: all."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of serve: a free one where it isn't given, or 0.")
    ] = None,
) -> None:
    expected = {Action.serve: (1, 0), Action.split: (1, 2), Action.merge: (2, 1)}[action]
    out = out or []
    is_many = {1: "one store", 2: "two stores or more"}
    if (min(len(files), 2), min(len(out), 2)) != expected:
        news = {0: "no --out", 1: "one --out", 2: "--out two times or more"}[expected[1]]
        raise Refused(
            f"agro store {action.value}: expected {is_many[expected[0]]} and {news}, got {len(files)} and "
            f"{len(out)}"
        )
    if action is Action.serve:
        _serve(files[0], host or LOOPBACK[0], port or 0)
        return
    if (host, port) != (None, None):
        raise Refused(f"agro store {action.value}: --host and --port are of serve; leave them out")
    from agro.store.location import Shards
    from agro.store.sharding.files import merge, split

    if action is Action.split:
        split(files[0], Shards(tuple(out)))
    else:
        merge(Shards(tuple(files)), out[0])
    from agro.store import Store

    for path in out:
        with Store.open(path, read_only=True) as made:
            counts = made.counts()
            print(f"{path}: {counts.samples} samples in {counts.groups} groups")


def _serve(file: Path, host: str, port: int) -> None:
    from agro.store.serving.app import serve
    from agro.store.serving.http import TOKEN

    token = os.environ.get(TOKEN)
    if not token:
        token = secrets.token_urlsafe(24)
        print(f"export {TOKEN}={token}", flush=True)
        remember_secret(token)
    if host not in LOOPBACK:
        text = (
            f"note: --host {host}: what travels isn't encrypted; use a private network, or a proxy with TLS"
        )
        print(text, file=sys.stderr)
    serve(file, host, port, token, lambda line: print(line, flush=True))
