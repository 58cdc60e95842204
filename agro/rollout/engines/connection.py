"""A connection to one server: requests with a deadline and a key, sent again where that may help."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from agro import config
from agro.config import from_environment
from agro.errors import Refused, without_secrets
from agro.io.strictjson import loads

FIRST_PAUSE = 0.25  # seconds before a failed request is sent again; doubled each time
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
    """A client of one server. `failures` counts the requests that failed."""

    def __init__(self, url: str, settings: config.EngineConfig, key: str | None = None) -> None:
        """`key`: of a server that has another one than `engine.api_key`."""
        self.url, self.settings = url, settings
        self.failures = 0
        key = key or from_environment(settings.api_key, "engine.api_key")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # `_reply` limits the time of a complete request. A timeout of httpx's begins again with each byte.
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

        Without a body a page is got. A request that fails is sent again, `retries` times (`engine.retries`
        unless given); after a broken connection `prove` is awaited first. Raises `Lost` where it fails then
        too, and `Refused` for a request that the server refuses, and for a reply that isn't JSON.
        """
        tries = 1 + (self.settings.retries if retries is None else retries)
        problem = Failed()
        for attempt in range(tries):
            if attempt:
                await self.pause(attempt - 1)
            try:
                if prove is not None and isinstance(problem, Broken):
                    await prove()
                content = await self._reply(path, body)
                return None if read is None else read(self._json(path, content))
            except Failed as error:
                self.failures += 1
                problem = error
        lost = Away if isinstance(problem, Broken) else Lost
        raise lost(f"{self.url}{path} failed {tries} times, at last with {problem}")

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

    async def _reply(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        method = "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(self.settings.timeout):
                response = await self._client.request(method, f"{self.url}{path}", json=body)
        except TimeoutError:
            raise Failed(f"no complete reply in engine.timeout = {self.settings.timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        if response.status_code == httpx.codes.OK:
            return response.content
        status = f"status {response.status_code}: {without_secrets(response.text)[:500]}"
        if response.status_code >= 500 or response.status_code in BUSY:
            raise Failed(status)
        if response.status_code == GONE:
            raise Missing(f"{self.url}{path} isn't there: {status}")
        raise Refused(f"engine.url: {self.url}{path} refused: {status}")

    def _json(self, path: str, content: bytes) -> Any:
        try:
            return loads(content) if content else None
        except ValueError as error:
            got = content.decode("utf-8", "replace")[:200]
            raise Refused(f"engine.url: {self.url}{path}: expected JSON, got {got!r} ({error})") from None
