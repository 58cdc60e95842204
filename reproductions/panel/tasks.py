"""The tasks of the panel: prompts, right answers, grades, and writers who slip.

A task is one rule for texts of a small alphabet. A response is right if it is the answer, and its grade is
the share of characters that are right where they stand. tasks.toml has the rules in words.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from reproductions.calculator import run as calculator

DIGITS, LETTERS, VOWELS = "0123456789", "abcdefghij", "aeiou"
CLOSED = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Task:
    """`prompt` makes one, `answer` is the right response to it, and `written` has its characters."""

    name: str
    prompt: Callable[[random.Random], str]
    answer: Callable[[str], str]
    alphabet: str  # of prompts and responses
    written: str  # of responses

    def right(self, prompt: str, response: str) -> float:
        return float(response == self.answer(prompt))

    def grade(self, prompt: str, response: str) -> float:
        """The share of characters that are right where they stand, from 0 to 1."""
        answer = self.answer(prompt)
        same = sum(a == b for a, b in zip(answer, response, strict=False))
        return same / max(len(answer), len(response))


@dataclass(frozen=True)
class Writer:
    """Writes the right response, but slips: probabilities for each character."""

    slip: float = 0.0  # another one is written
    swap: float = 0.0  # it changes places with the next one
    drop: float = 0.0  # it is left out

    def write(self, task: Task, prompt: str, rng: random.Random) -> str:
        text = list(task.answer(prompt))
        for i in range(len(text) - 1):
            if rng.random() < self.swap:
                text[i], text[i + 1] = text[i + 1], text[i]
        slipped = [rng.choice(task.written) if rng.random() < self.slip else c for c in text]
        kept = [c for c in slipped if rng.random() >= self.drop]
        return "".join(kept or slipped[:1])


def shifted(letters: str, by: int, text: str) -> str:
    """Each letter of `text` is replaced by the one so many places further, round and round."""
    return "".join(letters[(letters.index(c) + by) % len(letters)] for c in text)


def onward(count: int) -> Callable[[str], str]:
    """So many letters after the last one of a word, round and round."""
    return lambda p: "".join(shifted(LETTERS, by, p[-1]) for by in range(1, count + 1))


ANSWERS: dict[str, Callable[[str], str]] = {
    "sort": lambda p: "".join(sorted(p[:-1])),
    "double": lambda p: "".join(c + c for c in p[-2::-1]),
    "reverse": lambda p: p[-2::-1],
    "next letter": lambda p: shifted(LETTERS, 1, p[:-1]),
    "count": lambda p: "".join(f"{letter}{p.count(letter)}" for letter in "abc"),
    "rounds": lambda p: "".join(shifted(LETTERS, by, p[1:]) for by in range(1, 5)),
    "brackets": lambda p: "".join(CLOSED[c] for c in p[-2::-1]),
    "merge": lambda p: "".join(a + b for a, b in zip(p[:4], p[5:9], strict=True)),
    "weave": lambda p: "".join(a + b for a, b in zip(p[:4], p[8:4:-1], strict=True)),
    "no repeats": lambda p: "".join(c for c, _ in groupby(p[:-1])),
    "largest": lambda p: max(p[:-1].split(",")),
    "odd ones": lambda p: "".join(c for c in p[:-1] if c in "13579") or "0",
    "onward": onward(200),
    "other case": lambda p: p[:-1].swapcase(),
    "after the tag": lambda p: "".join(sorted(p[5:-1], reverse=True)),
    "product": calculator.answer,
    "nine minus": lambda p: "".join(str(9 - int(c)) for c in p[-2::-1]),
    "vowels first": lambda p: "".join(sorted(p[:-1], key=lambda c: c not in VOWELS)),
    "every other": lambda p: p[:-1:2],
    "turn": lambda p: p[2:-1] + p[:2],
    "there and back": lambda p: p[:-1] + p[-2::-1],
    "neighbors": lambda p: "".join(str((int(a) + int(b)) % 10) for a, b in pairwise(p[:-1])),
    "without vowels": lambda p: "".join(c for c in p[:-1] if c not in VOWELS) or "-",
    "swapped": lambda p: "".join(b + a for a, b in zip(p[:-1:2], p[1:-1:2], strict=True)),
    "letter before": lambda p: shifted(LETTERS, 9, p[-2::-1]),
    "halves": lambda p: p[4:8] + p[:4],
    "ones and zeros": lambda p: "".join("10"[int(c)] for c in p[-2::-1]),
    "falling letters": lambda p: "".join(sorted(p[:-1], reverse=True)),
    "five more": lambda p: shifted(DIGITS, 5, p[:-1]),
}


def drawn(rng: random.Random, letters: str, count: int) -> str:
    return "".join(rng.choices(letters, k=count))


def word(letters: str, length: Sequence[int], end: str) -> Callable[[random.Random], str]:
    """Makes prompts that are a random word and a sign for its end."""
    return lambda rng: drawn(rng, letters, rng.randint(*length)) + end


PROMPTS: dict[str, Callable[[random.Random], str]] = {  # of the others: a word, by tasks.toml
    "rounds": lambda rng: ">" + drawn(rng, LETTERS, 13),
    "onward": lambda rng: "*" + drawn(rng, LETTERS, 5),
    "merge": lambda rng: f"{drawn(rng, LETTERS, 4)}+{drawn(rng, LETTERS, 4)}=",
    "weave": lambda rng: f"{drawn(rng, LETTERS, 4)}+{drawn(rng, LETTERS, 4)}=",
    "largest": lambda rng: ",".join(str(rng.randint(10, 99)) for _ in range(3)) + ">",
    "after the tag": lambda rng: f"{drawn(rng, 'uvwxyz', 4)}:{drawn(rng, DIGITS, 4)}>",
    "product": lambda rng: f"{rng.randint(10, 99)}*{rng.randint(10, 99)}=",
}
TASKS = {
    name: Task(
        name,
        PROMPTS[name] if name in PROMPTS else word(**of["prompt"]),
        ANSWERS[name],
        of["alphabet"],
        of["written"],
    )
    for name, of in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}
