"""What the store says of its samples, rewards, judgments, draws and runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from making import LONE, WORDS, group, random_samples, sample, texts

from agro.errors import Refused
from agro.store import At, Commit, DrawRule, Group, Pair, Rewind, Store
from agro.store.location import location_of
from agro.store.samples import OtherPrompt


def test_what_was_appended_is_there_after_reopening(path: Any) -> None:
    samples = random_samples(3, 300, WORDS + LONE)  # more than a page
    with Store.open(path) as store:
        ids = store.append(iter(samples))
    with Store.open(path, read_only=True) as store:
        back = list(store.samples())
    assert back == samples
    assert [s.id for s in back] == ids == sorted(ids)


def test_appending_is_all_or_nothing(store: Store) -> None:
    for bad, message in ((sample(meta={"x": math.nan}), "meta"), (sample(version=2**63), "64 bits")):
        with pytest.raises(Refused, match=message):
            store.append([sample(), bad])
    with pytest.raises(Refused, match="no sample"), store.transaction():
        store.set_rewards([(i, 0.5, {}) for i in [*store.append([sample()]), 99]])
    assert store.counts().samples == 0
    assert store.append([]) == []


def test_a_store_opened_read_only_is_not_written_to_and_sees_what_others_write(
    store: Store, path: Any
) -> None:
    [i] = store.append([sample()])
    with Store.open(path, read_only=True) as reader:
        for write in (
            lambda: reader.append([sample()]),
            lambda: reader.set_rewards([(i, 0.0, {})]),
            lambda: reader.draws.record("r", 1, [i]),
            lambda: reader.draws.pick(DrawRule(1), At("r", 1, 0, 0)),
            lambda: reader.ledger.commit("r", 1, "digest"),
            lambda: reader.ledger.rewind("r"),
        ):
            with pytest.raises(Refused, match="can only be read"):
                write()
        assert len(reader.draws.candidates(DrawRule(1), "r", 1)) == 1
        store.append([sample()])
        assert len(list(reader.samples())) == 2


def test_samples_are_chosen_by_what_is_asked(store: Store) -> None:
    ids = store.append(
        [
            sample("p", "0", 1.0, role="policy", source="a"),
            sample("p", "1", None, role="log", source="b"),
            sample("q", "2", None, role="log", source="b", meta={"reward_error": "timeout"}),
            sample("q", "3", 0.0, role="expert", source="\ud800", prompt_id="\udfff"),
        ]
    )
    store.append([sample("p", "4", 0.5, role="policy", source="a")], run="r", step=3)
    p = sample("p").prompt_id
    assert texts(store.samples()) == ["0", "1", "2", "3", "4"]
    assert texts(store.samples(prompt_id=p)) == ["0", "1", "4"]
    assert texts(store.samples(prompt_id="\udfff")) == ["3"]
    assert texts(store.samples(roles=["log", "expert"])) == ["1", "2", "3"]
    assert texts(store.samples(roles=[])) == []
    assert texts(store.samples(sources=["a", "\ud800"])) == ["0", "3", "4"]
    assert texts(store.samples(scored=True)) == ["0", "3", "4"]
    assert texts(store.samples(scored=False)) == ["1", "2"]
    assert texts(store.samples(state="unscored")) == ["1"]
    assert texts(store.samples(state="failed")) == ["2"]
    assert texts(store.samples(run="r")) == ["4"]
    assert texts(store.samples(ids=[ids[3], ids[1], ids[3]])) == ["1", "3"]
    assert texts(store.samples(ids=[])) == []
    with pytest.raises(Refused, match="no sample has the id 77"):
        list(store.samples(ids=[1, 77]))


def test_samples_can_be_written_while_they_are_read(store: Store) -> None:
    store.append(group("p", [None] * 300))
    seen = 0
    for s in store.samples(scored=False):
        assert s.id is not None
        store.set_rewards([(s.id, 1.0, {})])
        if seen < 10:
            store.append([sample("p", "new", None)])
        seen += 1
    assert seen == 300
    assert store.counts().scored == 300
    assert store.counts().unscored == 10


def test_counts_keep_unscored_failed_and_scored_apart(store: Store) -> None:
    ids = store.append(
        [
            *group("p", [1.0, 0.0, None], source="a"),
            sample("q", reward=None, meta={"reward_error": "ValueError"}, source="b"),
            sample("q", tokens=[1, 2], action=[0, 1], behavior_logp=[math.nan, -1], role="policy"),
            sample("q", tokens=[1, 2], action=[0, 1], behavior_logp=[-1, math.nan], role="policy"),
        ]
    )
    store.add_pairs([Pair(ids[0], ids[1])])
    counts = store.counts()
    assert (counts.samples, counts.groups, counts.scored, counts.unscored, counts.failed) == (6, 2, 4, 1, 1)
    assert (counts.with_tokens, counts.with_behavior, counts.pairs) == (2, 1, 1)
    assert (counts.sources, counts.roles) == ({"a": 3, "b": 1, "": 2}, {"log": 4, "policy": 2})


def test_groups_and_their_rewards(store: Store) -> None:
    """The pieces of an episode are one response."""
    store.append([*group("p", [0.0, 1.0, None]), *group("q", [0.1, 0.1, 0.1]), *group("r", [None])])
    episodes = [("1", 1.0), ("1", 1.0), (None, 0.0), ("2", 1.0), ("2", None)]
    store.append([sample("s", reward=reward, episode=episode) for episode, reward in episodes])
    p, q, r, s = store.groups()
    assert p == Group(sample("p").prompt_id, 3, 2, 0.5, 0.0, 1.0)
    assert q.reward_min == q.reward_max == 0.1
    assert (r.size, r.scored, r.reward_mean, r.reward_min, r.reward_max) == (1, 0, None, None, None)
    assert s == Group(sample("s").prompt_id, 3, 2, 0.5, 0.0, 1.0)
    assert store.groups(sources=["nobody"]) == []


def test_rewards_are_put_in_renewed_and_taken_out(store: Store) -> None:
    (i,) = store.append([sample(reward=None, meta={"answer": "2"})])

    def now() -> tuple[float | None, dict[str, object], str]:
        (s,) = store.samples()
        counts = store.counts()
        return s.reward, s.meta, next(k for k in ("scored", "unscored", "failed") if getattr(counts, k))

    store.set_rewards([(i, 1.0, {"place_rewards": [1.0], "meaning": 7})])
    store.set_rewards([(i, None, {"reward_error": "timeout"})])
    assert now() == (None, {"answer": "2", "reward_error": "timeout"}, "failed")
    store.set_rewards(iter([(i, 1, {"parts": {"format": 0.5}})]))
    assert now() == (1.0, {"answer": "2", "parts": {"format": 0.5}}, "scored")
    store.set_rewards([(i, None, {})])
    assert now() == (None, {"answer": "2", "parts": {"format": 0.5}}, "unscored")
    for bad in (math.nan, math.inf):
        with pytest.raises(Refused, match=f"sample {i}: reward: expected a finite number"):
            store.set_rewards([(i, 0.5, {}), (i, bad, {})])
    assert now()[0] is None
    with pytest.raises(Refused, match="no sample has the id 9"):
        store.set_rewards([(9, 1.0, {})])


def test_pairs_stand_between_samples(store: Store) -> None:
    a, b, c = store.append(group("p", [None, None, None]))
    pairs = [Pair(a, b), Pair(a, c, 3, 1), Pair(a, b, 0.0, 0.0)]
    store.add_pairs(pairs)
    assert list(store.pairs()) == pairs
    with pytest.raises(Refused, match="no sample has the id 9"):
        store.add_pairs([Pair(a, c), Pair(a, 9)])
    assert list(store.pairs()) == pairs
    with pytest.raises(Refused, match="two samples, got 1 twice"):
        Pair(1, 1)
    with pytest.raises(Refused, match="votes of 0 or more, got -1"):
        Pair(1, 2, -1, 0)


def test_a_commit_notes_how_far_the_store_had_come(store: Store) -> None:
    assert store.ledger.committed("r") is None
    store.ledger.commit("r", 0, "empty")
    assert store.ledger.committed("r") == Commit(0, "empty", 0)
    ids = store.append(group("p", [0.0, 1.0]))
    store.ledger.commit("r", 5, "abc", files={"model.safetensors": "def"})
    store.ledger.commit("other", 7, "ghi")
    store.append([sample()])
    assert store.ledger.committed("r") == Commit(5, "abc", ids[-1], {"model.safetensors": "def"})


def test_rewinding_forgets_later_draws_and_sets_later_samples_aside(store: Store) -> None:
    (log,) = store.append([sample("log")])
    (one,) = store.append([sample("p", "1")], run="r", step=1)
    store.draws.record("r", 1, [one, log])
    store.ledger.commit("r", 1, "digest")
    (two,) = store.append([sample("p", "2")], run="r", step=2)
    store.draws.record("r", 2, [two, log])
    (other,) = store.append([sample("p", "3")], run="other", step=2)
    store.draws.record("other", 2, [other])

    assert store.ledger.rewind("r") == Rewind(draws=2, samples=1)
    assert [s.id for s in store.samples()] == [log, one, other]
    assert [s.id for s in store.samples(redone=True)] == [log, one, two, other]
    assert store.counts().samples == 3
    assert [g.size for g in store.groups()] == [1, 2]
    assert [g.size for g in store.groups(redone=True)] == [1, 3]
    assert store.ledger.rewind("r") == Rewind(0, 0)
    store.ledger.commit("r", 2, "again")
    assert [(d.step, d.sample) for d in store.draws.drawn("r")] == [(1, one), (1, log)]
    with pytest.raises(Refused, match="no sample has the id 9"):
        store.draws.record("r", 3, [one, 9])


def test_rewinding_to_a_later_step_keeps_what_it_made(store: Store) -> None:
    store.ledger.commit("r", 1, "digest")
    for step in (2, 3):
        ids = store.append([sample("p", str(step))], run="r", step=step)
        store.draws.record("r", step, ids)
    assert store.ledger.rewind("r", 2) == Rewind(draws=1, samples=1)
    assert texts(store.samples()) == ["2"]
    with pytest.raises(Refused, match="go back to step 1 or later, got 0"):
        store.ledger.rewind("r", 0)


CHAT = [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize("known", ["1+1=", CHAT, "\ud800"])
@pytest.mark.parametrize("other", ["2+2=", [{"role": "user", "content": "2+2="}], ""])
def test_an_id_names_one_prompt_whoever_adds_samples(store: Store, known: Any, other: Any) -> None:
    """Whether it is in the store already or added together; then none of them is added."""
    store.append([sample(known, prompt_id="0")], run="r", step=1)
    store.append([sample(known, "another", prompt_id="0")])
    for name, added in (
        ("0", [sample(other, prompt_id="0")]),
        ("1", [sample(known, prompt_id="1"), sample(other, prompt_id="1")]),
    ):
        with pytest.raises(OtherPrompt, match=rf"^prompt_id: expected {name} to name one prompt, "):
            store.append(added)
    with pytest.raises(OtherPrompt, match=r"^prompt_id: expected 0 to name one prompt, .*\(sample [12]\)"):
        store.experience.check_prompts([("0", other)])
    store.experience.check_prompts([("0", known), ("2", other)])
    assert store.counts().samples == 2


def test_an_append_to_a_large_group_reads_no_more_than_to_a_small_one(into: Store) -> None:
    """Counted in steps of SQLite's."""
    steps: list[int] = []
    counts = []
    database: Any = into.tables
    database._connection.set_progress_handler(lambda: steps.append(1), 100)
    for size in (1, 3000):
        into.append([sample("a", str(n)) for n in range(size)])
        steps.clear()
        into.append([sample("a", "another"), sample(f"other {size}")])
        counts.append(len(steps))
    assert counts[1] <= 2 * counts[0] + 2


def test_messages_are_one_prompt_in_any_order_of_their_keys(store: Store) -> None:
    store.append([sample(CHAT, prompt_id="0")])
    store.append([sample([dict(reversed(CHAT[0].items()))], prompt_id="0")])
    assert [s.prompt for s in store.samples(prompt_id="0")] == [CHAT, CHAT]


def test_what_a_rewound_run_sampled_names_no_prompt(store: Store) -> None:
    store.append([sample("1+1=", prompt_id="0")], run="r", step=1)
    store.ledger.rewind("r")
    store.append([sample("2+2=", prompt_id="0")])
    assert [s.prompt for s in store.samples(prompt_id="0")] == ["2+2="]


def test_a_url_that_is_no_store() -> None:
    for url in ("http://host:80/x", "https://host", "mysql://host/x"):
        for given in (url, Path(url)):
            with pytest.raises(Refused, match="expected a file or postgresql://"):
                location_of(str(given))
