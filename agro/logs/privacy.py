"""Drop fields, and redact secrets and addresses, so that they are never stored.

Both are applied to interchange records, before samples are made of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from agro.errors import Refused
from agro.logs.interchange import FIELDS

FieldPath = tuple[str, ...]
TOKEN_FIELDS = (  # fields that depend on the tokens of the texts
    *("tokens", "mask", "action", "tokenizer", "behavior_logp", "context_tokens", "token_reward"),
    *("kept", "kept_count"),
)
_NAMES = ("prompt_id", "episode")  # ids, which have to stay distinct
_FIXED = ("role", "version", *TOKEN_FIELDS)  # fields without private text
_NEEDED = ("prompt", "response", "role")
PATTERNS = (  # kind, expression, replacement
    (
        "private key",
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[\s\S]*?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|[\s\S]*\Z)",
        "[private key]",
    ),
    ("bearer token", r"(?i:\b(bearer\s+))[A-Za-z0-9._~+/=-]{16,}", r"\1[bearer token]"),
    (
        "key",
        r"\b(?:sk-[A-Za-z0-9_-]{16,}|(?:AKIA|ASIA)[0-9A-Z]{16}\b|gh[pousr]_[A-Za-z0-9]{36,}"
        r"|github_pat_[A-Za-z0-9_]{22,}|glpat-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{30,}|xox[abprs]-[A-Za-z0-9-]{10,}"
        r"|AIza[0-9A-Za-z_-]{35}|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+)",
        "[key]",
    ),
    (
        "e-mail address",  # the lookbehind keeps the scan of a long text linear
        r"(?<![\w.%+-])[\w.%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*\.[A-Za-z]{2,24}\b",
        "[e-mail address]",
    ),
)


class Privacy:
    """Drops fields and redacts texts, and counts both.

    `drop`: fields of the record, dotted (`meta.user`). `redact`: whether keys and addresses (`PATTERNS`) are
    replaced. `patterns`: the user's regular expressions, whose matches become "[redacted]".
    """

    def __init__(self, drop: Sequence[str] = (), redact: bool = False, patterns: Sequence[str] = ()) -> None:
        self.dropped = Counter(dict.fromkeys(drop, 0))  # records that had the field
        self.redacted = Counter({f"pattern {text}": 0 for text in patterns})  # matches by kind
        self.tokens = 0  # records whose tokens were dropped because their text changed
        self._paths = {name: _path(name) for name in drop}
        self._rules = [(kind, re.compile(text), to) for kind, text, to in PATTERNS if redact]
        for text in patterns:
            try:
                expression = re.compile(text)
            except re.error as error:
                raise Refused(f"--redact-pattern {text}: expected a regular expression: {error}") from None
            if expression.match("") is not None:
                raise Refused(
                    f"--redact-pattern {text}: expected an expression that doesn't match the empty text"
                )
            self._rules.append((f"pattern {text}", expression, "[redacted]"))

    def apply(self, record: dict[str, Any]) -> dict[str, Any]:
        """A copy of the record without what must not be stored."""
        if not self._paths and not self._rules:
            return record
        result = record
        for name, path in self._paths.items():
            result, has_field = _without(result, path)
            self.dropped[name] += has_field
        if self._rules:
            redacted: dict[str, Any] = {}
            for name, value in result.items():
                if name in _FIXED:
                    redacted[name] = value
                elif name in _NAMES:
                    redacted[name] = self._name(value)
                else:
                    redacted[self._text(name)] = self._value(value)
            result = redacted
        changed = any(result.get(text) != record.get(text) for text in ("prompt", "response"))
        if changed and result.get("tokens") is not None:
            self.tokens += 1
            result = _without_tokens(result)
        return result

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, dict):
            return {self._text(str(key)): self._value(item) for key, item in value.items()}
        return value

    def _text(self, text: str) -> str:
        for kind, expression, to in self._rules:
            text, count = expression.subn(to, text)
            if count:
                self.redacted[kind] += count
        return text

    def _name(self, value: Any) -> Any:
        """The id, or its hash if there is something to redact, so that different ids stay different."""
        if not isinstance(value, str) or self._text(value) == value:
            return value
        return blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _path(name: str) -> FieldPath:
    path = tuple(name.split("."))
    if not all(path):
        raise Refused(f"--drop {name}: expected the name of a field, such as meta.user")
    if name in _NEEDED:
        raise Refused(f"--drop {name}: a record needs it; redact what is in it (--redact, --redact-pattern)")
    return path


def _without(record: dict[str, Any], path: FieldPath) -> tuple[dict[str, Any], bool]:
    """The record without a field, and whether it had it. `meta` also has the columns that aren't fields."""
    if path == ("tokens",) and record.get("tokens") is not None:
        return _without_tokens(record), True
    result, has_field = _removed(record, path)
    if path[0] == "meta" and len(path) > 1 and path[1] not in FIELDS:
        result, had_field = _removed(result, path[1:])
        has_field = has_field or had_field
    elif path[0] not in FIELDS:
        result, had_field = _removed(result, ("meta", *path))
        has_field = has_field or had_field
    return result, has_field


def _without_tokens(record: dict[str, Any]) -> dict[str, Any]:
    result = {name: value for name, value in record.items() if name not in TOKEN_FIELDS}
    if isinstance(result.get("version"), list):
        del result["version"]
    return result


def _removed(value: Any, path: FieldPath) -> tuple[Any, bool]:
    """The value without `path`, in all items of lists along it, and whether it was there."""
    if isinstance(value, list):
        both = list(map(partial(_removed, path=path), value))
        return [item for item, _ in both], any(has_field for _, has_field in both)
    if not isinstance(value, dict) or path[0] not in value:
        return value, False
    if len(path) == 1:
        return {key: item for key, item in value.items() if key != path[0]}, True
    inner, has_field = _removed(value[path[0]], path[1:])
    return {**value, path[0]: inner}, has_field
