"""Samples to test with: small ones by hand, and random ones that use every field."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import signal
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from agro.store import At, Store
from agro.store.draw_rules import Candidate, DrawRule, place_of
from agro.types import Sample, prompt_hash

WORDS = [
    "",
    "a",
    "Σ ½ · 🜂",
    "line\nline\r\n",
    "tab\t\"quotes\" \\ 'single'",
    "\u2028\u0085\x00\x1f",
    "\ufeff",
    "é" * 40,
]
# A test of SQLite itself, or of a file.
of_file = pytest.mark.parametrize("path", ["file"], indirect=True)
LONE = ["\ud800", "x\udfffy"]


def sample(prompt: str = "1+1=", response: str = "2", reward: float | None = 1.0, **fields: Any) -> Sample:
    return Sample(prompt, response, reward, **fields)


def group(name: str, rewards: list[float | None], **fields: Any) -> list[Sample]:
    return [sample(name, f"response {i}", r, **fields) for i, r in enumerate(rewards)]


def texts(samples: Iterable[Sample]) -> list[str]:
    return [s.response for s in samples]


def draw(store: Store, rule: DrawRule, step: int | None = None, **changes: Any) -> list[Sample]:
    """What a run draws at a step, the next one after its last draw where it isn't given."""
    if step is None:
        step = 1 + max((draw.step for draw in store.draws.drawn(changes.get("run", "r"))), default=0)
    drawn = store.draw(rule, At(**{"run": "r", "step": step, "seed": 0, "version": 0, **changes}))
    assert not drawn.damaged
    return drawn.samples


def killed(work: Callable[[], object]) -> None:
    """Do it in a fork, which kills itself on the way."""
    child = os.fork()
    if not child:
        with suppress(BaseException):
            work()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def write_lines(path: Path, *rows: Any) -> Path:
    """A log of these records, or of these lines; it is compressed as its name says."""
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(lines.encode("utf-8", "surrogateescape")))
    return path


def random_samples(seed: int, n: int, words: list[str] = WORDS) -> list[Sample]:
    r = random.Random(seed)
    return [_random(r, words) for _ in range(n)]


def _random(r: random.Random, words: list[str]) -> Sample:
    def text() -> str:
        return "".join(r.choices(words, k=r.randint(0, 3)))

    def maybe(value: Any) -> Any:
        return value if r.random() < 0.6 else None

    def floats(least: float, most: float) -> Any:
        values = np.array([r.uniform(least, most) for _ in range(T)], np.float32)
        values[[r.random() < 0.3 for _ in range(T)]] = math.nan
        return values

    fields: dict[str, Any] = {}
    if r.random() < 0.7:
        T = r.randint(1, 20)
        action = np.array([r.random() < 0.5 for _ in range(T - 1)] + [True])
        learn = action & np.array([r.random() < 0.5 for _ in range(T - 1)] + [True])
        fields = {
            "tokens": np.array([r.choice([0, 7, 2**31 - 1]) for _ in range(T)]),
            "action": action,
            "learn": maybe(r.choice([learn, action])),
            "behavior_logp": maybe(floats(-50, 0)),
            "token_reward": maybe(floats(-1e30, 1e30)),
            "version": r.choice([-1, 0, 12, np.array([r.choice([-1, 0, 2**31 - 1]) for _ in range(T)])]),
        }
        fields |= _with_kept(fields["tokens"], action)
    call = {"type": "function", "function": {"name": "x", "arguments": {"y": None}}}
    messages = [
        {"role": "system", "content": text()},
        {"role": "user", "content": text(), "tool_calls": [call]},
    ]
    prompt = r.choice([text(), messages])
    return Sample(
        prompt=prompt,
        response=text(),
        reward=maybe(r.choice([0, -0.0, 1, 0.1, 5e-324, -1.7976931348623157e308, 1 / 3])),
        prompt_id=r.choice(["", "p" + text() + prompt_hash(prompt)]),  # one prompt under an id
        episode=maybe(text()),
        tokenizer=maybe("0123456789abcdef"),
        sampling=maybe({"temperature": 0.1 + 0.2, "stop": [text()], "seed": 2**70, "greedy": False}),
        context_tokens=maybe(np.array(r.choices([0, 511], k=r.randint(0, 4)), np.int32)),
        role=r.choice(["policy", "log", "expert"]),
        source=text(),
        meta=r.choice(
            [{}, {"answer": r.choice(["18", None, ["a", {"b": 1}]]), "parts": {"": -0.0, text(): None}}]
        ),
        **fields,
    )


def _with_kept(tokens: np.ndarray, action: np.ndarray) -> dict[str, Any]:
    """Kept sets, or none; each is the whole vocabulary, or has the token and others."""
    r = random.Random(repr(tokens))
    if r.random() < 0.5:
        return {}
    sets = []
    for token, chosen in zip(tokens.tolist(), action, strict=True):
        some = {token, *r.choices(range(50), k=r.randint(0, 4))}
        sets.append(sorted(some) if chosen and r.random() < 0.8 else [])
    return {"kept": [i for ids in sets for i in ids], "kept_count": [len(ids) for ids in sets]}


class Listed:
    """The groups that may be drawn, as a list: the meaning of `agro.store.candidates.Candidates`."""

    def __init__(self, candidates: Sequence[Candidate], rule: DrawRule, seed: int = 0) -> None:
        placed = [(place_of(c, rule, seed), c) for c in candidates]
        self.by_place = [c for _, c in sorted(placed, key=lambda p: (p[0], p[1].prompt_id))]
        self.places = sorted(place for place, _ in placed)
        self.count = len(candidates)
        self.versions = Counter(c.newest for c in candidates)
        self.order = rule.data.order

    def head(self, n: int) -> list[str]:
        keys = {
            "least_used": lambda c: (c.uses, 0),
            "newest": lambda c: (-c.newest, c.uses),
            "age_weighted": lambda c: (c.newest, 0),
        }
        ordered = sorted(self.by_place, key=keys.get(self.order, lambda c: (0, 0)))
        return [c.prompt_id for c in ordered[:n]]

    def between(self, asked: Sequence[tuple[int, int, int]]) -> list[str | None]:
        return [self._between(*one) for one in asked]

    def _between(self, low: int, high: int, n: int) -> str | None:
        at = bisect_left(self.places, low) + n
        return self.by_place[at].prompt_id if at < self.count and self.places[at] <= high else None

    def with_version(self, version: int) -> list[str]:
        return [c.prompt_id for c in self.by_place if c.newest == version]
