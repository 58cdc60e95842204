"""Tables of the verdicts, and how gradients grow with the length of responses.

What the paper proves, and where each is measured, stands in proved.toml; the sentences about its figures are
in `experiments`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from agro import Batch, objectives
from reproductions import harness
from reproductions.paper import rules
from reproductions.paper.experiments import PAPER, PARTS, Part, Sentence, judge
from reproductions.paper.rules import Found, Verdict

Judged = tuple[Part, Sentence, Verdict]


def judged(found: Mapping[str, Found]) -> list[Judged]:
    """Every sentence of the parts that were run."""
    return [
        (part, sentence, judge(sentence, found[part.name]))
        for part in PARTS.values()
        if part.name in found
        for sentence in part.sentences
    ]


def tables(found: Mapping[str, Found], cost: Mapping[str, tuple[int, float]]) -> str:
    """The paper's sentences in its order, ours, and the tables of each part.

    `cost`: of each part the number of runs and their CPU seconds.
    """
    verdicts = judged(found)
    of_paper = sorted((row for row in verdicts if row[1].whose == PAPER), key=lambda row: row[1].claim.text)
    beyond = [row for row in verdicts if row[1].whose != PAPER]
    runs, minutes = sum(n for n, _ in cost.values()), sum(seconds for _, seconds in cost.values()) / 60
    parts = [
        f"{runs} runs, {minutes:.0f} CPU minutes. The paper's sentences: {_counted(of_paper)}. "
        f"What follows from it, what others say and what we say: {_counted(beyond)}, each in result.json.",
        _verdicts(of_paper),
        _magnitudes(),
    ]
    missing = [
        f"{method} on {plan.replace(', n = ', ' ×')} {why}"
        for name in found
        for method, plan, why in PARTS[name].missing
    ]
    if missing:
        parts.append(f"Not run: {'; '.join(missing)}.")
    return "\n\n".join(parts)


def others(found: Mapping[str, Found]) -> str:
    """What follows from the paper, what others say, what we say."""
    return _verdicts([row for row in judged(found) if row[1].whose != PAPER])


def _counted(rows: Sequence[Judged]) -> str:
    counts = Counter(verdict.word for _, _, verdict in rows)
    words = (rules.HOLDS, rules.FAILS, rules.EQUAL, rules.UNKNOWN)
    return ", ".join(f"{counts[word]} {word}" for word in words if counts[word])


def _magnitudes() -> str:
    power = {name: f"T^{value:.2f}" for name, value in magnitudes().items()}
    return (
        f"With T from 16 to 1,024 independent tokens the gradient of ½ρ² grows as {power['square']} (the "
        f"paper: T²), that of the reward as {power['reward']} (T), their ratio as {power['ratio']}, so that "
        f"β ∼ 1/T; that of eq. 4's pairs as {power['pairs']}, with the mean over tokens as {power['tokens']}."
    )


def _verdicts(rows: Sequence[Judged]) -> str:
    """A line for each sentence, with all data that it was tested on."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for _, of, verdict in rows:
        line = f"{of.on.replace(', n = ', ' ×')}: **{verdict.word}**, {verdict.why}"
        grouped.setdefault((*of.claim, of.whose), []).append(line)
    rows = [
        [f"{text}{'' if whose == PAPER else f' ({whose})'}: {ruled}", "<br>".join(of_data)]
        for (text, ruled, whose), of_data in grouped.items()
    ]
    return harness.markdown(["sentence: what is higher if it holds", "on: verdict, measured (95 %)"], rows)


@cache
def magnitudes() -> dict[str, float]:
    """The powers of T, the length, as which gradients grow on independent tokens of π_ref.

    Of ½ρ², of the reward, and their ratio; that of eq. 4's pairs, whose common part is gone, and with means
    over tokens.
    """
    lengths, tokens, count = (16, 64, 256, 1024), 8, 200
    torch.manual_seed(0)
    policy_V = torch.randn(tokens).double().log_softmax(0)
    coin = (torch.arange(count) % 2).double()
    sizes: dict[str, list[float]] = {}
    for length in lengths:
        drawn = torch.randint(tokens, (count, length))
        logp, ref = policy_V[drawn], torch.full((count, length), -np.log(tokens)).double()
        slope = one_hot(drawn, tokens).double().sum(1) - length * policy_V.exp()  # of ρ, in the logits

        def of_pairs(
            reward: Tensor, ref: Tensor, average: str, logp: Tensor = logp, slope: Tensor = slope
        ) -> float:
            mask = pad(torch.ones(logp.shape, dtype=torch.bool), (1, 0))
            names = [str(i // 2) for i in range(count)]
            batch = Batch.of(mask=mask, reward=reward, group=names, ref_logp=pad(ref, (1, 0)))
            found = objectives.evaluate("agro", pad(logp, (1, 0)), batch, beta=1.0, average=average)
            each = found.grad[:, 1:2] * slope
            return float((each[::2] + each[1::2]).norm(dim=1).mean())

        of_this = {
            "square": float(((logp - ref).sum(1).abs() * slope.norm(dim=1)).mean()),
            "score": float(slope.norm(dim=1).mean()),
        }
        for average in ("sum", "token"):
            of_this[average] = of_pairs(0 * coin, ref, average)
            of_this[f"{average}'s reward"] = of_pairs(coin, logp, average)
        for name, value in of_this.items():
            sizes.setdefault(name, []).append(value)
    power = {name: np.polyfit(np.log(lengths), np.log(of), 1)[0] for name, of in sizes.items()}
    return {
        "square": power["square"],
        "reward": power["score"],
        "ratio": power["square"] - power["score"],
        "pairs": power["sum"] - power["sum's reward"],
        "tokens": power["token"] - power["token's reward"],
    }
