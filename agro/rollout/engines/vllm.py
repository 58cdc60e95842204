"""vLLM as one setting: `engine.kind = "vllm"` starts its server beside the run, and ends it with the run."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import httpx

from agro import config
from agro.config import from_environment
from agro.errors import Refused, remember_secret
from agro.io.processes import LocalProcess, free_port
from agro.models.policy import Policy
from agro.rollout.engines.capabilities import ENGINES
from agro.rollout.engines.protocol import Capability
from agro.rollout.engines.server import Server

HOST, MODEL = "127.0.0.1", "policy"
START_SECONDS, END_SECONDS = 900.0, 30.0
SHARE = "0.4"  # of the GPU's memory, of which the trainer needs the rest
RANKS = (8, 16, 32, 64, 128, 256, 512)  # of adapters that it has room for
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}  # for new weights


class VLLM(Server):
    """A `Server` with a process of its own, on the trainer's GPU.

    It samples for this process alone, by a key of its own. Its routes for new weights have none in vLLM: they
    are open to every user of this host, and each push is probed.
    """

    can: ClassVar[frozenset[Capability]] = ENGINES["vllm"]

    def __init__(self, settings: config.EngineConfig, policy: Policy, say: Callable[[str], None]) -> None:
        """Raises `Refused` where the command isn't there, or ends before it serves."""
        self._folder = tempfile.TemporaryDirectory(prefix="agro-vllm-")
        folder, port = Path(self._folder.name), free_port(HOST)
        command = [*command_of(settings, policy, folder), "--host", HOST, "--port", str(port)]
        if shutil.which(command[0]) is None:
            raise Refused(
                f"engine.vllm: {command[0]}: no such command. What to do: pip install vllm, give the path of "
                "another environment's, or sample in this process (engine.kind = hf)"
            )
        key = from_environment(settings.api_key, "engine.api_key") or secrets.token_urlsafe(32)
        remember_secret(key)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables |= {**VARIABLES, "VLLM_API_KEY": key}
        self._log = folder / "log.txt"
        self._process = LocalProcess(command, variables, self._log, HOST)
        say(f"engine.kind = vllm: {shlex.join(command)}")
        try:
            self._wait(f"http://{HOST}:{port}/health")
        except BaseException:
            self._end()
            raise
        served = {"kind": "server", "url": f"http://{HOST}:{port}", "model": MODEL}
        super().__init__(settings.model_copy(update=served), policy.encoder, say=say, key=key)

    def close(self) -> None:
        super().close()
        self._end()

    def _wait(self, url: str) -> None:
        """Until it serves."""
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                if httpx.get(url, timeout=5).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        code = self._process.poll()
        problem = f"didn't serve in {START_SECONDS:g} s" if code is None else f"ended with exit status {code}"
        said = self._log.read_text(errors="replace").strip()[-2000:]
        raise Refused(f"engine.kind = vllm: vLLM {problem}. It said at last:\n{said}")

    def _end(self) -> None:
        self._process.stop()
        deadline = time.monotonic() + END_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        self._process.kill()
        self._folder.cleanup()


def command_of(settings: config.EngineConfig, policy: Policy, folder: Path) -> list[str]:
    """The command line of a server that reports and is given what a run needs, without its address.

    A model that is neither on the hub nor in a folder any more is saved to `folder` first.
    """
    program, *further = shlex.split(settings.vllm)
    model = policy.model.config._name_or_path
    if not model or (Path(model).is_absolute() and not Path(model).exists()):
        policy.save(folder / "model")
        model = str(folder / "model")
    dtype = str(policy.dtype).removeprefix("torch.")
    options = ["--served-model-name", MODEL, "--dtype", dtype, "--logprobs-mode", "processed_logprobs"]
    options += ["--max-model-len", str(policy.context)]
    if policy.device.type == "cuda":
        options += ["--gpu-memory-utilization", SHARE]
    if settings.api == "generate":
        options += ["--enable-scale-out"]
    if settings.push == "transfer":
        options += ["--weight-transfer-config", '{"backend": "agro_files"}']
    if policy.adapter is not None and settings.push in (None, "adapter"):
        rank = policy.adapter.active_peft_config.r
        rank = next((room for room in RANKS if room >= rank), rank)
        options += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"]
    return [program, "serve", model, *options, *further]
