"""Make the pictures of the guide anew: `python site/pictures.py`, or `make pictures`. It needs Chromium.

It trains the task of `agro init --task digits` in build/pictures, where the run doesn't exist yet (a minute),
and photographs its page and the terminal.
"""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK, OUT = ROOT / "build/pictures", ROOT / "docs/pictures"
LARGEST = 150_000  # bytes of a picture
MARGIN = 16  # pixels below what it shows
TERMINAL = """<!DOCTYPE html><meta charset="utf-8"><style>
body { margin: 0; background: #16181c; }
pre { margin: 0; padding: 14px 18px; color: #d7dade;
      font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
b { color: #56b4e9; font-weight: 400; }
</style><pre>"""

sys.path.insert(0, str(ROOT / "tests/pages"))
from browser import Browser, find  # noqa: E402


def agro(*arguments: object, cwd: Path) -> str:
    """What a command prints, on both streams."""
    command = [sys.executable, "-m", "agro", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout


def train(task: Path) -> None:
    """The run of the pictures, and its log."""
    if not task.exists():
        agro("init", task, "--task", "digits", cwd=ROOT)
    log = task / "first.log"
    if not log.exists():
        log.write_text(agro("train", "recipe.toml", "--out", "runs/first", cwd=task))
    agro("report", "runs/first", cwd=task)


def terminal(task: Path) -> Path:
    """A page that looks like the terminal after a run: what was measured, the verdict, the last lines."""
    lines = (task / "first.log").read_text(encoding="utf-8").splitlines()
    evaluated = [line for line in lines if "held-out" in line and line.startswith("train ")]
    shown = ["<b>$</b> agro train recipe.toml --out runs/first", *map(html.escape, evaluated)]
    said = [line for line in lines if line.startswith(("Better", "Worse", "Not shown"))]
    shown += map(html.escape, said + lines[-2:])
    path = task / "terminal.html"
    path.write_text(TERMINAL + "\n".join(shown) + "</pre>\n", encoding="utf-8")
    return path


def photograph(browser: Browser, page: Path, name: str, scheme: str, width: int, last: str) -> None:
    """The top of a page, to the end of the first visible element `last`, a CSS selector."""
    browser.open(page, scheme=scheme, width=width)
    visible = f"[...document.querySelectorAll('{last}')].find(e => e.getClientRects().length)"
    end = browser.ask(f"{visible}.getBoundingClientRect().bottom")
    area = {"x": 0, "y": 0, "width": width, "height": round(end) + MARGIN, "scale": 1}
    path = OUT / f"{name}.png"
    browser.picture(path, area)
    if path.stat().st_size > LARGEST:
        sys.exit(f"{path}: {path.stat().st_size} bytes, expected at most {LARGEST}")
    print(path.relative_to(ROOT), path.stat().st_size)


def main() -> None:
    program = find()
    if program is None:
        sys.exit("expected a Chromium in PATH (Debian: apt-get install chromium)")
    task = WORK / "digits"
    WORK.mkdir(parents=True, exist_ok=True)
    OUT.mkdir(exist_ok=True)
    train(task)
    browser = Browser(program)
    for scheme in ("light", "dark"):
        photograph(browser, task / "runs/first/report.html", f"page-{scheme}", scheme, 960, "figure")
    photograph(browser, terminal(task), "terminal", "dark", 1060, "pre")
    browser.close()


if __name__ == "__main__":
    main()
