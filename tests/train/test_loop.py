"""The loop: what is drawn, trained on, logged, refused; each run takes a second."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import (
    RESPONSE_ROUNDING,
    REWARDS,
    before_step,
    fill_store,
    logp_rounding,
    metrics,
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
    folder = run(
        tmp_path, data__eval_prompts=write_prompts(tmp_path / "held.jsonl", range(60, 80)), evaluate__every=3
    )
    assert {"config.json", "metrics.jsonl", "store.db", "checkpoints", "model", "report.html"} <= {
        p.name for p in folder.iterdir()
    }
    rows = metrics(folder)
    assert [m["step"] for m in rows] == list(range(7))
    assert [m["step"] for m in rows if m["eval_reward"] is not None] == [0, 3, 6]
    assert all(m["eval_n"] == 20 for m in rows if m["eval_reward"] is not None)
    assert rows[1]["kl_ref"] == pytest.approx(0, abs=RESPONSE_ROUNDING)
    assert rows[6]["kl_ref"] > 1e-3
    assert rows[6]["version"] == 6
    assert max(m["logp_diff_max"] for m in rows[1:]) < logp_rounding(folder)
    assert all(m["staleness_mean"] == 0 for m in rows[1:])
    with Store.open(folder / "store.db", read_only=True) as store:
        samples = list(store.samples())
    assert len(samples) == 6 * 4 * 3
    assert all(s.reward is not None and s.knows_behavior for s in samples)
    assert [s.version for s in samples] == [step for step in range(6) for _ in range(12)]
    Policy.load(RunConfig.of({"policy": {"model": str(folder / "model")}}).policy)


def test_config_json_alone_makes_the_same_run(fresh: Path, tmp_path: Path) -> None:
    again = Trainer(RunConfig.load(fresh / "config.json"), tmp_path / "again").run()
    assert weights(fresh) == weights(again)
    other = Trainer(RunConfig.load(fresh / "config.json", ["train.seed=1"]), tmp_path / "other").run()
    assert weights(fresh) != weights(other)


def test_the_micro_batch_changes_nothing_but_rounding(fresh: Path, tmp_path: Path) -> None:
    """The passes of the other run have all 12 responses."""
    one = run(tmp_path, train__micro_batch=1)
    a, b = (load_file(f / "model" / "model.safetensors") for f in (one, fresh))
    assert all(torch.allclose(a[k], b[k], atol=2e-4) for k in a)


def test_trains_on_a_log_of_texts_and_rewards(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db")
    folder = run(
        tmp_path, data={"store": str(tmp_path / "log.db"), "replay": 1.0, "group_size": 3}, train__steps=4
    )
    rows = metrics(folder)
    assert all(
        m["staleness_mean"] is None and m["replay_share"] == 1 and m["sampled_tokens"] == 0 for m in rows
    )
    assert all(m["loss"] > 0 for m in rows)
    assert [m["kl_ref"] for m in rows[:-1]] == [None] * 3  # evaluate.every = 0: at the end alone
    assert rows[-1]["kl_ref"] == rows[-1]["eval_kl_ref"] > 0
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        uses = Counter(i for (i,) in store.tables.run("SELECT sample FROM draws"))
    assert sum(uses.values()) == 4 * 4 * 3
    assert (
        max(sum(uses[g * 4 + i + 1] for i in range(4)) for g in range(8)) == 6
    )  # two epochs over 8 groups of 3


@pytest.mark.parametrize(
    ("replay", "fresh"), [(0.5, [2, 2, 2, 2]), (0.75, [1, 1, 1, 1]), (0.9, [0, 0, 1, 0])]
)
def test_fresh_and_stored_share_a_step(tmp_path: Path, replay: float, fresh: list[int]) -> None:
    fill_store(tmp_path / "log.db")
    folder = run(
        tmp_path,
        data__store=str(tmp_path / "log.db"),
        data__replay=replay,
        data__roles=["log"],
        train__steps=4,
    )
    assert [m["replay_share"] for m in metrics(folder)] == [1 - f / 4 for f in fresh]


def test_fresh_and_stored_responses_to_a_prompt_are_one_group(tmp_path: Path) -> None:
    """All prompts are sampled in each step, and half of the groups are drawn too: 2 of 4, then of 2."""
    prompts = write_prompts(tmp_path / "four.jsonl", range(4))
    fill = tiny(tmp_path, data__prompts=prompts, data__store=str(tmp_path / "s.db"), train__steps=1)
    Trainer(fill, tmp_path / "fill").run()
    data = {"prompts": prompts, "store": str(tmp_path / "s.db"), "replay": 0.5, "group_size": 2}
    rows = metrics(run(tmp_path, data=data, train__groups=8, train__steps=2))
    for m in rows:
        assert (m["groups"], m["groups_merged"], m["replay_share"]) == (4, 4, 0.5)
    with Store.open(tmp_path / "s.db", read_only=True) as store:
        run_id = json.loads((tmp_path / "run" / "config.json").read_text())["run"]
        drawn = [d for d in store.draws.drawn(run_id) if d.step == 1]
    assert len(drawn) == 4 * (2 + 3)  # data.group_size stored and sampler.n fresh responses to each


def test_replayed_samples_of_this_run_know_their_age(tmp_path: Path) -> None:
    phases = [{"name": "fresh"}, {"name": "stored", "data": {"replay": 1.0}, "train": {"steps": 2}}]
    rows = metrics(run(tmp_path, phases=phases))
    assert [m["phase"] for m in rows] == ["fresh"] * 6 + ["stored"] * 2
    assert rows[6]["staleness_mean"] > 0
    assert rows[6]["staleness_max"] <= 6


def test_several_updates_a_batch(tmp_path: Path) -> None:
    rows = metrics(run(tmp_path, train__updates=3, objective={"name": "grpo", "ratio": "old"}))
    assert [m["version"] for m in rows] == [3, 6, 9, 12, 15, 18]


@pytest.mark.parametrize("objective", ["agro_onpolicy", "rloo", "reinforce", "kl_pg", "grpo"])
def test_every_objective_trains_on_fresh_samples(tmp_path: Path, objective: str) -> None:
    options = {"beta": 0.1} if objective in ("agro_onpolicy", "kl_pg") else {}
    rows = metrics(run(tmp_path, objective={"name": objective, **options}, train__steps=2))
    assert all(m["grad_norm"] > 0 and math.isfinite(m["loss"]) for m in rows)


def test_an_option_may_follow_a_schedule(tmp_path: Path) -> None:
    """Also a share that ends at 0, from where on its metric isn't reported."""
    fixed = {"name": "agro", "beta": 1.0, "imitation": 1.0, "imitation_reward": 0.0}
    constant = run(tmp_path, "constant", objective=fixed)
    schedules = {"beta": {"start": 1.0, "end": 0.0, "steps": 4}}
    schedules["imitation"] = {"start": 1.0, "end": 0.0, "steps": 2}
    falling = run(tmp_path, "falling", objective=fixed | schedules)
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
    assert failed > 0
    assert sum(m["dropped"] for m in rows) >= failed
    assert all(m["reward_mean"] == 1 for m in rows if m["reward_mean"] is not None)
    with Store.open(folder / "store.db", read_only=True) as store:
        assert store.counts().failed == failed
    with pytest.raises(Refused, match=r"(?s)12 of 12.*no judge today"):
        run(tmp_path, "stopped", reward__name=f"{REWARDS}:always_fails")


def break_gradients(monkeypatch, passes: int) -> None:
    """Streams that aren't finite, in the first so many passes with a gradient."""
    plain, calls = Policy.streams, iter(range(10_000))

    def broken(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        breaks = torch.is_grad_enabled() and next(calls) < passes
        return {k: v * math.inf for k, v in out.items()} if breaks else out

    monkeypatch.setattr(Policy, "streams", broken)


def test_updates_without_a_finite_gradient_are_skipped_and_said(tmp_path: Path, monkeypatch, capsys) -> None:
    break_gradients(monkeypatch, passes=1)
    rows = metrics(run(tmp_path))
    assert [m["skipped"] for m in rows] == [1, 0, 0, 0, 0, 0]
    assert [m["version"] for m in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[0]["loss"] is None
    assert "update skipped: objective agro: stream logp" in capsys.readouterr().err


def test_too_many_skipped_updates_stop_the_run(tmp_path: Path, monkeypatch) -> None:
    break_gradients(monkeypatch, passes=2)
    with pytest.raises(Refused, match="step 2: 2 updates in a row were skipped"):
        run(tmp_path, train__max_skipped=2)


def test_rows_that_do_not_fit_are_left_out_and_counted(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db")
    unfit = (("900>", "1" * 40, 1.0), ("900>", "x", 0.0), ("901>", "2", 1.0), ("901>", "y", 0.0))
    with Store.open(tmp_path / "log.db") as store:
        store.append(Sample(*each) for each in unfit)
    data = {"store": str(tmp_path / "log.db"), "replay": 1.0}
    rows = metrics(run(tmp_path, data=data, train__groups=10, train__steps=1))
    assert rows[0]["dropped_reasons"] == {
        "too long": 1,
        "unknown characters": 2,
        "group too small after others were dropped": 1,
    }
    assert rows[0]["groups"] == 8


def test_refusals_come_before_a_model_is_loaded(tmp_path: Path, monkeypatch) -> None:
    """Unscored logs with the way out."""
    monkeypatch.setattr(Policy, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    fill_store(tmp_path / "log.db")
    with Store.open(tmp_path / "unscored.db") as store:
        store.append([Sample("1>", "2"), Sample("1>", "3")])
    log = {"store": str(tmp_path / "log.db"), "replay": 1.0}
    sft, grpo = {"name": "sft"}, {"name": "grpo"}
    phases = [{"name": "sft", "objective": sft}, {"name": "grpo", "objective": grpo}]
    on_policy = {"name": "agro_onpolicy", "beta": 0.1}
    asked = write_prompts(tmp_path / "held.jsonl", range(20))
    both = {"prompts": asked, "eval_prompts": asked}
    lacking = "objective grpo needs behavior_logp: 0 of 32 rows have it"
    for words, changes in (
        (f"(?s){lacking}, 32 don't .*sample 1 .*sample 2 .*sample 3 .*What to do", {"objective": grpo}),
        (lacking, {"phases": phases}),
        (r"agro_onpolicy needs .*staleness 0.* data\.replay = 1", {"objective": on_policy}),
        ("log.db has expert; expected", {"data__roles": ["expert"]}),
        ("log.db has no samples that data.roles", {"data__min_reward": 2.0}),
        ("nothing.db doesn't exist", {"data__store": str(tmp_path / "nothing.db")}),
        (
            "objective agro needs reward: 0 of 2 rows have it.*agro score",
            {"data__store": str(tmp_path / "unscored.db")},
        ),
        ("20 of 20 held-out prompts are in the training data", {"data": both}),
    ):
        with pytest.raises(Refused, match=words):
            run(tmp_path, "refused", **{"data": log, **changes})
        assert not (tmp_path / "refused" / "model").exists()


def test_a_run_does_not_write_over_another(fresh: Path) -> None:
    with pytest.raises(Refused, match="there is a run in this folder"):
        run(fresh.parent)
    with pytest.raises(Refused, match=r"train\.lr was 0\.01, now it is 1\.0$"):
        run(fresh.parent, resume=True, train__lr=1.0)


def test_samples_of_another_run_have_no_age(tmp_path: Path) -> None:
    """Another run counts its optimizer steps by itself: version 5 there isn't version 5 here."""
    shared = {"store": str(tmp_path / "shared.db")}
    run(tmp_path, "first", data__store=shared["store"])
    rows = metrics(run(tmp_path, "second", data=shared | {"replay": 1.0}, train__steps=2))
    assert all(m["staleness_mean"] is None for m in rows)


def test_age_counts_from_the_oldest_action() -> None:
    s = Sample("p", "ab", tokens=[1, 2, 3], action=[False, True, True], version=[-1, 4, 3])
    assert s.oldest_version == 3


def test_a_run_replays_its_own_samples_as_soon_as_it_has_some(tmp_path: Path) -> None:
    rows = metrics(run(tmp_path, data__replay=0.5))
    assert [m["replay_share"] for m in rows] == [0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert all(0 < m["staleness_max"] <= m["step"] for m in rows[1:])


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "run").mkdir()
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


def test_a_refused_start_does_not_block_the_corrected_one(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no such folder"):
        run(tmp_path, policy={"model": str(tmp_path / "typo")})
    run(tmp_path, train__steps=1)


def test_limits_of_a_reward_may_change_on_resuming(tmp_path: Path) -> None:
    run(tmp_path, train__steps=1)
    run(tmp_path, resume=True, train__steps=1, reward__timeout=99.0, reward__max_failed=1.0)
    assert RunConfig.load(tmp_path / "run" / "config.json").reward.timeout == 99
    with pytest.raises(Refused, match="expected the folder of the run"):
        Trainer(tiny(tmp_path), resume=True)


def test_the_reference_is_held_only_where_it_is_read(tmp_path: Path) -> None:
    for objective, held in (
        ({"name": "rloo"}, False),
        ({"name": "rloo", "beta": 0.1}, True),
        ({"name": "agro", "beta": 0.1}, True),
    ):
        learners: list[Local] = []
        config = tiny(tmp_path, objective=objective, train__steps=1)
        with before_step(lambda feed, valid: learners.append(feed.learner)):  # noqa: B023  called in the loop
            Trainer(config, tmp_path / str(objective)).run()
        assert (learners[0].reference is not None) == held, objective
        assert (learners[0].reference_key is not None) == held, objective


def test_the_trap_of_on_policy_agro_is_told_before_and_during_a_run(tmp_path: Path, capsys) -> None:
    """Rare rewards and a small β: the best of a group is pushed down where c (R − R̄ of the others) > 2β."""
    rare = tmp_path / "rare.py"
    rare.write_text(
        "def rare(completions, **columns):\n    return [float(c.startswith('7')) for c in completions]\n"
    )
    common = {"reward": {"name": f"{rare}:rare"}, "sampler__n": 8, "evaluate__n": 8, "train__steps": 3}
    common["data__eval_prompts"] = write_prompts(tmp_path / "held-out.jsonl", range(100, 140))
    Trainer(tiny(tmp_path, objective={"name": "agro_onpolicy", "beta": 0.05}, **common), tmp_path / "a").run()
    said = capsys.readouterr().err
    assert "solves more often than ½ − β = 0.45 of the time" in said
    assert said.count("held-out prompts whose 8 rewards differ") == 1
    assert said.count("of the groups whose rewards differ the best response is pushed down") == 1
    kept = {"name": "agro_onpolicy", "beta": 0.05, "likelihood_ratio": "adaptive"}
    Trainer(tiny(tmp_path, objective=kept, **common), tmp_path / "b").run()
    said = capsys.readouterr().err
    assert "½ − β" not in said
    assert "μ₃" not in said
    assert "pushed down" not in said
