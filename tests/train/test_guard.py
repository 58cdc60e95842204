"""What happens to a step that explodes, where a run ends early, and what monitors may do."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_runs import RESPONSE_ROUNDING, before_step, done, metrics, tiny, weights, write_prompts

from agro.api.reporting_trainer import Trainer
from agro.config import GuardConfig
from agro.errors import Refused
from agro.train.feed import Feed, Valid
from agro.train.learner import Local
from agro.train.monitors import Action, Monitor, View
from agro.train.monitors.guard import explosion, remember
from agro.types import Sample


def test_the_rule() -> None:
    rule = GuardConfig(loss=3.0, kl=10.0)
    before = (1.0, 1.0, 2.0, 1.0, 1.0)
    assert explosion(rule, -3.0, None, before) == ""
    assert "3 times its median of 1" in explosion(rule, -3.1, None, before)
    assert explosion(rule, 100.0, None, before[:4]) == ""  # too few to compare with
    assert explosion(rule, 1.0, None, (0.0, 0.0, 0.0, 0.0, 2.0)) == ""  # nothing to learn from, until now
    assert "10.1 nats" in explosion(rule, 1.0, 10.1, before)
    assert explosion(GuardConfig(), 1e9, 1e9, before) == ""
    assert remember(GuardConfig(loss=3.0, window=5), before, -4.0) == (1.0, 2.0, 1.0, 1.0, 4.0)


def run(folder: Path, *monitors: Monitor, resume: bool = False, name: str = "run", **changes) -> Path:
    config = tiny(folder, train__steps=10, train__lr=1e-4, **changes)
    return Trainer(config, folder / name, monitors=monitors, resume=resume).run()


def run_spoiled(folder: Path, at: int, name: str = "run", **changes) -> Path:
    """With weights far off before the gradient of step `at`, as after a bad update."""

    def spoil(feed: Feed, valid: Valid) -> None:
        if done(folder / name) + 1 == at:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in feed.learner.policy.weights().values():
                    p.add_(3 * torch.randn(p.shape, generator=generator))

    changes["guard"] = {"logp_diff": 0, **changes["guard"]}  # the sampler had other weights
    with before_step(spoil):
        return run(folder, name=name, **changes)


def test_skip_leaves_the_update_out(tmp_path: Path) -> None:
    rows = metrics(run_spoiled(tmp_path, 8, guard={"loss": 100.0, "action": "skip"}))
    assert [m["skipped"] for m in rows][7] == 1
    assert rows[7]["version"] == rows[6]["version"]
    assert rows[7]["lr"] is None


def test_stop_ends_before_the_weights_move(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"step 8: \|loss\| is .*guard\.loss = 100 times"):
        run_spoiled(tmp_path, 8, guard={"loss": 100.0})
    assert metrics(tmp_path / "run")[-1]["step"] == 7
    assert (tmp_path / "run/checkpoints/step-00000007").is_dir()


@pytest.mark.parametrize("reference", [{}, {"reference": "ema", "reference_decay": 0.9}])
def test_rollback_takes_the_weights_of_the_last_checkpoint_at_half_the_rate(
    tmp_path: Path, reference: dict
) -> None:
    changes = {f"policy__{k}": v for k, v in reference.items()}
    out = run_spoiled(tmp_path, 8, guard={"loss": 100.0, "action": "rollback"}, **changes)
    rows = metrics(out)
    assert [m["rolled_back"] for m in rows] == [0] * 7 + [1, 0, 0]
    assert rows[8]["lr"] == rows[6]["lr"] / 2
    assert [m["version"] for m in rows] == list(range(1, 11))  # other weights, another version
    assert abs(rows[8]["loss"]) < abs(rows[7]["loss"]) / 100
    before = weights(out)
    again = run_spoiled(tmp_path, 8, name="other", guard={"loss": 100.0, "action": "rollback"}, **changes)
    assert weights(again) == before


def test_rollback_of_the_first_steps_goes_to_the_start(tmp_path: Path) -> None:
    out = run_spoiled(tmp_path, 3, guard={"kl": 0.5, "action": "rollback"}, train__checkpoint_every=100)
    assert [m["rolled_back"] for m in metrics(out)][:5] == [0, 0, 0, 1, 0]  # step 4's samples show it
    assert metrics(out)[4]["kl_ref"] == pytest.approx(0.0, abs=RESPONSE_ROUNDING)


def held(tmp_path: Path) -> str:
    return write_prompts(tmp_path / "held.jsonl", range(60, 66))


class Note(Monitor):
    """What a monitor is shown, in order."""

    name = "note"

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[str] = []
        self.restored: list[str] = []
        self.stop_at = stop_at

    def receive(self, samples: Sequence[Sample]) -> None:
        assert all(s.reward is not None and s.id is not None for s in samples)
        self.events.append(f"train on {len(samples)}")

    def judge(self, view: View) -> Action:
        assert view.metrics["loss"] is not None
        return Action()

    def after(self, view: View) -> None:
        if view.metrics["eval_n"] is not None:
            self.events.append(f"evaluated {view.metrics['eval_n']}")
        self.events.append(f"step {view.step}")
        view.metrics["seen"] = len(self.events)
        if view.step == self.stop_at:
            view.stop = "seen enough"

    def state(self) -> list[str]:
        return self.events

    def restore(self, state: list[str]) -> None:
        self.restored = state


def test_a_monitor_sees_each_step_adds_to_it_and_may_end_the_run(tmp_path: Path) -> None:
    note = Note(stop_at=2)
    changes = {"data__eval_prompts": held(tmp_path), "evaluate__every": 2}
    out = run(tmp_path, note, **changes)
    events = ["evaluated 6", "step 0", "train on 12", "step 1", "train on 12", "evaluated 6", "step 2"]
    assert note.events == events
    assert [m["seen"] for m in metrics(out)] == [2, 4, 7]  # what it added is logged
    assert (out / "model").is_dir()
    again = Note()
    assert metrics(run(tmp_path, again, resume=True, **changes))[-1]["step"] == 2
    assert again.events == []
    longer = tiny(tmp_path, train__steps=11, train__lr=1e-4, **changes)  # other steps: it may go on
    Trainer(longer, out, monitors=[again], resume=True).run()
    assert again.restored == events
    assert again.events[0] == "train on 12"
    assert metrics(out)[-1]["step"] == 11


class Veto(Monitor):
    """Asks for `action` at step 3."""

    def __init__(self, action: Action) -> None:
        self.action = action

    def judge(self, view: View) -> Action:
        return self.action if view.step == 3 else Action()


def test_a_monitor_may_skip_an_update_or_stop_before_the_weights_move(tmp_path: Path, capsys) -> None:
    rows = metrics(run(tmp_path, Veto(Action("skip", "a whim")), name="skipped"))
    assert [m["skipped"] for m in rows] == [0, 0, 1] + [0] * 7
    assert [m["version"] for m in rows] == [1, 2, 2, *range(3, 10)]
    assert "update skipped: a whim" in capsys.readouterr().err
    with pytest.raises(Refused, match="step 3: a whim"):
        run(tmp_path, Veto(Action("stop", "a whim")), name="stopped")
    assert metrics(tmp_path / "stopped")[-1]["step"] == 2
    assert (tmp_path / "stopped/checkpoints/step-00000002").is_dir()


def test_a_monitor_may_roll_back_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    back = Veto(Action("roll back", "a whim"))
    rows = metrics(run(tmp_path, back, name="back"))
    assert [m["rolled_back"] for m in rows] == [0, 0, 1] + [0] * 7
    assert [m["version"] for m in rows] == list(range(1, 11))
    assert rows[3]["lr"] == rows[1]["lr"] / 2
    with pytest.raises(Refused, match=r"step 3: a whim, .*guard\.action"):
        run(tmp_path, back, name="none", train__checkpoint_every=100)


def test_log_probs_of_the_reference_belong_to_the_update(tmp_path: Path, monkeypatch, capsys) -> None:
    plain = Local.logp

    def slow(self, batch, of="policy"):
        time.sleep(0.5)
        return plain(self, batch, of)

    monkeypatch.setattr(Local, "logp", slow)
    run(tmp_path, guard={"stage_seconds": 0.1})
    assert re.search("updating .*no progress .*it is in train/feed.py", capsys.readouterr().err)
