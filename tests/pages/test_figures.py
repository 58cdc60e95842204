"""What is drawn: the numbers that stand in the figures, not their looks."""

import dataclasses
import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest
from markupsafe import escape
from matplotlib.image import imread
from matplotlib.text import Text

from agro.config import RunConfig
from agro.pages.run.figures import (
    FIRST,
    SECOND,
    Series,
    against_kl,
    draw,
    kl_pairs,
    learning_curve,
    png,
    smoothing,
    svg,
)
from agro.pages.run.page import REFERENCES, learning, nearness
from agro.runs.rundata import RunData, load_run


def lines(figure, color):
    return [line.get_xydata() for line in figure.axes[0].lines if line.get_color() == color]


def texts(figure):
    return [t.get_text() for t in figure.findobj(Text) if t.get_text()]


def extents(figure, names):
    """The boxes of these texts as they are drawn."""
    figure.draw_without_rendering()
    return [t.get_window_extent() for t in figure.findobj(Text) if t.get_text() in names]


def made(run, phases):
    """The same run with other rows: [(phase, reward), …], one a step from 1."""
    rows = [{"step": i, "phase": phase, "reward_mean": reward} for i, (phase, reward) in enumerate(phases, 1)]
    return dataclasses.replace(run, rows=rows)


@pytest.fixture
def run(run_folder) -> RunData:
    return load_run(run_folder)


def test_a_ring_marks_the_best_held_out_reward(run):
    measured = [r for r in run.rows if r["eval_reward"] is not None]
    best = max(measured, key=lambda r: r["eval_reward"])
    rings = [line for line in learning_curve(run).axes[0].lines if line.get_markerfacecolor() == "none"]
    np.testing.assert_array_equal(
        [ring.get_xydata() for ring in rings], [[(best["step"], best["eval_reward"])]]
    )


def test_the_learning_curve_shows_what_was_measured(run):
    figure = learning_curve(run)
    heldout = lines(figure, SECOND)[0]
    known = [(r["step"], r["eval_reward"]) for r in run.rows if r["eval_reward"] is not None]
    np.testing.assert_array_equal(heldout, known)
    raw = np.concatenate(lines(figure, FIRST)[::3])
    np.testing.assert_array_equal(raw[1:], [(r["step"], r["reward_mean"]) for r in run.rows[1:]])
    assert math.isnan(raw[0, 1])  # step 0 is an evaluation only
    bars = figure.axes[0].collections[0].get_segments()
    for bar, row in zip(bars, (r for r in run.rows if r["eval_reward"] is not None), strict=True):
        middle, se = row["eval_reward"], row["eval_reward_se"]
        np.testing.assert_allclose(bar, [(row["step"], middle - se), (row["step"], middle + se)])
    shown = texts(figure)
    assert {"sft", "onpolicy", "store", "training", "held-out", "step", "reward"} <= set(shown)
    [band] = figure.axes[0].patches
    assert (band.get_x(), band.get_x() + band.get_width()) == (60, 180)


def test_no_line_leads_from_one_phase_to_the_next_or_over_unknown_steps(run):
    phases = [("a", 0.1), ("a", 0.2), ("b", 0.3), ("b", None), ("b", 0.5)]
    figure = learning_curve(made(run, phases))
    first, _, second, alone = lines(figure, FIRST)
    np.testing.assert_array_equal(first, [(1, 0.1), (2, 0.2)])
    np.testing.assert_array_equal(second, [(3, 0.3), (4, math.nan), (5, 0.5)])
    np.testing.assert_array_equal(alone, [(3, 0.3), (5, 0.5)])  # a line would show neither


def test_a_running_mean_stays_inside_its_phase_and_passes_over_unknown_values(run):
    values = [("a", 0.0)] * 30 + [("b", 1.0)] * 25 + [("b", None)] + [("b", 3.0)] * 64
    data = made(run, values)
    assert smoothing(len(values)) == 3
    figure = learning_curve(data)
    smooth = np.concatenate(lines(figure, FIRST)[1::3])[:, 1]
    assert smooth[:30].tolist() == [0.0] * 30
    assert smooth[30:54].tolist() == [1.0] * 24
    assert smooth[54] == pytest.approx((1 + 1 + 3) / 3)
    assert math.isnan(smooth[55])
    assert smooth[56] == pytest.approx((1 + 3 + 3) / 3)
    assert smooth[57:].tolist() == [3.0] * 63
    assert smoothing(39) == 1


def test_a_logarithmic_scale_keeps_zeros_in_sight(run):
    data = made(run, [("a", None)] * 3)
    values = np.array([0.0, 1e-6, 1e-3])
    axes = draw(data, [Series("x", values)], log=True).axes[0]
    assert axes.get_yscale() == "symlog"
    assert axes.get_ylim()[0] == 0
    assert draw(data, [Series("x", values + 1)], log=True).axes[0].get_yscale() == "linear"
    assert draw(data, [Series("x", -values)], log=True).axes[0].get_ylim()[0] <= -1e-3


@pytest.mark.parametrize("at", [(0.5, 0.5), (0.0, 1.0), (0.50, 0.51)])
def test_names_of_series_do_not_overlap(run, at):
    series = [Series(f"s{i}", np.array([0.0, at[i]]), (FIRST, SECOND)[i]) for i in range(2)]
    figure = draw(made(run, [("a", None)] * 2), series)
    low, high = sorted(extents(figure, ("s0", "s1")), key=lambda b: b.y0)
    assert low.y1 <= high.y0


@pytest.mark.parametrize("end", [0.0, 0.5, 1.0])
def test_names_of_many_equal_series_stay_in_the_figure(run, end):
    data = made(run, [("a", None)] * 2)
    other = Series("other", np.array([0.0, 1.0]))  # which makes the axis end at 1
    equal = [Series(f"s{i}", np.array([0.0, end])) for i in range(8)]
    figure = draw(data, [*equal, other])
    boxes = sorted(extents(figure, {"other", *(s.label for s in equal)}), key=lambda box: box.y0)
    assert len(boxes) == 9
    assert all(low.y1 <= high.y0 for low, high in pairwise(boxes))
    assert boxes[0].y0 >= figure.bbox.y0
    assert boxes[-1].y1 <= figure.bbox.y1


def test_names_of_phases_are_cut_to_their_room(run):
    """On 200 points above the axes there are about 41 letters, of which 2 % have no room for a name."""
    phases = [("warm-up", 0.1)] * 10 + [("onpolicy", 0.2)] * 2 + [("x", 0.0)] * 88
    figure = learning_curve(made(run, phases), (3.7, 2.9))
    names = extents(figure, ("war…", "x"))
    assert len(names) == 2
    assert not names[0].overlaps(names[1])
    assert "onpolicy" not in texts(figure)


def test_an_svg_is_part_of_a_page(run):
    rows = [r | {"phase": "a <b> & $x$"} for r in run.rows[100:]]
    changed = dataclasses.replace(run, rows=[*run.rows[:100], *rows])
    text = str(svg(learning_curve(changed), "name"))
    assert text.startswith("<svg viewBox=")
    assert ">a &lt;b&gt; &amp; $x$<" in text
    assert "http" not in text
    assert "<style" not in text
    assert set(re.findall(r"#[0-9a-f]{6}\b", text)) == set()  # every color is the page's
    assert {f"var(--{v})" for v in ("ink", "muted", "grid", "band", "first", "second")} <= set(
        re.findall(r"var\(--\w+\)", text)
    )
    ET.fromstring(text.replace("<svg", '<svg xmlns:xlink="x"', 1))
    assert text == svg(learning_curve(changed), "name")
    ids = re.findall(r'\bid="([^"]+)"', text)
    other = re.findall(r'\bid="([^"]+)"', svg(learning_curve(run), "other"))
    assert ids
    assert not set(ids) & set(other)


@pytest.mark.parametrize("name", ["$x$", "$\\foo$", "$5 or $6_^", "a \\$ b", "{x}%", "two\nlines"])
def test_no_text_of_a_user_is_mathematics(run, name, tmp_path):
    """Matplotlib reads what stands between two $ as a formula, unless it is told not to."""
    for row in run.rows:
        row["reward_parts"] = {name: 0.5, "other": 0.3}
        row["phase"] = name if row["step"] > 100 else "first"
    [parts] = [p for p in learning(run)["panels"] if p.title == "Parts of the reward"]
    assert escape(name.split("\n")[0]) in parts.figure
    png(learning_curve(run), tmp_path / "curve.png")
    figure = learning_curve(run)
    assert not any(text.get_parse_math() for text in figure.findobj(Text) if text.get_text() == name)


def test_a_figure_is_a_png(run, tmp_path):
    png(learning_curve(run, (7.6, 3.6)), tmp_path / "curve.png")
    image = imread(tmp_path / "curve.png")
    assert image.shape[:2] == (720, 1520)
    assert image[0, 0].tolist() == [1.0, 1.0, 1.0, 1.0]


def test_reward_against_kl_is_of_rows_that_know_both(run):
    """Fresh training, steps 61 to 180, has a KL of its own; at other steps kl_ref is the held-out one."""
    (training, kl), _ = kl_pairs(run)
    steps = run.column("step")[np.isfinite(training.values + kl)]
    assert steps.tolist() == list(range(61, 181))
    figure = against_kl(run)
    held_out = [(r["eval_kl_ref"], r["eval_reward"]) for r in run.rows if r["eval_reward"] is not None]
    np.testing.assert_array_equal(lines(figure, SECOND)[0], held_out)
    dots = lines(figure, FIRST)[0]
    assert len(dots) == 60  # two steps each
    first, second = run.rows[61:63]
    of_both = [(first[name] + second[name]) / 2 for name in ("kl_ref", "reward_mean")]
    np.testing.assert_allclose(dots[0], of_both)
    assert figure.axes[0].get_xlim()[0] <= 0


def test_phases_with_references_of_their_own_have_paths_of_their_own(run):
    assert len(lines(against_kl(run), SECOND)) == 1
    config = run.config.record()
    for phase in config["phases"][1:]:
        phase["policy"] = {"reference": "phase"}
    run = dataclasses.replace(run, config=RunConfig.of(config))
    assert [len(path) for path in lines(against_kl(run), SECOND)] == [4, 6, 2]
    assert nearness(run)["facts"][0].value == REFERENCES["phase"]
