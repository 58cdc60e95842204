"""The site builds without a warning, asks nobody for anything, and leads through the guide in its order."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT

from agro.io.version import __version__

sys.path.insert(0, str(ROOT / "tests/pages"))
from browser import Browser, find

pytest.importorskip("zensical", reason="the site needs zensical: pip install '.[docs]'")

# How often the results of a search mark its word; they are in a shadow tree.
MARKED = """
[...document.querySelectorAll('*')].filter(e => e.shadowRoot)
  .flatMap(e => [...e.shadowRoot.querySelectorAll('u')])
  .filter(e => /^staleness$/i.test(e.textContent)).length
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A version beside an earlier one, built from a copy, because two builds at once share a folder."""
    root = tmp_path_factory.mktemp("root")
    for name in ("docs", "site", "agro"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", root)
    earlier = root / "build/docs/0.0.9"
    earlier.mkdir(parents=True)
    (earlier / "index.html").touch()
    built = subprocess.run([sys.executable, "site/build.py"], cwd=root, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return Path(built.stdout.splitlines()[-1])


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^"'>]+|url\(["']?(?:https?:)?//[^)]+|@import[^;]*//[^;]+"""
    )
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 20
    assert [(p.name, x) for p in pages for x in loads.findall(p.read_text(encoding="utf-8"))] == []


def test_versions_lie_beside_each_other(site: Path) -> None:
    assert site.name == __version__
    versions = (site.parent / "versions.js").read_text(encoding="utf-8")
    assert versions == f'window.VERSIONS = ["{__version__}", "0.0.9"];\n'
    assert f"url={__version__}/index.html" in (site.parent / "index.html").read_text(encoding="utf-8")


def test_language_models_have_a_list_of_the_pages(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[.+\]\((.+)\)", text, re.MULTILINE)
    assert {f"guide/{page.name}" for page in (ROOT / "docs/guide").glob("*.md")} <= set(listed)
    assert all((site / page).exists() for page in listed)


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    if find() is None:
        pytest.skip("no Chromium in PATH (Debian: apt-get install chromium)")
    found = Browser(find() or "")
    yield found
    found.close()


def test_a_copy_button_copies_commands_without_their_output(site: Path, browser: Browser) -> None:
    browser.open(site / "guide/getting-started.html")
    copied = browser.ask(
        "(() => { const blocks = [...document.querySelectorAll('pre')];"
        "const block = blocks.find(e => /train recipe/.test(e.innerText));"
        "const button = block.querySelector('[data-clipboard-target]') ||"
        "block.parentElement.querySelector('[data-clipboard-target]');"
        "button.click(); return button.dataset.clipboardText; })()"
    )
    assert copied == ("agro init first --task digits\ncd first\nagro train recipe.toml --out runs/first")


@pytest.mark.parametrize("width", [390, 1300])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_page_fits_every_window(site: Path, browser: Browser, scheme: str, width: int) -> None:
    browser.open(site / "index.html", scheme=scheme, width=width)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask("document.querySelectorAll('.hero pre').length") == 3
    assert browser.ask("document.querySelectorAll('.cards > div').length") == 3
    assert browser.complaints == []


def test_search_works_from_a_folder(site: Path, browser: Browser) -> None:
    """The worker of the search answers, and nothing is asked for elsewhere."""
    browser.open(site / "guide/concepts.html")
    browser.ask("document.querySelector('.md-search__button').click()")
    browser.call("Input.insertText", text="staleness")
    deadline = time.monotonic() + 60
    while not browser.ask(MARKED) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert browser.ask(MARKED) > 3
    asked = [url for url in browser.requests.values() if not url.startswith(("file:", "data:"))]
    assert (asked, browser.complaints) == ([], [])


def test_the_guide_leads_from_page_to_page(site: Path) -> None:
    in_order = (ROOT / "docs/index.md").read_text(encoding="utf-8").split("## Read in this order")[1]
    listed = re.findall(r"\]\(guide/([\w-]+)\.md\)", in_order)
    assert sorted(f"{name}.md" for name in listed) == sorted(p.name for p in (ROOT / "docs/guide").iterdir())
    for name, following in itertools.pairwise(listed):
        page = (site / f"guide/{name}.html").read_text(encoding="utf-8")
        assert re.search(rf'rel="next" href="\./{following}\.html"', page), (
            f"{name} should lead to {following}"
        )


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("agro", "agro.Sample"),
        ("agro", "agro.RunConfig.load"),
        ("objectives", "agro.objectives.evaluate"),
        ("objectives", "agro.objectives.methods.consistency.agro"),
        ("store", "agro.store.Store.draw"),
        ("samplers", "agro.samplers.Sampler.sample"),
        ("rewards", "agro.rewards.Reward.score"),
        ("train", "agro.api.reporting_trainer.Trainer.run"),
        ("train", "agro.train.monitors.Monitor.after"),
        ("evaluate", "agro.rollout.evaluate.heldout"),
        ("policy", "agro.models.policy.Policy.load"),
        ("reference", "agro.models.reference.load_reference"),
    ],
)
def test_the_reference_has_what_users_call(site: Path, page: str, name: str) -> None:
    assert f'id="{name}"' in (site / f"api/{page}.html").read_text(encoding="utf-8")
