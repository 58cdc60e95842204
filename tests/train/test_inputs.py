"""What a run reads: prompts are checked before it starts, and changed models, code, files and stores are
refused by name when it is resumed.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
from tiers import first_of_each
from tiny_runs import fill_store, interrupted, metrics, tiny, weights, write_prompts, write_toml

from agro.api.plan import describe
from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.reference import fingerprint
from agro.place.collector import Collector
from agro.store import Store
from agro.train.inputs import of_scoring

SOURCES = {
    "score.py": """
import json
import helper

def score(completions, rubric):
    return [helper.sign() * len(c) for c in completions]
""",
    "helper.py": """
def sign():
    from deep import inner
    return inner.SIGN
""",
    "deep/inner.py": "SIGN = 1.0\n",  # of a package without __init__.py
    "own.py": """
from agro.objectives import Groups, Streams, Terms

def mine(streams, batch, *, beta=0.1):
    groups = Groups.of(batch)
    return Terms(groups.average_responses(-groups.sum_tokens(streams["logp"])))
""",
    "place.py": """
from agro.rollout.envs import Turn

class Twice:
    name, stop = "twice", ("5",)
    def reset(self, prompt):
        return []
    def step(self, state, text):
        state.append(text)
        return Turn(">", 1.0, len(state) == 2)
""",
    "rubric.txt": "short is good\n",
}


def written(folder: Path) -> Path:
    for name, text in SOURCES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def another_model(folder: Path, seed: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    Policy.load(tiny(folder.parent).policy, seed=seed).save(folder)


def of_files(folder: Path) -> RunConfig:
    """A run whose models, prompts, reward, objective and environment are files, some of which open others."""
    written(folder)
    fill_store(folder / "held.db")
    for seed, name in enumerate(("start", "reference")):
        another_model(folder / name, seed)
    return tiny(
        folder,
        policy__model=str(folder / "start"),
        policy__new=None,
        policy__reference="model",
        policy__reference_model=str(folder / "reference"),
        reward={"name": f"{folder / 'score.py'}:score", "options": {"rubric": str(folder / "rubric.txt")}},
        objective={"name": f"{folder / 'own.py'}:mine", "beta": 0.1},
        environment={"name": f"{folder / 'place.py'}:Twice"},
        evaluate__beta=0.1,
        train__steps=3,
        data__eval_prompts=write_prompts(folder / "held.jsonl", range(60, 64)),
        data__eval_store=str(folder / "held.db"),
    )


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\n# another\n")


def another_template(*models: Path) -> None:
    for folder in models:  # also of the reference, whose tokenizer has to remain that of the model
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}>")


EDITS: dict[str, tuple[Any, ...]] = {  # the key that is named, what is done, and to which files
    "the reward": ("reward.name", edit, "score.py"),
    "what the reward imports": ("reward.name", edit, "helper.py"),
    "what that imports later": ("reward.name", edit, "deep/inner.py"),
    "a missing file": ("reward.options.rubric", Path.unlink, "rubric.txt"),
    "a file of the reward": ("reward.options.rubric", edit, "rubric.txt"),
    "the objective": ("objective.name", edit, "own.py"),
    "the environment": ("environment.name", edit, "place.py"),
    "held-out samples": ("data.eval_store", fill_store, "held.db"),
    "prompts": ("data.prompts", partial(write_prompts, numbers=range(50)), "prompts.jsonl"),
    "held-out prompts": ("data.eval_prompts", partial(write_prompts, numbers=range(90, 94)), "held.jsonl"),
    "the model": ("policy.model", partial(another_model, seed=2), "start"),
    "its template": ("policy.model, policy.reference_model", another_template, "start", "reference"),
    "the reference": ("policy.reference_model", partial(another_model, seed=3), "reference"),
}


@pytest.fixture(scope="module")
def began(tmp_path_factory) -> Path:
    """The folder of such a run that was interrupted after step 2, which has a copy of everything."""
    folder = tmp_path_factory.mktemp("interrupted")
    interrupted(of_files(folder), folder / "run", 2)
    shutil.copytree(folder, f"{folder} copy")
    return folder


@pytest.fixture
def folder(began: Path) -> Iterator[Path]:
    """It, which is put back."""
    yield began
    shutil.rmtree(began)
    shutil.copytree(f"{began} copy", began)


def config_of(run: Path) -> RunConfig:
    return RunConfig.load(run / "config.json")


@pytest.mark.parametrize("what", first_of_each(lambda what: EDITS[what][0], EDITS))
def test_a_change_is_refused_by_name_or_accepted(folder: Path, what: str, capsys) -> None:
    key, change, *names = EDITS[what]
    run, made = folder / "run", config_of(folder / "run")
    before = (run / "config.json").read_bytes()
    change(*(folder / name for name in names))
    accept = key.split(", ")
    flags = " ".join(f"--accept {each}" for each in accept)
    with pytest.raises(Refused, match=f"what {key} names has changed .* --resume {flags}$"):
        Trainer(made, run, resume=True).run()
    assert (run / "config.json").read_bytes() == before
    assert metrics(run)[-1]["step"] == 2
    Trainer(made, run, resume=True, accept=accept).run()
    assert f"note: what {key} names has changed since the run began" in capsys.readouterr().err
    assert metrics(run)[-1]["step"] == 3
    Trainer(made, run, resume=True).run()  # what was accepted is not asked again


def test_equal_inputs_elsewhere_on_the_disk_are_not_changed(folder: Path) -> None:
    """The contents count: files that were copied back are the same."""
    made = config_of(folder / "run")
    Trainer(made, folder / "plain").run()
    for name in ("start", "reference"):
        (folder / name).rename(folder / "moved")
        shutil.copytree(folder / "moved", folder / name)
        shutil.rmtree(folder / "moved")
    Trainer(made, folder / "run", resume=True).run()
    assert weights(folder / "run") == weights(folder / "plain")
    assert config_of(folder / "run") == made


def test_what_is_accepted_has_to_be_an_input(folder: Path) -> None:
    run, made = folder / "run", config_of(folder / "run")
    with pytest.raises(Refused, match=r"--accept reward: expected an input of the run: .*reward\.name"):
        Trainer(made, run, resume=True, accept=["reward"]).run()
    with pytest.raises(Refused, match="--accept belongs to --resume"):
        Trainer(made, run, accept=["reward.name"])


def test_an_input_without_a_fingerprint_of_the_beginning_is_named(folder: Path, capsys) -> None:
    """Of a run folder of an agro that recorded fewer."""
    file = folder / "run/config.json"
    file.write_text(file.read_text().replace('"objective.name": "', '"objective.before": "'))
    made = RunConfig.load(file)
    with pytest.raises(Refused, match=r"what objective\.before names has changed"):
        Trainer(made, folder / "run", resume=True).run()
    Trainer(made, folder / "run", resume=True, accept=["objective.before"]).run()
    assert "no fingerprint of what objective.name names was recorded" in capsys.readouterr().err


def test_a_collector_whose_reward_is_not_that_of_the_run_is_refused(tmp_path: Path) -> None:
    made = tiny(tmp_path, source__kind="elsewhere")
    record = {**made.record(), "run": "r", "inputs": {"reward.name": "0" * 64}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(Refused, match=r"reward\.name has other content here"):
        Collector.of(str(tmp_path), None)  # type: ignore[arg-type]


def test_a_fingerprint_is_of_every_weight(tmp_path: Path) -> None:
    policy = Policy.load(tiny(tmp_path).policy, seed=0)
    before = {fingerprint(policy)}
    for w in policy.weights().values():
        w.data.view(-1)[-1] += 1.0
        before.add(fingerprint(policy))
    assert len(before) == 1 + len(policy.weights())
    assert all(found.startswith(policy.fingerprint) for found in before)  # that of the tokenizer and template


LONG = "9" * 20 + ">"  # 22 tokens with BOS; the context is 16


def with_long_prompts(folder: Path, count: int, **changes: object) -> RunConfig:
    made = tiny(folder, data__prompts=str(folder / "some.jsonl"), train__groups=2, **changes)
    lines = [json.dumps({"prompt": LONG, "prompt_id": f"long{i}"}) for i in range(count)]
    plain = (folder / "prompts.jsonl").read_text().splitlines()[:4]
    (folder / "some.jsonl").write_text("\n".join([*plain, *lines]) + "\n")
    return made


@pytest.mark.parametrize("key", ["prompts", "eval_prompts"])
def test_prompts_without_room_for_a_response_are_refused_before_the_run(tmp_path: Path, key: str) -> None:
    made = with_long_prompts(tmp_path, 2)
    if key == "eval_prompts":
        data = {"prompts": write_prompts(tmp_path / "p.jsonl", range(8, 12)), key: made.data.prompts}
        made = tiny(tmp_path, data=data)
    for go in (lambda: Trainer(made, tmp_path / "run").plan(), Trainer(made, tmp_path / "run").run):
        named = r"some\.jsonl:5: .*long0.*some\.jsonl:6: .*long1"
        with pytest.raises(Refused, match=rf"data\.{key}: 2 of 6 prompts .*{named}.*invalid_prompts"):
            go()
    assert not (tmp_path / "run" / "config.json").exists()


def test_invalid_prompts_are_dropped_and_counted(tmp_path: Path, capsys) -> None:
    """One without room, one that isn't Unicode, and one whose letters are <unk>."""
    made = with_long_prompts(tmp_path, 1, data__invalid_prompts="drop")
    with (tmp_path / "some.jsonl").open("a") as file:
        file.write('{"prompt": "\\ud800"}\n{"prompt": "12ab>"}\n')
    plan = Trainer(made, tmp_path / "run").plan()
    assert plan["prompts"] == 4
    assert "3 of 7 prompts are invalid" in describe(plan)
    assert "doesn't know 'a', 'b'" in describe(plan)
    folder = Trainer(made, tmp_path / "run").run()
    assert "3 of 7 prompts" in capsys.readouterr().err
    assert all(m["groups"] == 2 for m in metrics(folder))
    lines = (json.dumps({"prompt": LONG, "id": i}) + "\n" for i in range(3))
    (tmp_path / "some.jsonl").write_text("".join(lines))
    with pytest.raises(Refused, match="3 of 3 prompts"):
        Trainer(made, tmp_path / "other").run()


def test_prompts_of_several_files_by_other_columns(tmp_path: Path) -> None:
    """A CSV file and a JSON list; data.columns names where prompt and answer are, `||` in which of two."""
    (tmp_path / "a.csv").write_text("question,answer,level\n001>,1,easy\n002>,2,hard\n")
    rows = [{"ask": {"text": "003>"}, "answer": "3"}, {"ask": {"text": "001>"}, "answer": "1"}]
    (tmp_path / "b.json").write_text(json.dumps(rows))

    def trainer(prompt: str, **changes: Any) -> Trainer:
        data = {"prompts": [str(tmp_path / "a.csv"), str(tmp_path / "b.json")], "columns": {"prompt": prompt}}
        return Trainer(tiny(tmp_path, data={**data, **changes}), tmp_path / "run")

    with pytest.raises(Refused, match=r"data\.prompts: 1 prompts are there twice \(.*b\.json:2: .*a\.csv:2"):
        trainer("question || ask.text").plan()
    dropping = trainer("question || ask.text", invalid_prompts="drop")
    assert "1 prompts are there twice" in describe(dropping.plan())
    read = [(p.text, p.columns["answer"]) for p in dropping.prompts]
    assert read == [("001>", "1"), ("002>", "2"), ("003>", "3")]
    assert dropping.prompts[0].columns["level"] == "easy"
    with pytest.raises(Refused, match=r"4 lines are refused.*\n.*columns\.prompt: no column task; there"):
        trainer("task").plan()


def test_a_column_that_the_reward_lacks_is_found_before_the_run(tmp_path: Path) -> None:
    prompts, reward = tmp_path / "some.jsonl", tmp_path / "own.py"
    prompts.write_text('{"prompt": "001>", "solution": "1"}\n')
    reward.write_text("def own(completions, solution, answer):\n    return [0.0] * len(completions)\n")

    def plan(name: str, **columns: str) -> dict:
        data = {"prompts": str(prompts), "columns": columns}
        return Trainer(tiny(tmp_path, data=data, reward__name=name, train__groups=1), tmp_path / "run").plan()

    message = r"1 of 1 prompts can't be scored: the sample has no answer.*solution"
    for name in ("exact", f"{reward}:own"):
        with pytest.raises(Refused, match=message):
            plan(name)
    assert plan("exact", answer="solution || answer")["prompts"] == 1


def test_a_store_of_too_few_groups_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    """Eight groups; a step of the first phase draws nine."""
    log = fill_store(tmp_path / "log.db", groups=8)
    made = tiny(tmp_path, **log, train__groups=9, policy={"model": str(tmp_path / "no such model")})
    with pytest.raises(Refused, match=r"expected 9 groups .* got 8\. The store has 32 samples in 8 groups"):
        Trainer(made, tmp_path / "run").plan()
    assert Trainer(tiny(tmp_path, **log, train__groups=8), tmp_path / "run").plan()


def test_the_reward_of_a_resumed_command(tmp_path: Path) -> None:
    """As on a command line: rewards rise with the length, then someone turns their sign."""
    written(tmp_path)
    made = tiny(tmp_path, reward={"name": "score:score", "options": {"rubric": "rubric.txt"}}, train__lr=1e-6)
    file = write_toml(tmp_path / "made.json", made)
    command = [sys.executable, "-m", "agro", "train", str(file), "--out", str(tmp_path / "run")]

    def ended(code: int, *more: str) -> str:
        found = forked.run([*command, *more], cwd=tmp_path, timeout=120)
        assert found.returncode == code, found.stderr
        return found.stderr

    ended(0, "train.steps=2")
    (tmp_path / "deep/inner.py").write_text("SIGN = -1.0\n")
    ended(0, "train.steps=4", "--resume", "--accept", "reward.name")
    assert [m["reward_mean"] > 0 for m in metrics(tmp_path / "run")] == [True, True, False, False]


def test_a_store_without_the_run_is_refused(tmp_path: Path) -> None:
    """It would begin again at the first step, with the metrics of before dropped."""
    made = tiny(tmp_path, data__store=str(tmp_path / "log.db"))
    run = interrupted(made, tmp_path / "run", 2)
    for file in tmp_path.glob("log.db*"):
        file.unlink()

    def is_refused() -> None:
        with pytest.raises(Refused, match=r"log\.db: expected the store that the run in .* began with"):
            Trainer(made, run, resume=True).run()
        assert metrics(run)[-1]["step"] == 2

    is_refused()
    fill_store(tmp_path / "log.db")
    is_refused()


def of_reward(folder: Path, name: str) -> str | None:
    return of_scoring(tiny(folder, reward__name=name), {}).get("reward.name")


def test_code_is_the_same_in_another_folder_and_as_a_module(tmp_path: Path, monkeypatch) -> None:
    """Contents count, not places; what isn't imported doesn't."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written(tmp_path / name)
    here = of_reward(tmp_path, f"{tmp_path / 'a/score.py'}:score")
    assert here == of_reward(tmp_path, f"{tmp_path / 'b/score.py'}:score")
    edit(tmp_path / "b/own.py")
    assert here == of_reward(tmp_path, f"{tmp_path / 'b/score.py'}:score")
    assert of_reward(tmp_path, "exact") is None
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("from . import first\n")
    (tmp_path / "package/first.py").write_text("from .second import f\n")
    (tmp_path / "package/second.py").write_text("from ...beyond import f\n")
    before = of_reward(tmp_path, "package.first:f")
    assert before == of_reward(tmp_path, "package.first:g")
    for name in ("__init__", "first", "second"):
        edit(tmp_path / f"package/{name}.py")
        after = of_reward(tmp_path, "package.first:f")
        assert after not in (before, None)
        before = after
    assert of_reward(tmp_path, "json.decoder:scanstring") is not None  # of an installed module its own file


def test_a_function_of_this_process_is_its_source(tmp_path: Path) -> None:
    def long(completions):
        return [len(c) for c in completions]

    made = tiny(tmp_path, reward__name="object:f")
    first = of_scoring(made, {"object:f": long})["reward.name"]
    assert first != of_scoring(made, {"object:f": lambda completions: [1.0]})["reward.name"]
    unknown = eval("lambda completions: [1.0]")
    assert "reward.name" not in of_scoring(made, {"object:f": unknown})


def test_a_fingerprint_of_a_store_is_of_every_sample(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db")
    with Store.open(tmp_path / "log.db") as store:
        found = [store.ledger.fingerprint()]
        assert store.ledger.fingerprint() == found[0]
        store.set_rewards([(3, 7.0, {})])
        found.append(store.ledger.fingerprint())
        fill_store(tmp_path / "log.db", groups=1)
        assert len({*found, store.ledger.fingerprint()}) == 3


def test_the_cache_of_a_judge_is_no_input(tmp_path: Path) -> None:
    """The run adds to it: a run whose judge's server died goes on."""
    cache = tmp_path / "judged.db"
    options = {"url": "http://127.0.0.1:1/v1", "model": "m", "cache": str(cache)}
    made = tiny(tmp_path, reward={"name": "judge", "options": options})
    before = of_scoring(made, {})
    cache.write_text("a reply")
    assert of_scoring(made, {}) == before
