"""Code, files and stores that a run names: a change of one is refused by its name when the run is resumed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from tiers import some
from tiny_runs import InterruptAfter, fill_store, metrics, tiny, write_toml

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Interrupted, Refused
from agro.store import Store
from agro.train.recovery import of_scoring

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

class Once:
    name, stop = "once", ("5",)
    def reset(self, prompt):
        return []
    def step(self, state, text):
        return Turn(None, 1.0, True)
""",
    "rubric.txt": "short is good\n",
}


def written(folder: Path) -> Path:
    for name, text in SOURCES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def config(folder: Path) -> RunConfig:
    """A run whose reward, objective and environment are files, which import and open others."""
    written(folder)
    fill_store(folder / "held.db")
    return tiny(
        folder,
        reward={"name": f"{folder / 'score.py'}:score", "options": {"rubric": str(folder / "rubric.txt")}},
        objective={"name": f"{folder / 'own.py'}:mine", "beta": 0.1},
        environment={"name": f"{folder / 'place.py'}:Once"},
        data__eval_store=str(folder / "held.db"),
    )


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\n# another\n")


CHANGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "the reward": ("reward.name", lambda folder: edit(folder / "score.py")),
    "what the reward imports": ("reward.name", lambda folder: edit(folder / "helper.py")),
    "what that imports later": ("reward.name", lambda folder: edit(folder / "deep/inner.py")),
    "a file of the reward": ("reward.options.rubric", lambda folder: edit(folder / "rubric.txt")),
    "a missing file": ("reward.options.rubric", lambda folder: (folder / "rubric.txt").unlink()),
    "the objective": ("objective.name", lambda folder: edit(folder / "own.py")),
    "the environment": ("environment.name", lambda folder: edit(folder / "place.py")),
    "held-out samples": ("data.eval_store", lambda folder: fill_store(folder / "held.db", groups=1)),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(Interrupted):
        Trainer(config(folder), folder / "run", monitors=[InterruptAfter(2)]).run()
    return folder


@pytest.mark.parametrize("what", some(CHANGES, every=2))
def test_a_change_is_refused_by_name_or_accepted(interrupted: Path, what: str, capsys) -> None:
    key, change = CHANGES[what]
    made = RunConfig.load(interrupted / "run" / "config.json")
    before = (interrupted / "run" / "config.json").read_bytes()
    change(interrupted)
    with pytest.raises(Refused, match=rf"what {key} names has changed .* --resume --accept {key}$"):
        Trainer(made, interrupted / "run", resume=True).run()
    assert (interrupted / "run" / "config.json").read_bytes() == before
    shutil.copytree(interrupted / "run", interrupted / "copy")
    Trainer(made, interrupted / "copy", resume=True, accept=[key]).run()
    assert f"note: what {key} names has changed since the run began" in capsys.readouterr().err
    assert metrics(interrupted / "copy")[-1]["step"] == 6
    Trainer(made, interrupted / "copy", resume=True).run()  # what was accepted is not asked again
    shutil.rmtree(interrupted / "copy")
    written(interrupted)
    (interrupted / "held.db").unlink()
    fill_store(interrupted / "held.db")


def test_what_is_accepted_has_to_be_an_input(interrupted: Path) -> None:
    made = RunConfig.load(interrupted / "run" / "config.json")
    with pytest.raises(Refused, match=r"--accept reward: expected an input of the run: .*reward\.name"):
        Trainer(made, interrupted / "run", resume=True, accept=["reward"]).run()
    with pytest.raises(Refused, match="--accept belongs to --resume"):
        Trainer(made, interrupted / "run", accept=["reward.name"])


def test_an_input_without_a_fingerprint_of_the_beginning_is_named(interrupted: Path, capsys) -> None:
    """Of a run folder of an agro that recorded fewer."""
    shutil.copytree(interrupted / "run", interrupted / "older")
    file = interrupted / "older" / "config.json"
    file.write_text(file.read_text().replace('"objective.name": "', '"objective.before": "'))
    made = RunConfig.load(file)
    with pytest.raises(Refused, match=r"what objective\.before names has changed"):
        Trainer(made, interrupted / "older", resume=True).run()
    Trainer(made, interrupted / "older", resume=True, accept=["objective.before"]).run()
    assert "no fingerprint of what objective.name names was recorded" in capsys.readouterr().err


def test_the_reward_of_a_resumed_command(tmp_path: Path) -> None:
    """As on a command line: rewards rise with the length, then someone turns their sign."""
    written(tmp_path)
    made = tiny(tmp_path, reward={"name": "score:score", "options": {"rubric": "rubric.txt"}}, train__lr=1e-6)
    file = write_toml(tmp_path / "made.json", made)
    command = [sys.executable, "-m", "agro", "train", str(file), "--out", str(tmp_path / "run")]
    first = forked.run([*command, "train.steps=2"], cwd=tmp_path, timeout=120)
    assert first.returncode == 0, first.stderr
    (tmp_path / "deep/inner.py").write_text("SIGN = -1.0\n")
    resumed = forked.run([*command, "train.steps=4", "--resume"], cwd=tmp_path, timeout=120)
    assert resumed.returncode == 2
    assert "what reward.name names has changed" in resumed.stderr
    accepted = forked.run(
        [*command, "train.steps=4", "--resume", "--accept", "reward.name"], cwd=tmp_path, timeout=120
    )
    assert accepted.returncode == 0, accepted.stderr
    assert [m["reward_mean"] > 0 for m in metrics(tmp_path / "run")] == [True, True, False, False]


@pytest.mark.parametrize("gone", ["deleted", "another"])
def test_a_store_without_the_run_is_refused(tmp_path: Path, gone: str) -> None:
    """It would begin again at the first step, with the metrics of before dropped."""
    made = tiny(tmp_path, data__store=str(tmp_path / "log.db"))
    with pytest.raises(Interrupted):
        Trainer(made, tmp_path / "run", monitors=[InterruptAfter(2)]).run()
    for beside in ("", "-wal", "-shm"):
        (tmp_path / f"log.db{beside}").unlink(missing_ok=True)
    if gone == "another":
        fill_store(tmp_path / "log.db")
    with pytest.raises(Refused, match=r"log\.db: expected the store that the run in .* began with"):
        Trainer(made, tmp_path / "run", resume=True).run()
    assert metrics(tmp_path / "run")[-1]["step"] == 2


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
    seen = set()
    fill_store(tmp_path / "log.db")
    with Store.open(tmp_path / "log.db") as store:
        seen.add(store.ledger.fingerprint())
        seen.add(store.ledger.fingerprint())
        assert len(seen) == 1
        store.set_rewards([(3, 7.0, {})])
        seen.add(store.ledger.fingerprint())
    fill_store(tmp_path / "log.db", groups=1)
    with Store.open(tmp_path / "log.db") as store:
        seen.add(store.ledger.fingerprint())
    assert len(seen) == 3


def test_the_cache_of_a_judge_is_no_input(tmp_path: Path) -> None:
    """The run adds to it: a run whose judge's server died goes on."""
    cache = tmp_path / "judged.db"
    options = {"url": "http://127.0.0.1:1/v1", "model": "m", "cache": str(cache)}
    config = tiny(tmp_path, reward={"name": "judge", "options": options})
    before = of_scoring(config, {})
    cache.write_text("a reply")
    assert of_scoring(config, {}) == before
