"""Texts that Python's own decoder fails on in other ways than by `ValueError`."""

from __future__ import annotations

import pytest

from agro.io.strictjson import loads


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * 5_000 + "]" * 5_000, '{"a":' * 5_000 + "1" + "}" * 5_000]
)
def test_what_is_nested_too_deeply_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        loads(text)
