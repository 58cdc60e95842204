"""What an objective reads, of which tokens and of which rows: nothing beyond what it declares."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cases import (
    DRAWN,
    TOKEN_STREAMS,
    VARIANTS,
    Case,
    batch_of,
    by_objective,
    change,
    draw,
    draw_for,
    evaluate,
    streams_of,
)

from agro import Batch, objectives
from agro.errors import Refused
from agro.objectives import Evaluation, differentiate, get
from agro.objectives import needs as all_needs
from agro.objectives.core import STREAMS
from agro.objectives.evaluation import as_stream

EVERY = by_objective(VARIANTS)


class Poison:
    """Stands where nobody may look."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a field that isn't needed was read")


def identical(a: Evaluation, b: Evaluation) -> None:
    assert a.loss == b.loss
    assert a.grads.keys() == b.grads.keys()
    for stream in a.grads:
        np.testing.assert_array_equal(a.grads[stream], b.grads[stream])
    np.testing.assert_equal(a.metrics, b.metrics)  # for which NaN, an unknown, is NaN


def outcome(case: Case, name: str, options: dict[str, Any], batch: Batch, streams: Any) -> Any:
    """All that an evaluation gives, in a form that compares; the text of a refusal where it is refused."""
    try:
        out = objectives.evaluate(name, case.logp, batch, streams=streams, **options)
    except Refused as error:
        return str(error)
    grads = {key: grad.tobytes() for key, grad in out.grads.items()}
    return out.loss, grads, {key: str(value) for key, value in out.metrics.items()}


def measured_needs(name: str, options: dict[str, Any], needs: set[Any]) -> set[str]:
    """Of what can be withheld or changed by itself, what the result depends on."""
    case = draw_for(needs, 20, sizes=(3, 4), spread=1.0)
    batch, streams = batch_of(case), streams_of(case)
    whole = outcome(case, name, options, batch, streams)
    rng = np.random.default_rng(20)
    used = set()

    def depends(batch: Batch, streams: Any = streams) -> bool:
        return bool(outcome(case, name, options, batch, streams) != whole)

    one_a_response = (all_needs.REWARD, all_needs.MEANING, all_needs.STORED_QUANTILE)
    one_a_group = (all_needs.STORED_VALUE, all_needs.HINTED, all_needs.REWARD_PARTS, all_needs.PART_WEIGHTS)
    drawn = (all_needs.REF_LOGP, all_needs.BEHAVIOR_LOGP, all_needs.OLD_LOGP, all_needs.DRAWN_VALUE)
    for need in (*one_a_response, *drawn, *one_a_group):
        value = need.of(batch)
        index = batch.response if need in one_a_response else batch.group
        noise = torch.as_tensor(rng.normal(size=value.shape if value.dim() == 2 else int(index.max()) + 1))
        changed = value + (noise if value.dim() == 2 else noise[index])
        extra = {**batch.extra, need: changed}
        if depends(batch.replace(extra=extra) if need in batch.extra else batch.replace(**{need: changed})):
            used.add(str(need))
    if depends(batch.replace(votes=batch.votes + 1)):
        used.add("votes")
    used |= {str(need) for need in (all_needs.FRESH, all_needs.PAIRS) if depends(need.without(batch))}
    of_reference = all_needs.OF_REFERENCE
    if of_reference.what in str(outcome(case, name, options, of_reference.without(batch), streams)):
        used.add("of_reference")
    without = {stream: {k: v for k, v in streams.items() if k != stream} for stream in STREAMS[1:]}
    used |= {stream for stream, others in without.items() if depends(batch, others)}
    if "pairs" not in used:
        few = [n for n in (1, 2, 3) if is_accepted(name, options, needs, n)]
        used |= {1: set(), 2: {"groups"}, 3: {"triples"}}[few[0]]
    return used


def reads_roles(needs: set[Any]) -> bool:
    return any(getattr(need, "but_experts", False) for need in needs)


def is_accepted(name: str, options: dict[str, Any], needs: set[Any], responses: int) -> bool:
    case = draw_for(needs, 21, sizes=(responses, responses))
    return not isinstance(outcome(case, name, options, batch_of(case), streams_of(case)), str)


@EVERY
def test_declared_needs_are_those_measured(name: str, options: dict[str, Any], needs: set[str]) -> None:
    """What is declared is refused where it is missing, and changes the result.

    What isn't declared does neither.
    """
    measured = measured_needs(name, options, needs)
    if name == "bapo":  # it counts in a search, which may end where it did
        measured.add("behavior_logp")
    assert measured == needs - {"rows"}


@EVERY
def test_what_is_not_needed_is_not_read(name: str, options: dict[str, Any], needs: set[str]) -> None:
    """Missing, NaN in every place, or an object that breaks whoever touches it: the same to the last bit.

    Votes say of pairs which are ties; there are none in these cases.
    """
    case = draw_for(needs, 0)
    whole = evaluate(case, name, options)
    nothing = np.full(case.mask.shape, np.nan)
    given = {k: v for k, v in streams_of(case).items() if k in needs}

    def same(batch: Batch, other: Any) -> None:
        """Also where streams that aren't needed are `other`, if that isn't None."""
        others = {} if other is None else dict.fromkeys(("entropy", *streams_of(case)), other)
        identical(
            whole, objectives.evaluate(name, case.logp, batch, streams=others | given or None, **options)
        )

    unread = [f for f in (*DRAWN, "votes") if f not in needs]
    of_rows = {"reward": "reward", "fresh": "staleness"}
    unread_rows = [field for need, field in of_rows.items() if need not in needs]
    rows: dict[str, Any] = {field: [np.nan] * len(case.mask) for field in unread_rows}
    read_besides = ("token_reward",) if name in ("ppo", "prefix_consistency", "oreo") else ()
    extra = {k: v for k, v in batch_of(case).extra.items() if k in needs or k in read_besides}
    same(batch_of(case, **dict.fromkeys(unread), **rows, extra=extra), None)

    judged: dict[str, Any] = {}
    if "pairs" not in needs:
        judged = {"pairs": [[0, 1]], "votes": [[1, 0]]}
    elif "votes" not in needs:
        judged = {"votes": [[np.nan, np.nan]] * len(case.pairs)}
    if not reads_roles(needs):
        rows["role"] = "expert"
    same(batch_of(case, **dict.fromkeys(unread, nothing) | rows | judged), nothing)

    spare = {f for f in ("pairs", "tokens", "lengths") if f not in needs} | {*unread, *unread_rows}
    if "pairs" in needs:
        spare.discard("votes")
    if not reads_roles(needs):
        spare.add("role")
    known = batch_of(case, extra=extra).extra
    same(batch_of(case).replace(**dict.fromkeys(spare, Poison()), extra=known), Poison())


def test_sft_needs_neither_groups_nor_weights_alike_in_them() -> None:
    case = draw(1)
    whole = objectives.evaluate("sft", case.logp, batch_of(case))
    alone = batch_of(case, group=["all of them"] * len(case.mask), response=None)
    identical(whole, objectives.evaluate("sft", case.logp, alone))


@EVERY
def test_masked_positions_say_nothing_and_get_0(name: str, options: dict[str, Any], needs: set[str]) -> None:
    case = draw_for(needs, 2, junk=False)
    clean = evaluate(case, name, options)
    for junk in (np.nan, np.inf, -np.inf, 1e308, -1e308):
        dirty = change(
            case, **{k: np.where(case.mask, getattr(case, k), junk) for k in (*TOKEN_STREAMS, *DRAWN)}
        )
        found = evaluate(dirty, name, options)
        identical(clean, found)
        for stream, grad in found.grads.items():
            assert stream == "value" or (grad[~case.mask] == 0).all()


def test_masked_positions_of_lists_may_be_none() -> None:
    case = draw(1)
    batch, rows = batch_of(case), np.where(case.mask, case.logp, None).tolist()
    identical(objectives.evaluate("sft", case.logp, batch), objectives.evaluate("sft", rows, batch))


def test_arrays_of_other_libraries_keep_their_dtype() -> None:
    class Array:
        dtype = "another library's"

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.ones((1, 2), np.float32 if dtype is None else dtype)

    assert as_stream(Array(), "logp").dtype == torch.float32


def grads_of(
    name: str, options: dict[str, Any], batch: Batch, streams: dict[str, Any], rows: list[int]
) -> Any:
    """Gradients of `rows`, as the step takes them when it holds no streams but theirs."""
    entry = get(name)
    given = {k: torch.as_tensor(v) for k, v in streams.items()}
    out = differentiate(name, entry, given, batch, entry.resolve(name, options), torch.as_tensor(rows))
    return {k: v[rows].numpy() for k, v in out.grads.items()}


PIECEWISE = ("slic", "seppo", "online_dpo")


def is_of_step(name: str, options: dict[str, Any]) -> bool:
    """Whether a row's gradient may depend on every other row's streams."""
    return (
        name in ("m2po", "bapo", "bapo_code", "middle_band")
        or (name == "kto" and "kl" not in options)
        or (name == "guide" and "gamma" not in options)
        or options.get("baseline") == "step"
        or "normalize" in options
    )


@EVERY
def test_declared_coupling_is_true(name: str, options: dict[str, Any], needs: set[str]) -> None:
    """The streams of other responses ("row") or groups ("group") may be anything.

    A row's gradient is the same to the last bit. And a coupling of "group" isn't declared for nothing; of
    objectives that take some pairs alone, or whose slope is constant, nothing beyond it moves. That of "step"
    is a list (`is_of_step`), not a measurement.
    """
    coupling = objectives.describe(name, **options)["couples"]
    assert (coupling == "step") == is_of_step(name, options)
    if coupling == "step":
        return
    case, rng = draw_for(needs, 3, groups=3), np.random.default_rng(3)
    batch = batch_of(case)
    whole = {"logp": case.logp, **{k: np.asarray(v) for k, v in streams_of(case).items()}}
    own = evaluate(case, name, options).grads
    whose = case.response if coupling == "row" else case.group
    units = [[i for i, h in enumerate(whose) if h == g] for g in dict.fromkeys(whose)]
    for rows in units:
        others = np.setdiff1d(np.arange(len(case.mask)), rows)
        for noise in (-1e4, 0.0, rng.normal(size=(len(others), case.mask.shape[1]))):
            changed = {k: v.copy() for k, v in whole.items()}
            for v in changed.values():
                v[others] = noise if v.ndim == 2 or np.ndim(noise) == 0 else noise[:, 0]
            for stream, grad in grads_of(name, options, batch, changed, rows).items():
                np.testing.assert_array_equal(grad, own[stream][rows])
    if coupling == "group":
        piecewise = name in PIECEWISE or "weight_baseline" in options
        piecewise |= options.get("equivalent") == "meaning"  # where no meaning of a group is good
        rows = units[0]
        first = case.pairs[0][0] if "pairs" in needs else case.response[rows[0]]
        coupled = set(case.response)
        if "pairs" in needs:
            coupled = {y for pair in case.pairs if first in pair for y in pair}
        changed = {k: v.copy() for k, v in whole.items()}
        changed["logp"][case.response.index(first)] -= 1.0
        moved = grads_of(name, options, batch, changed, rows)
        for i, row in enumerate(rows):
            found = any((grad[i] != own[stream][row]).any() for stream, grad in moved.items())
            assert found <= (case.response[row] in coupled)
            assert piecewise or found == (case.response[row] in coupled)
