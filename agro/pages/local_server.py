"""HTTP servers on this machine: pages for a person, and the door for programs."""

from __future__ import annotations

import ipaddress
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from agro.errors import Refused

HOST = "127.0.0.1"
ANY = ("0.0.0.0", "::")


def is_name_of(host: str, name: str) -> bool:
    """Return whether `name` is a valid Host header for a server that listens on `host`. Any other name may be
    an attacker's page that resolves to this address (DNS rebinding)."""
    names = {host, HOST, "localhost"}
    if host in ANY:
        names.add(socket.gethostname())
        with suppress(ValueError):
            names.add(str(ipaddress.ip_address(name)))
    return name in names


def listening(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises `Refused` for an unavailable address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        options = f"--port {port}" if host == HOST else f"--host {host} --port {port}"
        raise Refused(f"{options}: {error}; use another one, or leave it out for a free one") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio leaves existing sockets alone
    return listener


def server_of(app: Starlette) -> uvicorn.Server:
    options: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
    config = uvicorn.Config(
        app, lifespan="off", timeout_keep_alive=75, timeout_graceful_shutdown=2, **options
    )
    return uvicorn.Server(config)


def address_of(host: str, listener: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host  # IPv6
    return f"http://{name}:{listener.getsockname()[1]}"


def serve(app: Starlette, listener: socket.socket, text: str) -> None:
    """Serve until SIGINT or SIGTERM, which both end it cleanly. `text` is printed first: connections wait."""
    with suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(text, flush=True)
        server_of(app).run(sockets=[listener])


@contextmanager
def behind_a_port(app: Starlette) -> Iterator[str]:
    """Serve an application in a thread, and yield its URL."""
    server = server_of(app)
    with closing(listening(HOST, 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield address_of(HOST, listener)
        finally:
            server.should_exit = True
            thread.join()


class LocalServer:
    """Serves pages for a person, until Ctrl-C."""

    def __init__(self, app: Starlette, port: int, host: str = HOST) -> None:
        """`port` 0: any free one. Raises `Refused` for an unavailable address."""
        self.app, self.listener = app, listening(host, port)
        self.address = address_of(socket.gethostname() if host in ANY else host, self.listener) + "/"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def serve_until_interrupted(self, text: str) -> None:
        """`text`: printed first, with the address."""
        serve(self.app, self.listener, text)


def is_for_us(request: Request, host: str) -> bool:
    """Return whether the request's Host header names a server that listens on `host`."""
    header = request.headers.get("host", "")
    name = header if header.endswith("]") else header.rsplit(":", 1)[0]
    return is_name_of(host, name.strip("[]"))


def page_response(text: str, headers: dict[str, str]) -> Response:
    return HTMLResponse(text, headers={"Cache-Control": "no-store", **headers})


def refusal(status: int, reason: str) -> Response:
    return Response(reason, status, media_type="text/plain")
