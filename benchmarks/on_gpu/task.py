"""The task of the part `learns`: products of a number of three digits and one of two, with all steps written.

A prompt is `347*58=`. A response is what somebody writes who multiplies by hand, 60 to 80 characters:

    300*50=15000,40*50=2000,7*50=350:17350;300*8=2400,40*8=320,7*8=56:2776;20126

It is right if it ends with `;` and the product. The teacher errs: each digit that it writes is a random one
with probability SLIP, and it goes on with what it wrote. So it is right 4 times in 10.

As a program it writes lines of lessons, [[prompt, response], …], until nobody reads them:

    python -m benchmarks.on_gpu.task LESSONS_A_LINE PROMPTS_LEFT_OUT
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence

ALPHABET = "0123456789*=,:;"
CONTEXT = 112  # tokens of prompt and response, more than any needs
NEW = 96  # tokens of a response at most
SLIP = 0.02


def answer(prompt: str) -> str:
    a, b = prompt[:-1].split("*")
    return str(int(a) * int(b))


def is_right(response: str, product: str) -> bool:
    return response.rpartition(";")[2] == product


def right(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """The reward of a run: 1 for the product, else 0."""
    return [float(is_right(text, product)) for text, product in zip(completions, answer, strict=True)]


def lesson(prompt: str, rng: random.Random, slip: float = SLIP) -> str:
    """What the teacher writes."""

    def written(number: int) -> str:
        return "".join(rng.choice("0123456789") if rng.random() < slip else digit for digit in str(number))

    def product(a: int, b: int) -> tuple[str, int]:
        first, second = written(a), written(b)
        result = written(int(first) * int(second))
        return f"{first}*{second}={result}", int(result)

    a, b = map(int, prompt[:-1].split("*"))
    text, total = "", 0
    for factor in (b // 10 * 10, b % 10):
        parts = [product(part, factor) for part in (a // 100 * 100, a // 10 % 10 * 10, a % 10)]
        partial = written(sum(value for _, value in parts))
        text += f"{','.join(shown for shown, _ in parts)}:{partial};"
        total += int(partial)
    return text + written(total)


def prompts(counts: Sequence[int]) -> list[list[str]]:
    """So many prompts of each part, all different; a last part has the others."""
    every = [f"{a}*{b}=" for a in range(100, 1000) for b in range(10, 100)]
    random.Random(0).shuffle(every)
    parts = []
    for count in counts:
        parts.append(every[:count])
        every = every[count:]
    return [*parts, every]


def main() -> None:
    size, untaught = map(int, sys.argv[1:])
    rng = random.Random(0)
    taught = prompts([untaught])[1]
    while True:
        chosen = rng.choices(taught, k=size)
        print(json.dumps([[prompt, lesson(prompt, rng)] for prompt in chosen]), flush=True)


if __name__ == "__main__":
    main()
