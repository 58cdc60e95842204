"""The loop: what is drawn, trained on, logged, refused; each run takes a second."""

from __future__ import annotations

import fcntl
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_runs import (
    RESPONSE_ROUNDING,
    REWARDS,
    before_step,
    fill_store,
    logp_rounding,
    metrics,
    run_id,
    samples_of,
    tiny,
    weights,
    write_prompts,
)
from tiny_runs import run_tiny as run

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.store import Store
from agro.train.learner import Local
from agro.types import Sample


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run as it is, which no test changes."""
    return run(tmp_path_factory.mktemp("fresh"))


@pytest.mark.report
def test_a_fresh_run_leaves_what_the_contract_names(tmp_path: Path) -> None:
    held = write_prompts(tmp_path / "held.jsonl", range(60, 80))
    folder = run(tmp_path, data__eval_prompts=held, evaluate__every=3)
    files = {"config.json", "metrics.jsonl", "store.db", "checkpoints", "model", "report.html"}
    assert files <= {p.name for p in folder.iterdir()}
    rows = metrics(folder)
    assert [m["step"] for m in rows] == list(range(7))
    evaluated = {m["step"]: m["eval_n"] for m in rows if m["eval_reward"] is not None}
    assert evaluated == {0: 20, 3: 20, 6: 20}
    assert rows[1]["kl_ref"] == pytest.approx(0, abs=RESPONSE_ROUNDING)
    assert rows[6]["kl_ref"] > 1e-3
    assert rows[6]["version"] == 6
    assert max(m["logp_diff_max"] for m in rows[1:]) < logp_rounding(folder)
    assert all(m["staleness_mean"] == 0 for m in rows[1:])
    samples = samples_of(folder)
    assert all(s.reward is not None and s.knows_behavior for s in samples)
    assert [s.version for s in samples] == [step for step in range(6) for _ in range(4 * 3)]
    Policy.load(RunConfig.of({"policy": {"model": str(folder / "model")}}).policy)


def test_config_json_alone_makes_the_same_run(fresh: Path, tmp_path: Path) -> None:
    again = Trainer(RunConfig.load(fresh / "config.json"), tmp_path / "again").run()
    assert weights(fresh) == weights(again)
    other = Trainer(RunConfig.load(fresh / "config.json", ["train.seed=1"]), tmp_path / "other").run()
    assert weights(fresh) != weights(other)


def test_trains_on_a_log_of_texts_and_rewards(tmp_path: Path) -> None:
    log = fill_store(tmp_path / "log.db")
    rows = metrics(run(tmp_path, **log, data__group_size=3, train__steps=4))
    for m in rows:
        assert (m["staleness_mean"], m["replay_share"], m["sampled_tokens"]) == (None, 1, 0)
        assert m["loss"] > 0
    assert [m["kl_ref"] for m in rows[:-1]] == [None] * 3  # evaluate.every = 0: at the end alone
    assert rows[-1]["kl_ref"] == rows[-1]["eval_kl_ref"] > 0
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        uses = Counter(i for (i,) in store.tables.run("SELECT sample FROM draws"))
    of_groups = [sum(uses[g * 4 + i + 1] for i in range(4)) for g in range(8)]
    assert sum(of_groups) == 4 * 4 * 3
    assert max(of_groups) == 6  # two epochs over 8 groups of 3


@pytest.mark.parametrize(
    ("replay", "fresh"), [(0.5, [2, 2, 2, 2]), (0.75, [1, 1, 1, 1]), (0.9, [0, 0, 1, 0])]
)
def test_fresh_and_stored_share_a_step(tmp_path: Path, replay: float, fresh: list[int]) -> None:
    log = fill_store(tmp_path / "log.db") | {"data__replay": replay, "data__roles": ["log"]}
    rows = metrics(run(tmp_path, **log, train__steps=4))
    assert [m["replay_share"] for m in rows] == [1 - f / 4 for f in fresh]


def test_fresh_and_stored_responses_to_a_prompt_are_one_group(tmp_path: Path) -> None:
    """All prompts are sampled in each step, and half of the groups are drawn too: 2 of 4, then of 2."""
    data = {"prompts": write_prompts(tmp_path / "four.jsonl", range(4)), "store": str(tmp_path / "s.db")}
    run(tmp_path, "fill", data=data, train__steps=1)
    data |= {"replay": 0.5, "group_size": 2}
    folder = run(tmp_path, data=data, train__groups=8, train__steps=2)
    for m in metrics(folder):
        assert (m["groups"], m["groups_merged"], m["replay_share"]) == (4, 4, 0.5)
    with Store.open(tmp_path / "s.db", read_only=True) as store:
        drawn = [d for d in store.draws.drawn(run_id(folder)) if d.step == 1]
    assert len(drawn) == 4 * (2 + 3)  # data.group_size stored and sampler.n fresh responses to each


def test_replayed_samples_of_this_run_know_their_age(tmp_path: Path) -> None:
    phases = [{"name": "fresh"}, {"name": "stored", "data": {"replay": 1.0}, "train": {"steps": 2}}]
    rows = metrics(run(tmp_path, phases=phases))
    assert [m["phase"] for m in rows] == ["fresh"] * 6 + ["stored"] * 2
    assert rows[6]["staleness_mean"] > 0
    assert rows[6]["staleness_max"] <= 6


def test_several_updates_a_batch(tmp_path: Path) -> None:
    objective = {"name": "grpo", "ratio": "old"}
    rows = metrics(run(tmp_path, train__updates=3, train__steps=2, objective=objective))
    assert [m["version"] for m in rows] == [3, 6]


def test_an_option_may_follow_a_schedule(tmp_path: Path) -> None:
    """Also a share that ends at 0, from where on its metric isn't reported."""
    fixed = {"name": "agro", "beta": 1.0, "imitation": 1.0}
    constant = run(tmp_path, "constant", objective=fixed, reward__name=f"{REWARDS}:digits")
    schedules = {"beta": {"start": 1.0, "end": 0.0, "steps": 4}}
    schedules["imitation"] = {"start": 1.0, "end": 0.0, "steps": 2}
    falling = run(tmp_path, "falling", objective=fixed | schedules, reward__name=f"{REWARDS}:digits")
    a, b = metrics(constant), metrics(falling)
    assert a[0]["loss"] == b[0]["loss"]
    assert weights(constant) != weights(falling)
    assert [m["objective"].get("imitation_loss") is None for m in b] == [False] * 2 + [True] * 4


def test_failed_rewards_stay_unknown_and_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first error of each kind is shown; before, only their number was."""
    half = {"reward__name": f"{REWARDS}:half_fails", "reward__max_failed": 1.0}
    folder = run(tmp_path, **half, objective={"name": "rloo"})
    shown = capsys.readouterr().err
    assert shown.count("a reward is unknown, the first for this reason: returned nan\n") == 1
    assert shown.count("first for this reason") == 1
    rows = metrics(folder)
    failed = sum(m["rewards_failed"] for m in rows)
    assert 0 < failed == len(samples_of(folder, state="failed")) <= sum(m["dropped"] for m in rows)
    assert {m["reward_mean"] for m in rows} <= {1, None}
    with pytest.raises(Refused, match=r"(?s)12 of 12.*no judge today"):
        run(tmp_path, "stopped", reward__name=f"{REWARDS}:always_fails")


def test_updates_without_a_finite_gradient_are_skipped_and_said(tmp_path: Path, monkeypatch, capsys) -> None:
    """The streams of the first pass with a gradient aren't finite."""
    plain, broken = Policy.streams, []

    def streams(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        if not torch.is_grad_enabled() or broken:
            return out
        broken.append(True)
        return {k: v * math.inf for k, v in out.items()}

    monkeypatch.setattr(Policy, "streams", streams)
    rows = metrics(run(tmp_path))
    assert [(m["skipped"], m["version"]) for m in rows] == [(1, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]
    assert rows[0]["loss"] is None
    assert "update skipped: objective agro: stream logp" in capsys.readouterr().err


def test_rows_that_do_not_fit_are_left_out_and_counted(tmp_path: Path) -> None:
    log = fill_store(tmp_path / "log.db")
    unfit = (("900>", "1" * 40, 1.0), ("900>", "x", 0.0), ("901>", "2", 1.0), ("901>", "y", 0.0))
    with Store.open(tmp_path / "log.db") as store:
        store.append(Sample(*each) for each in unfit)
    [row] = metrics(run(tmp_path, **log, train__groups=10, train__steps=1))
    assert row["dropped_reasons"] == {
        "too long": 1,
        "unknown characters": 2,
        "group too small after others were dropped": 1,
    }
    assert row["groups"] == 8


def test_refusals_come_before_a_model_is_loaded(tmp_path: Path, monkeypatch) -> None:
    """Unscored logs with the way out."""
    monkeypatch.setattr(Policy, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    log = fill_store(tmp_path / "log.db") | {"data__prompts": None}
    with Store.open(tmp_path / "unscored.db") as store:
        store.append([Sample("1>", "2"), Sample("1>", "3")])
    sft, grpo = {"name": "sft"}, {"name": "grpo"}
    phases = [{"name": "sft", "objective": sft}, {"name": "grpo", "objective": grpo}]
    on_policy = {"name": "agro_onpolicy", "beta": 0.1}
    asked = write_prompts(tmp_path / "held.jsonl", range(20))
    unscored, nothing = (str(tmp_path / f"{name}.db") for name in ("unscored", "nothing"))
    lacking = "objective grpo needs behavior_logp: 0 of 32 rows have it"
    for words, changes in (
        (f"(?s){lacking}, 32 don't .*sample 1 .*sample 2 .*sample 3 .*What to do", {"objective": grpo}),
        (lacking, {"phases": phases}),
        (r"agro_onpolicy needs .*staleness 0.* data\.replay = 1", {"objective": on_policy}),
        ("log.db has expert; expected", {"data__roles": ["expert"]}),
        ("log.db has no samples that data.roles", {"data__min_reward": 2.0}),
        ("nothing.db doesn't exist", {"data__store": nothing}),
        ("objective agro needs reward: 0 of 2 rows have it.*agro score", {"data__store": unscored}),
        (
            "20 of 20 held-out prompts are in the training data",
            {"data": {"prompts": asked, "eval_prompts": asked}},
        ),
    ):
        with pytest.raises(Refused, match=words):
            run(tmp_path, "refused", **{**log, **changes})
        assert not (tmp_path / "refused" / "model").exists()


def test_a_run_does_not_write_over_another(fresh: Path) -> None:
    with pytest.raises(Refused, match="there is a run in this folder"):
        run(fresh.parent)
    with pytest.raises(Refused, match="expected the folder of the run"):
        Trainer(tiny(fresh.parent), resume=True)
    with pytest.raises(Refused, match=r"train\.lr was 0\.01, now it is 1\.0$"):
        run(fresh.parent, resume=True, train__lr=1.0)


def test_samples_of_another_run_have_no_age(fresh: Path, tmp_path: Path) -> None:
    """Another run counts its optimizer steps by itself: version 5 there isn't version 5 here."""
    shutil.copy(fresh / "store.db", tmp_path / "log.db")
    log = {"data__store": str(tmp_path / "log.db"), "data__replay": 1.0}
    rows = metrics(run(tmp_path, **log, train__steps=2))
    assert all(m["staleness_mean"] is None for m in rows)


def test_a_run_replays_its_own_samples_as_soon_as_it_has_some(tmp_path: Path) -> None:
    rows = metrics(run(tmp_path, data__replay=0.5))
    assert [m["replay_share"] for m in rows] == [0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert all(0 < m["staleness_max"] <= m["step"] for m in rows[1:])


def test_two_processes_do_not_train_in_one_folder_and_a_refused_start_blocks_none(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no such folder"):
        run(tmp_path, policy={"model": str(tmp_path / "typo")})
    (tmp_path / "run").mkdir(exist_ok=True)
    with (tmp_path / "run" / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="another process is training in this folder"):
            run(tmp_path, train__steps=1)
    run(tmp_path, train__steps=1)


def test_a_run_with_nothing_to_train_on_stops_and_says_why(tmp_path: Path, capsys) -> None:
    with Store.open(tmp_path / "log.db") as store:
        store.append([Sample(f"{g}>", text, float(i)) for g in range(4) for i, text in enumerate("xy")])
    with pytest.raises(Refused, match="step 2: 2 updates in a row were skipped"):
        run(tmp_path, data={"store": str(tmp_path / "log.db"), "replay": 1.0}, train__max_skipped=2)
    assert "dropped 8 (unknown characters)  update skipped" in capsys.readouterr().err


def test_limits_of_a_reward_may_change_on_resuming(tmp_path: Path) -> None:
    run(tmp_path, train__steps=1)
    run(tmp_path, resume=True, train__steps=1, reward__timeout=99.0, reward__max_failed=1.0)
    assert RunConfig.load(tmp_path / "run" / "config.json").reward.timeout == 99


@pytest.mark.parametrize(
    ("name", "beta", "held"),
    [
        *[("rloo", None, False), ("rloo", 0.1, True), ("agro", 0.1, True), ("agro_onpolicy", 0.1, True)],
        *[("kl_pg", 0.1, True), ("reinforce", None, False), ("grpo", None, False)],
    ],
)
def test_an_objective_trains_and_the_reference_is_held_where_it_is_read(
    tmp_path: Path, name: str, beta: float | None, held: bool
) -> None:
    learners: list[Local] = []
    objective = {"name": name} if beta is None else {"name": name, "beta": beta}
    with before_step(lambda feed, valid: learners.append(feed.learner)):
        [row] = metrics(run(tmp_path, objective=objective, train__steps=1))
    assert (learners[0].reference is not None) == (learners[0].reference_key is not None) == held
    assert row["grad_norm"] > 0
    assert math.isfinite(row["loss"])


def test_the_trap_of_on_policy_agro_is_told_before_and_during_a_run(tmp_path: Path, capsys) -> None:
    """Rare rewards and a small β: the best of a group is pushed down where c (R − R̄ of the others) > 2β."""
    rare = tmp_path / "rare.py"
    rare.write_text("def rare(completions, **_):\n    return [float(c[:1] == '7') for c in completions]\n")
    common = {"reward": {"name": f"{rare}:rare"}, "sampler__n": 8, "evaluate__n": 8, "train__steps": 3}
    common["data__eval_prompts"] = write_prompts(tmp_path / "held-out.jsonl", range(100, 140))
    objective = {"name": "agro_onpolicy", "beta": 0.05}
    run(tmp_path, "a", objective=objective, **common)
    said = capsys.readouterr().err
    assert "solved more often than ½ − β = 0.45 of the time" in said
    assert said.count("held-out prompts whose 8 rewards differ") == 1
    assert said.count("of the groups whose rewards differ the best response is pushed down") == 1
    run(tmp_path, "b", objective=objective | {"likelihood_ratio": "adaptive"}, **common)
    said = capsys.readouterr().err
    assert not any(words in said for words in ("½ − β", "μ₃", "pushed down"))
