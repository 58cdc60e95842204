"""Which runs are one line, and the numbers that stand for it."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_run import configure
from running import done, refused, report_of
from writing import write_rows

from agro.config import RunConfig
from agro.errors import Refused
from agro.pages.run.compare import (
    Interval,
    compare,
    differences_words,
    figure,
    flat,
    notes,
    page,
    to_json,
)
from agro.pages.run.figures import COLORS


def write(
    folder: Path,
    seed: int,
    heldout: Sequence[float | None] = (),
    training: Sequence[float] = (),
    **changes: Any,
) -> Path:
    """A run of as many steps as values are given, step 0 first in `heldout` and 1 in `training`."""
    folder.mkdir(parents=True)
    steps = max(1, len(heldout) - 1, len(training))
    (folder / "config.json").write_text("{}")
    values = {"policy__model": "m", "objective__name": "agro", "objective__beta": 0.1}
    values |= {"train__seed": seed, "train__steps": steps}
    configure(folder, **(values | changes))
    config = RunConfig.load(folder / "config.json").model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(config | {"versions": {"agro": "0"}, "run": folder.name}))
    rows = []
    for step in range(0 if heldout else 1, steps + 1):
        row: dict[str, Any] = {"step": step, "phase": "train"}
        if step < len(heldout) and heldout[step] is not None:
            row |= {"eval_reward": heldout[step], "eval_reward_se": 0.02}
        if 1 <= step <= len(training):
            row["reward_mean"] = training[step - 1]
        rows.append(row)
    write_rows(folder / "metrics.jsonl", rows)
    return folder


def page_of(runs: Sequence[Path]) -> str:
    found = compare(runs)
    return page(found, to_json(found))


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two configurations of three and two seeds."""
    rloo = {"name": "rloo"}
    return [
        write(tmp_path / "a0", 0, [0.1, None, 0.5]),
        write(tmp_path / "r1", 1, [0.1, None, 0.3], objective=rloo),
        write(tmp_path / "a2", 2, [0.1, None, 0.9]),
        write(tmp_path / "a1", 1, [0.1, None, 0.7]),
        write(tmp_path / "r0", 0, [0.1, None, 0.2], objective=rloo),
    ]


def test_an_interval_over_seeds_by_hand() -> None:
    """Mean 0.7, standard deviation 0.2, t of 2 degrees of freedom 4.303: 0.7 ± 4.303 · 0.2 / √3."""
    found, half = Interval.of(np.array([0.5, 0.9, 0.7])), 4.303 * 0.2 / math.sqrt(3)
    assert (found.mean, found.n) == (pytest.approx(0.7), 3)
    assert (found.low, found.high) == pytest.approx((0.7 - half, 0.7 + half), abs=1e-4)
    one = Interval.of(np.array([0.5]))
    assert (one.mean, math.isnan(one.low), math.isnan(one.high)) == (0.5, True, True)


def test_runs_that_differ_in_their_seed_alone_are_one_line(runs: list[Path]) -> None:
    found = compare(runs)
    assert [(line.label, line.seeds) for line in found.lines] == [
        ("agro, beta 0.1", [0, 1, 2]),
        ("rloo", [0, 1]),
    ]
    assert found.lines[0].steps.tolist() == [0, 2]
    assert found.lines[0].values.tolist() == [[0.1, 0.5], [0.1, 0.7], [0.1, 0.9]]
    assert found.lines[0].finals.tolist() == [0.5, 0.7, 0.9]
    assert differences_words(found.differences) == [
        "objective.name: agro | rloo",
        "objective.beta: 0.1 | not set",
    ]


def test_a_difference_is_of_equal_seeds(runs: list[Path]) -> None:
    """Seeds 0 and 1: 0.2 − 0.5 and 0.3 − 0.7, mean −0.35, half-width 12.706 · (0.1/√2) / √2."""
    first, second = (line["difference_to_first"] for line in to_json(compare(runs))["lines"])
    assert (second["mean"], second["seeds"]) == (pytest.approx(-0.35), 2)
    assert second["high"] - second["mean"] == pytest.approx(12.706 * 0.05, abs=1e-4)
    assert first is None


def test_what_decides_no_result_makes_no_line(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    free = {"train__show_every": 3, "track": {"project": "x"}, "reward__timeout": 3.0}
    runs = [
        write(a, 0, [0.1], data__prompts=str(a / "p.jsonl")),
        write(b, 1, [0.1], data__prompts=str(b / "p.jsonl"), **free),
    ]
    assert len(compare(runs).lines) == 1
    write(c, 1, [0.1], data__prompts=str(tmp_path / "other.jsonl"))
    assert list(compare([*runs, c]).differences) == ["data.prompts"]


def test_phases_are_compared_by_name() -> None:
    assert flat({"phases": [{"name": "sft", "train": {"steps": 3}}], "train": {"steps": 5}}) == {
        "phases.sft.train.steps": 3,
        "train.steps": 5,
    }


def test_one_seed_has_no_interval_and_that_is_said(runs: list[Path]) -> None:
    found = compare([runs[0], runs[1]])
    document = to_json(found)
    assert document["lines"][0]["final"] == {"mean": 0.5, "low": None, "high": None, "seeds": 1}
    assert document["lines"][0]["runs"][0]["se"] == 0.02
    assert document["lines"][1]["difference_to_first"] is None
    [said] = [text for text in notes(found) if "no interval over seeds" in text]
    assert "the run's standard error" in said


def test_without_heldout_measurements_training_reward_is_compared_and_that_is_said(tmp_path: Path) -> None:
    """Final is the mean of the last tenth of the steps, here 2 of 20."""
    a, b, rewards = tmp_path / "a", tmp_path / "b", [0.0] * 18 + [0.4, 0.6]
    write(a, 0, training=rewards)
    write(b, 0, [0.1] * 21, training=rewards, sampler__n=8)
    found = compare([a, b])
    assert found.measure == "reward_mean"
    assert [line.finals.tolist() for line in found.lines] == [[0.5], [0.5]]
    [said] = [text for text in notes(found) if "Training reward" in text]
    assert str(a) in said
    assert str(b) not in said


def test_a_run_that_has_not_ended_is_named_and_cuts_its_line(tmp_path: Path) -> None:
    measured = {"a": [0.1, 0.2, 0.3, 0.4], "b": [0.1, 0.2]}
    runs = [write(tmp_path / n, seed, measured[n]) for seed, n in enumerate("ab")]
    configure(runs[1], train__steps=3)
    found = compare(runs)
    assert found.lines[0].finals.tolist() == [0.2, 0.2]
    assert f"{runs[1]} has reached step 1 of 3." in notes(found)


def test_one_run_does_not_stand_for_two_seeds(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 0, [0.1]), write(tmp_path / "b", 0, [0.1])
    with pytest.raises(Refused, match="the same configuration and the same seed"):
        compare([a, b])
    with pytest.raises(Refused, match="expected different runs"):
        compare([a, tmp_path / "b" / ".." / "a"])
    with pytest.raises(Refused, match=r"nothing.config\.json"):
        compare([a, tmp_path / "nothing"])


def test_two_reward_functions_of_one_name_are_two_lines(tmp_path: Path) -> None:
    """Of the same path, whose files differ: what is drawn as one curve has to have one reward."""
    runs = [write(tmp_path / name, seed, [0.1, 0.4]) for seed, name in enumerate("abc")]
    for run, digest in zip(runs, ("1" * 64, "1" * 64, "2" * 64), strict=True):
        configure(run, inputs={"reward.name": digest})
    found = compare(runs)
    assert [line.seeds for line in found.lines] == [[0, 1], [2]]
    assert found.differences == {"code.reward.name": ["11111111", "22222222"]}
    assert "11111111" in " ".join(differences_words(found.differences))


def test_lines_of_one_configuration_that_were_measured_at_no_common_step(tmp_path: Path) -> None:
    runs = [write(tmp_path / "a", 0, [0.1, None, None]), write(tmp_path / "b", 1, [None, 0.1, None])]
    with pytest.raises(Refused, match="expected steps at which all of them have eval_reward"):
        compare(runs)


def test_the_figure_draws_means_seeds_and_bands(runs: list[Path]) -> None:
    axes = figure(compare(runs)).axes[0]
    drawn = [(line.get_color(), line.get_ydata().tolist()) for line in axes.lines]
    assert (COLORS[0], pytest.approx([0.1, 0.7])) in drawn
    assert (COLORS[1], pytest.approx([0.1, 0.25])) in drawn
    assert (COLORS[0], [0.1, 0.9]) in drawn
    [band] = axes.collections  # two seeds have none: it would fill the figure
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.max() == pytest.approx(0.7 + 4.303 * 0.2 / math.sqrt(3), abs=1e-4)
    assert axes.get_ylim() == (0.0, pytest.approx(0.9 + 0.25 * 0.8))  # bands don't flatten the lines


def test_another_metric(tmp_path: Path) -> None:
    """Of training the mean of the last tenth of the steps, here the last one."""
    runs = [write(tmp_path / name, 0, [0.1, 0.2], training=[0.5, 0.7]) for name in "ab"]
    found = compare(runs[:1], "reward_mean")
    assert (found.measure, found.lines[0].finals.tolist()) == ("reward_mean", [0.7])
    assert compare(runs[:1]).measure == "eval_reward"
    assert to_json(found)["measure"] == "reward_mean"
    with pytest.raises(Refused, match=r"did you mean eval_reward or eval_reward_se\?$"):
        compare(runs[:1], "eval_rewards")


def test_a_label_stands_at_the_height_of_its_end(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, [0.1, 0.2, 0.3])
    write(tmp_path / "b", 0, [0.1, 0.4], objective__name="rloo")
    texts = figure(compare([tmp_path / "a", tmp_path / "b"])).axes[0].texts
    [shorter] = [text for text in texts if text.get_text().startswith("rloo")]
    [longer] = [text for text in texts if text.get_text().startswith("agro")]
    assert shorter.xyann[1] > longer.xyann[1]
    assert (longer.get_color(), shorter.get_color()) == COLORS[:2]


def test_the_page_names_what_differs_in_columns(runs: list[Path]) -> None:
    text = re.sub(r"<[^>]+>", " ", page_of(runs).replace("<wbr>", ""))
    found = " ".join(text[text.index("Configuration differences") :].split())
    columns = "setting agro, beta 0.1 rloo"
    assert f"{columns} objective.name ● agro ● rloo objective.beta ● 0.1 ● not set Numbers" in found


def test_the_page_asks_for_nothing_and_escapes_names(tmp_path: Path) -> None:
    write(tmp_path / "<b>a", 0, [0.1, 0.2], sampler__stop=["<script>"])
    write(tmp_path / "c", 0, [0.1, 0.2])
    text = page_of([tmp_path / "<b>a", tmp_path / "c"])
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<b>a" not in text
    assert not re.search(r'(?:src|href)="(?!#)', text)
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'" in text


def test_the_command(runs: list[Path], tmp_path: Path) -> None:
    arguments = ["compare", *runs, "--out", tmp_path / "out"]
    document = report_of(*arguments)
    assert document["measure"] == "eval_reward"
    assert document["lines"][0]["final"]["mean"] == pytest.approx(0.7)
    assert document["differences"]["objective.name"] == ["agro", "rloo"]
    endings = [Path(f).suffix for f in document["files"]]
    assert endings == [".png", ".svg", ".pdf", ".csv", ".html"]
    table = (tmp_path / "out" / "compare.csv").read_text().splitlines()
    assert table[0] == "line,run,seed,step,eval_reward"
    assert table[2] == f'"agro, beta 0.1",{runs[0]},0,2,0.5'
    assert len(table) == 1 + 5 * 2
    assert (tmp_path / "out" / "compare.pdf").read_bytes().startswith(b"%PDF")
    ET.parse(tmp_path / "out" / "compare.svg")
    before = (tmp_path / "out" / "compare.svg").read_bytes()
    shown = done(*arguments, COLUMNS="140").stdout
    assert "0.700  [0.203, 1.197]" in shown
    assert "-0.350  (-0.300 and -0.400) (2 seeds)" in shown
    assert "objective.name: agro | rloo" in shown
    assert (tmp_path / "out" / "compare.svg").read_bytes() == before
    refused("compare", tmp_path)
    assert "expected a folder to write into" in refused("compare", runs[0], "--out", runs[0] / "config.json")
