"""Which processes there are, and waiting for what they do."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def _stat(pid: int) -> list[str]:
    """What Linux says of a process behind its name: its state and its parent first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_running(pid: int) -> bool:
    """Whether a process is there, and isn't only waited for."""
    try:
        os.kill(pid, 0)
        return sys.platform != "linux" or _stat(pid)[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):  # it may end between the two
        return False


def children(pid: int) -> set[int]:
    """The processes that one has begun and that aren't gone yet."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone
            if int(_stat(int(folder.name))[1]) == pid:
                found.add(int(folder.name))
    return found


def until(holds: Callable[[], object], seconds: float = 300.0) -> float:
    """Waits; returns the seconds until something holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.02)
    return time.monotonic() - began
