"""The documentation's pages, and what stands in them: code blocks, and words in backticks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(DOCS / f"{n}.md" for n in ("index", "metrics", "peers", "scaling")),
    *sorted((DOCS / "guide").glob("*.md")),
    *sorted((ROOT / "skills").glob("*/SKILL.md")),
]
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")


@dataclass(frozen=True)
class Block:
    where: str  # FILE:LINE
    language: str
    file: str  # the name of the file that it shows, or nothing
    text: str
    not_run: str  # why, or nothing

    @property
    def commands(self) -> list[str]:
        """The lines that start with `agro` or `cd`, or these after `$ `; continued lines joined."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        return [
            line.removeprefix("$ ") for line in joined.splitlines() if re.match(r"(\$ )?(agro|cd) ", line)
        ]

    @property
    def outputs(self) -> list[str] | None:
        """What the page says that each command prints; None where it doesn't say."""
        parts = re.split(r"^\$ .*\n", self.text, flags=re.MULTILINE)
        return parts[1:] if self.text.startswith("$ ") else None


def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    """Fenced and indented code. A first line `# NAME` or title="NAME" makes it a file."""
    before = ""
    for token in tokens(page):
        is_code = token.type in ("fence", "code_block")
        if is_code and not token.content.startswith("```"):  # the first page's tabs, of files that one has
            assert token.map is not None
            title = re.search(r'title="([^"]+)"', token.info)
            first, _, rest = token.content.partition("\n")
            named = re.fullmatch(r"# ([\w./-]+\.(?:py|jsonl|toml))", first)
            reason = NOT_RUN.search(before)
            yield Block(
                f"{page.relative_to(ROOT)}:{token.map[0] + 1}",
                token.info.split()[0] if token.info.split() else "",
                title[1] if title else named[1] if named else "",
                rest if named else token.content,
                reason[1] if reason else "",
            )
        before = token.content if token.type == "html_block" else ""


def quoted(page: Path) -> Iterator[tuple[str, str]]:
    """(FILE:LINE, text) of everything in backticks."""
    for token in tokens(page):
        for child in token.children or ():
            if child.type == "code_inline":
                line = token.map[0] + 1 if token.map else 0
                yield f"{page.relative_to(ROOT)}:{line}", child.content
