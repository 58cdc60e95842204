"""Makes docs/formats.md from the formats and their examples: `python tests/formats/formats_page.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from example import Example
from test_formats import EXAMPLES, load

from agro.logs.format_table import FORMATS
from agro.logs.protocol import Format
from agro.store import Store

PAGE = Path(__file__).parents[2] / "docs/formats.md"
HEAD = """# Formats

Made by `python tests/formats/formats_page.py`. `agro import` reads these formats without options; it
recognizes the format, or `--format` names it. The last column counts the imported examples of
`tests/formats`. `agro formats NAME` says which programs write a format, and in which versions.
`data.prompts` and `--prompts` read formats of prompts.

| format | what it is | holds | carries besides texts | examples: samples, groups, pairs |
|---|---|---|---|---|
"""


def page() -> str:
    """The page, as Markdown."""
    return HEAD + "".join(_row(format) for format in FORMATS.values())


def _row(format: Format) -> str:
    examples = [e for e in EXAMPLES if e.format == format.name and not e.is_case]
    found = [_counts(example) for example in examples]
    totals = ", ".join(str(sum(counts)) for counts in zip(*found)) or "–"
    holds = "it can't be imported" if format.kind == "nothing" else format.kind
    carries = ", ".join(format.carries) or "–"
    return f"| `{format.name}` | {format.title} | {holds} | {carries} | {totals} |\n"


def _counts(example: Example) -> tuple[int, int, int]:
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db") as store:
        report = load(store, example, example.make(Path(folder) / "log"))
        return report.samples, len(store.groups()), report.pairs


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
