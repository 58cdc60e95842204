"""The store of a process that asks its owner: each method of its parts is a request over HTTP.

A request that isn't answered is sent again, with the same number, until the owner answers it: an owner that
was killed may be started again meanwhile. What the owner refuses is raised here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from agro.errors import Refused, Unwritable
from agro.store.drawing import DrawReader
from agro.store.records import OtherPrompt
from agro.store.samples import SampleReader
from agro.store.serving.http import PATIENCE, OwnerHttp, Reply
from agro.store.serving.wire import METHODS, PROTOCOL, WRITES, pack, unpack
from agro.store.survey import SurveyReader

ERRORS: dict[str, type[Refused]] = {error.__name__: error for error in (Refused, Unwritable, OtherPrompt)}


class Connection:
    """Calls of one thread to the owner of a store, one after the other."""

    def __init__(self, url: str, *, read_only: bool, timeout: float | None) -> None:
        """Raises `Refused` without a token, and where no owner of this protocol answers."""
        self.url, self._read_only = url, read_only
        self._client, self._number = uuid.uuid4().hex, 0
        self._http = OwnerHttp(url, PATIENCE if timeout is None else timeout)
        try:
            protocol = self.call("protocol")
        except BaseException:
            self.close()
            raise
        if protocol != PROTOCOL:
            self.close()
            raise Refused(
                f"{url}: expected an owner of a store that speaks protocol {PROTOCOL}, got {protocol!r:.80}. "
                "What to do: install the same version of agro on both sides"
            )

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the owner's store returns. Raises `Refused` as it does, and where no owner answers."""
        if self._read_only and method in WRITES:
            raise Refused(f"{self.url}: the store was opened read-only, and {method} writes to it")
        self._number += 1
        body = pack([self._client, self._number, method, list(args), kwargs])
        reply = self._http.request("POST", "/call", body)
        if reply.status != HTTPStatus.OK:
            raise self._refusal(reply)
        return unpack(reply.body, "client")

    def _refusal(self, reply: Reply) -> Refused:
        """The error that the owner answered with, by its name and text."""
        try:
            name, text = unpack(reply.body, "client")
        except (Refused, TypeError, ValueError):
            return Refused(
                f"{self.url}: expected the owner of a store, got status {reply.status}: {reply.text:.200}"
            )
        kind = ERRORS.get(name, Refused)
        error = kind.__new__(kind)
        error.args = (text,)
        return error


class RemotePart:
    """A part of a store, each of whose methods asks the owner."""

    def __init__(self, name: str, connection: Connection) -> None:
        self._name, self._connection = name, connection

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("__"):
            raise AttributeError(method)
        name = f"{self._name}.{method}"
        if name not in METHODS:
            raise Refused(
                f"{self._connection.url}: {name} needs the store's file, which its owner has. What to do: "
                "give the file instead, on the owner's host"
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._connection.call(name, *args, **kwargs)

        return call


class RemoteExperience(RemotePart, SampleReader): ...


class RemoteSurvey(RemotePart, SurveyReader): ...


class RemoteDraws(RemotePart, DrawReader): ...
