"""What a run drew, as the report asks for it."""

from pathlib import Path

import numpy as np

from agro.store import Draw, Store
from agro.types import Sample


def test_draws_say_whose_a_sample_is_how_old_and_how_long(tmp_path: Path) -> None:
    tokens, action = np.arange(11), np.array([False] * 2 + [True] * 9)
    with Store.open(tmp_path / "store.db") as store:
        [log] = store.append([Sample("p", "logged", reward=0.5, source="file:\ud800", role="log")])
        [mine] = store.append(
            [Sample("p", "sampled", role="policy", tokens=tokens, action=action, version=6)], run="me", step=3
        )
        [other] = store.append(
            [Sample("p", "of another", reward=-1.0, role="policy", source="x")], run="you", step=1
        )
        store.draws.record("me", 3, [mine])
        store.draws.record("me", 5, [log, mine, other, log])
        store.draws.record("you", 1, [log])
        found = store.draws.drawn("me", {3: 6, 5: 10})
        assert store.draws.drawn("nobody", {1: 1}) == []
        assert [d.staleness for d in store.draws.drawn("me", {3: None})] == [None] * 5
    assert found == [
        Draw(3, mine, None, "policy", "", is_own=True, staleness=0, length=9),
        Draw(5, log, 0.5, "log", "file:\ud800", is_own=False, staleness=None, length=None),
        Draw(5, mine, None, "policy", "", is_own=True, staleness=4, length=9),
        Draw(5, other, -1.0, "policy", "x", is_own=False, staleness=None, length=None),
        Draw(5, log, 0.5, "log", "file:\ud800", is_own=False, staleness=None, length=None),
    ]
