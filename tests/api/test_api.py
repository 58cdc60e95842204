"""`agro.train` with objects: what goes in, what comes out, and what is refused."""

from __future__ import annotations

import base64
import functools
import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

import agro
from agro.api.arguments import choose, configured, lora_of, reward_values, write_rows
from agro.config import NewModel, aliases
from agro.errors import Refused
from agro.models.pretrained import new_model
from agro.rollout.prompts import load_prompts
from agro.runs.rundata import load_run
from agro.store import Store
from agro.types import Sample

DIGITS = "0123456789>"
SMALL = {
    "beta": 0.1,
    "sampler__n": 3,
    "sampler__max_new": 3,
    "train__groups": 4,
    "train__steps": 3,
    "train__lr": 1e-2,
}
PROMPTS = [f"{i}>" for i in range(8)]


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """(model, tokenizer) of transformers."""
    folder = tmp_path_factory.mktemp("model")
    spec = NewModel(alphabet=DIGITS, hidden=16, layers=1, heads=2, context=16, initializer_range=0.25)
    new_model(folder, spec, 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch, request) -> None:
    monkeypatch.chdir(tmp_path)
    if "report" not in request.keywords:
        monkeypatch.setattr("agro.api.reporting_trainer.report", lambda folder: folder)


def length(completions, **columns):
    return [float(len(text)) for text in completions]


counted = functools.partial(length)  # in no module under its own name: called in this process, at once


class Frame:
    """As pandas.DataFrame as far as it is read."""

    def __init__(self, rows):
        self.rows, self.columns = rows, list(rows[0])

    def to_dict(self, orient):
        assert orient == "records"
        return self.rows


class Dataset(list):
    """As datasets.Dataset as far as it is read."""

    column_names = ("prompt",)


def rows(trained) -> list[dict]:
    """The metrics as they are without pandas."""
    return load_run(trained.folder).rows


def config_of(folder) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())


def test_a_list_and_a_lambda_are_a_run(objects) -> None:
    """The lambda counts zeros, of at most 3 tokens."""
    model, tokenizer = objects
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trained = agro.train(
        model=(model, tokenizer),
        prompts=PROMPTS,
        reward=lambda completions, **columns: [float(text.count("0")) for text in completions],
        out="run",
        **(SMALL | {"train__steps": 20, "train__groups": 8, "sampler__n": 8, "train__lr": 3e-2}),
    )
    rewards = [row["reward_mean"] for row in rows(trained)]
    assert rewards[0] < 0.5  # 3 tokens of 15, evenly, have 0.2 zeros
    assert rewards[-1] > 2
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    config = config_of("run")
    inputs = config["policy"]["model"], config["data"]["prompts"], config["reward"]["name"]
    assert inputs == ("run/inputs/model", "run/inputs/prompts.jsonl", "object:lambda")
    assert config["objective"]["beta"] == 0.1
    prompt = tokenizer("1>", return_tensors="pt")
    assert "0" in tokenizer.decode(trained.model.generate(**prompt, max_new_tokens=3)[0])
    assert trained.store.counts().samples == 20 * 8 * 8
    found = trained.evaluate(prompts=["1>", "2>"], n=4)
    assert (found["prompts"], found["n"]) == (2, 4)
    assert found["reward_mean"]["value"] > 2
    with pytest.raises(agro.Refused, match="n: expected 1 or more responses per prompt, got 0"):
        trained.evaluate(prompts=["1>"], n=0)

    def fails(completions, **_):
        raise ValueError("no answer")

    with pytest.raises(agro.Refused, match=r"none of the responses could be scored.*no answer"):
        agro.Trained("run", {"object:lambda": fails}).evaluate(prompts=["1>"], n=2)


@pytest.fixture(scope="module")
def finished(objects, tmp_path_factory):
    """A run with its page: made before the fixtures of single tests, which draw none."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return agro.train(objects, PROMPTS, counted, eval_prompts=["9>"], out=str(out), **SMALL)


def test_a_notebook_shows_the_page_and_the_figure(finished) -> None:
    frame = finished._repr_html_()
    assert frame.startswith('<iframe srcdoc="')
    assert frame.count('"') == 8, "quotation marks of the page end no attribute"
    assert "&lt;svg" in frame
    figure = finished.plot()
    assert {text.get_text() for text in figure.axes[0].texts} >= {"training", "held-out"}
    measured = [row["reward_mean"] for row in rows(finished) if row["reward_mean"] is not None]
    [training, *_] = figure.axes[0].lines
    assert [y for y in training.get_ydata() if y == y] == measured
    assert figure._repr_png_().startswith(base64.b64decode("iVBORw0KGgo="))


def test_metrics_are_a_dataframe_where_pandas_is(finished, monkeypatch) -> None:
    class Pandas:
        DataFrame = staticmethod(lambda rows: ("frame", len(rows)))

    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    assert finished.metrics == ("frame", 4)  # step 0 is the evaluation of the start


def test_the_command_line_says_that_a_function_is_gone(finished) -> None:
    config = agro.RunConfig.load(finished.folder / "config.json")
    with pytest.raises(agro.Refused, match="was a function of the Python process"):
        agro.Trainer(config, "again").run()


def test_push_to_hub_uploads_the_model(finished, monkeypatch) -> None:
    pushed = []

    def push(folder, train) -> str:
        pushed.append((folder, train.push, train.push_private))
        return "address"

    monkeypatch.setattr("agro.api.push", push)
    assert finished.push_to_hub("me/mine", private=False) == "address"
    assert pushed == [(finished.folder / "model", "me/mine", False)]


def test_a_log_of_dictionaries_is_the_store(objects, capsys) -> None:
    rows = [{"q": f"{i}>", "a": str(j), "score": float(j)} for i in range(4) for j in range(3)]
    names = {"prompt": "q", "response": "a", "reward": "score"}
    trained = agro.train(objects, log=rows, log_map=names, out="run", **SMALL)
    assert "12 samples (12 with a reward) in 4 groups" in capsys.readouterr().err
    config = config_of("run")
    assert (config["data"]["store"], config["data"]["replay"]) == ("run/store.db", 1.0)
    assert sorted(s.response for s in trained.store.samples()) == sorted("012" * 4)
    again = agro.train(objects, log=trained.store, out="again", **SMALL)
    assert config_of("again")["data"]["store"] == "run/store.db"
    assert again.store.counts().samples == 12


def test_a_log_of_unknown_form_is_proposed(objects, capsys) -> None:
    """Nothing is imported by a guess that nobody looked at; toxicity is lower for the better ones."""
    pairs = [(i, j) for i in range(4) for j in range(3)]
    rows = [{"q": f"What is {i}?", "a": f"It is {j}", "toxicity": float(j)} for i, j in pairs]
    with pytest.raises(agro.Refused, match=r"log_map=agro\.propose") as refused:
        agro.train(objects, log=rows, out="run", **SMALL)
    assert "upper, the best (toxicity → reward):\n  0.0 → 0: What is" in str(refused.value)
    assert not Path("run/store.db").exists()
    proposal = agro.propose(rows)
    assert (proposal.judged, proposal.lower_is_better) == ("toxicity", True)
    with pytest.raises(agro.Refused, match="--reward tox: expected one of the columns q, a, toxicity"):
        agro.propose(rows, "tox")
    log = [{"x": 1, "y": 2}, {"x": 3, "y": 4}]  # of no known column
    with pytest.raises(agro.Refused, match="nothing is imported until you confirm"):
        agro.train(objects, log=log, log_map=agro.propose(log), out="run", **SMALL)
    words = [{**row, "toxicity": ("blorp", "zing", "quux")[int(row["toxicity"])]} for row in rows]
    with pytest.raises(agro.Refused, match="toxicity: the worth of its words is unknown"):
        agro.propose(words)
    for name, given, expected in (
        ("proposed", {"log_map": proposal}, {0.0, -1.0, -2.0}),
        ("reversed", {"log_map": proposal.reversed()}, {0.0, 1.0, 2.0}),
        ("said", {"lower_is_better": True}, {0.0, -1.0, -2.0}),
    ):
        wrong = {**SMALL, "data__hold_out": 0.999999}  # refused after the import, before a step
        with pytest.raises(agro.Refused, match=r"no samples that data\.roles"):
            agro.train(objects, log=rows, out=name, **given, **wrong)
        with Store.open(f"{name}/store.db", read_only=True) as store:
            assert {sample.reward for sample in store.samples()} == expected


def test_a_run_goes_on(objects) -> None:
    train = functools.partial(agro.train, objects, PROMPTS, lambda completions: [1.0] * len(completions))
    train(out="run", **SMALL)
    trained = train(out="run", resume=True, **(SMALL | {"train__steps": 5}))
    assert [row["step"] for row in rows(trained)] == [1, 2, 3, 4, 5]


def test_what_was_refused_leaves_nothing_behind(objects) -> None:
    rows = [{"prompt": "1>", "response": "2", "reward": r} for r in (0.0, 1.0)]
    wrong = {**SMALL, "data__hold_out": 0.999999}
    with pytest.raises(agro.Refused):
        agro.train(objects, log=rows, out="run", **wrong)
    log = [*rows, {**rows[0], "response": "3"}]
    trained = agro.train(objects, log=log, out="run", **(SMALL | {"train__groups": 1}))
    assert sorted(s.response for s in trained.store.samples()) == ["2", "2", "3"]
    with pytest.raises(agro.Refused, match="there is a run in this folder"):
        agro.train(objects, log=rows, out="run", **SMALL)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a", "b"], [("a", {}), ("b", {})]),
        ([{"prompt": "a", "answer": np.int64(3)}], [("a", {"answer": 3})]),
        ([[{"role": "user", "content": "a"}]], [([{"role": "user", "content": "a"}], {})]),
        ([agro.Prompt("a", "one", {"answer": "1"})], [("a", {"answer": "1"})]),
        (Dataset([{"prompt": "a", "tags": ("x", "y")}]), [("a", {"tags": ["x", "y"]})]),
        (Frame([{"prompt": "a", "answer": float("nan")}]), [("a", {"answer": None})]),
        (Frame([{"prompt": "a", "at": np.array([1, 2])}]), [("a", {"at": [1, 2]})]),
    ],
)
def test_rows_become_prompts(given, expected, tmp_path) -> None:
    file = write_rows(given, tmp_path / "prompts.jsonl", "prompts")
    assert [(p.text, dict(p.columns)) for p in load_prompts(file)] == expected


def test_a_dataframe_of_pandas_becomes_prompts(tmp_path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["a", "b"], "answer": [1, None]})
    file = write_rows(frame, tmp_path / "prompts.jsonl", "prompts")
    assert [(p.text, p.columns["answer"]) for p in load_prompts(file)] == [("a", 1.0), ("b", None)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at least one row"),
        ([{"prompt": "a"}, {"prompt": float("nan")}], "row 1: .*JSON"),
        ([3], "row 0: expected a dictionary, got 3"),
        ({"prompt": ["a"]}, "expected a path, a list, .* got dict"),
        (type("DatasetDict", (dict,), {"column_names": {"train": [], "test": []}})(), "train, test"),
    ],
)
def test_other_rows_are_refused(given, message, tmp_path) -> None:
    with pytest.raises(agro.Refused, match=message):
        write_rows(given, tmp_path / "prompts.jsonl", "prompts")


def test_settings_are_put_into_their_sections() -> None:
    given = {"beta": 0.2, "train__steps": 3, "train.lr": 1e-3, "sampler": {"n": 2}, "sampler__max_new": 5}
    assert configured("agro", given) == {
        "objective": {"name": "agro", "beta": 0.2},
        "train": {"steps": 3, "lr": 1e-3},
        "sampler": {"n": 2, "max_new": 5},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 3}, "unknown: steps (did you mean train__steps?). Expected settings with their section"),
        (
            {"bta": 3, "top": 1},
            "unknown: bta (did you mean beta?); top. Expected settings with their section",
        ),
        ({"train__steps": 3, "train.steps": 4}, "train.steps: set twice, to 3 and to 4"),
        ({"train__steps__more": 3, "train__steps": 4}, "train.steps: set twice"),
    ],
)
def test_other_settings_are_refused(given, message) -> None:
    with pytest.raises(agro.Refused, match=re.escape(message)):
        configured("agro", given)


def test_a_function_of_a_module_has_a_process_of_its_own_and_a_lambda_has_not() -> None:
    functions: dict = {}
    ones, twos = (lambda completions: [1.0]), (lambda completions: [2.0])
    given = reward_values({length: 1.0, ones: 0.5, twos: 2.0, "exact": 0.0}, functions)["functions"]
    assert [(part["name"], part["weight"], part["label"]) for part in given] == [
        (f"{__name__}:length", 1.0, "length"),
        ("object:lambda", 0.5, None),
        ("object:lambda_2", 2.0, None),
        ("exact", 0.0, None),
    ]
    assert functions == {"object:lambda": ones, "object:lambda_2": twos}


def test_rewards_with_weights_are_summed(objects, monkeypatch) -> None:
    code = "def length(completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    Path("lengths.py").write_text(code)
    monkeypatch.syspath_prepend(".")
    function = importlib.import_module("lengths").length
    twos = lambda completions: [2.0] * len(completions)  # noqa: E731
    agro.train(objects, PROMPTS, {function: 0.5, twos: 1.0}, out="run", **SMALL)
    assert config_of("run")["reward"]["functions"][0]["name"] == "lengths:length"
    with agro.Store.open("run/store.db") as store:
        for sample in store.samples():
            assert sample.meta["reward_parts"] == {"length": len(sample.response), "object:lambda": 2.0}
            assert sample.reward == 0.5 * len(sample.response) + 2.0


def test_a_lora_config_is_mapped() -> None:
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    assert lora_of(config) == {"rank": 4, "alpha": 6, "targets": ("q_proj", "v_proj")}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.LoraConfig(target_modules="all-linear", lora_dropout=0.1, use_rslora=True), "lora_dropout=0.1"),
        (peft.LoraConfig(target_modules="all-linear", use_rslora=True), "use_rslora=True"),
        (peft.LoraConfig(), "target_modules: expected 'all-linear'"),
        (peft.LoraConfig(target_modules=".*_proj"), "target_modules: expected 'all-linear'"),
        (peft.LoraConfig(target_modules="all-linear", task_type="SEQ_CLS"), "task_type"),
        (peft.IA3Config(), "expected a peft.LoraConfig, got IA3Config"),
    ],
)
def test_what_an_adapter_does_not_have_is_refused(config, message) -> None:
    with pytest.raises(agro.Refused, match=re.escape(message)):
        lora_of(config)


def test_an_adapter_is_trained(objects) -> None:
    lora = peft.LoraConfig(r=2, target_modules="all-linear")
    agro.train(objects, PROMPTS, counted, peft=lora, out="run", **SMALL)
    assert config_of("run")["policy"]["lora"]["rank"] == 2
    assert (Path("run") / "adapter/adapter_config.json").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 3}, "model: expected a folder, a hub name"),
        ({"model": "somewhere", "tokenizer": object()}, "tokenizer: somewhere has its own"),
        ({"tokenizer": None}, "tokenizer: expected the tokenizer of the model object"),
        ({"reward": 3}, "reward: expected a name"),
        ({"reward": lambda completions: [1.0], "reward__timeout": 5.0}, "reward.timeout is for rewards"),
        ({"reward": lambda answers: [1.0]}, r"expected f(prompts, completions, **columns)"),
        ({"log": [{"prompt": "1>", "response": "2"}]}, "data__replay: expected the share"),
        ({"train__stesp": 3}, "unknown key train.stesp"),
    ],
)
def test_a_mistake_is_refused(given, message, objects) -> None:
    usual = {"model": objects if "tokenizer" not in given else objects[0], "prompts": PROMPTS, "out": "run"}
    with pytest.raises(agro.Refused, match=re.escape(message)):
        agro.train(**(usual | SMALL | given))


def test_three_arguments_are_enough(objects, capsys) -> None:
    """The recipe fresh, β = min(.01, 2.56 / 256 tokens) for rewards of 0 to 1; the rate is at most 1e-3."""
    trained = agro.train(objects, PROMPTS, counted, train__steps=1, train__groups=4, out="run")
    said = capsys.readouterr().err
    assert "note: the method is that of recipe fresh" in said
    assert "note: objective.beta = 0.01, for rewards from 0 to 1 (assumed; none is known yet)" in said
    assert "note: train.lr = auto, found at the first step" in said
    assert re.search(r"train\.lr = [\d.e-]+: the first update then changes the policy by", said)
    config = config_of(trained.folder)
    assert (config["objective"]["beta"], config["train"]["lr"]) == (0.01, "auto")
    assert (config["objective"]["baseline"], config["train"]["gain_ratio"]) == ("step", 0.75)


def test_a_log_says_how_long_responses_are_and_how_far_rewards_are_apart(tmp_path) -> None:
    """40 letters, about 10 tokens, would be .256 a unit of reward: more than .01; 4,000 are .00256."""
    for letters, beta in ((40, 0.03), (4000, 0.00768)):
        with Store.open(tmp_path / f"{letters}.db") as store:
            store.append([Sample("p", "x" * letters, reward=r) for r in (-1.0, 2.0)])
        values = {"policy": {"model": "m"}, "data": {"store": str(tmp_path / f"{letters}.db"), "replay": 1.0}}
        chosen = choose(values | {"objective": {"name": "agro"}})
        of_log = agro.RunConfig.load("log")
        expected = {f"objective.{name}": value for name, value in of_log.objective.options.items()}
        expected |= {"objective.beta": beta, "train.lr": "auto", "data.spread": 0.1}
        expected |= {"train.gain_ratio": 0.75, "train.step_kl": 0.005, "train.schedule": "linear"}
        assert chosen.settings == expected
        assert "rewards from -1 to 2" in chosen.notes[1]
        named = choose(values | {"objective": {"name": "agro", "weight": "none"}})
        assert set(named.settings) == {"objective.beta", "train.lr"}


def test_names_of_trl_are_arguments(objects, monkeypatch, capsys) -> None:
    monkeypatch.setattr(aliases, "_printed", set())
    given = {"train_dataset": PROMPTS, "reward_funcs": [counted], "loss_type": "grpo", "num_generations": 4}
    sizes = {"max_completion_length": 3, "learning_rate": 1e-3, "train__groups": 4, "train__steps": 1}
    trained = agro.train(objects, **given, **sizes)
    config = config_of(trained.folder)
    assert (config["train"]["groups"], config["sampler"]["n"], config["sampler"]["max_new"]) == (4, 4, 3)
    assert config["objective"]["name"] == "grpo"
    said = capsys.readouterr().err
    for name, ours in (("train_dataset", "prompts"), ("reward_funcs", "reward"), ("loss_type", "objective")):
        assert said.count(f"note: TRL's {name} is {ours} here") == 1
    with pytest.raises(Refused, match="train_dataset is prompts here, which is given too"):
        agro.train(objects, PROMPTS, train_dataset=PROMPTS)


def test_a_store_in_the_place_of_prompts_is_the_log(objects, tmp_path, capsys) -> None:
    path = str(tmp_path / "log.db")
    with Store.open(path) as store:
        store.append(Sample(f"{p}>", str(r), reward=float(r)) for p in range(4) for r in range(3))
    passes = {name: value for name, value in SMALL.items() if name != "train__steps"}
    agro.train(objects, train_dataset=path, num_train_epochs=1, out="theirs", **passes)
    assert "TRL's train_dataset is log here" in capsys.readouterr().err
    agro.train(objects, path, out="ours", **SMALL)
    for run in ("theirs", "ours"):
        assert (config_of(run)["data"]["store"], config_of(run)["data"]["replay"]) == (path, 1.0)
    with pytest.raises(Refused, match=r"expected prompts next to the log, got .*log\.db, a store"):
        agro.train(objects, path, log=path)
    with pytest.raises(Refused, match="train_dataset is log here, which is given too"):
        agro.train(objects, train_dataset=path, log=path)


def test_a_run_is_fitted_and_says_so(objects, monkeypatch, tmp_path, capsys) -> None:
    """TRL's names that mean the same are taken."""
    monkeypatch.chdir(tmp_path)
    sizes = {"train__steps": 2, "train__groups": 4, "max_completion_length": 3, "num_generations": 2}
    fitted = functools.partial(agro.train, objects, PROMPTS, counted, fit="1h", out="run")
    fitted(**sizes)
    said = capsys.readouterr().err
    assert "--fit chose train.warmup" not in said  # there is none to shorten
    assert "--fit chose nothing" in said
    assert "2 steps take about" in said
    config = config_of("run")
    assert (config["train"]["steps"], config["train"]["lr"]) == (2, "auto")
    with pytest.raises(Refused, match=r"chooses settings for a new run, but resume=True continues one"):
        fitted(resume=True, **sizes)
