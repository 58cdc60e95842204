"""docs/methods.md is made from the entries; the names of other libraries are answered with ours."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from pydoc import locate
from typing import Any, get_args

import pytest
from methods_docs import RULES, methods

from agro import objectives
from agro.api.arguments import configured
from agro.config import RewardConfig, RunConfig, aliases
from agro.config.override import section_at
from agro.config.recipes import recipes
from agro.errors import Refused
from agro.io import peers
from agro.objectives.core import Certainty
from agro.rewards import load_reward
from agro.store import Store

ROOT = Path(__file__).parents[1]


def test_the_page_is_made_from_the_entries() -> None:
    page = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert page == methods(), "run: python tools/docs/methods_docs.py"
    assert all(f"`{name}`" in page for name in objectives.names())


def test_how_an_equation_is_known_is_one_of_four_words() -> None:
    """As methods.toml has it, which no type checker reads."""
    known = {entry.certainty for entry in objectives.table.entries().values()}
    assert known == set(get_args(Certainty))


def test_the_settings_of_rules_exist() -> None:
    """Each as docs/configuration.md, the guide's table of metrics, a command, a module, an objective or a
    recipe has it."""
    pages = ("configuration.md", "options.md", "metrics.md", "command-line.md")
    settings = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages)
    for what in RULES.values():
        for words in re.findall(r"`([^`]+)`", what):
            name = " ".join(words.split(" ")[: 2 if words.startswith("agro ") else 1])
            known = name in recipes() or name in objectives.names() or name in settings
            assert known or (name.startswith(("agro.", "agro_papers.")) and locate(name)), name


@pytest.mark.parametrize("name", objectives.names())
def test_a_method_has_a_recipe_of_its_name(name: str) -> None:
    assert f'name = "{name}"' in recipes()[name].text
    assert RunConfig.load(name).objective.name == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("AGRO", "did you mean agro?"),
        ("loo", "did you mean rloo?"),
        ("reinforce-plus-plus", "here it is reinforce_pp"),
        ("sigmoid", "here it is dpo"),
        ("BNPO", 'here it is grpo with average = "token"'),
        ("spo", "here it is rloo with baseline"),
        ("cpo", "it has no counterpart here"),
        ("xyzzy", "there are agro, agro_onpolicy, "),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(name: str, said: str) -> None:
    with pytest.raises(Refused, match=f"got '{name}'; {said}".replace("?", r"\?")):
        objectives.get(name)


def test_an_option_of_another_library_is_answered_with_ours() -> None:
    for option, said in (("epsilon", r"objective\.clip = .*"), ("loss_type", r"objective\.name")):
        with pytest.raises(Refused, match=f"objective grpo: unknown option {option}; {said} sets it here"):
            objectives.describe("grpo", **{option: 0.2})


def test_what_is_named_for_others_exists() -> None:
    answers = " ".join([*peers.ALIASES.values(), *peers.SETTINGS.values(), *peers.ELSEWHERE.values()])
    settings = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+", answers)
    for section, *keys in (setting.split(".") for setting in settings if setting != "agro.train"):
        model = section_at(RunConfig, section)
        for key in keys if section != "objective" else []:
            assert model is not None
            assert key in model.model_fields, f"{section}.{key}"
            model = section_at(model, key)
    assert all(entry.split()[0].rstrip(",") in objectives.names() for entry in peers.ELSEWHERE.values())
    known = {key for name in objectives.names() for key in objectives.get(name).options.model_fields}
    assert {"beta", "std", "clip"} <= known
    assert "  " not in answers


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("optim", "adamw_torch", "train.optimizer sets it here"),
        ("train.weight_decay_rate", 0.5, "did you mean train.weight_decay?"),
        ("sampler.num_generations_eval", 8, "evaluate.n sets it here"),
        ("epsilon", 0.2, "objective.clip = [LOW, HIGH] sets it here"),
        ("reference_free", True, "an objective without a reference"),
        ("generation_batch_size", 8, "train.groups, in prompts, sets it here"),
        ("per_device_train_batch_size", 8, "train.groups, in prompts, sets it here"),
        ("gradient_accumulation_steps", 2, "train.groups, in prompts, sets it here"),
        ("max_steps", 7, "train.steps sets it here"),
        ("bf16", True, 'policy.dtype = "mixed" sets it here'),
        ("logging_steps", 10, "every step is written to metrics.jsonl: leave it out"),
        ("sampler.seed", 1, "train.seed sets it here"),
    ],
)
def test_a_name_of_another_library_is_answered_at_every_door(key, value, said, tmp_path) -> None:
    """On the command line, in a file, in a phase, and as an argument of `agro.train`."""
    text = json.dumps(value)
    with pytest.raises(Refused, match=f"command line: unknown key {key}; {re.escape(said)}"):
        RunConfig.load("fresh", [f"{key}={text}"])
    (tmp_path / "a.toml").write_text(f"{key} = {text}\n")
    with pytest.raises(Refused, match=f"a.toml: unknown key {key}; {re.escape(said)}"):
        RunConfig.load(tmp_path / "a.toml")
    with pytest.raises(Refused, match=f"phase b: unknown key {key}; {re.escape(said)}"):
        RunConfig.of({"phases": [{"name": "b", **nested(key, value)}]})
    if "." not in key:
        with pytest.raises(Refused, match=re.escape(said.removeprefix("objective.clip"))):
            configured("reinforce", {key: value})


ACCEPTED = [  # TRL's name and value, and what they are here
    ("num_generations", 6, "sampler.n", 6),
    ("sampler.num_generations", 6, "sampler.n", 6),
    ("learning_rate", 3e-5, "train.lr", 3e-5),
    ("train.learning_rate", 3e-5, "train.lr", 3e-5),
    ("beta", 0.3, "objective.beta", 0.3),
    ("max_completion_length", 33, "sampler.max_new", 33),
    ("num_train_epochs", 2.0, "train.epochs", 2.0),
    ("reward_funcs", "math", "reward.name", "math"),
    ("train_dataset", "p.jsonl", "data.prompts", "p.jsonl"),
    ("loss_type", "dr_grpo", "objective.name", "dr_grpo"),
]


@pytest.mark.parametrize(("key", "value", "ours", "meant"), ACCEPTED)
def test_ten_names_of_trl_are_accepted_at_every_door(
    key: str, value: Any, ours: str, meant: Any, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(aliases, "_printed", set())
    section, _, name = ours.partition(".")
    text = json.dumps(value)

    def at(config: RunConfig) -> Any:
        inside = getattr(config, section)
        return inside.options[name] if ours == "objective.beta" else getattr(inside, name)

    assert at(RunConfig.load("fresh", [f"{key}={text}"])) == meant
    said = capsys.readouterr().err
    assert said.count("note: TRL's ") == 1
    assert f"{key.rpartition('.')[2]} is {ours} here" in said
    file = tmp_path / "a.toml"
    file.write_text(f"{key} = {text}\n")
    assert at(RunConfig.load(file)) == meant
    assert at(RunConfig.of({"phases": [{"name": "b", **nested(key, value)}]}).phase("b")) == meant
    assert "note" not in capsys.readouterr().err  # once a process
    if "." not in key and key not in ("loss_type", "train_dataset", "reward_funcs"):  # which train() takes
        assert at(RunConfig.of(configured("agro", {key: value}))) == meant


def test_a_setting_has_one_of_its_names(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"learning_rate is train\.lr here, which is given too, as 0.1"):
        RunConfig.of({"learning_rate": 0.2, "train": {"lr": 0.1}})
    assert RunConfig.of({"evaluate": {"beta": 0.2}}).evaluate.beta == 0.2
    assert RunConfig.of({"reward_funcs": ["math", "exact"]}).reward.functions[1].name == "exact"


def test_several_functions_are_added_on_the_command_line() -> None:
    """In place of the one reward that the recipe names."""
    functions = RunConfig.load("fresh", ['reward_funcs=["r.py:a", "r.py:b"]']).reward.functions
    assert [(each.name, each.weight) for each in functions] == [("r.py:a", 1.0), ("r.py:b", 1.0)]
    for text in ("math,length", "[math,length]", "[math, 'length']"):  # as a shell leaves them
        functions = RunConfig.load("fresh", [f"reward_funcs={text}"]).reward.functions
        assert [each.name for each in functions] == ["math", "length"]
    assert RunConfig.load("fresh", ["reward_funcs=[math]"]).reward.name == "math"


def nested(key: str, value: Any) -> dict[str, Any]:
    section, _, last = key.rpartition(".")
    return {section: {last: value}} if section else {last: value}


def test_an_option_that_an_objective_lacks_is_not_answered_with_itself() -> None:
    with pytest.raises(Refused, match=r"unknown option beta; it has: baseline, shift, weight, weight_max, "):
        objectives.describe("reinforce", beta=0.1)
    with pytest.raises(Refused, match=r"unknown option learning_rate; train\.lr sets it here"):
        objectives.describe("reinforce", learning_rate=0.1)
    words = r"unknown: beta \(did you mean evaluate__beta\?\)\. .* options of reinforce"
    with pytest.raises(Refused, match=words):
        configured("reinforce", {"beta": 0.1})
    with pytest.raises(Refused, match=r"unknown: temperature \(sampler\.temperature sets it here\)"):
        configured("agro", {"temperature": 1.0})


@pytest.mark.parametrize("key", ["loss_type", "objective.loss_type", "objective.name"])
def test_another_objective_of_the_command_line_keeps_what_it_has(key: str, monkeypatch, capsys) -> None:
    """The others are dropped, which is said once; one that is given stays."""
    monkeypatch.setattr(aliases, "_printed", set())
    assert RunConfig.load("fresh", [f"{key}=grpo", "beta=0.2"]).objective.options == {"beta": 0.2}
    assert RunConfig.load("fresh", [f"{key}=agro"]).objective.options == {"beta": 0.01, "baseline": "step"}
    kept = RunConfig.load("log", [f"{key}=dpo"]).objective.options
    assert kept["beta"] == 0.01
    assert "weight_baseline" not in kept
    assert "dropped the options of the recipe's objective: weight_baseline" in capsys.readouterr().err


def test_a_phase_that_is_given_another_objective_keeps_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    phases = '[[phases]]\nname = "a"\nobjective = { beta = 0.3 }\n[[phases]]\nname = "b"\n'
    file.write_text(f'[objective]\nbaseline = "step"\n{phases}')
    config = RunConfig.load(file, ["phases.a.objective.name=grpo"])
    assert config.phase("a").objective.options == {"beta": 0.3}
    assert config.phase("b").objective.options == {"baseline": "step"}
    kept = RunConfig.load(file, ["phases.a.objective.name=agro"]).phase("a").objective
    assert kept.options == {"beta": 0.3, "baseline": "step"}


@pytest.mark.parametrize(
    ("items", "theirs", "ours"),
    [
        (["num_generations=4", "sampler.n=8"], "num_generations", "sampler.n"),
        (["sampler.n=8", "sampler.num_generations=4"], "num_generations", "sampler.n"),
        (["beta=0.1", "objective.beta=0.2"], "beta", "objective.beta"),
        (["objective.name=dpo", "loss_type=grpo"], "loss_type", "objective.name"),
    ],
)
def test_both_names_of_a_setting_are_refused_on_the_command_line(items, theirs, ours) -> None:
    words = f"command line: {theirs} is {ours} here, which is given too"
    with pytest.raises(Refused, match=words):
        RunConfig.load("fresh", items)
    assert RunConfig.load("fresh", ["num_generations=4", "sampler.num_generations=6"]).sampler.n == 6


def test_a_store_is_a_data_set_of_trl(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    Store.open(path).close()
    for text in (f"train_dataset={path}", f'data.train_dataset="{path}"'):
        data = RunConfig.load("log", [text, "num_train_epochs=2"]).data
        assert (data.store, data.prompts) == (str(path), None)
    assert RunConfig.of({"train_dataset": str(path)}).data.store == str(path)
    one = tmp_path / "one.db"  # a table of prompts
    with closing(sqlite3.connect(one)) as database:
        database.execute("CREATE TABLE questions (prompt, answer)")
    assert RunConfig.of({"train_dataset": str(one)}).data.prompts == str(one)
    assert RunConfig.load("fresh", ["train_dataset=[a.jsonl, b.jsonl]"]).data.prompts == "[a.jsonl, b.jsonl]"
    with pytest.raises(Refused, match=r"train_dataset is data\.store here, which is given too"):
        RunConfig.load("log", [f"train_dataset={path}", "data.store=other.db"])


@pytest.mark.parametrize("meant", ["num_generations", "learning_rate", "train_dataset"])
def test_a_slip_in_a_name_of_trl_is_answered_with_it(meant: str) -> None:
    """Its last letter but one is left out."""
    key = meant[:-2] + meant[-1]
    with pytest.raises(Refused, match=rf"command line: unknown key {key}; did you mean {meant}\?$"):
        RunConfig.load("fresh", [f"{key}=4"])
    with pytest.raises(Refused, match=rf"unknown: {key} \(did you mean {meant}\?\)\. Expected"):
        configured("agro", {key: 4})


@pytest.mark.parametrize(
    ("key", "meant"), [("train.learning_rat", "train.learning_rate"), ("sampler.top_kk", "sampler.top_k")]
)
def test_only_the_names_that_are_most_alike_are_named(key: str, meant: str) -> None:
    with pytest.raises(Refused, match=rf"unknown key {key}; did you mean {meant}\?$"):
        RunConfig.load("fresh", [f"{key}=4"])


def test_names_of_trl_are_no_options_of_a_part() -> None:
    for name, key in (("exact", "beta"), ("judge", "max_completion_length")):
        with pytest.raises(Refused, match=f"unknown key {key}; known here: "):
            load_reward(RewardConfig(name=name, options={key: 1}))
