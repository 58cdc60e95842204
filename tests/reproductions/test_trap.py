"""The trap's theory on a coarse grid, and the remedies on few problems."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reproductions.trap import remedies, run


def test_the_line_divides_where_descent_ends() -> None:
    found = run.grid(small=True)
    assert found["fell below the line, c = 1"] == 1
    assert found["rose above the line, c = 1"] == 1
    assert found["least gained, adaptive"] > 0.9


@pytest.mark.parametrize("n", [2, 3])
def test_where_the_remedies_end(n: int) -> None:
    found = remedies.compare(remedies.tables(2, 12), 300, n)["ends"]
    assert found["c = 1"]["fell"] > 0
    for name in ("c = 0", "adaptive", "c = 0, 1/2 reference"):
        assert found[name]["fell"] == 0
        assert found[name]["reached"] > found["c = 1"]["reached"]


def test_networks_and_sampled_groups_run(tmp_path) -> None:
    """Networks share nothing with each other: the first of six goes where it goes alone."""
    several = remedies.networks(6)
    alone = replace(remedies.networks(1), reward=several.reward[:4])
    paths = [remedies.descent(p, "adaptive", 20) for p in (several, alone)]
    torch.testing.assert_close(
        paths[0].distance[:, :4], paths[1].distance, atol=1e-3, rtol=0
    )  # but for Adam's ε
    assert paths[1].distance[-1].mean() < paths[1].distance[0].mean()
    found = {"tables": remedies.compare(remedies.tables(2, 6), 200, 4, (0, 1))}
    assert found["tables"]["ends"]["adaptive"]["instances"] == 12
    assert found["tables"]["ends"]["adaptive"]["reached"] > 0.5
    remedies.figure(found, tmp_path / "remedies.png")
    assert (tmp_path / "remedies.png").stat().st_size > 1000
