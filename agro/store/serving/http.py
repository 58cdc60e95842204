"""Requests to the owner of a store, sent again until it answers: it may be started again meanwhile."""

from __future__ import annotations

import os
import time
from typing import Any

import httpx

from agro.errors import Refused

PATIENCE = 120.0  # seconds without an answer after which an owner counts as dead
REPLY_SECONDS = 30.0  # for one try
RETRY_SECONDS = 0.2
TOKEN = "AGRO_TOKEN"
UNAVAILABLE = (502, 503, 504)  # what a proxy answers in place of an owner that is away


class OwnerHttp:
    """The connection of one thread to an owner."""

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        """`patience`: see `request`. Raises `Refused` without a token."""
        token = os.environ.get(TOKEN)
        if not token:
            raise Refused(
                f"{url}: the owner of a store asks for a token. What to do: set {TOKEN} to the one that agro "
                "store serve was started with, or that it printed"
            )
        self.url, self.patience = url, patience
        self._client = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(REPLY_SECONDS, connect=5.0),
            trust_env=False,  # the owner is on this network: no proxy of the environment
        )

    def close(self) -> None:
        self._client.close()

    def request(self, method: str, path: str, content: bytes = b"", **options: Any) -> httpx.Response:
        """The owner's answer. `options`: as of `httpx.Client.request`.

        Raises `Refused` where it says nothing for `patience` seconds.
        """
        deadline = time.monotonic() + self.patience
        while True:
            try:
                response = self._client.request(method, path, content=content, **options)
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            else:
                if response.status_code == httpx.codes.ACCEPTED:  # still at work
                    deadline = time.monotonic() + self.patience
                    continue
                if response.status_code not in UNAVAILABLE:
                    return response
                problem = f"status {response.status_code}"
            if time.monotonic() > deadline:
                raise Refused(
                    f"{self.url}: the owner of the store hasn't answered for {self.patience:g} s "
                    f"({problem}). What to do: start it again (agro store serve), on the same port"
                )
            time.sleep(RETRY_SECONDS)

    def get(self, path: str, **params: str) -> bytes | None:
        """The body of the answer; None where there is nothing (404). Raises `Refused` as the owner does."""
        response = self.request("GET", path, params=params)
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        return self._checked(response).content

    def send(self, method: str, path: str, content: bytes = b"", **options: Any) -> None:
        """Raises `Refused` as the owner does."""
        self._checked(self.request(method, path, content, **options))

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if not response.is_success:
            raise Refused(f"{self.url}: {response.text:.500}")
        return response
