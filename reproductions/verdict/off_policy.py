"""How far off off-policy estimates are: bias, and how often their intervals hold the truth, by enumeration.

    python reproductions/verdict/off_policy.py [--only gain|values] [--runs N]

Policies are tables over 27 responses to each of 200 prompts (`agro.proof.enumerable`), so that the true
values are finite sums. The log is sampled by the start, or by somebody else. The trained policy is the start,
moved towards the rewards, in a direction that has nothing to do with them, or to what the start doesn't
write. The estimators see rewards and log-probs of logged responses alone.

gain: the difference of two policies. values: the doubly robust estimate of one policy's value, of rewards at
the end of a response or with each of its three tokens; "doubly robust, true V" is given the value of each
prefix under the judged policy, which is the best that stored values could be. Only logs that are estimable
are counted. Writes the tables of README.md, off_policy.json and off_policy_values.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agro.pages.store.value_on_log import FEW, LoggedResponses, OffPolicyValue, value_on_log
from agro.proof.enumerable import Space, Table
from agro.stats.off_policy import compare_on_log
from reproductions import harness

FOLDER = Path(__file__).resolve().parent
TABLES = {"gain": "off-policy", "values": "off-policy values"}  # their names on the page
FILES = {"gain": "off_policy.json", "values": "off_policy_values.json"}
RUNS = {"gain": 300, "values": 1000}  # logs a setting
SPACE = Space(vocabulary=3, length=3, prompts=200)
SIZES = ((100, 4), (400, 4))  # prompts, responses to each
MOVES = (1.0, 3.0, 6.0, 10.0)  # largest change of a logit, in nats; of values without the last
FITTED_V, TRUE_V = "doubly_robust", "doubly robust, true V"
Row = dict[str, Any]

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


def draw(
    author: Values, prompts: int, responses: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """A log of so many prompts: prompt, response and cluster of each row. `author` [X,Y]: log-probs."""
    x = np.repeat(rng.integers(SPACE.prompts, size=prompts), responses)
    below = np.exp(author)[x].cumsum(1)
    y = (rng.random(len(x))[:, None] * below[:, -1:] > below).sum(1)
    return x, y, np.repeat(np.arange(prompts), responses)


def _compare(w: World, prompts: int, responses: int, rng: np.random.Generator) -> Any:
    x, y, clusters = draw(w.author, prompts, responses, rng)
    mu = w.author[x, y]
    return compare_on_log(w.start[x, y] - mu, w.trained[x, y] - mu, w.rewards[x, y], clusters)


def gains(runs: int) -> list[Row]:
    result = []
    settings = product(("start", "another"), DIRECTIONS, MOVES, SIZES)
    for seed, (author, toward, move, (prompts, responses)) in enumerate(settings):
        w = world(move, toward, other_author=author == "another")
        named = {"log of": author, "direction": toward, "kl": w.kl, "gain": w.gain}
        size = {"prompts": prompts, "responses": responses, "runs": runs}
        result.append({**named, **size, **measure(w, prompts, responses, runs, seed)})
    return result


def gain_table(result: list[Row]) -> str:
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


class Judged:
    """A policy and the author of the log by token [X,Y,T], rewards by token [X,Y,T], and true values."""

    def __init__(self, move: float, toward: str, *, other_author: bool, by_token: bool) -> None:
        author, _, trained, at_end = policies(move, toward, other_author=other_author)
        self.author, self.policy = (log_probs(logits) for logits in (author, trained))
        self.rewards = np.zeros(self.policy.shape)
        self.rewards[:, :, -1] = at_end
        if by_token:
            of_choice = np.random.default_rng(11).random(tuple(trained.shape)) < 0.3
            self.rewards = of_choice[:, SPACE.places, SPACE.tokens] / SPACE.length
        p = np.exp(self.policy.sum(-1))  # [X,Y]
        self.values = self._to_come(p)
        self.value = float(self.values[:, 0, 0].mean())

    def _to_come(self, p: Values) -> Values:
        """[X,Y,T] the expected reward from token t on, of what has the response's first tokens in common."""
        to_come = self.rewards[:, :, ::-1].cumsum(-1)[:, :, ::-1]
        values = np.empty_like(to_come)
        beginnings = np.array(SPACE.responses)
        for t in range(SPACE.length):
            same = (beginnings[:, None, :t] == beginnings[None, :, :t]).all(-1)  # [Y,Y]
            values[:, :, t] = ((p * to_come[:, :, t]) @ same) / (p @ same)
        return values

    def estimate(self, prompts: int, responses: int, rng: np.random.Generator) -> dict[str, OffPolicyValue]:
        """By one log: with fitted V, and with the true one."""
        x, y, clusters = draw(self.author.sum(-1), prompts, responses, rng)
        lengths: NDArray[np.int64] = np.full(len(x), SPACE.length)
        ratios = self.policy[x, y] - self.author[x, y]
        log = LoggedResponses(ratios, self.rewards[x, y], lengths, clusters)
        return {FITTED_V: value_on_log(log), TRUE_V: value_on_log(log, self.values[x, y])}


def measure_values(judged: Judged, size: tuple[int, int], runs: int, seed: int) -> list[Row]:
    """A row an estimate, over `runs` logs."""
    rng = np.random.default_rng(seed)
    found = [judged.estimate(*size, rng) for _ in range(runs)]
    able = [f for f in found if not f[FITTED_V].obstacle]
    about = {
        "value": judged.value,
        "ess": float(np.mean([f[FITTED_V].ess for f in found])),
        "estimable": len(able) / runs,
    }
    if not able:
        return [about | {"estimate": None}]
    rows = []
    for name in (FITTED_V, TRUE_V):
        each = [f[name].estimate for f in able]
        errors = np.array([x.value - judged.value for x in each])
        covers = np.mean([x.low <= judged.value <= x.high for x in each])
        spread = {"bias": float(errors.mean()), "sd": float(errors.std())}
        rows.append(about | {"estimate": name, **spread, "covers": float(covers)})
    return rows


def values(runs: int) -> list[Row]:
    at_end = list(product(("start", "another"), ("rewards", "any", "away"), MOVES[:-1], SIZES, (False,)))
    by_token = list(product(("start",), ("rewards",), MOVES[:-1], SIZES, (True,)))
    result = []
    for seed, (author, toward, move, size, is_by_token) in enumerate(at_end + by_token):
        judged = Judged(move, toward, other_author=author == "another", by_token=is_by_token)
        about = {"log of": author, "direction": toward, "move": move, "by token": is_by_token}
        about |= {"prompts": size[0], "responses": size[1], "runs": runs}
        result += [about | row for row in measure_values(judged, size, runs, seed)]
    return result


def values_table(result: list[Row]) -> str:
    """Of each estimate: the extremes over the settings in which a fifth of the logs is estimable."""
    lines = []
    counted = [row for row in result if row["estimate"] and row["estimable"] >= 0.2]
    for name in sorted({row["estimate"] for row in counted}):
        part = [row for row in counted if row["estimate"] == name]
        covers = [row["covers"] for row in part]
        bias = max((row["bias"] for row in part), key=abs)
        figures = [f"{bias:+.4f}", f"{min(covers):.1%}–{max(covers):.1%}"]
        lines.append([name.replace("_", " "), *figures])
    head = ["estimate", "largest bias", "interval holds it"]
    text = harness.markdown(head, lines)
    robust = [row for row in result if row["estimate"] == FITTED_V]
    for name, few in (("fewer than a tenth", True), ("a tenth or more", False)):
        part = [r for r in robust if (r["ess"] < FEW * r["prompts"] * r["responses"]) == few]
        covers = [row["covers"] for row in part]
        if covers:
            held = sum(0.93 <= share <= 0.97 for share in covers)
            text += f"\n\nDoubly robust, where {name} of the responses count: {min(covers):.1%}–"
            text += f"{max(covers):.1%}, within 93 to 97 % in {held} of {len(part)} settings."
    return text


def main() -> None:
    args = harness.parser(__doc__, FOLDER, only=TABLES, runs=int).parse_args()
    for name, make, table in (("gain", gains, gain_table), ("values", values, values_table)):
        if name not in args.only:
            continue
        result = make(args.runs or RUNS[name])
        (args.out / FILES[name]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if args.out == FOLDER:
            harness.put(FOLDER / "README.md", table(result), TABLES[name])
        print(table(result), flush=True)


if __name__ == "__main__":
    main()
