"""A batch: the tensors of one optimizer step, read from columns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from agro.errors import Refused
from agro.types.kept_sets import KeptSets
from agro.types.sample import ROLES, ROUNDING

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any  # torch is loaded when it is used


class Column(NamedTuple):
    """An input of `Batch.of`."""

    axes: str  # B rows, T tokens, P pairs, 2 winner and loser
    expected: str = ""  # valid values in words; those that `is_bad` flags are refused
    is_bad: Callable[[Tensor, Tensor], Tensor] | None = None  # called with values and mask [B,T]
    is_float: bool = True  # a float tensor keeps its dtype, other numbers become float64; False: int64


_LOGP = Column("BT", "a log-prob (at most 0; NaN where unknown)", lambda x, mask: mask & (x > ROUNDING))
COLUMNS = {
    "reward": Column("B", "a finite number, or NaN where it is unknown", lambda x, _: x.isinf()),
    "weight": Column("B", "a finite number, 0 or more", lambda x, _: ~(x.isfinite() & (x >= 0))),
    "staleness": Column("B"),
    "ref_logp": _LOGP,
    "behavior_logp": _LOGP,
    "old_logp": _LOGP,
    "old_value": Column("BT"),
    "pairs": Column("P2", "rows 0 to {last}", lambda x, mask: (x < 0) | (x >= len(mask)), is_float=False),
    "votes": Column("P2", "0 or more, or NaN where unknown", lambda x, _: (x < 0) | x.isinf()),
    "tokens": Column("BT", is_float=False),
    "lengths": Column("B", is_float=False),
}
_OPTIONAL = {"role", "response", "ids", "extra", *COLUMNS}


@dataclass(frozen=True)
class Batch:
    """The tensors of one optimizer step: complete groups, whatever their origins and staleness.

    `mask` [B,T] marks the tokens to learn from. Per-token inputs are NaN where they are unknown. Float inputs
    are float64 unless given as tensors. `tokens` and `lengths` are None if an objective is evaluated on given
    log-probs, without a model.
    """

    mask: Tensor  # [B,T] bool
    reward: Tensor  # [B]; NaN: unknown
    group: Tensor  # [B] 0 … G-1
    response: Tensor  # [B] 0 … N-1: rows of one episode are one response
    weight: Tensor  # [B]; one value per group
    staleness: Tensor  # [B] in optimizer steps, 0 = fresh; NaN: unknown
    group_names: tuple[str, ...]  # [G]
    role: tuple[str, ...]  # [B]
    ids: tuple[str, ...]  # [B] names of the rows in messages
    ref_logp: Tensor | None = None  # [B,T]
    behavior_logp: Tensor | None = None  # [B,T]
    old_logp: Tensor | None = None  # [B,T] of the trained policy when the batch was drawn
    old_value: Tensor | None = None  # [B,T] value of the prefix before each token, when the batch was drawn
    pairs: Tensor | None = None  # [P,2] rows (winner, loser)
    votes: Tensor | None = None  # [P,2]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: Tensor | None = None  # [B,T]
    lengths: Tensor | None = None  # [B]
    kept: KeptSets | None = None  # what the log-probs are normalized over; None: the vocabulary

    @classmethod
    def of(cls, *, mask: Any, reward: Any, group: Any, **optional: Any) -> Batch:
        """Check and index the columns of B rows.

        `mask` [B,T]: the tokens to learn from, true and false or ones and zeros. `reward` [B]: None or NaN
        where it is unknown. `group` [B]: any hashable values.

        Optional: `ref_logp`, `behavior_logp`, `old_logp`, `old_value` [B,T], where a row of None or NaN is
        unknown; `staleness` [B], in optimizer steps, 0 = fresh; `role`, one for all rows or [B] ("policy" by
        default); `weight` [B] (1 by default); `pairs` [P,2], rows (winner, loser), and their `votes` [P,2],
        whose equal votes are a tie, which objectives that don't read votes drop; `extra`, a dict of named
        arrays; `response` [B], equal for the rows of one response (by default a row is one); `tokens` [B,T],
        `lengths` [B]; `ids` [B], the names of the rows in messages.

        Raises `Refused` naming the column and the row.
        """
        unknown = optional.keys() - _OPTIONAL
        if unknown:
            raise TypeError(f"Batch.of() got an unexpected keyword argument {min(unknown)!r}")
        mask_BT = _tensor(mask, "mask")
        if mask_BT.ndim != 2 or 0 in mask_BT.shape:
            raise Refused(f"mask: expected shape [B,T], got {list(mask_BT.shape)}")
        if (row := _first(((mask_BT != 0) & (mask_BT != 1)).any(1))) is not None:
            raise Refused(f"mask: row {row}: expected true and false, got {mask_BT[row].tolist()!r:.80}")
        mask_BT = mask_BT.bool()
        B, T = mask_BT.shape
        supplied: dict[str, Any] = {
            "role": "policy",
            "response": range(B),
            "weight": [1.0] * B,
            "staleness": [math.nan] * B,
        }
        supplied |= {name: value for name, value in optional.items() if value is not None}
        groups = _hashables(group, B, "group")
        rows = [f"row {i} (group {name})" for i, name in enumerate(groups)]
        names = tuple(map(str, _hashables(supplied.get("ids", rows), B, "ids")))
        if (row := _first(mask_BT[:, 0])) is not None:
            problem = "the first token is in the mask, but a first token has no log-prob"
            raise Refused(f"mask: {names[row]}: {problem}")
        if (row := _first(~mask_BT.any(1))) is not None:
            raise Refused(f"mask: {names[row]} is empty: it has no token to learn from")
        role = supplied["role"]
        roles = _hashables([role] * B if isinstance(role, str) else role, B, "role")
        for value, name in zip(roles, names, strict=True):
            if value not in ROLES:
                raise Refused(f"role: {name}: expected one of {', '.join(ROLES)}, got {value!r}")
        responses = _hashables(supplied["response"], B, "response")
        group_index, response_index = (
            {x: i for i, x in enumerate(dict.fromkeys(xs))} for xs in (groups, responses)
        )
        sizes = {"B": B, "T": T, "P": 0, "2": 2}
        if "pairs" in supplied:
            pairs_P2 = _tensor(supplied["pairs"], "pairs")
            if pairs_P2.numel() and (pairs_P2.ndim != 2 or pairs_P2.shape[1] != 2):
                raise Refused(f"pairs: expected shape [P,2], got {list(pairs_P2.shape)}")
            supplied["pairs"] = pairs_P2.reshape(-1, 2)
            sizes["P"] = len(supplied["pairs"])
        supplied["reward"] = reward
        columns: dict[str, Any] = {
            name: _column(name, supplied[name], sizes, mask_BT, names) for name in COLUMNS if name in supplied
        }
        extra = {name: _tensor(x, f"extra {name}") for name, x in supplied.get("extra", {}).items()}
        return cls(
            mask=mask_BT,
            group=torch.tensor([group_index[name] for name in groups]),
            response=torch.tensor([response_index[name] for name in responses]),
            group_names=tuple(map(str, group_index)),
            role=tuple(map(str, roles)),
            ids=names,
            extra=extra,
            **columns,
        )

    @property
    def n_groups(self) -> int:
        return len(self.group_names)

    def replace(self, **changes: Any) -> Batch:
        return dataclasses.replace(self, **changes)

    def rows(self, index: Tensor) -> Batch:
        """Select rows (`index` [K]), and renumber their groups and responses.

        A pair stays if both of its rows do.
        """
        B = len(self.mask)
        tensors = dict(self._tensors())
        part: dict[str, Any] = {name: tensors[name][index] for name in tensors.keys() - {"pairs", "votes"}}
        part["kept"] = None if self.kept is None else self.kept.rows(index)
        groups, part["group"] = part["group"].unique(return_inverse=True)
        part["response"] = part["response"].unique(return_inverse=True)[1]
        row_numbers = index.tolist()
        part["group_names"] = tuple(self.group_names[g] for g in groups.tolist())
        part["role"] = tuple(self.role[i] for i in row_numbers)
        part["ids"] = tuple(self.ids[i] for i in row_numbers)
        part["extra"] = dict(self.extra)
        for name, value in self.extra.items():
            if value.ndim and len(value) == B:
                part["extra"][name] = value[index]
        if self.pairs is not None:
            new = torch.arange(len(index), device=index.device)
            position = torch.full((B,), -1, device=index.device).index_put((index,), new)
            stays = (position[self.pairs] >= 0).all(1)
            part["pairs"] = position[self.pairs[stays]]
            part["votes"] = None if self.votes is None else self.votes[stays]
        return dataclasses.replace(self, **part)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        moved: dict[str, Any] = {"extra": {name: value.to(device) for name, value in self.extra.items()}}
        moved |= {name: tensor.to(device) for name, tensor in self._tensors()}
        moved["kept"] = None if self.kept is None else self.kept.to(device)
        return dataclasses.replace(self, **moved)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor):
                yield f.name, value


def _column(name: str, value: Any, sizes: Mapping[str, int], mask_BT: Tensor, names: Sequence[str]) -> Tensor:
    axes, expected, is_bad, is_float = COLUMNS[name]
    if axes == "BT" and isinstance(value, (list, tuple)):
        unknown = [math.nan] * sizes["T"]
        value = [unknown if row is None else row for row in value]
    values = _tensor(value, name, tuple(sizes[axis] for axis in axes), np.float64 if is_float else None)
    if not is_float:
        values = values.long()
    elif not values.is_floating_point():
        values = values.double()
    if is_bad is None or not (bad := is_bad(values, mask_BT)).any():
        return values
    index = bad.nonzero()[0].tolist()
    location = f"pair {index[0]}" if axes == "P2" else names[index[0]]
    got = values[index[0]].tolist()
    if axes == "BT":
        location += f", index {index[1]}"
        got = got[index[1]]
    raise Refused(f"{name}: {location}: expected {expected.format(last=len(mask_BT) - 1)}, got {got}")


def _tensor(value: Any, name: str, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Tensor:
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value, dtype))
    except (TypeError, ValueError) as error:
        expected_shape = "" if shape is None else f" of shape {list(shape)}"
        raise Refused(f"{name}: expected numbers{expected_shape}, got {value!r:.80}") from error
    if shape is not None and tuple(tensor.shape) != shape:
        raise Refused(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    return tensor


def _hashables(value: Any, B: int, name: str) -> list[Hashable]:
    try:
        items = value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else list(value)
        set(items)
    except TypeError as error:
        raise Refused(f"{name}: expected hashable values, one a row, got {value!r:.80}") from error
    if len(items) != B:
        raise Refused(f"{name}: expected {B} values, one a row, got {len(items)}")
    return items


def _first(flags: Tensor) -> int | None:
    """The index of the first true flag; None if there is none."""
    return int(flags.int().argmax()) if flags.any() else None
