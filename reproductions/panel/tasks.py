"""The tasks of the panel: prompts, right answers, grades, and writers who slip.

A task is one rule for texts of a small alphabet. A response is right if it is the answer, and its grade is
the share of characters that are right where they stand.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

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


def _word(letters: str, shortest: int, longest: int, end: str = ">") -> Callable[[random.Random], str]:
    """Makes prompts that are a random word and a sign for its end."""

    def make(rng: random.Random) -> str:
        return "".join(rng.choices(letters, k=rng.randint(shortest, longest))) + end

    return make


def _count(prompt: str) -> str:
    return "".join(f"{letter}{prompt.count(letter)}" for letter in "abc")


def _without_repeats(prompt: str) -> str:
    word = prompt[:-1]
    return "".join(c for i, c in enumerate(word) if word[i - 1 : i] != c)


def _vowels_first(prompt: str) -> str:
    return "".join(sorted(prompt[:-1], key=lambda c: c not in VOWELS))


def _woven(prompt: str) -> str:
    first, second = prompt[:-1].split("+")
    return _merged(f"{first}+{second[::-1]}=")


def _merged(prompt: str) -> str:
    first, second = prompt[:-1].split("+")
    return "".join(a + b for a, b in zip(first, second, strict=True))


def _two_words(rng: random.Random) -> str:
    first, second = ("".join(rng.choices(LETTERS, k=4)) for _ in range(2))
    return f"{first}+{second}="


def _tagged(rng: random.Random) -> str:
    tag = "".join(rng.choices("uvwxyz", k=4))
    return f"{tag}:{''.join(rng.choices(DIGITS, k=4))}>"


def shifted(letters: str, by: int, text: str) -> str:
    """Each letter of `text` is replaced by the one so many places further, round and round."""
    return "".join(letters[(letters.index(c) + by) % len(letters)] for c in text)


def _rounds(prompt: str) -> str:
    return "".join(shifted(LETTERS, by, prompt[1:]) for by in range(1, 5))


def _sums_of_neighbors(prompt: str) -> str:
    digits = [int(c) for c in prompt[:-1]]
    return "".join(str((a + b) % 10) for a, b in pairwise(digits))


def _neighbors_swapped(prompt: str) -> str:
    word = prompt[:-1]
    return "".join(word[i + 1] + word[i] for i in range(0, len(word), 2))


def _closing(prompt: str) -> str:
    return "".join(CLOSED[c] for c in reversed(prompt[:-1]))


def onward(count: int) -> Callable[[str], str]:
    """So many letters after the last one of a word, round and round."""
    return lambda p: "".join(shifted(LETTERS, by, p[-1]) for by in range(1, count + 1))


def _three_numbers(rng: random.Random) -> str:
    return ",".join(str(rng.randint(10, 99)) for _ in range(3)) + ">"


def _two_numbers(rng: random.Random) -> str:
    return f"{rng.randint(10, 99)}*{rng.randint(10, 99)}="


def _doubled(prompt: str) -> str:
    return "".join(c + c for c in prompt[-2::-1])


def _odd_ones(prompt: str) -> str:
    return "".join(c for c in prompt[:-1] if c in "13579") or "0"


def _falling(prompt: str) -> str:
    return "".join(sorted(prompt[:-1], reverse=True))


def _from_nine(prompt: str) -> str:
    return "".join(str(9 - int(c)) for c in prompt[-2::-1])


def _consonants(prompt: str) -> str:
    return "".join(c for c in prompt[:-1] if c not in VOWELS) or "-"


def _letters_before(prompt: str) -> str:
    return shifted(LETTERS, 9, prompt[-2::-1])


def _other_digits(prompt: str) -> str:
    return "".join("10"[int(c)] for c in prompt[-2::-1])


TASKS = {
    name: Task(name, *parts)
    for name, parts in {
        # five digits in rising order
        "sort": (_word(DIGITS, 5, 5), lambda p: "".join(sorted(p[:-1])), DIGITS + ">", DIGITS),
        # each letter of a word twice, the last one first
        "double": (_word(LETTERS, 4, 4, "="), _doubled, LETTERS + "=", LETTERS),
        # a word of five to seven letters, backwards
        "reverse": (_word(LETTERS, 5, 7, "<"), lambda p: p[-2::-1], LETTERS + "<", LETTERS),
        # each letter of a word is replaced by the next one
        "next letter": (_word(LETTERS, 4, 6), lambda p: shifted(LETTERS, 1, p[:-1]), LETTERS + ">", LETTERS),
        # how often a, b and c are in a text
        "count": (_word("abc", 9, 9, "#"), _count, "abc#" + DIGITS, "abc" + DIGITS),
        # a word of 13 letters four times, each time with the letters after those before
        "rounds": (lambda rng: ">" + "".join(rng.choices(LETTERS, k=13)), _rounds, LETTERS + ">", LETTERS),
        # close what is open
        "brackets": (_word("([{", 5, 8, "|"), _closing, "()[]{}|", ")]}"),
        # two words, letter by letter
        "merge": (_two_words, _merged, LETTERS + "+=", LETTERS),
        # the same, the second one from its end
        "weave": (_two_words, _woven, LETTERS + "+=", LETTERS),
        # a word without letters that repeat the one before
        "no repeats": (_word("abc", 8, 8), _without_repeats, "abc>", "abc"),
        # the largest of three numbers
        "largest": (_three_numbers, lambda p: max(p[:-1].split(",")), DIGITS + ",>", DIGITS),
        # the odd digits of a number
        "odd ones": (_word(DIGITS, 7, 7, "?"), _odd_ones, DIGITS + "?", DIGITS),
        # the 200 letters after the last one of a word, round and round
        "onward": (lambda rng: "*" + "".join(rng.choices(LETTERS, k=5)), onward(200), LETTERS + "*", LETTERS),
        # small letters become capital ones, and the reverse
        "other case": (_word("abcdeABCDE", 6, 6), lambda p: p[:-1].swapcase(), "abcdeABCDE>", "abcdeABCDE"),
        # four digits in falling order; the tag before them means nothing
        "after the tag": (_tagged, lambda p: _falling(p[5:]), DIGITS + "uvwxyz:>", DIGITS),
        # the product of two numbers, with a calculator
        "product": (_two_numbers, calculator.answer, DIGITS + "*=[]()?", DIGITS),
        # each digit taken from nine, last one first
        "nine minus": (_word(DIGITS, 6, 6, "-"), _from_nine, DIGITS + "-", DIGITS),
        # the vowels of a word, then its other letters
        "vowels first": (_word("aeioubcdfg", 6, 6), _vowels_first, "aeioubcdfg>", "aeioubcdfg"),
        # every second letter of a word
        "every other": (_word(LETTERS, 9, 9, "/"), lambda p: p[:-1:2], LETTERS + "/", LETTERS),
        # the first two letters of a word go to its end
        "turn": (_word("klmnopq", 7, 7), lambda p: p[2:-1] + p[:2], "klmnopq>", "klmnopq"),
        # a word, and the same backwards
        "there and back": (_word(LETTERS, 4, 5, ";"), lambda p: p[:-1] + p[-2::-1], LETTERS + ";", LETTERS),
        # the last digits of the sums of neighbors
        "neighbors": (_word("012345", 6, 6, "+"), _sums_of_neighbors, DIGITS + "+", DIGITS),
        # the consonants of a word
        "without vowels": (_word("aeibcdfg", 8, 8), _consonants, "aeibcdfg>-", "bcdfg-"),
        # neighbors change places
        "swapped": (_word("pqrstuv", 6, 6), _neighbors_swapped, "pqrstuv>", "pqrstuv"),
        # each letter of a word is replaced by the one before, last one first
        "letter before": (_word(LETTERS, 5, 6, "~"), _letters_before, LETTERS + "~", LETTERS),
        # the second half of a word, then the first
        "halves": (_word("abcdwxyz", 8, 8, "|"), lambda p: p[4:8] + p[:4], "abcdwxyz|", "abcdwxyz"),
        # each 1 becomes 0 and each 0 becomes 1, last one first
        "ones and zeros": (_word("01", 12, 12, "!"), _other_digits, "01!", "01"),
        # the letters of a word in falling order
        "falling letters": (_word("abcdef", 6, 6, "<"), _falling, "abcdef<", "abcdef"),
        # five more than each digit, without tens
        "five more": (_word(DIGITS, 5, 6, "+"), lambda p: shifted(DIGITS, 5, p[:-1]), DIGITS + "+", DIGITS),
    }.items()
}
