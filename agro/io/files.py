"""Files and folders that are written completely or not at all, and why one can't be written."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from agro.errors import Unwritable

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
    """Raise `Unwritable` where `path`, or a file in it, can't be written; other errors pass through."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REASONS:
            raise
        raise Unwritable(f"{path}: can't be written: {_REASONS[error.errno]}") from error
    except SafetensorError as error:  # from Rust: the number is in its text alone
        code = re.search(r"os error (\d+)", str(error))
        if code is None or int(code[1]) not in _REASONS:
            raise
        raise Unwritable(f"{path}: can't be written: {_REASONS[int(code[1])]}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once all of it is on the disk."""
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
    """A temporary folder to write into, which takes the place of `folder` once all of it is on the disk."""
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
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def new_run_folder() -> Path:
    """runs/ and the time, with -2, -3, … where a run of the same second has that name already."""
    base = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder
