"""The page of `agro rate`: a person rates pairs of responses without knowing which model wrote which."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from agro.errors import Refused
from agro.io.numbers import chance
from agro.io.terminal import text_of_cell, visible
from agro.pages.local_server import LocalServer, is_for_us, page_response, refusal
from agro.pages.run.ratings import (
    SIDES,
    Ratings,
    fewest_more,
    is_decided,
    rate_rows,
    read_ratings,
    read_sheet,
)
from agro.pages.run.render import render
from agro.pages.run.verdict import Verdict

BODY_BYTES = 1000  # limit of a rating
BODY_SECONDS = 10
CHOICES = (*SIDES, "tie")
NO_TOKEN = "expected the token: open the URL that agro rate printed"


@dataclass
class Rating:
    """A sheet of RUN under rating, pair by pair in order. Each rating is written to the file at once.

    The rating ends when the sequential test has decided: then the page says whose answers were better, and
    nothing more can be rated or undone. Until then it doesn't say which side is whose.
    """

    run: Path
    sheet: Path
    step: int | None
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        """Rate identical answers as ties without asking."""
        rows = read_sheet(self.sheet)
        same = [i for i, row in enumerate(rows) if row["left"] == row["right"] and not row["better"].strip()]
        if same:
            rate_rows(self.sheet, dict.fromkeys(same, "tie"))
        ratings = self.ratings()
        if ratings.decided or not ratings.unrated:
            ratings.save(self.run)  # a kill may have come before the last save

    def ratings(self) -> Ratings:
        return Ratings.of(read_ratings(self.sheet), self.step, "sequential")

    def rate(self, number: int, better: str) -> None:
        """Rate the current pair, or undo the one before it with "". A repeated click changes nothing."""
        with self._lock:
            if number == self._state()["number" if better else "undo"]:
                rate_rows(self.sheet, {number: better})
                self.ratings().save(self.run)  # for the run's verdict

    def page(self, token: str, nonce: str) -> str:
        with self._lock:
            return render(
                "rate.html", name=self.run.resolve().name, token=token, nonce=nonce, **self._state()
            )

    def _state(self) -> dict[str, Any]:
        """Build the page's context. `number`: the current row; `undo`: the row rated before it; None if there
        is none."""
        rows, values = read_sheet(self.sheet), read_ratings(self.sheet)
        ratings = Ratings.of(values, self.step, "sequential")
        decided = is_decided(ratings.wins, ratings.losses)
        number = None if decided or not ratings.unrated else int(np.isnan(values).argmax())
        texts = {} if number is None else {name: visible(text_of_cell(x)) for name, x in rows[number].items()}
        differ = [i for i, row in enumerate(rows) if row["left"] != row["right"]]
        rated = [i for i in differ if number is not None and i < number]
        return {
            "number": number,
            "row": texts,
            "undo": rated[-1] if rated else None,
            "rated": len(rows) - ratings.unrated,
            "total": len(rows),
            "decided": decided,
            "status": Verdict.rated(ratings).sentence if number is None else outlook(ratings),
        }


def outlook(ratings: Ratings) -> str:
    """Say what is known before the decision, but not whose answers are ahead, and what is still needed."""
    remaining = ratings.unrated
    minimum = fewest_more(ratings.wins, ratings.losses)
    state = f"Not decided: {chance(ratings.p)}, and it needs p < .05. " if ratings.decided else ""
    if minimum > remaining:
        return f"{state}The remaining pairs ({remaining}) can't decide it any more, however you rate them."
    return f"{state}Needed: at least {minimum} more, at most {remaining}: this many pairs are left."


class RateServer(LocalServer):
    """Serves the page at / to clients with the token."""

    def __init__(self, rating: Rating, port: int, host: str) -> None:
        self.rating, self.host, self.token = rating, host, secrets.token_urlsafe(16)
        routes = [Route("/", self._show), Route("/rate", self._rate, methods=["POST"])]
        handlers: Any = {Refused: lambda request, error: refusal(409, f"the sheet was changed: {error}")}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False  # a redirect would go to any requested host
        super().__init__(app, port, host)

    def _show(self, request: Request) -> Response:
        if (problem := self._problem(request)) is not None:
            return problem
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; form-action 'self'; "
            "base-uri 'none'; frame-ancestors 'none'"
        )
        headers = {
            "Content-Security-Policy": policy,
            "Referrer-Policy": "same-origin",  # without a referrer a form's origin is null
            "X-Content-Type-Options": "nosniff",
        }
        return page_response(self.rating.page(self.token, nonce), headers)

    async def _rate(self, request: Request) -> Response:
        """Handle a form with number and better, or undo, and redirect to the next pair."""
        if (problem := self._problem(request)) is not None:
            return problem
        origin, length = request.headers.get("origin"), request.headers.get("content-length", "")
        if origin is not None and origin != f"http://{request.headers['host']}":
            return refusal(403, "only from this page")
        if not length.isdecimal() or int(length) > BODY_BYTES:
            return refusal(413, "only a rating")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.body()
        except (TimeoutError, ClientDisconnect):
            return refusal(408, f"expected the rating within {BODY_SECONDS} s")
        fields = parse_qs(body.decode("latin-1"))
        form = {name: values[-1] for name, values in fields.items()}
        number = form.get("undo", form.get("number", ""))
        is_rating = "undo" in form or form.get("better") in CHOICES
        if not (is_rating and number.isascii() and number.isdecimal() and len(number) < 10):
            return refusal(400, "expected number and better, or undo")
        better = "" if "undo" in form else form["better"]
        await run_in_threadpool(self.rating.rate, int(number), better)
        return Response(status_code=303, headers={"Location": f"/?token={self.token}"})

    def _problem(self, request: Request) -> Response | None:
        if not is_for_us(request, self.host):
            return refusal(403, "only for this machine")
        token = request.query_params.get("token", "")
        is_known = hmac.compare_digest(token.encode(), self.token.encode())
        return None if is_known else refusal(403, NO_TOKEN)
