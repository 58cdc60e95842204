"""Files and folders that are written completely or not at all, with the reason if one can't be written.

Also SHA-256 of files, and of the code that a user's name stands for: file.py:NAME, module:NAME, or an object.
It includes the modules that the code imports, directly or not, from its own folder, the working directory and
other folders of `sys.path`; but not installed packages, nor what code opens or imports by a computed name.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import importlib.util
import inspect
import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from agro.errors import Refused, Unwritable

PACKAGES = ("site-packages", "dist-packages")
_FULL = "the disk is full. What to do: make room and try again"
_READ_ONLY = "it can only be read. What to do: make its folder writable and try again, or give another path"
_REASONS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL.replace("the disk is full", "the disk quota is used up"),
    errno.EFBIG: "a file may not grow that large here. What to do: raise the limit (ulimit -f) and try again",
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _READ_ONLY,
    errno.EPERM: _READ_ONLY,
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `Unwritable` if `path`, or a file in it, can't be written; other errors pass through."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REASONS:
            raise
        raise Unwritable(f"{path}: can't be written: {_REASONS[error.errno]}") from error
    except SafetensorError as error:  # from Rust: only its text has the number
        code = re.search(r"os error (\d+)", str(error))
        if code is None or int(code[1]) not in _REASONS:
            raise
        raise Unwritable(f"{path}: can't be written: {_REASONS[int(code[1])]}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` once all of it is on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Write a file, completely or not at all."""
    with writing(path), replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to write into, which replaces `folder` once all of it is on disk."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    with writing(folder):
        remove(temporary)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for file in temporary.iterdir():
                sync(file)
            sync(temporary)
            remove(folder)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(folder.parent)


def remove(path: Path) -> None:
    """Remove a file or folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def new_run_folder() -> Path:
    """runs/ and the time, with -2, -3, … if a run already has that name."""
    base = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    alternatives = (base.with_name(f"{base.name}-{number}") for number in count(2))
    return next(folder for folder in chain([base], alternatives) if not folder.exists())


def digest_of_object(function: Callable[..., Any]) -> str | None:
    """SHA-256 of the source text of a function or of an object's class; None if it is unknown."""
    code = inspect.unwrap(function) if inspect.isroutine(function) else type(function)
    try:
        return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()
    except (OSError, TypeError):
        return None


def digest_of_module(name: str) -> str | None:
    """SHA-256 of file.py:NAME, module:NAME or verifiers:ENV_ID; None without a file, as for built-in
    names."""
    location, _, attribute = name.rpartition(":")
    if location == "verifiers":
        location = attribute.rpartition("/")[2].replace("-", "_")
    importlib.invalidate_caches()
    folders = _folders_of_code()
    path = Path(location).expanduser()
    if location.endswith(".py"):
        folders.insert(0, str(path.resolve().parent))
        pending = [("", path)] if path.is_file() else []
    else:
        pending = list(_find(location, folders))
        if location and not pending:  # outside the folders of the user's own code
            with suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(location)
                if spec is not None and spec.has_location and spec.origin is not None:
                    pending = [(location, Path(spec.origin))]
    if not pending:
        return None
    digests: dict[str, str] = {}
    while pending:
        module, path = pending.pop()
        if module in digests:
            continue
        digests[module] = digest(path)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for imported in _imports(path, package):
            if imported.partition(".")[0] != "agro":  # its version is in config.json
                pending += _find(imported, folders)
    total = hashlib.sha256()
    for module, content in sorted(digests.items()):
        total.update(f"{module} {content}\n".encode())
    return total.hexdigest()


def _imports(path: Path, package: str) -> Iterator[str]:
    """The modules that a file imports, and the names from them, which may be modules too."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # not Python's own source text
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # beyond the top-level package
                start = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield from (f"{start}.{alias.name}" for alias in node.names)


def _find(module: str, folders: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """The files of a module and of the packages that contain it, without importing them."""
    locations: Sequence[str] | None = folders
    name = ""
    for part in module.split("."):
        spec = PathFinder.find_spec(part, locations) if locations else None
        if spec is None:
            return
        name = f"{name}.{part}".removeprefix(".")
        if spec.has_location and spec.origin is not None:
            yield name, Path(spec.origin)
        locations = spec.submodule_search_locations and list(spec.submodule_search_locations)


def _folders_of_code() -> list[str]:
    """The folders that modules are imported from, without those of installed packages."""
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = []
    for folder in dict.fromkeys([os.getcwd(), *sys.path]):
        path = Path(folder)
        is_installed = any(path.is_relative_to(i) for i in installed) or path.name in PACKAGES
        if folder and not is_installed:
            folders.append(folder)
    return folders


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def is_complete_folder(name: str) -> bool:
    """Whether it is a model's folder; False for a hub name. Raises `Refused` for any other folder."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        # A hub name has at most one slash.
        is_path = (
            folder.exists() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
        )
        if is_path:
            checkpoints = ", ".join(sorted(path.name for path in folder.parent.glob("step-*")))
            there = f"; there are {checkpoints}" if checkpoints else ""  # the run retains the latest ones
            raise Refused(f"{name}: expected the folder of a model, but there is no such folder{there}")
        return False
    if not (folder / "config.json").is_file():
        raise Refused(f"{name}: expected a model in transformers format, but the folder has no config.json")
    if not any((folder / f).is_file() for f in _TOKENIZER_FILES):
        raise Refused(
            f"{name}: the folder has no tokenizer (expected {_TOKENIZER_FILES[0]}); "
            "save the model's tokenizer there: tokenizer.save_pretrained(folder)"
        )
    return True
