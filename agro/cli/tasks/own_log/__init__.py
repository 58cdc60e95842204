"""Sort four digits, from the log of a careless writer."""

from __future__ import annotations

import random
from typing import Any

DIGITS = "0123456789"
PROMPTS, HELD_OUT, RESPONSES = 2000, 256, 4
SLIP = 0.2  # probability that the writer writes a digit at random


def rows(rng: random.Random) -> dict[str, list[dict[str, Any]]]:
    numbers = [f"{number:04}" for number in range(10_000)]
    rng.shuffle(numbers)
    log = []
    for number in numbers[:PROMPTS]:
        for _ in range(RESPONSES):
            text = "".join(rng.choice(DIGITS) if rng.random() < SLIP else d for d in sorted(number))
            right = text == "".join(sorted(number))
            log.append({"question": f"{number}>", "output": text, "score": float(right)})
    held_out = numbers[PROMPTS : PROMPTS + HELD_OUT]
    prompts = [{"prompt": f"{number}>", "answer": "".join(sorted(number))} for number in held_out]
    return {"log.jsonl": log, "held_out.jsonl": prompts}
