"""A sandbox behind an HTTP endpoint that runs a program once, with an input, and returns what it prints.

The request and the reply are those of Piston's `POST …/api/v2/execute`, which containers and gateways of
sandboxes offer too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from agro.rewards.bounded_post import post
from agro.rewards.code_sandbox import GUEST, LONGEST_LINE, GuestEnded

LANGUAGE, VERSION = "python", "3.x"


class RemoteSandbox:
    """Programs on a server. Each request runs the program anew, with all earlier requests before it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.level = f"remote ({url})"
        self._url = url
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(headers=headers, timeout=None)

    def start(self, first: Mapping[str, Any]) -> RemoteSession:
        return RemoteSession(self, {**first, "limits": {}})

    def run(self, messages: list[Mapping[str, Any]], deadline: float) -> dict[str, Any]:
        """The reply to the last of the messages. Raises `GuestEnded` where there is none by the deadline."""
        body = {
            "language": LANGUAGE,
            "version": VERSION,
            "files": [{"name": "guest.py", "content": GUEST}],
            "stdin": "".join(json.dumps(message) + "\n" for message in messages),
        }
        try:
            answer = post(self._client, self._url, body, deadline, 2 * LONGEST_LINE)
        except TimeoutError as error:
            raise GuestEnded(str(error)) from None
        if answer.status != httpx.codes.OK:
            raise ConnectionError(f"{self._url}: status {answer.status}: {answer.text}")
        return _last_reply(answer.content, len(messages) - 1)

    def close(self) -> None:
        self._client.close()


class RemoteSession:
    def __init__(self, sandbox: RemoteSandbox, first: Mapping[str, Any]) -> None:
        self._sandbox = sandbox
        self._messages: list[Mapping[str, Any]] = [first]

    def ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """See `Session.ask`. Raises `ConnectionError` where the server fails."""
        self._messages.append(request)
        return self._sandbox.run(self._messages, deadline)

    def close(self) -> None:
        """Nothing runs between requests."""


def _last_reply(text: bytes, requests: int) -> dict[str, Any]:
    """The reply to the last request: the line of its number in what the program printed."""
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
