"""The engine behind HTTP: one or more OpenAI-compatible servers of the policy, used with token ids.

A server should report the log-probs of the distribution that it samples from (vLLM: --logprobs-mode
processed_logprobs). Each push of new weights is followed by a probe of what the server then has. A server
that dies, or doesn't pass its probe, isn't used until it passes one; where none is left, the run stops.

Deviation from the embedded engine: the noise is the server's, so a run can't be repeated bit for bit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, TypeVar

from agro import config
from agro.config import SamplerConfig
from agro.errors import Refused
from agro.models.encoding import Encoder
from agro.models.published import Probe
from agro.rollout.engines.capabilities import ENGINES
from agro.rollout.engines.connection import Lost
from agro.rollout.engines.host import Host
from agro.rollout.engines.protocol import Capability, Continuation, NoServer, Request

CHECKED = 0.2  # seconds after which an interruption is noticed
T = TypeVar("T")


class Server:
    """Requests `sampler.batch` responses at once, each from the server that is least busy.

    A request that fails is counted and sent again.
    """

    can: ClassVar[frozenset[Capability]] = ENGINES["server"]

    def __init__(
        self,
        settings: config.EngineConfig,
        encoder: Encoder,
        version: int = -1,
        say: Callable[[str], None] = lambda text: None,
        key: str | None = None,
    ) -> None:
        """`encoder`: of the policy that is served; `key`: in place of `engine.api_key`. Raises `Refused`
        where no URL is given."""
        self.version, self.say = version, say
        self.hosts = [Host(url, settings, encoder, key) for url in settings.servers]
        self.proposed = self.accepted = 0  # unknown: a draft model is the server's own matter
        self.check: Callable[[], None] = lambda: None
        self._said: dict[str, str] = {}  # by URL, the problems that were reported
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def failures(self) -> int:
        return sum(host.connection.failures for host in self.hosts)

    @property
    def used(self) -> list[Host]:
        return [host for host in self.hosts if not host.problem]

    @property
    def measured(self) -> Mapping[str, Any]:
        errors = [host.error for host in self.used if host.error is not None]
        return {
            "push_error": max(errors, default=None),
            "servers": len(self.used),
            "servers_dropped": {host.url: host.problem for host in self.hosts if host.problem},
        }

    def decode(self, waiting: deque[Request], sampler: SamplerConfig, seed: int) -> Iterator[Continuation]:
        """See `agro.rollout.engines.Engine`.

        Raises `Refused` where a request fails `engine.retries` times more at every server, and for a reply
        that isn't what was requested, once the other requests under way are served.
        """
        running: set[Future[Continuation]] = set()
        refused: BaseException | None = None
        try:
            while running or (waiting and refused is None):
                while waiting and len(running) < sampler.batch and refused is None:
                    running.add(self._submit(self._complete(waiting.popleft(), sampler, seed)))
                self.check()
                done, running = wait(running, timeout=CHECKED, return_when=FIRST_COMPLETED)
                self._say_changes()
                for future in done:
                    refused = refused or future.exception()
                    if future.exception() is None:
                        yield future.result()
        finally:
            for future in running:
                future.cancel()
        if refused is not None:
            raise refused

    def load(self, weights: Path, version: int) -> None:
        """Push the weights of a published folder, which each server can access, and probe each server.

        Raises `Refused` where no server has them then.
        """
        probe = Probe.read(weights)
        self._submit(self._renew(weights, version, probe)).result()
        self._say_changes()
        if not self.used:
            raise self._nothing_left()
        self.version = version

    def close(self) -> None:
        if self._loop.is_closed():
            return
        for host in self.hosts:
            self._submit(host.connection.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _complete(self, request: Request, sampler: SamplerConfig, seed: int) -> Continuation:
        version = self.version
        while self.used:
            host = min(self.used, key=lambda host: host.busy)
            try:
                return await host.sample(request, sampler, seed, version)
            except Lost as error:
                host.drop(error)
        raise self._nothing_left()

    async def _renew(self, weights: Path, version: int, probe: Probe) -> None:
        await asyncio.gather(*(host.renew(weights, version, probe) for host in self.hosts))

    def _say_changes(self) -> None:
        """Name the servers that were dropped, and those that came back."""
        for host in self.hosts:
            if host.problem == self._said.get(host.url, ""):
                continue
            self._said[host.url] = host.problem
            now = f"isn't used: {host.problem}" if host.problem else "is used again: it passed its probe"
            self.say(f"server {host.url} {now}")

    def _nothing_left(self) -> Refused:
        problems = "".join(f"\n- {host.url}: {host.problem}" for host in self.hosts)
        kind = Refused
        if all(host.is_away for host in self.hosts):
            self.version, kind = -1, NoServer  # of no weights, until a push
        return kind(
            f"engine.url: no server is left:{problems}\nWhat to do besides: check that the servers run, "
            "raise engine.retries or engine.timeout if they need longer; then continue with --resume"
        )
