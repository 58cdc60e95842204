"""Bias of five off-policy estimates of a value, and how often their intervals hold it, by enumeration.

    python reproductions/verdict/off_policy_values.py [--runs 1000] [--json]

The policies, prompts and logs are those of off_policy.py: tables over 27 responses to each of 200 prompts, so
that the true value is a finite sum. Rewards come at the end of a response, or with each of its three tokens.
Each estimate sees rewards and the log-probs of logged tokens alone; "doubly robust, true V" is given the
value of each prefix under the judged policy, which is the best that stored values could be. A log that is
not estimable isn't counted. Writes the table of README.md and off_policy_values.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agro.stats.off_policy import FEW, HEADLINE, LoggedResponses, OffPolicyValue, value_on_log
from reproductions import harness
from reproductions.verdict.off_policy import SPACE, Values, log_probs, policies

FOLDER = Path(__file__).resolve().parent
MARK, END = "<!-- begin: off-policy values -->", "<!-- end: off-policy values -->"
SIZES = ((100, 4), (400, 4))  # prompts, responses to each
MOVES = (1.0, 3.0, 6.0)  # largest change of a logit, in nats
LOGS = 1000  # a setting
TRUE_V = "doubly robust, true V"
Row = dict[str, Any]


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
        of_prefix = self._to_come(p)
        self.values = of_prefix
        self.value = float(of_prefix[:, 0, 0].mean())

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
        x = np.repeat(rng.integers(SPACE.prompts, size=prompts), responses)
        below = np.exp(self.author.sum(-1))[x].cumsum(1)
        y = (rng.random(len(x))[:, None] * below[:, -1:] > below).sum(1)
        lengths: NDArray[np.int64] = np.full(len(x), SPACE.length)
        clusters = np.repeat(np.arange(prompts), responses)
        ratios = self.policy[x, y] - self.author[x, y]
        log = LoggedResponses(ratios, self.rewards[x, y], lengths, clusters)
        return {"": value_on_log(log), TRUE_V: value_on_log(log, self.values[x, y])}


def measure(judged: Judged, size: tuple[int, int], runs: int, seed: int) -> list[Row]:
    """A row an estimate, over `runs` logs."""
    rng = np.random.default_rng(seed)
    found = [judged.estimate(*size, rng) for _ in range(runs)]
    able = [f for f in found if not f[""].obstacle]
    about = {
        "value": judged.value,
        "ess": float(np.mean([f[""].ess for f in found])),
        "estimable": len(able) / runs,
    }
    if not able:
        return [about | {"estimate": None}]
    estimates = {name: [f[""].estimates[name] for f in able] for name in able[0][""].estimates}
    estimates[TRUE_V] = [f[TRUE_V].estimates[HEADLINE] for f in able]
    rows = []
    for name, each in estimates.items():
        errors = np.array([x.value - judged.value for x in each])
        covers = np.mean([x.low <= judged.value <= x.high for x in each])
        spread = {"bias": float(errors.mean()), "sd": float(errors.std())}
        rows.append(about | {"estimate": name, **spread, "covers": float(covers)})
    biases = np.array([f[""].clipping_bias for f in able]).mean(0).tolist()
    return [row | ({"stated_bias": biases} if row["estimate"] == "clipped" else {}) for row in rows]


def rows(runs: int) -> list[Row]:
    at_end = list(product(("start", "another"), ("rewards", "any", "away"), MOVES, SIZES, (False,)))
    by_token = list(product(("start",), ("rewards",), MOVES, SIZES, (True,)))
    result = []
    for seed, (author, toward, move, size, is_by_token) in enumerate(at_end + by_token):
        judged = Judged(move, toward, other_author=author == "another", by_token=is_by_token)
        about = {"log of": author, "direction": toward, "move": move, "by token": is_by_token}
        about |= {"prompts": size[0], "responses": size[1], "runs": runs}
        result += [about | row for row in measure(judged, size, runs, seed)]
    return result


def table(result: list[Row]) -> str:
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
    robust = [row for row in result if row["estimate"] == HEADLINE]
    for name, few in (("fewer than a tenth", True), ("a tenth or more", False)):
        part = [r for r in robust if (r["ess"] < FEW * r["prompts"] * r["responses"]) == few]
        covers = [row["covers"] for row in part]
        if covers:
            held = sum(0.93 <= share <= 0.97 for share in covers)
            text += f"\n\nDoubly robust, where {name} of the responses count: {min(covers):.1%}–"
            text += f"{max(covers):.1%}, within 93 to 97 % in {held} of {len(part)} settings."
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=LOGS, help="logs a setting")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = rows(given.runs)
    document = json.dumps({"rows": result}, indent=1)
    print(document if given.json else table(result))
    (FOLDER / "off_policy_values.json").write_text(document + "\n", encoding="utf-8")
    harness.put(FOLDER / "README.md", table(result), MARK, END)


if __name__ == "__main__":
    main()
