"""The door over HTTP: authentication, limits, routes, server-sent events, metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, aclosing, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agro.config import SamplerConfig
from agro.door.batch import Batch
from agro.door.door import Door
from agro.door.sessions import Call, Keeping, Recorder, Sessions, check_name, store_row
from agro.door.wire import INTERFACES, Chat, Event, Outcome, Problem, validated
from agro.errors import Refused, without_secrets
from agro.io.strictjson import loads
from agro.pages.local_server import is_for_us
from agro.rollout.engines.hf import HF
from agro.rollout.rollout import recorded

BODY_BYTES = 16 << 20
BODY_SECONDS = 30.0  # time limit for a body to arrive
LOOK_SECONDS = 1.0  # between two checks for new weights
SESSION = "x-agro-session"  # a header; a session may also be part of the path or of the key
LOG = logging.getLogger("uvicorn.error")
T = TypeVar("T")
Newest = Callable[[], tuple[int, AbstractContextManager[Path]]]
"""Returns the version of the newest weights, -1 if unknown, and a context that fetches their folder."""


class Feedback(BaseModel):
    """Feedback on one answer, by its id, or on a session."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    session: str | None = None
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    thumb: Literal["up", "down"] | None = None
    comment: str | None = None
    correction: str | None = None


class Application:
    """The HTTP application: serves the requests of all clients."""

    def __init__(self, backend: Any, host: str, token: str) -> None:
        """`backend`: answers requests, such as `Serving` or `agro.door.proxy.Proxy`."""
        self.backend, self._host, self._token = backend, host, token
        self._answered: Counter[tuple[str, int]] = Counter()
        routes = [Route("/health", self.health), Route("/metrics", self.metrics)]
        for start in ("/v1", "/s/{session}/v1"):
            routes.append(Route(f"{start}/models", self.models))
            routes.append(Route(f"{start}/feedback", self.feedback, methods=["POST"]))
            for path in INTERFACES:
                routes.append(Route(f"{start}/{path}", self.ask, methods=["POST"]))
        handlers: dict[Any, Any] = dict.fromkeys((Problem, Refused, 404, 405, Exception), self._refuse)
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        self._admit(request)
        lines = ["# TYPE agro_door_requests_total counter"]
        for (path, status), count in sorted(self._answered.items()):
            lines.append(f'agro_door_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, value in self.backend.measures().items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE agro_door_{name} {kind}", f"agro_door_{name} {value:.6g}"]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        self._admit(request)
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "agro", "type": "model"}
            | {"display_name": name, "created_at": "1970-01-01T00:00:00Z"}
            for name in await self.backend.names()
        ]
        return JSONResponse({"object": "list", "data": data, "has_more": False})

    async def ask(self, request: Request) -> Response:
        session = self._admit(request)
        path = request.url.path.partition("/v1/")[2]
        response: Response = await self.backend.ask(request, path, await self._body(request), session)
        self._answered[path, response.status_code] += 1
        return response

    async def feedback(self, request: Request) -> Response:
        """Pass feedback to the backend, with `name`, which is a call's or a session's, and `episode`."""
        session = self._admit(request)
        fields = {"session": session, **object_in(await self._body(request))}
        feedback = validated(Feedback, fields).model_dump(exclude_none=True)
        name = feedback.pop("session", "")
        name = feedback.pop("id", "") or name
        if not name or not feedback or feedback.keys() >= {"thumb", "reward"}:
            expected = "id or session, and reward, thumb, comment or correction, not both reward and thumb"
            raise Problem(400, f"expected {expected}, got {', '.join(fields):.200}")
        for kind in INTERFACES.values():
            name = name.removeprefix(kind.prefix)
        feedback |= {"name": name, "episode": check_name(name.partition(".")[0])}
        return JSONResponse(await self.backend.feedback(feedback))

    def _admit(self, request: Request) -> str | None:
        """Return the session of an authorized request. Raises `Problem` for any other request."""
        headers = request.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_for_us(request, self._host) or (origin and origin.partition("://")[2] != host):
            raise Problem(403, "expected a program at this address, got a request from another site")
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        token, _, suffix = key.partition(":")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise Problem(401, "expected the door's token as API key: AGRO_TOKEN, or the one that it printed")
        session = request.path_params.get("session") or headers.get(SESSION) or suffix
        return check_name(session) if session else None

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Problem(415, "expected content-type application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > BODY_BYTES:
                        raise Problem(413, f"expected at most {BODY_BYTES} bytes")
        except TimeoutError:
            raise Problem(408, f"expected the body within {BODY_SECONDS:g} s") from None
        return bytes(body)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        problem, path = problem_of(error), request.url.path.partition("/v1/")[2]
        self._answered[path if path in INTERFACES else "other", problem.status] += 1
        return JSONResponse(INTERFACES.get(path, Chat).error(problem), problem.status)


class Keeper(Protocol):
    """Handles sessions and feedback: `Recorder`, or a run."""

    async def open_session(self, name: str | None) -> None: ...
    async def feedback(self, feedback: dict[str, Any]) -> dict[str, Any]: ...
    def measures(self) -> dict[str, float]: ...


class Serving:
    """The backend for a policy in this process."""

    def __init__(self, door: Door, model: str, keeper: Keeper) -> None:
        self.door, self.model, self.keeper, self.feedback = door, model, keeper, keeper.feedback

    async def names(self) -> list[str]:
        return [self.model]

    def measures(self) -> dict[str, float]:
        batch = self.door.batch
        counts = {"running": batch.running, "waiting": len(batch.waiting), "tokens_total": batch.tokens}
        return counts | self.keeper.measures()

    async def ask(self, request: Request, path: str, body: bytes, session: str | None) -> Response:
        wire = INTERFACES[path](object_in(body))
        await self.keeper.open_session(session)
        events = self.door.answer(wire, session)

        async def first() -> Event:
            """Await the first event, so that a refusal sets the status; without a stream await the end."""
            event = await anext(events)
            if not wire.options.stream:
                async for _ in events:
                    pass
            return event

        async def framed(event: Event) -> AsyncIterator[str]:
            try:
                async with aclosing(events):
                    yield wire.framed(event)
                    async for event in events:
                        yield wire.framed(event)
            except Exception as error:  # the status is sent already: report the error in the stream
                problem = problem_of(error)
                if problem.status == 500:
                    LOG.exception("a stream ended with an error")  # logged as for an answer without a stream
                yield f"event: error\ndata: {json.dumps(wire.error(problem))}\n\n"

        event = await _unless_disconnected(request, first())
        if wire.options.stream:
            return StreamingResponse(framed(event), media_type="text/event-stream")
        return JSONResponse(wire.whole())


@contextmanager
def opened(
    engine: Any, size: int, keeping: Keeping, model: str, seconds: float, newest: Newest | None = None
) -> Iterator[Serving]:
    """Serve an engine. `newest`: looks up weights that change meanwhile. Raises `Refused` for an engine in
    another process, and for a store that can't be opened."""
    if not isinstance(engine, HF):
        raise Refused("agro serve samples in this process; for a separate server use agro proxy --to URL")
    sessions = Sessions(engine.policy.encoder)

    async def keep(call: Call, outcome: Outcome, sampler: SamplerConfig, number: int) -> None:
        meta = {"finish": outcome.finish, "tool_calls": len(outcome.calls)}
        fields = {"meta": meta, "sampling": recorded(sampler, number), "source": model}
        shared: dict[str, Any] = {"encoder": sessions.encoder, "privacy": keeping.privacy, **fields}
        await recorder.keep(partial(store_row, call=call, **shared))

    with (
        closing(Recorder(keeping, sessions, model)) as recorder,
        closing(Batch(engine.policy, size, fused=engine.fused, version=engine.version)) as batch,
    ):
        closed = threading.Event()
        if newest is not None:
            threading.Thread(target=_follow, args=(engine, batch, newest, closed), daemon=True).start()
        try:
            yield Serving(Door(engine.policy, batch, sessions, keep=keep, seconds=seconds), model, recorder)
        finally:
            closed.set()


def _follow(engine: HF, batch: Batch, newest: Newest, closed: threading.Event) -> None:
    """Load new weights into the batch between two tokens as soon as they are published."""
    previous = ""
    while not closed.wait(LOOK_SECONDS):
        try:
            version, opening = newest()
            if version == batch.version:
                continue
            with opening as folder:
                batch.renew(partial(engine.load, folder, version), version).result()
                text = f"agro: serving version {version}, {folder}"
        except Exception as error:  # noqa: BLE001 an error must not end the thread silently
            text = f"agro: still serving version {batch.version}: {error}"
        if text != previous:
            print(without_secrets(text), file=sys.stderr, flush=True)
        previous = text


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it if the client disconnects."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnect = asyncio.create_task(work), asyncio.create_task(leave())
    try:
        await asyncio.wait([task, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Problem(499, "the client disconnected")
        return task.result()
    finally:
        for each in (task, disconnect):
            each.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


def object_in(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `Problem` for anything else."""
    try:
        value = loads(body)
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"expected JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise Problem(400, f"expected a JSON object, got {value!r:.80}")
    return value


def problem_of(error: Exception) -> Problem:
    """Convert an error to a reply; a failure of ours without its text, which may hold user data."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, Refused):
        return Problem(400, str(error))
    status = getattr(error, "status_code", 500)
    if status < 500:
        return Problem(status, f"no such page, or not with this method ({status})")
    return Problem(500, without_secrets(f"the server failed: {type(error).__name__}"))
