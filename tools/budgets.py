"""How large the house is, beside what it may be: `python tools/budgets.py`, from a checkout."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tools/budgets.toml"
MAIN_WAY = (
    *("types", "io", "stats", "config", "models", "objectives"),
    *("rewards", "store", "rollout", "train", "runs"),
)
BRANCHES = (
    *(ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert),
    *(ast.match_case, ast.AsyncFor),
)


def files(*folders: str, pattern: str = "*.py") -> Iterator[Path]:
    for folder in folders:
        yield from (ROOT / folder).rglob(pattern)


def lines(*folders: str) -> int:
    return sum(file.read_text(encoding="utf-8").count("\n") for file in files(*folders))


def words(*pages: Path) -> int:
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def branches(folder: str) -> int:
    """Branches of functions, 1 for each function, of a hundred of their lines."""
    branching = length = 0
    for file in files(folder):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                length += node.end_lineno - node.lineno + 1
                inner = list(ast.walk(node))
                branching += 1 + sum(isinstance(part, BRANCHES) for part in inner)
                branching += sum(len(part.values) - 1 for part in inner if isinstance(part, ast.BoolOp))
    return round(100 * branching / length)


def sizes() -> dict[str, int]:
    """What is counted, by the names of tools/budgets.toml."""
    guide = list(files("docs/guide", pattern="*.md"))
    beside = [path.name for path in ROOT.glob("agro_*") if path.is_dir()]
    configuration = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    commands = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    return {
        "lines.main_way": lines(*(f"agro/{room}" for room in MAIN_WAY)),
        "lines.agro": lines("agro"),
        "lines.packages": lines("agro", *beside),
        "lines.tests": lines("tests"),
        "lines.reproductions": lines("reproductions", "benchmarks"),
        "modules.agro": len(list(files("agro"))),
        "branches.agro": branches("agro"),
        "keys.configuration": len(re.findall(r"^\| `[\w.]+` \|", configuration, re.MULTILINE)),
        "commands.agro": len(re.findall(r"^## agro ", commands, re.MULTILINE)),
        "words.guide": words(*guide),
        "pages.guide": len(guide),
        "words.reproductions": words(*files("reproductions", pattern="*.md")),
    }


def budgets() -> dict[str, dict[str, int]]:
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {f"{kind}.{name}": budget for kind, named in table.items() for name, budget in named.items()}


def main() -> int:
    found, over = sizes(), 0
    print(f"{'':24}{'is':>9}{'may be':>9}{'goal':>9}")
    for name, budget in budgets().items():
        mark = "  more than it may be" if found[name] > budget["now"] else ""
        over += bool(mark)
        print(f"{name:24}{found[name]:9,}{budget['now']:9,}{budget['goal']:9,}{mark}")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
