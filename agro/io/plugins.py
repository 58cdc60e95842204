"""Parts that an installed package or the user provides, and modules that are imported on first use.

An installed package registers a part as an entry point, and a run refers to it like a part of agro::

    [project.entry-points."agro.rewards"]
    politeness = "my_package.rewards:politeness"

Wherever such a name is accepted, so are `module:NAME` and `file.py:NAME`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

from agro.errors import Refused
from agro.io.peers import did_you_mean
from agro.io.worker import explain, file_of, find

Kind = Literal["engines", "environments", "formats", "objectives", "recipes", "rewards", "sources"]


@cache
def installed(kind: Kind, builtin: tuple[str, ...] = ()) -> dict[str, str]:
    """`module:NAME` of all installed parts of a kind, by name.

    Raises `Refused` if two packages register different parts under one name, or one uses a `builtin` name.
    """
    from importlib.metadata import entry_points  # takes a tenth of a second

    parts: dict[str, str] = {}
    for point in entry_points(group=f"agro.{kind}"):
        if point.name in builtin:
            raise Refused(
                f"{kind}: {point.name} is agro's own name, but an installed package registers it for "
                f"{point.value}. What to do: uninstall it, or register it under another name"
            )
        if parts.setdefault(point.name, point.value) != point.value:
            raise Refused(
                f"two installed packages have {kind} named {point.name}: {parts[point.name]} and "
                f"{point.value}. What to do: uninstall one of them, or give module:NAME"
            )
    return parts


def is_reference(name: str) -> bool:
    module, colon, attribute = name.rpartition(":")
    return bool(colon and module and attribute)


def unknown(kind: Kind, name: str, builtin: Sequence[str] = ()) -> str:
    """The problem with a `name` that is neither a `builtin`, nor installed, nor a reference; else ""."""
    if name in builtin or is_reference(name) or name in (packaged := installed(kind, tuple(builtin))):
        return ""
    names = [*builtin, *packaged]
    hint = did_you_mean(name, names)
    expected = ", ".join([*names, "module:NAME or file.py:NAME"])
    return f"expected {expected}, got {name!r}{hint and f'; {hint}'}"


def load(kind: Kind, name: str, setting: str) -> Any:
    """The part that `name` stands for: an installed one, module:NAME or file.py:NAME.

    A file is run once, and again if it has changed. Raises `Refused`, with a message that begins with
    `setting`, if there is no such part.
    """
    location = absolute(kind, name, setting)
    module, _, attribute = location.rpartition(":")
    try:
        names = _run(module, Path(module).stat().st_mtime_ns if module.endswith(".py") else 0)
        return attrgetter(attribute)(SimpleNamespace(**names))
    except AttributeError:
        problem = find(location)[1]
    except Refused as error:
        problem = str(error)
    raise Refused(f"{setting}: {problem}")


@cache
def _run(module: str, changed: int) -> dict[str, Any]:
    """The names in a module or file, cached unless it fails. `changed`: the file's modification time."""
    names, problem = find(f"{module}:__dict__")
    if problem:
        raise Refused(problem)
    return dict(names)


def absolute(kind: Kind, name: str, setting: str) -> str:
    """The location of a part, valid in other processes too: module:NAME, or file.py:NAME with absolute path.

    Raises `Refused` if there is no such file or installed part.
    """
    if problem := unknown(kind, name):
        raise Refused(f"{setting}: {problem}")
    location = name if is_reference(name) else installed(kind)[name]
    module, _, attribute = location.rpartition(":")
    if not module.endswith(".py"):
        return location
    path = Path(module).expanduser().resolve()
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")])
        raise Refused(f"{setting}: there is no file {path}{near and f'; {near}'}")
    return f"{path}:{attribute}"


@contextmanager
def errors_of(part: Callable[..., Any], begin: str) -> Iterator[None]:
    """Turn a user function's or class's exceptions into `Refused`, with their line, after the text `begin`.

    An exception in agro's own code is a bug, whose traceback is needed.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, Refused) or is_agros(part):
            raise
        file = file_of(vars(part).get("__init__", part) if inspect.isclass(part) else part)
        raise Refused(f"{begin}: {explain(error, file)}") from error


def is_agros(part: Any) -> bool:
    """Whether a function or class belongs to agro, or to a package `agro_…` installed together with it."""
    package = str(getattr(part, "__module__", "")).partition(".")[0]
    if not package.startswith("agro_"):
        return package == "agro"
    from importlib.metadata import packages_distributions  # takes half a second, only for errors

    installed = packages_distributions()
    return installed.get(package) == installed.get("agro")


def check_names(setting: str, names: Any, valid: Collection[str], kind: type[Any] = frozenset) -> None:
    """Raise `Refused` unless `names` is a set, or a `kind`, of `valid` names."""
    if not isinstance(names, (kind, set)):
        raise Refused(f"{setting}: expected a {kind.__name__} of names, got {names!r:.80}")
    for name in names:
        if name not in valid:
            hint = did_you_mean(str(name), valid) or f"there are {', '.join(valid)}"
            raise Refused(f"{setting}: unknown name {name!r}; {hint}")


class DeferredModule(ModuleType):
    """Stands for a module until an attribute is first used, and then becomes it.

    torch takes two seconds to import. Most commands import modules that refer to it, but never use it.
    """

    _spec: ModuleSpec

    def __getattr__(self, name: str) -> Any:
        loader = self._spec.loader
        assert loader is not None
        object.__setattr__(self, "__class__", ModuleType)
        self.__dict__["__path__"] = self._spec.submodule_search_locations
        loader.exec_module(self)
        return getattr(self, name)


def defer(name: str) -> None:
    """Defer the cost of `import name` until the module is used."""
    spec = PathFinder.find_spec(name)
    if spec is None or name in sys.modules:
        return
    module = DeferredModule(name)
    module.__dict__.update(_spec=spec, __spec__=spec, __loader__=spec.loader, __file__=spec.origin)
    sys.modules[name] = module
