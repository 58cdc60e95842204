"""What is wrong with a run: page, model card and terminal say the same, in place of a good number."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from running import done
from tiny_runs import log_alone, metrics, tiny, write_toml

from agro.api.reporting_trainer import Trainer, present
from agro.pages.run.card import card
from agro.pages.run.verdict import Verdict
from agro.runs.problems import Problem, problems
from agro.runs.rundata import load_run
from agro.types import Sample

LOG = {"replay": 1.0, "store": "log.db", "hold_out": 0.2}
FUNCTIONS = [{"name": "proxy.py:f", "label": "proxy"}, {"name": "gold.py:f", "label": "gold", "weight": 0}]
AUC = {"eval_auc": 0.955, "eval_auc_se": 0.01}
# A step on a log that goes well: the best responses rise a little, and the KL is below what pays.
WELL = {"loss": 0.1, "log_ratio_best": 0.2, "log_ratio_worst": -2.0, "ratio_mean": 0.9, "kl_of_best": 0.8}


def write_run(folder: Path, rows: list[dict[str, Any]], **sections: Any) -> Path:
    """A run of `agro` on a log; `rows`: those of steps 0, 1, …"""
    folder.mkdir(exist_ok=True)
    write_toml(folder / "config.json", tiny(folder, data=LOG, train__steps=len(rows) - 1, **sections))
    common = {"phase": "train", "eval_auc": None}
    lines = [json.dumps({"step": step, **common, **row}) + "\n" for step, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def problems_of(folder: Path, rows: list[dict[str, Any]], **sections: Any) -> list[Problem]:
    return problems(load_run(write_run(folder, rows, **sections)))


def on_a_log(folder: Path, last: dict[str, Any], every: dict[str, Any]) -> list[Problem]:
    """The problems of 40 steps; `last` and `every`: what the last step, and each, has besides."""
    return problems_of(folder, [AUC, *[WELL | every] * 39, WELL | every | AUC | last])


def titles(found: list[Problem]) -> dict[str, bool]:
    return {problem.title: problem.serious for problem in found}


@pytest.mark.parametrize(
    ("last", "every", "expected"),
    [
        ({"eval_kl_ref": 0.9, "eval_kl_ref_se": 0.1}, {}, {}),
        ({"eval_kl_ref": 1.1, "eval_kl_ref_se": 0.1}, {}, {"KL beyond what pays": False}),
        ({"eval_kl_ref": 20.0, "eval_kl_ref_se": 3.0}, {}, {"KL beyond what pays": True}),
        ({}, {"ratio_mean": 99.0}, {}),
        ({}, {"ratio_mean": 101.0}, {"π/π_ref of stored responses": True}),
        ({"eval_ratio_mean": 1e16}, {}, {"π/π_ref of stored responses": True}),
        ({}, {"log_ratio_best": -0.1}, {"the best stored responses fall": False}),
        ({}, {"log_ratio_best": -2.4}, {"the best stored responses fall": True}),
        ({}, {"log_ratio_best": 0.009, "log_ratio_worst": -0.009}, {"nothing moves": True}),
        ({}, {"log_ratio_best": 0.009, "log_ratio_worst": -0.011}, {}),
        # Said as such, not as a learning rate.
        (
            {},
            {"log_ratio_best": 0.0, "log_ratio_worst": 0.0, "no_signal": "a gradient of 0"},
            {"steps from which nothing could be learned": False},
        ),
    ],
)
def test_what_is_wrong_at_the_end_of_a_log(tmp_path, last, every, expected) -> None:
    """0.8 nats pay: 0.9 ± 0.1 isn't above, 1.1 ± 0.1 is, and above 2.4 it is the headline."""
    assert titles(on_a_log(tmp_path, last, every)) == expected


def test_a_distance_that_the_held_out_reward_pays_for_is_no_problem(tmp_path: Path) -> None:
    """By the comparison with the start, prompt by prompt: one whose interval holds 0 is none of the two."""
    far = {"eval_kl_ref": 20.0, "eval_kl_ref_se": 3.0, "eval_ratio_mean": 1e16}
    risen, fallen, unclear = (
        AUC | {"eval_reward": r, "eval_gain": r - 0.3, "eval_gain_low": low, "eval_gain_high": high}
        for r, low, high in ((0.5, 0.1, 0.3), (0.009, -0.4, -0.2), (0.25, -0.15, 0.05))
    )
    rows = [AUC | {"eval_reward": 0.3}, *[WELL] * 39]
    assert problems_of(tmp_path, [*rows, WELL | far | risen]) == []
    found = problems_of(tmp_path, [*rows, WELL | far | fallen])
    assert set(titles(found).values()) == {True}
    assert found[0].text == "held-out reward fell: from 0.300 to 0.009"
    assert len(found) == 3
    assert problems_of(tmp_path, [*rows, WELL | far | unclear])[0].title == "KL beyond what pays"


def test_own_samples_and_imitation_may_be_far_from_the_reference(tmp_path: Path) -> None:
    far = {"eval_kl_ref": 20.0, "eval_kl_ref_se": 3.0, "ratio_mean": 1e16}
    assert on_a_log(tmp_path, {}, far | {"staleness_mean": 2.0}) == []
    assert problems_of(tmp_path, [AUC, *[WELL | far] * 40], objective={"name": "sft"}) == []


@pytest.mark.report
def test_page_card_and_terminal_say_the_problem_in_place_of_the_number(tmp_path: Path) -> None:
    """A held-out AUC of 0.955 at 20 nats, where 0.8 pay, isn't a success."""
    far = WELL | AUC | {"eval_kl_ref": 20.0, "eval_kl_ref_se": 3.0, "dropped": 3}
    folder = write_run(tmp_path, [AUC | {"eval_auc": 0.5}, *[WELL] * 39, far])
    (folder / "model").mkdir()
    run, lines = load_run(folder), []
    [distance, dropped] = problems(run)
    expected = "KL beyond what pays: 20 nats per response, and the best stored responses have 0.8"
    assert (distance.text, dropped.text) == (expected, "responses dropped: 3")
    assert present(folder, run.config.train, lines.append) is False
    assert lines == [
        f"problem: {distance.text}. {distance.detail}",
        "problem: responses dropped: 3",
        Verdict.of(run).sentence,
        "measured nevertheless: best eval_auc 0.955 at step 40, the last measurement",
    ]
    text = card(run, folder / "model").text
    assert f"for 40 of 40 steps. **{distance.text}.**\n" in text
    assert f"- {distance.text}\n- {dropped.text}\n" in text
    page = (folder / "report.html").read_text()
    lead = page.split('class="lead">')[1].split("</p>")[0]
    assert f'<b class="bad">{distance.text}.</b>' in lead
    assert "0.955" not in lead
    assert f"Problems: {distance.text}, {dropped.text}." in page


@pytest.mark.report
def test_a_ranking_alone_stands_after_the_verdict_as_a_detail(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [AUC | {"eval_auc": 0.5}, *[WELL] * 39, WELL | AUC])
    (folder / "model").mkdir()
    lines: list[str] = []
    assert present(folder, load_run(folder).config.train, lines.append) is True
    verdict = Verdict.of(load_run(folder)).sentence
    assert verdict.startswith("Not measured whether the model got better")
    assert lines == [verdict, "best eval_auc 0.955 at step 40, the last measurement"]
    lead = (folder / "report.html").read_text().split('class="lead">')[1].split("</p>")[0]
    assert "0.955" not in verdict
    assert lead.index(f"<b>{verdict}</b>") < lead.index("The best held-out AUC was 0.955 at step 40")
    text = card(load_run(folder), folder / "model").text
    assert text.index(f"**{verdict}**") < text.index("## Training")
    assert "Problems" not in text


def single_responses() -> list[Sample]:
    """One response a prompt, half of them good by chance."""
    noise = random.Random(0)
    return [
        Sample(f"{i:03d}>", str(noise.randrange(10)) * 2, reward=float(noise.random() < 0.5))
        for i in range(64)
    ]


def test_kto_that_leaves_a_log_of_single_responses_does_not_end_with_done(tmp_path: Path) -> None:
    """Half the thumbs are up, so −log ½ = 0.69 nats pay; the learning rate is far too large."""
    data = log_alone(tmp_path, single_responses())
    train = {"steps": 40, "groups": 16, "lr": 3e-2}
    config = tiny(tmp_path, objective={"name": "kto", "beta": 0.1}, data=data, train=train)
    file, out = write_toml(tmp_path / "run.json", config), tmp_path / "run"
    result = done("train", file, "--out", out)
    assert "problem: KL beyond what pays" in result.stderr
    assert "ended with the problems above: " in result.stderr
    assert "done: " not in result.stderr
    last = metrics(out)[-1]
    assert last["kl_of_best"] == pytest.approx(0.69, abs=0.5)
    assert last["eval_kl_ref"] > 3 * 0.69


def test_a_run_whose_updates_were_all_skipped_did_not_end_well(tmp_path: Path) -> None:
    skipped = {"loss": None, "lr": None, "skipped": 1}
    [problem] = problems_of(tmp_path, [AUC, skipped])
    assert (problem.text, problem.serious) == ("updates skipped: 1", True)
    [problem] = problems_of(tmp_path, [AUC, skipped, {"lr": 0.1, "skipped": 0}])
    assert not problem.serious


def test_a_run_that_does_not_move_says_so_while_it_trains(tmp_path: Path, capsys) -> None:
    single = single_responses()
    data = log_alone(tmp_path, [*single, *(Sample(s.prompt, "0", reward=0.5) for s in single)])
    config = tiny(tmp_path, data=data, train__steps=45, train__lr=1e-6, train__warmup=10)
    trainer = Trainer(config, tmp_path / "run")
    trainer.run()
    said = capsys.readouterr().err
    assert "step 40: after step 40 log π/π_ref is still below 0.01 nats" in said
    assert "What to do: a larger train.lr (now 1e-06)" in said
    assert "problem: nothing moves" in said
    assert not trainer.ended_well


@pytest.mark.parametrize(
    ("proxy", "gold", "expected"),
    [
        ([0.1, 0.5, 0.9], [0.1, 0.4, 0.2], True),  # it rises, then falls by 14 standard errors
        ([0.1, 0.5, 0.9], [0.1, 0.4, 0.37], False),  # by 2.1
        ([0.1, 0.9, 0.9], [0.1, 0.4, 0.2], False),  # the reward hasn't risen since
        ([0.1, 0.5, 0.9], [0.1, 0.4, 0.6], False),
    ],
)
def test_a_part_that_is_only_measured_falls_while_the_reward_rises(tmp_path, proxy, gold, expected):
    """Gao et al. (2210.10760): the proxy rises on, the gold reward falls from its peak; every tenth step."""
    rows: list[dict[str, Any]] = []
    for reward, part in zip(proxy, gold, strict=True):
        parts = {"eval_reward_parts": {"proxy": reward, "gold": part}}
        parts["eval_reward_parts_se"] = {"proxy": 0.01, "gold": 0.01}
        rows += [{"eval_reward": reward, "eval_reward_se": 0.01, **parts}, *[{}] * 9]
    found = titles(problems_of(tmp_path, rows, reward={"functions": FUNCTIONS}))
    assert ("over-optimized" in found) is expected
    assert found.get("over-optimized", True)


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        pytest.param({"functions": FUNCTIONS}, "gold", id="two functions"),
        pytest.param({"name": "exact"}, "exact", id="a source gives another"),
    ],
)
def test_two_rewards_part_in_training_without_held_out_prompts(tmp_path, reward, name):
    """Of 20 steps each: gold .5 ± .01, then .2 ± .01; too few steps say nothing."""
    rows = [
        {"reward_mean": proxy + noise, "reward_parts": {"proxy": proxy, name: gold + noise}}
        for proxy, gold in ((0.2, 0.5), (0.8, 0.2))
        for noise in (0.05, -0.05) * 10
    ]
    found = problems_of(tmp_path, [{}, *rows], reward=reward)
    [problem] = [p for p in found if p.title == "over-optimized"]
    assert problem.value == f"{name} fell by 0.3 since step 20, while the reward rose by 0.6"
    assert "over-optimized" not in titles(problems_of(tmp_path / "short", [{}, *rows[:39]], reward=reward))
