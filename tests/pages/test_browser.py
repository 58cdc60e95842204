"""The pages in a headless Chromium: no requests, no scripts, readable light and dark, narrow and wide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from browser import CONTRAST, Browser
from made_up_run import CONFIG, configure, rewrite, write_run
from markupsafe import escape
from writing import write_rows

from agro.pages.run import report
from agro.pages.run.compare import compare, write
from agro.store import Store
from agro.types import Sample

RUN = "0123456789abcdef"  # of the made-up configuration
EVIL = "<script>window.HIT=1</script><img src=x onerror='window.HIT=1'>\"'&<svg onload=window.HIT=1>"
VISIBLE = "document.body.innerText"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hostile text wherever text comes from outside."""
    folder = write_run(tmp_path_factory.mktemp("browser") / "run <b>")
    first, second, third = CONFIG["phases"]
    phases = [first | {"name": EVIL}, second | {"objective": second["objective"] | {EVIL: EVIL}}, third]
    configure(folder, versions={EVIL: EVIL}, phases=phases, data__prompts=EVIL)
    configure(folder, policy__reference_model=EVIL, policy__reference="model")
    measured = {"reward_parts": {EVIL: 0.5, "b": 1.0}, "dropped": 1, "dropped_reasons": {EVIL: 1}}
    rewrite(folder, lambda row: row | measured | {"phase": EVIL if row["phase"] == "sft" else row["phase"]})
    answered = {
        "prompt_id": EVIL,
        "prompt": EVIL,
        "response": EVIL,
        "reward": 1.0,
        "answer": EVIL,
        "observations": [EVIL],
    }
    write_rows(folder / "held_out.jsonl", [{"step": 220, "responses": [answered]}])
    meta = {"answer": EVIL, "finish": "length"}
    with Store.open(folder / "store.db") as store, store.transaction():
        for step in range(1, 221):
            texts = [Sample(EVIL, EVIL + "x" * 300, reward=1.0, meta=meta, source=EVIL)]
            for i in range(3):
                spoken = {"tokens": np.arange(i + 2), "action": np.arange(i + 2) > 0}
                texts.append(Sample(f"p{step}", f"r{i}", reward=i / 3, **spoken))
            store.draws.record(RUN, step, store.append(texts, run=RUN, step=step))
        logged = Sample("q", "r", reward=0.1, source=EVIL, role="log")
        store.draws.record(RUN, 220, store.append([logged]) * 3)
    return report(folder)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folders = [tmp_path_factory.mktemp("compare") / f"{EVIL.replace('/', '')[:40]}{i}" for i in range(2)]
    for i, folder in enumerate(folders):
        configure(write_run(folder), sampler__stop=[EVIL, str(i)])
    return Path(write(compare(folders), folders[0].parent)["files"][-1])


@pytest.fixture(params=["page", "comparison"])
def either(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_and_asks_for_nothing(browser: Browser, either: Path, scheme: str, width: int) -> None:
    browser.open(either, scheme=scheme, width=width)
    browser.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    contrast, text = browser.ask(CONTRAST)
    assert contrast >= 4.5, text  # WCAG 2.2, level AA
    assert (list(browser.requests.values()), browser.blocked) == ([either.resolve().as_uri()], [])
    assert browser.complaints == []
    assert browser.ask("typeof window.HIT") == "undefined"


def test_light_and_dark_differ(browser: Browser, either: Path) -> None:
    seen = []
    styles = (("body", "backgroundColor"), ("body", "color"), ("svg text", "fill"))
    for scheme in ("light", "dark"):
        browser.open(either, scheme=scheme)
        style = "getComputedStyle(document.querySelector('{}')).{}"
        seen.append([browser.ask(style.format(*each)) for each in styles])
    assert all(light != dark for light, dark in zip(*seen, strict=True))
    assert seen[0][0] == "rgb(255, 255, 255)"


def test_hostile_text_shows_as_text(browser: Browser, page: Path, comparison: Path) -> None:
    browser.open(page)
    browser.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    shown = browser.ask(VISIBLE)
    # Phase twice (the tables), option, dropped, source, prompt, response, answer, prompts, reference,
    # versions twice.
    assert shown.count("<script>window.HIT=1</script>") >= 12
    # Of the page itself: the script that shows responses, and their data.
    assert browser.ask("document.scripts.length + document.images.length") == 2
    assert browser.ask("typeof window.HIT") == "undefined"
    browser.open(comparison)
    assert "<script>window.HIT=1</script>" in browser.ask(VISIBLE)
    assert browser.ask("document.scripts.length + document.images.length") == 0


@pytest.mark.parametrize("width", [390, 1400])
def test_the_axis_is_chosen_without_a_script(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    visible = "[...document.querySelectorAll('.tabs > div')].map(e => e.offsetHeight > 100)"
    label = (
        "[...document.querySelectorAll('.tabs > div svg')]"
        ".filter(e => e.getClientRects().length).map(e => e.textContent).join('|')"
    )
    assert browser.ask(visible) == [True, False]
    for i, axis in enumerate(["step", "nats per response"]):
        browser.ask(f"document.querySelectorAll('.tabs > label')[{i}].click()")
        assert browser.ask(visible) == [j == i for j in range(2)]
        assert axis in browser.ask(label)
        assert "|" not in browser.ask(label)  # the wide or the narrow one
    for kind in ("keyDown", "keyUp"):
        browser.ask("document.querySelector('.tabs > input:checked').focus()")
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key="ArrowLeft", code="ArrowLeft", windowsVirtualKeyCode=37
        )
    assert browser.ask(visible) == [True, False]


def test_these_checks_see_what_they_look_for(browser: Browser, tmp_path: Path) -> None:
    """A page that does all that ours doesn't."""
    path = tmp_path / "bad.html"
    wide = "<p style='width:2000px;color:#bbb;background:#fff'>wide</p>"
    path.write_text(
        f"<!DOCTYPE html>{wide}<img src='http://example.invalid/x.png' onerror='window.HIT=1'>"
        "<script>console.log(1)</script>"
    )
    browser.open(path)
    assert "http://example.invalid/x.png" in browser.requests.values()
    assert len(browser.complaints) >= 2  # what was logged, and what couldn't be loaded
    assert browser.ask("window.HIT") == 1
    assert browser.ask(CONTRAST)[0] == pytest.approx(1.92, abs=0.01)  # of #bbb on #fff
    assert browser.ask("document.documentElement.scrollWidth") > 1400


def test_the_policy_of_the_page_stops_what_would_slip_through(browser, page, tmp_path) -> None:
    """Were a response not escaped, the content security policy would still run and load nothing."""
    path = tmp_path / "slipped.html"
    escaped = str(escape(EVIL))
    text = page.read_text(encoding="utf-8")
    assert escaped in text
    path.write_text(text.replace(escaped, EVIL), encoding="utf-8")
    browser.open(path)
    assert browser.ask("document.images.length") > 0
    assert browser.ask("typeof window.HIT") == "undefined"
    assert list(browser.requests.values()) == [path.as_uri()]
    assert set(browser.blocked) == {path.with_name("x").as_uri()}
