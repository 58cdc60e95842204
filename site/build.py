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

ROOT = Path(__file__).parents[1]
REDIRECT = """<!DOCTYPE html>
<meta http-equiv="refresh" content="0; url={0}/index.html"><a href="{0}/index.html">{0}</a>
"""


def version() -> str:
    """`__version__`, without importing the library."""
    found: str = runpy.run_path(str(ROOT / "agro/io/version.py"))["__version__"]
    return found


def build(root: Path, out: Path) -> Path:
    """The site of the project in `root`, as a folder of its version in `out`. A warning ends it."""
    program = Path(sys.executable).with_name("zensical")
    subprocess.run([program, "build", "--strict", "--clean"], cwd=root, check=True, stderr=subprocess.STDOUT)
    target = out / version()
    shutil.rmtree(target, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    shutil.move(root / "build/site", target)
    (target / "404.html").unlink()  # its links begin at the root of a server, where the site doesn't lie
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
