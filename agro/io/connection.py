"""A client that doesn't trust its HTTP server: requests have a deadline and a key, and are retried if that
may help; replies have a maximum size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from agro.errors import Refused, without_secrets
from agro.io.strictjson import loads

FIRST_PAUSE = 0.5  # seconds before a failed request is sent again; doubled each time
BUSY = (408, 425, 429)  # statuses that ask to repeat the request later
GONE = 404  # a restarted server has lost its adapters
HEALTH_SECONDS = 5.0  # timeout of a health check


class Failed(Exception):
    """A request failed that may succeed when it is sent again."""


class Broken(Failed):
    """A connection ended without a reply. Another process may then answer at its URL."""


class Lost(Exception):
    """The reason why a server doesn't serve."""


class Away(Lost):
    """A server can't be reached, or was restarted and lost the weights that were pushed."""


class Missing(Lost):
    """A server lacks the route, or the requested model or adapter."""


class Connection:
    """A client of one server. `failures` counts the failed requests since it was last set to 0."""

    longest = 64 << 20  # bytes of a reply

    def __init__(self, url: str, timeout: float, retries: int, key: str | None, *, section: str) -> None:
        """`timeout`: seconds for a complete request; `retries`: how often a failed one is sent again;
        `section`: the configuration's section with both."""
        self.url, self.timeout, self.retries, self.section = url, timeout, retries, section
        self.failures = 0
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # `reply` limits the time of a complete request; httpx's timeout restarts with each byte.
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, headers=headers)

    async def request(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        read: Callable[[Any], Any] | None = None,
        *,
        retries: int | None = None,
        prove: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:
        """Send a request; return what `read` makes of the reply's JSON (None if empty), without `read` None.

        Without a body, it is a GET. A failed request is sent again up to `retries` times (default: the
        connection's); after a broken connection, `prove` is awaited first. Raises `Lost` if all of these
        fail, and `Refused` for a request that the server refuses, and for a reply that isn't JSON.
        """
        tries = 1 + (self.retries if retries is None else retries)
        problem = Failed()
        for attempt in range(tries):
            if attempt:
                await self.pause(attempt - 1)
            try:
                if prove is not None and isinstance(problem, Broken):
                    await prove()
                content = await self.reply(path, body)
                return None if read is None else read(self.json_of(path, content))
            except Failed as error:
                self.failures += 1
                problem = error
        lost = Away if isinstance(problem, Broken) else Lost
        often = f" {tries} times, finally" if tries > 1 else ""
        raise lost(f"{self.url}{path} failed{often} with {problem}") from problem

    async def pause(self, attempt: int) -> None:
        """Wait before retry number `attempt` (from 0) of a failed request."""
        await asyncio.sleep(FIRST_PAUSE * 2**attempt)

    async def is_alive(self) -> bool:
        """Whether the server reports that it runs."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                response = await self._client.get(f"{self.url}/health")
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL):
            return False
        return response.status_code == httpx.codes.OK

    async def close(self) -> None:
        await self._client.aclose()

    async def reply(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        """Send one request, and return its reply. Raises as `request` does, and `Failed`."""
        method, content = "GET" if body is None else "POST", bytearray()
        try:
            async with (
                asyncio.timeout(self.timeout),
                self._client.stream(method, f"{self.url}{path}", json=body) as response,
            ):
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > self.longest:
                        raise Failed(f"a reply of more than {self.longest >> 20} MiB")
        except TimeoutError:
            raise Failed(f"no complete reply in {self.section}.timeout = {self.timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        if response.status_code == httpx.codes.OK:
            return bytes(content)
        text = without_secrets(content.decode("utf-8", "replace"))[:500]
        status = f"status {response.status_code}: {text}"
        if response.status_code >= 500 or response.status_code in BUSY:
            raise Failed(status)
        if response.status_code == GONE:
            raise Missing(f"{self.url}{path} isn't there: {status}")
        raise Refused(f"{self.section}: {self.url}{path} refused: {status}")

    def json_of(self, path: str, content: bytes) -> Any:
        """The JSON of a reply; None for an empty one."""
        try:
            return loads(content) if content else None
        except ValueError as error:
            got = content.decode("utf-8", "replace")[:200]
            raise Refused(f"{self.section}: {self.url}{path}: expected JSON, got {got!r} ({error})") from None
