"""Each claim by itself, in one setting each: quick enough to try on every changed line of an objective."""

from __future__ import annotations

from itertools import islice

import pytest

from agro.proof.claims import CLAIMS
from agro.proof.measuring import Subject
from agro.proof.passport import episodes, expectations, needs

SUBJECTS = [Subject(name, claims) for name in CLAIMS for claims in CLAIMS[name]]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: f"{s.name}-{CLAIMS[s.name].index(s.claims)}")
def test_gradient_episodes_and_needs_are_the_claimed(subject: Subject) -> None:
    rows = [*islice(expectations(subject), 1), *episodes(subject), *needs(subject)]
    assert len(rows) >= 4
    assert [row for row in rows if not row.holds] == []
