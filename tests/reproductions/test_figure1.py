"""Figure 1 on few problems: where both objectives go, by expectations and by pairs that are drawn."""

from __future__ import annotations

from reproductions.figure1 import run


def test_agro_arrives_and_the_policy_gradient_does_not(monkeypatch) -> None:
    monkeypatch.setattr(run, "BETAS", {0.3: 1})
    monkeypatch.setattr(run, "SIZES", (2,))
    found = run.measure(small=True)
    rows = {(r["objective"], r["behavior"]): r for r in found["rows"]}
    sampled = {(r["objective"], r["behavior"]): r for r in found["sampled"]}
    for behavior in ("reference", "uniform", "another", "mixture"):
        assert rows["agro", behavior]["worst"] < 1e-6  # after 400 updates
        assert rows["kl_pg", behavior]["median"][-1] > 0.01
        assert sampled["agro", behavior]["median"][-1] < 1e-6
        assert sampled["kl_pg", behavior]["median"][-1] > 0.01
    assert rows["agro", "lacks support"]["median"][-1] > 0.01
