"""Models, servers of them, and engines that ask these."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from stand_in import FORM, NEW, StandIn, serving
from torch import no_grad, randn_like

from agro.config import EngineConfig, LoRA, PolicyConfig
from agro.io import connection
from agro.models.policy import Policy
from agro.models.published import publish
from agro.rollout.engines.server import Server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.001)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model, whose output layer is tied to the embedding."""
    folder = tmp_path_factory.mktemp("model") / "start"
    Policy.load(PolicyConfig(new=NEW), seed=0).save(folder)
    return str(folder)


class Bench:
    """What a test has of one model: policies, servers, and engines, which are closed after it."""

    def __init__(self, start: str, folder: Path, opened: ExitStack) -> None:
        self.start, self.folder, self.opened = start, folder, opened
        self.said: list[str] = []  # by all engines

    def policy(self, **settings) -> Policy:
        return Policy.load(PolicyConfig(model=self.start, **settings))

    def tuned(self) -> Policy:
        """The model with an adapter."""
        return Policy.load(PolicyConfig(model=self.start, lora=LoRA(rank=2)), seed=1)

    def server(self, policy: Policy | None = None) -> StandIn:
        _, state = self.opened.enter_context(serving(policy or self.policy()))
        return state

    def engine(self, policy: Policy, *servers: StandIn, version=-1, level=0, **settings) -> Server:
        values = {"kind": "server", "urls": [server.url for server in servers], "retries": 1, **settings}
        engine = Server(
            EngineConfig(**values), policy.encoder, version=version, say=self.said.append, level=level
        )
        self.opened.callback(engine.close)
        return engine

    def pushing(self, way: str, **settings) -> tuple[Policy, StandIn, Server]:
        """A policy, of adapters with one, a server, and an engine that pushes the policy's weights to it."""
        policy, state = self.tuned() if way == "adapter" else self.policy(), self.server()
        return policy, state, self.engine(policy, state, push=way, **settings)

    def moved(self, policy: Policy, version: int, way: str, nats: float = 0.1) -> Path:
        """Weights published for a way to push them, after all that are trained moved by about `nats`."""
        with no_grad():
            for weight in policy.weights().values():
                weight.add_(randn_like(weight) * nats)
        folder = self.folder / f"{version}"
        folder.mkdir()
        publish(policy, folder, FORM[way])
        return folder


@pytest.fixture
def bench(start, tmp_path):
    with ExitStack() as opened:
        yield Bench(start, tmp_path, opened)


@pytest.fixture
def tuned(bench) -> Policy:
    return bench.tuned()
