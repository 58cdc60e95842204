"""The door over HTTP: who may ask, how much and how long; routes; server-sent events; metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agro.door.door import Door
from agro.door.records import Recorder
from agro.door.sessions import check_name
from agro.door.wire import Anthropic, Chat, Outcome, Problem, Responses
from agro.errors import Refused, without_secrets
from agro.io.strictjson import loads
from agro.pages.local_server import is_name_of

BODY_BYTES = 16 << 20
BODY_SECONDS = 30.0  # in which a body has to arrive
INTERFACES: dict[str, type[Chat]] = {
    "chat/completions": Chat,
    "messages": Anthropic,
    "responses": Responses,
}
SESSION = "x-agro-session"  # a header; a session is also a part of the path, or of the key
T = TypeVar("T")
FEEDBACK = {"reward", "thumb", "comment", "correction"}


class Backend(Protocol):
    """What answers: `serve`'s model, or the server behind `proxy`."""

    def names(self) -> Awaitable[list[str]]: ...

    def ask(self, request: Request, path: str, body: bytes, session: str | None) -> Awaitable[Response]: ...

    def feedback(self, feedback: dict[str, Any]) -> Awaitable[dict[str, Any]]: ...

    def measures(self) -> dict[str, float]: ...


class Application:
    """The requests of all clients."""

    def __init__(self, backend: Backend, host: str, token: str) -> None:
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
        response = await self.backend.ask(request, path, await self._body(request), session)
        self._answered[path, response.status_code] += 1
        return response

    async def feedback(self, request: Request) -> Response:
        session = self._admit(request)
        given = object_in(await self._body(request))
        if session is not None:
            given.setdefault("session", session)
        return JSONResponse(await self.backend.feedback(checked_feedback(given)))

    def _admit(self, request: Request) -> str | None:
        """The session of a request that may be answered. Raises `Problem` for others."""
        headers = request.headers
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        origin = headers.get("origin")
        if not is_name_of(self._host, name.strip("[]")) or (origin and urlsplit(origin).netloc != host):
            raise Problem(403, "only for programs at this address: not for pages of others")
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        token, _, suffix = key.partition(":")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise Problem(401, "expected the door's token as API key: AGRO_TOKEN, or the one that it printed")
        session = request.path_params.get("session") or headers.get(SESSION) or suffix
        return check_name(session) if session else None

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Problem(415, "expected content-type application/json")
        parts, length = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    parts.append(part)
                    length += len(part)
                    if length > BODY_BYTES:
                        raise Problem(413, f"expected at most {BODY_BYTES} bytes", kind="request_too_large")
        except TimeoutError:
            raise Problem(408, f"expected the body within {BODY_SECONDS:g} s", kind="timeout_error") from None
        return b"".join(parts)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        problem = problem_of(error)
        kind = INTERFACES.get(request.url.path.partition("/v1/")[2], Chat)
        known = request.url.path.partition("/v1/")[2]
        self._answered[known if known in INTERFACES else "other", problem.status] += 1
        return JSONResponse(kind.error(problem), problem.status)


class Serving:
    """The backend of `agro serve`: a policy in this process."""

    def __init__(self, door: Door, model: str, recorder: Recorder) -> None:
        self.door, self.model, self.recorder = door, model, recorder

    async def names(self) -> list[str]:
        return [self.model]

    async def open_session(self, session: str | None) -> None:
        await self.recorder.open_session(session)

    async def feedback(self, given: dict[str, Any]) -> dict[str, Any]:
        return await self.recorder.feedback(given)

    def measures(self) -> dict[str, float]:
        batch = self.door.batch
        counts = {"running": batch.running, "waiting": batch.waiting, "tokens_total": batch.tokens}
        return {**counts, "stored_total": self.recorder.stored}

    async def ask(self, request: Request, path: str, body: bytes, session: str | None) -> Response:
        wire = INTERFACES[path](object_in(body))
        await self.open_session(session)
        if wire.ask.options.stream:
            events = await _unless_gone(request, self._stream(wire, session))
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(await _unless_gone(request, self._whole(wire, session)))

    async def _whole(self, wire: Chat, session: str | None) -> dict[str, Any]:
        outcomes: dict[int, Outcome] = {}
        async with aclosing(self.door.answer(wire, session)) as deltas:
            async for delta in deltas:
                if delta.outcome is not None:
                    outcomes[delta.choice] = delta.outcome
        return wire.whole([outcomes[index] for index in sorted(outcomes)])

    async def _stream(self, wire: Chat, session: str | None) -> AsyncIterator[str]:
        """The events of a stream, after the first part is there: what is refused has a status of its own."""
        deltas = self.door.answer(wire, session)
        first = await anext(deltas)

        async def events() -> AsyncIterator[str]:
            outcomes: dict[int, Outcome] = {}
            async with aclosing(deltas):
                try:
                    for event in wire.begin():
                        yield wire.framed(event)
                    delta = first
                    while True:
                        if delta.outcome is None:
                            parts = wire.delta(
                                delta.choice, delta.kind, delta.text, delta.tokens, delta.texts
                            )
                        else:
                            outcomes[delta.choice] = delta.outcome
                            parts = wire.end(delta.choice, delta.outcome)
                        for event in parts:
                            yield wire.framed(event)
                        try:
                            delta = await anext(deltas)
                        except StopAsyncIteration:
                            break
                    for event in wire.close([outcomes[index] for index in sorted(outcomes)]):
                        yield wire.framed(event)
                except Exception as error:  # noqa: BLE001 the status is sent already
                    yield f"event: error\ndata: {json.dumps(wire.error(problem_of(error)))}\n\n"

        return events()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled where the client leaves."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(leave())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Problem(499, "the client left")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def object_in(body: bytes) -> dict[str, Any]:
    """Raises `Problem` for what isn't a JSON object."""
    try:
        value = loads(body)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"expected JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise Problem(400, f"expected a JSON object, got {value!r:.80}")
    return value


def checked_feedback(given: dict[str, Any]) -> dict[str, Any]:
    """Feedback with `name`, that of a call or of a session. Raises `Problem` for what it isn't."""
    given = {name: value for name, value in given.items() if value is not None}
    id, session = given.pop("id", None), given.pop("session", None)
    unknown = given.keys() - FEEDBACK
    reward, thumb = given.get("reward"), given.get("thumb")
    problem = ""
    if unknown or not given:
        got = ", ".join(sorted(unknown)) or "none"
        problem = f"expected id or session, and reward, thumb, comment or correction, got {got:.200}"
    elif not isinstance(id or session, str) or not (id or session):
        problem = "expected the id of an answer, or the name of a session, as text"
    elif reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        problem = f"reward: expected a number, got {reward!r:.80}"
    elif reward is not None and not math.isfinite(reward):
        problem = f"reward: expected a finite number, got {reward}"
    elif thumb not in (None, "up", "down") or (thumb and reward is not None):
        problem = f"thumb: expected up or down, without a reward, got {thumb!r:.80}"
    elif not all(isinstance(given.get(name, ""), str) for name in ("comment", "correction")):
        problem = "comment, correction: expected text"
    if problem:
        raise Problem(400, problem)
    name = id or session
    assert isinstance(name, str)
    for prefix in (kind.prefix for kind in INTERFACES.values()):
        name = name.removeprefix(prefix)
    return {**given, "name": name, "episode": check_name(name.partition(".")[0])}


def problem_of(error: Exception) -> Problem:
    """An error as it is answered; what is our fault without its words, which may be anybody's."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, Refused):
        return Problem(400, str(error))
    status = getattr(error, "status_code", 500)
    if status < 500:
        return Problem(status, f"no such page, or not with this method ({status})")
    return Problem(500, without_secrets(f"the server failed: {type(error).__name__}"))


def serve(app: Application, listener: socket.socket, say: Callable[[], None]) -> None:
    """Until SIGINT or SIGTERM, which both end it well. `say` is called once it answers."""

    class Saying(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            say()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = uvicorn.Config(
        app.app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )
    Saying(config).run(sockets=[listener])


def listening(host: str, port: int) -> socket.socket:
    """A socket that accepts connections. Raises `Refused` for an address that can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        raise Refused(f"--host {host} --port {port}: {error}; give another one") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio doesn't, for given sockets
    return listener
