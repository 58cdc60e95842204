"""How a step is made of the store and of fresh samples, rule by rule: shares over the steps, rounds until
groups have a spread, weights of groups, tracked values, prompts of uncertain value, and steps from epochs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    by_someone,
    log_alone,
    tiny,
    write_prompts,
    write_toml,
)

from agro.api.reporting_trainer import Trainer
from agro.config import DataConfig, RunConfig
from agro.errors import Refused
from agro.rollout import CollectResult
from agro.store import At, DrawRule, Store, is_held_out
from agro.train.collate import TrackedValues, collate
from agro.train.feed import ROUNDS, fill, per_token, weighted
from agro.train.phases import Phase
from agro.train.source import FillRequest, UncertainOrder
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
    falling, rising = ({"start": start, "end": 1.0 - start, "steps": 8} for start in (1.0, 0.0))
    data = DataConfig(replay={"expert": falling, "policy": rising})
    assert not data.samples_fresh
    assert data.drawn_from == (("policy", "expert"), None)
    assert data.replay_text == "100%"


class Rounds:
    """A source whose groups have a spread at the numbers in `good`."""

    def __init__(self, store: Store, good: set[int]) -> None:
        self.store, self.good, self.asked = store, good, list[FillRequest]()

    def fill(self, wanted: FillRequest) -> CollectResult:
        self.asked.append(wanted)
        samples = [
            Sample(f"p{number}", f"{i}", reward=float(i) if number in self.good else 1.0)
            for number in range(wanted.first, wanted.first + wanted.groups)
            for i in range(2)
        ]
        return CollectResult(tuple(self.store.append(samples)), tokens=wanted.groups)

    def publish(self, learner: Any) -> None:
        """Nothing to publish to."""


def test_groups_are_sampled_until_enough_have_a_spread(tmp_path: Path) -> None:
    """Of prompts 5 to 8 two, of 9 and 10 one, of 11 one."""
    with Store.open(tmp_path / "s.db") as store:
        source = Rounds(store, {5, 8, 10, 11})
        made, prompts, equal = fill(source, store, FillRequest(1, 4, 5), spread=True)
        assert [(w.first, w.groups, w.before) for w in source.asked] == [(5, 4, 0), (9, 2, 4), (11, 1, 6)]
        assert (prompts, equal, made.tokens) == (7, 6, 7)
        names = [s.prompt for s in store.samples(ids=made.ids)]
        assert names == [f"p{i}" for i in (5, 8, 10, 11) for _ in range(2)]
        never = Rounds(store, set())
        made, prompts, _ = fill(never, store, FillRequest(1, 2, 100), spread=True)
        assert (len(never.asked), prompts, made.ids) == (ROUNDS, 2 * ROUNDS, ())
        plain = Rounds(store, set())
        assert fill(plain, store, FillRequest(1, 2, 200), spread=False)[1] == 2
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
    found = per_token(SampleSummary(), samples, "behavior")
    assert found == pytest.approx([-0.2, 0.0, math.nan], abs=1e-7, nan_ok=True)
    assert per_token(SampleSummary(), samples, "likelihood") == [-1.0] * 3
    assert per_token(SampleSummary(), [], "likelihood") == []


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
        values = TrackedValues(store, "r", SampleSummary(), 2.0)
        batch = values.fill(collate(samples, 10), samples, {})
        assert batch.extra["stored_value"].tolist() == pytest.approx([2.0, 2.0, 0.25])
        alone = values.fill(collate(samples[2:], 10), samples[2:], {})
        assert math.isnan(alone.extra["stored_value"][0])
        own = values.fill(collate(samples[:1], 10), samples[:1], {})  # 0.0 of now, and the two of before
        assert own.extra["stored_value"].tolist() == pytest.approx([(0.0 + 0.5) / 1.75])


def test_meanings_are_a_column_and_an_unknown_one_is_nan() -> None:
    found = [logged("a", [-1.0], meta=meta) for meta in ({"meaning": 2.0**40 + 1}, {"meaning": None}, {})]
    batch = collate(found, 0)
    assert batch.extra["meaning"].tolist() == pytest.approx(
        [2.0**40 + 1, math.nan, math.nan], rel=0, nan_ok=True
    )
    assert "meaning" not in collate(found[2:], 0).extra


def uncertain(store: Store, prompts: str, candidates: int) -> UncertainOrder:
    """Of half-life 2 at version 10."""
    tracked = TrackedValues(store, "r", SampleSummary(), 2.0)
    return UncertainOrder([Prompt(name, name) for name in prompts], 7, candidates, tracked)


def scored(store: Store, prompt: str, rewards: list[float]) -> None:
    for reward in rewards:
        sample = logged(prompt, [-1.0], reward=reward, version=10, prompt_id=prompt)
        store.append([sample], run="r", step=1)


def test_prompts_are_drawn_by_the_uncertainty_of_their_value(tmp_path: Path) -> None:
    """Three rewards 1 of a: V̂ = 3.5/4; of b a 1 and a 0: ½; of c a 0: ¼; d has none: ½.

    Of all four one is drawn, 3000 times: its share is √(V̂(1 − V̂)) + 0.05 over their sum, up to four standard
    deviations of a count."""
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


@pytest.mark.parametrize(
    ("equal", "differing", "drawn"),
    [
        *((5, 15, [3, 1]), (60, 3, [2, 2]), (18, 1, [1, 3]), (0, 9, [4])),
        *((9, 0, [4]), (1, 2, [2, 1]), (1, 1, [1, 1])),
    ],
)
def test_groups_of_equal_rewards_count_as_many_as_the_store_has(equal, differing, drawn, tmp_path) -> None:
    """A tenth as often as the others, one a step at least, half of it at most. Whatever the kind, a group's
    chance times its weight is n/N of the n drawn and the N there are: the expected gradient is that of all
    groups, with noisy rewards too. A store that is still filling gives what it has."""
    with Store.open(tmp_path / "log.db") as store:
        for g in range(equal + differing):
            store.append([Sample(f"p{g}", f"{i}", reward=float(i * (g >= equal))) for i in range(2)])
        rule, at = DrawRule(4, DataConfig(spread=0.1), min_group=2, fewer=True), At("r", 1, 0, 0)
        found = list(weighted([rule], store.draws, at))
        assert [each.groups for each, _ in found] == drawn
        counts = [count for count in (differing, equal) if count]
        for (each, weight), count in zip(found, counts, strict=True):
            assert each.groups / count * weight == pytest.approx(sum(drawn) / (equal + differing))
            assert len(store.draws.pick(each, at)) == each.groups
        alone = DrawRule(2, DataConfig(spread=True), min_group=2)
        assert list(weighted([alone], store.draws, at)) == [(alone, 1.0)]
        # A step's mean of one group has no weights: any is drawn, as many as there are.
        [(single, weight)] = weighted([replace(rule, groups=1)], store.draws, at)
        assert (store.draws.count(single, at), weight) == (equal + differing, 1.0)
        # Without `fewer` a store of too few groups is named with all that a step asked for.
        [(lacking, _)] = weighted([replace(rule, groups=99, fewer=False)], store.draws, at)
        assert lacking.groups == 99


EPOCHS = {"groups": 4, "lr": 1e-2, "checkpoint_every": 2, "schedule": "linear"}


def logged_of_epochs(folder: Path, epochs: float | None = 3, **changes: Any) -> RunConfig:
    """Ten stored groups, four a step."""
    data = log_alone(folder, by_someone(groups=10), prompts=write_prompts(folder / "asked.jsonl", range(60)))
    return tiny(folder, **{"data": data, "train": EPOCHS | {"epochs": epochs}, **changes})


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (3, 8), (0.4, 1), (0.1, 1), (1.25, 4)])
def test_steps_are_passes_over_the_stored_groups(tmp_path: Path, epochs: float, steps: int) -> None:
    """ceil(epochs × 10 / 4)."""
    trainer = Trainer(logged_of_epochs(tmp_path, epochs), tmp_path / "run")
    assert [phase.ends for phase in trainer.phases] == [steps]


def test_groups_that_are_never_drawn_do_not_count(tmp_path: Path) -> None:
    """Of other sources, held out, or without two scored responses: ten of the log, less those held out."""
    logged_of_epochs(tmp_path)
    with Store.open(tmp_path / "log.db") as store:
        store.append(Sample(f"{g}>", "1", reward=1.0, source="other") for g in range(200, 205))
        store.append(Sample(f"{g}>", "1", source="someone") for g in range(300, 305))
        ids = {s.prompt_id for s in store.samples(sources=["someone"], scored=True)}
    kept = sum(not is_held_out(i, 0.4) for i in ids)
    assert 0 < kept < 10
    config = logged_of_epochs(tmp_path, 4, data__sources=["someone"], data__hold_out=0.4)
    trainer = Trainer(config, tmp_path / "run")
    assert trainer.epochs == {"train": {"epochs": 4, "groups": kept, "steps": kept}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data__replay": 0.5},
            r"train\.epochs = 3 .* expected data\.replay = 1 .* got data\.replay = 0\.5 .*set train\.steps "
            r"instead, for fresh samples the number of prompts × 3 / 4",
        ),
        (
            {"phases": [{"name": "a", "data": {"replay": 0}, "train": {"steps": 1}}, {"name": "b"}]},
            r"phase b: train\.epochs = 3 .* got data\.replay = 0\.0 \(a\), 1\.0 \(b\)",
        ),
        ({"data__sources": ["nobody"]}, r"train\.epochs = 3 .*log\.db has none that may be drawn"),
        ({"data__store": "absent.db"}, r"train\.epochs = 3 .*absent\.db has none"),
        ({"train__steps": 5}, r"train: expected one of train\.steps and train\.epochs"),
        ({"train__epochs": 0}, r"train\.epochs"),
        ({"phases": [{"name": "a", "train": {"steps": 1, "epochs": 1}}]}, r"phase a: train: expected one of"),
    ],
)
def test_epochs_of_what_is_not_stored_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(Refused, match=message):
        Trainer(logged_of_epochs(tmp_path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_on_the_command_line_epochs_replace_the_steps_of_a_recipe(tmp_path: Path) -> None:
    file = write_toml(tmp_path / "recipe.json", logged_of_epochs(tmp_path, None))
    assert RunConfig.load(file).train.steps == 100
    assert RunConfig.load(file, ["train.epochs=3"]).train.steps is None
    other = write_toml(tmp_path / "epochs.json", logged_of_epochs(tmp_path, 2))
    assert RunConfig.load(other, ["train.steps=3"]).train.epochs is None
    with pytest.raises(Refused, match=r"expected one of train\.steps and train\.epochs"):
        RunConfig.load(file, ["train.epochs=3", "train.steps=3"])
    phases = [{"name": "a", "train": {"steps": 1}}, {"name": "b", "train": {"steps": 1}}]
    several = write_toml(tmp_path / "several.json", logged_of_epochs(tmp_path, None, phases=phases))
    with pytest.raises(Refused, match=r"would change nothing: every phase sets"):
        RunConfig.load(several, ["train.epochs=3"])
    assert RunConfig.load(several, ["phases.b.train.epochs=3"]).phase("b").train.epochs == 3
