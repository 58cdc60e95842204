"""Races of a second a run: who takes part, who trains on, and what is said of the winner."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "train"))
sys.path.append(str(Path(__file__).parents[1] / "cli"))
from running import done, refused
from tiny_runs import tiny, write_prompts
from writing import write_rows

from agro.api.race import ENOUGH, NOTHING, Race, candidates, conclusion, default_for, key_values, settings_of
from agro.api.reporting_trainer import Trainer
from agro.config import DataConfig, RunConfig, override
from agro.errors import Refused
from agro.stats.paired import compare
from agro.store import Store
from agro.train.trainer import BaseTrainer
from agro.types import Sample

STEPS = 8
REWARD = f"{Path(__file__).parents[1] / 'train' / 'reward.py'}:digits"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    return Trainer(tiny(folder, train__steps=1), folder / "run").run() / "model"


def fill(path: Path, size: int = 4, prompts: int = 20) -> str:
    """The answer to all prompts is 7."""
    with Store.open(path) as store:
        for g in range(prompts):
            first = g % 2 if size == 1 else 0
            store.append(row(g, i) for i in range(first, first + size))
    return str(path)


def row(group: int, i: int) -> Sample:
    return Sample(f"{100 + group}>", str(i) if i % 2 else "777", reward=float(i % 2 == 0), source="log")


def overrides(folder: Path, model: Path, held_out: int = 20, **changes: Any) -> list[str]:
    prompts = ({"prompt": f"{300 + i}>", "answer": "7"} for i in range(held_out))
    values = {
        "policy.model": model,
        "data.eval_prompts": write_rows(folder / "held_out.jsonl", prompts),
        "reward.name": REWARD,
        "sampler.max_new": 3,
        "train.steps": STEPS,
        "train.groups": 4,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in values.items()]


@pytest.mark.report
def test_half_train_on_and_the_best_to_the_end(tmp_path: Path, model: Path) -> None:
    asked = overrides(tmp_path, model, 2 * ENOUGH, data__store=fill(tmp_path / "log.db"))
    out = tmp_path / "race"
    found = done("race", *asked, "--rate", "1e-3", "--rate", "1e-2", "--out", out, "--json")
    record = json.loads(found.stdout)
    nothing, *rows = record["rows"]
    assert nothing["candidate"] == NOTHING
    assert nothing["step"] == 0
    assert {row["candidate"] for row in rows} == {"log", "imitation", "log+imitation"}
    steps = sorted((row["step"] for row in rows), reverse=True)
    if record["winner"]:
        assert steps == [8, 4, 4, 2, 2, 2]
        assert record["winner"] == Path(rows[0]["run"]).name
        assert (Path(rows[0]["run"]) / "report.html").exists()
    for row in rows:
        assert row["reward"] == pytest.approx(nothing["reward"] + row["gain"])  # on the same prompts
        assert RunConfig.load(Path(row["run"]) / "config.json").train.lr == row["lr"]
    choosing = (out / "choosing.jsonl").read_text()
    held_out = (tmp_path / "held_out.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["prompt"] in choosing for line in held_out) == ENOUGH
    table = done("race", *asked, "--rate", "1e-3", "--rate", "1e-2", "--out", out).stdout
    assert conclusion(record) in " ".join(table.split())


def test_a_log_is_imported_for_the_race(tmp_path: Path, model: Path) -> None:
    samples = [row(g, i) for g in range(20) for i in range(4)]
    rows = [{"prompt": s.prompt, "response": s.response, "reward": s.reward} for s in samples]
    log = write_rows(tmp_path / "log.jsonl", rows)
    asked = ["race", log, *overrides(tmp_path, model), "--rate", "1e-3", "--out", tmp_path / "race", "--json"]
    found = done(*asked)
    record = json.loads(found.stdout)
    assert record["default"] == "log"
    assert "taken: 80 samples" in found.stderr
    assert json.loads(done(*asked).stdout) == record
    with Store.open(tmp_path / "race" / "log.db", read_only=True) as store:
        assert store.counts().samples == len(rows)  # not imported twice


def test_a_recipe_takes_part_besides_and_shares_what_is_not_of_its_method(tmp_path, model) -> None:
    fill(tmp_path / "log.db")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'[policy]\nmodel = "{model}"\n[data]\nstore = "{tmp_path / "log.db"}"\nreplay = 1.0\nspread = true\n'
        "[reward.options]\ndigit = 7\n"
        f'[objective]\nname = "agro"\nbeta = 0.5\n[train]\nsteps = {STEPS}\ngroups = 4\nstep_kl = 1.0\n'
    )
    asked = [item for item in overrides(tmp_path, model) if not item.startswith(("policy.", "train."))]
    race = Race(asked, tmp_path / "race", (1e-3,), lambda text: None, str(recipe))
    rows = {row["candidate"]: row for row in race.run()["rows"]}
    assert set(rows) == {NOTHING, "mine", "log", "imitation", "log+imitation"}
    mine, log = (RunConfig.load(Path(rows[name]["run"]) / "config.json") for name in ("mine", "log"))
    assert (mine.objective.options["beta"], mine.train.step_kl) == (0.5, 1.0)
    assert (log.objective.options["beta"], log.train.step_kl) == (0.01, 0.005)
    assert mine.train.groups == log.train.groups == 4
    assert mine.reward.options == log.reward.options == {"digit": 7}
    with pytest.raises(Refused, match="this race has other settings"):
        Race(race.overrides, tmp_path / "race", (1e-3,), lambda text: None).run()


def test_nested_values_are_read_again_as_they_were() -> None:
    lora = {"rank": 2, "targets": ["q", "v"]}
    columns = {"prompt": "question || task", "answer": "solution"}
    values = {"policy": {"lora": lora}, "data": {"columns": columns, "store": None}, "train": {"lr": 1e-05}}
    read: dict[str, Any] = {}
    for item in key_values(values):
        override(read, item, RunConfig)
    del values["data"]["store"]
    assert read == values


def test_a_log_is_there_and_named_once(tmp_path: Path, model: Path) -> None:
    assert "there is no file log.jsonl" in refused("race", "log.jsonl", "--out", tmp_path / "race")
    path = fill(tmp_path / "log.db")
    asked = overrides(tmp_path, model, data__store=path)
    assert f"expected one log, got {path} and data.store={path}" in refused(
        "race", path, *asked, "--out", tmp_path / "race"
    )


def test_two_logs_are_refused(tmp_path: Path) -> None:
    two = ("race", "a.jsonl", "b.jsonl", "--out", tmp_path / "race")
    assert "expected one log or recipe, got a.jsonl and b.jsonl" in refused(*two)


def test_what_is_complete_is_not_run_again(tmp_path: Path, model: Path, monkeypatch) -> None:
    asked = overrides(tmp_path, model, data__store=fill(tmp_path / "log.db"))
    runs, plain, most = [], BaseTrainer.run, 4

    def run(trainer: BaseTrainer) -> Path:
        if len(runs) == most and trainer.out not in {out for out, _ in runs}:
            raise KeyboardInterrupt
        runs.append((trainer.out, trainer.config.train.steps))
        return plain(trainer)

    def race(*more: str) -> Race:
        return Race([*asked, *more], tmp_path / "race", (1e-3, 1e-2), lambda text: None)

    monkeypatch.setattr(BaseTrainer, "run", run)
    with pytest.raises(KeyboardInterrupt):
        race().run()
    assert len(runs) == 4
    most = -1
    record = race().run()
    assert len(runs) == len(set(runs)) == 6 + 3 + (record["winner"] is not None)
    again = len(runs)
    assert race().run() == record
    assert len(runs) == again
    with pytest.raises(Refused, match="this race has other settings"):
        race("train.seed=1").run()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("feedback", ["feedback", "imitation", "dro", "kto"]),
        ("pairs", ["pairs", "imitation", "dpo"]),
        ("fresh", ["fresh", "rloo", "reinforce"]),
    ],
)
def test_every_kind_of_data_has_candidates_that_train(tmp_path, model, kind: str, names: list[str]) -> None:
    source: dict[str, Any] = {"data__prompts": write_prompts(tmp_path / "prompts.jsonl", range(60))}
    if kind == "feedback":
        source = {"data__store": fill(tmp_path / "log.db", size=1)}
    if kind == "pairs":
        lines = [{"prompt": f"{100 + i}>", "chosen": str(i), "rejected": "0"} for i in range(1, 10)]
        log = write_rows(tmp_path / "pairs.jsonl", lines)
        done("import", log, "--store", tmp_path / "pairs.db")
        source = {"data__store": tmp_path / "pairs.db"}
    race = Race(overrides(tmp_path, model, **source), tmp_path / "race", (1e-3,), lambda text: None)
    rows = race.run()["rows"]
    assert [row for row in rows if "refused" in row] == []
    assert [row["candidate"] for row in rows[:1]] == [NOTHING]
    assert sorted(row["candidate"] for row in rows[1:]) == sorted(names)
    if kind == "fresh":  # the group's mean would make it rloo
        config = json.loads((tmp_path / "race" / "reinforce-0.001" / "config.json").read_text())
        assert config["objective"] == {"name": "reinforce", "baseline": "none"}
    if kind == "pairs":
        with Store.open(tmp_path / "race" / "winners.db", read_only=True) as store:
            assert {s.response for s in store.samples()} == {line["chosen"] for line in lines}


def test_imitation_takes_the_best(tmp_path: Path) -> None:
    """Rewards 0/1: the right ones; graded: the best of each group; one each: the upper quarter."""
    graded, single = tmp_path / "graded.db", tmp_path / "single.db"
    for path, size in ((graded, 4), (single, 1)):
        with Store.open(path) as store:
            store.append(Sample(f"{g}>", f"{i}", reward=g + i / 8) for g in range(9) for i in range(size))
    found = {}
    for path in (Path(fill(tmp_path / "log.db")), graded, single):
        config = RunConfig.of({"data": {"store": str(path)}})
        tried = candidates(default_for(config.data), config, tmp_path)
        found[path.name] = [c.changes for c in tried if c.name == "imitation"]
    assert found == {
        "log.db": [("data.min_reward=1.0",)],
        "graded.db": [("data.best_of_group=true",)],
        "single.db": [("data.min_reward=6.0",)],  # of 0 … 8
    }


def test_the_winner_is_judged_on_prompts_that_did_not_choose_it(tmp_path: Path, model: Path) -> None:
    held_out = 2 * ENOUGH
    asked = overrides(tmp_path, model, held_out, data__store=fill(tmp_path / "log.db"), objective__beta=0.02)
    race = Race(asked, tmp_path / "race", (3e-2,), lambda text: None)
    record = race.run()
    assert not {p.id for p in race.judging} & {p.id for p in race.choosing}
    assert len(race.judging) + len(race.choosing) == held_out
    assert record["winner"] is not None
    judged = record["judged"]
    assert judged["n"] == len(race.judging)
    said = judged["verdict"].capitalize().replace("Not shown", "Not shown better")
    assert f"Against the start: {said}" in conclusion(record)
    assert f"on {ENOUGH} other prompts" in conclusion(record)
    assert RunConfig.load(tmp_path / "race/log-0.03/config.json").objective.options["beta"] == 0.02
    assert "beta" not in RunConfig.load(tmp_path / "race/imitation-0.03/config.json").objective.options


def test_the_conclusion_says_what_was_measured() -> None:
    better = compare(np.zeros(60), np.array([1.0] * 20 + [0.0] * 40))
    judged = vars(better) | {"verdict": better.verdict}
    said = conclusion({"winner": "log", "judged": judged})
    assert "Against the start: Better by 0.333" in said
    assert "in mean reward on 60 other prompts, p < .001." in said
    assert "measure it on others" in conclusion({"winner": "log", "judged": None})
    assert "Doing nothing won" in conclusion({"winner": None, "judged": None})


def test_a_race_without_a_judge_or_data_is_refused(tmp_path: Path, model: Path) -> None:
    store = fill(tmp_path / "log.db")
    asked = overrides(tmp_path, model, data__store=store)
    said = refused("race", f"policy.model={model}", f"data.store={store}", "--out", tmp_path / "race")
    assert "expected data.eval_prompts and a reward for them" in said
    assert not (tmp_path / "race").exists()
    missing = [item for item in asked if not item.startswith("reward.")] + ["reward.name=nowhere.py:f"]
    assert "nowhere.py" in refused("race", *missing, "--out", tmp_path / "race")
    assert not (tmp_path / "race").exists()  # before any candidate is tried
    with pytest.raises(Refused, match=r"either data\.store, .* got neither"):
        default_for(DataConfig())
    write_rows(tmp_path / "held_out.jsonl", [{"prompt": "300>"}, {"prompt": "301>"}])  # no answers
    exact = [item for item in asked if not item.startswith("reward.")]
    said = refused("race", *exact, "--rate", "1e-3", "--out", tmp_path / "race")
    assert "no candidate can train" in said
    assert "answer" in said


def test_a_race_replaces_what_is_given_by_a_name_of_trl(model: Path, tmp_path: Path) -> None:
    asked = overrides(tmp_path, model, data__store=fill(tmp_path / "log.db"))
    asked = [item for item in asked if not item.startswith(("train.lr=", "sampler.max_new="))]
    items = [*asked, "learning_rate=0.5", "max_completion_length=3"]
    race = Race(items, tmp_path / "race", (), lambda text: None)
    [first, *_] = candidates(race.kind, race.default, tmp_path)
    config = settings_of(first, race.recipe, race.default, race.overrides, ["train.lr=0.1"])
    assert (race.rates[0], config.train.lr, config.sampler.max_new) == (0.5, 0.1, 3)
