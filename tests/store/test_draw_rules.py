"""Draws: which groups, which responses, and that a draw can be repeated."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import Listed, draw, group, of_file, sample

from agro.config import DataConfig
from agro.errors import Refused
from agro.store import At, DrawRule, Pair, Store
from agro.store.candidates import drawable, eligible, pick_groups
from agro.store.draw_rules import Candidate, is_held_out, noise, pick_likely, pick_pairs, pick_responses
from agro.types import Sample


def sizes(samples: list[Sample]) -> dict[str, int]:
    return dict(Counter(str(s.prompt) for s in samples))


def test_noise_depends_on_each_of_its_parts() -> None:
    parts: list[tuple[Any, ...]] = [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"), (0, 0, "\ud800")]
    assert len({noise(*p) for p in [*parts, (0, 0, "a", 0)]}) == 6
    assert noise(1, 2, "x") == int(blake2b(b"1/2/x", digest_size=8).hexdigest(), 16)


def test_least_used_groups_come_first_and_ties_are_shuffled() -> None:
    names = [f"p{i}" for i in range(50)]
    candidates = [Candidate(name, uses=int(name > "p3")) for name in names]
    fresh = {name for name in names if name <= "p3"}
    rule = DrawRule(len(fresh))
    first, second = (pick_groups(Listed(candidates, rule, s), rule, At("r", 1, s, 0)) for s in (1, 2))
    assert set(first) == set(second) == fresh
    assert first != second
    assert pick_groups(Listed(candidates[::-1], rule, 1), rule, At("r", 1, 1, 0)) == first


@pytest.mark.parametrize(("n", "groups"), [(3, 10), (20, 400)])
def test_uniform_takes_each_group_equally_often(n: int, groups: int) -> None:
    """In 4000 draws, with a standard deviation of sqrt(4000 · p · (1 − p)). The cube root of χ²/k, with k =
    groups − 1, is 1 − s² ± s where s² = 2/9k (Wilson and Hilferty, 1931), so that counts may be too even as
    well. Ten groups are all sorted; of 400 some intervals of places are looked at."""
    rule = DrawRule(n, DataConfig(order="uniform"))
    listed = Listed([Candidate(f"p{i}", uses=i) for i in range(groups)], rule)
    picks = [pick_groups(listed, rule, At("r", s, 1, 0)) for s in range(4000)]
    assert all(len(set(p)) == n for p in picks)
    counts = Counter(name for p in picks for name in p)
    share = n / groups
    deviations = np.array([counts[f"p{i}"] - 4000 * share for i in range(groups)])
    deviations /= (4000 * share * (1 - share)) ** 0.5
    assert abs(deviations).max() < 4
    spread = (2 / 9 / (groups - 1)) ** 0.5
    assert abs((deviations**2).mean() ** (1 / 3) - 1 + spread**2) < 4 * spread


def test_a_group_s_responses_are_taken_equally_often() -> None:
    """2 of 5, 4000 times: each 1600 times, with a standard deviation of sqrt(4000 · 0.4 · 0.6) = 31."""
    rule = DrawRule(1, DataConfig(group_size=2))
    picks = [pick_responses(5, rule, At("r", s, 1, 0), "p") for s in range(4000)]
    assert all(len(set(p)) == 2 and p == sorted(p) for p in picks)
    counts = Counter(i for p in picks for i in p)
    assert max(abs(counts[i] - 1600) for i in range(5)) < 4 * 31
    assert pick_responses(2, rule, At("r", 0, 1, 0), "p") == [0, 1]
    assert pick_responses(5, DrawRule(1), At("r", 0, 1, 0), "p") == [0, 1, 2, 3, 4]


def test_picks_depend_on_the_seed_and_the_prompt() -> None:
    """Of two groups or prompts with the same numbers of responses other ones are taken."""
    candidates, many = ([Candidate(f"p{i}", uses=0) for i in range(count)] for count in (20, 400))
    uniform = DrawRule(3, DataConfig(order="uniform"))
    rule, ats = DrawRule(3, DataConfig(group_size=3)), [At("r", 1, seed, 0) for seed in range(5)]
    pairs = [(i, i + 1) for i in range(0, 20, 2)]
    pair_rule = DrawRule(1, DataConfig(group_size=4), pairs=True, min_group=2)
    for picks in (
        [tuple(pick_groups(Listed(candidates, rule, at.seed), rule, at)) for at in ats],
        [tuple(pick_groups(Listed(many, uniform), uniform, at)) for at in ats],
        [tuple(pick_responses(20, rule, at, "p")) for at in ats],
        [tuple(pick_responses(20, rule, ats[0], f"p{i}")) for i in range(5)],
        [tuple(pick_pairs(pairs, pair_rule, at, "p")) for at in ats],
        [tuple(pick_pairs(pairs, pair_rule, ats[0], f"p{i}")) for i in range(5)],
        [tuple(pick_likely(dict.fromkeys("abcdefghij", 0.0), 3, at)) for at in ats],
    ):
        assert len(set(picks)) > 2


def test_held_out_prompts_are_a_share_of_any_and_grow_with_it() -> None:
    """Of 10,000 ids 0.1 ± 0.003 (one standard deviation)."""
    ids = [f"p{i}" for i in range(10_000)]
    some, more = ({i for i in ids if is_held_out(i, share)} for share in (0.1, 0.4))
    assert 0.09 < len(some) / len(ids) < 0.11
    assert some < more
    assert not any(is_held_out(i, 0.0) for i in ids)
    hashes = {i: int(blake2b(f"0/0/hold_out/{i}".encode(), digest_size=8).hexdigest(), 16) for i in ids}
    assert more == {i for i in ids if hashes[i] < 0.4 * 2**64}  # in all versions: runs are resumed


@pytest.mark.parametrize("pairs", [False, True])
def test_least_used_makes_epochs(store: Store, pairs: bool) -> None:
    for i in range(12):
        a, b = store.append(group(f"p{i}", [0.0, 1.0]))
        store.add_pairs([Pair(a, b)])
    epochs = []
    for epoch in range(3):
        steps = range(3 * epoch, 3 * epoch + 3)
        seen = [str(s.prompt) for step in steps for s in draw(store, DrawRule(4, pairs=pairs), step)]
        assert Counter(seen) == {f"p{i}": 2 for i in range(12)}
        epochs.append(list(dict.fromkeys(seen)))
    assert epochs[0] != epochs[1] != epochs[2]


def test_group_size_bounds_the_responses(store: Store) -> None:
    store.append([*group("big", [0.5] * 9), *group("small", [0.5] * 2)])
    assert sizes(draw(store, DrawRule(2, DataConfig(group_size=4)))) == {"big": 4, "small": 2}
    taken = [
        frozenset(s.id for s in draw(store, DrawRule(1, DataConfig(group_size=4), min_group=3), step))
        for step in range(9)
    ]
    assert len(set(taken)) > 3


def test_only_what_fits_the_rule_is_drawn(store: Store) -> None:
    store.append(
        [
            *group("p", [1.0, 0.0, None]),
            sample("p", "failed", None, meta={"reward_error": "x"}),
            sample("p", "expert", 1.0, role="expert", source="teacher"),
            sample("p", "other", 1.0, source="other"),
        ]
    )

    def names(scored_only: bool = True, **options: Any) -> set[str]:
        return {s.response for s in draw(store, DrawRule(1, DataConfig(**options), scored_only=scored_only))}

    assert names() == {"response 0", "response 1", "expert", "other"}
    assert names(scored_only=False) == {"response 0", "response 1", "response 2", "failed", "expert", "other"}
    assert names(roles=("expert",)) == {"expert"}
    assert names(roles=("log",), sources=("other", "nobody")) == {"other"}


def test_age_is_counted_from_the_oldest_action_s_version(store: Store) -> None:
    token = {"tokens": [1, 2, 3], "action": [0, 1, 1]}
    store.append(
        [
            sample("p", "unknown", version=-1),
            sample("p", "old", version=6),
            sample("p", "new", version=7),
            sample("p", "now", version=10),
            sample("p", "spans", version=np.array([-1, 7, 9]), **token),
            sample("p", "spans, old", version=np.array([9, 9, 6]), **token),
            sample("p", "spans, unknown", version=np.array([9, 9, -1]), **token),
            sample("p", "future", version=11),
        ],
        run="r",
        step=1,
    )
    store.append([sample("p", "another run's", version=9)], run="other", step=1)
    store.append([sample("p", "nobody's", version=9)])
    store.append([sample("p", "this run's", version=9)], run="r", step=1)
    drawn = draw(store, DrawRule(1, DataConfig(max_age=3)), version=10)
    assert {s.response for s in drawn} == {"new", "now", "spans", "this run's"}
    older = {s.response for s in draw(store, DrawRule(1, DataConfig(max_age=99)), version=10)}
    assert older >= {"old", "spans, old"}
    assert "unknown" not in older
    assert len(draw(store, DrawRule(1), version=10)) == 11
    ages = {s.response: s.oldest_version for s in draw(store, DrawRule(1), version=10)}
    assert (ages["another run's"], ages["nobody's"], ages["this run's"]) == (-1, -1, 9)


def test_an_episode_is_drawn_whole_or_not_at_all(store: Store) -> None:
    store.append(
        [
            sample("p", "a1", episode="a"),
            sample("p", "b1", episode="b"),
            sample("p", "a2", episode="a"),
            sample("p", "b2", None, episode="b"),
            sample("p", "c"),
        ]
    )
    assert [s.response for s in draw(store, DrawRule(1))] == ["a1", "a2", "c"]
    assert len(draw(store, DrawRule(1, min_group=2))) == 3
    with pytest.raises(Refused, match="got 0"):
        draw(store, DrawRule(1, min_group=3))
    one = {
        tuple(s.response for s in draw(store, DrawRule(1, DataConfig(group_size=1)), step))
        for step in range(3, 23)
    }
    assert one == {("a1", "a2"), ("c",)}


def test_what_a_resumed_run_left_behind_is_not_drawn(store: Store) -> None:
    store.append([sample("p", "lost", episode="a"), sample("p", "lost")], run="r", step=1)
    store.append([sample("q", "lost")], run="r", step=1)
    store.ledger.rewind("r")
    store.append([sample("p", "kept", episode="a")], run="r", step=1)
    assert [s.response for s in draw(store, DrawRule(1))] == ["kept"]
    with pytest.raises(Refused, match=r"got 1\. The store has 1 samples in 1 groups"):
        draw(store, DrawRule(2))


def test_too_few_groups_are_refused_with_the_counts(store: Store) -> None:
    store.append([*group("p", [1.0, 0.0]), *group("q", [1.0, None]), *group("r", [1.0, 1.0], role="policy")])
    store.append([sample("q", "x", None, meta={"reward_error": "x"})])
    with pytest.raises(Refused) as refused:
        draw(store, DrawRule(2, DataConfig(roles=("log",)), min_group=2))
    message = str(refused.value)
    assert "expected 2 groups with 2 or more eligible responses to draw from, got 1" in message
    assert "7 samples in 3 groups; 5 are of the " in message
    assert "1 of them not scored and 1 with a failed reward; 3 are eligible" in message
    with pytest.raises(Refused, match="at most 2 steps old; those of other runs"):
        draw(store, DrawRule(1, DataConfig(max_age=2)))
    assert store.tables.run("SELECT * FROM draws") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, "groups: expected 1 or more, got 0"),
        ({"data": DataConfig(group_size=1), "min_group": 2}, "group_size: expected 2 or more, got 1"),
        ({"min_group": 0}, "min_group: expected 1 or more"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        DrawRule(**{"groups": 1, **options})


def test_a_resumed_run_draws_the_same_again(tmp_path: Path) -> None:
    """One run finishes; the other is stopped after a commit, rewound, and appends the same samples again."""

    def step(store: Store, step: int) -> list[Sample]:
        fresh = [
            s for i in range(3) for s in group(f"p{i}", [step / 10, i / 10], role="policy", version=step)
        ]
        store.draws.record("r", step, store.append(fresh, run="r", step=step))
        return draw(store, DrawRule(3, DataConfig(group_size=2, max_age=4)), step, version=step)

    with Store.open(tmp_path / "a.db") as through, Store.open(tmp_path / "b.db") as stopped:
        expected, got = [], []
        for store in (through, stopped):
            store.append([s for i in range(5) for s in group(f"p{i}", [0.0, 1.0, 0.5])])
        for n in range(1, 9):
            expected.append(step(through, n))
        for n in range(1, 4):
            got.append(step(stopped, n))
        stopped.ledger.commit("r", 3, "digest")
        for n in range(4, 7):
            step(stopped, n)
        stopped.append([sample("unfinished")], run="r", step=7)
        stopped.ledger.rewind("r")
        for n in range(4, 9):
            got.append(step(stopped, n))
    assert got == expected
    assert [[s.id for s in d] for d in got] != [[s.id for s in d] for d in expected]


def plan_of(store: Store, **data: Any) -> str:
    """How SQLite looks for the groups."""
    rule = DrawRule(8, DataConfig(roles=("log",), sources=("a",), **data))
    sql, args = drawable(rule, "r", eligible(rule, "r", 5))
    return str(store.tables.run(f"EXPLAIN QUERY PLAN {sql}", args))


@of_file
@pytest.mark.test
def test_a_draw_reads_only_what_it_draws(store: Store) -> None:
    """10,000 samples with 256 kB of tokens a hundred: a draw looks at an index, not at the rows."""
    tokens = np.arange(640)
    store.append(
        [sample(f"p{i}", "", j / 4, tokens=tokens, action=tokens > 9) for i in range(2500) for j in range(4)]
    )

    def seconds(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    reading = seconds(lambda: list(store.samples()))
    drawing = min(seconds(lambda: draw(store, DrawRule(8, min_group=2))) for _ in range(5))
    assert drawing < reading / 5  # 0.02 s and 0.9 s
    plan = plan_of(store, max_age=3, spread=True)
    assert "SCAN samples USING COVERING INDEX samples_draw" in plan
    assert "TEMP B-TREE FOR GROUP BY" not in plan


def test_only_responses_of_a_least_reward_are_drawn(store: Store) -> None:
    """Unknown rewards are excluded too, and an episode with one row below it."""
    store.append(group("p0", [0.0, 0.5, 1.0]) + group("p1", [0.0, 0.25]))
    store.append([Sample("p0", "unscored", prompt_id="p0")])
    rule = DrawRule(2, DataConfig(min_reward=0.5), scored_only=False, fewer=True)
    assert sorted(s.reward for s in draw(store, rule)) == [0.5, 1.0]
    with pytest.raises(Refused, match=r"groups"):
        draw(store, DrawRule(1, DataConfig(min_reward=2.0)))


BEST = DataConfig(best_of_group=True)


def drawn_rewards(store: Store, data: DataConfig) -> list[tuple[str, float | None]]:
    """(prompt, reward) of what is drawn of all groups, in the order of both."""
    drawn = draw(store, DrawRule(9, data, scored_only=False, fewer=True))
    return sorted((str(s.prompt), s.reward) for s in drawn)


def test_the_best_of_a_group_are_drawn_ties_included_and_unknown_rewards_never(store: Store) -> None:
    store.append(group("a", [0.0, 1.0, None, 1.0]) + group("b", [-2.0, -0.5]) + group("c", [None]))
    assert drawn_rewards(store, BEST) == [("a", 1.0), ("a", 1.0), ("b", -0.5)]
    assert drawn_rewards(store, DataConfig(best_of_group=True, min_reward=0.5)) == [("a", 1.0), ("a", 1.0)]
    assert [(g.prompt_id, g.size) for g in store.groups(best_of_group=True)] == [
        (sample("a").prompt_id, 2),
        (sample("b").prompt_id, 1),
    ]


def test_a_group_is_what_roles_and_sources_admit(store: Store) -> None:
    """The teacher's 0.7 is the best where the policy's responses and the other source's don't count."""
    store.append(group("a", [0.2, 0.7], role="expert", source="x"))
    store.append(group("a", [0.9], role="policy", source="x") + group("a", [0.8], role="expert", source="y"))
    assert drawn_rewards(store, BEST) == [("a", 0.9)]
    experts = DataConfig(best_of_group=True, roles=("expert",))
    assert drawn_rewards(store, experts) == [("a", 0.8)]
    assert drawn_rewards(store, experts.model_copy(update={"sources": ("x",)})) == [("a", 0.7)]


def test_what_is_generated_again_is_not_the_best(store: Store) -> None:
    store.append(group("a", [0.2, 0.1], role="policy", version=0), run="r", step=1)
    store.ledger.commit("r", 1, "digest")
    store.append(group("a", [0.9], role="policy", version=1), run="r", step=2)
    assert drawn_rewards(store, BEST) == [("a", 0.9)]
    store.ledger.rewind("r")
    assert drawn_rewards(store, BEST) == [("a", 0.2)]


def test_an_old_best_response_is_neither_drawn_nor_replaced(store: Store) -> None:
    """Of age 4 and 0. Without the limit of age the old one is drawn."""
    store.append(group("a", [0.9], role="policy", version=0), run="r", step=1)
    store.append(group("a", [0.2], role="policy", version=4), run="r", step=5)
    for age, drawn in ((4, [0.9]), (3, [])):
        rule = DrawRule(1, DataConfig(best_of_group=True, max_age=age), fewer=True)
        assert [s.reward for s in draw(store, rule, version=4)] == drawn


def test_the_best_episode_is_one_response(store: Store) -> None:
    """Its reward stands in each of its rows."""
    store.append(group("a", [0.4, 0.4], episode="low") + group("a", [0.6, 0.6], episode="high"))
    store.append(group("a", [0.5]))
    drawn = draw(store, DrawRule(1, BEST))
    assert [(s.episode, s.reward) for s in drawn] == [("high", 0.6)] * 2
    assert draw(store, DrawRule(1, DataConfig(best_of_group=True, group_size=1)), step=2) == drawn


@of_file
@pytest.mark.test
def test_the_best_of_a_large_group_are_found_in_an_index(store: Store) -> None:
    """10,000 responses to one prompt: each is compared with the better ones alone, of which one is enough."""
    store.append([sample("a", "", i % 100 / 100) for i in range(10_000)])
    began = time.perf_counter()
    assert len(draw(store, DrawRule(1, BEST))) == 100
    assert time.perf_counter() - began < 20  # 0.2 s; with 10^8 comparisons 50 s
    plan = plan_of(store, best_of_group=True)
    assert "SCAN samples USING COVERING INDEX samples_draw" in plan
    assert "COVERING INDEX samples_draw (prompt_id=? AND redone=? AND reward>?)" in plan
