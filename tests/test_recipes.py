"""Every recipe as its own head comment starts it, on a tiny model for a few steps."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import forked
import pytest
from tiers import first_of_each
from transformers import AutoTokenizer
from typer.testing import CliRunner

from agro import objectives
from agro.api.reporting_trainer import Trainer
from agro.cli import app
from agro.config import NewModel, RunConfig, recipes
from agro.io import plugins
from agro.models.pretrained import new_model
from agro.objectives import table

ROOT = Path(__file__).parents[1]
RECIPES = sorted(recipes.recipes())
DECLARED = [name for name, entry in table.entries().items() if entry.recipe is not None]

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if not enable_thinking %}()\n{% endif %}{% endif %}"
)
SMALL = ["train.steps=2", "train.groups=2", "sampler.n=3", "sampler.max_new=4", "train.warmup=1"]
OWN = {  # instead of these
    # A random model spells nothing right, so any end of an episode has to do.
    "agent_q": [*SMALL[:2], "sampler.max_new=2", "source.options.expansions=3", "source.options.theta=0"],
    "bfs_prover": [
        *(f"phases.{name}.train.steps=1" for name in ("search", "restart", "search_again")),
        *(f"phases.{name}.source.options.right=0" for name in ("search", "search_again")),
        *("phases.restart.data.min_reward=0", "phases.restart.train.groups=1", "objective.low=0"),
        *("train.groups=2", "sampler.max_new=2", "objective.high=1", "train.warmup=1"),
    ],
    "card24": [*SMALL, "engine.kind=hf", "engine.sleep=false"],  # no vLLM is here
    "dapo": [*SMALL, "data.spread=false"],  # the rewards of a random model don't differ
    "mbrcsl": [
        *(f"phases.{name}.train.steps=1" for name in ("imitate", "stitch")),
        *(f"phases.stitch.source.options.{option}" for option in ("expansions=3", "theta=0")),
        *("phases.imitate.train.groups=2", "train.groups=2", "sampler.max_new=2", "train.warmup=1"),
    ],
    "multi_turn": [
        *("phases.sft.train.steps=1", "phases.sft.train.groups=4", "phases.episodes.train.steps=2"),
        *("train.groups=2", "sampler.n=3", "policy.new.layers=1", "data.eval_prompts=one.jsonl"),
    ],
    "nested_reft": [*SMALL, "sampler.skip_layers=0.9"],  # of one layer between the first and the last
    "one_response": ["train.steps=2", "train.groups=3", "sampler.max_new=4", "train.warmup=1"],
    "paper_math": [
        *(f"phases.{name}.train.steps=1" for name in ("sft", "onpolicy", "offpolicy")),
        *("train.groups=2", "sampler.n=3", "sampler.max_new=4", "train.warmup=1"),
    ],
    "remix": [*SMALL[1:], "phases.mixed.train.steps=2", "phases.reincarnated.train.steps=1"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """MODEL, and the chat model of a hub under its name there, with a template."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("MODEL", "Qwen/Qwen3-0.6B"):
        new_model(folder / name, NewModel(hidden=16, layers=3, heads=2, context=256), 0)
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def here(tmp_path, models, monkeypatch) -> Path:
    """A folder with what the recipes say must be given, under the names that they give it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agro.api.reporting_trainer.report", lambda folder: folder)
    for name in ("MODEL", "Qwen", "examples"):
        Path(name).symlink_to((ROOT if name == "examples" else models) / name)
    sums = [(f"{i}+1=", str(i + 1)) for i in range(9)]
    write("prompts.jsonl", ({"prompt": q, "answer": a, "hint": f"{q} {a}"} for q, a in sums[:6]))
    for name, part in (("train", sums[:6]), ("test", sums[6:])):
        solutions = ({"problem": q, "solution": rf"\boxed{{{a}}}", "level": "1"} for q, a in part)
        write(f"{name}.jsonl", solutions)
    of_500 = {"problem": "9+1=", "solution": r"\boxed{10}", "answer": "10", "subject": "Algebra", "level": 1}
    write("math500.jsonl", [of_500])
    write(
        "experts.jsonl", ({"prompt": q, "response": "x", "reward": 1, "role": "expert"} for q, _ in sums[:6])
    )
    write("one.jsonl", [{"prompt": "1*1=", "answer": "1"}])
    write("logged_prompts.jsonl", ({"prompt": f"{i}>"} for i in range(4)))  # those of log.jsonl
    pairs = [(i, j) for i in range(4) for j in range(3)]
    write("log.jsonl", ({"prompt": f"{i}>", "response": "x" * j, "reward": j % 2} for i, j in pairs))
    write("ratings.jsonl", ({"prompt": f"{i}>", "response": "x" * i, "reward": i % 5} for i in range(1, 9)))
    preferences = []
    for i, j in pairs:
        judged = {"prompt": f"{i}>", "chosen": "x" * (j + 1), "rejected": "y"}
        preferences.append(judged | {"votes_chosen": j + 1, "votes_rejected": 1})
    write("preferences.jsonl", preferences)
    Path("my_reward.py").write_text(
        "def score(completions, **columns):\n    return [len(t) % 3 for t in completions]\n\n\n"
        "def meaning(completions, **columns):\n    return [len(t) for t in completions]\n"
    )
    return tmp_path


def write(name, rows) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def head(recipe: str) -> list[str]:
    """The lines of the comment that a recipe begins with, without their #."""
    lines = recipes.get(recipe).text.splitlines()
    return [line[1:] for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]]


def commands(recipe: str) -> list[list[str]]:
    """The indented lines of the head, which are commands; a backslash joins two."""
    text = "\n".join(line.strip() for line in head(recipe) if line.startswith("   ")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if not line.startswith("{")]


def family(recipe: str) -> str:
    """Of a method's recipe the file of its objective; of another one itself."""
    if recipes.get(recipe).kind != "method":
        return recipe
    return objectives.get(RunConfig.load(recipe).objective.name).function.__module__


@pytest.mark.parametrize("recipe", first_of_each(family, RECIPES))
def test_a_recipe_trains_as_its_head_says(recipe: str, here: Path) -> None:
    trained = []
    for program, *arguments in commands(recipe):
        if program == "agro" and arguments[0] == "train":
            path, *overrides, flag, out = arguments[1:]
            assert (path, flag) == (recipe, "--out")
            Trainer(RunConfig.load(path, [*overrides, *OWN.get(recipe, SMALL)]), out).run()
            trained.append(out)
        elif program == "agro":
            assert CliRunner().invoke(app, arguments).exit_code == 0
        elif program == "python":
            forked.run([sys.executable, str(ROOT / arguments[0]), *arguments[1:]], check=True)
    assert len(trained) == 1, f"{recipe}: expected one `agro train` in the comment at its head"
    rows = [json.loads(line) for line in Path(trained[0], "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == sum(c.train.steps for c in phases(trained[0]))
    # A search of a random model may find no right episode, and then nothing is trained on.
    assert all(row["loss"] is not None or row["searched"] for row in rows if row["step"])
    assert (Path(trained[0]) / "model/model.safetensors").exists()


def phases(run: str) -> list[RunConfig]:
    config = RunConfig.load(Path(run) / "config.json")
    return [config.phase(name) for name in config.phase_names]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_valid_in_each_phase_as_its_objective_is(recipe: str) -> None:
    config = RunConfig.load(recipe)
    for phase in map(config.phase, config.phase_names):
        entry = objectives.get(phase.objective.name)
        options = {  # of a schedule the first value
            key: value["start"] if isinstance(value, dict) else value
            for key, value in phase.objective.options.items()
        }
        assert options.keys() <= entry.resolve(phase.objective.name, options).keys()


@pytest.mark.parametrize("name", DECLARED)
def test_the_text_of_a_declared_recipe_is_what_its_entry_declares(name: str) -> None:
    """The text parses to the declared values."""
    entry, recipe = objectives.get(name), recipes.get(name)
    declared = entry.recipe
    assert declared is not None
    values = tomllib.loads(recipe.text)
    expected: dict = {}
    for dotted, value in recipes.method_settings(name, entry).items():
        *sections, key = dotted.split(".")
        section = expected
        for of in sections:
            section = section.setdefault(of, {})
        section[key] = value
    assert values == json.loads(json.dumps(expected))
    options = values["objective"].keys() - {"name"}
    assert {*declared.options, *declared.shown} <= options <= entry.options.model_fields.keys()
    defaults = json.loads(json.dumps(entry.defaults()))
    assert all(values["objective"][key] == defaults[key] for key in declared.shown)
    assert all(repr(defaults.get(key)) != repr(values["objective"][key]) for key in declared.options)
    assert " ".join(head(name)).replace("#", "").split()[: len(recipe.title.split())] == recipe.title.split()
    assert max(map(len, recipe.text.splitlines())) <= 110


def test_a_recipe_has_settings_of_every_section():
    entry = objectives.get("rloo")
    settings = {**entry.recipe.settings, "guard.kl": 1.5}
    entry = replace(entry, recipe=replace(entry.recipe, settings=settings))
    assert tomllib.loads(recipes.method_text("rloo", entry))["guard"] == {"kl": 1.5}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_head_says_what_it_is_and_what_is_required(recipe: str) -> None:
    """And gives a command whose settings are valid."""
    assert len(head(recipe)[0]) > 20
    assert any(line.startswith(" Required: ") for line in head(recipe))
    [(path, *overrides, flag, _)] = [c[2:] for c in commands(recipe) if c[:2] == ["agro", "train"]]
    assert (path, flag) == (recipe, "--out")
    config = RunConfig.load(path, [*overrides, *OWN.get(recipe, SMALL)])
    assert all(config.phase(name).train.steps <= 2 for name in config.phase_names)


def test_recipes_of_an_installed_package(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "ours.toml").write_text("# For our logs.\n#   agro train ours\n[objective]\nname = 'grpo'\n")
    (tmp_path / "their_recipes.py").write_text("from pathlib import Path\nFOLDER = Path(__file__).parent\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        plugins, "installed", lambda kind, *_: {"theirs": "their_recipes:FOLDER"} if kind == "recipes" else {}
    )
    assert recipes.get("ours").title == "For our logs."
    assert RunConfig.load("ours").objective.name == "grpo"
    (tmp_path / "bare.toml").write_text("[objective]\nname = 'grpo'\n")
    assert recipes.get("bare").title == ""
    listed = CliRunner().invoke(app, ["recipes", "--json"])
    assert listed.exit_code == 0, "a recipe without a head is listed"
    assert "bare" in listed.stdout
