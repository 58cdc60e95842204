"""What `--place` asks for, and the processes that come of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agro.errors import Refused
from agro.place.placement import PlacedProcess, Placement, TrainCommand, plan


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("local:2", Placement("local", "", 2)),
        ("local", Placement("local")),
        ("ray://head:6379", Placement("ray", "head:6379")),
        ("ray:local", Placement("ray", "local")),
        ("ray:auto", Placement("ray", "auto")),
    ],
)
def test_the_forms(text: str, placement: Placement) -> None:
    assert Placement.parse(text) == placement
    assert str(placement) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "ray", "ray://head", "k8s", "ssh://host", "slurm:4"),
        *(f"local:{n}" for n in ("", "0", "x", "-1", "²")),
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(Refused, match=r"expected local:N .*ray://HOST:PORT.*\. What to do:.*agro collect"):
        Placement.parse(text)


def command(folder: Path, text: str = "", *overrides: str, resume: bool = False) -> TrainCommand:
    recipe = folder / "recipe.toml"
    recipe.write_text(f'[data]\nprompts = "prompts.jsonl"\n{text}')
    return TrainCommand(recipe, overrides, folder / "run", resume, ("reward.name",))


def planned(made: TrainCommand, placement: str = "local:2") -> list[PlacedProcess]:
    return plan(Placement.parse(placement), made)[0]


def argv(made: list[PlacedProcess], name: str, again: bool = False) -> list[str]:
    [process] = [process for process in made if process.name == name]
    return process.argv("python", again)


def test_the_processes_of_a_run(tmp_path: Path) -> None:
    made = planned(command(tmp_path, "", "train.steps=3"))
    assert [process.name for process in made] == ["trainer", "collector-1", "collector-2"]
    run = str(tmp_path / "run")
    trainer = ["python", "-m", "agro", "train", str(tmp_path / "recipe.toml"), "train.steps=3"]
    trainer += ["source.kind=elsewhere", "--out", run]
    assert argv(made, "trainer") == trainer
    assert argv(made, "trainer", again=True) == [*trainer, "--resume", "--accept", "reward.name"]
    collector = ["python", "-m", "agro", "collect", run, "--name", "collector-2"]
    assert argv(made, "collector-2") == argv(made, "collector-2", again=True) == collector


def test_a_resumed_run(tmp_path: Path) -> None:
    made = planned(command(tmp_path, resume=True))
    assert argv(made, "trainer")[-3:] == ["--resume", "--accept", "reward.name"]
    assert argv(made, "trainer", again=True) == argv(made, "trainer")


def test_what_a_placement_changes_is_said(tmp_path: Path) -> None:
    local2, local = Placement.parse("local:2"), Placement.parse("local")
    [note] = plan(local2, command(tmp_path))[1]
    assert "2 other processes sample" in note
    assert "may be some steps stale; data.max_age=0 lets each step wait" in note
    [note] = plan(local, command(tmp_path, "max_age = 3"))[1]
    assert "another process samples" in note
    assert "3 optimizer steps stale" in note
    made, notes = plan(local2, command(tmp_path, '[source]\nkind = "elsewhere"'))
    assert notes == []
    assert "source.kind=elsewhere" not in argv(made, "trainer")


def test_ranks_and_servers(tmp_path: Path) -> None:
    made = planned(
        command(tmp_path, "[place]\nranks = 2\ncollectors = 3\nservers = [\"serve --port 1 'a b'\"]"), "local"
    )
    names = [process.name for process in made]
    assert names == ["server-1", "trainer", "collector-1", "collector-2", "collector-3"]
    assert argv(made, "server-1") == ["serve", "--port", "1", "a b"]
    torchrun = "python -m torch.distributed.run --standalone --nproc-per-node 2 -m agro train"
    assert argv(made, "trainer")[:9] == torchrun.split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replay = 1.0", "samples nothing"),
        ('[place]\nservers = ["serve \'"]', "No closing quotation"),
        ('[place]\nservers = [" "]', "an empty one"),
    ],
)
def test_runs_that_cannot_be_placed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        planned(command(tmp_path, text))


def test_several_hosts_need_a_server(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="a store that several hosts can share"):
        planned(command(tmp_path), "ray://head:6379")
    made = command(tmp_path, 'store = "postgresql://host/runs"')
    expected = [str(tmp_path / "run"), "--name", "collector-1"]
    assert argv(planned(made, "ray://head:6379"), "collector-1")[-3:] == expected
