"""How many different animals a story names, counted so that repeating oneself doesn't pay.

    reward = min(animals, ENOUGH) / ENOUGH · max(0, 1 − repeated / TOO_OFTEN)

`animals`: different animals that the prompt doesn't name. Each counts once, however often it is named. A
sentence adds at most one, and only if it has SHORTEST words. So neither chanting a name nor listing names
pays. `repeated`: the share of the text's three-word sequences that occurred in it before. Sentences of one
pattern have many of these; the pretrained model's stories have next to none. Words that aren't on the list,
invented ones included, add nothing.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ENOUGH = 4
SHORTEST = 5
TOO_OFTEN = 0.2

_WORDS = tomllib.loads(Path(__file__).with_name("animals.toml").read_text(encoding="utf-8"))
ANIMALS = frozenset(_WORDS["names"].split())
SAME: dict[str, str] = _WORDS["same"]


def animal(word: str) -> str | None:
    """The animal that a lower-case word names, young or old, one or many; None for any other word."""
    endings = (("", ""), ("s", ""), ("es", ""), ("ies", "y"))
    forms = [word.removesuffix(old) + new for old, new in endings if word.endswith(old)]
    return next((SAME.get(form, form) for form in forms if form in SAME or form in ANIMALS), None)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower().replace("'", ""))


def animals(text: str, known: frozenset[str] = frozenset()) -> set[str]:
    """The animals that the text's sentences add to those `known`, at most one a sentence."""
    found: set[str] = set()
    for sentence in re.split(r"[.!?\n]+", text):
        spelt = words(sentence)
        new = [a for w in spelt if (a := animal(w)) and a not in known and a not in found]
        if new and len(spelt) >= SHORTEST:
            found.add(new[0])
    return found


def repeated(text: str) -> float:
    """The share of three-word sequences that stood in the text before; 0 where there are none."""
    spelt = words(text)
    runs = list(zip(spelt, spelt[1:], spelt[2:], strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def fauna(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The reward, with the signature that TRL's trainers call."""
    scores = []
    for prompt, text in zip(prompts, completions, strict=True):
        known = frozenset(a for w in words(prompt) if (a := animal(w)))
        variety = min(len(animals(text, known)), ENOUGH) / ENOUGH
        scores.append(variety * max(0.0, 1 - repeated(text) / TOO_OFTEN))
    return scores
