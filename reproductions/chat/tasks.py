"""Questions with an answer of one word, as conversations: five kinds, made by a seed.

A conversation has a system message, one example of its kind, and the question. Words and numbers of held-out
questions occur in no training question of their kind, so what is measured there isn't remembered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Question = tuple[str, str]  # its text and its answer
Make = Callable[[random.Random, bool], Iterator[Question]]  # endless, or as many as there are

SYSTEM = "Answer with one word."
HELD_OUT = 3  # every third word or number is held out

OPPOSITES = """
    hot cold  big small  fast slow  old young  rich poor  happy sad  open closed  hard soft  wet dry
    early late  strong weak  full empty  high low  near far  loud quiet  thick thin  wide narrow
    clean dirty  up down  left right  first last  good bad  true false  day night  north south
    east west  win lose  buy sell  push pull  start stop  love hate  friend enemy  king queen  boy girl
    man woman  father mother  brother sister  uncle aunt  inside outside  above below  before after
    always never  yes no  more less  many few  long short  deep shallow  sweet sour  brave cowardly
    smooth rough  sharp dull  tight loose  alive dead  asleep awake  cheap expensive  easy difficult
    safe dangerous  war peace  success failure  teacher student  question answer  summer winter
    husband wife  son daughter  over under  give take  arrive leave  remember forget  laugh cry
"""
PAST = """
    go went  eat ate  run ran  walk walked  see saw  take took  write wrote  play played  buy bought
    sing sang  jump jumped  think thought  sleep slept  give gave  stop stopped  drink drank
    speak spoke  break broke  drive drove  fly flew  grow grew  know knew  throw threw  draw drew
    begin began  ring rang  sit sat  stand stood  tell told  sell sold  find found  hold held  keep kept
    feel felt  leave left  meet met  pay paid  say said  send sent  build built  lose lost  win won
    teach taught  catch caught  bring brought  fight fought  open opened  close closed  talk talked
    call called  help helped  work worked  want wanted  need needed  love loved  live lived  move moved
    smile smiled  dance danced  cook cooked  clean cleaned  wash washed  paint painted  climb climbed
    laugh laughed  watch watched  wait waited  start started  finish finished  try tried  cry cried
    carry carried  study studied  plan planned  drop dropped  fall fell  choose chose  wear wore
    steal stole  forget forgot  hide hid  ride rode  rise rose  shake shook  wake woke  bite bit
"""
NOUNS = """
    table river apple stone dance house music cloud paper tiger bread plant chair ocean dream horse
    knife lemon money queen radio sugar train voice water zebra angle beach clock dress earth flame
    grape honey island jacket kettle ladder mirror needle orange pencil rabbit saddle ticket window
    yellow basket candle dragon engine flower garden hammer insect jungle kitten letter market napkin
    office pepper rocket salmon temple valley wallet banana bridge castle desert feather guitar helmet
    iron jewel lamp motor nest onion piano quilt rope spoon tower violin wheel
"""


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
