"""The pages of reproductions: made again from what was recorded, they are as they stand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reproductions import racing
from reproductions.baselines import run as baselines
from reproductions.chat import report as of_chat
from reproductions.offline import logs
from reproductions.offline import run as offline_run
from reproductions.panel import advice
from reproductions.panel import report as of_panel
from reproductions.paper import report as of_paper
from reproductions.paper import run as paper_run
from reproductions.systems import run as systems_run
from reproductions.verdict import off_policy
from reproductions.verdict import run as verdict_run

ROOT = Path(__file__).parents[2] / "reproductions"
Found = Any


def fresh_table(result: Found) -> str:
    if not logs.LOG.exists():
        pytest.skip(f"{logs.LOG} isn't there: the shared folder holds TRL's runs")
    return offline_run.fresh_table(result["runs"], offline_run.peers())


def of_races(result: Found) -> str:
    rows = [racing.row(of_chat.NAMES[job], raced) for job, raced in result["races"].items()]
    return "\n".join([*racing.HEAD, *rows])


@pytest.mark.parametrize(
    ("result", "render", "marks"),
    [
        ("baselines/result.json", lambda found: baselines.tables(found)["noisy"], baselines.MARKS["noisy"]),
        ("baselines/result.json", lambda found: baselines.tables(found)["single"], baselines.MARKS["single"]),
        ("offline/result.json", fresh_table, (offline_run.BEGIN, offline_run.END)),
        ("chat/races.json", of_races, (racing.BEGIN, racing.END)),
        ("chat/result.json", of_chat.page, (of_chat.BEGIN, of_chat.END)),
        ("panel/result.json", of_panel.tables, (of_panel.BEGIN, of_panel.END)),
        (
            "paper/result.json",
            lambda found: paper_run.tables(found["runs"])[1],
            (of_paper.BEGIN, of_paper.END),
        ),
        ("systems/result.json", lambda found: systems_run.page(systems_run.recorded(ROOT / "systems")), None),
        ("verdict/result.json", verdict_run.tables, (verdict_run.MARK, verdict_run.END)),
        ("verdict/off_policy.json", off_policy.gain_table, off_policy.MARKS["gain"]),
        ("verdict/off_policy_values.json", off_policy.values_table, off_policy.MARKS["values"]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_page_is_made_of_its_result(
    result: str, render: Callable[[Found], str], marks: tuple[str, str] | None
) -> None:
    page = (ROOT / result).with_name("README.md").read_text(encoding="utf-8")
    made = render(json.loads((ROOT / result).read_text(encoding="utf-8")))
    if marks:
        page = page.partition(marks[0])[2].partition(marks[1])[0].strip("\n")
    assert made == page


def test_the_table_of_the_guide_is_made_of_the_panel() -> None:
    runs = json.loads((ROOT / "panel/result.json").read_text(encoding="utf-8"))["runs"]
    page = advice.GUIDE.read_text(encoding="utf-8")
    assert page.partition(advice.BEGIN)[2].partition(advice.END)[0].strip("\n") == advice.table(runs)
