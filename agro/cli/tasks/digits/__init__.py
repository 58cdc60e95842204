"""Sort three digits."""

from __future__ import annotations

import random
from typing import Any

TRAIN, HELD_OUT = 700, 256  # of the 1,000 prompts


def rows(rng: random.Random) -> dict[str, list[dict[str, Any]]]:
    numbers = [f"{number:03}" for number in range(1000)]
    rng.shuffle(numbers)
    prompts = [{"prompt": f"{number}>", "answer": "".join(sorted(number))} for number in numbers]
    return {"prompts.jsonl": prompts[:TRAIN], "held_out.jsonl": prompts[TRAIN : TRAIN + HELD_OUT]}
