"""Continuous batching: a request joins the running batch at the next token, and leaves it when it ends.

Each request has its own sampler. Requests are served in order of arrival; those without room wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agro.config import SamplerConfig
from agro.models.policy import Policy
from agro.rollout.engines import Request
from agro.rollout.engines.decoding_rows import Finished, Rows, Stops
from agro.rollout.engines.draw import draw
from agro.rollout.engines.fused import FusedStep

PROMPT, ROOM = 256, 256  # token columns of a new batch; more are added as needed


class Token(NamedTuple):
    """A sampled token."""

    id: int
    logp: float  # nats, under the sampling distribution
    version: int  # optimizer steps of the weights; -1: unknown
    model_logp: float | None = None  # the model's at temperature 1, if `Job.top` is set
    top: Sequence[tuple[int, float]] = ()  # the likeliest ids, with their `model_logp`


Progress = Token | str | Exception  # str: the finish reason, "stop" or "length"


@dataclass(frozen=True, eq=False, kw_only=True)
class Job(Request):
    """One client's request. `put` receives each token, then the finish reason; it must not block."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # equal content doesn't make requests equal

    sampler: SamplerConfig
    put: Callable[[Progress], None]
    top: int | None = None  # number of likeliest tokens to report; None: report no model log-probs


class MixedRows(Rows):
    """Rows whose requests have different samplers and lengths."""

    def __init__(self, policy: Policy, size: int, *, fused: bool) -> None:
        shape = [Request(0, [0] * PROMPT, ROOM)] * (size + 1)
        super().__init__(policy, shape, SamplerConfig(batch=size), 0, fused=fused)
        self.drawn: list[tuple[Job, Token]] = []  # in the last step
        self.version = -1
        self._stops: dict[tuple[str, ...], Stops] = {}

    def admit(self, wave: list[Request]) -> None:
        more = max(request.room for request in wave) - self.noise.shape[1]
        if more > 0:
            self.noise = np.pad(self.noise, ((0, 0), (0, more)))
            self._move(self.end, self.columns + more)
        super().admit(wave)

    def leave(self, jobs: set[Job]) -> None:
        """Drop the rows of these unfinished requests."""
        rows = [i for i, job in enumerate(self.live) if job in jobs]
        if rows:
            self._remove(rows)

    def _draw(self, logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        jobs: list[Job] = self.live  # type: ignore[assignment]
        shown = [i for i, job in enumerate(jobs) if job.top is not None]
        model_logp = logits[shown].float().log_softmax(1) if shown else None
        tokens = torch.empty(len(jobs), dtype=torch.long, device=logits.device)
        logp = logits.new_empty(len(jobs))
        rows_of: dict[SamplerConfig, list[int]] = {}
        for i, job in enumerate(jobs):
            rows_of.setdefault(job.sampler, []).append(i)
        for sampler, rows in rows_of.items():
            index = torch.tensor(rows, device=logits.device)
            tokens[index], logp[index] = draw(logits[index], noise[index], sampler)
        ids, logps = tokens.tolist(), logp.tolist()
        self.drawn = [(job, Token(ids[i], logps[i], self.version)) for i, job in enumerate(jobs)]
        for position, i in enumerate(shown):
            assert model_logp is not None
            job, token = self.drawn[i]
            best = model_logp[position].topk(min(job.top or 0, model_logp.shape[1]))
            top = list(zip(best.indices.tolist(), best.values.tolist()))
            self.drawn[i] = job, token._replace(model_logp=model_logp[position, ids[i]].item(), top=top)
        return tokens, logp

    def _stopped(self) -> list[int]:
        jobs: list[Job] = self.live  # type: ignore[assignment]
        starts = self.first.tolist()
        return [i for i, job in enumerate(jobs) if self._has_stop(job, self.tokens[i], starts[i], self.end)]

    def _has_stop(self, job: Job, tokens: NDArray[np.int64], start: int, end: int) -> bool:
        texts = job.sampler.stop
        if not texts:
            return False
        return self._stops.setdefault(texts, Stops(self.policy, texts)).found(tokens, start, end)

    def finish_of(self, done: Finished) -> str:
        """Return the finish reason of a response."""
        job: Any = done.request
        tokens: NDArray[np.int64] = np.concatenate([np.array(job.ids[-1:], np.int64), done.tokens])
        is_ended = done.tokens[-1] in self.policy.eos_ids or self._has_stop(job, tokens, 1, len(tokens))
        return "stop" if is_ended else "length"


class Batch:
    """A thread that decodes submitted requests, `size` at once."""

    def __init__(self, policy: Policy, size: int, *, fused: bool = False, version: int = -1) -> None:
        """`version`: of the weights; `renew` replaces them between two tokens."""
        self.policy, self.size, self.fused, self.version = policy, size, fused, version
        self.running = self.tokens = 0  # requests in the batch; tokens drawn so far
        self.waiting: deque[Job] = deque()
        self._left: set[Job] = set()
        self._renewals: deque[tuple[Callable[[], None], int, Future[None]]] = deque()
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._changed:
            self.waiting.append(job)
            self._changed.notify()

    def leave(self, job: Job) -> None:
        """Cancel a request."""
        with self._changed:
            self._left.add(job)
            self._changed.notify()

    def renew(self, load: Callable[[], None], version: int) -> Future[None]:
        """Call `load` in the thread between two tokens, to load weights of this version into the policy.
        Unfinished answers continue with their cached keys and values."""
        future: Future[None] = Future()
        with self._changed:
            self._renewals.append((load, version, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        rows: MixedRows | None = None
        while True:
            with self._changed:
                while not (self.waiting or self.running or self._renewals) and self._is_open:
                    self._changed.wait()
                if not self._is_open:
                    return
                cancelled, self._left = self._left, set()
                self.waiting = deque(job for job in self.waiting if job not in cancelled)
                free = self.size if rows is None else rows.free
                wave = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
                renewals = [self._renewals.popleft() for _ in range(len(self._renewals))]
            for load, version, future in renewals:
                try:
                    load()
                    self.version = version
                    if rows is not None and rows.fused is not None:  # it copies weights
                        rows.fused = FusedStep(self.policy, self.size)
                    future.set_result(None)
                except Exception as error:  # noqa: BLE001 from files or torch: the caller of `renew` gets it
                    future.set_exception(error)
            try:
                if rows is None:
                    rows = MixedRows(self.policy, self.size, fused=self.fused)
                rows.leave(cancelled)
                if wave:
                    rows.admit(list(wave))
                if rows.live:
                    self._advance(rows)
                self.running = len(rows.live)
            except Exception as error:  # noqa: BLE001 such as out of memory: a client would wait forever
                under_way: set[Any] = {*wave, *(rows.live if rows is not None else ())}
                under_way |= {job for job, _ in rows.drawn} if rows is not None else set()
                for job in under_way:
                    job.put(error)
                rows, self.running = None, 0

    def _advance(self, rows: MixedRows) -> None:
        """Sample one token per row."""
        rows.version, rows.drawn = self.version, []  # drop the tokens of the last step
        finished = rows.step()
        self.tokens += len(rows.drawn)
        for request, token in rows.drawn:
            request.put(token)
        for done in finished:
            job: Any = done.request
            job.put(rows.finish_of(done))
