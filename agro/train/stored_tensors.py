"""The tensors of a checkpoint, written by one process or by ranks together.

One process writes a file for each part, such as `model.safetensors`. Ranks write with
`torch.distributed.checkpoint`, also in safetensors: `shard-RANK-model-PIECE-of-PIECES.safetensors` has one
rank's shards of some tensors. Their names begin with that of their part, and the file's header has the
shards' offsets. No file is a pickle. One process or any number of ranks can read either form: each reads only
what belongs to it.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from agro.errors import Refused
from agro.models.reference import is_shard

OFFSETS = "DCP_SHARDING_INFO"  # the key of torch.distributed.checkpoint's offsets in a file's header
PIECES = 32  # files per rank unless a tensor is larger than one: a write copies one file at a time, twice


class Chunk(NamedTuple):
    """A part of a tensor, and its location."""

    path: Path
    key: str
    offsets: Sequence[int]
    sizes: Sequence[int]


class StoredTensors:
    """The tensors of one part of a checkpoint, by name.

    A file is open only while one tensor is read, since all that was read of an open file stays in memory.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        self.chunks: dict[str, list[Chunk]] = {}
        alone = folder / f"{part}.safetensors"
        for path in [alone] if alone.exists() else sorted(folder.glob("shard-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get(OFFSETS, "{}"))
                prefix = f"{part}/" if header else ""
                for key in file.keys():  # noqa: SIM118  it isn't a mapping
                    if key.startswith(prefix):
                        sizes = file.get_slice(key).get_shape()
                        offsets = header[key]["saved_offsets"] if header else [0] * len(sizes)
                        chunk = Chunk(path, key, offsets, sizes)
                        self.chunks.setdefault(key[len(prefix) :], []).append(chunk)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `Refused` unless the part has all of these tensors, and no others."""
        if self.chunks.keys() != tensors.keys():
            differing = sorted(self.chunks.keys() ^ tensors.keys())[:3]
            raise Refused(
                f"{self.folder}: {self.part}: expected the weights that this configuration trains, but "
                f"{', '.join(differing)} are in only one of the two. What to do: resume with the "
                "configuration and version that wrote it, or start a new run"
            )
        for name, chunks in self.chunks.items():
            stored, expected = sum(math.prod(chunk.sizes) for chunk in chunks), tensors[name].numel()
            if stored != expected:
                raise Refused(
                    f"{self.folder}: {self.part}: {name}: expected {expected} values, got {stored}. What to "
                    "do: on several hosts, an --out that all of them share; else resume with the "
                    "configuration that wrote it"
                )

    def read(self, name: str, weight: Tensor) -> Tensor:
        """Read a tensor that belongs to a weight; it is sharded like the weight if it has its shape."""
        chunks = self.chunks[name]
        ends = [[o + n for o, n in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
        shape = torch.Size(max(sizes) for sizes in zip(*ends, strict=True))
        with safe_open(chunks[0].path, framework="pt") as file:
            key, sizes = chunks[0].key, chunks[0].sizes
            dtype = (file.get_slice(key)[:0] if len(sizes) else file.get_tensor(key)).dtype
        alike = shape == weight.shape
        value = torch.empty_like(weight, dtype=dtype) if alike else torch.empty(shape, dtype=dtype)
        self.copy_to(name, value)
        return value.detach()

    @torch.no_grad()
    def copy_to(self, name: str, target: Tensor) -> None:
        """Copy a tensor into `target`, or the matching part of it if `target` is a shard."""
        local, offsets = target.detach(), [0] * target.dim()
        if is_shard(local):
            [shard] = local.__create_chunk_list__()
            local, offsets = local.to_local(), list(shard.offsets)
        for chunk in self.chunks[name]:
            _copy_overlap(chunk, local, offsets)


def exists(folder: Path, part: str) -> bool:
    """Whether a checkpoint has this part."""
    return bool(StoredTensors(folder, part).chunks)


def assign(folder: Path, part: str, weights: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a part into `weights`, which have the same names."""
    stored = StoredTensors(folder, part)
    stored.check(weights)
    for name, weight in weights.items():
        stored.copy_to(name, weight)


def to_text(tensors: Mapping[str, Tensor]) -> str:
    """Encode small tensors as text, for the JSON of a monitor's state."""
    detached = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return base64.b64encode(save(detached)).decode()


def from_text(text: str) -> dict[str, Tensor]:
    """Decode the tensors that `to_text` encoded."""
    return load(base64.b64decode(text))


def write_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write this rank's parts of the tensors, which are named PART/NAME. All ranks call it.

    One rank writes each tensor that all ranks have. Raises the error of any rank that failed to write, and on
    rank 0 `Refused` if the other ranks' files aren't visible there.
    """
    # These imports take a second and a half; a run in one process skips them.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {name: tensor.detach() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_pieces(state), save_distributed=True)
    try:
        save(state, storage_writer=writer)
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise failure from error
    if dist.get_rank() != 0:
        return
    for part in {name.partition("/")[0] for name in state}:
        prefix = f"{part}/"
        expected = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
        StoredTensors(folder, part).check(expected)


def _pieces(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Assign each tensor to a file, numbered from 1. Files have about equal sizes."""
    sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    limit = max([sum(sizes.values()) // PIECES, *sizes.values()])
    piece, filled, numbers = 1, 0, {}
    for name, size in sizes.items():
        if filled and filled + size > limit:
            piece, filled = piece + 1, 0
        filled += size
        numbers[name] = piece
    return numbers


def _copy_overlap(chunk: Chunk, local: Tensor, offsets: Sequence[int]) -> None:
    """Copy the overlap of a chunk with `local`, the part of the tensor that begins at `offsets`."""
    source, target = [], []
    for theirs, stored, ours, size in zip(chunk.offsets, chunk.sizes, offsets, local.shape, strict=True):
        begin, end = max(theirs, ours), min(theirs + stored, ours + size)
        if begin >= end:
            return
        source.append(slice(begin - theirs, end - theirs))
        target.append(slice(begin - ours, end - ours))
    with safe_open(chunk.path, framework="pt") as file:
        if source:
            local[tuple(target)].copy_(file.get_slice(chunk.key)[tuple(source)])
        else:
            local.copy_(file.get_tensor(chunk.key))  # a number
