"""reproductions/panel: the jobs, who applies where, the one rate of a method, and short runs end to end."""

from __future__ import annotations

import json
import math
import random
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agro.api.race import default_for, key_values
from agro.config import RunConfig
from agro.errors import Refused
from agro.store import Store
from agro.types import Batch
from reproductions import harness
from reproductions.panel import jobs, logs, methods, play, race, report, run, studies, tasks
from reproductions.panel.candidates import averaged_baseline, filtered_negatives, squared_preference
from reproductions.panel.jobs import EVERY, JOBS, START
from reproductions.panel.methods import METHODS, NOTHING, PARTS
from reproductions.panel.play import Row
from reproductions.panel.tasks import TASKS, Writer

FACTS = {"mean": 0.3, "upper_quartile": 1.0}


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("panel")


def measured(
    job: str, method: str, rate: float | None, reward: float | None, seed: int = 0
) -> dict[str, Any]:
    ends = {"kl": 1.0, "kl_error": 0.1, "cpu_seconds": 1.0, "measuring_seconds": 1.0, "stopped": ""}
    return {"job": job, "method": method, "rate": rate, "seed": seed, "reward": reward, **ends}


def test_the_jobs_differ() -> None:
    """At least fourteen, a third of them kept; no task, and hence no rule, is there twice."""
    assert len(EVERY) >= 14
    assert len({job.task.name for job in EVERY}) == len(EVERY) == len(JOBS)
    assert sum(job.kept for job in EVERY) == 10
    assert {job.model.family for job in EVERY} == {"llama", "gpt2", "gpt_neox"}


@pytest.mark.parametrize("task", TASKS)
def test_the_answers_of_the_tasks(task) -> None:
    """By the examples of tasks.toml, which were made by hand."""
    declared = tomllib.loads(Path(tasks.__file__).with_suffix(".toml").read_text("utf-8"))
    examples = declared[task]["examples"]
    assert examples
    assert {prompt: TASKS[task].answer(prompt) for prompt in examples} == examples


def test_each_task_and_each_job_is_declared_whole() -> None:
    """No rule without a task, and no job that the guide's table puts into a row without a name."""
    assert tasks.ANSWERS.keys() == TASKS.keys() >= tasks.PROMPTS.keys()
    assert all(job.kind for job in EVERY)


def test_all_tasks_stay_in_their_alphabets() -> None:
    rng = random.Random(0)
    for task in TASKS.values():
        for _ in range(50):
            prompt = task.prompt(rng)
            written = Writer(slip=0.5, swap=0.2, drop=0.2).write(task, prompt, rng)
            assert set(prompt + task.answer(prompt) + written) <= set(task.alphabet)


def test_a_grade_is_the_share_of_characters_that_are_right() -> None:
    """Of 02357 the response 02375 has three, and 0235 four of five."""
    task = TASKS["sort"]
    assert task.grade("52073>", "02375") == pytest.approx(0.6)
    assert task.grade("52073>", "0235") == pytest.approx(0.8)
    assert (task.right("52073>", "02357"), task.right("52073>", "0235")) == (1.0, 0.0)


def test_a_writer_slips_as_often_as_it_says() -> None:
    """Of ten digits one is the right one by chance: 0.3 · 0.9 = 0.27 are wrong."""
    rng, task = random.Random(0), TASKS["sort"]
    grades = [task.grade("52073>", Writer(slip=0.3).write(task, "52073>", rng)) for _ in range(2000)]
    assert 1 - sum(grades) / len(grades) == pytest.approx(0.27, abs=0.02)


def test_who_applies_where() -> None:
    """By what a log has: pairs, log-probs, several responses to compare; on fresh samples nothing stored."""
    able = {
        name: [job.name for job in EVERY if not isinstance(method(job, FACTS), str)]
        for name, method in METHODS.items()
    }
    assert able[NOTHING] == list(JOBS)
    of_pairs = [job.name for job in EVERY if job.data == "pairs"]
    fresh = [job.name for job in EVERY if job.data == "fresh"]
    assert len(of_pairs) == 3
    assert len(fresh) == 5
    assert able["DPO"] == able["IPO"] == able["SquaredPO, β = 0.1"] == of_pairs
    assert able["GRPO"] == able["RLOO"] == fresh
    assert able["both rules"] == [name for name in JOBS if JOBS[name].data != "groups"]
    assert able["TOPR"] == [job.name for job in EVERY if job.logs_start]
    assert able["the default"] == able["REINFORCE"] == able["the plain mean"] == list(JOBS)
    stored = [name for name in JOBS if name not in fresh]
    assert able["all groups"] == [name for name in stored if JOBS[name].data == "groups"]
    assert able["TBRM, β = 0.01"] == able["the ratio alone"] == able["no weight"] == stored
    assert able["replay, spread = true"] == fresh
    assert able["QRPO, β = 0.1"] == [n for n in stored if n not in (*of_pairs, "turns")]


def test_qrpo_has_samples_of_the_start(out) -> None:
    world = play.world("graded", out, logs.SMALL)
    qrpo = play.settings(world, Row("graded", "QRPO, β = 0.1", 1e-3), Path("log.db"))
    assert qrpo.data.value_store == str(world.files.values)
    with Store.open(world.files.values, read_only=True) as store:
        samples = list(store.samples())
    assert len(samples) == 8 * world.facts["prompts"]
    assert all(s.reward is not None for s in samples)


def test_the_default_is_the_recipe_for_the_data(out) -> None:
    """Of one response a prompt all of a step are compared; others have the recipe's own options."""
    found = {}
    for job in ("own", "stars", "pairs", "fresh"):
        config = play.settings(
            play.world(job, out, logs.SMALL), Row(job, "the default", 1e-3), Path("log.db")
        )
        found[job] = config.objective.name, config.objective.options.get("singletons")
    assert found == {
        "own": ("agro", "drop"),
        "stars": ("agro", "pool"),
        "pairs": ("pair_consistency", "drop"),
        "fresh": ("agro", None),
    }
    assert (config.train.gain_ratio, config.train.step_kl) == (0.75, None)  # of fresh samples
    own = play.world("own", out, logs.SMALL)
    assert play.settings(own, Row("own", "the default", 1e-3), Path("log.db")).train.step_kl == 0.005
    unbounded = play.settings(own, Row("own", "no rule for a step", 1e-3), Path("log.db"))
    assert (unbounded.train.gain_ratio, unbounded.train.step_kl) == (None, None)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_changes_what_the_default_has(part, out) -> None:
    """In one section, whatever the data: no row of the ablation is the default under another name."""
    for job in ("own", "stars", "pairs", "fresh"):
        if isinstance(METHODS[part](JOBS[job], FACTS), str):
            continue
        world = play.world(job, out, logs.SMALL)
        given, default = (
            play.settings(world, Row(job, method, 1e-3), Path("log.db")).model_dump()
            for method in (part, "the default")
        )
        assert len([section for section in default if given[section] != default[section]]) == 1


def test_squared_preference_is_the_logistic_loss_of_log_t_over_t() -> None:
    """t = e of the winner and 1/e of the loser: f′ = 1/e and −e, so that −log σ(½ (1/e + e)) with β = ½."""
    batch = Batch.of(
        mask=[[0, 1]] * 2, reward=[1, 0], group=["a", "a"], ref_logp=[[0.0, -2.0]] * 2, pairs=[(0, 1)]
    )
    logp = torch.tensor([[0.0, -1.0], [0.0, -3.0]], dtype=torch.float64)
    found = squared_preference({"logp": logp}, batch, beta=0.5).loss
    assert float(found) == pytest.approx(math.log1p(math.exp(-0.5 * (math.exp(-1) + math.e))), rel=1e-12)


def test_of_a_negative_response_the_least_likely_tokens_are_pushed_down() -> None:
    """Of four tokens a quarter is one, of two tokens too; |y| counts all, and each side counts half."""
    mask = [[0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 1, 0, 0]]
    batch = Batch.of(mask=mask, reward=[1, 0, 0], group=["a", "b", "c"])
    rows = [[0.0, -1.0, -2.0, -3.0, -4.0], [0.0, -1.0, -5.0, -2.0, -3.0], [0.0, -6.0, -1.0, 0.0, 0.0]]
    logp = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    loss = filtered_negatives({"logp": logp}, batch, threshold=0.5, keep=0.25).loss
    assert loss.item() == pytest.approx(-0.5 * (-10 / 4 - (-5 / 4 + -6 / 2) / 2))
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0, *[-0.125] * 4], [0, 0, 0.0625, 0, 0], [0, 0.125, 0, 0, 0]]
    alone = filtered_negatives({"logp": logp}, batch, threshold=2.0, keep=1.0).loss
    assert alone.item() == pytest.approx((-10 / 4 - 11 / 4 - 7 / 2) / 3)


def test_the_baseline_of_rae_is_a_running_mean() -> None:
    """b = .5 · 0 + .5 · 1 = .5 after the first reward, and .25 after the second."""
    batch = Batch.of(mask=[[0, 1]] * 2, reward=[1, 0], group=["a", "b"])
    logp = torch.tensor([[0.0, -1.0], [0.0, -3.0]], dtype=torch.float64)
    found = averaged_baseline({"logp": logp}, batch, start=0.0, decay=0.5).loss
    assert found.item() == pytest.approx(-(0.5 * -1 + -0.25 * -3) / 2)


def test_ratings_are_centered_by_user(out) -> None:
    """Each prompt is one user's, whose mean the copy of the log that a run reads has less of."""
    job = logs.SMALL.of(JOBS["users"])
    files = logs.prepare(job, out, logs.SMALL)
    given = METHODS["centered by user"](job, FACTS)
    assert isinstance(given, dict)
    assert isinstance(METHODS["centered by user"](JOBS["stars"], FACTS), str)
    shutil.copy(files.log, out / "centered.db")
    play.center(out / "centered.db", given)
    with Store.open(files.log, read_only=True) as before, Store.open(out / "centered.db") as after:
        assert {s.meta["user"] for s in before.samples()} == set(range(24))
        shifts = [s.meta["normalizer"]["shift"] for s in after.samples()]
    assert shifts == [0.0] * 24  # of one rating each


def test_kept_jobs_need_a_word() -> None:
    assert all(not JOBS[name].kept for name in run.jobs_to_run([], kept=False))
    assert run.jobs_to_run(["thumbs"], kept=True) == ["thumbs"]
    with pytest.raises(Refused, match="kept for the last look"):
        run.jobs_to_run(["thumbs"], kept=False)
    with pytest.raises(Refused, match="expected one of own"):
        run.jobs_to_run(["nothing like it"], kept=False)


def test_each_method_has_one_rate_for_all_jobs() -> None:
    """At 1e-3 the mean is .55, at 3e-4 .5: the best of one job doesn't count."""
    runs = [measured("own", "the default", 1e-3, 0.9), measured("better", "the default", 1e-3, 0.2)]
    runs += [measured("own", "the default", 3e-4, 0.5), measured("better", "the default", 3e-4, 0.5)]
    assert report.chosen_rates(runs) == {"the default": 1e-3}
    rows = run.further_rows([("own", "the default"), ("own", NOTHING), ("own", "KTO")], runs, seeds=2)
    assert rows == [Row("own", "the default", 1e-3, 1)]
    rows = run.further_rows([("own", "the default")], runs, 2, [1e-3, 3e-3])
    assert rows == [Row("own", "the default", rate, 1) for rate in (1e-3, 3e-3)]
    best = report.at_best([r for r in runs if r["job"] == "better"])
    assert [r["rate"] for r in best] == [3e-4]


def test_a_run_that_has_no_value_is_the_worst() -> None:
    runs = [measured("own", "the default", 1e-3, None), measured("own", "the default", 3e-4, 0.1)]
    assert report.chosen_rates(runs) == {"the default": 3e-4}


def test_a_method_is_compared_with_the_start() -> None:
    """.8 is .5 above the start, .3; on the other job .1 is .2 below it."""
    imitation = "imitation of the good"
    runs = [
        measured("own", NOTHING, None, 0.3),
        measured("own", imitation, 1e-3, 0.6),
        measured("own", "the default", 1e-3, 0.7),
        measured("own", "the default", 1e-3, 0.9, seed=1),
        measured("better", NOTHING, None, 0.3),
        measured("better", imitation, 1e-3, 0.2),
        measured("better", "the default", 1e-3, 0.1),
    ]
    apart = report.above_start(harness.grouped(runs, "job", "method"), "the default")
    assert apart == {"own": pytest.approx(0.5), "better": pytest.approx(-0.2)}


def test_an_ablation_is_paired_by_job_rate_and_seed() -> None:
    """Without the weight .2 lower on own, in the mean of two seeds, and .1 on better: −.15 ± .05. A third
    seed, which the default doesn't have, and other rates don't count. KTO is .3 below and .1 above."""
    runs = [measured("own", "the default", 3e-3, 0.8, seed) for seed in (0, 1)]
    runs += [measured("own", "no weight", 3e-3, reward, seed) for seed, reward in enumerate((0.5, 0.7, 0.0))]
    runs += [measured("better", "the default", 3e-3, 0.4), measured("better", "no weight", 3e-3, 0.3)]
    runs += [measured("better", "no weight", 1e-3, 0.0), measured("better", "KTO", 3e-3, 0.5)]
    runs += [measured("own", "KTO", 3e-3, 0.5)]
    text = report.tables({"runs": runs})
    paired = "-0.150 ± 0.050<br>jobs: 2, runs: 3; own -0.20"
    assert f"| no weight | – | – | {paired} | – |" in text  # not at all rates, so none is the best
    assert "| KTO | 0.003 | 2 | -0.100 | -0.300…+0.100 |" in text


def test_a_rate_is_chosen_on_other_prompts_than_those_that_are_reported() -> None:
    """3e-4 is ahead on the prompts that choose; .5 and .3 are of the others, so without the weight −.2."""
    runs = []
    for method, others in (("the default", 0.5), ("no weight", 0.3)):
        for rate, choosing, reported in ((3e-4, 0.9, others), (1e-3, 0.1, 0.8), (3e-3, 0.2, 0.9)):
            halves = {"reward_choosing": choosing, "reward_others": reported}
            runs.append(measured("own", method, rate, (choosing + reported) / 2) | halves)
    assert [run["rate"] for run in report.at_best(runs[:3])] == [3e-4]
    assert report.paired_at_best(runs, "no weight") == {"own": [pytest.approx(-0.2)]}
    assert "-0.200<br>jobs: 1, runs: 1; own -0.20 |" in report.tables({"runs": runs})


def test_recorded_runs_count_as_complete(tmp_path) -> None:
    run.restore(tmp_path)
    recorded = json.loads((Path(run.__file__).parent / "result.json").read_text())["runs"]
    assert len(list((tmp_path / "runs").iterdir())) == len(recorded)
    first = recorded[0]
    row = Row(first["job"], first["method"], first["rate"], first["seed"])
    assert play.complete(row, tmp_path, logs.FULL) == first


def test_a_thousand_tokens_from_end_to_end(tmp_path, capsys) -> None:
    """With 40 tokens, and imitation alone: rewards of a start that learned nothing don't differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(studies.KINDS, "thousand", replace(studies.KINDS["thousand"], max_new=40))
        changes = {"methods": ["imitation of the good"], "rates": [1e-3]}
        patch.setitem(studies.STUDIES, "thousand", studies.STUDIES["thousand"] | changes)
        studies.main(["thousand", "--small", "--seeds", "2", "--out", str(tmp_path)])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    methods = [row.removeprefix("| ").split(" | ")[:5] for row in rows[1:]]
    assert methods == [
        ["thousand", "1", NOTHING, "–", "1"],
        ["thousand", "1", "imitation of the good", "0.001", "2"],
    ]
    assert "thousand" not in JOBS


def test_the_bounds_of_short_runs_are_what_their_names_say() -> None:
    """The library doubles a bound at 25 updates: 0.005 whatever the updates, and what 100 have over 25."""
    assert studies.bound_of(studies.OWN, 25) == 0.005
    assert studies.bound_of(studies.LONG, 25) == pytest.approx(0.0025, rel=1e-12)
    assert studies.bound_of(studies.IN_SUM, 25) == pytest.approx(0.01, rel=1e-12)
    assert studies.bound_of(studies.NO_BOUND, 25) is None
    *bounds, _ = studies.STUDIES["short"]["methods"]
    assert bounds == [studies.OWN, studies.LONG, studies.IN_SUM, studies.NO_BOUND]


def test_the_mean_of_all_jobs() -> None:
    """.75 on one job and .25 on the others: of eight jobs 2.5/8, of seven 2.25/7."""
    names = studies.STUDIES["short"]["jobs"]
    of_jobs = [measured(job, studies.LONG, 1e-3, 0.25 + 0.5 * (job == "own")) for job in names]
    runs = [run | {"updates": 16} for run in of_jobs] + [run | {"updates": 25} for run in of_jobs[:-1]]
    lines = studies.over_jobs(runs).splitlines()
    assert lines[2:] == [
        f"| 16 | {studies.LONG} | 0.001 | 0.312 |",
        f"| 25 | {studies.LONG} | 0.001 | 0.321 |",
    ]


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"weight": 1}, "KTO: expected some of recipe, objective"),
        ({"refused": {"weight": ""}}, "KTO, refused: expected some of groups, one each"),
        ({"on": {"weight": {}}}, "KTO, on: expected some of groups, one each"),
        ({"on": {"groups": {"weight": 1}}}, "KTO, on groups: expected some of recipe, objective"),
    ],
)
def test_keys_that_nothing_reads_are_refused(given, where) -> None:
    with pytest.raises(Refused, match=f"{where}.*; got weight"):
        methods.declared({"KTO": given})


def test_sizes_differ_in_prompts_alone() -> None:
    """The table has a row for each size and method, means over seeds; .6 is that of .5 and .7."""
    small, large = (studies.sized("ratings", prompts, 128, Path("start")) for prompts in (512, 8192))
    assert replace(small, name="", prompts=0) == replace(large, name="", prompts=0)
    assert studies.sized("noisy thumbs", 512, 128, Path("start")).wrong == 0.2
    rows = studies.rows(small, studies.STUDIES["sizes"], seeds=2)
    assert [row.seed for row in rows] == [0, *[0] * 4, *[1] * 4]
    assert [row.rate for row in rows[:5]] == [None, 1e-3, 1e-3, 1e-3, 3e-4]
    runs = [measured("ratings, 512", NOTHING, None, 0.3)]
    runs += [measured("ratings, 512", "DRO", 1e-3, reward, seed) for seed, reward in enumerate((0.5, 0.7))]
    lines = studies.table([run | {"updates": 128} for run in runs]).splitlines()
    assert lines[2:] == [
        "| ratings, 512 | 128 | nothing | – | 1 | 0.300 | 1.0 |",
        "| ratings, 512 | 128 | DRO | 0.001 | 2 | 0.600 (0.500 to 0.700) | 1.0 (1.0 to 1.0) |",
    ]


def test_logs_of_a_kind_are_of_one_start(out) -> None:
    first = logs.prepare(logs.SMALL.of(JOBS["stars"]), out, logs.SMALL)
    other = logs.prepare(logs.SMALL.of(studies.sized("ratings", 24, 128, first.start)), out, logs.SMALL)
    weights = "model.safetensors"
    assert (other.start / weights).read_bytes() == (first.start / weights).read_bytes()
    assert other.prompts.read_text() != first.prompts.read_text()


def test_a_race_has_the_job_s_data(out, tmp_path) -> None:
    """Of judged pairs no rewards, which would make it a log of rewards."""
    kinds = {}
    for name in race.DATA:
        given = race.values(name, tmp_path / name, out, logs.SMALL)
        default = RunConfig.load("fresh", list(key_values(given)))
        kinds[name] = default_for(default.data)
        assert default.reward.options == {"job": name}
    logged = dict.fromkeys(("own", "better, noisy", "better, graded", "worse"), "log")
    assert kinds == logged | {"fresh": "fresh", "stars": "feedback", "pairs": "pairs"}
    log = JOBS["own"]
    assert jobs.reward(["52073>", "52073>"], ["02357", "02375"], job=log.name) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["graded", "pairs", "GPT-2", "GPT-NeoX"])
def test_logs_are_made_as_the_job_says(name, out) -> None:
    job = logs.SMALL.of(JOBS[name])
    files = logs.prepare(job, out, logs.SMALL)
    held_out = {json.loads(line)["prompt"] for line in files.held_out.read_text().splitlines()}
    with Store.open(files.log, read_only=True) as store:
        samples, pairs = list(store.samples()), list(store.pairs())
        reward = {s.id: s.reward for s in samples}
    assert len(held_out) == logs.SMALL.held_out
    assert not held_out & {str(s.prompt) for s in samples}
    own = [s for s in samples if s.source == "start"]
    assert all(s.behavior_logp is not None for s in own)
    if name == "graded":
        sizes = [len([s for s in samples if s.prompt_id == of]) for of in {s.prompt_id for s in samples}]
        assert min(sizes) >= 2
        assert max(sizes) <= 8
        assert {s.source for s in samples} == {"start", "author 1", "author 2"}
    if name == "pairs":
        assert len(pairs) == files.facts["groups"]
        assert all((reward[p.winner], reward[p.loser]) == (1.0, 0.0) for p in pairs)
    assert job.authors[0] is START


def test_a_short_panel_from_end_to_end(out, capsys) -> None:
    """What is complete isn't run again, and what isn't trained is 0 nats from the start."""
    words = ["--small", "--seeds", "2", "--rates", "3e-3", "--out", str(out)]
    words += ["--only", "graded", "pairs", "--methods", NOTHING, "DPO", "the default", "no weight"]
    run.main(words)
    result = json.loads((out / "result.json").read_text())
    assert (out / "figure.png").stat().st_size > 10_000
    assert len(result["runs"]) == 2 + 2 * 5  # the starts once, each method with two seeds
    assert ("graded", "DPO") not in {(made["job"], made["method"]) for made in result["runs"]}
    for made in result["runs"]:
        assert 0 <= made["reward"] <= 1
        assert not made["stopped"]
        if made["method"] == NOTHING:
            assert made["kl"] == pytest.approx(0, abs=1e-4)
        else:
            assert made["kl"] != 0
    before = {file: file.stat().st_mtime_ns for file in (out / "runs").iterdir()}
    run.main([*words, "--measured"])
    assert before == {file: file.stat().st_mtime_ns for file in (out / "runs").iterdir()}
    assert "| no weight |" in capsys.readouterr().out


def test_a_run_caches_what_the_panel_knows(out) -> None:
    """The log that a run copies has the reference's log-probs of all its responses."""
    world = play.world("graded", out, logs.SMALL)
    key = world.start.reference_key
    with Store.open(world.files.log, read_only=True) as store:
        ids = [s.id for s in store.samples()]
        known = store.ledger.reference_logp("a new run", str(key), ids, until=10**6)
    assert len(known) == len(ids) == world.facts["responses"]
