"""User-facing errors and warnings, and the removal of secrets and terminal escapes from all output."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from urllib.parse import quote

REDACTED = "(redacted)"
SHORTEST, SHORTEST_WORD = 6, 8  # minimum lengths: removing "secret" would garble texts and hide nothing
_KEYS = tuple(f"{kind}{joint}key" for kind in ("api", "access", "private", "secret") for joint in ("", "_"))
_VARIABLES = ("secret", "passwd", "password", "credential", "credentials", "token", *_KEYS)
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;"})
_secrets: set[str] = set()
# Bidirectional control characters, which reorder the text that follows.
DIRECTIONS = "\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069"
_CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{DIRECTIONS}]")


def remember_secret(value: str | None) -> None:
    """Make `without_secrets` remove this value from now on, whether as text, in JSON, in a URL or in HTML."""
    if value is None or value in _secrets or len(value) < (SHORTEST_WORD if value.isalpha() else SHORTEST):
        return
    _secrets.update((value, json.dumps(value)[1:-1], quote(value, safe=""), value.translate(_HTML)))
    if value.startswith("Bearer "):  # a server may echo the key alone
        remember_secret(value.removeprefix("Bearer "))


def without_secrets(text: str) -> str:
    """Redact secrets in `text`: those of the configuration, and the values of environment variables that are
    named as secrets (HF_TOKEN, WANDB_API_KEY, AGRO_TOKEN, …), unless they are paths or numbers."""
    for name in os.environ:
        value = os.environ.get(name, "") if name.lower().endswith(_VARIABLES) else ""
        if not (value.isdecimal() or value.startswith("/")):
            remember_secret(value)
    for secret in sorted(_secrets, key=len, reverse=True):  # one may be a prefix of another
        text = text.replace(secret, REDACTED)
    return text


def visible(text: str) -> str:
    """Redact secrets in `text`, and escape control characters, lone surrogates and direction marks, such as
    \\x1b or \\u202e.

    Newlines and tabs are kept.
    """
    return _CONTROL.sub(_escaped, without_secrets(text))


def _escaped(match: re.Match[str]) -> str:
    c = match[0]
    return c.encode("unicode_escape").decode() if c.isascii() else f"\\u{ord(c):04x}"


class Refused(ValueError):
    """The request, the configuration or the data can't be used as they are.

    The message says what was expected, what was given, which record, and what to do. The command line prints
    it without a traceback and exits with 2.
    """

    def __str__(self) -> str:
        return without_secrets(super().__str__())


def refuse(problems: Mapping[str, object], begin: str = "", end: str = "") -> None:
    """Raise `Refused` for the first problem whose value is true, with its text between `begin` and `end`."""
    for problem, applies in problems.items():
        if applies:
            raise Refused(f"{begin}{problem}{end}")


class Unwritable(Refused):
    """The disk is full, or a file or folder is read-only. Earlier writes are intact."""


class Lost(Refused):
    """The connection to a database was lost, and with it the writes of the open transaction."""


class AgroWarning(UserWarning):
    """A setting was skipped or a figure can't be trusted; the run continues."""

    def __str__(self) -> str:
        return without_secrets(super().__str__())


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM: a checkpoint is written, and the run can be resumed."""
