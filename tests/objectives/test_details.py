"""What mutants of the objectives showed that no other test looks at: metrics by hand, words of refusals, numbers at an edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agro import Batch, objectives
from agro.errors import Refused
from agro.objectives import Evaluation, NotFinite


def at_the_reference(name: str, groups: dict[str, tuple[float, list[float]]], **options: Any) -> Evaluation:
    """Groups by name, (weight, rewards), each response one token of log-prob -1 under the policy and the reference: R = r."""
    rows = [(g, weight, r) for g, (weight, rewards) in groups.items() for r in rewards]
    logp = [[0.0, -1.0]] * len(rows)
    batch = Batch.of(
        mask=[[False, True]] * len(rows), group=[g for g, _, _ in rows], weight=[w for _, w, _ in rows],
        reward=[r for _, _, r in rows], ref_logp=logp, age=[0] * len(rows), extra={"stored_value": [0.0] * len(rows)},
    )  # fmt: skip
    return objectives.evaluate(name, logp, batch, **options)


def test_agro_says_its_loss_under_the_name_that_all_share() -> None:
    """Rewards 1 and 0: ½ · ½."""
    out = at_the_reference("agro", {"a": (1, [1, 0])}, beta=0.5)
    assert out.metrics == {"consistency": 0.25, "singletons_dropped": 0.0}
    assert at_the_reference("agro_onpolicy", {"a": (1, [1, 0])}, beta=0.5).metrics["consistency"] == 0.25


def test_consistency_of_the_squares_is_over_groups_of_several() -> None:
    """½ Var is ½ · ½, of one response unknown, ½ · ⅓: (1 · ¼ + 3 · ⅙)/(1 + 3), and no share of the lone one's weight."""
    groups: Any = {"a": (1, [1, 0]), "lone": (2, [5]), "c": (3, [1, 0, 0])}
    out = at_the_reference("squared_consistency", groups, beta=0.5, baseline="stored", scale="square")
    assert out.metrics["consistency"] == pytest.approx(0.1875, abs=1e-15)


def test_the_share_of_groups_whose_best_response_is_pushed_down() -> None:
    """At β = ¼ where R_i − R̄_{-i} of the best is above ½: of `up`, `edge`, `down` and `far` the last two. Equal rewards aren't asked."""
    groups: Any = {
        "up": (3, [0.4, 0]),
        "edge": (2, [0.5, 0]),
        "down": (4, [0.6, 0]),
        "far": (1, [1, 0, 0]),
        "equal": (8, [1, 1]),
    }
    out = at_the_reference("agro_onpolicy", groups, beta=0.25)
    assert out.metrics["reversed_share"] == pytest.approx((4 + 1) / (3 + 2 + 4 + 1), abs=1e-15)
    assert out.metrics["likelihood_ratio"] == 1.0
    assert np.isnan(at_the_reference("agro_onpolicy", {"equal": (8, [1, 1])}, beta=0.25).metrics["reversed_share"])


def test_the_share_of_the_likelihood_ratio_part() -> None:
    """Adaptive: min(1, β / max_i (R_i − R̄_{-i})), here 1 and ¼/1, in the mean by weight."""
    groups: Any = {"a": (3, [0.2, 0]), "b": (1, [1, 0])}
    assert at_the_reference("agro_onpolicy", groups, beta=0.25, likelihood_ratio=0.4).metrics["likelihood_ratio"] == 0.4
    out = at_the_reference("agro_onpolicy", groups, beta=0.25, likelihood_ratio="adaptive")
    assert out.metrics["likelihood_ratio"] == pytest.approx((3 + 0.25) / 4, abs=1e-15)
    assert out.metrics["reversed_share"] == 0


@pytest.mark.parametrize(("name", "option"), [("agro", "regulariser"), ("agro_onpolicy", "squared")])
def test_what_looks_along_a_response_says_which_option_does(name: str, option: str) -> None:
    batch = Batch.of(
        mask=[[False, True]] * 3, reward=[1.0, 0.0, 0.0], group=[0, 0, 0], response=["a", "b", "b"],
        ref_logp=[[0.0, -1.0]] * 3, age=[0] * 3, ids=["one", "two", "three"],
    )  # fmt: skip
    said = f'^objective {name}: {option} = "triangular" looks along a response, but that of two lies in several rows; take "sequence"$'
    with pytest.raises(Refused, match=said):
        objectives.evaluate(name, [[0.0, -1.0]] * 3, batch, beta=0.5, **{option: "triangular"})


def test_without_beta_a_policy_that_is_certain_stands_still() -> None:
    """log π = 0 at every token."""
    batch = Batch.of(mask=[[False, True]] * 2, reward=[1.0, 0.0], group=[0, 0])
    out = objectives.evaluate("agro", [[0.0, 0.0]] * 2, batch, beta=0.0, scale="loss")
    assert (out.grad == 0).all()


def test_rows_that_a_micro_batch_does_not_hold_are_not_judged_by_it() -> None:
    """Rows 2 and 3 are given; the ratio of row 0 overflows, which is for the micro-batch that holds row 0 to say."""
    mask = [[False, True]] * 4
    given: dict[str, Any] = {"mask": mask, "reward": [1.0, 0.0, 1.0, 0.0], "group": [0, 0, 1, 1], "ids": [*"abcd"]}
    batch = Batch.of(**given, behavior_logp=[[0.0, -800.0], *[[0.0, -1.0]] * 3])
    entry = objectives.get("grpo")
    options = entry.resolve("grpo", {})
    logp = {"logp": torch.tensor([[0.0, -1.0]] * 4, dtype=torch.float64)}
    out = objectives.differentiate("grpo", entry, logp, batch, options, torch.tensor([2, 3]))
    assert out.grads["logp"][2:, 1].isfinite().all()
    with pytest.raises(
        NotFinite, match=r"isn't finite in a \(a ratio that overflows\?\), largest \|logp - behavior_logp\| 799\."
    ):
        objectives.differentiate("grpo", entry, logp, batch, options, torch.tensor([0, 1]))
