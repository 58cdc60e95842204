"""Each claim by itself, in one setting each: quick enough to try on every changed line of an objective."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from itertools import islice

import pytest

from agro.objectives import OBJECTIVES, Objective, differentiate, get, methods
from agro.objectives.core import STREAMS
from agro.objectives.table import ENTRIES
from agro.proof.claims import CLAIMS
from agro.proof.measuring import SMALL, Subject, problem
from agro.proof.passport import episodes, expectations, needs

SUBJECTS = [Subject(name, claims) for name in CLAIMS for claims in CLAIMS[name]]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: f"{s.name}-{CLAIMS[s.name].index(s.claims)}")
def test_gradient_episodes_and_needs_are_the_claimed(subject: Subject) -> None:
    rows = [*islice(expectations(subject), 1), *episodes(subject), *needs(subject)]
    assert len(rows) >= 4
    assert [row for row in rows if not row.holds] == []


def test_every_entry_of_a_family_is_in_the_table_and_has_claims() -> None:
    """A family may have several tables of entries."""
    families = [import_module(f"{methods.__name__}.{m.name}") for m in pkgutil.iter_modules(methods.__path__)]
    tables = [value for family in families for value in vars(family).values() if isinstance(value, dict)]
    entries = [entry for table in tables for entry in table.values() if isinstance(entry, Objective)]
    assert len(entries) > 80
    assert {id(entry) for entry in entries} == {id(entry) for entry in ENTRIES.values()}
    assert CLAIMS.keys() == OBJECTIVES.keys()


@pytest.mark.parametrize("name", CLAIMS)
def test_metrics_are_those_that_the_entry_declares(name: str) -> None:
    """The function's over all claims, and of each ingredient those that it adds where a claim sets it."""
    entry = get(name)
    reported: set[str] = set()
    declared = set(entry.metrics)
    if name == "red_drop":
        declared = set()  # its preset of rec has neither a mask nor a ratio
    policy, reference, _, reward = problem(SMALL)
    for subject in (s for s in SUBJECTS if s.name == name):
        behavior = reference if subject.usual == "reference" else policy
        batch = subject.batch(behavior, reward, reference, subject.claims.n[0])
        streams = policy.streams(batch.tokens, batch.lengths, batch.mask, STREAMS, reference)
        options = entry.resolve(name, subject.options())
        reported |= differentiate(name, entry, streams, batch, options).metrics.keys()
        for ingredient in entry.ingredients:
            switch, (_, default) = next(iter(ingredient.options.items()))
            if options[switch] != default:
                declared.update(ingredient.metrics)
    assert reported - {"singletons_dropped"} == declared
