"""The tasks of the panel: prompts, right answers, grades, and writers who slip.

A task is one rule for texts of a small alphabet. A response is right if it is the answer, and its grade is
the share of characters that are right where they stand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from reproductions.calculator import run as calculator

DIGITS, LETTERS, VOWELS = "0123456789", "abcdefghij", "aeiou"
CLOSED = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Task:
    """`prompt` makes one, `answer` is the right response to it, and `written` has its characters."""

    name: str
    about: str
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


def _number(rng: random.Random) -> str:
    return str(rng.randint(10, 99))


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


def _all(tasks: Sequence[Task]) -> dict[str, Task]:
    return {task.name: task for task in tasks}


TASKS = _all(
    [
        Task(
            "sort",
            "five digits in rising order",
            _word(DIGITS, 5, 5),
            lambda p: "".join(sorted(p[:-1])),
            DIGITS + ">",
            DIGITS,
        ),
        Task(
            "double",
            "each letter of a word twice, the last one first",
            _word(LETTERS, 4, 4, "="),
            lambda p: "".join(c + c for c in p[-2::-1]),
            LETTERS + "=",
            LETTERS,
        ),
        Task(
            "reverse",
            "a word of five to seven letters, backwards",
            _word(LETTERS, 5, 7, "<"),
            lambda p: p[-2::-1],
            LETTERS + "<",
            LETTERS,
        ),
        Task(
            "next letter",
            "each letter of a word is replaced by the next one",
            _word(LETTERS, 4, 6),
            lambda p: shifted(LETTERS, 1, p[:-1]),
            LETTERS + ">",
            LETTERS,
        ),
        Task(
            "count",
            "how often a, b and c are in a text",
            _word("abc", 9, 9, "#"),
            _count,
            "abc#" + DIGITS,
            "abc" + DIGITS,
        ),
        Task(
            "rounds",
            "a word of 13 letters four times, each time with the letters after those before",
            lambda rng: ">" + "".join(rng.choices(LETTERS, k=13)),
            _rounds,
            LETTERS + ">",
            LETTERS,
        ),
        Task(
            "brackets",
            "close what is open",
            _word("([{", 5, 8, "|"),
            _closing,
            "()[]{}|",
            ")]}",
        ),
        Task("merge", "two words, letter by letter", _two_words, _merged, LETTERS + "+=", LETTERS),
        Task(
            "weave",
            "two words, letter by letter, the second one from its end",
            _two_words,
            _woven,
            LETTERS + "+=",
            LETTERS,
        ),
        Task(
            "no repeats",
            "a word without letters that repeat the one before",
            _word("abc", 8, 8),
            _without_repeats,
            "abc>",
            "abc",
        ),
        Task(
            "largest",
            "the largest of three numbers",
            lambda rng: ",".join(_number(rng) for _ in range(3)) + ">",
            lambda p: max(p[:-1].split(",")),
            DIGITS + ",>",
            DIGITS,
        ),
        Task(
            "odd ones",
            "the odd digits of a number",
            _word(DIGITS, 7, 7, "?"),
            lambda p: "".join(c for c in p[:-1] if c in "13579") or "0",
            DIGITS + "?",
            DIGITS,
        ),
        Task(
            "onward",
            "the 200 letters after the last one of a word, round and round",
            lambda rng: "*" + "".join(rng.choices(LETTERS, k=5)),
            lambda p: "".join(shifted(LETTERS, by, p[-1]) for by in range(1, 201)),
            LETTERS + "*",
            LETTERS,
        ),
        Task(
            "other case",
            "small letters become capital ones, and the reverse",
            _word("abcdeABCDE", 6, 6),
            lambda p: p[:-1].swapcase(),
            "abcdeABCDE>",
            "abcdeABCDE",
        ),
        Task(
            "after the tag",
            "four digits in falling order; the tag before them means nothing",
            _tagged,
            lambda p: "".join(sorted(p[5:-1], reverse=True)),
            DIGITS + "uvwxyz:>",
            DIGITS,
        ),
        Task(
            "product",
            "the product of two numbers, with a calculator",
            lambda rng: f"{_number(rng)}*{_number(rng)}=",
            calculator.answer,
            DIGITS + "*=[]()?",
            DIGITS,
        ),
        Task(
            "nine minus",
            "each digit taken from nine, last one first",
            _word(DIGITS, 6, 6, "-"),
            lambda p: "".join(str(9 - int(c)) for c in p[-2::-1]),
            DIGITS + "-",
            DIGITS,
        ),
        Task(
            "vowels first",
            "the vowels of a word, then its other letters",
            _word("aeioubcdfg", 6, 6),
            _vowels_first,
            "aeioubcdfg>",
            "aeioubcdfg",
        ),
        Task(
            "every other",
            "every second letter of a word",
            _word(LETTERS, 9, 9, "/"),
            lambda p: p[:-1:2],
            LETTERS + "/",
            LETTERS,
        ),
        Task(
            "turn",
            "the first two letters of a word go to its end",
            _word("klmnopq", 7, 7),
            lambda p: p[2:-1] + p[:2],
            "klmnopq>",
            "klmnopq",
        ),
        Task(
            "there and back",
            "a word, and the same backwards",
            _word(LETTERS, 4, 5, ";"),
            lambda p: p[:-1] + p[-2::-1],
            LETTERS + ";",
            LETTERS,
        ),
        Task(
            "neighbors",
            "the last digits of the sums of neighbors",
            _word("012345", 6, 6, "+"),
            _sums_of_neighbors,
            DIGITS + "+",
            DIGITS,
        ),
        Task(
            "without vowels",
            "the consonants of a word",
            _word("aeibcdfg", 8, 8),
            lambda p: "".join(c for c in p[:-1] if c not in VOWELS) or "-",
            "aeibcdfg>-",
            "bcdfg-",
        ),
        Task(
            "swapped",
            "neighbors change places",
            _word("pqrstuv", 6, 6),
            _neighbors_swapped,
            "pqrstuv>",
            "pqrstuv",
        ),
        Task(
            "letter before",
            "each letter of a word is replaced by the one before, last one first",
            _word(LETTERS, 5, 6, "~"),
            lambda p: shifted(LETTERS, 9, p[-2::-1]),
            LETTERS + "~",
            LETTERS,
        ),
        Task(
            "halves",
            "the second half of a word, then the first",
            _word("abcdwxyz", 8, 8, "|"),
            lambda p: p[4:8] + p[:4],
            "abcdwxyz|",
            "abcdwxyz",
        ),
        Task(
            "ones and zeros",
            "each 1 becomes 0 and each 0 becomes 1, last one first",
            _word("01", 12, 12, "!"),
            lambda p: "".join("10"[int(c)] for c in p[-2::-1]),
            "01!",
            "01",
        ),
        Task(
            "falling letters",
            "the letters of a word in falling order",
            _word("abcdef", 6, 6, "<"),
            lambda p: "".join(sorted(p[:-1], reverse=True)),
            "abcdef<",
            "abcdef",
        ),
        Task(
            "five more",
            "five more than each digit, without tens",
            _word(DIGITS, 5, 6, "+"),
            lambda p: shifted(DIGITS, 5, p[:-1]),
            DIGITS + "+",
            DIGITS,
        ),
    ]
)
