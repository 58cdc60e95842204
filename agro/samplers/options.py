"""How to sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agro.errors import Refused


@dataclass(frozen=True)
class Sampling:
    """How to sample: the logits are divided by the temperature; then top-k, top-p, min-p, in this order, leave tokens out.

    Each works on the distribution that the one before left, as in transformers' `generate`; tokens that tie with the
    last one kept by top-k are kept as well.
    """

    temperature: float = 1.0  # 0: the likeliest token, greedily
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens until their probability reaches p; one at least
    min_p: float = 0.0  # keep tokens with at least this share of the likeliest one's probability
    max_new: int = 256  # tokens a response at most, the end token included
    stop: tuple[str, ...] = ()  # a response ends with the first of these texts, which isn't part of its text
    seed: int = 0
    batch: int = 64  # sequences decoded at once

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "a finite number, 0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 <= self.top_p <= 1, "a share from 0 to 1"),
            ("min_p", 0 <= self.min_p <= 1, "a share from 0 to 1"),
            ("max_new", self.max_new >= 1, "1 or more"),
            ("stop", isinstance(self.stop, tuple) and all(self.stop), "a tuple of texts that aren't empty"),
            ("batch", self.batch >= 1, "1 or more"),
        ):
            if not holds:
                raise Refused(f"sampling: {name}: expected {expected}, got {getattr(self, name)!r}")

    def before_stop(self, text: str) -> tuple[str, bool]:
        """The text up to the first stop text, and whether there is one."""
        cuts = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        return (text[: min(cuts)], True) if cuts else (text, False)

    def as_json(self) -> dict[str, Any]:
        """What stands in a sample's `sampling`."""
        return {**vars(self), "stop": list(self.stop)}
