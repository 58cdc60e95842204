"""`agro store`: a store from a file to a server or back, and one store of several old ones."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from agro.errors import Refused
from agro.store import Store


class Action(Enum):
    copy = "copy"
    join = "join"


def store(
    action: Annotated[
        Action,
        typer.Argument(
            help="copy: a store to a new one, a file or postgresql://…; join: make one of several that "
            "earlier versions had as one."
        ),
    ],
    stores: Annotated[list[Path], typer.Argument(help="copy: OLD and NEW. join: all, in order, and OUT.")],
) -> None:
    least, expected = (2, "A B") if action is Action.copy else (3, "A.db B.db OUT.db")
    if len(stores) < least or (action is Action.copy and len(stores) > least):
        given = " ".join(map(str, stores))
        raise Refused(f"agro store {action.value}: expected {expected}, got {given}")
    from agro.store.copying import copy, join

    *old, out = stores
    if action is Action.copy:
        copy(old[0], out)
    else:
        join(old, out)
    with Store.open(out, read_only=True) as made:
        counts = made.counts()
        print(f"{out}: {counts.samples} samples in {counts.groups} groups")
