"""Requests to the owner of a store, sent again until it answers: it may be started again meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from agro.errors import Refused

PATIENCE = 120.0  # seconds without an answer after which an owner counts as dead
CONNECT_SECONDS = 5.0
REPLY_SECONDS = 30.0  # for one try
RETRY_SECONDS = 0.2
TOKEN = "AGRO_TOKEN"
UNAVAILABLE = (502, 503, 504)  # what a proxy answers in place of an owner that is away


class Reply(NamedTuple):
    """The owner's answer."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class OwnerHttp:
    """The connection of one thread to an owner.

    Of the standard library: a call costs a third of the CPU time that it takes with httpx.
    """

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        """`patience`: see `request`. Raises `Refused` without a token."""
        token = os.environ.get(TOKEN)
        if not token:
            raise Refused(
                f"{url}: the owner of a store asks for a token. What to do: set {TOKEN} to the one that agro "
                "store serve was started with, or that it printed"
            )
        self.url, self.patience = url, patience
        address = urlsplit(url)
        kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
        try:
            self._connection = kind(address.hostname or "", address.port, timeout=CONNECT_SECONDS)
        except (ValueError, HTTPException) as error:
            raise Refused(f"{url}: expected the URL of the owner of a store: {error}") from None
        self._prefix, self._headers = address.path, {"authorization": f"Bearer {token}"}

    def close(self) -> None:
        self._connection.close()

    def request(
        self,
        method: str,
        path: str,
        content: bytes = b"",
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """The owner's answer. Raises `Refused` where it says nothing for `patience` seconds."""
        target = f"{self._prefix}{path}" + (f"?{urlencode(params)}" if params else "")
        deadline = time.monotonic() + self.patience
        while True:
            was_open = self._connection.sock is not None
            try:
                reply = self._try(method, target, content, {**self._headers, **(headers or {})})
            except (OSError, HTTPException) as error:
                self._connection.close()
                if was_open:  # perhaps closed while it was idle
                    continue
                problem = str(error) or type(error).__name__
            else:
                if reply.status == HTTPStatus.ACCEPTED:  # still at work
                    deadline = time.monotonic() + self.patience
                    continue
                if reply.status not in UNAVAILABLE:
                    return reply
                problem = f"status {reply.status}"
            if time.monotonic() > deadline:
                raise Refused(
                    f"{self.url}: the owner of the store hasn't answered for {self.patience:g} s "
                    f"({problem}). What to do: start it again (agro store serve), on the same port"
                )
            time.sleep(RETRY_SECONDS)

    def _try(self, method: str, target: str, content: bytes, headers: Mapping[str, str]) -> Reply:
        """The answer to one try. Raises errors of the connection."""
        connection = self._connection
        if connection.sock is None:
            connection.connect()
        if connection.sock is not None:
            connection.sock.settimeout(REPLY_SECONDS)
        connection.request(method, target, content, headers)
        response = connection.getresponse()
        return Reply(response.status, response.read())

    def get(self, path: str, **params: str) -> bytes | None:
        """The body of the answer; None where there is nothing (404). Raises `Refused` as the owner does."""
        reply = self.request("GET", path, params=params)
        return None if reply.status == HTTPStatus.NOT_FOUND else self._checked(reply).body

    def send(
        self,
        method: str,
        path: str,
        content: bytes = b"",
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Raises `Refused` as the owner does."""
        self._checked(self.request(method, path, content, params=params, headers=headers))

    def _checked(self, reply: Reply) -> Reply:
        if not HTTPStatus.OK <= reply.status < HTTPStatus.MULTIPLE_CHOICES:
            raise Refused(f"{self.url}: {reply.text:.500}")
        return reply
