"""Write the data of a recipe into a folder: `python make.py thumbs`, `python make.py pairs`.

A careless writer sorts four digits, and is right in about 4 answers of 10. People gave each answer
a thumb, or chose the better of two.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

DIGITS = "0123456789"
PROMPTS, HELD_OUT = 4000, 256
SLIP = 0.2  # probability that the writer writes a digit at random


def answer(number: str) -> str:
    return "".join(sorted(number))


def write_carelessly(number: str, rng: random.Random) -> str:
    return "".join(rng.choice(DIGITS) if rng.random() < SLIP else digit for digit in answer(number))


def thumb(number: str, rng: random.Random) -> dict[str, object]:
    text = write_carelessly(number, rng)
    return {"prompt": f"{number}>", "response": text, "thumb": "up" if text == answer(number) else "down"}


def pair(number: str, rng: random.Random) -> dict[str, object]:
    """Of two answers that differ, the one with more right digits is chosen; of equally good ones either."""
    first = second = write_carelessly(number, rng)
    while second == first:
        second = write_carelessly(number, rng)
    right = [sum(map(str.__eq__, text, answer(number))) for text in (first, second)]
    chosen, rejected = (first, second) if right[0] >= right[1] else (second, first)
    return {"prompt": f"{number}>", "chosen": chosen, "rejected": rejected}


def write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(kind: str, folder: Path) -> None:
    rng = random.Random(0)
    numbers = [f"{number:04}" for number in range(10_000)]
    rng.shuffle(numbers)
    row = {"thumbs": thumb, "pairs": pair}[kind]
    write(folder / "log.jsonl", [row(number, rng) for number in numbers[:PROMPTS]])
    held_out = numbers[PROMPTS : PROMPTS + HELD_OUT]
    write(folder / "held_out.jsonl", [{"prompt": f"{n}>", "answer": answer(n)} for n in held_out])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "."))
