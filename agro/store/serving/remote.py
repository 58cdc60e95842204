"""The store of a process that asks its owner: each method of its parts is a request over HTTP.

A request that isn't answered is sent again, with the same number, until the owner answers it: an owner that
was killed may be started again meanwhile. What the owner refuses is raised here.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from typing import Any, cast

import httpx

from agro.errors import Refused, Unwritable
from agro.store.drawing import DrawReader, Draws
from agro.store.imports import Imports
from agro.store.leases import Leases
from agro.store.ledger import Ledger, Requests
from agro.store.parts import Parts
from agro.store.records import OtherPrompt
from agro.store.samples import Experience, SampleReader
from agro.store.serving.methods import METHODS, WRITES
from agro.store.serving.wire import PROTOCOL, pack, unpack
from agro.store.survey import Survey, SurveyReader
from agro.store.tables import Tables

PATIENCE = 120.0  # seconds without an answer after which an owner counts as dead
REPLY_SECONDS = 30.0  # for one try; an owner that takes longer says so before
RETRY_SECONDS = 0.2
TOKEN = "AGRO_TOKEN"
UNAVAILABLE = (502, 503, 504)  # what a proxy answers in place of an owner that is away
ERRORS: dict[str, type[Refused]] = {error.__name__: error for error in (Refused, Unwritable, OtherPrompt)}


class Connection:
    """Calls of one thread to the owner of a store, one after the other."""

    def __init__(self, url: str, *, read_only: bool, timeout: float | None) -> None:
        """Raises `Refused` without a token, and where no owner of this protocol answers."""
        token = os.environ.get(TOKEN)
        if not token:
            raise Refused(
                f"{url}: the owner of a store asks for a token. What to do: set {TOKEN} to the one that agro "
                "store serve was started with, or that it printed"
            )
        self.url, self._read_only = url, read_only
        self._patience = PATIENCE if timeout is None else timeout
        self._client, self._number = uuid.uuid4().hex, 0
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(REPLY_SECONDS, connect=5.0),
            trust_env=False,  # the owner is on this network: no proxy of the environment
        )
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
        return unpack(self._send(pack([self._client, self._number, method, list(args), kwargs])), "client")

    def _send(self, body: bytes) -> bytes:
        """The body of the owner's answer."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                response = self._http.post("/call", content=body)
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            else:
                if response.status_code == httpx.codes.OK:
                    return response.content
                if response.status_code == httpx.codes.ACCEPTED:  # still at work
                    deadline = time.monotonic() + self._patience
                    continue
                if response.status_code not in UNAVAILABLE:
                    raise self._refusal(response)
                problem = f"status {response.status_code}"
            if time.monotonic() > deadline:
                raise Refused(
                    f"{self.url}: the owner of the store hasn't answered for {self._patience:g} s "
                    f"({problem}). What to do: start it again (agro store serve), on the same port"
                )
            time.sleep(RETRY_SECONDS)

    def _refusal(self, response: httpx.Response) -> Refused:
        """The error that the owner answered with, by its name and text."""
        try:
            name, text = unpack(response.content, "client")
        except (Refused, TypeError, ValueError):
            return Refused(
                f"{self.url}: expected the owner of a store, got status {response.status_code}: "
                f"{response.text:.200}"
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


class RemoteExperience(RemotePart, SampleReader):
    """Samples, by pages."""


class RemoteSurvey(RemotePart, SurveyReader):
    """What there is, by pages."""


class RemoteDraws(RemotePart, DrawReader):
    """Draws, each in several requests."""


def parts_of_owner(url: str, *, read_only: bool, timeout: float | None) -> Parts:
    """Parts with the methods of those of a file. Raises `Refused` as `Connection` does."""
    connection = Connection(url, read_only=read_only, timeout=timeout)
    return Parts(
        location=url,
        close=connection.close,
        experience=cast(Experience, RemoteExperience("experience", connection)),
        survey=cast(Survey, RemoteSurvey("survey", connection)),
        draws=cast(Draws, RemoteDraws("draws", connection)),
        requests=cast(Requests, RemotePart("requests", connection)),
        ledger=cast(Ledger, RemotePart("ledger", connection)),
        imports=cast(Imports, RemotePart("imports", connection)),
        tables=cast(Tables, RemotePart("tables", connection)),
        leases=cast(Leases, RemotePart("leases", connection)),
    )
