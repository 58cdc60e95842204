"""The pages of reproductions: made again from what was recorded, they are as they stand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reproductions import harness, racing
from reproductions.baselines import run as baselines
from reproductions.chat import report as of_chat
from reproductions.offline import logs
from reproductions.offline import run as offline_run
from reproductions.panel import report as of_panel
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


def between(page: str, name: str) -> str:
    begin, end = harness.marks(name)
    return page.partition(begin)[2].partition(end)[0].strip("\n")


@pytest.mark.parametrize(
    ("result", "render", "name"),
    [
        ("baselines/result.json", lambda found: baselines.tables(found)["noisy"], "noisy"),
        ("baselines/result.json", lambda found: baselines.tables(found)["single"], "single"),
        ("offline/result.json", fresh_table, harness.MADE),
        ("chat/races.json", lambda found: racing.table(of_chat.NAMES, found["races"]), racing.MADE),
        ("chat/result.json", of_chat.page, harness.MADE),
        ("panel/result.json", of_panel.tables, harness.MADE),
        ("paper/result.json", lambda found: paper_run.tables(found["runs"])[1], harness.MADE),
        (
            "systems/result.json",
            lambda found: systems_run.page(systems_run.recorded(ROOT / "systems")),
            "systems",
        ),
        ("verdict/result.json", verdict_run.tables, "tables"),
        ("verdict/off_policy.json", off_policy.gain_table, "off-policy"),
        ("verdict/off_policy_values.json", off_policy.values_table, "off-policy values"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_page_is_made_of_its_result(result: str, render: Callable[[Found], str], name: str) -> None:
    page = (ROOT / result).with_name("README.md").read_text(encoding="utf-8")
    made = render(json.loads((ROOT / result).read_text(encoding="utf-8")))
    assert made == between(page, name)


def test_the_table_of_the_guide_is_made_of_the_panel() -> None:
    runs = json.loads((ROOT / "panel/result.json").read_text(encoding="utf-8"))["runs"]
    page = of_panel.GUIDE.read_text(encoding="utf-8")
    assert between(page, of_panel.OF_GUIDE) == of_panel.advice(runs)
