"""Several stores that change together: new files take the place of all of them, or of none.

The new files are complete before anything is replaced. Then a note beside each store says what takes whose
place. The note of the first store is written last: from then on the replacement counts, and whoever opens one
of the stores completes it, where the process that began it was killed. Without that note all stores are as
they were.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkdtemp

from agro.errors import Refused
from agro.io.files import sync, writing

NOTE = ".replacing"  # at the end of a store's name
UNFINISHED = ".unfinished"  # at the end of the name of a folder with a new file


@contextmanager
def beside(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """A file for what takes the place of each store, on the same disk. They are removed at the end, unless a
    replacement that counts was interrupted."""
    new: list[Path] = []
    try:
        for path in paths:
            with writing(path):
                new.append(Path(mkdtemp(UNFINISHED, f".{path.name}.", path.parent)) / path.name)
        yield new
    finally:
        if not is_begun(paths[0]):
            _clean_up(paths, new)


def remove_unfinished(path: Path) -> None:
    """Remove what processes that were killed left beside a store, of which none is at work."""
    for folder in path.parent.glob(f".{glob.escape(path.name)}.*{UNFINISHED}"):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def replaced(paths: Sequence[Path], new: Sequence[Path]) -> Iterator[None]:
    """Let new files take the place of all stores at the end of the block, even if this process is killed in
    it. Whoever opens one of them meanwhile waits for the end."""
    for file in new:
        sync(file)
        sync(file.parent)
    content = json.dumps([[str(path.absolute()), str(file.absolute())] for path, file in zip(paths, new)])
    with ExitStack() as notes:
        for path, file in reversed(list(zip(paths, new, strict=True))):  # the first one's last
            unseen = file.with_name("note")
            note = notes.enter_context(unseen.open("w"))
            note.write(content)
            note.flush()
            fcntl.flock(note, fcntl.LOCK_EX)
            sync(unseen)
            unseen.replace(_note_of(path))
            sync(path.parent)
        yield
        _replace(paths, new)


def is_begun(path: Path) -> bool:
    """Whether a replacement of this store, and of others, has begun."""
    return os.path.exists(_note_of(path))  # False for a name that is too long


def complete(path: Path) -> None:
    """Complete what has begun, unless the process that began it was killed before it counted.

    Raises `Refused` where the first of the stores isn't here, whose note decides.
    """
    try:
        content = _note_of(path).read_text()
        paths, new = ([Path(name) for name in names] for names in zip(*json.loads(content), strict=True))
        if path.absolute() not in paths or not all(map(_is_for, new, paths)):
            raise Refused(f"{_note_of(path)}: expected a note of agro, got {content!r:.200}; remove it")
        if not paths[0].parent.is_dir():
            raise Refused(
                f"{path}: it and others were about to be replaced by new ones when that was cut off, and "
                f"{paths[0]}, which says whether it counts, isn't here. What to do: open all of them where "
                "they were written, such as by agro check, before one is used elsewhere"
            )
        first = _note_of(paths[0]).open()
    except FileNotFoundError:  # it never counted, or was completed meanwhile
        return
    with writing(path), first:
        fcntl.flock(first, fcntl.LOCK_EX)
        if is_begun(paths[0]) and _note_of(paths[0]).read_text() == content:
            _replace(paths, new)


def _is_for(file: Path, path: Path) -> bool:
    """Whether `file` is where `beside` makes what takes the place of `path`."""
    folder = file.parent
    is_ours = folder.name.startswith(f".{path.name}.") and folder.name.endswith(UNFINISHED)
    return is_ours and folder.parent == path.parent and file.name == path.name


def _replace(paths: Sequence[Path], new: Sequence[Path]) -> None:
    for path, file in zip(paths, new, strict=True):
        if file.exists():
            # SQLite would take a log that was left for one of the new store.
            for ending in ("-wal", "-shm"):
                path.with_name(f"{path.name}{ending}").unlink(missing_ok=True)
            file.replace(path)
            sync(path.parent)
    _clean_up(paths, new)


def _clean_up(paths: Sequence[Path], new: Sequence[Path]) -> None:
    """Remove the notes, the first one last, and the folders of new files."""
    for path in reversed(paths):
        _note_of(path).unlink(missing_ok=True)
    for file in new:
        shutil.rmtree(file.parent, ignore_errors=True)


def _note_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{NOTE}")
