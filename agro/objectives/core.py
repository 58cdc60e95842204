"""How an objective is declared, and the one way to evaluate it.

An objective is a pure function `(streams, batch, **options) -> Terms` of whole groups. `streams["logp"]` and what
else it declares are float64, those of tokens with zeros outside the mask; it never sees the model. What it returns is differentiated
here, so that a function holds its equation and nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from agro.errors import Refused
from agro.objectives.pairs import Pairs, check_pairs, groups_without_pairs
from agro.objectives.reduce import Groups
from agro.types import Batch

Need = Literal[
    "reward",
    "groups",
    "triples",
    "pairs",
    "votes",
    "fresh",
    "ref_logp",
    "behavior_logp",
    "old_logp",
    "stored_value",
    "kl",
    "entropy",
    "value",
    "prefix_value",
]
Coupling = Literal["row", "group", "step"]
Streams = Mapping[str, Tensor]
STREAMS = ("logp", "kl", "entropy", "value", "prefix_value")
VALUES = frozenset({"value", "prefix_value"})  # the streams that a value head gives
REQUIRED = object()

WAYS_OUT = {
    "reward": "score them (agro score STORE --reward NAME), or train on them with sft",
    "behavior_logp": "sample anew (our samplers record them), or use an objective that doesn't read them, such as agro",
    "old_logp": "train on fresh samples alone (data.replay = 0), take ratios against recorded behaviour log-probs, or use agro",
    "ref_logp": "give the reference's log-probs, or set beta = 0 where the objective allows it",
    "fresh": "train on fresh samples alone (data.replay = 0, train.updates = 1), or use agro, which is right at any age",
    "stored_value": "sample those prompts from the reference (agro sample --model REFERENCE -n 8), score them, and name the store in data.value_store",
}


class NotFinite(Refused):
    """A stream or a gradient isn't finite in some row."""


@dataclass(frozen=True)
class Terms:
    """What an objective returns. Its gradient is the surrogate's where there is one, else the loss's."""

    loss: Tensor  # the quantity to plot
    surrogate: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Option:
    """One option of an objective: what it may be, in which unit, what it means."""

    default: Any
    unit: str
    meaning: str
    expected: str
    valid: Callable[[Any], bool]


@dataclass(frozen=True)
class Objective:
    """An entry of the table: the function and what is declared of it, given its options."""

    function: Callable[..., Terms]
    source: str  # paper, equation
    needs: Callable[[Mapping[str, Any]], set[Need]]
    couples: Callable[
        [Mapping[str, Any]], Coupling
    ]  # how far one row's gradient depends on other rows' streams
    options: Mapping[str, Option]
    conflict: Callable[[Mapping[str, Any]], str] = lambda options: (
        ""
    )  # why all options together can't be, where so

    def checked(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The given options, lists as tuples; raises `Refused` for an unknown or unusable one."""
        out = {}
        for key, value in given.items():
            if key not in self.options:
                near = difflib.get_close_matches(key, self.options, 1, 0.5)
                raise Refused(
                    f"objective {name}: unknown option {key}; "
                    + (f"did you mean {near[0]}?" if near else f"it has: {', '.join(self.options) or 'none'}")
                )
            out[key] = tuple(value) if isinstance(value, list) else value
            if not self.options[key].valid(out[key]):
                raise Refused(
                    f"objective {name}: option {key}: expected {self.options[key].expected}, got {out[key]!r}"
                )
        return out

    def defaults(self) -> dict[str, Any]:
        return {k: v.default for k, v in self.options.items() if v.default is not REQUIRED}

    def needed(self, given: Mapping[str, Any]) -> set[Need]:
        """What it needs with these options, defaults filled in."""
        return self.needs(self.defaults() | dict(given))

    def resolve(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options with defaults filled in; raises `Refused` for an unknown, missing or unusable one."""
        out = self.defaults() | self.checked(name, given)
        for key, option in self.options.items():
            if key not in out:
                raise Refused(
                    f"objective {name}: option {key} has no default; give it ({option.meaning}, in {option.unit})"
                )
        if why := self.conflict(out):
            raise Refused(f"objective {name}: {why}")
        return out


@dataclass(frozen=True)
class Evaluation:
    """An objective's value and gradient on one batch. Arrays are of the kind and dtype that `logp` came in."""

    loss: float
    grads: dict[str, Any]  # d loss / d stream, of the stream's shape
    metrics: dict[str, float]

    @property
    def grad(self) -> Any:
        """[B,T] d loss / d logp."""
        return self.grads["logp"]


def differentiate(
    name: str,
    objective: Objective,
    streams: Streams,
    batch: Batch,
    options: Mapping[str, Any],
    rows: Tensor | None = None,
) -> Evaluation:
    """Value and gradient of `objective` with resolved options; see `agro.objectives.evaluate`.

    With `rows` [K], only their streams were given (the others may hold anything finite): the gradients of these rows
    are right and checked, loss and metrics mean nothing.
    """
    needs = objective.needs(options)
    wanted = wanted_streams(needs)
    check(name, needs, streams, batch)
    keep = _kept(name, needs, batch, options)
    part = batch if keep is None else batch.rows(keep)
    if not part.weight.any():
        raise Refused(
            f"objective {name}: weight: all of the {len(part.weight)} rows weigh 0: nothing to learn from"
        )
    leaves: dict[str, Tensor] = {}
    for s in wanted:
        value = streams[s] if keep is None else streams[s][keep]
        leaves[s] = masked(part, value.detach().double()).requires_grad_()
        bad = ~leaves[s].isfinite().view(len(value), -1).all(1)
        if bad.any():
            raise NotFinite(
                f"objective {name}: stream {s}: expected finite numbers where the mask is set, got others in {part.ids[int(bad.int().argmax())]}"
            )
    terms = objective.function(leaves, part, **{k: v for k, v in options.items() if k != "singletons"})
    target = terms.loss if terms.surrogate is None else terms.surrogate
    found = torch.autograd.grad(target, list(leaves.values()), allow_unused=True)
    grads = {}
    for s, g in zip(leaves, found):
        full = blank(batch, s)
        if g is not None:
            g = masked(part, g)
            full = g if keep is None else full.index_copy(0, keep, g)
        grads[s] = full
    _check_finite(name, needs, grads, streams, batch, rows)
    metrics = {k: float(v.detach()) for k, v in terms.metrics.items()}
    if least_responses(needs) > 1:
        metrics["singletons_dropped"] = float(batch.n_groups - part.n_groups)
    return Evaluation(float(terms.loss.detach()), grads, metrics)


def wanted_streams(needs: Collection[str]) -> list[str]:
    """Log-probs, and what else is needed."""
    return [s for s in STREAMS if s == "logp" or s in needs]


def blank(batch: Batch, stream: str) -> Tensor:
    """Zeros [B,T], or [B] for the value of a prompt."""
    shape = batch.mask.shape[:1] if stream == "value" else batch.mask.shape
    return torch.zeros(shape, dtype=torch.float64, device=batch.mask.device)


def masked(batch: Batch, x: Tensor) -> Tensor:
    """A stream [B,T] with 0 outside the mask; one of [B] as it is."""
    return torch.where(batch.mask, x, 0.0) if x.dim() == 2 else x


def least_responses(needs: set[Need]) -> int:
    """The fewest responses that a group may have."""
    return 3 if "triples" in needs else 2 if {"groups", "pairs"} & needs else 1


def check(name: str, needs: set[Need], streams: Streams, batch: Batch) -> None:
    """Raise `Refused` where the batch lacks what the objective needs, with counts, three rows and the way out."""
    for s in wanted_streams(needs):
        shape = blank(batch, s).shape
        if s not in streams:
            raise Refused(
                f'objective {name} needs the stream "{s}", which wasn\'t given; got {", ".join(streams)}'
            )
        if streams[s].shape != shape:
            raise Refused(
                f"objective {name}: stream {s}: expected shape {list(shape)}, got {list(streams[s].shape)}"
            )
    lacking: dict[str, Tensor] = {}
    if "reward" in needs:
        lacking["reward"] = batch.reward.isnan()
    if "fresh" in needs:
        lacking["fresh"] = ~(batch.age == 0)
    for key in ("ref_logp", "behavior_logp", "old_logp"):
        if key in needs:
            value = getattr(batch, key)
            lacking[key] = (
                torch.ones_like(batch.mask[:, 0])
                if value is None
                else (batch.mask & ~value.isfinite()).any(1)
            )
    if "stored_value" in needs:
        value = batch.extra.get("stored_value")
        lacking["stored_value"] = torch.ones_like(batch.mask[:, 0]) if value is None else ~value.isfinite()
    for key, lacks in lacking.items():
        if lacks.any():
            raise Refused(
                lack(name, key, [batch.ids[i] for i in lacks.nonzero().flatten().tolist()], len(lacks))
            )
    if "pairs" in needs:
        check_pairs(name, batch, votes="votes" in needs)


def lack(name: str, field: str, rows: Sequence[str], total: int) -> str:
    """The message for data that lack a field: objective, field, counts, three records, ways out."""
    what = "samples of age 0 (made by the present weights)" if field == "fresh" else field
    return (
        f"objective {name} needs {what}: {total - len(rows)} of {total} rows have it, {len(rows)} don't "
        f"(for one: {'; '.join(rows[:3])}). What to do: {WAYS_OUT[field]}."
    )


def _kept(name: str, needs: set[Need], batch: Batch, options: Mapping[str, Any]) -> Tensor | None:
    """Rows of groups that are large enough, or have a pair where pairs are needed, [K]; None where all are."""
    least = least_responses(needs)
    if least == 1:
        return None
    small = Pairs.of(batch).count == 0 if "pairs" in needs else Groups.of(batch).n < least
    if not small.any():
        return None
    names = [batch.group_names[g] for g in small.nonzero().flatten().tolist()]
    if options.get("singletons") != "drop":
        if "pairs" in needs:
            raise Refused(groups_without_pairs(name, names, batch.n_groups))
        raise Refused(
            f"objective {name} needs groups of at least {least} responses: {len(names)} of {batch.n_groups} groups have fewer "
            f'(for one: {", ".join(names[:3])}). What to do: sample more responses a prompt, or leave such groups out with singletons = "drop".'
        )
    if small.all():
        raise Refused(
            f"objective {name}: none of the {batch.n_groups} groups has {least} responses; nothing is left to learn from"
        )
    return (~small)[batch.group].nonzero().flatten()


def _check_finite(
    name: str, needs: set[Need], grads: Streams, streams: Streams, batch: Batch, rows: Tensor | None
) -> None:
    for s, g in grads.items():
        bad = ~g.isfinite().view(len(g), -1).all(1)
        if rows is not None:
            bad = bad & torch.zeros_like(bad).index_fill(0, rows, True)
        if bad.any():
            row = int(bad.int().argmax())
            seen = {k: getattr(batch, k) for k in ("ref_logp", "behavior_logp", "old_logp") if k in needs}
            far = "".join(
                f", largest |logp - {k}| {float((streams['logp'][row] - v[row])[batch.mask[row]].abs().max()):.4g}"
                for k, v in seen.items()
            )
            raise NotFinite(
                f"objective {name}: the gradient of stream {s} isn't finite in {batch.ids[row]} (a ratio that overflows?){far}. "
                "What to do: leave such rows out (data.max_age), or use an objective without ratios, such as agro."
            )


def as_stream(value: Any, name: str) -> Tensor:
    """A tensor of a stream given as tensor, array or lists."""
    try:
        return value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        shape = "[B]" if name == "value" else "[B,T]"
        raise Refused(f"stream {name}: expected numbers of shape {shape}, got {value!r:.80}") from error


def like(value: Tensor, given: Any) -> Any:
    """`value` in the kind and dtype of `given`: a tensor for a tensor, else an array."""
    if isinstance(given, Tensor):
        return value.to(given.dtype if given.is_floating_point() else torch.float64)
    dtype = np.asarray(given).dtype
    return value.cpu().numpy().astype(dtype if np.issubdtype(dtype, np.floating) else np.float64)
