"""The groups in order that a connection keeps: they are those that a query of all samples finds, after any
history, and the picks are those of the list; the rules by which groups are picked from them."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from making import Listed, draw, group, of_file, sample

from agro.config import DataConfig
from agro.config.data import Order
from agro.errors import Refused
from agro.store import At, DrawRule, Origin, Pair, Store
from agro.store.candidates import Candidates, pick_groups
from agro.store.draw_rules import Candidate, pick_likely
from agro.store.sample_rows import ledger_of

ORDERS = get_args(Order)
RULES = [
    *(DrawRule(3, DataConfig(order=order), min_group=2, fewer=True) for order in ORDERS),
    DrawRule(3, DataConfig(order="uniform", max_age=2), fewer=True),
    DrawRule(3, DataConfig(max_uses=2, spread=True), min_group=2, fewer=True),
    DrawRule(3, DataConfig(spread=0.1), min_group=2, equal=True, fewer=True),
    DrawRule(3, DataConfig(roles=("policy",), min_reward=0.5, hold_out=0.3), fewer=True),
    DrawRule(3, DataConfig(best_of_group=True, order="newest"), scored_only=False, fewer=True),
    DrawRule(3, min_group=2, pairs=True, scored_only=False, fewer=True),
]


class History:
    """What may happen to a store, at random, by a run and by others."""

    def __init__(self, path: Any, seed: int) -> None:
        self.rng, self.path = np.random.default_rng(seed), path
        self.mine, self.other = Store.open(path), Store.open(path)
        self.step = 1

    def samples(self, **fields: Any) -> list[Any]:
        name = f"p{self.rng.integers(12)}"
        rewards = [None if self.rng.random() < 0.3 else float(self.rng.integers(3)) / 2 for _ in range(3)]
        episode = f"e{self.rng.integers(99)}" if self.rng.random() < 0.3 else None
        return group(name, rewards[: self.rng.integers(1, 4)], episode=episode, **fields)

    def happen(self) -> None:
        what = self.rng.integers(9)
        store = self.mine if self.rng.random() < 0.5 else self.other
        ids = [s.id or 0 for s in self.mine.samples()]
        if what == 0:
            store.append(self.samples())
        elif what == 1 and self.step > 1:
            store.append(self.samples(role="policy", version=self.step - 1), run="r", step=self.step - 1)
        elif what == 2 and ids:
            chosen = self.rng.choice(ids, 3)
            store.set_rewards((int(i), float(self.rng.integers(3)) / 2, {}) for i in set(chosen))
        elif what == 3 and len(ids) > 1:
            winner, loser = (int(i) for i in self.rng.choice(ids, 2, replace=False))
            store.add_pairs([Pair(winner, loser)])
        elif what == 4:
            self.mine.ledger.commit("r", self.step - 1, "digest")
        elif what == 5:
            run, step = str(self.rng.choice(["r", "s"])), self.step - int(self.rng.integers(1, 3))
            commit = self.mine.ledger.committed(run)
            done = self.mine.ledger.rewind(run, max(1, step, commit.step if commit else 0))
            if run == "r" and done.draws:
                self.step = max(1, self.step - 1)
        elif what == 6 and self.rng.random() < 0.3:
            with pytest.raises(ZeroDivisionError):
                self.undone()
        elif what == 7:  # the next process has the order that this one kept
            self.mine.close()
            self.mine = Store.open(self.path)
        elif what == 8:
            self.collect()

    def collect(self) -> None:
        """Responses that wait to be fresh ones, some of which are trained on."""
        requests = self.other.requests
        [number] = requests.claim("r", "c", maximum=1, ahead=999)
        origins = [Origin(ledger_of("r"), number, str(i)) for i in range(3)]
        version = max(0, self.step - 1)
        made = group(f"p{self.rng.integers(12)}", [0.0, 1.0, 0.5], role="policy", version=version)
        self.other.append(made, run="r", step=None, origins=origins)
        requests.finish("r", [number])
        if self.rng.random() < 0.7:
            self.mine.requests.take("r", self.step - 1, [number])

    def undone(self) -> None:
        with self.mine.transaction():
            self.mine.append(self.samples())
            self.draw(RULES[0])
            raise ZeroDivisionError

    def draw(self, rule: DrawRule) -> None:
        """And another run draws three samples, which may be of one group."""
        self.mine.draw(rule, At("r", self.step, 5, self.step))
        if ids := [s.id or 0 for s in self.mine.samples()]:
            self.mine.draws.record("s", self.step, random.Random(self.step).choices(ids, k=3))


@pytest.mark.parametrize(
    ("path", "seed"), [*(("file", seed) for seed in range(4)), ("postgres", 0)], indirect=["path"]
)
def test_kept_groups_are_those_that_a_query_finds_after_any_history(path: Any, seed: int) -> None:
    """And the uses that are kept beside the draws are those that are counted from them."""
    history = History(path, seed)
    for _ in range(60):
        for _ in range(history.rng.integers(4)):
            history.happen()
        store = history.mine
        for rule in RULES:
            at = At("r", history.step, 5, history.step)
            expected = Listed(store.draws.candidates(rule, "r", at.version), rule, at.seed)
            kept = store.draws._ordered(rule, at)
            assert kept.count == expected.count
            assert +kept.versions == expected.versions
            assert kept.head(99) == expected.head(99)
            assert store.draws.pick(rule, at) == pick_groups(expected, rule, at)
        history.draw(RULES[history.rng.integers(len(RULES))])
        history.step += 1
        counted = store.tables.run(
            "SELECT draws.run, prompt_id, count(DISTINCT draws.step), max(draws.step) "
            "FROM draws JOIN samples ON samples.id = sample GROUP BY 1, 2 ORDER BY 1, 2"
        )
        assert store.tables.run("SELECT run, prompt_id, uses, last FROM group_uses ORDER BY 1, 2") == counted
    history.mine.close()
    history.other.close()


def test_the_next_process_finds_the_order_that_this_one_kept(path: Any, monkeypatch: Any) -> None:
    """Made once, though samples, rewards and uses were added, and the run went back a version; and anew for
    another rule, and where what is held out changed."""
    made: list[str] = []
    make = Candidates._make

    def counted(self: Candidates, condition: Any) -> None:
        made.append(self._rule.data.order)
        make(self, condition)

    monkeypatch.setattr(Candidates, "_make", counted)
    rule = DrawRule(3, DataConfig(max_age=1, hold_out=0.3, order="newest"), min_group=2, fewer=True)

    def drawn(step: int, version: int, rule: DrawRule = rule, clusters: dict[str, str] | None = None) -> None:
        with Store.open(path) as store:
            store.split.use(clusters or {})
            at = At("r", step, 5, version)
            rows = group(f"p{step}", [0.0, 1.0], role="policy", version=version)
            store.append(rows, run="r", step=step)
            candidates = store.draws.candidates(rule, "r", version)
            assert store.draws.pick(rule, at) == pick_groups(Listed(candidates, rule, 5), rule, at)
            store.draw(rule, at)

    for step, version in ((1, 1), (2, 2), (3, 3), (4, 2), (5, 4)):
        drawn(step, version)
    assert made == ["newest"]
    drawn(6, 4, DrawRule(3, DataConfig(), fewer=True))
    drawn(7, 4, clusters={"x": "y"})
    assert made == ["newest", "least_used", "newest"]
    with Store.open(path) as store:
        store.append([sample("another")])
    with Store.open(path, read_only=True) as reader, pytest.raises(Refused, match="can only be read"):
        reader.draws.pick(rule, At("r", 8, 5, 4))


@of_file
def test_who_only_looks_does_not_wait_for_a_writer(path: Any, other: Store) -> None:
    rule, at = DrawRule(2, DataConfig(), fewer=True), At("r", 1, 0, 0)
    with Store.open(path, timeout=0.1) as store, Store.open(path, read_only=True) as reader:
        store.append(group("a", [0.0, 1.0]))
        assert len(store.draws.pick(rule, at)) == 1
        with other.transaction():
            other.append(group("b", [0.0, 1.0]))
            assert len(store.draws.pick(rule, at)) == 1
            assert (len(reader.draws.pick(rule, at)), reader.draws.count(rule, at)) == (1, 1)
        assert len(store.draws.pick(rule, at)) == 2


def test_orders_are_forgotten_with_samples_and_the_oldest_makes_room(into: Store, monkeypatch: Any) -> None:
    monkeypatch.setattr("agro.store.candidates.KEPT", 2)
    monkeypatch.setattr("agro.store.candidates.LATELY", 0.0)
    tables = "SELECT name FROM sqlite_master WHERE name GLOB 'order_[0-9]*' AND type = 'table' ORDER BY name"
    ids = into.append(group("a secret", [0.0, 1.0], prompt_id="a secret") + group("b", [0.0, 1.0]))
    for order in ("least_used", "uniform", "newest"):
        into.draws.pick(DrawRule(1, DataConfig(order=order)), At("r", 1, 0, 0))
    assert len(into.tables.run(tables)) == 2
    into.imports.forget(ids[:2])
    assert into.tables.run(tables) == []
    assert len(into.draws.pick(DrawRule(2, fewer=True), At("r", 1, 0, 0))) == 1
    into.close()
    assert b"a secret" not in Path(into.path).read_bytes()


def test_orders_in_use_are_kept_and_one_that_another_connection_renewed_is_counted_anew(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many runs may draw from one store at once: none takes away the order of another one."""
    monkeypatch.setattr("agro.store.candidates.KEPT", 2)
    rule, at = DrawRule(9, fewer=True), At("r", 1, 0, 0)
    store.append([sample("a", reward=1.0)])
    for run in "rstu":
        store.draws.pick(rule, At(run, 1, 0, 0))
    assert store.tables.run("SELECT count(*) FROM orders") == [(4,)]
    assert store.draws._ordered(rule, at).versions == {-1: 1}
    other.append([sample("b", reward=1.0)])
    assert len(other.draws.pick(rule, at)) == 2
    assert store.draws._ordered(rule, at).versions == {-1: 2}


def test_a_change_that_was_missed_is_found(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 6 changes a draw keeps 2: a connection that saw none of them looks at all groups again. It finds
    those that nobody removed among the changes, also where they are more than 2."""
    monkeypatch.setattr("agro.store.candidates.CHANGES", 2)
    rule, at = DrawRule(9, fewer=True), At("r", 1, 0, 0)
    ids = store.append([sample(f"p{i}", reward=None) for i in range(6)])
    assert store.draws.pick(rule, at) == []
    for i in ids:
        other.set_rewards([(i, 1.0, {})])
    assert len(other.draws.pick(rule, At("another", 1, 0, 0))) == 6
    assert store.tables.run("SELECT count(*) FROM changes") == [(2,)]
    assert len(store.draws.pick(rule, at)) == 6
    other.set_rewards([(i, None, {}) for i in ids[:4]])
    assert len(store.draws.pick(rule, at)) == 2


def test_a_taken_request_can_be_drawn_from_at_the_next_step(store: Store) -> None:
    [number] = store.requests.claim("r", "c", maximum=1, ahead=999)
    origin = Origin(ledger_of("r"), number, "0")
    store.append([sample("a", role="policy", version=0)], run="r", origins=[origin])
    store.requests.finish("r", [number])
    rule = DrawRule(1, fewer=True)
    assert store.draws.pick(rule, At("r", 1, 0, 0)) == []
    store.requests.take("r", 1, [number])
    assert store.draws.pick(rule, At("r", 2, 0, 0)) == [sample("a").prompt_id]
    store.ledger.rewind("r")
    assert store.draws.pick(rule, At("r", 1, 0, 0)) == []  # it waits again


def many(n: int, **fields: Any) -> list[Candidate]:
    return [Candidate(f"p{i}", 0, **fields) for i in range(n)]


def test_groups_of_another_rule_are_not_picked() -> None:
    for order in ORDERS:
        rule = DrawRule(20, DataConfig(order=order, candidates=1))
        for n in (30, 400):
            groups = Listed(many(n, newest=3), rule)
            taken = {f"p{i}" for i in range(15)}
            picked = pick_groups(groups, rule, At("r", 1, 0, 3), taken)
            assert len(picked) == len(set(picked)) == min(20, n - 15)
            assert not taken & set(picked)


def test_age_weighted_draws_fall_by_the_decay() -> None:
    """One of 5 groups of staleness 0 to 4, 8000 times, decay ½: 16/31, 8/31, … of them; 4σ is 0.022."""
    rule = DrawRule(1, DataConfig(order="age_weighted", age_decay=0.5))
    groups = Listed([Candidate(f"p{a}", 0, 10 - a) for a in range(5)], rule)
    counts = Counter(pick_groups(groups, rule, At("r", s, 0, 12))[0] for s in range(8000))
    for a in range(5):
        assert abs(counts[f"p{a}"] / 8000 - 2**-a * 16 / 31) < 0.022


def test_age_weighted_draws_take_each_group_of_a_version_equally_often() -> None:
    """4 of 40, 2000 times: each 200 times, with a standard deviation of sqrt(2000 · 0.1 · 0.9) = 13.4."""
    rule = DrawRule(4, DataConfig(order="age_weighted", age_decay=0.5))
    listed = Listed([Candidate(f"p{i}", uses=0, newest=5) for i in range(40)], rule)
    counts = Counter(name for s in range(2000) for name in pick_groups(listed, rule, At("r", s, 1, 0)))
    assert max(abs(counts[f"p{i}"] - 200) for i in range(40)) < 4.5 * 13.4


def test_age_weighted_draws_of_all_groups_end_and_fill_up_with_the_newest() -> None:
    """A staleness of 1000 has a probability of 2^-1000."""
    rule = DrawRule(3, DataConfig(order="age_weighted", age_decay=0.5))
    groups = Listed([Candidate(f"p{v}", 0, v) for v in (1000, 999, 1, 0)], rule)
    assert set(pick_groups(groups, rule, At("r", 1, 0, 1000))) == {"p1000", "p999", "p1"}
    assert pick_groups(Listed([], rule), rule, At("r", 1, 0, 0)) == []


def test_newest_first_then_least_used(store: Store) -> None:
    rule = DrawRule(2, DataConfig(order="newest"), min_group=2)
    store.append([s for i in range(4) for s in group(f"log{i}", [0.0, 1.0])])
    for step in (1, 2):
        rows = [s for i in range(2) for s in group(f"{step}{i}", [0.0, 1.0], role="policy", version=step)]
        store.append(rows, run="r", step=step)
    first = prompts(store, rule, 3)
    second, third = (prompts(store, DrawRule(6, rule.data, min_group=2), step) for step in (4, 5))
    assert first == {"20", "21"}
    assert {"20", "21", "10", "11"} < second
    assert second | third == {"20", "21", "10", "11", *(f"log{i}" for i in range(4))}


def prompts(store: Store, rule: DrawRule, step: int) -> set[str]:
    """What a step draws."""
    return {str(s.prompt) for s in draw(store, rule, step, version=step)}


def test_a_group_is_drawn_at_most_so_often_by_each_run(store: Store) -> None:
    """Which groups a step draws doesn't depend on the run's name."""
    rule = DrawRule(2, DataConfig(max_uses=2, order="uniform"))
    store.append([sample(f"p{i}") for i in range(3)])
    drawn = [draw(store, rule, step) for step in range(3)]
    assert set(Counter(str(s.prompt) for samples in drawn for s in samples).values()) == {2}
    with pytest.raises(Refused, match=r"expected 2 groups .* got 0"):
        draw(store, rule, 3)
    assert draw(store, rule, 1, run="another") == drawn[1]


def test_only_groups_with_a_spread_of_rewards_are_drawn(store: Store) -> None:
    store.append(group("differs", [0.0, 1.0]) + group("equal", [1.0, 1.0]) + group("one", [0.5]))
    store.append(group("unscored", [1.0, None]) + group("expert", [1.0]))
    store.append([sample("expert", "r", 0.0, role="expert")])
    rule = DrawRule(9, DataConfig(spread=True), min_group=2, fewer=True)
    logged = DrawRule(9, DataConfig(spread=True, roles=("log",)), min_group=2, fewer=True)
    others = DrawRule(9, DataConfig(spread=0.5), min_group=2, equal=True, fewer=True)
    assert prompts(store, rule, 1) == {"differs", "expert"}
    assert prompts(store, logged, 2) == {"differs"}
    assert prompts(store, others, 3) == {"equal"}
    assert [store.draws.count(each, At("r", 4, 0, 0)) for each in (rule, others)] == [2, 1]


def test_candidates_are_kept_in_proportion_to_the_exponent() -> None:
    """Weights 1 : e⁻¹ : e⁻² of 9000 draws; 4σ is 0.02."""
    log_weight = {f"p{i}": float(-i) for i in range(3)}
    for shift in (0.0, 7.0):  # only differences count
        shifted = {group: value + shift for group, value in log_weight.items()}
        counts = Counter(pick_likely(shifted, 1, At("r", s, 1, 0))[0] for s in range(9000))
        total = 1 + math.exp(-1) + math.exp(-2)
        for i in range(3):
            assert abs(counts[f"p{i}"] / 9000 - math.exp(-i) / total) < 0.02
    assert len(set(pick_likely(log_weight, 3, At("r", 1, 1, 0)))) == 3


@pytest.mark.parametrize("order", [{"order": "closest"}, {"order": "age_weighted", "reward_power": 0.6}])
def test_candidates_are_picked_for_a_choice_among_them(order: dict[str, Any]) -> None:
    rule = DrawRule(5, DataConfig(candidates=3, **order))
    assert len(pick_groups(Listed(many(500), rule), rule, At("r", 1, 0, 0))) == 15


def test_places_span_all_integers_that_a_store_has(store: Store) -> None:
    """300 groups in 32 intervals, of which the last ends at 2⁶³ − 1."""
    rule = DrawRule(8, DataConfig(order="uniform"))
    store.append([sample(f"p{i}") for i in range(300)])
    expected = Listed(store.draws.candidates(rule, "r", 0), rule)
    for step in range(20):
        at = At("r", step, 0, 0)
        assert store.draws.pick(rule, at) == pick_groups(expected, rule, at)
