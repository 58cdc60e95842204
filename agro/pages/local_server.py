"""A server of pages for a person at this machine."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


class LocalServer(ThreadingHTTPServer):
    """Listens at an address of this machine, until Ctrl-C."""

    daemon_threads = True

    def __init__(self, handler: type[LocalHandler], port: int, host: str = HOST) -> None:
        """`port` 0: a free one. Raises `Refused` where the address can't be had."""
        self.host = host
        try:
            super().__init__((host, port), handler)
        except (OSError, OverflowError) as error:
            given = f"--port {port}" if host == HOST else f"--host {host} --port {port}"
            raise Refused(f"{given}: {error}; give another one, or leave it out for a free one") from None

    @property
    def address(self) -> str:
        name = socket.gethostname() if self.host in ANY else self.host
        return f"http://{name}:{self.server_address[1]}/"

    def knows(self, name: str) -> bool:
        return is_name_of(self.host, name)

    def serve_until_interrupted(self, text: str) -> None:
        """`text`: is printed once it listens, with the address."""
        with suppress(KeyboardInterrupt):
            print(text, flush=True)
            self.serve_forever()


class LocalHandler(BaseHTTPRequestHandler):
    timeout = 60  # seconds that a connection may say nothing

    def is_for_us(self) -> bool:
        """Answers 403 and returns False where not."""
        assert isinstance(self.server, LocalServer)
        is_ours = self.server.knows(self.headers.get("Host", "").rsplit(":", 1)[0])
        if not is_ours:
            self.send_error(403, "only for this machine")
        return is_ours

    def send_page(self, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode("utf-8")
        self.send_response(200)
        standard = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
        }
        for name, value in (standard | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a request every two seconds isn't news."""
