"""Build the site: `python site/build.py`, or `make docs`.

It is written to build/docs/VERSION, beside those of other versions that lie there. build/docs/index.html
leads to this one, also without a server.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
REDIRECT = """<!DOCTYPE html>
<meta http-equiv="refresh" content="0; url={0}/index.html"><a href="{0}/index.html">{0}</a>
"""


def version() -> str:
    """`__version__`, without importing the library."""
    found: str = runpy.run_path(str(ROOT / "agro/io/version.py"))["__version__"]
    return found


def pages_for_models(root: Path, nav: list[dict[str, Any]], level: int = 2) -> str:
    """The entries of llms.txt: each page of the navigation with its headings."""
    text = ""
    for entry in nav:
        [(title, value)] = entry.items()
        if isinstance(value, list):
            text += f"\n{'#' * level} {title}\n\n{pages_for_models(root, value, level + 1)}"
            continue
        lines = (root / "docs" / value).read_text(encoding="utf-8").splitlines()
        headings = "; ".join(line.removeprefix("## ") for line in lines if line.startswith("## "))
        text += f"- [{title}]({value})" + (f": {headings}\n" if headings else "\n")
    return text


def write_for_models(root: Path, target: Path) -> None:
    """llms.txt, which lists the pages for language models, and the pages' sources that it names."""
    # Tags such as !!python/name stand beside the navigation: the base loader reads them as text.
    settings = yaml.load((root / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    pages = pages_for_models(root, settings["nav"])
    head = f"# {settings['site_name']}\n\n> {settings['site_description']}\n"
    (target / "llms.txt").write_text(f"{head}\n{pages}", encoding="utf-8")
    for page in (root / "docs").rglob("*.md"):
        shutil.copy(page, target / page.relative_to(root / "docs"))


def build(root: Path, out: Path) -> Path:
    """The site of the project in `root`, as a folder of its version in `out`. A warning ends it."""
    program = Path(sys.executable).with_name("zensical")
    subprocess.run([program, "build", "--strict", "--clean"], cwd=root, check=True, stderr=subprocess.STDOUT)
    target = out / version()
    shutil.rmtree(target, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    shutil.move(root / "build/site", target)
    (target / "404.html").unlink()  # its links begin at the root of a server, where the site doesn't lie
    write_for_models(root, target)
    versions = sorted((p.name for p in out.iterdir() if (p / "index.html").exists()), reverse=True)
    (out / "versions.js").write_text(f"window.VERSIONS = {json.dumps(versions)};\n", encoding="utf-8")
    (out / "index.html").write_text(REDIRECT.format(version()), encoding="utf-8")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(prog="python site/build.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/docs")
    args = parser.parse_args()
    print(build(ROOT, args.out))


if __name__ == "__main__":
    main()
