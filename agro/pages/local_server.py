"""Servers at an address of this machine: of pages for a person, and of the door for programs."""

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
    """Whether a request may call a server that listens at `host` so: another name is somebody else's page,
    whose name was made to lead here."""
    names = {host, HOST, "localhost"}
    if host in ANY:
        names.add(socket.gethostname())
        with suppress(ValueError):
            names.add(str(ipaddress.ip_address(name)))
    return name in names


def listening(host: str, port: int) -> socket.socket:
    """A socket that accepts connections. Raises `Refused` for an address that can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        given = f"--port {port}" if host == HOST else f"--host {host} --port {port}"
        raise Refused(f"{given}: {error}; give another one, or leave it out for a free one") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio doesn't, for given sockets
    return listener


def server_of(app: Starlette) -> uvicorn.Server:
    options: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
    config = uvicorn.Config(
        app, lifespan="off", timeout_keep_alive=75, timeout_graceful_shutdown=2, **options
    )
    return uvicorn.Server(config)


def address_of(host: str, listener: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host  # of IPv6
    return f"http://{name}:{listener.getsockname()[1]}"


def serve(app: Starlette, listener: socket.socket, text: str) -> None:
    """Until SIGINT or SIGTERM, which both end it well. `text`: is printed first: connections wait."""
    with suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(text, flush=True)
        server_of(app).run(sockets=[listener])


@contextmanager
def behind_a_port(app: Starlette) -> Iterator[str]:
    """The URL of an application that a thread of this process serves."""
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
        """`port` 0: a free one. Raises `Refused` where the address can't be had."""
        self.app, self.listener = app, listening(host, port)
        self.address = address_of(socket.gethostname() if host in ANY else host, self.listener) + "/"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def serve_until_interrupted(self, text: str) -> None:
        """`text`: is printed first, with the address."""
        serve(self.app, self.listener, text)


def is_for_us(request: Request, host: str) -> bool:
    """Whether the request names a server that listens at `host`."""
    asked = request.headers.get("host", "")
    name = asked if asked.endswith("]") else asked.rsplit(":", 1)[0]
    return is_name_of(host, name.strip("[]"))


def page_response(text: str, headers: dict[str, str]) -> Response:
    return HTMLResponse(text, headers={"Cache-Control": "no-store", **headers})


def refusal(status: int, why: str) -> Response:
    return Response(why, status, media_type="text/plain")
