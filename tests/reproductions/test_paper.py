"""reproductions/paper: the rules of the verdicts, the data of the experiments, and a part from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import rounding

from agro.config import PolicyConfig, RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.store import Store
from agro.train.collate import collate
from agro.train.learner import Local
from reproductions.paper import plans, report, rules, run, runs
from reproductions.paper.experiments import MORE, NOT_RUN, PARTS, SAME_RATE, SEEDS, judge
from reproductions.paper.plans import METHODS, MIXTURE, PLANS
from reproductions.paper.runs import Racer, Trial
from reproductions.paper.task import LOGS, OTHER, START
from reproductions.paper.world import World, order

LOG = f"{START}, n = 4"


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("paper")


@pytest.fixture(scope="module")
def world(out) -> World:
    return plans.load(out, plans.CARELESS, True)


@pytest.fixture(scope="module")
def task(out, world) -> Path:
    """The folder of its files."""
    return out / plans.CARELESS / "task"


def measured(*accuracies: float, kl: float = 1.0, generated: int = 100) -> dict[str, Any]:
    """A run with these accuracies on the way, at equal distances in updates and in KL."""
    last = len(accuracies) - 1
    curve = [
        {"update": 10 * i, "accuracy": accuracy, "kl": kl * i / last} for i, accuracy in enumerate(accuracies)
    ]
    return {"curve": curve, "rewards": list(accuracies), "generated": generated}


def test_the_intervals() -> None:
    """Of .1 .2 .3: standard error .1/√3 = .05774, t(2) = 4.303. Of two of them: Welch's 4 degrees, 2.776."""
    of_one = rules.of_mean([0.1, 0.2, 0.3])
    assert of_one.high == pytest.approx(0.2 + 4.3027 * 0.057735, abs=1e-4)
    apart = rules.difference([0.3, 0.4, 0.5], [0.1, 0.2, 0.3])
    assert (apart.mean, apart.low) == pytest.approx((0.2, 0.2 - 2.7764 * 0.08165), abs=1e-4)
    assert rules.difference([0.5] * 3, [0.5] * 3) == rules.Interval(0, 0, 1)
    assert rules.difference([0.5] * 3, [0.5] * 3).high == 0


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        ((0.5, 0.51, 0.52), (0.4, 0.41, 0.42), rules.HOLDS),
        ((0.4, 0.41, 0.42), (0.5, 0.51, 0.52), rules.FAILS),
        ((0.4, 0.5, 0.6), (0.41, 0.5, 0.6), rules.UNKNOWN),
        ((0.50, 0.51, 0.52), (0.50, 0.51, 0.52), rules.EQUAL),  # 2.132 · .00816 = .0174, below .03
        ((0.50, 0.515, 0.53), (0.50, 0.515, 0.53), rules.EQUAL),  # .0261
        ((0.50, 0.52, 0.54), (0.50, 0.52, 0.54), rules.UNKNOWN),  # .0348
    ],
)
def test_who_is_above(first, second, word) -> None:
    found = {
        ("A", "log", None): [measured(0.3, end) for end in first],
        ("B", "log", None): [measured(0.3, end) for end in second],
    }
    assert rules.above(("A", "log", None), ("B", "log", None))(found).word == word


def test_two_are_level_only_where_both_one_sided_tests_say_so() -> None:
    """t(4) of one side at 5 % is 2.132: .0348 of ends that are .02 apart, and .0174 of .01."""
    pair = ("A", "log", None), ("B", "log", None)
    for step, word in ((0.01, rules.HOLDS), (0.02, rules.UNKNOWN)):
        ends = [measured(0.3, 0.5 + i * step) for i in range(3)]
        assert rules.level(*pair)(dict.fromkeys(pair, ends)).word == word


def test_a_lead_that_grows_is_a_difference_of_differences() -> None:
    """Leads of .1 and .3, and a standard error of √4 · .01/√3 = .01155 with 8 degrees: 2.306 of it."""

    def ends(mean: float) -> list[dict[str, Any]]:
        return [measured(0.3, mean + off) for off in (-0.01, 0.0, 0.01)]

    found = {("A", "near", None): ends(0.5), ("B", "near", None): ends(0.4)}
    found |= {("A", "far", None): ends(0.6), ("B", "far", None): ends(0.3)}
    verdict = rules.grows("A", "B", "near", "far")(found)
    assert verdict.word == rules.HOLDS
    assert verdict.why == "+0.100 → +0.300: +0.200 (+0.173…+0.227)"


def test_a_square_grows_as_the_square_of_the_length_and_its_gradient_to_the_reward_as_the_length() -> None:
    """Within .06 of the powers at infinity: a token's drift outweighs its noise from some ten tokens on."""
    infinite = {"square": 2.0, "reward": 1.0, "ratio": 1.0, "pairs": 0.5, "tokens": -0.5}
    assert report.magnitudes() == pytest.approx(infinite, abs=0.06)


def test_the_objective_of_both_takes_the_runs_own_beta() -> None:
    assert rules.regularized(measured(0.3, 0.8, kl=2.0) | {"beta": 0.1}) == pytest.approx(0.6)


def test_a_crash_is_a_fall_from_ones_best() -> None:
    fallen = [measured(0.3, 0.8, end) for end in (0.2, 0.21, 0.22)]
    assert rules.crashes(("A", "log", None), 0.05)({("A", "log", None): fallen}).word == rules.HOLDS
    risen = [measured(0.3, 0.5, end) for end in (0.80, 0.81, 0.82)]
    assert rules.crashes(("A", "log", None), 0.05)({("A", "log", None): risen}).word == rules.FAILS


def test_generations_are_counted_where_the_line_crosses() -> None:
    """From .2 after 50 responses to .6 after 100: .5 at 87.5."""
    assert rules.generations(measured(0.0, 0.2, 0.6), 0.5) == pytest.approx(87.5)
    assert rules.generations(measured(0.0, 0.2, 0.4), 0.5) is None
    fresh = [measured(0.0, 0.2, 0.6) for _ in SEEDS]
    found = {("A", "fresh", None): fresh}
    for generated, word in ((50, rules.HOLDS), (100, rules.FAILS)):
        found["A", "replay", None] = [measured(0.0, 0.2, 0.6, generated=generated) for _ in SEEDS]
        assert rules.fewer_generations("A", "replay", "fresh", 0.7)(found).word == word


def test_kl_efficiency_is_accuracy_over_the_same_kl() -> None:
    """Both rise linearly from 0 to 1; the second takes twice the KL: means over 0 … 1 of 1/2 and 1/4."""
    assert rules.over_kl(measured(0.0, 1.0), 1.0) == pytest.approx(0.5)
    assert rules.over_kl(measured(0.0, 1.0, kl=2.0), 1.0) == pytest.approx(0.25)


def of_trials(trials, validation: float = 0.5, end: float = 0.5) -> list[dict[str, Any]]:
    made = {**measured(0.3, end), "validation": validation, "cpu_seconds": 1.0}
    return [{**vars(trial), **made} for trial in trials]


def test_every_sentence_can_be_judged_from_its_part() -> None:
    """All runs alike: nothing is above anything, and no rule asks for a cell that isn't run."""
    for part in PARTS.values():
        runs = of_trials(trial for plan in part.plans for trial in part.grid(plan))
        runs += of_trials(trial for plan in part.plans for trial in part.repeats(plan, runs))
        found = part.found(runs)
        assert all(len(of) >= 2 for of in found.values() if of[0]["objective"] != SAME_RATE)
        for sentence in part.sentences:
            assert judge(sentence, {}).word == NOT_RUN
            assert sentence.rule(found).word in (rules.HOLDS, rules.FAILS, rules.EQUAL, rules.UNKNOWN)
        assert report.tables({part.name: found}, {part.name: (len(runs), 1.0)})


def test_open_sentences_get_more_seeds_and_settings_stay_those_of_the_first() -> None:
    part, plan = PARTS["single"], PARTS["single"].plans[0]
    trials = part.grid(plan)
    trials += [trial for trial in part.repeats(plan, of_trials(trials)) if trial not in trials]
    runs = of_trials(trials)
    assert part.more(runs) == []  # all alike: no difference
    for of in runs:
        if of["objective"] in ("AGRO", "KL-PG"):
            of["curve"] = measured(0.3, 0.5 + 0.1 * (of["seed"] == 1))["curve"]
    more = part.more(runs)
    assert [trial.objective for trial in more[::12]] == ["AGRO", "KL-PG", "AGRO, weighted"]
    assert [trial.seed for trial in more[:12]] == list(MORE)
    found = part.found(runs + of_trials(more, validation=0.0))  # they don't take part in the choice
    assert {of["rate"] for of in found["AGRO", plan, None]} == {more[0].rate}
    assert [of["seed"] for of in found["AGRO", plan, None]] == [*SEEDS, *MORE]


def test_who_wrote_a_mixture_is_unknown(world) -> None:
    """Each response is one of either log's, to the same prompt; their log-probs are not told."""
    mixture, first, second = (world.logs[f"{name}, 4"] for name in (MIXTURE, START, OTHER))
    assert mixture.names == first.names == second.names
    assert mixture.behavior.isnan().all()
    of_first = (mixture.tokens == first.tokens).all(1)
    of_second = (mixture.tokens == second.tokens).all(1)
    assert (of_first | of_second).all()
    assert not of_first.all()
    assert not of_second.all()
    assert "behavior_logp" in METHODS["TOPR"].obstacle(PLANS[f"{MIXTURE}, n = 4"])
    assert METHODS["TOPR"].obstacle(PLANS[f"{START}, n = 4"]) == ""


def test_with_one_response_a_prompt_the_update_is_the_group() -> None:
    plan = PLANS[f"{START}, n = 1"]
    assert (plan.groups, plan.n) == (32, 1)
    assert METHODS["AGRO"].options_for(1, 0.1) == {"beta": 0.1, "singletons": "pool"}
    assert METHODS["AGRO"].options_for(4, 0.1) == {"beta": 0.1}


def test_a_run_replays_its_own_earlier_groups(world) -> None:
    """2 fresh groups an update, and from the second one on 2 of those before, with their staleness."""
    trial = Trial("AGRO", "replay 0.5", 1e-3, 0.1)
    racer = Racer(trial, world, world.start[0].clone())
    seen = []
    for update in range(3):
        fresh = runs._sample([racer], world, world.start, update, 0)
        seen.append(racer.rows(fresh, 0))
    assert [len(rows.names) for rows in seen] == [8, 16, 16]
    assert set(seen[1].names[8:]) == set(seen[0].names)
    assert seen[1].staleness.tolist() == [0.0] * 8 + [1.0] * 8
    assert set(seen[2].staleness[8:].tolist()) <= {1.0, 2.0}
    assert trial.data.fresh_an_update == 8


def test_the_sampler_keeps_its_weights(world, monkeypatch) -> None:
    """With new weights every 10 updates these change at update 10 alone; their staleness is said."""
    drawn: list[torch.Tensor] = []
    stalenesses: list[int] = []
    sample = runs._sample

    def noted(racers, world, weights, update, staleness):
        drawn.append(weights.clone())
        stalenesses.append(staleness)
        return sample(racers, world, weights, update, staleness)

    monkeypatch.setattr(runs, "_sample", noted)
    runs.train([Trial("AGRO", "sync 10", 1e-3, 0.1)], world, 12)
    assert [drawn[0].equal(weights) for weights in drawn] == [True] * 10 + [False] * 2
    assert drawn[10].equal(drawn[11])
    assert stalenesses == [*range(10), 0, 1]


def test_all_prompts_differ(task) -> None:
    """Those to sample from, the logged ones, those held out."""
    files = ("prompts", "held_out", "logged")
    rows = {name: (task / f"{name}.jsonl").read_text().splitlines() for name in files}
    asked = {name: [json.loads(line) for line in lines] for name, lines in rows.items()}
    for log in LOGS.values():
        with Store.open(task / log) as store:
            assert {str(sample.prompt) for sample in store.samples()} == {
                r["prompt"] for r in asked["logged"]
            }
    prompts = [row["prompt"] for name in files for row in asked[name]]
    assert len(set(prompts)) == len(prompts)
    assert all(row["answer"] == "".join(sorted(row["prompt"][:-1])) for row in asked["held_out"])


def test_an_update_is_that_of_the_library(world, task) -> None:
    """Weights after two updates, of `Local` on the same samples: all streams, a weight, a value."""
    names = ("AGRO", "AGRO, weighted", "DRO-V", "KL-PG", "imitation of the right", "PPO's clip", "DPPO")
    trials = [Trial(name, LOG, 1e-3, METHODS[name].betas[0]) for name in names]
    weights = world.start.repeat(len(trials), 1)
    racers = [Racer(trial, world, of_run) for trial, of_run in zip(trials, weights, strict=True)]
    for _ in range(2):
        runs._update(racers, world, weights, None)
    for racer, reached in zip(racers, weights, strict=True):
        expected = updated(racer, world, task)
        moved = (expected - world.start[0]).norm()
        assert (reached - expected).norm() < 1e-3 * moved, racer.name  # Adam divides by rounding


def updated(racer: Racer, world: World, task: Path) -> torch.Tensor:
    """Weights after two updates by the library's learner on the log's samples, in the order of `racer`."""
    policy, reference = (Policy.load(PolicyConfig(model=str(task / "start"))) for _ in range(2))
    if racer.value is not None:
        policy.add_value()
    options = METHODS[racer.trial.objective].options_for(4, racer.trial.beta)
    config = RunConfig.of(
        {"objective": {"name": racer.name, **options}, "train": {"lr": racer.trial.rate, "steps": 1}}
    )
    learner = Local(policy, reference, print)
    learner.enter(config, began=None, resumed=None)
    with Store.open(task / LOGS[START]) as store:
        samples = sorted((policy.encode(s) for s in store.samples()), key=lambda s: s.prompt_id)
    drawn = order(world.logs[f"{START}, 4"].groups(racer.needs), plans.ASKED, 0, "log")
    for _ in range(2):
        batch = collate([samples[i] for group in next(drawn) for i in group], learner.version)
        batch = batch.replace(ref_logp=learner.logp(batch, "reference"))
        learner.gradient(batch, racer.name, racer.options, lambda: None)
        learner.move(racer.trial.rate)
    return world.stack.flat(policy.weights())


def test_sampled_log_probs_are_those_of_the_model(world, task) -> None:
    """Of two runs with other weights each, and of the library's policy for the first."""
    weights = torch.cat([world.start, world.start + 0.01])
    prompts = world.fresh.tokens[:8].expand(2, -1, -1)
    drawn = world.stack.draw(weights, prompts, torch.rand(2, 8, 6, generator=torch.Generator()))
    tokens = torch.cat([prompts, drawn.tokens], 2)
    logp = world.logp(world.stack.logits(weights, tokens)[0], tokens)
    sampled = drawn.logp[drawn.mask]
    torch.testing.assert_close(logp[drawn.mask], sampled, **rounding(sampled))
    policy = Policy.load(PolicyConfig(model=str(task / "start")))
    mask = torch.nn.functional.pad(drawn.mask[0], (world.stack.prompt, 0))
    lengths = world.stack.prompt + drawn.mask[0].sum(1)
    own = policy.streams(tokens[0], lengths, mask)["logp"][:, world.stack.prompt :]
    first = drawn.logp[0][drawn.mask[0]]
    torch.testing.assert_close(own[drawn.mask[0]], first, **rounding(first))


def test_a_part_from_end_to_end(out, capsys) -> None:
    run.main(["replay", "--small", "--out", str(out)])
    result = json.loads((out / "result.json").read_text())
    assert len(result["verdicts"]) == len(PARTS["replay"].sentences)
    assert {name for name, of in result["runs"].items() if of} == {"replay"}
    assert len({r["seed"] for r in result["runs"]["replay"]}) == len(SEEDS)
    assert (out / "replay.svg").stat().st_size > 5000
    assert "AGRO, weighted by the sampler, 75%: **" in capsys.readouterr().out
    before = [file.stat().st_mtime_ns for file in sorted((out / "runs").iterdir())]
    run.main(["replay", "--small", "--out", str(out)])
    assert "AGRO, weighted by the sampler, 75%: **" in capsys.readouterr().out
    assert before == [file.stat().st_mtime_ns for file in sorted((out / "runs").iterdir())]


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(Refused, match="figure9"):
        run.main(["figure9"])
    with pytest.raises(Refused, match="nothing"):
        run.main([])
