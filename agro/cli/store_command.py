"""`agro store`: the owner of a store, for processes on other hosts."""

from __future__ import annotations

import os
import secrets
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Action(Enum):
    serve = "serve"


def store(
    action: Annotated[Action, typer.Argument(help="serve: answer the processes that share the store.")],
    file: Annotated[Path, typer.Argument(help="The store, which is made where there is none.")],
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0: all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
) -> None:
    from agro.store.serving.http import TOKEN
    from agro.store.serving.server import serve

    token = os.environ.get(TOKEN)
    if not token:
        token = secrets.token_urlsafe(24)
        print(f"export {TOKEN}={token}", flush=True)
    if host not in LOOPBACK:
        text = (
            f"note: --host {host}: what travels isn't encrypted; use a private network, or a proxy with TLS"
        )
        print(text, file=sys.stderr)
    serve(file, host, port, token, lambda line: print(line, flush=True))
