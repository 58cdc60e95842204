"""Serving a store until the process is told to end: `agro store serve`."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import uvicorn

from agro.errors import Refused
from agro.store.serving.app import Application
from agro.store.serving.owner import Owner
from agro.store.shared import beside

BACKLOG = 512  # connections that wait to be accepted
END_SECONDS = 5  # for requests that are at work when the server ends
ANY = ("0.0.0.0", "::")


def serve(path: Path, host: str, port: int, token: str, say: Callable[[str], None]) -> None:
    """Serve the store at `path`, which is made where there is none, until SIGINT or SIGTERM.

    Raises `Refused` where the store or the port can't be had.

    Args:
        port: 0 takes a free one.
        say: is given a line with the URL, once the owner answers there.
    """
    with listening(host, port) as listener, closing(Owner(path)) as owner:
        config = uvicorn.Config(
            Application(owner, token, beside(path)).app,
            log_level="warning",
            access_log=False,
            server_header=False,  # which clients don't read
            date_header=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=END_SECONDS,
        )
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end it well
        say(f"serving {url_to(host, listener.getsockname()[1])}")
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def listening(host: str, port: int) -> socket.socket:
    """A socket that accepts connections. Raises `Refused` for an address that can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # asyncio doesn't set it for sockets that are given to it: an answer of two packets would wait 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise Refused(
            f"--host {host} --port {port}: can't listen there: {error}. What to do: give another port, or "
            "one of this host's addresses"
        ) from None


def url_to(host: str, port: int) -> str:
    """The URL of a server that listens there, for other hosts where it listens to all."""
    name = socket.gethostname() if host in ANY else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
