"""`agro store`: the owner of a store, for processes on other hosts, and one store of several old ones."""

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
    join = "join"


def store(
    action: Annotated[
        Action,
        typer.Argument(
            help="serve: answer the processes that share the store; join: make one of several that earlier "
            "versions had as one."
        ),
    ],
    files: Annotated[
        list[Path],
        typer.Argument(help="The store; serve makes it where it is missing. join: all, in order, and OUT."),
    ],
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
    if action is Action.serve:
        if len(files) > 1:
            raise Refused(f"agro store serve: expected one store, got {len(files)}")
        _serve(files[0], host or LOOPBACK[0], port or 0)
        return
    if len(files) < 3 or (host, port) != (None, None):
        raise Refused(
            "agro store join: expected two stores or more and the new one, A.db B.db OUT.db, and neither "
            f"--host nor --port, got {' '.join(map(str, files))}"
        )
    from agro.store import Store
    from agro.store.join import join

    *old, out = files
    join(old, out)
    with Store.open(out, read_only=True) as made:
        counts = made.counts()
        print(f"{out}: {counts.samples} samples in {counts.groups} groups")


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
