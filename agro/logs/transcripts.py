"""Dialogs that are written as one text, each turn after the name of who speaks."""

from __future__ import annotations

import re
from typing import Any

from agro.logs.column_names import ASSISTANTS, USERS, plain

LABEL = re.compile(r"(?m)^[ \t>*\[]*([^\W\d_][\w '()-]{0,30}?)[\]*]*[ \t]*:(?=\s|\*)\**[ \t]*")


def turns_in(value: Any) -> Any:
    """The messages of such a text, which begins with a user or the assistant and has both; another value as
    it is. A line that begins with another name belongs to what is said."""
    if not isinstance(value, str):
        return value
    labels = [(label, role) for label in LABEL.finditer(value) if (role := _role(label[1])) is not None]
    if {role for _, role in labels} != {"user", "assistant"} or value[: labels[0][0].start()].strip():
        return value
    ends = [label.start() for label, _ in labels[1:]] + [len(value)]
    return [
        {"role": role, "content": value[label.end() : end].strip()}
        for (label, role), end in zip(labels, ends, strict=True)
    ]


def _role(name: str) -> str | None:
    said = set(re.findall(r"[^\W_]+", plain(name)))
    if said & ASSISTANTS and not said & USERS:
        return "assistant"
    return "user" if said & USERS else None
