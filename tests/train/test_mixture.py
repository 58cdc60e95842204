"""What a step is made of: shares of the store by role and over steps, the closest groups, groups with a
spread of rewards, a tracked baseline, prompts of uncertain value; and that each resumes exactly."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiers import some
from tiny_runs import InterruptAfter, before_step, fill_store, metrics, tiny, weights

from agro.api.reporting_trainer import Trainer
from agro.config import DataConfig, RunConfig
from agro.errors import Interrupted, Refused
from agro.objectives.reduce import Groups
from agro.rollout import CollectResult
from agro.store import At, DrawRule, Store, is_held_out
from agro.train.collate import TrackedValues, collate
from agro.train.feed import Feed, per_token
from agro.train.phases import Phase
from agro.train.source import ROUNDS, FillRequest, Sampling, UncertainOrder
from agro.types import Prompt, Sample


def of(replay: Any, groups: int = 4) -> Phase:
    config = RunConfig.of({"data": {"replay": replay}, "train": {"groups": groups, "steps": 200}})
    return Phase.all(config)[0]


@pytest.mark.parametrize("groups", [1, 3, 4])
def test_shares_by_role_and_source_are_met_over_the_steps(groups: int) -> None:
    """Within a group of the exact count at each of 200 steps, and half of all steps' groups are fresh."""
    phase = of({"expert": 0.3, "policy": 0.15, "a": 0.05}, groups)
    drawn = Counter[str]()
    for step in range(200):
        rules = phase.rules(step)
        assert sum(rule.groups for rule in rules) == phase.stored_groups(step)
        for rule in rules:
            [name] = rule.data.roles or rule.data.sources or ()
            drawn[name] += rule.groups
        total = sum(drawn.values())
        assert abs(total - 0.5 * groups * (step + 1)) <= 1
    for name, share in (("expert", 0.3), ("policy", 0.15), ("a", 0.05)):
        assert abs(drawn[name] - 200 * groups * share) < 5


def test_a_scheduled_share_ends() -> None:
    """From 0.5 to 0 in 10 steps: 4 · Σ (0.5 − 0.05 s) = 11 groups, then none."""
    phase = of({"start": 0.5, "end": 0.0, "steps": 10})
    counts = [phase.stored_groups(step) for step in range(20)]
    assert sum(counts) == 11
    assert counts[10:] == [0] * 10
    assert phase.config.data.draws_stored
    assert phase.config.data.samples_fresh
    crossing = {
        "expert": {"start": 1.0, "end": 0.0, "steps": 8},
        "policy": {"start": 0, "end": 1, "steps": 8},
    }
    data = DataConfig(replay=crossing)
    assert not data.samples_fresh
    assert data.drawn_from == (("policy", "expert"), None)
    assert data.replay_text == "100%"


TRACKED: dict[str, Any] = {
    "objective": {"name": "rloo", "baseline": "stored"},
    "sampler__n": 1,
    "data__value_half_life": 3.0,
}
RUNS: dict[str, dict[str, Any]] = {
    "shares": {"data__replay": {"log": 0.25, "policy": 0.5}},
    "closest": {"data__replay": 0.5, "data__order": "closest", "data__roles": ["policy"]},
    "age": {"data__replay": 0.5, "data__order": "age_weighted", "data__age_decay": 0.3},
    "spread": {"data__replay": 0.5, "data__spread": True},
    "equal": {"data__replay": 0.5, "data__spread": 0.5},
    "drift": {"data__replay": 0.5, "data__roles": ["policy"], "data__max_drift": 0.02},
    "uncertain": TRACKED | {"data__prompt_order": "uncertain"},
}


def run(folder: Path, name: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    if not (folder / "log.db").exists():
        fill_store(folder / "log.db", groups=6)
    given = {"data__store": str(folder / "log.db"), "train__steps": 8}
    return tiny(folder, **given | RUNS[name])


@pytest.mark.parametrize("name", some(RUNS, every=2))
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    through = Trainer(run(tmp_path / "a", name), tmp_path / "a/run").run()
    stopped = tmp_path / "b/run"
    trainer = Trainer(run(tmp_path / "b", name), stopped)
    plain = trainer._monitors
    trainer._monitors = lambda *args: [*plain(*args), InterruptAfter(5)]  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        trainer.run()
    assert metrics(stopped)[-1]["step"] == 5
    Trainer(run(tmp_path / "b", name), stopped, resume=True).run()
    assert weights(stopped) == weights(through)
    assert [m["loss"] for m in metrics(stopped)] == [m["loss"] for m in metrics(through)]


def test_a_share_of_each_role_is_drawn(tmp_path: Path) -> None:
    trainer = Trainer(run(tmp_path, "shares"), tmp_path / "run")
    trainer.run()
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        drawn = store.draws.drawn(
            trainer.folder.id, {m["step"]: m["version"] for m in metrics(tmp_path / "run")}
        )
    later = {(d.step, store_prompt(tmp_path, d.sample), d.role) for d in drawn if d.step > 2}
    counts = Counter(role for _, _, role in later)
    assert counts["log"] == 6  # of 6 steps of 4 groups a quarter; then sampled and replayed ones
    assert counts["policy"] == 18


def store_prompt(folder: Path, i: int) -> str:
    with Store.open(folder / "log.db", read_only=True) as store:
        [sample] = store.samples(ids=[i], redone=True)
    return sample.prompt_id


class Rounds:
    """A source whose groups have a spread at the numbers in `good`."""

    def __init__(self, store: Store, good: set[int]) -> None:
        self.store, self.good, self.asked = store, good, list[FillRequest]()

    def fill(self, wanted: FillRequest) -> CollectResult:
        self.asked.append(wanted)
        samples = []
        for number in range(wanted.first, wanted.first + wanted.groups):
            for i in range(2):
                samples.append(Sample(f"p{number}", f"{i}", reward=float(i) if number in self.good else 1.0))
        return CollectResult(tuple(self.store.append(samples)), tokens=wanted.groups, failed_requests=None)

    def publish(self, learner: Any) -> None:
        """Nothing to publish to."""


def test_groups_are_sampled_until_enough_have_a_spread(tmp_path: Path) -> None:
    """Of prompts 5 to 8 two, of 9 and 10 one, of 11 one."""
    with Store.open(tmp_path / "s.db") as store:

        def fill(source: Rounds, wanted: FillRequest, spread: bool = True) -> tuple[CollectResult, int, int]:
            sampling = Sampling(source, None, None, store, "r", None, None)  # type: ignore[arg-type]
            return sampling.fill(wanted, spread=spread)

        source = Rounds(store, {5, 8, 10, 11})
        made, prompts, equal = fill(source, FillRequest(1, 4, 5))
        assert [(w.first, w.groups, w.before) for w in source.asked] == [(5, 4, 0), (9, 2, 4), (11, 1, 6)]
        assert (prompts, equal, made.tokens) == (7, 6, 7)
        names = [s.prompt for s in store.samples(ids=made.ids)]
        assert names == [f"p{i}" for i in (5, 8, 10, 11) for _ in range(2)]
        never = Rounds(store, set())
        made, prompts, _ = fill(never, FillRequest(1, 2, 100))
        assert (len(never.asked), prompts, made.ids) == (ROUNDS, 2 * ROUNDS, ())
        plain = Rounds(store, set())
        assert fill(plain, FillRequest(1, 2, 200), spread=False)[1] == 2
        assert len(plain.asked) == 1


class SampleSummary:
    """A learner whose log-probs are all −1."""

    version = 10

    def logp(self, batch: Any, of: str = "policy") -> torch.Tensor:
        return torch.where(batch.mask, -1.0, 0.0).double()


def logged(prompt: str, behavior: list[float] | None, **fields: Any) -> Sample:
    n = 3 if behavior is None else len(behavior)
    return Sample(
        prompt,
        "x" * n,
        tokens=np.arange(n + 1),
        action=np.array([False] + [True] * n),
        behavior_logp=None if behavior is None else np.array([np.nan, *behavior], np.float32),
        **fields,
    )


def test_closeness_is_per_token() -> None:
    """|(−1 + 1.5) + (−1 + 0.9)| / 2 = 0.2; log π / T = −1 for any."""
    samples = [logged("a", [-1.5, -0.9]), logged("b", [-1.0] * 4), logged("c", None)]
    found = per_token(SampleSummary(), samples, "behavior")  # type: ignore[arg-type]
    assert found[:2] == pytest.approx([-0.2, 0.0], abs=1e-7)
    assert math.isnan(found[2])
    assert per_token(SampleSummary(), samples, "likelihood") == [-1.0] * 3  # type: ignore[arg-type]
    assert per_token(SampleSummary(), [], "likelihood") == []  # type: ignore[arg-type]


def test_closest_needs_recorded_log_probs(tmp_path: Path) -> None:
    config = run(tmp_path, "closest").model_dump(mode="json")
    config["data"] |= {"roles": ["log"], "replay": 1.0}
    with pytest.raises(Refused, match=r'data\.closeness = "behavior" needs the recorded log-probs'):
        Trainer(RunConfig.of(config), tmp_path / "run").run()
    config["data"]["closeness"] = "likelihood"
    Trainer(RunConfig.of(config), tmp_path / "likelihood").run()


def test_what_the_policy_has_left_is_dropped_and_counted(tmp_path: Path) -> None:
    """Replayed responses alone, whose |log π − log μ| per token is above the limit."""
    seen = []

    def look(feed, valid) -> None:
        stored = [s for s in valid.samples if s.id not in valid.made]
        seen.extend(per_token(feed.learner, stored, "behavior"))

    with before_step(look):
        Trainer(run(tmp_path, "drift"), tmp_path / "run").run()
    reasons = Counter[str]()
    for row in metrics(tmp_path / "run"):
        reasons.update(row["dropped_reasons"] or {})
    assert reasons["the policy has moved too far from it"] > 0
    assert all(value >= -0.02 for value in seen)


def test_a_tracked_value_forgets_and_leaves_out_the_batch(tmp_path: Path) -> None:
    """Half-life 2, now version 10: rewards 1 of version 8 and 0 of 6 weigh ½ and ¼; b's mean is 3.

    V̂(a) = (3 + ½ · 1 + ¼ · 0) / (1 + ¾) = 2; V̂(b), without earlier ones, is the mean of a's rewards, 0.25.
    """
    with Store.open(tmp_path / "s.db") as store:
        for version, reward in ((8, 1.0), (6, 0.0)):
            store.append([logged("a", [-1.0], reward=reward, version=version)], run="r", step=version)
        store.append([logged("a", [-1.0], reward=9.0, version=8)], run="another", step=8)
        store.append([logged("a", [-1.0], reward=9.0)])
        now = [logged("a", [-1.0], reward=r, version=10) for r in (0.5, 0.0)]
        now.append(logged("b", [-1.0], reward=3.0, version=10))
        ids = store.append(now, run="r", step=10)
        samples = list(store.samples(ids=ids))
        values = TrackedValues(store, "r", SampleSummary(), 2.0)  # type: ignore[arg-type]
        batch = values.fill(collate(samples, 10), samples, {})
        assert batch.extra["stored_value"].tolist() == pytest.approx([2.0, 2.0, 0.25])
        alone = values.fill(collate(samples[2:], 10), samples[2:], {})
        assert math.isnan(alone.extra["stored_value"][0])
        own = values.fill(collate(samples[:1], 10), samples[:1], {})  # 0.0 of now, and the two of before
        assert own.extra["stored_value"].tolist() == pytest.approx([(0.0 + 0.5) / 1.75])


def uncertain(store: Store, prompts: str, candidates: int) -> UncertainOrder:
    """Of half-life 2 at version 10."""
    tracked = TrackedValues(store, "r", SampleSummary(), 2.0)  # type: ignore[arg-type]
    return UncertainOrder([Prompt(name, name) for name in prompts], 7, candidates, tracked)


def scored(store: Store, prompt: str, rewards: list[float]) -> None:
    for reward in rewards:
        sample = logged(prompt, [-1.0], reward=reward, version=10, prompt_id=prompt)
        store.append([sample], run="r", step=1)


def test_prompts_are_drawn_by_the_uncertainty_of_their_value(tmp_path: Path) -> None:
    """Three rewards 1 of a: V̂ = 3.5/4; of b a 1 and a 0: ½; of c a 0: ¼; d has none: ½.

    Of all four one is drawn, 3000 times: its share is √(V̂(1 − V̂)) + 0.05 over their sum, up to four standard
    deviations of a count.
    """
    values = {"a": 3.5 / 4, "b": 0.5, "c": 0.25, "d": 0.5}
    with Store.open(tmp_path / "s.db") as store:
        for name, rewards in (("a", [1.0] * 3), ("b", [1.0, 0.0]), ("c", [0.0])):
            scored(store, name, rewards)
        order = uncertain(store, "abcd", 4)
        drawn = [order.take(start, 1)[0].id for start in range(3000)]
        assert drawn[:50] == [uncertain(store, "abcd", 4).take(start, 1)[0].id for start in range(50)]
    weight = {name: math.sqrt(v * (1 - v)) + 0.05 for name, v in values.items()}
    for name, w in weight.items():
        share = w / sum(weight.values())
        assert abs(drawn.count(name) - 3000 * share) < 4 * math.sqrt(3000 * share * (1 - share))


def test_a_step_has_different_prompts_out_of_its_candidates(tmp_path: Path) -> None:
    """Of 4 prompts 3 from 6 candidates, which are of two epochs; of 12 prompts in turn 2 of 4 each."""
    with Store.open(tmp_path / "s.db") as store:
        few = uncertain(store, "abcd", 2)
        assert all(len({p.id for p in few.take(3 * step, 3)}) == 3 for step in range(20))
        many = uncertain(store, "abcdefghijkl", 2)
        assert len({p.id for step in range(3) for p in many.take(2 * step, 2)}) == 6
        with pytest.raises(Refused, match=r"takes 5 different prompts at a step, and there are 4"):
            few.take(0, 5)
        scored(store, "b", [0.0, 1.5])
        with pytest.raises(Refused, match=r"rewards from 0 to 1, but a response to prompt b has 1\.5"):
            few.take(0, 4)


def test_an_uncertain_order_has_no_held_out_prompts(tmp_path: Path) -> None:
    config = tiny(tmp_path, **RUNS["uncertain"] | {"data__hold_out": 0.5, "data__ask_held_out": False})
    trainer = Trainer(config, tmp_path / "run")
    trainer.run()
    with Store.open(tmp_path / "run/store.db", read_only=True) as store:
        sampled = {sample.prompt_id for sample in store.samples()}
    assert len(sampled) > 10
    assert not any(is_held_out(name, 0.5) for name in sampled)


def test_groups_of_one_learn_with_a_tracked_value(tmp_path: Path) -> None:
    """The share of sevens in a response from random weights: 0.09 at the start, more than 0.5 at the end."""
    (tmp_path / "sevens.py").write_text(
        "def score(completions, **columns):\n    return [text.count('7') / 3 for text in completions]\n"
    )
    changes = {"reward__name": f"{tmp_path / 'sevens.py'}:score", "train__groups": 16, "train__steps": 60}
    Trainer(tiny(tmp_path, **TRACKED | changes), tmp_path / "run").run()
    rewards = [m["reward_mean"] for m in metrics(tmp_path / "run") if m["step"]]
    assert np.mean(rewards[:5]) < 0.2
    assert np.mean(rewards[-5:]) > 0.5


@pytest.mark.parametrize(
    ("equal", "differing", "drawn"),
    [
        (5, 15, [3, 1]),
        (60, 3, [2, 2]),
        (18, 1, [1, 3]),
        (0, 9, [4]),
        (9, 0, [4]),
        (1, 2, [2, 1]),
        (1, 1, [1, 1]),
    ],
)
def test_groups_of_equal_rewards_count_as_many_as_the_store_has(
    equal: int, differing: int, drawn: list[int], tmp_path: Path
) -> None:
    """A tenth as often as the others, one a step at least, half of it at most. Whatever the kind, a group's
    chance times its weight is n/N of the n drawn and the N there are: the expected gradient is that of all
    groups, with noisy rewards too. A store that is still filling gives what it has."""
    with Store.open(tmp_path / "log.db") as store:
        for g in range(equal + differing):
            store.append([Sample(f"p{g}", f"{i}", reward=float(i * (g >= equal))) for i in range(2)])
        sampling = Sampling(None, None, None, store, "r", None, None)  # type: ignore[arg-type]
        rule, at = DrawRule(4, DataConfig(spread=0.1), min_group=2, fewer=True), At("r", 1, 0, 0)
        found = list(sampling._rules([rule], at))
        assert [each.groups for each, _ in found] == drawn
        counts = [count for count in (differing, equal) if count]
        for (each, weight), count in zip(found, counts, strict=True):
            assert each.groups / count * weight == pytest.approx(sum(drawn) / (equal + differing))
            assert len(store.draws.pick(each, at)) == each.groups
        alone = DrawRule(2, DataConfig(spread=True), min_group=2)
        assert list(sampling._rules([alone], at)) == [(alone, 1.0)]
        # A step's mean of one group has no weights: any is drawn, as many as there are.
        [(single, weight)] = sampling._rules([replace(rule, groups=1)], at)
        assert (store.draws.count(single, at), weight) == (equal + differing, 1.0)
        # Without `fewer` a store of too few groups is named with all that a step asked for.
        [(lacking, _)] = sampling._rules([replace(rule, groups=99, fewer=False)], at)
        assert lacking.groups == 99


def test_a_step_weighs_what_it_draws(tmp_path: Path) -> None:
    """Of 8 groups 2 have rewards that differ; a step of 4 draws both, which count 2/8 · 4/2 = .5, and two of
    the others, 6/8 · 4/2 = 1.5 each."""
    fill_store(tmp_path / "log.db", groups=2)
    with Store.open(tmp_path / "log.db") as store:
        store.append([Sample(f"{200 + g}>", f"{i}", reward=0.0) for g in range(6) for i in range(2)])
    data = {"data__store": str(tmp_path / "log.db"), "data__replay": 1.0, "data__spread": 0.1}
    trainer = Trainer(tiny(tmp_path, **data, train__steps=1, train__groups=4), tmp_path / "run")
    batches = []
    plain = Feed.batch

    def kept(self: Feed, *args: Any) -> Any:
        batches.append(plain(self, *args))
        return batches[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feed, "batch", kept)
        trainer.run()
    groups = Groups.of(batches[0].batch)
    assert sorted(groups.weight.tolist()) == [0.5, 0.5, 1.5, 1.5]
    equal = groups.largest(groups.reward) == -groups.largest(-groups.reward)
    assert equal.tolist() == (groups.weight == 1.5).tolist()
