"""Guess a digit between two others in at most three turns."""

from __future__ import annotations

import random
from typing import Any

NARROWEST = 3
HELD_OUT = 40  # of the 168 pairs of a range and a secret


def rows(rng: random.Random) -> dict[str, list[dict[str, Any]]]:
    prompts = []
    for low in range(10):
        for high in range(low + NARROWEST, 10):
            for secret in range(low, high + 1):
                ranged = f"{low}-{high}:"
                prompts.append({"prompt": ranged, "secret": secret, "prompt_id": f"{ranged}{secret}"})
    rng.shuffle(prompts)
    return {"prompts.jsonl": prompts[HELD_OUT:], "held_out.jsonl": prompts[:HELD_OUT]}
