"""reproductions/paper: the rules of the verdicts, the data of the experiments, and a part from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agro.errors import Refused
from reproductions.arena import lockstep
from reproductions.arena.task import OTHER, START, Files
from reproductions.paper import plans, report, rules, run
from reproductions.paper.experiments import MORE, NOT_RUN, PARTS, SAME_RATE, SEEDS, judge
from reproductions.paper.methods import METHODS, TOPR
from reproductions.paper.plans import MIXTURE, PLANS
from reproductions.paper.runs import Recorded, Trial
from reproductions.paper.statements import magnitudes


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("paper")


@pytest.fixture(scope="module")
def files(out) -> Files:
    return plans.prepare(out, plans.CARELESS, small=True)


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
    assert magnitudes() == pytest.approx(infinite, abs=0.06)


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


def test_who_wrote_a_mixture_is_unknown(files) -> None:
    """Each response is one of either log's, to the same prompt; their log-probs are not told."""
    logs = plans.load(files).logs
    mixture, first, second = (logs[f"{name}, 4"] for name in (MIXTURE, START, OTHER))
    assert mixture.names == first.names == second.names
    assert mixture.behavior.isnan().all()
    of_first = (mixture.tokens == first.tokens).all(1)
    of_second = (mixture.tokens == second.tokens).all(1)
    assert (of_first | of_second).all()
    assert not of_first.all()
    assert not of_second.all()
    assert "behavior_logp" in METHODS[TOPR].obstacle(PLANS[f"{MIXTURE}, n = 4"])
    assert METHODS[TOPR].obstacle(PLANS[f"{START}, n = 4"]) == ""


def test_with_one_response_a_prompt_the_update_is_the_group() -> None:
    plan = PLANS[f"{START}, n = 1"]
    assert (plan.groups, plan.n) == (32, 1)
    assert METHODS["AGRO"].options_for(1, 0.1) == {"beta": 0.1, "singletons": "pool"}
    assert METHODS["AGRO"].options_for(4, 0.1) == {"beta": 0.1}


def test_a_run_replays_its_own_earlier_groups(files) -> None:
    """2 fresh groups an update, and from the second one on 2 of those before, of their age in updates."""
    world, trial = plans.load(files), Trial("AGRO", "replay 0.5", 1e-3, 0.1)
    racer = Recorded(trial, world, world.start[0].clone())
    seen = []
    for update in range(3):
        fresh = lockstep._sample([racer], world, world.start, update, 0)
        seen.append(racer.rows(fresh, 0))
    assert [len(rows.names) for rows in seen] == [8, 16, 16]
    assert set(seen[1].names[8:]) == set(seen[0].names)
    assert seen[1].age.tolist() == [0.0] * 8 + [1.0] * 8
    assert set(seen[2].age[8:].tolist()) <= {1.0, 2.0}
    assert trial.data.fresh_an_update == 8


def test_the_sampler_keeps_its_weights(files, monkeypatch) -> None:
    """With new weights every 10 updates the weights that sample change at update 10 alone."""
    drawn: list[torch.Tensor] = []
    sample = lockstep._sample
    monkeypatch.setattr(
        lockstep, "_sample", lambda *words: (drawn.append(words[2].clone()), sample(*words))[1]
    )
    lockstep.train([Trial("AGRO", "sync 10", 1e-3, 0.1)], plans.load(files), 12, Recorded)
    assert [drawn[0].equal(weights) for weights in drawn] == [True] * 10 + [False] * 2
    assert drawn[10].equal(drawn[11])


def test_a_part_from_end_to_end(files, out, capsys) -> None:
    run.main(["replay", "--small", "--out", str(out)])
    result = json.loads((out / "result.json").read_text())
    assert len(result["verdicts"]) == len(PARTS["replay"].sentences)
    assert {name for name, of in result["runs"].items() if of} == {"replay"}
    assert len({r["seed"] for r in result["runs"]["replay"]}) == len(SEEDS)
    for suffix in ("svg", "pdf"):
        assert (out / f"replay.{suffix}").stat().st_size > 5000
    assert "AGRO, weighted by the sampler, 75%: **" in capsys.readouterr().out
    before = [file.stat().st_mtime_ns for file in sorted((out / "runs").iterdir())]
    run.main(["--all", "--measured", "--out", str(out)])
    assert "AGRO, weighted by the sampler, 75%: **" in capsys.readouterr().out
    assert before == [file.stat().st_mtime_ns for file in sorted((out / "runs").iterdir())]


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(Refused, match="figure9"):
        run.main(["figure9"])
    with pytest.raises(Refused, match="nothing"):
        run.main([])
