"""Objectives from a user's file: they train as agro's own do, and say where they fail."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from agro.cli import app
from agro.errors import Refused
from agro.objectives import Evaluation, NotFinite, evaluate, get
from agro.proof.claim import Claims
from agro.types import Batch

SOURCE = '''
from agro.objectives import Groups, Objective, Streams, Terms
from agro.objectives.needs import BEHAVIOR_LOGP, REWARD
from agro.types import Batch


def leave_one_out(streams: Streams, batch: Batch, *, beta: float = 0.0) -> Terms:
    """RLOO once more."""
    groups = Groups.of(batch)
    rho_N = groups.sum_tokens(streams["logp"] - batch.ref_logp)
    R_N = (groups.reward - beta * rho_N).detach()
    advantage_N = R_N - groups.mean_others(R_N)
    return Terms(groups.average_responses(-advantage_N * groups.sum_tokens(streams["logp"])))


def ratio(streams: Streams, batch: Batch) -> Terms:
    groups = Groups.of(batch)
    rho_N = groups.sum_tokens(streams["logp"] - batch.behavior_logp)
    return Terms(groups.average_responses(-groups.reward * rho_N.exp()))


declared = Objective(ratio, "a test", lambda options: {REWARD, BEHAVIOR_LOGP}, lambda options: "row")


def returns_a_number(streams: Streams, batch: Batch) -> Terms:
    return streams["logp"].sum()


def without_the_policy(streams: Streams, batch: Batch) -> Terms:
    return Terms(Groups.of(batch).reward.sum())


def plain_metric(streams: Streams, batch: Batch) -> Terms:
    return Terms(streams["logp"].sum(), metrics={"a": 0.1})


def plain_loss(streams: Streams, batch: Batch) -> Terms:
    return Terms(0.5, surrogate=streams["logp"].sum())


def not_finite(streams: Streams, batch: Batch) -> Terms:
    return Terms(streams["logp"].sum() / 0.0)


NOTHING = 3
'''
INGREDIENT = '''
from dataclasses import replace
from typing import Annotated

from agro.objectives import Gradient, Ingredient
from agro.objectives.core import Rule
from agro.objectives.needs import REF_LOGP
from agro.objectives.options import Option


class PullToReference(Ingredient):
    """share · ½ Σ (log π − log π_ref)² over all tokens."""

    rules = (Rule(("share",), "to be at most 1", lambda share: share <= 1),)
    options = {"share": (Annotated[float, Option("of the squares", "loss per squared nat", ge=0)], 0.0)}

    def needs(self, options):
        return {REF_LOGP} if options["share"] else set()

    def apply(self, options, logp_BT, batch, gradient):
        if not options["share"]:
            return gradient
        off_BT = options["share"] * (logp_BT.detach() - batch.ref_logp) * batch.mask
        loss = gradient.loss + float(0.5 * (off_BT**2).sum()) / options["share"]
        return Gradient(loss, gradient.logp_BT + off_BT, gradient.metrics)


pulled = replace(declared, ingredients=(PullToReference(),))
'''
LOGP = [[0.0, -1.0, -2.0], [0.0, -0.5, -1.0], [0.0, -3.0, -0.1]]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE + INGREDIENT)
    return str(path)


def of(name: str, **options: float) -> Evaluation:
    batch = Batch.of(
        mask=[[False, True, True]] * 3,
        reward=[1.0, 0.0, 0.5],
        group=["a"] * 3,
        ref_logp=[[0.0, -1.0, -1.0]] * 3,
        behavior_logp=[[0.0, -1.5, -1.0]] * 3,
    )
    return evaluate(name, LOGP, batch, **options)


def test_a_function_is_differentiated_as_the_same_one_of_agro(file: str) -> None:
    mine, rloo = of(f"{file}:leave_one_out", beta=0.3), of("rloo", beta=0.3)
    assert mine.loss == rloo.loss
    assert (mine.grad == rloo.grad).all()
    assert abs(mine.grad).max() > 0.01


def test_what_a_function_needs(file: str) -> None:
    """Rewards in groups of the complete step, and the reference for a beta; an entry declares what else."""
    assert get(f"{file}:leave_one_out").coupling({}) == "step"
    found = {name: get(f"{file}:{name}").needed({}) for name in ("leave_one_out", "ratio", "declared")}
    assert found == {
        "leave_one_out": {"groups", "ref_logp", "reward"},
        "ratio": {"groups", "reward"},
        "declared": {"behavior_logp", "reward"},
    }
    assert abs(of(f"{file}:declared").grad).max() > 0.01


def test_a_module_is_imported(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(file).parent))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert of("mine:leave_one_out").loss == of("rloo").loss


def test_a_file_may_import_its_neighbors(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    beside = Path(file).with_name("beside.py")
    beside.write_text("from mine import leave_one_out\n")
    assert of(f"{beside}:leave_one_out").loss == of("rloo").loss


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none.py:f", "objective.name: there is no file .*none.py"),
        ("agro_no_such_module:f", "ModuleNotFoundError"),
        ("{file}:leave_one", "'leave_one'.*leave_one_out"),
        ("{file}:zzz", r"it has leave_one_out, ratio, declared, .*, NOTHING, PullToReference, pulled$"),
        ("{file}:NOTHING", "got 3"),
        ("leave_one_out", "file.py:NAME"),
    ],
)
def test_what_is_no_objective_is_refused(file: str, name: str, problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        get(name.format(file=file))


def test_errors_of_a_function_name_its_line(file: str) -> None:
    name = f"{file}:leave_one_out"
    with pytest.raises(Refused, match=r"beta"):
        of(name, beta="much")  # type: ignore[arg-type]
    with pytest.raises(Refused, match="expected Terms"):
        of(f"{file}:returns_a_number")
    with pytest.raises(Refused, match="expected a loss that is one number and depends on the policy"):
        of(f"{file}:without_the_policy")
    with pytest.raises(NotFinite, match=r"mine.py:not_finite: the loss isn't finite in row 0 \(group a\)$"):
        of(f"{file}:not_finite")
    batch = Batch.of(mask=[[False, True, True]] * 3, reward=[1.0, 0.0, 0.5], group=["a"] * 3)
    with pytest.raises(Refused, match=r"ratio: TypeError: .*mine.py:18"):
        evaluate(f"{file}:ratio", LOGP, batch)
    copy = Path(file).with_name("broken.py")
    copy.write_text("x = 1\ny = x / 0\n")
    with pytest.raises(Refused, match=r"ZeroDivisionError: .*broken.py:2"):
        get(f"{copy}:f")


def test_metrics_and_a_loss_to_plot_may_be_plain_numbers(file: str) -> None:
    assert of(f"{file}:plain_metric").metrics["a"] == 0.1
    evaluated = of(f"{file}:plain_loss")
    assert evaluated.loss == 0.5
    assert (evaluated.grad == of(f"{file}:plain_metric").grad).all()


def test_a_claim_with_an_unknown_need_is_refused() -> None:
    with pytest.raises(Refused, match=r"Claims: needs: unknown name 'rewards'; did you mean reward\?"):
        Claims(lambda s: s.p, "unknown", ("rewards",))


def test_nothing_is_proved_of_it(file: str) -> None:
    result = CliRunner().invoke(app, ["prove", f"{file}:ratio"])
    assert result.exit_code == 2
    assert "nothing is claimed" in result.stderr


def test_an_ingredient_of_ones_own_has_its_option_its_need_and_its_part_of_the_gradient(file: str) -> None:
    plain, out = of(f"{file}:declared"), of(f"{file}:pulled", share=0.5)
    assert get(f"{file}:pulled").needed({"share": 0.5}) - get(f"{file}:pulled").needed({}) == {"ref_logp"}
    off = [[0.0, *(0.5 * (logp + 1) for logp in row[1:])] for row in LOGP]  # log π_ref = −1
    assert out.grad - plain.grad == pytest.approx(np.array(off))
    assert out.loss - plain.loss == pytest.approx(sum(x**2 for row in off for x in row))  # ½ · ½ d²
    assert of(f"{file}:pulled").loss == plain.loss
    with pytest.raises(Refused, match=r"pulled: share = 2\.0 needs to be at most 1; change share$"):
        of(f"{file}:pulled", share=2.0)
    with pytest.raises(Refused, match="unknown option singletons"):
        of(f"{file}:pulled", singletons="drop")
