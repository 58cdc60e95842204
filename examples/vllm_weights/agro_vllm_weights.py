"""A plug-in for vLLM: new weights from safetensors files that trainer and server can both read.

It is a backend of vLLM's own transfer of weights (`/start_weight_update`, `/update_weights`,
`/finish_weight_update`), for servers without one that reads files. An update is one request. Each file is
checked by its hash, and the files must have every weight that `/init_weight_transfer_engine` announced: vLLM
itself serves half a checkpoint without a word.

A tied output layer is loaded from the input embedding: kernels that repack weights keep a copy of it, which
`reload_weights` leaves as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "agro_files"  # of --weight-transfer-config


@dataclass
class Announced(WeightTransferInitInfo):
    """What every update has."""

    names: list[str] = field(default_factory=list)  # of all weights


@dataclass
class Files(WeightTransferUpdateInfo):
    """All weights of an update."""

    files: dict[str, str] = field(default_factory=dict)  # path -> its SHA-256


class FileEngine(WeightTransferEngine[Announced, Files]):
    """Loads files into the model of one worker."""

    init_info_cls, update_info_cls = Announced, Files

    def init_transfer_engine(self, init_info: Announced) -> None:
        self.names = set(init_info.names)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)  # undoes how kernels repack weights

    def receive_weights(self, update_info: Files) -> None:
        """Raises `ValueError` for files that aren't the announced ones, before any of their weights is used.

        The model has its old weights again then, and vLLM ends the update. After an error at its finish it
        would wait for another one.
        """
        try:
            self._check(update_info.files)
        except (OSError, ValueError, SafetensorError):
            self.finish_weight_update()
            raise
        for name in update_info.files:
            self.model.load_weights(self._weights(name))

    def _check(self, files: dict[str, str]) -> None:
        missing = set(self.names)
        for name, expected in files.items():
            digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()
            if digest != expected:
                raise ValueError(f"{name}: expected SHA-256 {expected}, got {digest}")
            with safe_open(name, framework="pt") as file:
                unknown = set(file.keys()) - self.names
                missing -= set(file.keys())
            if unknown:
                raise ValueError(f"{name}: expected announced weights only, got {sorted(unknown)[:3]}")
        if missing:
            raise ValueError(f"{len(missing)} weights are missing, such as {sorted(missing)[:3]}")

    def _weights(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        with safe_open(name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - the file isn't a mapping
                tensor = file.get_tensor(key)
                if key.endswith("embed_tokens.weight"):
                    self._load_tied_head(tensor)
                yield key, tensor

    def _load_tied_head(self, embedding: torch.Tensor) -> None:
        head = getattr(self.model, "lm_head", None)
        if head is not None and self.model_config.hf_text_config.tie_word_embeddings:
            head.weight.weight_loader(head.weight, embedding)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is kept open."""


def register() -> None:
    """The entry point of `vllm.general_plugins`; vLLM calls it in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)
    if not torch.accelerator.is_available():  # the base class synchronizes it after each update
        torch.accelerator.synchronize = lambda *_: None
