"""Ways in which new weights reach a server, one class each. `agro.config.EngineConfig.push` chooses.

That a server answers 200 to all requests of a push doesn't mean that it has the weights: see `host`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open

from agro import config
from agro.errors import Refused
from agro.io.files import digest
from agro.rollout.engines.connection import Connection, Lost

ADAPTER = "adapter_config.json"  # the file by which the folder of an adapter is known
KEPT = 2  # adapters on a server: responses to an earlier one may still be under way for another process


class Push(Protocol):
    """Brings weights to one server. `needs`: how a server is started for it."""

    needs: str

    async def push(self, server: Connection, weights: Path, version: int) -> str | None:
        """Returns the name that the server has them under; None: that of its model.

        Raises `Lost` where a request fails, and `Refused` for one that the server refuses. Then the server
        may have any mixture of weights.
        """
        ...


def push_of(settings: config.EngineConfig, weights: Path) -> type[Push]:
    """The way of a folder of published weights."""
    is_adapter = (weights / ADAPTER).exists()
    if settings.dialect == "sglang":
        return SGLangAdapter if is_adapter else SGLangReload
    if is_adapter:
        return Adapter
    return Transfer if settings.push == "transfer" else Reload


class Reload:
    """vLLM's workers read the folder again (VLLM_SERVER_DEV_MODE=1).

    They load what they find, be it half of a model.
    """

    needs = "VLLM_SERVER_DEV_MODE=1"

    async def push(self, server: Connection, weights: Path, version: int) -> str | None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.resolve())}}
        await server.command("/collective_rpc", body, retries=0)
        await server.command("/reset_prefix_cache", {})
        if server.settings.api == "generate":  # whose replies name the version
            await server.command("/update_weight_version", {"new_version": str(version)})
        return None


class Transfer:
    """vLLM's protocol for new weights, with a backend that reads files: examples/vllm_weights.

    Requests are frozen meanwhile, and continue with the new weights. After /finish_weight_update failed, the
    server still waits for it: the next push fails in all three requests, which ends that, and the one after
    it works. So all three are always sent.
    """

    needs = "VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config (see examples/vllm_weights)"

    async def push(self, server: Connection, weights: Path, version: int) -> str | None:
        files = {str(file.resolve()): digest(file) for file in sorted(weights.glob("*.safetensors"))}
        names = [name for file in files for name in names_in(file)]
        await server.command("/init_weight_transfer_engine", {"init_info": {"names": names}}, retries=0)
        await server.command("/pause?mode=keep", {})
        try:
            failed = [
                await _failure(server, "/start_weight_update", {}),
                await _failure(server, "/update_weights", {"update_info": {"files": files}}),
                await _failure(server, "/finish_weight_update", {"weight_version": str(version)}),
            ]
            await server.command("/reset_prefix_cache", {})
        finally:
            await server.command("/resume", {})
        for failure in failed:
            if failure is not None:
                raise failure
        return None


async def _failure(server: Connection, path: str, body: Mapping[str, Any]) -> Lost | None:
    try:
        await server.command(path, body, retries=0)
    except Lost as error:
        return error
    return None


class Adapter:
    """An adapter of peft's format under a name of its own, which requests then ask for.

    The name contains the adapter's hash: a server that has the name has the adapter.
    """

    needs = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, or set engine.push = reload"
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def push(self, server: Connection, weights: Path, version: int) -> str | None:
        name = f"agro@{version}-{digest(weights / 'adapter_model.safetensors')[:12]}"
        there = _names(await server.get("/v1/models"))
        if name not in there:
            await server.command(self.load, {"lora_name": name, "lora_path": str(weights.resolve())})
        if name not in self.loaded:
            self.loaded.append(name)
        for earlier in self.loaded[:-KEPT]:
            self.loaded.remove(earlier)
            if earlier in there:
                await server.command(self.unload, {"lora_name": earlier})
        return name


class SGLangReload:
    """SGLang's workers read the folder again. Tried with a stand-in alone."""

    needs = "SGLang 0.5 or newer"

    async def push(self, server: Connection, weights: Path, version: int) -> str | None:
        body = {"model_path": str(weights.resolve()), "weight_version": str(version)}
        await server.command("/update_weights_from_disk", body, retries=0)
        await server.command("/flush_cache", {})
        return None


class SGLangAdapter(Adapter):
    """SGLang's adapters (--enable-lora). Tried with a stand-in alone."""

    needs = "--enable-lora"
    load, unload = "/load_lora_adapter", "/unload_lora_adapter"


def names_in(file: str) -> list[str]:
    """The tensors of a safetensors file."""
    with safe_open(file, framework="numpy") as tensors:
        return list(tensors.keys())


def _names(models: Any) -> set[str]:
    """Of a server's models and adapters."""
    try:
        return {str(model["id"]) for model in models["data"]}
    except (KeyError, TypeError):
        raise Refused(f"/v1/models: expected a list of models in data, got {models!r:.80}") from None
