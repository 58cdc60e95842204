"""Any sequence of calls has the same answers from a file and from its owner."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import LONE, WORDS, random_samples
from serving import TOKEN, served

from agro.config import DataConfig
from agro.errors import Refused
from agro.store import At, Commit, DrawRule, Origin, Pair, Selection, Store
from agro.store.serving.remote import Connection
from agro.store.serving.wire import METHODS

Operation = Callable[[Store, random.Random], Any]
RUNS, LEDGER = ("r", "ö"), "run:r"
CALLS = 150


def some_ids(store: Store, r: random.Random) -> list[int]:
    """Ids of samples; now and then one that isn't there."""
    newest = store.experience.last_id()
    return [r.randint(1, newest + (r.random() < 0.1)) for _ in range(r.randint(0, 6)) if newest]


def some_filter(r: random.Random) -> dict[str, Any]:
    filters = {
        "roles": r.choice([["policy"], ("log", "expert"), frozenset({"policy", "log"})]),
        "min_reward": r.choice([0.0, 0.5]),
        "best_of_group": True,
        "scored": r.random() < 0.5,
        "run": r.choice(RUNS),
        "redone": True,
        "state": "failed",
    }
    return {key: filters[key] for key in r.sample(sorted(filters), r.randint(0, 2))}


def some_rule(r: random.Random) -> DrawRule:
    order = r.choice(["least_used", "uniform", "newest", "age_weighted", "closest"])
    data = DataConfig(order=order, group_size=r.choice([None, 2]), hold_out=r.choice([0.0, 0.2]))
    return DrawRule(r.randint(1, 4), data, min_group=r.randint(1, 2), fewer=r.random() < 0.7)


def some_at(r: random.Random, step: int | None = None) -> At:
    return At(r.choice(RUNS), step or r.randint(1, 40), seed=r.choice([0, 2**63]), version=r.randint(0, 3))


def append(store: Store, r: random.Random) -> Any:
    samples = random_samples(r.getrandbits(30), r.randint(0, 6), [*WORDS, *LONE])
    origins = None
    if r.random() < 0.5:
        origins = [Origin(LEDGER, r.randint(0, 9), r.choice(["0", "1", "ü"])) for _ in samples]
    return store.append(iter(samples), run=r.choice([None, *RUNS]), step=r.choice([None, 3]), origins=origins)


def set_rewards(store: Store, r: random.Random) -> Any:
    rewards = [(None, {"reward_error": "no answer"}), (0.25, {"big": 2**70}), (None, {}), (1, {})]
    scores = ((i, *r.choice(rewards)) for i in some_ids(store, r))
    return store.set_rewards(scores, once=r.random() < 0.5)


def draw(store: Store, r: random.Random) -> Any:
    made = some_ids(store, r)[:2]
    joining = some_rule(r) if r.random() < 0.5 else None
    return store.draw(some_rule(r), some_at(r), made=made, joining=joining)


def draw_picked(store: Store, r: random.Random) -> Any:
    rule, at = some_rule(r), some_at(r)
    picked = store.draws.pick(rule, at, {"another"})
    selection = Selection(rule, picked)
    seen = store.draws.look(selection, at)
    drawn = store.draws.draw_picked([selection], at, (), some_rule(r))
    return picked, seen, store.draws.count(rule, at), drawn


def logps(store: Store, r: random.Random) -> Any:
    key, run, ids = r.choice("kl"), r.choice(RUNS), some_ids(store, r)
    store.ledger.keep_reference_logp(run, 3, key, {i: np.array([-1.5, i]) for i in ids})
    cached = store.ledger.reference_logp(run, key, {*ids, 1}, until=store.ledger.last_reference_logp())
    return {i: (values.dtype.str, values.tolist()) for i, values in cached.items()}


def commit(store: Store, r: random.Random) -> Any:
    run = r.choice(RUNS)
    store.ledger.commit(run, r.randint(1, 40), "digest", files={"model": "é"})
    commits = store.ledger.commits(run)
    if r.random() < 0.2:
        return commits, store.ledger.rewind(run, to=r.choice(commits))
    return commits, store.ledger.committed(run), store.ledger.commits(run)[-1:] == [Commit(1, "", 1)]


def claim(store: Store, r: random.Random) -> Any:
    allowed = {"ahead": r.randint(0, 40), "trained": r.randint(0, 40)}
    claimed = store.requests.claim("r", r.choice("abc"), maximum=3, dead={"a"}, **allowed)
    store.requests.finish("r", claimed[:1])
    ready = store.requests.ready("r", 9)
    store.requests.take("r", r.randint(1, 40), ready[:1])
    if r.random() < 0.3:
        store.requests.reopen("r", ready[1:2])
    return claimed, ready, store.requests.collectors("r"), store.requests.backlog("r", r.randint(0, 20))


def lease(store: Store, r: random.Random) -> Any:
    store.leases.renew(r.choice("ab"), 1e6)
    if r.random() < 0.5:
        store.leases.release("a")
    return store.leases.alive(["a", "b", "c"])


def prompts(store: Store, r: random.Random) -> Any:
    samples = random_samples(r.getrandbits(30), 3)
    store.experience.check_prompts({s.prompt_id: s.prompt for s in samples}.items())
    store.experience.check_prompts([(s.prompt_id, "another") for s in store.samples(ids=[1])])


def pairs(store: Store, r: random.Random) -> Any:
    ids = some_ids(store, r)[: r.randint(1, 2)]  # now and then one that isn't there
    if ids:  # others of its prompt: a judgment is of responses to one
        prompts = [sample.prompt_id for sample in store.samples(ids=ids[:1])]
        ids = [i for prompt_id in prompts for i in store.experience.find(prompt_id=prompt_id)]
    store.add_pairs(Pair(a, b, r.choice([None, 0.5]), 0.5) for a, b in pairwise(ids) if a != b)
    return list(store.pairs()), list(store.pairs(some_ids(store, r)))


OPERATIONS: list[Operation] = [
    *[append, append, append, set_rewards, draw, draw_picked, logps, commit, claim, lease, prompts, pairs],
    lambda store, r: list(store.samples(**some_filter(r))),
    lambda store, r: list(store.samples(ids=some_ids(store, r), skip_damaged=True)),
    lambda store, r: store.experience.check_ids(some_ids(store, r)),
    lambda store, r: store.experience.find(meta=("answer", "18")),
    lambda store, r: store.experience.find_in_ledger(LEDGER, range(4)),
    lambda store, r: store.experience.rewards("r", [s.prompt_id for s in store.samples(ids=[1])], without=()),
    lambda store, r: store.experience.next_number(0),
    lambda store, r: store.groups(**some_filter(r)),
    lambda store, r: list(store.survey.each_group(**some_filter(r))),
    lambda store, r: list(store.survey.each_group_rows()),
    lambda store, r: list(store.survey.each_prompt()),
    lambda store, r: store.survey.summaries(**some_filter(r)),
    lambda store, r: (store.counts(), store.survey.spread_of_rewards()),
    lambda store, r: sorted(store.survey.meetings(**some_filter(r))),
    lambda store, r: store.draws.candidates(some_rule(r), r.choice(RUNS), 2),
    lambda store, r: store.draws.require(some_rule(r), some_at(r)),
    lambda store, r: store.split.keep(r.choice(RUNS), {"prompt 1": "prompt 0", "prompt 0": "prompt 0"}),
    lambda store, r: store.draws.recorded_groups(some_at(r)),
    lambda store, r: store.draws.record(r.choice(RUNS), r.randint(41, 50), some_ids(store, r)),
    lambda store, r: store.draws.drawn(r.choice(RUNS), {step: step + 1 for step in range(40)}),
    lambda store, r: (store.draws.uses(some_ids(store, r)), store.draws.trained(some_ids(store, r))),
    lambda store, r: (store.ledger.knows(r.choice("rx")), len(store.ledger.fingerprint()) % 65),
    lambda store, r: store.imports.provenance(),
    lambda store, r: (store.tables.check(), store.tables.damage(), store.tables.damaged("commits")),
]


def answers(store: Store, place: str, seed: int) -> Iterator[Any]:
    """What a sequence of calls returns or is refused with. `place`: how messages name the store."""
    r = random.Random(seed)
    for _ in range(CALLS):
        operation, state = r.choice(OPERATIONS), r.getrandbits(40)
        try:
            yield operation(store, random.Random(state))
        except Refused as refusal:
            yield type(refusal), str(refusal).replace(place, "STORE")


def content(path: Path) -> dict[str, list[Any]]:
    """All rows of all tables that stores have in common."""
    with closing(sqlite3.connect(path)) as database:
        database.text_factory = bytes
        names = [name.decode() for (name,) in database.execute("SELECT name FROM sqlite_master")]
        tables = [name for name in names if name in {"samples", "pairs", "draws", "group_uses", "commits"}]
        tables += ["reference_logp", "requests", "changes"]
        return {table: database.execute(f"SELECT rowid, * FROM {table}").fetchall() for table in tables}


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Those that were asked for."""
    called = set[str]()
    plain = Connection.call

    def call(self: Connection, method: str, *args: Any, **kwargs: Any) -> Any:
        called.add(method)
        return plain(self, method, *args, **kwargs)

    monkeypatch.setattr(Connection, "call", call)
    return called


def test_any_calls_have_the_same_answers(tmp_path: Path, methods: set[str], monkeypatch) -> None:
    monkeypatch.setenv("AGRO_TOKEN", TOKEN)
    refused = 0
    for seed in range(4):
        here, there = tmp_path / f"here{seed}.db", tmp_path / f"there{seed}.db"
        with served(there) as url, Store.open(here) as file, Store.open(url) as remote:
            expected = answers(file, str(here), seed)
            for a, b in zip(expected, answers(remote, str(there), seed), strict=True):
                assert a == b
                refused += isinstance(a, tuple) and len(a) == 2 and isinstance(a[0], type)
            assert file.ledger.fingerprint() == remote.ledger.fingerprint()
        assert content(here) == content(there)
    assert methods == METHODS | {"protocol"}  # each one was called
    assert 20 < refused < 4 * CALLS / 2


def test_what_needs_the_file_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGRO_TOKEN", TOKEN)
    with served(path) as url, Store.open(url) as store:
        for call in (lambda: store.imports.forget([1]), store.transaction, lambda: store.tables.last_id()):
            with pytest.raises(Refused, match="needs the store's file"):
                call()
    assert {name for name in METHODS if name.startswith("imports.")} == {"imports.provenance"}
