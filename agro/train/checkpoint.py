"""Checkpoints: weights, optimiser state and position as safetensors and JSON, never pickles.

A checkpoint is written to a temporary folder, synced and renamed, and its parent synced; only then one transaction of
the store writes (run, step, digest): that row says which checkpoint counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from agro.errors import Refused


@dataclass(frozen=True)
class Position:
    """Where a run stands between two steps."""

    phase: str = ""
    step: int = 0  # of the run, the last one done
    version: int = 0  # optimiser steps
    prompts: int = 0  # sampled from in this phase
    skipped: int = 0  # updates in a row whose gradient wasn't finite
    anchor: str = ""  # digest of the checkpoint that the phase began with: its reference, where that is asked
    digest: str = ""  # of the last checkpoint; it can't stand in that checkpoint itself


def save(folder: Path, position: Position, model: nn.Module, optimiser: torch.optim.Optimizer) -> str:
    """Write a checkpoint and return its digest."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    for stale in (temporary, folder):  # left by a run that was killed before it committed
        if stale.exists():
            shutil.rmtree(stale)
    temporary.mkdir(parents=True)
    save_model(model, str(temporary / "model.safetensors"))
    save_file(_moments(model, optimiser), temporary / "optimiser.safetensors")
    (temporary / "position.json").write_text(json.dumps(asdict(replace(position, digest="")), indent=1))
    for file in temporary.iterdir():
        _sync(file)
    _sync(temporary)
    digest = digest_of(temporary)
    temporary.rename(folder)
    _sync(folder.parent)
    return digest


def load(folder: Path, digest: str, model: nn.Module) -> Position:
    """Put the weights of a checkpoint into `model`; raises `Refused` unless it is the one that was committed."""
    if not folder.is_dir() or (found := digest_of(folder)) != digest:
        state = "is missing" if not folder.is_dir() else f"has digest {found[:16]}"
        raise Refused(
            f"{folder}: the store says that this checkpoint was written with digest {digest[:16]}, but it {state}. "
            "What to do: restore the folder from a copy, or start a new run with another --out."
        )
    load_model(model, str(folder / "model.safetensors"))
    return Position(**{**json.loads((folder / "position.json").read_text()), "digest": digest})


def load_optimiser(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Put the optimiser's state back."""
    names = {n: i for i, (n, p) in enumerate(_trained(model))}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in load_file(folder / "optimiser.safetensors").items():
        name, _, kind = key.rpartition("/")
        state.setdefault(names[name], {})[kind] = value
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def digest_of(folder: Path) -> str:
    """SHA-256 over the names and contents of a folder's files."""
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        with file.open("rb") as f:
            total.update(f"{file.name} {hashlib.file_digest(f, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def prune(folder: Path, keep: set[Path]) -> None:
    """Delete all checkpoints but those."""
    for old in set(folder.glob("step-*")) - keep:
        shutil.rmtree(old)


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def _moments(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimiser.state_dict()["state"]
    names = [n for n, _ in _trained(model)]
    return {f"{names[i]}/{k}": torch.as_tensor(v).contiguous() for i, entry in state.items() for k, v in entry.items()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
