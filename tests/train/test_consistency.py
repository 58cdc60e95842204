"""What is measured on a log: ½ Var(R), rankings and log-ratios of held-out and of trained groups, and the KL
from unscored responses to prompts of the store.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    DIGITS,
    RESPONSE_ROUNDING,
    fill_store,
    is_mean,
    metrics,
    run_id,
    run_tiny,
    tiny,
    total_logp,
    weights,
    write_prompts,
)

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rollout import Activity
from agro.rollout.prompts import load_prompts
from agro.rollout.rollout import embedded, load_rollout
from agro.store import Store, is_held_out
from agro.train.check import samples_kl
from agro.train.learner import Local
from agro.train.measure import exponential, ranking, stored_metrics
from agro.train.monitors.heldout import HeldOutLog, first_prompts
from agro.train.phases import Phase, derive
from agro.types import Batch, Prompt, Sample, prompt_hash

BETA = 0.3


def held_out(path: Path, prompts: range = range(200, 205)) -> str:
    """Groups of 2, 3, 2, … responses; one prompt has a character that the tiny vocabulary lacks."""
    with Store.open(path) as store:
        store.append(
            Sample(f"{p}>", DIGITS[i : i + 2 + p % 3], reward=float((i + p) % 2))
            for p in prompts
            for i in range(2 + p % 2)
        )
        store.append(Sample("x>", "12", reward=float(i)) for i in range(2))
    return str(path)


def log_run(tmp_path: Path, **changes) -> RunConfig:
    tmp_path.mkdir(exist_ok=True)
    fill_store(tmp_path / "log.db")
    data = {"store": str(tmp_path / "log.db"), "replay": 1.0, "eval_store": held_out(tmp_path / "held.db")}
    return tiny(tmp_path, data=data, **{"objective__beta": BETA, "evaluate__every": 3, **changes})


Trained = Callable[[str], tuple[RunConfig, Path]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A function: average of the objective -> a run that is measured every 3 steps, and its folder."""

    @cache
    def run(average: str) -> tuple[RunConfig, Path]:
        folder = tmp_path_factory.mktemp(average)
        config = log_run(folder, objective__average=average)
        return config, Trainer(config, folder / "run").run()

    return run


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """The weights before the first step of any of these runs."""
    return Policy.load(tiny(tmp_path_factory.mktemp("start")).policy, seed=derive(0, "weights"))


def of_run(run: Path) -> Policy:
    return Policy.load(RunConfig.of({"policy": {"model": str(run / "model")}}).policy)


Groups = list[tuple[np.ndarray, np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def groups(trained: Trained, start: Policy) -> Callable[[str], Groups]:
    """A function: average of the objective -> of each held-out group rewards, lengths, and log-ratios ρ of
    the trained model, from the models' own logits."""

    @cache
    def of(average: str) -> Groups:
        config, folder = trained(average)
        now, found = of_run(folder), []
        with Store.open(config.data.eval_store, read_only=True) as store:
            for p in range(200, 205):
                group = list(store.samples(prompt_id=prompt_hash(f"{p}>")))
                rho = [total_logp(now, s) - total_logp(start, s) for s in group]
                tokens = [now.encode(s).action.sum() for s in group]
                found.append((np.array([s.reward for s in group]), np.array(tokens), np.array(rho)))
        return found

    return of


@pytest.mark.parametrize("average", ["sum", "token"])
def test_is_half_the_variance_of_the_regularized_reward(trained: Trained, groups, average: str) -> None:
    rows = [m for m in metrics(trained(average)[1]) if m["eval_consistency"] is not None]
    assert [m["step"] for m in rows] == [0, 3, 6]
    assert all((m["eval_groups"], m["eval_dropped"]) == (5, 2) for m in rows)
    before, after = [], []
    for r, tokens, rho in groups(average):
        before.append(np.var(r, ddof=1) / 2)
        after.append(np.var(r - BETA * (rho if average == "sum" else rho / tokens), ddof=1) / 2)
    fall = np.array(before) - np.array(after)
    assert rows[0]["eval_consistency"] == pytest.approx(np.mean(before), rel=1e-9)
    assert rows[0]["eval_consistency_fall"] == pytest.approx(0, abs=1e-12)
    assert abs(fall.mean()) > 1e-4
    is_mean(rows[-1], "eval_consistency", after, 1e-4)
    is_mean(rows[-1], "eval_consistency_fall", fall, 1e-3)


def test_the_ranking_and_the_ratios_of_held_out_responses_are_those_of_the_models(
    trained: Trained, groups
) -> None:
    """Each of the five groups has rewards of 0 and of 1."""
    rows = [m for m in metrics(trained("sum")[1]) if m["eval_auc"] is not None]
    found: dict[str, list] = {"auc": [], "log_ratio_best": [], "log_ratio_worst": [], "ratio_mean": []}
    share = []
    for r, _, rho in groups("sum"):
        right = r == 1
        pairs = [(a > b) + (a == b) / 2 for a in rho[right] for b in rho[~right]]
        found["auc"].append(np.mean(pairs))
        found["log_ratio_best"].append(rho[right].mean())
        found["log_ratio_worst"].append(rho[~right].mean())
        found["ratio_mean"].append(np.exp(rho).mean())
        share.append(-np.log(right.mean()))
    assert (rows[0]["eval_auc"], rows[0]["eval_auc_groups"]) == (0.5, 5)
    for name, values in found.items():
        is_mean(rows[-1], f"eval_{name}", values, 1e-4)
    assert rows[-1]["eval_kl_of_best"] == pytest.approx(np.mean(share))


def test_an_objective_without_a_regularized_reward_or_a_reference_has_only_rankings(tmp_path: Path) -> None:
    phases = [{"name": "sft", "objective": {"name": "sft"}}, {"name": "agro"}]
    rows = metrics(Trainer(log_run(tmp_path, phases=phases, train__steps=2), tmp_path / "run").run())
    known = {
        name: {m["phase"] for m in rows if m[name] is not None}
        for name in ("eval_auc", "eval_consistency", "log_ratio_best", "ratio_mean")
    }
    assert known.pop("eval_auc") == {"sft", "agro"}
    assert known == {name: {"agro"} for name in known}


NAN = math.nan


def batch_of(rho: list[float], **columns: Any) -> tuple[Batch, torch.Tensor]:
    """A batch of one token a row, with these log-ratios."""
    logp_BT = torch.tensor([[9.0, x - 3.0] for x in rho], dtype=torch.float64)
    ref_BT = torch.tensor([[NAN, -3.0]] * len(rho), dtype=torch.float64)
    return Batch.of(mask=[[False, True]] * len(rho), ref_logp=ref_BT, **columns), logp_BT


def test_the_ranking_is_a_share_of_pairs_by_hand() -> None:
    """Log-ratios 2, 1, 1, 0 of rewards 1, 0, ½, 0: of 5 pairs with unequal rewards one is tied.

    A response without a reward, a group of equal rewards and a group of one have no pairs. The last
    response of group d has two rows, whose sum counts.
    """
    batch, logp = batch_of(
        [2.0, 1.0, 1.0, 0.0, 9.0, 3.0, 4.0, 5.0, 1.0, 0.5, 1.5],
        reward=[1.0, 0.0, 0.5, 0.0, NAN, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0],
        group=list("aaaaabbcddd"),
        response=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9],
    )
    assert ranking(batch, logp) == pytest.approx([4.5 / 5, 1.0])


def test_groups_that_are_trained_on_and_stores_without_usable_ones_are_refused(tmp_path: Path) -> None:
    config = log_run(tmp_path)
    with Store.open(tmp_path / "empty.db") as store:
        store.append([Sample("200>", "1", reward=1.0), Sample("201>", "1", reward=0.0)])
    changed = log_run(tmp_path / "b", data__eval_store=str(tmp_path / "empty.db"))
    with pytest.raises(Refused, match="two or more scored responses"):
        HeldOutLog.load(Phase.all(changed)[0], Local(Policy.load(config.policy), None, print), Activity())
    held_out(tmp_path / "log.db", range(203, 204))
    with pytest.raises(Refused, match=r"data.eval_store: 1 of 5 held-out prompts are in the training data"):
        Trainer(config, tmp_path / "run").run()


def test_a_beta_given_for_it_serves_any_objective_and_unscored_responses_are_left_out(tmp_path: Path) -> None:
    """`sft` reads no rewards, so it would let responses without one in.

    At the start π is π_ref, so R is r.
    """
    config = log_run(tmp_path, objective={"name": "sft"}, evaluate__beta=BETA)
    with Store.open(config.data.eval_store) as store:
        store.append([Sample("200>", "77"), Sample("201>", "88")])
    first, *rest = [
        m for m in metrics(Trainer(config, tmp_path / "run").run()) if m["eval_consistency"] is not None
    ]
    rewards = [[float((i + p) % 2) for i in range(2 + p % 2)] for p in range(200, 205)]
    assert first["eval_consistency"] == pytest.approx(np.mean([np.var(r, ddof=1) / 2 for r in rewards]))
    assert (first["eval_groups"], first["eval_dropped"]) == (5, 4)
    assert all(abs(m["eval_consistency_fall"]) > 1e-4 for m in rest)


def test_a_beta_given_for_it_is_taken_before_that_of_the_objective(tmp_path: Path, trained: Trained) -> None:
    own = metrics(trained("sum")[1])[-1]
    given = metrics(Trainer(log_run(tmp_path, evaluate__beta=0.1), tmp_path / "run").run())[-1]
    assert (own["beta"], own["loss"]) == (given["beta"], given["loss"]) == (BETA, own["loss"])
    assert own["eval_consistency"] != pytest.approx(given["eval_consistency"], rel=1e-3)


def test_a_share_of_the_stores_prompts_is_measured_and_never_trained_on(tmp_path: Path) -> None:
    """Fresh samples of these prompts aren't made either, and each seed holds out the same ones."""
    log = tmp_path / "log.db"
    fill_store(log, groups=40)
    with Store.open(log, read_only=True) as store:
        ids = {g.prompt_id for g in store.groups()}
    held = {i for i in ids if is_held_out(i, 0.3)}
    assert len(held) > 5
    asked = write_prompts(tmp_path / "asked.jsonl", range(60))
    kept = {p.id for p in load_prompts(asked) if not is_held_out(p.id, 0.3)}
    data = {"store": str(log), "replay": 0.5, "hold_out": 0.3, "prompts": asked}
    for seed in (0, 1):
        train = {"steps": 12, "groups": 8, "seed": seed}
        folder = run_tiny(tmp_path, f"run{seed}", data=data, train=train, objective__beta=BETA)
        with Store.open(log, read_only=True) as store:
            drawn = list(store.samples(ids=[d.sample for d in store.draws.drawn(run_id(folder))]))
        trained = {s.prompt_id for s in drawn}
        assert len(trained & ids) > 10
        assert not trained & held
        assert {s.prompt_id for s in drawn if s.source == "policy"} <= kept
        rows = [m for m in metrics(folder) if m["eval_groups"] is not None]
        assert {m["eval_groups"] for m in rows} == {len(held)}
        assert rows[-1]["eval_auc"] is not None


def test_best_and_worst_of_each_group_by_hand() -> None:
    """Group a: best 2 and 1, worst −1 and −3. Group b: best 0.2 + 0.3 in two rows, worst −2.

    The rewards of c are equal, and d has one. The best are ½ of a and ½ of b.
    """
    batch, logp = batch_of(
        [2.0, 1.0, -1.0, -3.0, 9.0, 0.2, 0.3, -2.0, 5.0, 5.0, 7.0, 7.0],
        reward=[1.0, 1.0, 0.0, 0.0, NAN, 0.7, 0.7, 0.1, 1.0, 1.0, 1.0, NAN],
        group=list("aaaaabbbccdd"),
        response=[0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10],
    )
    found = stored_metrics(batch, logp, [False] * 12)
    assert found["log_ratio_best"] == pytest.approx((1.5 + 0.5) / 2)
    assert found["log_ratio_worst"] == pytest.approx((-2.0 - 2.0) / 2)
    assert found["kl_of_best"] == pytest.approx(math.log(2))
    rho = [2.0, 1.0, -1.0, -3.0, 9.0, 0.5, -2.0, 5.0, 5.0, 7.0, 7.0]
    assert found["ratio_mean"] == pytest.approx(np.exp(rho).mean())


def test_only_stored_rows_count_and_only_known_ones() -> None:
    batch, logp = batch_of([1.0, -1.0, 8.0, 8.0], reward=[1.0, 0.0, 1.0, 0.0], group=list("aabb"))
    stored = stored_metrics(batch, logp, [False, False, True, True])
    assert stored["log_ratio_best"] == 1.0
    assert stored["ratio_mean"] == pytest.approx(math.cosh(1.0))
    assert stored_metrics(batch, logp, [True] * 4) == {}
    ref = batch.ref_logp.clone()
    ref[:2] = NAN
    half = stored_metrics(batch.replace(ref_logp=ref), logp, [False] * 4)
    assert half["log_ratio_best"] == 8.0
    for unknown in (None, torch.full_like(ref, NAN)):
        only = stored_metrics(batch.replace(ref_logp=unknown), logp, [False] * 4)
        assert only == {"kl_of_best": pytest.approx(math.log(2)), "kl_of_best_groups": 2}


def test_rows_of_one_response_with_different_rewards_have_none() -> None:
    """`sft` doesn't refuse them."""
    batch, logp = batch_of(
        [1.0, 1.0, -1.0, 4.0], reward=[1.0, 0.0, 0.0, 0.5], group=list("aaaa"), response=[0, 0, 1, 2]
    )
    found = stored_metrics(batch, logp, [False] * 4)
    assert (found["log_ratio_best"], found["log_ratio_worst"]) == (4.0, -1.0)


def test_an_exponential_that_is_too_large_is_the_largest_number() -> None:
    """Also where only the sum, or only the standard error, would overflow."""
    assert exponential("x", np.array([800.0, 0.0]), error=False) == {"x": pytest.approx(sys.float_info.max)}
    near = exponential("x", np.array([709.5, 709.5]))
    assert near["x"] == pytest.approx(math.exp(709.5))
    assert near["x_se"] == 0.0
    plain = exponential("x", np.array([0.0, math.log(3.0)]))
    assert plain == {"x": pytest.approx(2.0), "x_se": pytest.approx(1.0)}
    assert math.isnan(exponential("x", np.array([1.0]))["x_se"])
    assert exponential("x", np.array([])) == {}


def test_a_run_on_a_log_measures_them_at_each_step(tmp_path: Path, trained: Trained) -> None:
    """At the first step π is the reference; one half of each group of the log is right."""
    rows = [m for m in metrics(trained("sum")[1]) if m["step"]]
    first = [rows[0][key] for key in ("log_ratio_best", "log_ratio_worst", "ratio_mean")]
    assert first == pytest.approx([0, 0, 1], abs=RESPONSE_ROUNDING)
    assert all(m["kl_of_best"] == pytest.approx(math.log(2)) for m in rows)
    assert rows[2]["log_ratio_best"] > rows[2]["log_ratio_worst"]
    assert {m["kl_of_best"] for m in metrics(run_tiny(tmp_path, train__steps=2))} == {None}


def on_log(tmp_path: Path, groups: int = 8, **changes: Any) -> RunConfig:
    if not (tmp_path / "log.db").exists():
        fill_store(tmp_path / "log.db", groups=groups)
    return tiny(tmp_path, data={"store": str(tmp_path / "log.db"), "replay": 1.0}, **changes)


def test_it_is_the_mean_log_ratio_of_responses_to_prompts_of_the_store(tmp_path: Path, start: Policy) -> None:
    """The responses are sampled anew from the model that was saved, and scored by the models' own logits."""
    config = on_log(tmp_path, evaluate={"every": 3, "kl_samples": 10})
    folder = Trainer(config, tmp_path / "run").run()
    rows, now = metrics(folder), of_run(folder)
    assert [m["step"] for m in rows if m["eval_kl_ref"] is not None] == [3, 6]
    with Store.open(config.data.store, read_only=True) as store:
        prompts = first_prompts(config, store, "another", [], now.encoder, 10)
    assert {p.text for p in prompts} == {f"{i}>" for i in range(100, 108)}
    asked = [prompts[i % 8] for i in range(10)]
    sampler = config.sampler.model_copy(update={"n": 1})
    rollout = load_rollout(now.encoder, embedded(now))
    samples = rollout.sample(asked, 1, sampler, seed=derive(0, "evaluate"))
    rho = np.array([total_logp(now, s) - total_logp(start, s) for s in samples])
    is_mean(rows[-1], "eval_kl_ref", rho, 1e-4)
    assert rows[-1]["kl_ref"] == rows[-1]["eval_kl_ref"]


def test_it_changes_nothing_of_the_training(tmp_path: Path) -> None:
    """Half of each step is sampled, so that a disturbed stream of random numbers would show."""
    mixed = {**fill_store(tmp_path / "log.db"), "data__replay": 0.5, "data__roles": ["log"]}
    with_kl = run_tiny(tmp_path, "with", **mixed, evaluate={"every": 2})
    without = run_tiny(tmp_path, "without", **mixed, evaluate={"kl_samples": 0, "side_by_side": 0})
    assert [m["step"] for m in metrics(with_kl) if m["eval_kl_ref"] is not None] == [2, 4, 6]
    assert {m["eval_kl_ref"] for m in metrics(without)} == {None}
    assert weights(with_kl) == weights(without)


def test_the_prompts_are_held_out_ones_where_there_are_any(tmp_path: Path) -> None:
    config = on_log(tmp_path, groups=40)
    held = on_log(tmp_path, data__hold_out=0.3)
    policy = Policy.load(config.policy)
    with Store.open(config.data.store) as store:
        chosen = first_prompts(held, store, "run", [], policy.encoder, 32)
        expected = {f"{p}>" for p in range(100, 140) if is_held_out(prompt_hash(f"{p}>"), 0.3)}
        assert {p.text for p in chosen} == expected
        assert len(first_prompts(config, store, "run", [], policy.encoder, 32)) == 32


def test_prompts_of_the_run_itself_too_long_ones_and_episodes_are_not_chosen(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    policy = Policy.load(config.policy)
    fresh = [Prompt("7>", "a"), Prompt("8>", "b")]
    with Store.open(tmp_path / "s.db") as store:
        store.append([Sample("1>", "2", reward=1.0)], run="own")
        its_own = first_prompts(config, store, "own", fresh, policy.encoder, 32)
        assert {p.text for p in its_own} == {"7>", "8>"}
        store.append(
            [
                Sample("3>", "2", reward=1.0),
                Sample("1" * 16, "2", reward=1.0),
                Sample("4>", "2", reward=1.0, episode="e"),
                Sample("5>", "2", reward=1.0, tokens=[1, 2], action=[False, True], context_tokens=[1]),
            ]
        )
        of_log = first_prompts(config, store, "own", fresh, policy.encoder, 32)
        assert [p.text for p in of_log] == ["3>"]


def test_it_is_not_measured_where_it_can_not_be(tmp_path: Path) -> None:
    assert samples_kl(on_log(tmp_path))
    held = write_prompts(tmp_path / "held.jsonl", range(60, 64))
    for section, changes in (
        ("data", {"eval_prompts": held}),
        ("data", {"replay": 0.0}),
        ("evaluate", {"kl": False}),
        ("evaluate", {"kl_samples": 0}),
        ("evaluate", {"temperature": 0.5}),
        ("engine", {"kind": "server", "urls": ["http://localhost:1"]}),
        ("source", {"kind": "elsewhere"}),
        ("environment", {"name": "tool"}),
    ):
        values = on_log(tmp_path).model_dump(mode="json")
        values[section] = {**(values[section] or {}), **changes}
        assert not samples_kl(RunConfig.of(values)), changes
    without_reference = on_log(tmp_path, objective={"name": "sft"}, train__steps=1)
    assert metrics(Trainer(without_reference, tmp_path / "run").run())[-1]["eval_kl_ref"] is None


def test_another_model_as_reference_is_measured_before_the_first_step(
    tmp_path: Path, trained: Trained
) -> None:
    reference = {"policy__reference": "model", "policy__reference_model": str(trained("sum")[1] / "model")}
    rows = metrics(Trainer(on_log(tmp_path, **reference, train__steps=2), tmp_path / "run").run())
    assert [m["step"] for m in rows if m["eval_kl_ref"] is not None] == [0, 2]
    assert rows[0]["eval_kl_ref"] > 0
    assert rows[0]["kl_ref"] is None
