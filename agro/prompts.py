"""Prompt files: JSONL, gzipped or not, one object a line with `prompt` and whatever the reward reads."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.strictjson import loads
from agro.types import Prompt


def load_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file; `prompt_id` (or `id`) names the group, else a hash of the prompt does.

    Raises `Refused` with FILE:LINE for a line that isn't such an object, and for prompts that stand twice.
    """
    path = Path(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: can't be read as a file of prompts: {error}") from None
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = loads(line)
        except ValueError as error:
            raise Refused(f"{where}: expected one JSON object a line: {error}") from None
        if not isinstance(row, dict) or "prompt" not in row:
            raise Refused(f'{where}: expected an object with "prompt", got {line:.80}')
        columns: dict[str, Any] = {k: v for k, v in row.items() if k not in ("prompt", "prompt_id", "id")}
        name = row.get("prompt_id") if row.get("prompt_id") is not None else row.get("id")
        try:
            prompt = Prompt(row["prompt"], "" if name is None else str(name), columns)
        except Refused as error:
            raise Refused(f"{where}: {error}") from None
        if prompt.id in seen:
            raise Refused(
                f"{where}: this prompt stands in line {seen[prompt.id]} too (prompt_id {prompt.id}); keep one of them"
            )
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise Refused(f"{path}: expected at least one prompt, got none")
    return prompts
