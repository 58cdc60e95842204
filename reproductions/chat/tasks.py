"""Questions with an answer of one word, as conversations: five kinds, made by a seed.

A conversation has a system message, one example of its kind, and the question. Words and numbers of held-out
questions occur in no training question of their kind, so what is measured there isn't remembered.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Question = tuple[str, str]  # its text and its answer
Make = Callable[[random.Random, bool], Iterator[Question]]  # endless, or as many as there are

SYSTEM = "Answer with one word."
HELD_OUT = 3  # every third word or number is held out
_WORDS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
OPPOSITES, PAST, NOUNS = (_WORDS[name] for name in ("opposites", "past", "nouns"))


def pairs(text: str) -> list[tuple[str, str]]:
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))


def part(items: Sequence[Any], held_out: bool) -> list[Any]:
    """The items for training, or the others."""
    return [x for i, x in enumerate(items) if (i % HELD_OUT == 0) == held_out]


def opposite(draw: random.Random, held_out: bool) -> Iterator[Question]:
    both = [(a, b) for pair in part(pairs(OPPOSITES), held_out) for a, b in (pair, pair[::-1])]
    for word, other in draw.sample(both, len(both)):
        yield f"What is the opposite of {word}?", other


def past(draw: random.Random, held_out: bool) -> Iterator[Question]:
    verbs = part(pairs(PAST), held_out)
    for verb, form in draw.sample(verbs, len(verbs)):
        yield f"What is the past tense of {verb}?", form


def last(draw: random.Random, held_out: bool) -> Iterator[Question]:
    nouns = part(NOUNS.split(), held_out)
    while True:
        words = draw.sample(nouns, 4)
        yield f"What is the last word of this list: {', '.join(words)}?", words[-1]


def second(draw: random.Random, held_out: bool) -> Iterator[Question]:
    nouns = part(NOUNS.split(), held_out)
    while True:
        words = draw.sample(nouns, 3)
        yield f"What is the second word of this list: {', '.join(words)}?", words[1]


def larger(draw: random.Random, held_out: bool) -> Iterator[Question]:
    numbers = part(range(10, 100), held_out)
    while True:
        a, b = draw.sample(numbers, 2)
        yield f"Which number is larger, {a} or {b}?", str(max(a, b))


KINDS: dict[str, tuple[Question, Make]] = {
    "opposite": (("What is the opposite of black?", "white"), opposite),
    "past": (("What is the past tense of swim?", "swam"), past),
    "last": (("What is the last word of this list: red, pen, boat, tree?", "tree"), last),
    "second": (("What is the second word of this list: red, pen, tree?", "pen"), second),
    "larger": (("Which number is larger, 12 or 37?", "37"), larger),
}


def conversation(example: Question, question: str) -> list[dict[str, str]]:
    """System message, example and question, as a chat model gets them."""
    roles = ("system", "user", "assistant", "user")
    return [{"role": r, "content": c} for r, c in zip(roles, (SYSTEM, *example, question), strict=True)]


def make(count: int, *, held_out: bool, seed: int = 0) -> list[dict[str, Any]]:
    """At most `count` different questions of each kind: records with prompt, answer and kind."""
    records = []
    for kind, (example, questions) in KINDS.items():
        found: dict[str, str] = {}
        for question, answer in questions(random.Random(f"{seed} {kind} {held_out}"), held_out):
            found[question] = answer
            if len(found) == count:
                break
        records += [{"prompt": conversation(example, q), "answer": a, "kind": kind} for q, a in found.items()]
    return records


def write(records: Sequence[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
