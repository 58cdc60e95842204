"""reproductions/arena: who takes part, the choice of settings, staleness, and a short run from end to end."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import torch
from rounding import rounding

from agro import objectives
from agro.config import PolicyConfig, RunConfig
from agro.config.recipes import recipes
from agro.errors import Refused
from agro.models.policy import Policy
from agro.train.collate import collate
from agro.train.learner import Local
from reproductions.arena import kinds, lockstep, play, report, run, task, theory
from reproductions.arena.kinds import KINDS, RATES, Row
from reproductions.arena.world import Logged, order, world


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> task.Files:
    return task.prepare(tmp_path_factory.mktemp("arena"), task.SMALL)


def measured(rate: float, validation: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    row = {"objective": "grpo", "kind": "log", "rate": rate, "beta": None, "seed": seed}
    ends = {
        "validation": validation,
        "accuracy": 0.5,
        "kl": 1.0,
        "cpu_seconds": 1.0,
        "updates": 2,
        "stopped": "",
    }
    return {**row, **ends, **more}


def test_who_takes_part_is_a_matter_of_needs() -> None:
    """What needs fresh samples is on these alone, what needs pairs on logs alone."""
    for name in objectives.names():
        able = [kind.name for kind in KINDS.values() if not kinds.obstacle(name, kind)]
        if "fresh" in kinds.needs(name):
            assert able in ([], ["fresh"])
        if "pairs" in kinds.needs(name):
            assert set(able) <= {"log", "other's log"}
    assert not any(kinds.obstacle("agro", kind) for kind in KINDS.values())
    assert "staleness 0" in kinds.obstacle("agro_onpolicy", KINDS["stale 1"])
    assert "needs pairs" in kinds.obstacle("dpo", KINDS["half"])
    assert "no rewards" in kinds.obstacle("sft", KINDS["fresh"])


def test_an_objective_of_ones_own_can_take_part(tmp_path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from agro.objectives.core import Terms\n"
        "def plain(streams, batch, *, beta, power: float = 1.0): return Terms(streams['logp'].sum())\n"
        "def unset(streams, batch, *, power): return Terms(streams['logp'].sum())\n"
    )
    assert "power has no default" in kinds.obstacle(f"{own}:unset", KINDS["log"])
    assert kinds.betas(f"{own}:plain") == kinds.BETAS


def test_the_grid_is_the_same_for_all() -> None:
    """β is tried where it has no default: those of GRPO and RLOO are 0."""
    for name in ("agro", "grpo", "dpo", "sft"):
        assert [row.rate for row in run.trials(name, "log")] == list(RATES)
    assert kinds.betas("agro") == kinds.betas("dpo") == kinds.BETAS
    assert kinds.betas("grpo") == kinds.betas("rloo") == kinds.betas("sft") == (None,)
    assert run.other_betas(Row("agro", "log", 1e-3, 0.1)) == [Row("agro", "log", 1e-3, 0.01)]


def test_the_prompts_for_validation_choose() -> None:
    """The mean of all seeds so far: of .9 and .1 it is .5."""
    runs = [measured(1e-4, 0.3, accuracy=0.9), measured(3e-4, 0.6), measured(1e-3, 0.9)]
    assert run.best_of(runs, ("grpo", "log")) == (Row("grpo", "log", 1e-3), 0.9)
    runs.append(measured(1e-3, 0.1, seed=1))
    assert run.best_of(runs, ("grpo", "log")) == (Row("grpo", "log", 3e-4), 0.6)
    assert run.best_of(runs, ("grpo", "fresh")) is None


def test_all_prompts_differ(files) -> None:
    """Those to sample from, the logged ones, those held out."""
    prompts = [json.loads(line)["prompt"] for line in files.prompts.read_text().splitlines()]
    held_out = [json.loads(line) for line in files.held_out.read_text().splitlines()]
    prompts += [row["prompt"] for row in held_out]
    with task.Store.open(files.log(task.START)) as log, task.Store.open(files.log(task.OTHER)) as other:
        logged = {str(sample.prompt) for sample in log.samples()}
        assert logged == {str(sample.prompt) for sample in other.samples()}
        for pair in log.pairs():
            winner, loser = (next(iter(log.samples(ids=[i]))) for i in (pair.winner, pair.loser))
            assert (winner.reward, loser.reward) == (1.0, 0.0)
    assert len({*prompts, *logged}) == len(prompts) + len(logged)
    assert all(row["answer"] == "".join(sorted(row["prompt"][:-1])) for row in held_out)


def test_samples_are_as_old_as_said(files, monkeypatch) -> None:
    """With a lag of 1 the first update has fresh samples and the second one those of one update ago."""
    ages: list[Any] = []
    update = lockstep._update
    monkeypatch.setattr(
        lockstep, "_update", lambda *words: (ages.append((words[3].age, words[2].clone())), update(*words))
    )
    drawn: list[torch.Tensor] = []
    sample = lockstep._sample
    monkeypatch.setattr(
        lockstep, "_sample", lambda *words: (drawn.append(words[2].clone()), sample(*words))[1]
    )
    lockstep.train([Row("rloo", "stale 1", 1e-3)], world(files), 2)
    assert [age for age, _ in ages] == [0, 1]
    assert drawn[1].equal(ages[0][1])
    assert not drawn[1].equal(ages[1][1])
    assert play._play([Row("rloo", "stale 1")], files)[0]["staleness"] == 0.5


def test_half_of_the_groups_are_fresh(files) -> None:
    """4 prompts of the run, of staleness 0, then 4 of the log, of unknown staleness."""
    loaded = world(files)
    [racer], _ = lockstep.train([Row("rloo", "half", 1e-3)], loaded, task.SMALL.updates)
    assert racer.updates == task.SMALL.updates
    rows = racer.rows(lockstep._sample([racer], loaded, loaded.start, 2, 0), 0)
    assert rows.roles == ["policy"] * 16 + ["log"] * 16
    assert rows.age[:16].tolist() == [0.0] * 16
    assert rows.age[16:].isnan().all()
    assert set(rows.names[:16]) <= set(loaded.fresh.names)
    assert len(set(rows.names)) == 8


def test_an_update_is_that_of_the_library(files) -> None:
    """Weights after two updates, of `Local` on the same samples: all streams, pairs, a weight, a value."""
    loaded = world(files)
    names = ("agro", *kinds.RECIPES, "dro", "kl_pg", "otr", "dpo", "sft")
    rows = [Row(name, "log", 1e-3, kinds.betas(name)[0]) for name in names]
    weights = loaded.start.repeat(len(rows), 1)
    racers = [lockstep.Racer(row, loaded, of_run) for row, of_run in zip(rows, weights, strict=True)]
    for _ in range(2):
        lockstep._update(racers, loaded, weights, None, 1.0)
    for racer, reached in zip(racers, weights, strict=True):
        expected = updated(racer, files, 2)
        moved = (expected - loaded.start[0]).norm()
        assert (reached - expected).norm() < 1e-3 * moved, racer.row.objective  # Adam divides by rounding


def updated(racer: lockstep.Racer, files: task.Files, updates: int) -> torch.Tensor:
    """Weights after updates by the library's learner on the log's samples, in the order of `racer`."""
    policy, reference = (Policy.load(PolicyConfig(model=str(files.start))) for _ in range(2))
    if racer.value is not None:
        policy.add_value()
    objective = {"name": racer.name, **racer.row.options}
    config = RunConfig.of({"objective": objective, "train": {"lr": racer.row.rate, "steps": 1}})
    learner = Local(policy, reference, print)
    learner.enter(config, began=None, resumed=None)
    with task.Store.open(files.log(task.START)) as store:
        samples, judged = [policy.encode(sample) for sample in store.samples()], list(store.pairs())
    log = world(files).logs[task.START]
    drawn = order(log.groups(racer.needs), task.GROUPS, 0, "log")
    for _ in range(updates):
        part = [samples[i] for group in next(drawn) for i in group]
        ids = {sample.id for sample in part}
        pairs = [pair for pair in judged if {pair.winner, pair.loser} <= ids and "pairs" in racer.needs]
        batch = collate(part, learner.version, pairs)
        batch = batch.replace(ref_logp=learner.logp(batch, "reference"))
        learner.gradient(batch, racer.name, racer.options, lambda: None)
        learner.move(racer.row.rate)
    return world(files).stack.flat(policy.weights())


def test_sampled_log_probs_are_those_of_the_model(files) -> None:
    """Of two runs with other weights each, and of the library's policy for the first."""
    loaded = world(files)
    weights = torch.cat([loaded.start, loaded.start + 0.01])
    prompts = loaded.fresh.tokens[:8].expand(2, -1, -1)
    drawn = loaded.stack.draw(weights, prompts, torch.rand(2, 8, 6, generator=torch.Generator()))
    tokens = torch.cat([prompts, drawn.tokens], 2)
    logp = loaded.logp(loaded.stack.logits(weights, tokens)[0], tokens)
    sampled = drawn.logp[drawn.mask]
    torch.testing.assert_close(logp[drawn.mask], sampled, **rounding(sampled))
    policy = Policy.load(PolicyConfig(model=str(files.start)))
    mask = torch.nn.functional.pad(drawn.mask[0], (loaded.stack.prompt, 0))
    lengths = loaded.stack.prompt + drawn.mask[0].sum(1)
    own = policy.streams(tokens[0], lengths, mask)["logp"][:, loaded.stack.prompt :]
    first = drawn.logp[0][drawn.mask[0]]
    torch.testing.assert_close(own[drawn.mask[0]], first, **rounding(first))


def test_a_run_that_is_refused_says_why(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Logged, "groups", lambda log, needed: [[0, 1]])
    monkeypatch.setattr(lockstep.Racer, "_logged", lambda racer: without_pairs(racer))
    [found] = play.complete([Row("dpo", "log", beta=0.1)], files, tmp_path)
    assert found["updates"] == 0
    assert "needs pairs" in found["stopped"]
    assert "needs pairs" in run.refusals([found])[0]["why"]


def without_pairs(racer: lockstep.Racer) -> lockstep.Rows:
    log = racer.world.logs[task.START]
    part = (log.tokens[:2], log.mask[:2], log.behavior[:2], log.ref[:2], log.reward[:2].double())
    return lockstep.Rows(log.names[:2], ["log"] * 2, *part, torch.full((2,), torch.nan), [])


def test_the_same_function_with_the_same_options_is_run_once(files, tmp_path, monkeypatch) -> None:
    """`sophia` has the function and the options of `sft`; `vargrad`, a preset of AGRO, has others."""
    assert kinds.same("sft", kinds.names()) == kinds.same("sophia", kinds.names()) == "sft"
    assert kinds.same("vargrad", kinds.names()) == "vargrad"
    played: list[str] = []
    monkeypatch.setattr(
        play,
        "complete",
        lambda rows, files, out: (
            played.extend(row.objective for row in rows),
            [measured(row.rate, 0.4) | {"objective": row.objective} for row in rows],
        )[1],
    )
    arena = run.Arena(files, tmp_path, map, measured=False)
    arena.run([Row("sft", "log"), Row("sophia", "log"), Row("grpo", "log")])
    assert played == ["sft", "grpo"]
    assert [found["objective"] for found in arena.runs] == ["sft", "sophia", "grpo"]


def test_the_recipes_take_part_by_their_names() -> None:
    """Weight and baseline of `agro train log` and `agro train fresh`; β is of the grid."""
    for name, of in kinds.RECIPES.items():
        options = dict(Row(name, "log", beta=0.1).options)
        assert options.pop("beta") == 0.1
        recipe = tomllib.loads(recipes()[of].text)["objective"]
        assert options == {
            key: value for key, value in recipe.items() if "weight" in key or key == "baseline"
        }
        assert options.get("weight_baseline") == "optimal" or options["baseline"] == "step"
        assert kinds.base(name) == "agro"
        assert not any(kinds.obstacle(name, kind) for kind in KINDS.values())


def test_descent_ends_where_the_passport_says() -> None:
    """AGRO at the optimum on the data of another policy, of an earlier and of itself; GRPO elsewhere."""
    of = ("stale 10", "half", "other's log")
    ends = {name: [end.kl for end in theory.ends(name, 100, of)] for name in ("agro", "grpo")}
    assert max(kl for kl in ends["agro"] if kl is not None) < 1e-3
    assert min(kl for kl in ends["grpo"] if kl is not None) > 0.05
    assert all(end.kl is None for end in theory.ends("sft", 1))


def test_who_ends_below_the_start_has_one_seed(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        play, "complete", lambda rows, files, out: [measured(row.rate, 0.4, row.seed) for row in rows]
    )
    for start, seeds in ((0.3, {0, 1}), (0.5, {0})):
        arena = run.Arena(files, tmp_path, map, measured=False)
        arena.choose([("grpo", "log")])
        arena.repeat([("grpo", "log")], 2, start)
        assert {r["seed"] for r in arena.runs} == seeds


def test_where_other_seeds_fail_the_next_settings_are_repeated(files, tmp_path, monkeypatch) -> None:
    """At lr 1e-3 seed 0 alone is good; of the others 1e-4 is never the best."""

    def reached(row: Row) -> float:
        if row.rate == 1e-3:
            return 0.9 if row.seed == 0 else 0.0
        return 0.5 + 100 * row.rate

    monkeypatch.setattr(
        play, "complete", lambda rows, files, out: [measured(r.rate, reached(r), r.seed) for r in rows]
    )
    arena = run.Arena(files, tmp_path, map, measured=False)
    arena.choose([("grpo", "log")])
    arena.repeat([("grpo", "log")], 3, 0.3)
    seeds = {rate: {r["seed"] for r in arena.runs if r["rate"] == rate} for rate in RATES}
    assert seeds == {1e-4: {0}, 3e-4: {0, 1, 2}, 1e-3: {0, 1, 2}}
    assert {r["rate"] for r in report.of_cells(arena.runs)["grpo", "log"]} == {3e-4}


def test_runs_from_end_to_end(files, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "task").symlink_to(files.folder)
    words = ["--small", "--out", str(tmp_path), "--seeds", "2"]
    for word in ("agro", "dpo", "log", "theory"):
        words += ["--only", word]
    monkeypatch.setattr(play, "start", lambda files: {"validation": -1.0, "accuracy": 0.1})  # all improve
    run.main(words)
    result = json.loads((tmp_path / "result.json").read_text())
    counts = {name: sum(r["objective"] == name for r in result["runs"]) for name in ("agro", "dpo")}
    assert counts == {"agro": 5, "dpo": 5}  # three rates, the other β, another seed
    assert (tmp_path / "figure.png").stat().st_size > 10000
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| log |"))
    assert {"`agro`", "`dpo`"} <= set(row.split())
    before = [file.stat().st_mtime_ns for file in sorted((tmp_path / "runs").iterdir())]
    run.main(words)
    assert before == [file.stat().st_mtime_ns for file in sorted((tmp_path / "runs").iterdir())]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(Refused, match="--only"):
        run.chosen(["ppo2"])
    assert run.chosen(["theory"]) == (kinds.names(), [], True)
    assert run.chosen(["agro"]) == (["agro"], list(KINDS), True)
    assert run.chosen(["log"]) == (kinds.names(), ["log"], False)
