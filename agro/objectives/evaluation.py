"""The one way to evaluate and differentiate an objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agro.errors import Refused
from agro.io import plugins
from agro.objectives.core import (
    Gradient,
    Objective,
    Options,
    Streams,
    Terms,
    blank,
    masked,
    wanted_streams,
)
from agro.objectives.needs import GROUPS, ColumnNeed, Need, grouping, judging, least_responses, ordered
from agro.objectives.reduce import Groups
from agro.objectives.table import get
from agro.types import Batch, Tensor


class NotFinite(Refused):
    """A stream or a gradient isn't finite in some row."""


@dataclass(frozen=True)
class Evaluation:
    """An objective's value and gradient on one batch. Arrays have the type and dtype of `logp`."""

    loss: float
    grads: dict[str, Any]  # d loss / d stream, of the stream's shape
    metrics: dict[str, float]

    @property
    def grad(self) -> Any:
        """[B,T] d loss / d logp."""
        return self.grads["logp"]


def evaluate(
    name: str, logp: Any, batch: Batch, *, streams: Mapping[str, Any] | None = None, **options: Any
) -> Evaluation:
    """Compute an objective's value and gradient at these log-probs, in float64.

    `logp` [B,T] and each of `streams` ("kl", "entropy", "prefix_value" [B,T]; "value" [B]) may be tensors,
    arrays or lists; the gradients come back as tensors for a tensor, else as arrays, in the dtype of `logp`.
    Positions outside the mask may hold any value; their gradient is exactly 0. The objective reads only what
    it needs.

    Raises `Refused`, naming the objective, the field and the rows, if the batch lacks what it needs.
    """
    entry = get(name)
    resolved = entry.resolve(name, options)
    if "logp" in (streams or {}):
        raise Refused(
            f"objective {name}: streams: logp is the second argument; streams holds what else is needed"
        )
    needs = entry.needs(resolved)
    given = {"logp": logp} | {key: value for key, value in (streams or {}).items() if key in needs}
    tensors = {key: as_stream(value, key) for key, value in given.items()}
    result = differentiate(name, entry, tensors, batch.to(tensors["logp"].device), resolved)
    return Evaluation(result.loss, {k: like(g, logp) for k, g in result.grads.items()}, result.metrics)


def differentiate(
    name: str,
    objective: Objective,
    streams: Streams,
    batch: Batch,
    options: Options,
    rows: Tensor | None = None,
) -> Evaluation:
    """Compute value and gradient of `objective` with resolved options; see `evaluate`.

    If `rows` [K] is given, only the streams of these rows are valid (the others may hold any finite number):
    only their gradients are valid and checked, and loss and metrics are meaningless.
    """
    needs = objective.needs(options)
    check(name, needs, streams, batch)
    judged, pairs = batch, judging(needs)
    batch, dropped = (batch, 0) if pairs is None else pairs.without_ties(batch)
    if options.get("singletons") == "pool":
        judged = batch = pool_singletons(batch)
        needs = needs | {GROUPS}
    keep = _valid_rows(name, needs, batch, options, judged)
    part = batch if keep is None else batch.rows(keep)
    if not part.weight.any():
        raise Refused(
            f"objective {name}: weight: all {len(part.weight)} rows have weight 0: nothing to learn from"
        )
    leaves = {s: _leaf(name, s, streams[s], part, keep) for s in wanted_streams(needs)}
    with plugins.errors_of(objective.function, f"objective {name}"):
        terms = objective.function(leaves, part, **objective.function_options(options))
    if not isinstance(terms, Terms):
        raise Refused(f"objective {name}: expected Terms(loss, …), got {type(terms).__name__}")
    target = terms.loss if terms.surrogate is None else terms.surrogate
    if not (isinstance(target, torch.Tensor) and target.numel() == 1 and target.requires_grad):
        raise Refused(
            f"objective {name}: expected a loss that is one number and depends on the policy, got "
            f"{target!r:.80}. What to do: compute it from streams, without detaching all, and average it "
            "(Groups.average_responses)"
        )
    raw = torch.autograd.grad(target, list(leaves.values()), allow_unused=True, materialize_grads=True)
    gradients = {stream: masked(part, grad, stream) for stream, grad in zip(leaves, raw, strict=True)}
    # A user's objective may return its loss and metrics as plain numbers.
    with plugins.errors_of(objective.function, f"objective {name}"):
        metrics = {key: _number(value) for key, value in terms.metrics.items()}
        loss = _number(terms.loss)
    for ingredient in objective.parts:
        stream = ingredient.stream
        if stream in leaves:
            gradient = Gradient(loss, gradients[stream], metrics)
            gradient = ingredient.apply(options, leaves[stream], part, gradient)
            loss, gradients[stream], metrics = gradient.loss, gradient.logp_BT, dict(gradient.metrics)
    if keep is not None:  # 0 in the dropped rows
        gradients = {s: blank(batch, s).index_copy(0, keep, grad) for s, grad in gradients.items()}
    _check_gradients(name, needs, loss, gradients, batch, rows)
    if least_responses(needs) > 1:
        metrics["singletons_dropped"] = float(batch.n_groups - part.n_groups)
    if dropped:
        metrics["ties_dropped"] = float(dropped)
    return Evaluation(loss, gradients, metrics)


def _number(value: Tensor | float) -> float:
    return float(torch.as_tensor(value, dtype=torch.float64).detach())


def pool_singletons(batch: Batch) -> Batch:
    """Merge the groups of one response into one group, whose weight is the sum of theirs."""
    groups = Groups.of(batch)
    alone_G = groups.n == 1
    if not alone_G.any():
        return batch
    alone_B, together = alone_G[batch.group], groups.weight[alone_G].sum().to(batch.weight.dtype)
    pooled = batch.replace(
        group=torch.where(alone_B, batch.n_groups, batch.group),
        group_names=(*batch.group_names, "groups of one response"),
        weight=torch.where(alone_B, together, batch.weight),
    )
    return pooled.rows(torch.arange(len(batch.mask), device=batch.mask.device))


def check(name: str, needs: set[Need], streams: Streams, batch: Batch) -> None:
    """Raise `Refused` if a stream or the batch lacks what the objective needs."""
    for stream in wanted_streams(needs):
        if stream not in streams:
            raise Refused(
                f'objective {name} needs the stream "{stream}", which wasn\'t given; got {", ".join(streams)}'
            )
        expected, got = list(blank(batch, stream).shape), list(streams[stream].shape)
        if got != expected:
            raise Refused(f"objective {name}: stream {stream}: expected shape {expected}, got {got}")
    for need in ordered(needs):
        need.check(name, batch)


def _valid_rows(name: str, needs: set[Need], batch: Batch, options: Options, judged: Batch) -> Tensor | None:
    """[K] the rows of groups that are large enough, or have a pair if pairs are needed; None for all rows.

    `judged` is the batch including its ties. A group that has only ties is dropped, as the ties are.
    """
    need = grouping(needs)
    if need is None:
        return None
    small_G = need.too_small(batch)
    if not small_G.any():
        return None
    lacking_G = small_G if judged is batch else need.too_small(judged)
    if options.get("singletons", "error") == "error" and lacking_G.any():
        groups = [batch.group_names[g] for g in lacking_G.nonzero().flatten().tolist()]
        raise need.refusal(name, groups, batch.n_groups, "groups")
    if small_G.all():
        raise Refused(
            f"objective {name} needs {need.what}: 0 of {batch.n_groups} groups have it; all were dropped"
        )
    return (~small_G)[batch.group].nonzero().flatten()


def _leaf(name: str, stream: str, value: Tensor, part: Batch, keep: Tensor | None) -> Tensor:
    """Make a float64 leaf of a stream's remaining rows, 0 outside the mask; raises `NotFinite`."""
    selected = value if keep is None else value[keep]
    leaf = masked(part, selected.detach().double(), stream).requires_grad_()
    bad_B = ~leaf.isfinite().view(len(leaf), -1).all(1)
    if bad_B.any():
        raise NotFinite(
            f"objective {name}: stream {stream}: expected finite numbers inside the mask, got a non-finite "
            f"one in {part.ids[int(bad_B.int().argmax())]}"
        )
    return leaf


def _check_gradients(
    name: str, needs: set[Need], loss: float, grads: Streams, batch: Batch, rows: Tensor | None
) -> None:
    for stream, grad in grads.items():
        bad_B = ~grad.isfinite().view(len(grad), -1).all(1)
        if rows is not None:
            bad_B = bad_B & torch.zeros_like(bad_B).index_fill(0, rows, True)
        if bad_B.any():
            part = f"gradient of stream {stream}" if math.isfinite(loss) else "loss"
            problem = f"objective {name}: the {part} isn't finite in {batch.ids[int(bad_B.int().argmax())]}"
            if any(isinstance(need, ColumnNeed) and need.is_logp for need in needs):
                problem += (
                    " (does a ratio overflow?). What to do: exclude such rows (data.max_age), or use an "
                    "objective without ratios, such as agro."
                )
            raise NotFinite(problem)


def as_stream(value: Any, name: str) -> Tensor:
    """Convert a stream given as a tensor, array or lists to a tensor."""
    try:
        dtype = None if hasattr(value, "dtype") else np.float64  # of lists, in which None is NaN
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value, dtype))
    except (TypeError, ValueError) as error:
        shape = "[B]" if name == "value" else "[B,T]"
        raise Refused(f"stream {name}: expected numbers of shape {shape}, got {value!r:.80}") from error


def like(value: Tensor, example: Any) -> Any:
    """Convert `value` to the type and dtype of `example`: a tensor for a tensor, else an array."""
    if isinstance(example, torch.Tensor):
        return value.to(example.dtype if example.is_floating_point() else torch.float64)
    dtype = np.asarray(example).dtype
    return value.cpu().numpy().astype(dtype if np.issubdtype(dtype, np.floating) else np.float64)
