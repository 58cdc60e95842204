"""Kept sets: for each token of a response, the tokens that top-k, top-p and min-p left to choose from.

The log-prob of a token sampled with truncation is normalized over its kept set. If the sets are recorded, a
trainer can normalize its own log-probs over them as well, so that a ratio of the two has mean 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Ids = NDArray[np.int32]
ALL = np.empty(0, np.int32)  # the kept set that is the whole vocabulary


def flat(sets: Sequence[Ids]) -> tuple[Ids, Ids]:
    """Flatten the kept sets of T tokens to `Sample.kept` and `Sample.kept_count`; `ALL`: none."""
    return np.concatenate(sets).astype(np.int32), np.array([len(ids) for ids in sets], np.int32)


def problem(tokens: Ids, action: NDArray[np.bool_], ids: Ids, kept_count: Ids) -> str | None:
    """What is wrong with a sample's kept sets; None if they are valid."""
    total = int(kept_count.sum(dtype=np.int64))
    if total != len(ids):
        return f"kept: expected as many ids as kept_count adds up to, {total}, got {len(ids)}"
    outside = (kept_count > 0) & ~action
    if outside.any():
        return f"kept_count: expected 0 where action is false, got a nonzero size at index {outside.argmax()}"
    index = np.repeat(np.arange(len(tokens)), kept_count)
    falls = (np.diff(ids) <= 0) & (index[1:] == index[:-1])
    if falls.any():
        position = index[falls.argmax()]
        return f"kept: expected ascending ids for each token, got another order at index {position}"
    chosen = np.zeros(len(tokens), np.bool_)
    chosen[index[ids == tokens[index]]] = True
    excluded = (kept_count > 0) & ~chosen
    if excluded.any():
        position = excluded.argmax()
        token = tokens[position]
        return f"kept: expected the token at index {position}, {token}, among the ids that were kept for it"
    return None


@dataclass(frozen=True)
class KeptSets:
    """The kept sets of a batch."""

    ids: Tensor  # [K] the sets of all tokens, concatenated row by row
    count: Tensor  # [B,T], or [N] tokens: the size of each set; 0: the whole vocabulary

    @classmethod
    def of(cls, sets: Sequence[tuple[Ids, Ids] | None], mask: Tensor) -> KeptSets | None:
        """The sets of the tokens in `mask` [B,T], from `kept` and `kept_count` of each row.

        None if no row has any: all log-probs are then over the vocabulary.
        """
        import torch

        count = torch.zeros(mask.shape, dtype=torch.long)
        parts = []
        for row, row_sets in enumerate(sets):
            if row_sets is not None:
                row_ids, kept_count = row_sets
                count[row, : len(kept_count)] = torch.from_numpy(kept_count.astype(np.int64))
                parts.append(torch.from_numpy(row_ids.astype(np.int64)))
        if not parts:
            return None
        belongs = mask.flatten().repeat_interleave(count.flatten())
        return cls(torch.cat(parts)[belongs], torch.where(mask, count, 0))

    def rows(self, index: Tensor, width: int | None = None) -> KeptSets:
        """Select rows (`index` [K]), without the padding after `width` tokens."""
        import torch

        parts = self.ids.split(self.count.sum(1).tolist())
        ids = [parts[row] for row in index.tolist()]
        return KeptSets(torch.cat([self.ids[:0], *ids]), self.count[index, :width])

    def masked(self, mask: Tensor) -> KeptSets:
        """Select the N tokens in `mask` [B,T]."""
        belongs = mask.flatten().repeat_interleave(self.count.flatten())
        return KeptSets(self.ids[belongs], self.count[mask])

    def part(self, tokens: slice) -> KeptSets:
        """Select a slice of the N tokens."""
        begin, size = int(self.count[: tokens.start].sum()), int(self.count[tokens].sum())
        return KeptSets(self.ids[begin : begin + size], self.count[tokens])

    def to(self, device: torch.device | str) -> KeptSets:
        return KeptSets(self.ids.to(device), self.count.to(device))
