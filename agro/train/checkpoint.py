"""Checkpoints: weights, optimiser state and position as safetensors and JSON, never pickles.

A checkpoint is written to a temporary folder, synced and renamed, and its parent synced; only then one transaction of
the store writes (run, step, digest): that row says which checkpoint counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agro.errors import Refused


@dataclass(frozen=True)
class Position:
    """Where a run stands between two steps."""

    phase: str = ""
    step: int = 0  # of the run, the last one done
    version: int = 0  # optimiser steps
    prompts: int = 0  # sampled from in this phase
    skipped: int = 0  # updates in a row that weren't made
    limits: tuple[int | None, int | None] | None = None  # sequences and tokens of a forward pass, where memory ran out
    losses: tuple[float, ...] = ()  # |loss| of the last steps, where a guard compares with them
    rollbacks: int = 0  # to an earlier checkpoint; each halves the learning rate
    best: tuple[float, int] | None = None  # highest eval_reward, and its step
    waited: int = 0  # evaluations since then
    stopped: str = ""  # why the run ended before its last step
    anchor: str = ""  # digest of the checkpoint that the phase began with: its reference, where that is asked
    digest: str = ""  # of the last checkpoint; it can't stand in that checkpoint itself


def save(
    folder: Path,
    position: Position,
    weights: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    reference: Mapping[str, Tensor] | None = None,
) -> str:
    """Write a checkpoint and return its digest. `reference`: its weights, where they change on the way."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    for stale in (temporary, folder):  # left by a run that was killed before it committed
        if stale.exists():
            shutil.rmtree(stale)
    temporary.mkdir(parents=True)
    save_file(_plain(weights), temporary / "model.safetensors")
    save_file(_moments(weights, optimiser), temporary / "optimiser.safetensors")
    if reference is not None:
        save_file(_plain(reference), temporary / "reference.safetensors")
    (temporary / "position.json").write_text(json.dumps(asdict(replace(position, digest="")), indent=1))
    for file in temporary.iterdir():
        _sync(file)
    _sync(temporary)
    digest = digest_of(temporary)
    temporary.rename(folder)
    _sync(folder.parent)
    return digest


def load(folder: Path, digest: str, weights: Mapping[str, Tensor]) -> Position:
    """Put the weights of a checkpoint into `weights`; raises `Refused` unless it is the one that was committed."""
    if not folder.is_dir() or (found := digest_of(folder)) != digest:
        state = "is missing" if not folder.is_dir() else f"has digest {found[:16]}"
        raise Refused(
            f"{folder}: the store says that this checkpoint was written with digest {digest[:16]}, but it {state}. "
            "What to do: restore the folder from a copy, or start a new run with another --out."
        )
    _put(load_file(folder / "model.safetensors"), weights)
    read = json.loads((folder / "position.json").read_text())
    for name in ("limits", "losses", "best"):  # JSON has no tuples
        read[name] = None if read[name] is None else tuple(read[name])
    return Position(**{**read, "digest": digest})


def load_reference(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Put back the weights of a reference that changes on the way."""
    _put(load_file(folder / "reference.safetensors"), weights)


def load_optimiser(folder: Path, weights: Mapping[str, Tensor], optimiser: torch.optim.Optimizer) -> None:
    """Put the optimiser's state back."""
    numbers = {name: i for i, name in enumerate(weights)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in load_file(folder / "optimiser.safetensors").items():
        name, _, kind = key.rpartition("/")
        state.setdefault(numbers[name], {})[kind] = value
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


def _plain(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: w.detach().contiguous() for name, w in weights.items()}


@torch.no_grad()
def _put(read: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    if read.keys() != weights.keys():
        raise ValueError(f"a checkpoint of other weights: {sorted(read.keys() ^ weights.keys())[:3]}")
    for name, value in read.items():
        weights[name].copy_(value)


def _moments(weights: Mapping[str, Tensor], optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    state, names = optimiser.state_dict()["state"], list(weights)
    return {f"{names[i]}/{k}": torch.as_tensor(v).contiguous() for i, entry in state.items() for k, v in entry.items()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
