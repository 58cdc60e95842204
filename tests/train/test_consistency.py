"""½ Var(R) on held-out groups: what it is, and what can't be asked of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import DIGITS, fill_store, metrics, tiny, write_prompts

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rollout.prompts import load_prompts
from agro.store import Store, is_held_out
from agro.train.learner import Local
from agro.train.measure import ranking
from agro.train.monitors.heldout import HeldOutGroups
from agro.train.trainer import BaseTrainer
from agro.types import Batch, Sample, prompt_hash

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
    return tiny(tmp_path, data=data, **({"objective__beta": BETA} | changes))


def total_logp(policy: Policy, sample: Sample) -> float:
    """log π(y|x) from the model's own logits."""
    s = policy.encode(sample)
    ids = torch.tensor(s.tokens)[None].long()
    logp = torch.log_softmax(policy.model(ids).logits[0, :-1].double(), -1).gather(1, ids[0, 1:, None])[:, 0]
    return float(logp[torch.tensor(s.action[1:])].detach().sum())


Trained = Callable[[str], tuple[RunConfig, Path]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A function: average of the objective -> a run that is measured every 3 steps, and its folder."""

    @cache
    def run(average: str) -> tuple[RunConfig, Path]:
        folder = tmp_path_factory.mktemp(average)
        config = log_run(folder, evaluate__every=3, objective__average=average)
        return config, Trainer(config, folder / "run").run()

    return run


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """The weights before the first step: of a run that doesn't move."""
    folder = tmp_path_factory.mktemp("start")
    run = BaseTrainer(log_run(folder, train__lr=1e-30, train__steps=1), folder / "run").run()
    return of_run(run)


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


def is_mean(row: dict, name: str, values: list, rel: float) -> None:
    """Of a metric: the mean over groups and its standard error."""
    assert row[name] == pytest.approx(np.mean(values), rel=rel)
    assert row[f"{name}_se"] == pytest.approx(np.std(values, ddof=1) / len(values) ** 0.5, rel=rel)


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


def test_is_not_measured_where_the_objective_has_no_regularized_reward(tmp_path: Path) -> None:
    phases = [{"name": "sft", "objective": {"name": "sft"}}, {"name": "agro"}]
    rows = metrics(Trainer(log_run(tmp_path, phases=phases, train__steps=2), tmp_path / "run").run())
    assert [m["phase"] for m in rows if m["eval_consistency"] is not None] == ["agro"]
    assert {m["phase"] for m in rows if m["eval_auc"] is not None} == {"sft", "agro"}


def test_the_ranking_is_a_share_of_pairs_by_hand() -> None:
    """Log-ratios 2, 1, 1, 0 of rewards 1, 0, ½, 0: of 5 pairs with unequal rewards one is tied.

    A response without a reward, a group of equal rewards and a group of one have no pairs. The last
    response of group d has two rows, whose sum counts.
    """
    rho = [2.0, 1.0, 1.0, 0.0, 9.0, 3.0, 4.0, 5.0, 1.0, 0.5, 1.5]
    reward = [1.0, 0.0, 0.5, 0.0, math.nan, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    ref = torch.zeros(11, 2, dtype=torch.float64)
    batch = Batch.of(
        mask=[[False, True]] * 11,
        reward=reward,
        group=list("aaaaabbcddd"),
        response=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9],
        ref_logp=ref,
    )
    logp = torch.tensor(rho, dtype=torch.float64)[:, None] * torch.tensor([7.0, 1.0])
    assert ranking(batch, logp) == pytest.approx([4.5 / 5, 1.0])


def test_groups_that_are_trained_on_are_refused(tmp_path: Path) -> None:
    config = log_run(tmp_path)
    held_out(tmp_path / "log.db", range(203, 204))
    with pytest.raises(Refused, match=r"data.eval_store: 1 of 5 held-out prompts are in the training data"):
        Trainer(config, tmp_path / "run").run()


def test_a_store_without_usable_groups_is_refused(tmp_path: Path) -> None:
    config = log_run(tmp_path)
    with Store.open(tmp_path / "empty.db") as store:
        store.append([Sample("200>", "1", reward=1.0), Sample("201>", "1", reward=0.0)])
    changed = log_run(tmp_path / "b", data__eval_store=str(tmp_path / "empty.db"))
    learner = Local(Policy.load(config.policy), None, print)
    with pytest.raises(Refused, match="two or more scored responses"):
        HeldOutGroups.load(changed, learner)


def test_a_beta_given_for_it_serves_any_objective_and_unscored_responses_are_left_out(tmp_path: Path) -> None:
    """`sft` reads no rewards, so it would let responses without one in.

    At the start π is π_ref, so R is r.
    """
    config = log_run(tmp_path, objective={"name": "sft"}, evaluate={"beta": BETA, "every": 3})
    with Store.open(config.data.eval_store) as store:
        store.append([Sample("200>", "77"), Sample("201>", "88")])
    first, *rest = [
        m for m in metrics(Trainer(config, tmp_path / "run").run()) if m["eval_consistency"] is not None
    ]
    rewards = [[float((i + p) % 2) for i in range(2 + p % 2)] for p in range(200, 205)]
    assert first["eval_consistency"] == pytest.approx(np.mean([np.var(r, ddof=1) / 2 for r in rewards]))
    assert (first["eval_groups"], first["eval_dropped"]) == (5, 4)
    assert all(abs(m["eval_consistency_fall"]) > 1e-4 for m in rest)


def test_a_beta_given_for_it_is_taken_before_that_of_the_objective(tmp_path: Path) -> None:
    rows = [
        metrics(Trainer(log_run(tmp_path / name, **changes), tmp_path / name / "run").run())[-1]
        for name, changes in {
            "own": {"objective__beta": 0.1},
            "given": {"objective__beta": 0.1, "evaluate__beta": BETA},
        }.items()
    ]
    own, given = rows
    assert (own["beta"], own["loss"]) == (given["beta"], given["loss"]) == (0.1, own["loss"])
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
    for seed in (0, 1):
        data = {"store": str(log), "replay": 0.5, "hold_out": 0.3, "prompts": asked}
        config = tiny(
            tmp_path, data=data, train={"steps": 12, "groups": 8, "seed": seed}, objective__beta=BETA
        )
        folder = Trainer(config, tmp_path / f"run{seed}").run()
        with Store.open(log, read_only=True) as store:
            run = json.loads((folder / "config.json").read_text())["run"]
            drawn = list(store.samples(ids=[d.sample for d in store.draws.drawn(run)]))
        trained = {s.prompt_id for s in drawn}
        assert len(trained & ids) > 10
        assert not trained & held
        assert {s.prompt_id for s in drawn if s.source == "policy"} <= kept
        rows = [m for m in metrics(folder) if m["eval_groups"] is not None]
        assert {m["eval_groups"] for m in rows} == {len(held)}
        assert rows[-1]["eval_auc"] is not None
