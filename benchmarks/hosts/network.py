"""Networks that fail: a proxy that loses answers, and a cable between two network namespaces."""

from __future__ import annotations

import http.client
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOSTS = {"agro-a": "10.77.0.1", "agro-b": "10.77.0.2"}  # network namespaces, joined by a pair of interfaces


class LossyProxy(ThreadingHTTPServer):
    """Passes requests on to the owner of a store, and loses every n-th answer after the owner gave it."""

    daemon_threads = True

    def __init__(self, port: int, every: int) -> None:
        """`port`: of the owner, on this host."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner_port, self.every = port, every
        self.answers = self.lost = 0
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def loses(self) -> bool:
        """Whether the next answer is lost."""
        with self._lock:
            self.answers += 1
            is_lost = self.answers % self.every == 0
            self.lost += is_lost
            return is_lost


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LossyProxy

    def _pass_on(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        owner = http.client.HTTPConnection("127.0.0.1", self.server.owner_port, timeout=60)
        try:
            owner.request(self.command, self.path, content, dict(self.headers))
            answer = owner.getresponse()
            body = answer.read()
        except OSError:
            self.close_connection = True
            return
        finally:
            owner.close()
        if self.server.loses():
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("content-type", answer.headers.get("content-type", "application/octet-stream"))
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = _pass_on

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


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
