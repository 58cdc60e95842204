"""Secrets in options: `env:NAME` reads an environment variable; literal secrets are never stored."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from agro.errors import REDACTED, Refused, remember_secret

_VARIABLE = re.compile(r"env:([A-Za-z_]\w*)")
_NAMES = re.compile(r"(?i)secret|passw|credential|(api|access|private)[_-]?key|auth(?!ors?$)|token$")
_VALUES = re.compile(
    r"(?<![\w/.-])("  # not within a path
    r"sk[-_](?=[\w-]*\d)[\w-]{8,}|hf_[^\W_]{16,}|gh[opsu]_[^\W_]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{8,}|A[KS]IA[A-Z0-9]{12,}|AIza[\w-]{16,}|eyJ[\w-]{8,}\.|Bearer [\w.~+/-]{16,}"
    r"|-----BEGIN )"
    r"|://[^/\s:@]+:[^/\s@]+@"  # the password in an address
)


def redacted(value: Any, name: str = "") -> Any:
    """Redact texts in nested values that look like secrets, by their key or by their form."""
    if isinstance(value, Mapping):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item, name.removesuffix("s")) for item in value]
    if not isinstance(value, str) or not value or _VARIABLE.fullmatch(value):
        return value
    is_special = value.startswith("<")  # such as eos_token = "</s>"
    return REDACTED if _VALUES.search(value) or (_NAMES.search(name) and not is_special) else value


def from_environment(value: Any, location: str) -> Any:
    """Replace `env:NAME` in nested values by the environment variable; raises `Refused` if it isn't set.

    These values, and any that look like secrets, are redacted in all messages, logs and pages from now on.
    """
    if isinstance(value, Mapping):
        return {key: from_environment(item, f"{location}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [from_environment(item, location) for item in value]
    variable = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if variable is None:
        if redacted(value, location.rpartition(".")[2]) == REDACTED != value:
            remember_secret(value)
        return value
    if variable[1] not in os.environ:
        raise Refused(f"{location}: expected {variable[1]} in the environment, but it isn't set; export it")
    remember_secret(os.environ[variable[1]])
    return os.environ[variable[1]]


def check_texts(value: Any, location: str = "") -> None:
    """Raise `Refused` for text that can't be written to files, and for a secret redacted in a config.json."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    for key, item in items:
        check_texts(key, location)
        check_texts(item, f"{location}.{key}".removeprefix("."))
    if isinstance(value, str) and value.encode("utf-8", "replace").decode() != value:
        raise Refused(f"{location}: expected Unicode text, got half of a surrogate pair in {value!r:.80}")
    if value == REDACTED:
        raise Refused(
            f"{location}: this run's value looked like a secret and wasn't stored. What to do: give it again "
            f"({location}=VALUE); in new runs give env:NAME, whose value is read from the environment"
        )
