"""The owner of a store over HTTP: who may ask, how much, and what it says of itself.

`POST /call` takes one call and returns its answer; `GET /healthz` says whether the owner is up; `GET
/metrics` has its counts as Prometheus' text. All but `/healthz` ask for the token.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agro.errors import Refused
from agro.store.serving.folder_app import BODY_BYTES, SharedFolders, TooLong, body
from agro.store.serving.owner import Answer, Call, Owner

PIECE_BYTES = 1 << 17  # of an answer
REPLY_SECONDS = 15.0  # after which a client learns that its call is still at work


class Application:
    """The requests of all clients of one owner."""

    def __init__(self, owner: Owner, token: str, shared: Path, body_bytes: int = BODY_BYTES) -> None:
        """`shared`: the folder of what the processes of runs share, see `folder_app`."""
        self._owner, self._body_bytes = owner, body_bytes
        self._authorization = f"Bearer {token}".encode()
        self._running: dict[tuple[str, int], asyncio.Future[Answer]] = {}
        self._began = time.monotonic()
        self.app = Starlette(
            routes=[
                Route("/call", self.call, methods=["POST"]),
                Route("/healthz", self.healthz),
                Route("/metrics", self.metrics),
                *SharedFolders(shared, self._check_token).routes,
            ],
            exception_handlers={Refused: _text_of},
        )

    async def call(self, request: Request) -> Response:
        """200 and a value; 202 while the call is at work, for which the same is sent again; 400, 401, 413 or
        500 and an error's name and text."""
        try:
            self._check_token(request)
            answer = await self._answer(Call.read(await body(request, self._body_bytes)))
        except WrongToken as error:
            answer = Answer.refusal(error, 401)
        except TooLong as error:
            answer = Answer.refusal(error, 413)
        except Refused as error:
            answer = Answer.refusal(error)
        return Response(status_code=202) if answer is None else _Packed(answer.body, answer.status)

    async def healthz(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        self._check_token(request)
        counts = self._owner.counts
        lines = [
            *_counter("agro_store_calls_total", "calls answered", counts.calls),
            *_counter("agro_store_call_seconds_total", "seconds of the owner's thread", counts.seconds),
            *_counter("agro_store_refused_total", "calls refused", {"": counts.refused}),
            *_counter("agro_store_repeated_total", "writes asked for again", {"": counts.repeated}),
            *_counter("agro_store_transactions_total", "transactions", {"": counts.transactions}),
            *_counter("process_cpu_seconds_total", "seconds of CPU", {"": time.process_time()}),
            "# TYPE agro_store_up_seconds gauge",
            f"agro_store_up_seconds {time.monotonic() - self._began:.3f}\n",
        ]
        return Response("\n".join(lines), media_type="text/plain; version=0.0.4")

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, self._authorization):
            raise WrongToken("the token isn't the owner's. What to do: set AGRO_TOKEN to the one it has")

    async def _answer(self, call: Call) -> Answer | None:
        """None where it isn't there yet. A call that is sent again waits for the one that is at work."""
        key = call.client, call.number
        future = self._running.get(key)
        if future is None:
            future = asyncio.wrap_future(self._owner.submit(call))
            self._running[key] = future
            future.add_done_callback(lambda _: self._running.pop(key))
        done, _ = await asyncio.wait([future], timeout=REPLY_SECONDS)
        return future.result() if done else None


class WrongToken(Refused):
    """A request of somebody who has no token, or another one."""


async def _text_of(request: Request, error: Exception) -> Response:
    return Response(str(error), 401 if isinstance(error, WrongToken) else 400)


class _Packed(Response):
    """An answer, which is sent in pieces: asyncio copies what a socket doesn't take once for each try."""

    media_type = "application/msgpack"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})


def _counter(name: str, meaning: str, values: Mapping[str, float]) -> list[str]:
    """Lines of one metric, by method where there are some."""
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} counter"]
    for method, value in sorted(values.items()):
        label = f'{{method="{method}"}}' if method else ""
        lines.append(f"{name}{label} {value:.6g}")
    return lines
