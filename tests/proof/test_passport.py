"""Passports: every objective has one, all of it holds, and a broken objective loses it by name."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch
from tiers import first_of_each, some
from typer.testing import CliRunner

from agro import objectives
from agro.cli import app
from agro.models.policy import VALUES
from agro.objectives import NotFinite, Objective, advantage, get, names, reduce, table
from agro.objectives.core import Ingredient
from agro.objectives.ingredients import (
    IMITATION,
    IMITATION_OF_WINNERS,
    KL_TERM,
    WEIGHT,
    WEIGHT_BASELINE,
    WEIGHT_BASELINE_OF_PAIRS,
)
from agro.objectives.needs import BEHAVIOR_LOGP, GROUPS, PAIRS, TRIPLES, provided_by
from agro.objectives.reduce import Groups, Pairs
from agro.proof import claims as of_agro
from agro.proof import passport as module
from agro.proof.claim import DESCENT
from agro.proof.claims import claims_of
from agro.proof.ends import LAMBERT, TEACHER, ends, own_ends
from agro.proof.formulas import Situation
from agro.proof.measuring import BETA, SMALL, ProofRow, Subject, problem
from agro.proof.passport import passport
from agro.train import step
from agro.types import Batch
from agro_papers import claims as papers


def test_every_objective_declares_its_claims() -> None:
    assert all(map(claims_of, names()))


def put(patch: pytest.MonkeyPatch, name: str, entry: Objective) -> None:
    """In the place of the objective of that name."""
    patch.setitem(table.OBJECTIVES if name in table.OBJECTIVES else table.installed(), name, entry)


def first_claim(patch: pytest.MonkeyPatch, name: str) -> None:
    """Of an objective, without its others."""
    patch.setitem(of_agro.CLAIMS if name in of_agro.CLAIMS else papers.CLAIMS, name, claims_of(name)[:1])


def prove(*args: str):
    return CliRunner().invoke(app, ["prove", *args])


@pytest.mark.nightly
def test_agro_holds_all_that_is_claimed() -> None:
    """End points under three covering behaviors, and the bias of the estimator."""
    done = prove("agro", "--json")
    assert done.exit_code == 0
    rows = json.loads(done.stdout)
    fields = {"objective", "property", "setting", "value", "bound", "side", "holds"}
    assert all(set(r) == fields for r in rows)
    unknown = {tuple(r[key] is None for key in ("side", "bound", "holds")) for r in rows}
    assert unknown == {(True,) * 3, (False,) * 3}
    assert {r["side"] for r in rows} == {None, "at most", "at least"}
    ends = [r for r in rows if r["property"].startswith("KL to the optimum")]
    for where in ("reference", "uniform", "stale"):
        of = [r for r in ends if f"data from {where}, start at reference" in r["setting"]]
        found = [r for r in of if "scale=" in r["setting"]]
        assert len(found) == 2
        assert all(0 <= r["value"] <= 1e-12 and r["holds"] for r in found)
        weighted = [r for r in of if "weight=" in r["setting"]]
        assert [r["value"] >= 0 and r["holds"] for r in weighted] == [True] * 5  # three with a baseline
    biases = [r for r in rows if r["property"] == "expected gradient"]
    # Each claim for five behaviors, or the policy or the reference alone; three policies; each size of
    # groups. Of two of the five behaviors: all sizes together, groups of one dropped, and episodes where they
    # aren't refused.
    every, counts = 0, {"n=2 and 3": 0, "n=1 and 2": 0, "two rows each": 0}
    for claims in claims_of("agro"):
        is_of_one = bool({"fresh", "of_reference"} & set(claims.needs))
        behaviors, two = (1, 1) if is_of_one else (5, 2)
        every += behaviors * 3 * len(claims.n) + two * (1 + claims.grouped + claims.episodes)
        counts["n=2 and 3"] += two * (claims.n == (2, 3))
        counts["n=1 and 2"] += two * ((claims.n == (1, 2)) + (claims.grouped and claims.n[0] == 2))
        counts["two rows each"] += two * claims.episodes
    assert len(biases) == every
    for setting, count in counts.items():
        assert sum(setting in r["setting"] for r in biases) == count
    assert max(r["value"] for r in biases) <= 1e-12
    estimated = "variance of the regularizer's estimate"
    estimates = [r["value"] for r in rows if r["property"].startswith(estimated)]
    assert len(estimates) == 3
    assert estimates[0] > estimates[1] > estimates[2] > 0


def test_another_end_than_the_claimed_is_named() -> None:
    """sft ends at the policy that wrote the samples, not at the reference."""
    claims = claims_of("sft")[0]
    assert [row.holds for row in own_ends(Subject("sft", claims))] == [True] * 4
    other = Subject("sft", replace(claims, updates=200, end=TEACHER))
    assert [row.holds for row in own_ends(other)][1:3] == [False] * 2  # the others are of the reference


def test_a_descent_that_is_not_claimed_to_arrive_is_long_enough_to() -> None:
    """So one that stays away from the optimum would, however long it went on."""
    near = ends(Subject("agro", replace(claims_of("agro")[0], updates=DESCENT, ends="unknown")))
    values = [row.value for row in near if "lacks support" not in row.setting]
    assert len(values) == 5
    assert max(values) < 1e-4


def test_the_end_of_squares_without_ratios_solves_its_equation() -> None:
    """β log u + ν u = (1 − 1/n)(r − E_μ r) with one ν ≥ 0 for each prompt, and Σ μ u = 1."""
    policy, reference, behaviors, reward = problem(SMALL)
    s = Situation(policy, reference, behaviors["stale"], reward, BETA, 3)
    logp = LAMBERT.of(s).detach()
    x = logp - behaviors["stale"].logp().detach()
    nu = (2 / 3 * s.centered(reward) - BETA * x) / x.exp()
    assert torch.allclose(logp.exp().sum(1), torch.ones(2, dtype=torch.float64), atol=1e-12)
    assert (nu.amax(1) - nu.amin(1)).max() < 1e-12
    assert nu.min() > 0


@pytest.fixture
def no_descents(monkeypatch) -> None:
    """Nor what else isn't of the expected gradient: it takes time, and what is broken is seen without."""
    for measure in ("ends", "own_ends", "tools", "bias", "limits", "variances", "estimates", "noise"):
        monkeypatch.setattr(module, measure, lambda *_: iter(()))


def first_broken(name: str) -> str:
    """The property of the first row of a passport that doesn't hold."""
    return next(row.property for row in passport(name) if row.holds is False)


FUNCTIONS = [n for n, entry in table.entries().items() if not entry.of]  # whose function no other one has


@pytest.mark.parametrize("factor", [-1.0, pytest.param(0.9, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_flipped_sign_or_a_wrong_denominator_is_named(
    name: str, factor: float, monkeypatch, no_descents
) -> None:
    entry = get(name)

    @functools.wraps(entry.function)
    def broken(streams, batch, **options):
        terms = entry.function(streams, batch, **options)
        surrogate = None if terms.surrogate is None else factor * terms.surrogate
        return replace(terms, loss=factor * terms.loss, surrogate=surrogate)

    put(monkeypatch, name, replace(entry, function=broken))
    assert first_broken(name) == "expected gradient"


# Responses of a group with one another, or of the step; or with the mean of the policy's own ones, which is
# another function.
COMPARED = {"online_dpo", "gepo", "oorl", "raft_pp", "chord", "otb"}
BASELINES = [
    n
    for n in FUNCTIONS
    if any({GROUPS, TRIPLES} & get(n).needed(c.options) for c in claims_of(n)) and n not in COMPARED
]


@pytest.mark.parametrize("name", BASELINES)
def test_a_dropped_baseline_is_named(name: str, monkeypatch, no_descents) -> None:
    for mean in ("mean", "mean_others", "soft_maximum"):
        monkeypatch.setattr(Groups, mean, lambda self, v, *beta: torch.zeros_like(v))
    for of in (reduce, advantage):
        monkeypatch.setattr(of, "center", lambda v, group: v)
    try:
        broken = first_broken(name)
    except NotFinite:  # what is divided by the mean
        return
    assert broken == "expected gradient"


WITH_VALUE = [n for n, entry in table.entries().items() if provided_by("value_head", entry.needed({}))]


@pytest.mark.parametrize("name", WITH_VALUE)
def test_a_dropped_value_is_named(name: str, monkeypatch, no_descents) -> None:
    entry = get(name)

    @functools.wraps(entry.function)
    def without(streams, batch, **options):
        dropped = {k: 0.0 * v if k in VALUES else v for k, v in streams.items()}
        return entry.function(dropped, batch, **options)

    put(monkeypatch, name, replace(entry, function=without))
    assert first_broken(name) == "expected gradient"


@pytest.mark.parametrize("name", [n for n, entry in table.entries().items() if PAIRS in entry.needed({})])
def test_a_forgotten_loser_is_named(name: str, monkeypatch, no_descents) -> None:
    """The other response of a pair is its baseline."""
    monkeypatch.setattr(Pairs, "gap", lambda self, v: v[self.winner])
    assert first_broken(name) == "expected gradient"


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        (lambda needs: needs - {GROUPS}, "what it needs and doesn't get is refused"),
        (lambda needs: needs | {BEHAVIOR_LOGP}, "what it is claimed to need is enough"),
    ],
)
def test_needs_other_than_the_claimed_are_named(changed, broken: str, monkeypatch) -> None:
    needs = Objective.needs
    monkeypatch.setattr(Objective, "needs", lambda self, options: changed(needs(self, options)))
    rows = list(module.needs(Subject("agro", claims_of("agro")[0])))
    assert [row.property for row in rows if not row.holds] == [broken]


# The objective that claims the options of an ingredient for all that have it.
CLAIMED_BY: dict[Ingredient, str] = {
    WEIGHT: "agro",
    WEIGHT_BASELINE: "agro",
    WEIGHT_BASELINE_OF_PAIRS: "agro",
    IMITATION: "agro",
    IMITATION_OF_WINNERS: "agro",
    KL_TERM: "grpo",
}


def unclaimed(name: str) -> str:
    """The choices of options that no claim makes, and the options whose numbers are their defaults in all
    claims. The options of ingredients, which several objectives share, are those of one of them; those of a
    preset are those of the objective that it is of."""
    entry, missing = get(name), []
    subjects = [Subject(name, claims) for claims in claims_of(name)]
    settings = [entry.defaults() | subject.options() for subject in subjects]
    if any(claims.grouped for claims in claims_of(name)):
        settings.append({"singletons": "drop"})  # measured with the expected gradient
        settings.append({"singletons": "pool"})  # no group of the enumeration has one response
    shared = {"advantage": "rec", "observations": ""}  # nothing is observed in the enumeration
    for ingredient, owner in CLAIMED_BY.items():
        if ingredient in entry.ingredients:
            shared |= dict.fromkeys(ingredient.options, owner)
    for key, option in entry.options.model_fields.items():
        if entry.of or shared.get(key, name) != name:
            continue
        values = [options[key] for options in settings if key in options]
        choices, is_number = choices_of(option.annotation)
        missing += [f"{key}={choice}" for choice in choices if choice not in values]
        if is_number and all(v in choices or v is None or v == option.default for v in values):
            missing.append(key)
    return ", ".join(missing)


def choices_of(kind: Any) -> tuple[list[Any], bool]:
    """The choices that a type gives, and whether it also takes numbers."""
    if kind is bool:
        return [False, True], False
    if get_origin(kind) is Literal:
        return list(get_args(kind)), False
    if get_origin(kind) in (Union, UnionType):
        members = [choices_of(member) for member in get_args(kind) if member is not NoneType]
        return [c for choices, _ in members for c in choices], any(is_number for _, is_number in members)
    return [], True


def test_every_option_has_a_claim(monkeypatch) -> None:
    """Of choices that nobody makes, and of numbers that are always their default, there are two.

    `normalize` of rloo is compared with a second version, but its expectation isn't enumerated. A run puts
    a number in the place of "measured".
    """
    found = {name: unclaimed(name) for name in objectives.names()}
    assert {name: options for name, options in found.items() if options} == {
        "agro": "baseline_shift=measured",
        "rloo": "normalize=True",
    }
    first_claim(monkeypatch, "grpo")
    options = "ratio=old, clip, dual_clip, std=False, average=token, average, beta, kl=k2, unbiased_kl=True"
    assert unclaimed("grpo") == options


def _first_row_s_value(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "mean_rows", lambda self, v: v[self.first_row])


def _stored_value_by_row(patch: pytest.MonkeyPatch) -> None:
    """Response k gets the value of row k."""
    entry = get("squared_consistency")

    @functools.wraps(entry.function)
    def by_row(streams, batch, **options):
        first_row, value = Groups.of(batch).first_row, batch.extra["stored_value"].clone()
        value[first_row] = batch.extra["stored_value"][: len(first_row)]
        return entry.function(streams, batch.replace(extra={"stored_value": value}), **options)

    put(patch, "squared_consistency", replace(entry, function=by_row))


def _large_groups_count_more(patch: pytest.MonkeyPatch) -> None:
    def average(self: Groups, v: torch.Tensor) -> torch.Tensor:
        weight = self.weight[self.group]
        return (weight * v).sum() / weight.sum()

    patch.setattr(Groups, "average_responses", average)


def _rows_apart(patch: pytest.MonkeyPatch) -> None:
    plain = step.complete

    def complete(batch: Batch, *args: Any) -> Any:
        return plain(batch.replace(response=torch.arange(len(batch.mask))), *args)

    patch.setattr(step, "complete", complete)


def _another_constant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reduce, "EPS", 1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "breaks", "named"),
    [
        ("dro", _first_row_s_value, "two rows each"),
        ("squared_consistency", _stored_value_by_row, "two rows each"),
        ("reinforce", _large_groups_count_more, "n=2 and 3"),
        ("topr", _rows_apart, "the micro-batch ("),
        ("grpo", _another_constant, "expected gradient ("),
    ],
)
def test_what_single_rows_and_equal_groups_hide_is_named(
    name: str, breaks, named: str, monkeypatch, no_descents
) -> None:
    breaks(monkeypatch)
    done = prove(name)
    assert done.exit_code == 1
    assert named in done.stderr


def test_the_side_of_a_bound() -> None:
    subject = Subject("agro", claims_of("agro")[0])
    below, above = subject.row("p", "s", 1.0, upper=2.0), subject.row("p", "s", 1.0, lower=2.0)
    assert (below.bound, below.side, below.holds) == (2.0, "at most", True)
    assert (above.bound, above.side, above.holds) == (2.0, "at least", False)
    assert subject.row("p", "s", 1.0) == ProofRow("agro", "p", "scale=loss, s", 1.0, None, None, None)


def test_a_plug_in_brings_its_claims(tmp_path: Path, no_descents) -> None:
    """examples/plugins/simpo.py holds them; with another margin than it claims it doesn't."""
    source = (Path(__file__).parents[2] / "examples/plugins/simpo.py").read_text()
    broken = dict[str, set[str]]()
    for name, text in {"own": source, "other": source.replace("F.softplus(0.5", "F.softplus(0.7")}.items():
        (tmp_path / f"{name}.py").write_text(text)
        rows = passport(f"{tmp_path}/{name}.py:SIMPO")
        broken[name] = {row.property for row in rows if row.holds is False}
    assert broken == {"own": set(), "other": {"expected gradient"}}


def test_an_unknown_name_is_refused() -> None:
    assert prove("agr").exit_code == 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n for n in objectives.names() if n != "agro"])
def test_the_others_hold_what_is_claimed(name: str) -> None:
    assert_claimed(list(passport(name)))


def family(name: str) -> str:
    return get(name).function.__module__


@pytest.mark.parametrize("name", first_of_each(family, objectives.names()))
def test_every_objective_holds_its_first_claims(name: str, monkeypatch) -> None:
    """All that is measured but descents. test_claims.py has the gradient of every claim."""
    first_claim(monkeypatch, name)
    for measure in ("ends", "own_ends", "tools"):
        monkeypatch.setattr(module, measure, lambda *_: iter(()))
    assert_claimed(list(passport(name)))


DESCENDING = [name for name in objectives.names() if claims_of(name)[0].updates]
# The first one of each file of objectives.
OF_FILES = {family(name): name for name in reversed(DESCENDING)}


@pytest.mark.parametrize("name", some(sorted(OF_FILES.values()), every=3))
def test_descent_ends_where_it_is_claimed_to(name: str) -> None:
    """Where the gradient is the claimed one it ends where that one's does, whatever the objective."""
    subject = Subject(name, claims_of(name)[0])
    rows = [*ends(subject), *own_ends(subject)]
    assert len(rows) >= 2
    assert [row for row in rows if row.holds is False] == []


def assert_claimed(rows: list[ProofRow]) -> None:
    assert len(rows) >= 10
    assert [r for r in rows if r.holds is False] == []
    assert all(math.isfinite(r.value) for r in rows)
