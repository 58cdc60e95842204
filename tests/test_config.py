from __future__ import annotations

import json
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agro import RunConfig
from agro.cli.common import options
from agro.config import deciding, shared
from agro.config.run import marked
from agro.errors import Refused

RECIPE = """
[policy]
model = "models/tiny"

[objective]
name = "agro"
beta = 0.05
scale = "loss"

[train]
steps = 30
lr = 3e-4
adam_betas = [0.9, 0.95]

[[phases]]
name = "sft"
objective = { name = "sft" }
train = { steps = 5 }

[[phases]]
name = "store"
objective = { beta = 0.2 }
data = { replay = 1.0 }
policy = { new = { hidden = 64 } }
"""


def recipe(folder: Path, text: str = RECIPE, name: str = "recipe.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(Refused) as caught:
        RunConfig.of(values)
    return str(caught.value)


def test_a_recipe(tmp_path: Path) -> None:
    config = RunConfig.load(recipe(tmp_path))
    assert config.policy.model == "models/tiny"
    assert (config.train.steps, config.train.adam_betas) == (30, (0.9, 0.95))
    assert config.train.micro_batch == RunConfig().train.micro_batch
    assert config.objective.name == "agro"
    assert config.objective.options == {"beta": 0.05, "scale": "loss"}
    assert config.phase_names == ("sft", "store")
    with pytest.raises(Refused, match="expected one of sft, store, got 'train'"):
        config.phase("train")


def test_a_phase_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    config = RunConfig.load(recipe(tmp_path))
    sft, store = config.phase("sft"), config.phase("store")
    assert (sft.train.steps, sft.train.lr) == (5, 3e-4)
    assert (store.train.steps, store.data.replay) == (30, 1.0)
    assert store.policy.new is not None
    assert (store.policy.new.hidden, store.policy.model) == (64, "models/tiny")
    assert config.data.replay == 0.0
    assert sft.data == config.data
    assert sft.phases == store.phases == ()


def test_a_phase_with_another_objective_does_not_inherit_options(tmp_path: Path) -> None:
    """beta and scale belong to agro: sft would refuse them.

    With the same objective, unchanged options stay.
    """
    config = RunConfig.load(recipe(tmp_path))
    assert config.phase("sft").objective.options == {}
    assert config.phase("store").objective.options == {"beta": 0.2, "scale": "loss"}


def test_a_run_without_phases_has_one() -> None:
    config = RunConfig.of({"train": {"steps": 3}})
    assert config.phase_names == ("train",)
    assert config.phase("train") == config


def test_a_changed_copy_has_changed_phases(tmp_path: Path) -> None:
    config = RunConfig.load(recipe(tmp_path))
    assert config.phase("sft").guard.window != 7
    changed = config.model_copy(update={"guard": config.guard.model_copy(update={"window": 7})})
    assert changed.phase("sft").guard.window == 7


def test_config_json_alone_gives_the_same_configuration(tmp_path: Path) -> None:
    """As a run writes it: resolved, with what the run adds beside the sections."""
    config = RunConfig.load(recipe(tmp_path), ["reward.options={marker = 'x', n = [1, 2.5]}"])
    text = json.dumps({**config.model_dump(mode="json"), "versions": {"torch": "2"}, "run": {"id": "a"}})
    again = RunConfig.load(recipe(tmp_path, text, "config.json"))
    assert again == config
    assert [again.phase(p) for p in again.phase_names] == [config.phase(p) for p in config.phase_names]
    assert again.reward.options == {"marker": "x", "n": [1, 2.5]}


@pytest.mark.parametrize(
    ("item", "section", "key", "value"),
    [
        ("train.steps=20", "train", "steps", 20),
        ("train.lr=1e-3", "train", "lr", 1e-3),
        ("train.lr=.5", "train", "lr", 0.5),
        ("train.seed = 7", "train", "seed", 7),
        ("train.adam_betas=[0.8, 0.9]", "train", "adam_betas", (0.8, 0.9)),
        ("policy.model=org/a-model", "policy", "model", "org/a-model"),
        ('policy.model="org/a-model"', "policy", "model", "org/a-model"),
        ("data.store=../runs/a=b/store.db", "data", "store", "../runs/a=b/store.db"),
        ("data.prompts=/tmp/p.jsonl", "data", "prompts", "/tmp/p.jsonl"),
        ("evaluate.kl=false", "evaluate", "kl", False),
        ("objective.beta=0.25", "objective", "beta", 0.25),
        ("sampler.stop=['a', 'b']", "sampler", "stop", ("a", "b")),
        ("policy.model=1e5", "policy", "model", "1e5"),
        ("policy.model=2024-01-01", "policy", "model", "2024-01-01"),
        ("policy.model=.1", "policy", "model", ".1"),
        ("data.store=7", "data", "store", "7"),
        ("data.prompts=true", "data", "prompts", "true"),
        ("data.columns.answer=3", "data", "columns", {"answer": "3"}),
        ("policy.chat.system=1.", "policy", "chat.system", "1."),
        ("policy.threads=1", "policy", "threads", 1),
        ("reward.options.marker='.1'", "reward", "options", {"marker": ".1"}),
        ("reward.options.since=2024-01-01", "reward", "options", {"since": "2024-01-01"}),
    ],
)
def test_overrides(tmp_path: Path, item: str, section: str, key: str, value: Any) -> None:
    config = RunConfig.load(recipe(tmp_path), [item])
    found = attrgetter(key)(getattr(config, section))
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        (".1", 0.1),
        ("1.", 1.0),
        ("+.5", 0.5),
        ("-.5", -0.5),
        ("1_000", 1000),
        ("+1", 1),
        ("1e-4", 1e-4),
        ("1.e5", 1e5),
        (".5E-3", 5e-4),
        ("1_000.", 1000.0),
        ("[.8, 1.]", [0.8, 1.0]),
        ("{start=.4, end=0., shape='.1'}", {"start": 0.4, "end": 0.0, "shape": ".1"}),
        (".", "."),
        ("1.2.3", "1.2.3"),
        (".1s", ".1s"),
        ("./1.", "./1."),
        ("a.1", "a.1"),
    ],
)
def test_a_number_as_a_shell_user_types_it_is_one(tmp_path: Path, typed: str, value: Any) -> None:
    config = RunConfig.load(recipe(tmp_path), [f"objective.beta={typed}"])
    assert config.objective.options["beta"] == value
    config = RunConfig.load(recipe(tmp_path), [f"phases.store.objective.beta={typed}"])
    assert config.phase("store").objective.options["beta"] == value
    assert options([f"beta={typed}"]) == {"beta": value}


def test_shares_as_a_shell_user_types_them(tmp_path: Path) -> None:
    share = "data.replay={policy=.25, expert={start=.5, end=0., steps=5}}"
    config = RunConfig.load(recipe(tmp_path), [share])
    assert config.data.shares_at(0) == {"policy": 0.25, "expert": 0.5}


def test_overrides_of_what_the_recipe_does_not_hold(tmp_path: Path) -> None:
    """Later ones win; a section within a section is made."""
    config = RunConfig.load(recipe(tmp_path, ""), ["policy.new.hidden=32", "train.steps=1", "train.steps=2"])
    assert config.policy.new is not None
    assert config.policy.new.hidden == 32
    assert config.train.steps == 2


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("train.steps", "override 'train.steps': expected KEY=VALUE"),
        ("=3", "override '=3': expected KEY=VALUE"),
        ("policy.model.name=x", "override 'policy.model.name=x': model is a value, not a section"),
        ("train.stepz=3", "unknown key train.stepz; did you mean train.steps?"),
        ("train.steps=many", "train.steps: input should be a valid integer"),
        ("train.steps=0", "train.steps: input should be greater than or equal to 1, got 0"),
        ("objective.beta=inf", "command line: objective.beta: expected a finite number, got inf"),
        ("train.lr=nan", "command line: train.lr: expected a finite number, got nan"),
        ("objective.beta=1e400", "objective.beta: expected a finite number"),
        ("objective.beta=12345678901234567890123456", "objective.beta: expected an integer"),
        ("reward.options.n=-12345678901234567890", "reward.options.n: expected an integer"),
        ("objective.beta=" + "9" * 5000, "override 'objective.beta=999"),
        ("reward.options.n=" + "[" * 5000, "override 'reward.options.n="),
    ],
)
def test_overrides_that_are_refused(tmp_path: Path, item: str, words: str) -> None:
    with pytest.raises(Refused) as caught:
        RunConfig.load(recipe(tmp_path), [item])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trian": {}}, "unknown key trian; did you mean train?"),
        ({"train": {"stps": 3}}, "unknown key train.stps; did you mean train.steps?"),
        ({"policy": {"new": {"hiden": 3}}}, "unknown key policy.new.hiden; did you mean policy.new.hidden?"),
        ({"sampler": {"zzzz": 3}}, "unknown key sampler.zzzz; known here: n, temperature, top_k, top_p"),
        ({"train": 3}, "train: input should be a valid dictionary or instance of TrainConfig, got 3"),
        ({"train": {"lr": 0}}, "train.lr: input should be greater than 0, got 0"),
        ({"policy": {"temperature": 1e-40}}, "policy.temperature: "),
        ({"sampler": {"temperature": 1e-40}}, "sampler.temperature: expected 0 (greedy) or at least 1e-06"),
        ({"evaluate": {"temperature": 1e-40}}, "evaluate.temperature: expected 0 (greedy) or at least 1e-06"),
        ({"train": {"steps": 2.5}}, "train.steps: input should be a valid integer"),
        (
            {"train": {"schedule": "step"}},
            "train.schedule: input should be 'constant', 'linear' or 'cosine', got 'step'",
        ),
        ({"data": {"replay": 1.5}}, "data.replay: expected a share from 0 to 1, a schedule"),
        (
            {"data": {"roles": ["teacher"]}},
            "data.roles.0: input should be 'policy', 'log' or 'expert', got 'teacher'",
        ),
        ({"objective": {"name": 3}}, "objective.name: input should be a valid string, got 3"),
        (
            {"reward": {"options": {"a": {"b": [0.0, float("nan")]}}}},
            "reward.options.a.b.1: expected a finite number, got nan",
        ),
        ({"train": {"seed": 10**30}}, "train.seed: expected an integer"),
        ({"phases": [{"name": "a", "x": {"n": 2**63}}]}, "phases.0.x.n: expected an integer"),
        ({"policy": {"threads": 2**62}}, "policy.threads: input should be less than or equal to 1024"),
        ({"policy": {"new": {"hidden": 2**62}}}, "policy.new.hidden: input should be less than or equal"),
        ({"phases": [{"train": {"steps": 3}}]}, "phases.0.name: field required"),
        ({"data": {"store": ["a.db", "b.db"]}}, "What to do: agro import all of these logs into one store"),
    ],
    ids=str,
)
def test_what_a_configuration_refuses(values: dict[str, Any], words: str) -> None:
    assert words in refused(values)


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        ([{"name": "a"}, {"name": "b"}, {"name": "a"}], "phases: expected different names, got a, b, a"),
        (
            [{"name": "a"}, {"name": "b", "trian": {}}],
            "configuration: phase b: unknown key trian; did you mean train?",
        ),
        ([{"name": "a", "train": {"steps": 0}}], "configuration: phase a: train.steps: input should be"),
        ([{"name": "a", "phases": [{"name": "b"}]}], "phase a: phases: a phase can't set it"),
    ],
    ids=str,
)
def test_what_phases_refuse(phases: list[dict[str, Any]], words: str) -> None:
    assert words in refused({"phases": phases})


def test_all_mistakes_are_said_at_once() -> None:
    said = refused({"train": {"clip": -1, "stps": 3}, "data": {"replay": 2}})
    assert len(said.splitlines()) == 3
    assert all(key in said for key in ("train.clip", "train.stps", "data.replay"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", b"[train]\nsteps = \n", "line 2"),
        ("a.json", b'{"train": {"steps": 3}', "line 1"),
        ("a.json", b"[]", "expected an object of sections"),
        ("a.json", b'{"objective": {"beta": NaN}}', "objective.beta: expected a finite number, got nan"),
        ("a.json", b'{"train": {"seed": ' + b"9" * 5000 + b"}}", "digits"),
        ("a.toml", b"[train]\nseed = " + b"9" * 5000, "digits"),
        ("a.json", b"[" * 100_000, "recursion"),
        ("a.toml", b"# \xff\xfe", "it isn't UTF-8 text"),
        ("a.toml", b"[train]\nstps = 3", "unknown key train.stps"),
        ("a.toml", b'[[phases]]\nname = "x"\ndta = 3', "phase x: unknown key dta; did you mean data?"),
    ],
)
def test_files_that_are_refused_are_named(tmp_path: Path, name: str, text: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(text)
    with pytest.raises(Refused) as caught:
        RunConfig.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["absent.toml", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused, match=r"can't be read: .+; expected a TOML recipe or a run's config\.json"):
        RunConfig.load(tmp_path / name)


def test_a_configuration_is_frozen_and_changes_nothing_given() -> None:
    values = tomllib.loads(RECIPE)
    config = RunConfig.of(values)
    assert values == tomllib.loads(RECIPE)
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.objective.name = "rloo"  # type: ignore[misc]


def test_every_key_of_the_contract_exists() -> None:
    """Scripts of users set these."""
    dumped = RunConfig.of({"objective": {"beta": 0.1}}).model_dump()
    assert {"steps", "micro_batch", "seed"} <= dumped["train"].keys()
    assert {"name", "beta"} <= dumped["objective"].keys()
    assert {"store", "prompts"} <= dumped["data"].keys()
    assert "model" in dumped["policy"]


def test_an_override_that_a_phase_would_undo_is_refused(tmp_path) -> None:
    phases = ('[[phases]]\nname = "one"\ntrain.steps = 7\n', '[[phases]]\nname = "two"\ntrain.steps = 8\n')
    path = recipe(tmp_path, "[train]\nsteps = 5\n" + "".join(phases))
    words = r"every phase sets train\.steps itself; use phases\.one\.train\.steps=9"
    with pytest.raises(Refused, match=words):
        RunConfig.load(path, ["train.steps=9"])
    config = RunConfig.load(path, ["phases.one.train.steps=9", "train.lr=0.5"])
    assert [config.phase(p).train.steps for p in ("one", "two")] == [9, 8]
    assert config.phase("one").train.lr == 0.5
    with pytest.raises(Refused, match="phases: one, two"):
        RunConfig.load(path, ["phases.three.train.steps=9"])


def test_what_decides_a_result_is_all_but_limits_and_what_is_shown() -> None:
    def part(**values):
        return deciding(RunConfig.of(values).model_dump(mode="json"))

    def in_a_phase(**train):
        return part(phases=[{"name": "a", "train": train}])

    limits = {"timeout": 1.0, "max_failed": 0.1, "workers": 2}
    assert part(train={"show_every": 3}, track={"to": ["wandb"]}, reward=limits) == part()
    assert in_a_phase(show_every=3) == in_a_phase()
    assert part(train={"lr": 1.0}) != part()
    assert in_a_phase(lr=1.0) != in_a_phase()


def test_what_may_change_on_resume_and_between_phases_is_declared_at_the_field() -> None:
    """Limits and what is shown, kept or uploaded may change on resume; phases share what is read once."""
    free, one = set(marked("resume")), set(shared())
    assert {("reward", "timeout"), ("train", "push"), ("guard", "kl"), ("track", "to")} <= free
    assert {("source", "wait_seconds"), ("engine", "urls")} <= free
    sections = "environment reward train guard evaluate track source engine place"
    assert {section for section, _ in free} == set(sections.split())
    assert {("data", "prompts"), ("reward", "functions"), ("policy", "model"), ("source", "kind")} <= one
    assert not {("policy", "reference"), ("data", "replay"), ("train", "steps")} & one


def test_where_samples_come_from_and_what_decodes_them() -> None:
    """The keys and defaults that other rooms rely on."""
    config = RunConfig()
    source = {"kind": "inline", "wait_seconds": 600.0, "lease_seconds": 15.0, "sync_every": 1, "sync_from": 1}
    unset = {"around": None, "weights": None, "options": {}}
    assert config.source.model_dump() == source | unset
    given = {"kind": "hf", "options": {}, "vllm": "vllm", "urls": (), "dialect": "vllm", "api": "completions"}
    limits = {"sleep": False, "timeout": 120.0, "retries": 3, "fused": True}
    unset = dict.fromkeys(("api_key", "model", "push", "push_error", "memory"))
    assert config.engine.model_dump() == given | limits | unset
    assert "source.wait_seconds" in refused({"source": {"wait_seconds": 0}})
    assert "engine.kind" in refused({"engine": {"kind": "llama.cpp"}})
