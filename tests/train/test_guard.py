"""What happens to a step that explodes, where a run ends early, and what callbacks see."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import metrics, tiny, weights, write_prompts

from agro.config import Guard
from agro.errors import Refused
from agro.train.callbacks import Callback
from agro.train.guard import explosion, remember
from agro.train.trainer import Trainer


def test_the_rule() -> None:
    rule = Guard(loss=3.0, kl=10.0)
    before = (1.0, 1.0, 2.0, 1.0, 1.0)
    assert explosion(rule, -3.0, None, before) is None
    assert "3 times its median of 1" in str(explosion(rule, -3.1, None, before))
    assert explosion(rule, 100.0, None, before[:4]) is None  # too few to compare with
    assert explosion(rule, 1.0, None, (0.0, 0.0, 0.0, 0.0, 2.0)) is None  # nothing to learn from, until now
    assert "10.1 nats" in str(explosion(rule, 1.0, 10.1, before))
    assert explosion(Guard(), 1e9, 1e9, before) is None
    assert remember(Guard(loss=3.0, window=5), before, -4.0) == (1.0, 2.0, 1.0, 1.0, 4.0)


class Spoil(Callback):
    """Weights far off before step `at`, as after a bad update."""

    def __init__(self, at: int) -> None:
        self.at = at

    def before_step(self, trainer, samples) -> None:
        done = metrics(trainer.out)[-1]["step"] if (trainer.out / "metrics.jsonl").exists() else 0
        if done + 1 == self.at:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in trainer.policy.weights().values():
                    p.add_(3 * torch.randn(p.shape, generator=generator))


def run(folder: Path, *callbacks: Callback, resume: bool = False, name: str = "run", **changes) -> Path:
    config = tiny(folder, train__steps=10, train__lr=1e-4, **changes)
    return Trainer(config, folder / name, callbacks=callbacks, resume=resume).run()


def test_skip_leaves_the_update_out(tmp_path: Path) -> None:
    rows = metrics(run(tmp_path, Spoil(8), guard={"loss": 100.0, "action": "skip"}))
    assert [m["skipped"] for m in rows][7] == 1
    assert rows[7]["version"] == rows[6]["version"]
    assert rows[7]["lr"] is None


def test_stop_ends_before_the_weights_move(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"step 8: \|loss\| is .*more than guard\.loss = 100 times"):
        run(tmp_path, Spoil(8), guard={"loss": 100.0})
    assert metrics(tmp_path / "run")[-1]["step"] == 7
    assert (tmp_path / "run/checkpoints/step-00000007").is_dir()


@pytest.mark.parametrize("reference", [{}, {"reference": "ema", "reference_decay": 0.9}])
def test_rollback_takes_the_weights_of_the_last_checkpoint_at_half_the_rate(
    tmp_path: Path, reference: dict
) -> None:
    changes = {f"policy__{k}": v for k, v in reference.items()}
    out = run(tmp_path, Spoil(8), guard={"loss": 100.0, "action": "rollback"}, **changes)
    rows = metrics(out)
    assert [m["rolled_back"] for m in rows] == [0] * 7 + [1, 0, 0]
    assert rows[8]["lr"] == rows[6]["lr"] / 2
    assert [m["version"] for m in rows] == list(range(1, 11))  # other weights, another version
    assert abs(rows[8]["loss"]) < abs(rows[7]["loss"]) / 100
    before = weights(out)
    again = run(tmp_path, Spoil(8), name="other", guard={"loss": 100.0, "action": "rollback"}, **changes)
    assert weights(again) == before


def test_rollback_of_the_first_steps_goes_to_the_start(tmp_path: Path) -> None:
    out = run(tmp_path, Spoil(3), guard={"kl": 0.5, "action": "rollback"}, train__checkpoint_every=100)
    assert [m["rolled_back"] for m in metrics(out)][:5] == [0, 0, 0, 1, 0]  # step 4's samples show it
    assert metrics(out)[4]["kl_ref"] == pytest.approx(0.0, abs=1e-5)


class Note(Callback):
    """The order of what happens."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[str] = []
        self.stop_at = stop_at

    def before_sample(self, trainer, prompts) -> None:
        self.events.append(f"prompts {len(prompts)}")

    def after_sample(self, trainer, samples) -> None:
        assert all(s.reward is None and s.id is not None for s in samples)
        self.events.append(f"sampled {len(samples)}")

    def after_score(self, trainer, samples) -> None:
        assert all(s.reward is not None for s in samples)
        self.events.append("scored")

    def before_step(self, trainer, samples) -> None:
        self.events.append(f"train on {len(samples)}")

    def after_step(self, trainer, found) -> None:
        self.events.append(f"step {found['step']}")
        if found["step"] == self.stop_at:
            trainer.stop("seen enough")

    def before_evaluate(self, trainer) -> None:
        self.events.append("evaluate")

    def after_evaluate(self, trainer, found) -> None:
        self.events.append(f"evaluated {found['eval_n']}")


def held(tmp_path: Path) -> str:
    return write_prompts(tmp_path / "held.jsonl", range(60, 66))


def test_callbacks_are_told_in_order(tmp_path: Path) -> None:
    note = Note(stop_at=2)
    out = run(tmp_path, note, data__eval_prompts=held(tmp_path), evaluate__every=2)
    a_step = ["prompts 4", "sampled 12", "scored", "train on 12"]
    measured = ["evaluate", "evaluated 6"]
    assert note.events == [*measured, "step 0", *a_step, "step 1", *a_step, *measured, "step 2"]
    assert (out / "model").is_dir()
    assert (
        metrics(run(tmp_path, resume=True, data__eval_prompts=held(tmp_path), evaluate__every=2))[-1]["step"]
        == 2
    )


def test_patience_and_target_end_a_run_and_the_best_is_kept(tmp_path: Path, monkeypatch) -> None:
    """Held-out rewards as given: the best is the second, two later ones don't reach it."""
    from agro.train import heldout

    given = iter([0.1, 0.5, 0.4, 0.5, 0.9])
    real = heldout.describe_heldout
    monkeypatch.setattr(heldout, "describe_heldout", lambda *a: real(*a) | {"eval_reward": next(given)})
    common = {"data__eval_prompts": held(tmp_path), "evaluate__every": 1}
    out = run(tmp_path, evaluate__patience=2, evaluate__keep_best=True, **common)
    assert metrics(out)[-1]["step"] == 3
    assert json.loads((out / "best/best.json").read_text())["step"] == 1
    assert weights(out) != (out / "best/model.safetensors").read_bytes()
    given = iter([0.1, 0.3, 0.6, 0.9])
    assert metrics(run(tmp_path, name="target", evaluate__target=0.5, **common))[-1]["step"] == 2


def test_a_stage_that_hangs_is_named(tmp_path: Path, capsys) -> None:
    class Slow(Callback):
        def before_score(self, trainer, samples) -> None:
            time.sleep(0.5)

    config = tiny(tmp_path, train__steps=1, guard={"stage_seconds": 0.1})
    Trainer(config, tmp_path / "run", callbacks=[Slow()]).run()
    assert "sampling 12/12 has made no progress for 0 s; it is in train/" in capsys.readouterr().err
