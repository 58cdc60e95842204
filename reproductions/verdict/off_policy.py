"""How far off an off-policy estimate is: bias, and how often its interval holds the truth, by enumeration.

    python reproductions/verdict/off_policy.py

Policies are tables over 27 responses to each of 200 prompts (`agro.proof.enumerable`), so that the true
values are finite sums. The log is sampled by the start, or by somebody else. The trained policy is the start,
moved towards the rewards, in a direction that has nothing to do with them, or to what the start doesn't
write. `agro.stats.off_policy` sees rewards and log-probs of logged responses alone. Writes the table of
README.md and off_policy.json.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agro.proof.enumerable import Space, Table
from agro.stats.off_policy import LEAST, compare_on_log
from reproductions import harness

FOLDER = Path(__file__).resolve().parent
MARK, END = "<!-- begin: off-policy -->", "<!-- end: off-policy -->"
SPACE = Space(vocabulary=3, length=3, prompts=200)
SIZES = ((100, 4), (400, 4))  # prompts, responses to each
MOVES = (1.0, 3.0, 6.0, 10.0)  # largest change of a logit, in nats

Values = NDArray[np.float64]
Direction = Literal["rewards", "any", "away"]
DIRECTIONS: tuple[Direction, ...] = ("rewards", "any", "away")


@dataclass(frozen=True)
class World:
    """[X,Y] log-probs of the author of the log, the start and the trained policy, and rewards."""

    author: Values
    start: Values
    trained: Values
    rewards: Values

    @property
    def gain(self) -> float:
        """The true difference in mean reward."""
        before, after = (float((np.exp(p) * self.rewards).sum(1).mean()) for p in (self.start, self.trained))
        return after - before

    @property
    def kl(self) -> float:
        """Of the trained policy to the start, nats per response."""
        return float((np.exp(self.trained) * (self.trained - self.start)).sum(1).mean())


def log_probs(logits: torch.Tensor) -> Values:
    """[X,C,V] -> [X,Y,T] of the tokens of each response."""
    return np.asarray(logits.log_softmax(-1)[:, SPACE.places, SPACE.tokens].detach().numpy())


def world(move: float, toward: Direction, *, other_author: bool) -> World:
    """`move`: of the trained policy's logits. Rewards are those of a response to a prompt, drawn once."""
    *logits, rewards = policies(move, toward, other_author=other_author)
    return World(*(log_probs(each).sum(-1) for each in logits), rewards)


def policies(
    move: float, toward: str, *, other_author: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Values]:
    """Logits of the author, the start and the trained policy, and rewards."""
    generator = torch.Generator().manual_seed(7)
    start, other, direction = (Table(SPACE, 1.0, generator).logits.detach() for _ in range(3))
    rng = np.random.default_rng(7)
    shape = (SPACE.prompts, len(SPACE.responses))
    rewards = (rng.random(shape) < 0.3).astype(np.float64)
    if toward == "rewards":
        direction = _toward(rewards)
    elif toward == "away":
        direction = -start
    trained = start + move * direction / direction.abs().max()
    author = start + 0.5 * other if other_author else start
    return author, start, trained, rewards


def _toward(rewards: Values) -> torch.Tensor:
    """[X,C,V] mean reward of the responses that go on so, minus that of all of the context."""
    total = torch.zeros(SPACE.prompts, len(SPACE.contexts), SPACE.vocabulary, dtype=torch.float64)
    count = torch.zeros_like(total)
    for y, (places, tokens) in enumerate(zip(SPACE.places.tolist(), SPACE.tokens.tolist(), strict=True)):
        for place, token in zip(places, tokens, strict=True):
            total[:, place, token] += torch.from_numpy(rewards[:, y])
            count[:, place, token] += 1
    mean = total / count
    return mean - mean.mean(-1, keepdim=True)


def measure(w: World, prompts: int, responses: int, runs: int, seed: int) -> dict[str, Any]:
    """Over `runs` logs: bias, coverage and wrong verdicts among those that are estimable."""
    rng = np.random.default_rng(seed)
    found = [_compare(w, prompts, responses, rng) for _ in range(runs)]
    able = [f for f in found if not f.obstacle]
    row: dict[str, Any] = {"ess": float(np.mean([f.ess for f in found])), "estimable": len(able) / runs}
    names = ("bias", "sd", "covers", "better", "worse")
    if not able:
        return row | dict.fromkeys(names)
    errors = np.array([f.difference - w.gain for f in able])
    shown = [(f.p < 0.05, f.difference > 0) for f in able]
    values = (
        float(errors.mean()),
        float(errors.std()),
        float(np.mean([f.low <= w.gain <= f.high for f in able])),
        float(np.mean([is_shown and is_up for is_shown, is_up in shown])),
        float(np.mean([is_shown and not is_up for is_shown, is_up in shown])),
    )
    return row | dict(zip(names, values, strict=True))


def _compare(w: World, prompts: int, responses: int, rng: np.random.Generator) -> Any:
    x = np.repeat(rng.integers(SPACE.prompts, size=prompts), responses)
    below = np.exp(w.author[x]).cumsum(1)
    y = (rng.random(len(x))[:, None] * below[:, -1:] > below).sum(1)
    mu = w.author[x, y]
    clusters = np.repeat(np.arange(prompts), responses)
    return compare_on_log(w.start[x, y] - mu, w.trained[x, y] - mu, w.rewards[x, y], clusters)


def rows(runs: int) -> list[dict[str, Any]]:
    result = []
    settings = product(("start", "another"), DIRECTIONS, MOVES, SIZES)
    for seed, (author, toward, move, (prompts, responses)) in enumerate(settings):
        w = world(move, toward, other_author=author == "another")
        named = {"log of": author, "direction": toward, "kl": w.kl, "gain": w.gain}
        size = {"prompts": prompts, "responses": responses, "runs": runs}
        result.append({**named, **size, **measure(w, prompts, responses, runs, seed)})
    return result


def table(result: list[dict[str, Any]]) -> str:
    """By direction: the extremes over settings in which a fifth of the logs has an estimate."""
    lines = []
    for toward in DIRECTIONS:
        rows = [row for row in result if row["direction"] == toward and row["estimable"] > 0.2]
        gains = [row["gain"] for row in rows]
        bias = max((row["bias"] for row in rows), key=abs)
        ranges = [_range([row[name] for row in rows]) for name in ("covers", "better", "worse")]
        about = [toward, f"{min(gains):+.3f} to {max(gains):+.3f}", f"{bias:+.4f}"]
        lines.append([*about, *ranges])
    head = ["moved", "true gain", "largest bias", "interval holds it", '"better"', '"worse"']
    return harness.markdown(head, lines)


def _range(shares: list[float]) -> str:
    return f"{min(shares):.1%}–{max(shares):.1%}" if min(shares) < max(shares) else f"{min(shares):.1%}"


def main() -> None:
    runs = 300
    result = rows(runs)
    print(table(result))
    covered = [row["covers"] for row in result if row["estimable"] > 0.2]
    print(
        f"\nfrom {LEAST:g} effective responses on, {runs} logs a row: the interval holds the true gain in "
        f"{min(covered):.1%} to {max(covered):.1%}; a share of 5 % has an error of "
        f"{math.sqrt(0.05 * 0.95 / runs):.1%}"
    )
    (FOLDER / "off_policy.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    harness.put(FOLDER / "README.md", table(result), MARK, END)


if __name__ == "__main__":
    main()
