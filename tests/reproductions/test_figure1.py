"""Figure 1 on few problems: where both objectives go."""

from __future__ import annotations

from reproductions.figure1 import run


def test_agro_arrives_and_the_policy_gradient_does_not(monkeypatch) -> None:
    monkeypatch.setattr(run, "BETAS", {0.3: 1})
    rows = {(r["objective"], r["behavior"]): r for r in run.measure(small=True)["rows"]}
    for behavior in ("reference", "uniform", "another", "mixture"):
        assert rows["agro", behavior]["worst"] < 1e-6  # after 400 updates
        assert rows["kl_pg", behavior]["median"][-1] > 0.01
    assert rows["agro", "lacks support"]["median"][-1] > 0.01
