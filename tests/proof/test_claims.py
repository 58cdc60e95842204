"""Each claim by itself, in one setting each: quick enough to try on every changed line of an objective."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from importlib import import_module
from itertools import islice
from types import ModuleType

import pytest

from agro.objectives import Objective, differentiate, get, methods, names
from agro.objectives.core import STREAMS
from agro.proof.claims import CLAIMS, claims_of
from agro.proof.measuring import SMALL, Subject, problem
from agro.proof.passport import episodes, expectations, needs, noise
from agro_papers import methods as of_papers
from agro_papers.claims import CLAIMS as CLAIMS_OF_PAPERS

SUBJECTS = [Subject(name, claims) for name in names() for claims in claims_of(name)]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: f"{s.name}-{claims_of(s.name).index(s.claims)}")
def test_gradient_noise_episodes_and_needs_are_the_claimed(subject: Subject) -> None:
    rows = [*islice(expectations(subject), 1), *noise(subject), *episodes(subject), *needs(subject)]
    assert len(rows) >= 4
    assert [row for row in rows if not row.holds] == []


@pytest.mark.parametrize("package", [methods, of_papers])
def test_every_entry_of_a_family_is_in_the_table(package: ModuleType) -> None:
    """A family may have several tables of entries; recipes, and what else is data, are in methods.toml."""
    families = [import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    tables = [value for family in families for value in vars(family).values() if isinstance(value, dict)]
    found = {name: e for table in tables for name, e in table.items() if isinstance(e, Objective)}
    assert len(found) > 20
    in_table = {
        name: replace(get(name), recipe=None, certainty=entry.certainty, called=entry.called)
        for name, entry in found.items()
    }
    assert in_table == found
    assert {*CLAIMS, *CLAIMS_OF_PAPERS} == set(names())


@pytest.mark.parametrize("name", names())
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
