"""Checkpoints: weights, optimiser state and position as safetensors and JSON, never pickles.

A checkpoint is written to a temporary folder, synced and renamed, and its parent synced; only then one transaction of
the store writes (run, step, digest): that row says which checkpoint counts. The last few are kept, for a disk may
damage one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agro.errors import Refused
from agro.files import whole_folder, writing
from agro.store import Commit


@dataclass(frozen=True)
class Position:
    """Where a run stands between two steps."""

    phase: str = ""
    step: int = 0  # of the run, the last one done
    version: int = 0  # optimiser steps
    prompts: int = 0  # sampled from in this phase
    skipped: int = 0  # updates in a row that weren't made
    limits: tuple[int | None, int | None] | None = (
        None  # sequences and tokens of a forward pass, halved where memory ran out
    )
    losses: tuple[float, ...] = ()  # |loss| of the last steps, where a guard compares with them
    beta: float | None = None  # where it is tuned to hold the KL
    rollbacks: int = 0  # to an earlier checkpoint; each halves the learning rate
    best: tuple[float, int] | None = None  # highest eval_reward, and its step
    waited: int = 0  # evaluations since then
    cached: int = (
        -1
    )  # entries of other runs in the cache of reference log-probs that this run may see; -1: not begun
    stopped: str = ""  # why the run ended before its last step
    anchor: str = ""  # digest of the checkpoint that the phase began with: its reference, where that is asked
    digest: str = ""  # of the last checkpoint; it can't stand in that checkpoint itself


def save(
    folder: Path,
    position: Position,
    weights: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    reference: Mapping[str, Tensor] | None = None,
    value: Mapping[str, Tensor] | None = None,
) -> dict[str, str]:
    """Write a checkpoint and return the digest of each of its files.

    `reference`: its weights, where they change on the way; `value`: those of the value head, where there is one. The
    optimiser has `weights` first, then `value`.
    """
    with whole_folder(folder) as temporary:
        save_file(_plain(weights), temporary / "model.safetensors")
        save_file(_moments([*weights, *_values(value)], optimiser), temporary / "optimiser.safetensors")
        if value:
            save_file(_plain(value), temporary / "value.safetensors")
        if reference is not None:
            save_file(_plain(reference), temporary / "reference.safetensors")
        (temporary / "position.json").write_text(json.dumps(asdict(replace(position, digest="")), indent=1))
        return _digests(temporary)


def damage(folder: Path, commit: Commit) -> str:
    """What of the checkpoint that was committed isn't as it was written; empty where it is whole."""
    if not folder.is_dir():
        return f"{folder} is missing"
    found = _digests(folder)
    if not commit.files:  # by a version that noted one digest for all
        return "" if digest_of(found) == commit.digest else f"{folder} isn't as it was written"
    said = {name: "isn't as it was written" if name in found else "is missing" for name in commit.files}
    return ", ".join(
        f"{folder / name} {said[name]}" for name in said if found.get(name) != commit.files[name]
    )


def load(
    folder: Path, digest: str, weights: Mapping[str, Tensor], value: Mapping[str, Tensor] | None = None
) -> Position:
    """Put the weights of a checkpoint, which has this digest, into `weights`, and those of its value head into `value`."""
    _put(folder / "model.safetensors", weights)
    if value:
        _put(folder / "value.safetensors", value)
    return load_position(folder, digest)


def load_position(folder: Path, digest: str) -> Position:
    read = json.loads((folder / "position.json").read_text())
    tuples = {
        name: tuple(value) for name, value in read.items() if isinstance(value, list)
    }  # which JSON doesn't have
    return Position(**{**read, **tuples, "digest": digest})


def load_reference(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Put back the weights of a reference that changes on the way."""
    _put(folder / "reference.safetensors", weights)


def load_optimiser(
    folder: Path,
    weights: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    value: Mapping[str, Tensor] | None = None,
) -> None:
    """Put the optimiser's state back; `weights` and `value` as in `save`."""
    numbers = {name: i for i, name in enumerate([*weights, *_values(value)])}
    state: dict[int, dict[str, Tensor]] = {}
    for key, moment in load_file(folder / "optimiser.safetensors").items():
        name, _, kind = key.rpartition("/")
        state.setdefault(numbers[name], {})[kind] = moment
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def digest_of(files: Mapping[str, str]) -> str:
    """SHA-256 over the names and digests of a checkpoint's files."""
    return hashlib.sha256("".join(f"{name} {files[name]}\n" for name in sorted(files)).encode()).hexdigest()


def prune(folder: Path, keep: set[Path]) -> None:
    """Delete all checkpoints but those."""
    for old in set(folder.glob("step-*")) - keep:
        with writing(old):
            shutil.rmtree(old)


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file."""
    found = {}
    for path in folder.iterdir():
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _plain(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: w.detach().contiguous() for name, w in weights.items()}


@torch.no_grad()
def _put(file: Path, weights: Mapping[str, Tensor]) -> None:
    read = load_file(file)
    if (
        read.keys() != weights.keys()
    ):  # an earlier version names weights that two layers share by the other layer
        raise Refused(
            f"{file}: expected the weights that this version of agro trains, but {sorted(read.keys() ^ weights.keys())[:3]} "
            "are in one of the two alone. What to do: go on with the version that wrote it (versions in config.json), or "
            "start a new run"
        )
    for name, value in read.items():
        weights[name].copy_(value)


def _values(value: Mapping[str, Tensor] | None) -> list[str]:
    """What the optimiser's file calls the weights of a value head."""
    return [f"value:{name}" for name in value or {}]


def _moments(names: Sequence[str], optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimiser.state_dict()["state"]
    return {
        f"{names[i]}/{k}": torch.as_tensor(v).contiguous()
        for i, entry in state.items()
        for k, v in entry.items()
    }
