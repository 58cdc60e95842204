"""A sandbox behind an HTTP endpoint that runs a program once, with an input, and returns its output.

Request and reply follow Piston's `POST …/api/v2/execute`, which sandbox containers and gateways offer
too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from agro_grade.sandbox import GUEST, LONGEST_LINE, GuestEnded, NoSandbox

LANGUAGE, VERSION = "python", "3.x"


class RemoteSandbox:
    """Programs on a server. Each request runs the program again, with all earlier requests before it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise NoSandbox(f"expected a url that begins with http:// or https://, got {url!r}")
        self.level = f"remote ({url})"
        self._url, self._api_key = url, api_key
        self._opener = build_opener(_Staying)

    def start(self, opening: Mapping[str, Any]) -> RemoteSession:
        return RemoteSession(self, {**opening, "limits": {}})

    def run(self, messages: list[Mapping[str, Any]], deadline: float) -> dict[str, Any]:
        """The reply to the last of the messages.

        Raises `GuestEnded` if none comes by the deadline, `ConnectionError` if the server fails.
        """
        body = {
            "language": LANGUAGE,
            "version": VERSION,
            "files": [{"name": "guest.py", "content": GUEST}],
            "stdin": "".join(json.dumps(message) + "\n" for message in messages),
        }
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        request = Request(self._url, json.dumps(body).encode(), headers)
        try:
            content = self._answer(request, deadline)
        except HTTPError as error:
            with closing(error):
                text = error.read1(1 << 12).decode("utf-8", "replace")  # what has arrived
            if self._api_key is not None:
                text = text.replace(self._api_key, "[redacted]")  # before truncation
            raise ConnectionError(f"{self._url}: status {error.code}: {text[:300]}") from None
        except (OSError, HTTPException) as error:
            if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
                raise GuestEnded("timed out") from None
            raise ConnectionError(f"{self._url}: {type(error).__name__}: {error}") from None
        return _last_reply(content, len(messages) - 1)

    def _answer(self, request: Request, deadline: float) -> bytes:
        """The complete reply. A socket's timeout restarts with each byte, so this checks the clock."""
        content = bytearray()
        with self._opener.open(request, timeout=max(0.001, deadline - time.monotonic())) as response:
            while part := response.read1(1 << 16):
                content += part
                if time.monotonic() > deadline:
                    raise TimeoutError
                if len(content) > 2 * LONGEST_LINE:
                    raise GuestEnded(f"it answered with more than {2 * LONGEST_LINE >> 20} MiB")
        return bytes(content)


class _Staying(HTTPRedirectHandler):
    """Refuse redirections: another server would get the key and the program."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


class RemoteSession:
    def __init__(self, sandbox: RemoteSandbox, opening: Mapping[str, Any]) -> None:
        self._sandbox = sandbox
        self._messages: list[Mapping[str, Any]] = [opening]

    def ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """See `Session.ask`. Raises `ConnectionError` if the server fails."""
        self._messages.append(request)
        return self._sandbox.run(self._messages, deadline)

    def close(self) -> None:
        """Nothing runs between requests."""


def _last_reply(text: bytes, requests: int) -> dict[str, Any]:
    """The reply to the last request: the line with its number in the program's output."""
    try:
        printed = json.loads(text)["run"]["stdout"]
        lines = printed.splitlines()
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConnectionError(f"expected {{run: {{stdout: text}}}}, got {text[:200]!r}") from None
    if len(lines) < requests:
        raise GuestEnded("its process ended")
    try:
        reply = json.loads(lines[requests - 1])
    except (ValueError, RecursionError):
        reply = None
    if len(lines) > requests or not isinstance(reply, dict):
        raise GuestEnded("its answer isn't a JSON object")
    return reply
