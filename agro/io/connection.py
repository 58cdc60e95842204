"""A client of one HTTP server, which trusts it with nothing: requests have a deadline and a key, and are sent
again where that may help; replies have a largest size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from agro.errors import Refused, without_secrets
from agro.io.strictjson import loads

FIRST_PAUSE = 0.5  # seconds before a failed request is sent again; doubled each time
BUSY = (408, 425, 429)  # statuses that ask for the same request later
GONE = 404  # a server that was started again has lost its adapters
HEALTH_SECONDS = 5.0  # in which a server says that it runs


class Failed(Exception):
    """A request that may succeed when it is sent again."""


class Broken(Failed):
    """A connection that ended without a reply. Another process may answer at its URL then."""


class Lost(Exception):
    """A server that doesn't serve: why."""


class Away(Lost):
    """A server that can't be reached, or was started again and has none of the weights that were pushed."""


class Missing(Lost):
    """A server without the route, or without the model or adapter that is asked for."""


class Connection:
    """A client of one server. `failures` counts the requests that failed, since it was set to 0."""

    longest = 64 << 20  # bytes of a reply

    def __init__(self, url: str, timeout: float, retries: int, key: str | None, *, section: str) -> None:
        """`timeout`: seconds of a complete request; `retries`: requests after a failed one; `section`: of the
        configuration, which has both."""
        self.url, self.timeout, self.retries, self.section = url, timeout, retries, section
        self.failures = 0
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # `reply` limits the time of a complete request. A timeout of httpx's begins again with each byte.
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
        """What `read` makes of the reply's JSON, which is None where it is empty; without it nothing is read.

        Without a body a page is got. A request that fails is sent again, `retries` times (the connection's
        unless given); after a broken connection `prove` is awaited first. Raises `Lost` where it fails then
        too, and `Refused` for a request that the server refuses, and for a reply that isn't JSON.
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
        often = f" {tries} times, at last" if tries > 1 else ""
        raise lost(f"{self.url}{path} failed{often} with {problem}") from problem

    async def pause(self, attempt: int) -> None:
        """Before a failed request is sent again for the `attempt`th time, from 0."""
        await asyncio.sleep(FIRST_PAUSE * 2**attempt)

    async def is_alive(self) -> bool:
        """Whether the server says that it runs."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                response = await self._client.get(f"{self.url}/health")
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL):
            return False
        return response.status_code == httpx.codes.OK

    async def close(self) -> None:
        await self._client.aclose()

    async def reply(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        """The reply to one request. Raises as `request` does, and `Failed`."""
        method, content = "GET" if body is None else "POST", bytearray()
        try:
            async with (
                asyncio.timeout(self.timeout),
                self._client.stream(method, f"{self.url}{path}", json=body) as response,
            ):
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > self.longest:
                        raise Failed(f"it answered with more than {self.longest >> 20} MiB")
        except TimeoutError:
            raise Failed(f"no complete reply in {self.section}.timeout = {self.timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        if response.status_code == httpx.codes.OK:
            return bytes(content)
        said = without_secrets(content.decode("utf-8", "replace"))[:500]
        status = f"status {response.status_code}: {said}"
        if response.status_code >= 500 or response.status_code in BUSY:
            raise Failed(status)
        if response.status_code == GONE:
            raise Missing(f"{self.url}{path} isn't there: {status}")
        raise Refused(f"{self.section}: {self.url}{path} refused: {status}")

    def json_of(self, path: str, content: bytes) -> Any:
        """The JSON of a reply, None of an empty one."""
        try:
            return loads(content) if content else None
        except ValueError as error:
            got = content.decode("utf-8", "replace")[:200]
            raise Refused(f"{self.section}: {self.url}{path}: expected JSON, got {got!r} ({error})") from None
