"""A cable between two network namespaces."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

HOSTS = {"agro-a": "10.77.0.1", "agro-b": "10.77.0.2"}  # network namespaces, joined by a pair of interfaces


def has_namespaces() -> bool:
    """Whether this process may make network namespaces."""
    made = _ip("netns", "add", "agro-try", check=False)
    if made:
        _ip("netns", "del", "agro-try")
    return made


@contextmanager
def two_hosts() -> Iterator[None]:
    """Two network namespaces with a cable."""
    with _removed():
        for name in HOSTS:
            _ip("netns", "add", name)
        _ip("link", "add", "agro-va", "netns", "agro-a", "type", "veth", "peer", "agro-vb", "netns", "agro-b")
        for name, address in HOSTS.items():
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", f"agro-v{name[-1]}")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", f"agro-v{name[-1]}", "up")
        yield


def on_host(name: str, *command: str) -> list[str]:
    """A command that runs another one there."""
    return ["ip", "netns", "exec", name, *command]


def plug(is_in: bool) -> None:
    """Pull the cable between the two hosts, or plug it in."""
    _ip("-n", "agro-b", "link", "set", "agro-vb", "up" if is_in else "down")


@contextmanager
def _removed() -> Iterator[None]:
    for name in HOSTS:
        _ip("netns", "del", name, check=False)
    try:
        yield
    finally:
        for name in HOSTS:
            _ip("netns", "del", name, check=False)


def _ip(*arguments: str, check: bool = True) -> bool:
    """Whether the command did it."""
    if not any(os.access(f"{folder}/ip", os.X_OK) for folder in os.get_exec_path()):
        return False
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise AssertionError(f"ip {' '.join(arguments)}: {done.stderr}")
    return done.returncode == 0
