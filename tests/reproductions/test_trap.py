"""The trap's theory on a coarse grid, and the way round it."""

from __future__ import annotations

from reproductions.trap import run


def test_the_line_divides_where_descent_ends() -> None:
    found = run.measure(small=True)
    assert found["fell below the line, c = 1"] == 1
    assert found["rose above the line, c = 1"] == 1
    assert found["least gained, adaptive"] > 0.9
