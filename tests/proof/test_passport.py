"""Passports: every objective has one, all of it holds, and a broken objective loses it by name."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from agro import objectives
from agro.cli import app
from agro.objectives import OBJECTIVES
from agro.objectives.core import VALUES, Terms
from agro.objectives.needs import GROUPS, PAIRS, TRIPLES, provided_by
from agro.objectives.pairs import Pairs
from agro.objectives.reduce import Groups
from agro.proof import passport as module
from agro.proof.claims import CLAIMS
from agro.proof.ends import end
from agro.proof.measuring import Row, Subject
from agro.proof.passport import passport


def test_every_objective_declares_its_claims() -> None:
    assert CLAIMS.keys() == OBJECTIVES.keys()
    assert all(CLAIMS.values())


def prove(*args: str):
    return CliRunner().invoke(app, ["prove", *args])


def test_agro_holds_all_that_is_claimed() -> None:
    """End points under three covering behaviors, and the bias of the estimator."""
    done = prove("agro", "--json")
    assert done.exit_code == 0
    rows = json.loads(done.stdout)
    fields = {"objective", "property", "setting", "value", "bound", "side", "holds"}
    assert all(set(r) == fields for r in rows)
    assert {(r["side"] is None, r["bound"] is None, r["holds"] is None) for r in rows} == {
        (True,) * 3,
        (False,) * 3,
    }
    assert {r["side"] for r in rows} == {None, "at most", "at least"}
    ends = [r for r in rows if r["property"].startswith("KL to the optimum")]
    for where in ("reference", "uniform", "stale"):
        found = [
            r
            for r in ends
            if f"data from {where}, start at reference" in r["setting"] and "scale=" in r["setting"]
        ]
        assert len(found) == 2
        assert all(0 <= r["value"] <= 1e-12 and r["holds"] for r in found)
        weighted = [
            r
            for r in ends
            if f"data from {where}, start at reference" in r["setting"] and "weight=" in r["setting"]
        ]
        assert [0 <= r["value"] <= 1e-12 and r["holds"] for r in weighted] == [True]
    biases = [r for r in rows if r["property"] == "expected gradient"]
    assert (
        len(biases) == (4 * 5 + 2 * 1) * 3 * 2
    )  # five behaviors, or the policy alone; three policies; n = 2 and 3
    assert max(r["value"] for r in biases) <= 1e-12
    estimates = [
        r["value"] for r in rows if r["property"].startswith("variance of the regularizer's estimate")
    ]
    assert len(estimates) == 3
    assert estimates[0] > estimates[1] > estimates[2] > 0


def test_the_policy_gradient_with_a_kl_term_ends_elsewhere_off_policy() -> None:
    for where in ("reference", "uniform", "stale"):
        assert end(Subject("kl_pg", CLAIMS["kl_pg"][0]), where).distance[-1].median() > 1e-2


def _flip(terms: Terms) -> Terms:
    return replace(terms, loss=-terms.loss, surrogate=None if terms.surrogate is None else -terms.surrogate)


def _scale(terms: Terms) -> Terms:
    return replace(
        terms, loss=0.9 * terms.loss, surrogate=None if terms.surrogate is None else 0.9 * terms.surrogate
    )


@pytest.mark.parametrize("how", [_flip, _scale])
@pytest.mark.parametrize("name", objectives.names())
def test_a_flipped_sign_or_a_wrong_denominator_is_named(name: str, how, monkeypatch) -> None:
    monkeypatch.setattr(module, "ends", lambda *_: iter(()))  # slow, and not needed to see it
    entry = OBJECTIVES[name]
    broken = functools.wraps(entry.function)(lambda *a, **o: how(entry.function(*a, **o)))
    monkeypatch.setitem(OBJECTIVES, name, replace(entry, function=broken))
    done = prove(name)
    assert done.exit_code == 1
    assert f"agro: {name}: expected gradient (" in done.stderr


BASELINES = [n for n in CLAIMS if any({GROUPS, TRIPLES} & OBJECTIVES[n].needed(c.options) for c in CLAIMS[n])]


@pytest.mark.parametrize("name", BASELINES)
def test_a_dropped_baseline_is_named(name: str, monkeypatch) -> None:
    monkeypatch.setattr(module, "ends", lambda *_: iter(()))
    for mean in ("mean", "mean_others"):
        monkeypatch.setattr(Groups, mean, lambda self, v: torch.zeros_like(v))
    done = prove(name)
    assert done.exit_code == 1
    assert f"agro: {name}: expected gradient (" in done.stderr


@pytest.mark.parametrize(
    "name", [name for name, entry in OBJECTIVES.items() if provided_by("value_head", entry.needed({}))]
)
def test_a_dropped_value_is_named(name: str, monkeypatch) -> None:
    monkeypatch.setattr(module, "ends", lambda *_: iter(()))
    entry = OBJECTIVES[name]

    @functools.wraps(entry.function)
    def without(streams, batch, **options):
        return entry.function(
            {k: 0.0 * v if k in VALUES else v for k, v in streams.items()}, batch, **options
        )

    monkeypatch.setitem(OBJECTIVES, name, replace(entry, function=without))
    done = prove(name)
    assert done.exit_code == 1
    assert f"agro: {name}: expected gradient (" in done.stderr


@pytest.mark.parametrize("name", [name for name, entry in OBJECTIVES.items() if PAIRS in entry.needed({})])
def test_a_forgotten_loser_is_named(name: str, monkeypatch) -> None:
    """The other response of a pair is its baseline."""
    monkeypatch.setattr(module, "ends", lambda *_: iter(()))
    monkeypatch.setattr(Pairs, "gap", lambda self, v: v[self.winner])
    done = prove(name)
    assert done.exit_code == 1
    assert f"agro: {name}: expected gradient (" in done.stderr


def test_a_need_that_is_not_refused_is_named(monkeypatch) -> None:
    monkeypatch.setattr(module, "differentiate", lambda *_: None)
    row = module.needs(Subject("agro", CLAIMS["agro"][0]))
    assert row.holds is False
    assert row.value == 0


def test_the_side_of_a_bound() -> None:
    subject = Subject("agro", CLAIMS["agro"][0])
    below, above = subject.row("p", "s", 1.0, most=2.0), subject.row("p", "s", 1.0, least=2.0)
    assert (below.bound, below.side, below.holds) == (2.0, "at most", True)
    assert (above.bound, above.side, above.holds) == (2.0, "at least", False)
    assert subject.row("p", "s", 1.0) == Row("agro", "p", "scale=loss, s", 1.0, None, None, None)


def test_an_unknown_name_is_refused() -> None:
    done = prove("agr")
    assert done.exit_code == 2


@pytest.mark.parametrize("name", [n for n in objectives.names() if n != "agro"])
def test_the_others_hold_what_is_claimed(name: str) -> None:
    rows = list(passport(name))
    assert [r for r in rows if r.holds is False] == []
    assert all(math.isfinite(r.value) for r in rows)
