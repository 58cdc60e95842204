"""A request to a server that is trusted with nothing: its answer is bounded in time and size."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from agro.errors import without_secrets


class Answer(NamedTuple):
    status: int
    content: bytes

    @property
    def text(self) -> str:
        """For messages: its beginning."""
        return without_secrets(self.content.decode("utf-8", "replace"))[:300]


def post(client: httpx.Client, url: str, body: Mapping[str, Any], deadline: float, most: int) -> Answer:
    """The complete answer. httpx's own timeout begins again with each byte, so the clock is read in between.

    Raises `TimeoutError` where it isn't there by `deadline`, of the monotonic clock, or has more than `most`
    bytes, and `ConnectionError` where the request fails.
    """
    content = bytearray()
    left = max(0.001, deadline - time.monotonic())
    try:
        with client.stream("POST", url, json=body, timeout=left) as response:
            for part in response.iter_bytes():
                content += part
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out")
                if len(content) > most:
                    raise TimeoutError(f"answered with more than {most >> 20} MiB")
            return Answer(response.status_code, bytes(content))
    except httpx.TimeoutException:
        raise TimeoutError("timed out") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConnectionError(f"{url}: {type(error).__name__}: {error}") from None
