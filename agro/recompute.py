"""Gradient checkpointing for the length of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def recomputing(model: Any, active: bool) -> Iterator[None]:
    """Gradient checkpointing, switched off again at the end: it excludes the cache of a sampler."""
    if not active:
        yield
        return
    newer = hasattr(model, "activation_checkpointing_enable")
    kind = "activation" if newer else "gradient"
    getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    try:
        yield
    finally:
        getattr(model, f"{kind}_checkpointing_disable")()
