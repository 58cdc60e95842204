"""Turns of `agro loop`: what is promoted, what isn't and why, and what a kill leaves."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import forked
import pytest

sys.path += [str(Path(__file__).parents[1] / "train"), str(Path(__file__).parents[1] / "cli")]
from running import done, refused
from test_race import fill, overrides
from tiny_runs import tiny

from agro.api import loop
from agro.api.loop import Loop, LoopRecord, version_of
from agro.api.reporting_trainer import Trainer
from agro.errors import Lost, Refused, Unwritable
from agro.runs.rundata import load_run
from agro.store import Store
from agro.types import Sample


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    return Trainer(tiny(folder, train__steps=3), folder / "run").run()


def settings(folder: Path, model: Path, *without: str, **changes) -> list[str]:
    """Of a run that learns to say 7."""
    learned = {"train__lr": 1e-2, "train__steps": 20, "train__warmup": 0, "train__step_kl": 1.0, **changes}
    asked = overrides(folder, model, 40, **learned)
    return [item for item in asked if not item.startswith(("policy.model", *without))]


def begun(folder: Path, start: Path, *without: str, **changes) -> Loop:
    return Loop(fill(folder / "s.db"), str(start), None, settings(folder, start, *without, **changes), print)


@pytest.fixture(scope="module")
def after_a_turn(tmp_path_factory: pytest.TempPathFactory, start: Path) -> Path:
    """A folder with a store, and a loop whose first turn was better and waits."""
    folder = tmp_path_factory.mktemp("turn")
    turn = begun(folder, start).turn(promote=False)
    assert (turn.outcome, turn.recipe, turn.rewarded) == ("better", "log", 80)
    assert turn.reason.startswith("Better by")
    return folder


def continued(after_a_turn: Path, folder: Path, start: Path) -> Loop:
    shutil.copytree(after_a_turn, folder, dirs_exist_ok=True)
    return Loop(str(folder / "s.db"), str(start), None, settings(folder, start), print)


def served(folder: Path) -> tuple[Path, int]:
    return LoopRecord.read(folder / "s.loop").newest(folder / "s.loop")


@pytest.mark.report
def test_a_better_model_is_promoted_and_rolled_back(tmp_path: Path, start: Path, after_a_turn: Path) -> None:
    found = continued(after_a_turn, tmp_path, start)
    assert served(tmp_path) == (start / "model", 3)  # as --promote wasn't said
    promoted = found.promote_last()
    assert promoted is not None
    assert served(tmp_path) == (tmp_path / "s.loop/1/model", 23)
    assert found.promote_last() is None
    with found._locked(".turn", waits=False), pytest.raises(Refused, match="process is running a turn"):
        found.promote_last()
    assert load_run(tmp_path / "s.loop/1").config.policy.model == str(start / "model")
    second = found.turn(promote=True)
    assert (second.start, second.version >= 23) == (1, True)
    assert (tmp_path / "s.loop/2/report.html").exists()
    assert load_run(tmp_path / "s.loop/2").config.policy.model == str(tmp_path / "s.loop/1/model")
    while len(LoopRecord.read(tmp_path / "s.loop").served) > 2:
        found.roll_back()
    assert f"serving {start / 'model'}, version 3" in found.roll_back()
    assert served(tmp_path) == (start / "model", 3)
    with pytest.raises(Refused, match="expected a promoted model"):
        found.roll_back()


@pytest.mark.parametrize(
    ("without", "changes", "reason"),
    [
        (("reward.name", "data.eval_prompts"), {}, "Not measured"),
        ((), {"train__lr": 1e-9, "train__steps": 4}, "Not shown better"),
    ],
)
def test_what_is_not_shown_is_not_promoted(tmp_path: Path, start: Path, without, changes, reason) -> None:
    found = begun(tmp_path, start, *without, **changes)
    turn = found.turn(promote=True)
    assert (turn.outcome, turn.reason[: len(reason)]) == ("rejected", reason)
    assert found.promote_last() is None
    assert served(tmp_path) == (start / "model", 3)


def test_nothing_is_promoted_over_a_model_that_it_did_not_begin_with(tmp_path, start, after_a_turn) -> None:
    found = continued(after_a_turn, tmp_path, start)
    with found._edited() as record:
        record.served.append(1)
    assert found.promote_last() is None
    assert LoopRecord.read(found.folder).turns[0].reason.startswith("The served model changed during")


def test_data_that_nothing_can_learn_from_are_refused_and_the_next_turn_begins(tmp_path, start) -> None:
    """With another model, where the first one was mistyped: no turn has trained on it."""
    with Store.open(tmp_path / "s.db") as store:
        store.append(Sample(f"{i}>", "7", source="log") for i in range(4))
    given = [tmp_path / "s.db", *settings(tmp_path, start), "--model", start]
    assert "reward" in refused("loop", *given[:-1], "other")
    assert [turn.outcome for turn in LoopRecord.read(tmp_path / "s.loop").turns] == ["refused"]
    assert "expected a promoted model" in refused("loop", tmp_path / "s.db", "--rollback")
    fill(tmp_path / "s.db")
    assert "turn 2: better" in done("loop", *given).stdout
    assert "use that one" in refused("loop", tmp_path / "s.db", "--model", "other")


@pytest.mark.parametrize("error", [Unwritable("the disk is full"), Lost("no PostgreSQL answers")])
def test_what_the_host_lacks_ends_no_turn(tmp_path: Path, start: Path, monkeypatch, error) -> None:
    def fail(self) -> None:
        raise error

    found = begun(tmp_path, start)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "run", fail)
        with pytest.raises(type(error), match=str(error)):
            found.turn(promote=True)
    assert [turn.outcome for turn in LoopRecord.read(found.folder).turns] == ["under way"]
    assert found.turn(promote=True).number == 1


def test_a_killed_turn_goes_on(tmp_path: Path, start: Path) -> None:
    """It ends with the weights that it has without a kill."""
    asked = [*settings(tmp_path, start), "train.checkpoint_every=2"]
    given = {}
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
        store = fill(tmp_path / name / "s.db")
        given[name] = ["loop", store, *asked, "--model", str(start)]
    metrics = tmp_path / "killed/s.loop/1/metrics.jsonl"
    said = tmp_path / "said"
    process = forked.Process([sys.executable, "-m", "agro", *given["killed"]], stdout=said, stderr=said)
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 4) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    [turn] = LoopRecord.read(tmp_path / "killed/s.loop").turns
    assert turn.outcome == "under way"
    ends = [done(*given[name], "--promote").stdout for name in ("killed", "whole")]
    assert ends[0] == ends[1]
    assert "turn 1: promoted" in ends[0]
    files = [tmp_path / name / "s.loop/1/model/model.safetensors" for name in ("killed", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_it_waits_for_new_rewards(tmp_path: Path, start: Path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "POLL_SECONDS", 0.02)
    found = Loop(str(tmp_path / "s.db"), str(start), None, settings(tmp_path, start), print)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (found.wait(80), ended.set()), daemon=True)
    thread.start()
    with Store.open(tmp_path / "s.db") as store:
        store.append(Sample(f"{i}>", "7", reward=None, source="log") for i in range(100))
    fill(tmp_path / "s.db", prompts=19)
    assert not ended.wait(0.3)
    with Store.open(tmp_path / "s.db") as store:
        store.append(Sample("5>", "7", reward=1.0, source="log") for _ in range(4))
    assert ended.wait(20)
    thread.join()


def test_what_is_deleted_or_away_meanwhile_keeps_no_turn_back(tmp_path, start, monkeypatch) -> None:
    counts = iter([100, 60, Lost("no PostgreSQL answers"), 110, 90, 130, 500])

    def count(_: Loop) -> int:
        found = next(counts)
        if isinstance(found, Lost):
            raise found
        return found

    monkeypatch.setattr(loop, "POLL_SECONDS", 0)
    monkeypatch.setattr(loop, "exists", lambda store: True)
    monkeypatch.setattr(Loop, "_rewarded", count)
    Loop(str(tmp_path / "s.db"), str(start), None, [], print).wait(190)
    assert next(counts) == 500


def test_versions_are_those_of_the_run(tmp_path: Path, start: Path) -> None:
    paths = [start, start / "model", *sorted((start / "checkpoints").iterdir())]
    assert {version_of(path) for path in paths[:2]} == {3}
    assert version_of(paths[-1]) == 3
    (tmp_path / "model").mkdir()
    assert version_of(tmp_path / "model") == version_of(Path("org/model")) == -1
