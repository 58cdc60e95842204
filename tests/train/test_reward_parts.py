"""Rewards of several parts in a run: what is trained on, what is measured, and where the two part."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import metrics, tiny, write_prompts

from agro.api.reporting_trainer import Trainer
from agro.pages.run.page import page
from agro.runs.rundata import load_run
from agro.store import Store

PARTS = """
def sevens(completions):
    return [text.count("7") / 3 for text in completions]
def sober(completions):
    \"\"\"Best at one 7.\"\"\"
    return [1 - abs(text.count("7") - 1) / 2 for text in completions]
"""


def run(folder: Path, **changes) -> Path:
    (folder / "parts.py").write_text(PARTS)
    sevens = {"name": f"{folder / 'parts.py'}:sevens", "label": "sevens"}
    sober = {"name": f"{folder / 'parts.py'}:sober", "label": "sober"} | changes.pop("sober")
    reward = {"functions": [sevens, sober], **changes.pop("reward", {})}
    held = write_prompts(folder / "held.jsonl", range(60, 80))
    config = tiny(
        folder,
        reward=reward,
        data__eval_prompts=held,
        sampler__n=4,
        train__lr=2e-2,
        evaluate__every=5,
        **changes,
    )
    return Trainer(config, folder / "run").run()


def test_a_reward_that_is_optimized_too_far_is_said(tmp_path: Path) -> None:
    """All 7s earn 1 and are sober 0; a sober response has one of them. The policy passes the peak."""
    folder = run(tmp_path, sober={"weight": 0}, train__steps=25, objective__beta=1e-3)
    rows = metrics(folder)
    held_out = [row["eval_reward_parts"] for row in rows if row["eval_reward_parts"]]
    assert held_out[-1]["sevens"] > held_out[0]["sevens"] + 0.5
    assert held_out[-1]["sober"] < max(parts["sober"] for parts in held_out) - 0.3
    assert rows[-1]["reward_shares"].keys() == {"sevens"}
    known = [row["reward_shares"]["sevens"] for row in rows[1:]]
    assert all(share in (None, pytest.approx(1.0)) for share in known)
    shown = page(load_run(folder))
    assert "over-optimized" in shown
    assert "sober fell by" in shown
    for title in ("Parts of the held-out reward", "Parts of the reward"):
        assert title in shown


def test_whitened_parts_are_trained_on_and_metrics_stay_as_they_were(tmp_path: Path) -> None:
    """The sum is within ±2 before whitening, and rewards of a step aren't centered in the metrics."""
    whitened = {"whiten": "group", "clip": [-1, 1]}
    folder = run(tmp_path, sober={"weight": 1.0}, reward=whitened, train__steps=2)
    for row in metrics(folder)[1:]:
        parts = row["reward_parts"]
        assert row["reward_mean"] == pytest.approx(parts["sevens"] + parts["sober"])
        assert sum(row["reward_shares"].values()) == pytest.approx(1)
    assert "What the reward" in page(load_run(folder))


def test_a_function_rewards_each_token(tmp_path: Path) -> None:
    """1 for each 7, by its id, and nothing where the number of values is wrong."""
    (tmp_path / "dense.py").write_text(
        "def dense(completion_ids, completions):\n"
        "    rows = zip(completion_ids, completions)\n"
        "    some = [[float('7' in text)] * len(ids) for ids, text in rows]\n"
        "    return [row[1:] if text.startswith('0') else row for row, text in zip(some, completions)]\n"
    )
    reward = {"name": f"{tmp_path / 'dense.py'}:dense", "per_token": True}
    config = tiny(tmp_path, reward=reward, objective__name="prefix_consistency", train__steps=2)
    folder = Trainer(config, tmp_path / "run").run()
    with Store.open(folder / "store.db", read_only=True) as store:
        samples = list(store.samples())
    for sample in samples:
        tokens = int(sample.action.sum())
        if sample.response.startswith("0"):
            assert sample.meta["reward_error"] == f"returned {tokens - 1} numbers for {tokens} tokens"
        else:
            assert sample.reward == tokens * ("7" in sample.response)
            assert sample.meta["token_rewards"] == [float("7" in sample.response)] * tokens
    assert metrics(folder)[-1]["grad_norm"] > 0


def test_a_function_rewards_each_step(tmp_path: Path) -> None:
    """Steps end at a 7. What comes with a step's last token is trained on, and the sum is the reward."""
    (tmp_path / "stepwise.py").write_text(
        "def stepwise(completions):\n"
        "    return [[float(len(part)) for part in text.split('7') if part.strip()]"
        " for text in completions]\n"
    )
    reward = {"name": f"{tmp_path / 'stepwise.py'}:stepwise", "per_step": "7"}
    config = tiny(tmp_path, reward=reward, objective__name="prefix_consistency", train__steps=2)
    folder = Trainer(config, tmp_path / "run").run()
    with Store.open(folder / "store.db", read_only=True) as store:
        samples = list(store.samples())
    assert any(len(sample.meta.get("step_rewards", ())) > 1 for sample in samples)
    for sample in samples:
        assert sample.reward == len(sample.response.replace("7", ""))
    assert metrics(folder)[-1]["grad_norm"] > 0
