"""What a server's reply says, and what is wrong with it.

A reply is used only where it is what was requested: one response, with at most the requested number of
tokens, all in the vocabulary, none after the end, each with a log-prob. Any other reply is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from agro.models.encoding import Encoder
from agro.rollout.engines.protocol import Request
from agro.types import ROUNDING

SEE_LOG = "What to do: see the server's log, then continue with --resume"


class Strict(BaseModel):
    """Only JSON's own types: 97.0, true and "97" are no integers. Fields that aren't read may be anything."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Span(Strict):
    """The version that tokens `start` to `end` - 1 of a response were sampled with."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Reply:
    """One response, whatever a server calls its parts."""

    token_ids: list[int]
    logprobs: list[float | None]  # None: unknown
    finish_reason: str
    spans: Sequence[Span] | None = None  # None: the server doesn't say

    def versions(self) -> NDArray[np.int32] | None:
        """[T] the version of each token, -1 where the server names none of ours; None without spans."""
        if self.spans is None:
            return None
        named = [(int(s.version) if s.version.isdecimal() else -1, s.end - s.start) for s in self.spans]
        return np.repeat([version for version, _ in named], [count for _, count in named]).astype(np.int32)


def problem_of(reply: Reply, request: Request, encoder: Encoder, stops: Sequence[str]) -> str:
    """What is wrong with a reply, such as a number of tokens, an id or a log-prob; "" where nothing is.

    The log-prob of an almost certain token may exceed 0 by rounding, up to `agro.types.ROUNDING`.
    """
    ids, logprobs, last = reply.token_ids, reply.logprobs, encoder.vocab_size - 1
    if not 1 <= len(ids) <= request.room:
        return f"token_ids: expected 1 to {request.room} tokens (max_tokens), got {len(ids)}. {SEE_LOG}"
    if len(logprobs) != len(ids):
        return (
            f"logprobs.token_logprobs: expected one for each of {len(ids)} tokens, got {len(logprobs)}. "
            f"{SEE_LOG}"
        )
    for index, token in enumerate(ids):
        if not 0 <= token <= last:
            return (
                f"token_ids.{index}: expected an id of the policy's vocabulary, 0 to {last}, got "
                f"{token!s:.40}. What to do: let the server serve the run's model"
            )
    for index, logprob in enumerate(logprobs):
        if logprob is not None and logprob > ROUNDING:
            return (
                f"logprobs.token_logprobs.{index}: expected a log-prob, at most 0, got {logprob:g}. {SEE_LOG}"
            )
    return _wrong_place(reply, request, encoder, stops)


def _wrong_place(reply: Reply, request: Request, encoder: Encoder, stops: Sequence[str]) -> str:
    """What is wrong with the versions of tokens, whose spans follow each other, or with the end: at the first
    end token or stop text, unless the response was truncated before."""
    ids = reply.token_ids
    if reply.spans is not None:
        ends, starts = [0, *(s.end for s in reply.spans)], [*(s.start for s in reply.spans), len(ids)]
        if ends != starts or any(span.start >= span.end for span in reply.spans):
            got = [(span.start, span.end) for span in reply.spans]
            return (
                f"weight_versions: expected spans one after the other over {len(ids)} tokens, got "
                f"{got!s:.80}. {SEE_LOG}"
            )
    if reply.finish_reason not in ("stop", "length"):
        got_reason = f"{reply.finish_reason!r:.80}"
        return f'finish_reason: expected "stop" or "length", got {got_reason}. {SEE_LOG}'
    *body, end = ids
    early = [position for position, token in enumerate(body) if token in encoder.eos_ids]
    if early:
        return (
            f"token_ids: expected nothing after the end token {body[early[0]]} at {early[0]}, got "
            f"{len(body) - early[0]} more. What to do: start the server without ignore_eos"
        )
    if _has_stop(encoder, body, request, stops):
        return (
            f"token_ids: expected nothing after a text of sampler.stop ({list(stops)!r:.80}), got more. What "
            "to do: start the server without speculative decoding, or remove sampler.stop"
        )
    is_complete = end in encoder.eos_ids or _has_stop(encoder, ids, request, stops)
    if reply.finish_reason == "stop" and not is_complete:
        return (
            f"token_ids: expected an end token ({', '.join(map(str, encoder.eos_ids))}) or a stop text last, "
            f'since finish_reason is "stop", got {end}. What to do: give the server the end tokens of the '
            "policy (generation_config.json)"
        )
    return ""


def _has_stop(encoder: Encoder, ids: Sequence[int], request: Request, stops: Sequence[str]) -> bool:
    if not stops:
        return False
    text = encoder.decode(ids, request.ids)
    return any(stop in text for stop in stops)


def wrong_field(details: Any, advice: str) -> str:
    """The first of pydantic's errors in words: which field, what was expected, what came."""
    field = ".".join(map(str, details["loc"])) or "reply"
    message = details["msg"][0].lower() + details["msg"][1:]
    return f"{field}: {message}, got {details['input']!r:.80}. What to do: {advice}"
