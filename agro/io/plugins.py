"""Parts that come with an installed package or with the user.

An installed package registers a part as an entry point, and a run names it like a part of agro::

    [project.entry-points."agro.rewards"]
    politeness = "my_package.rewards:politeness"

Everywhere such a name is taken, so are `module:NAME` and `file.py:NAME`. The kinds are those of `KINDS`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from agro.errors import Refused
from agro.io.worker import find

Kind = Literal["engines", "environments", "formats", "objectives", "recipes", "rewards", "sources"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@cache
def installed(kind: Kind, builtin: tuple[str, ...] = ()) -> dict[str, str]:
    """`module:NAME` of all installed parts of a kind, by name.

    Raises `Refused` where two packages register different parts under one name, or one has a `builtin` name.
    """
    from importlib.metadata import entry_points  # a tenth of a second

    parts: dict[str, str] = {}
    for point in entry_points(group=f"agro.{kind}"):
        if point.name in builtin:
            raise Refused(
                f"{kind}: {point.name} is a name of agro's own, which an installed package gives to "
                f"{point.value}. What to do: uninstall it, or register it under another name"
            )
        if parts.setdefault(point.name, point.value) != point.value:
            raise Refused(
                f"two installed packages have {kind} named {point.name}: {parts[point.name]} and "
                f"{point.value}. What to do: uninstall one of them, or give module:NAME"
            )
    return parts


def reference(kind: Kind, name: str) -> str:
    """`module:NAME` of the installed part of this name; another name as it is."""
    return name if is_reference(name) else installed(kind).get(name, name)


def is_reference(name: str) -> bool:
    """Whether `name` is module:NAME or file.py:NAME."""
    module, colon, attribute = name.rpartition(":")
    return bool(colon and module and attribute)


@cache
def load(kind: Kind, name: str, setting: str) -> Any:
    """The part that `name` stands for: an installed one, module:NAME or file.py:NAME. A file is run once.

    Raises `Refused`, whose message begins with `setting`, where there is none.
    """
    target, problem = find(reference(kind, name))
    if problem:
        raise Refused(f"{setting}: {problem}")
    return target


def absolute(kind: Kind, name: str, setting: str) -> str:
    """Where a part is: module:NAME, or file.py:NAME with an absolute path, which other processes find too.

    Raises `Refused` where there is no such file or installed part.
    """
    location = name if is_reference(name) else installed(kind).get(name)
    if location is None:
        raise Refused(f"{setting}: expected module:NAME, file.py:NAME or an installed one, got {name!r}")
    module, _, attribute = location.rpartition(":")
    if not module.endswith(".py"):
        return location
    path = Path(module).expanduser().resolve()
    if not path.is_file():
        from agro.io.nearest import nearest

        near = nearest(path.name, [p.name for p in path.parent.glob("*.py")])
        raise Refused(f"{setting}: there is no file {path}" + (f"; did you mean {near}?" if near else ""))
    return f"{path}:{attribute}"
