"""Objectives on judged pairs: equalities with the published losses, numbers by hand, and what is refused."""

from __future__ import annotations

import re
from math import exp
from typing import Any

import numpy as np
import pytest
from cases import at, change, draw, evaluate, of_one_token

from agro.errors import Refused
from agro.objectives import Evaluation

BOTH = ("dpo", "pair_consistency")
# Rows 0 to 5 are ρ = log-ratios of one token each, so that h of (i, j) is RATIO[i] - RATIO[j].
RATIO = [0.0, -1.0, 0.5, -2.0, 0.0, -0.25]


def on(name: str, pairs: Any, *, batch: Any = (), **options: Any) -> Evaluation:
    """Of two groups of three; log π_ref is −3."""
    given: dict[str, Any] = {"reward": [np.nan] * 6, "ids": [f"sample {i}" for i in range(1, 7)]}
    six = of_one_token(group=[*"aaabbb"], ref_logp=-3.0, pairs=pairs, **given | dict(batch))
    return at([-3.0 + x for x in RATIO], name, six, **{"beta": 0.4} | options)


def test_all_pairs_of_a_group_with_their_rewards_are_agro() -> None:
    """The mean over pairs of ¼ (R_i - R_j)² is ½ Var(R), n - 1 in it (statement 10 summed).

    It doesn't matter who is called the winner.
    """
    case = draw(0, sizes=(2, 5))
    members = {
        g: list(dict.fromkeys(y for y, h in zip(case.response, case.group) if h == g)) for g in case.group
    }
    every = [(a, b) for m in members.values() for i, a in enumerate(m) for b in m[:i]]
    judged = change(case, pairs=every, votes=[(0.0, 0.0)] * len(every))
    pairs = evaluate(judged, "pair_consistency", {"beta": 0.3, "gap": "reward"})
    agro = evaluate(case, "agro", {"beta": 0.3, "scale": "loss"})
    assert pairs.loss == pytest.approx(agro.loss, rel=1e-13)
    np.testing.assert_allclose(pairs.grad, agro.grad, atol=1e-14)
    turned = change(judged, pairs=[(b, a) for a, b in every])
    np.testing.assert_array_equal(
        evaluate(turned, "pair_consistency", {"beta": 0.3, "gap": "reward"}).grad, pairs.grad
    )


@pytest.mark.parametrize("name", BOTH)
def test_rewards_are_not_looked_at(name: str) -> None:
    """Two rows of one response with different ones, which an objective on rewards refuses."""
    batch = {"reward": [1.0, 0.0, 0.0, 1.0, 1.0, 1.0], "response": [0, 0, 1, 2, 3, 4]}
    assert np.isfinite(on(name, [(1, 2), (3, 4)], batch=batch).loss)


ROWS = "0 of 6 rows have it, 6 don't (for one: sample 1; sample 2; sample 3)"
VOTES = 'of 3 pairs have it, {} don\'t .*sample 3 over sample 2; sample 4 over sample 6.*votes = "ignore"'
JOINED = "expected each to join two responses to one prompt, but 1 of 3 pairs don't .*sample 1 over sample {}"
THREE = [(0, 1), (2, 1), (3, 5)]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("pairs", "batch", "options", "said"),
    [
        (None, {}, {}, f"needs pairs.*{re.escape(ROWS)}.*agro import"),
        ([], {}, {}, f"needs pairs.*{re.escape(ROWS)}.*agro import"),
        ([(3, 5)], {}, {}, r"1 of 2 groups have it, 1 don't \(for one: a\).*objective.singletons=drop"),
        ([(0, 2), (0, 3), (3, 4)], {}, {}, JOINED.format(4)),
        ([(0, 2), (0, 0), (3, 4)], {}, {}, JOINED.format(1)),
        ([(0, 2), (0, 1), (3, 4)], {"response": [0, 0, 1, 2, 3, 4]}, {}, JOINED.format(2)),
        (THREE, {"votes": None}, {"votes": "mean"}, VOTES.format(3)),
        (THREE, {"votes": [(3, 1), (np.nan, 2), (1, np.nan)]}, {"votes": "mean"}, VOTES.format(2)),
        ([(0, 1), (3, 4)], {"votes": [(1.0, 1.0)] * 2}, {}, "all 2 pairs are equal .*sample 1 over sample 2"),
    ],
    ids=["no pairs", "an empty list", "a group without", "two prompts", "itself", "one response", "no votes",
         "some votes", "ties alone"],
)  # fmt: skip
def test_pairs_that_are_refused(name: str, pairs: Any, batch: Any, options: Any, said: str) -> None:
    with pytest.raises(Refused, match=rf"(?s)objective {name}.*{said}") as caught:
        on(name, pairs, batch=batch, **options)
    assert "What to do" in str(caught.value)


def test_a_group_without_a_pair_may_be_dropped() -> None:
    out = on("dpo", [(3, 5)], singletons="drop")
    assert out.metrics["singletons_dropped"] == 1
    assert (out.grad[:3] == 0).all()


TIED = {"votes": [(2.0, 2.0), (1.0, 0.0), (0.5, 0.5)]}  # group b has nothing else
TIED_PAIRS = [[0, 1], [2, 1], [3, 4]]


@pytest.mark.parametrize("name", ["dpo", "ipo", "slic", "seppo", "pair_consistency"])
def test_a_tie_is_no_pair_unless_votes_are_read(name: str) -> None:
    """The result is that of the pair with a winner alone; the ties are counted."""
    out = on(name, TIED_PAIRS, batch=TIED, imitation=0.3)
    alone = on(name, [[2, 1]], batch=TIED | {"votes": [(1.0, 0.0)]}, imitation=0.3, singletons="drop")
    assert out.metrics.pop("ties_dropped") == 2
    assert (out.loss, out.metrics) == (alone.loss, alone.metrics)
    np.testing.assert_array_equal(out.grad, alone.grad)


@pytest.mark.parametrize("name", ["dpo", "ipo", "pair_consistency"])
def test_votes_of_a_tie_are_read(name: str) -> None:
    """p = ½: the loss is least at h = 0, whichever of the two stands first; neither is praised."""
    how: dict[str, Any] = {"votes": "mean", "imitation": 0.3, "singletons": "drop"}
    of_winner = 0.0
    if name == "dpo":
        # −0.2 log σ(β ρ) in the one winner's log-prob, ρ = ½; of two pairs it is half of that
        how["winner"], of_winner = 0.2, 0.5 * 0.2 * 0.4 / (1 + exp(0.4 * 0.5))
    votes = {"votes": [(2.0, 2.0), (1.0, 0.0)]}
    out, turned = (on(name, [tied, [2, 1]], batch=votes, **how) for tied in ([0, 1], [1, 0]))
    assert out.loss == pytest.approx(turned.loss, rel=1e-14)
    np.testing.assert_allclose(out.grad, turned.grad, rtol=1e-13)
    assert out.metrics == turned.metrics
    assert out.grad[:3, 1].sum() == pytest.approx(-0.3 - of_winner, rel=1e-12)
