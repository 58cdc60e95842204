"""Say which of two digits is larger, to messages."""

from __future__ import annotations

import random
from typing import Any

TRAIN = 60  # of the 90 questions


def rows(rng: random.Random) -> dict[str, list[dict[str, Any]]]:
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    rng.shuffle(pairs)
    questions = []
    for a, b in pairs:
        message = {"role": "user", "content": f"{a} or {b}?"}
        questions.append({"prompt": [message], "answer": str(max(a, b))})
    return {"prompts.jsonl": questions[:TRAIN], "held_out.jsonl": questions[TRAIN:]}
