"""Tables of the verdicts, how gradients grow with the length of responses, and the figure of each part.

What the paper proves, and where each is measured, stands in proved.toml; the sentences about its figures are
in `experiments`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import one_hot, pad

from agro import Batch, objectives
from reproductions import harness
from reproductions.paper import drawing, rules
from reproductions.paper import plans as m
from reproductions.paper.drawing import STYLES, Line, Panel, Style
from reproductions.paper.experiments import PAPER, PARTS, Part, Sentence, judge
from reproductions.paper.plans import CAREFUL, CARELESS, LAGS, METHODS, MIXTURE, PLANS, SHARES
from reproductions.paper.rules import Found, Verdict, end
from reproductions.paper.task import OTHER, START

KL_NAME, UPDATES = r"KL($\pi\,\Vert\,\pi_\mathrm{ref}$), nats", "updates"
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


def figures(found: Mapping[str, Found]) -> dict[str, Figure]:
    """By file name, of the parts that were run."""
    makers = {"offline": _offline, "replay": _replay, "lag": _lag, "fresh": _fresh, "beta": _beta}
    return {name: make(found[name]) for name, make in makers.items() if name in found}


def _style(name: str) -> Style:
    """A method looks the same in every figure."""
    return STYLES[METHODS[name].look]


def _lines(found: Found, plan: str, methods: Sequence[str]) -> list[Line]:
    return [
        Line(name, _style(name), found[name, plan, None])
        for name in sorted(methods, key=list(METHODS).index)
        if (name, plan, None) in found
    ]


def _against_kl(panel: Panel) -> Panel:
    return replace(panel, title="", x=drawing.kl, x_name=KL_NAME, own_x=True)


def _offline(found: Found) -> Figure:
    titles = {START: "the start's log", OTHER: "another model's log", MIXTURE: "unknown mixture"}
    first = [
        Panel(
            f"{title}, n = 4",
            _lines(found, f"{log}, n = 4", PARTS["offline"].methods),
            drawing.updates,
            drawing.accuracy,
            UPDATES,
            "accuracy" if log == START else "",
        )
        for log, title in titles.items()
    ]
    return drawing.draw([first, [_against_kl(panel) for panel in first]])


def _replay(found: Found) -> Figure:
    shades = (STYLES[0], STYLES[2], STYLES[8])
    rows = []
    for name in (m.AGRO, m.WEIGHTED, m.BY_SAMPLER):
        lines = [
            Line(f"replay {share:.0%}", style, found.get((name, f"replay {share:g}", None), []))
            for share, style in zip(SHARES, shades, strict=True)
        ]
        panel = Panel(name, lines, drawing.updates, drawing.accuracy, UPDATES, "accuracy")
        sampled = replace(panel, title="", x=drawing.generated, x_name="responses generated", y_name="")
        rows.append([panel, replace(_against_kl(panel), y_name=""), sampled])
    return drawing.draw(rows, height=1.7)


def _lag(found: Found) -> Figure:
    """Accuracy at the end over the lag, and on the way with the largest one."""
    methods = PARTS["lag"].methods
    over_lag = []
    lags = [lag for lag in LAGS if (m.AGRO, f"sync {lag}", None) in found]
    shown = [name for name in methods if all((name, f"sync {lag}", None) in found for lag in lags)]
    for name in sorted(shown, key=list(METHODS).index):
        ends = [[end(run) for run in found[name, f"sync {lag}", None]] for lag in lags]
        by_seed = [{"ends": of_seed} for of_seed in zip(*ends)]  # of the seeds that all have
        over_lag.append(Line(name, _style(name), by_seed))
    last = f"sync {LAGS[-1]}"
    panels = [
        Panel("at the end", over_lag, lambda _: lags, _ends, "lag, updates", "accuracy", log_x=True),
        Panel(f"lag {LAGS[-1]}", _lines(found, last, methods), drawing.updates, drawing.accuracy, UPDATES),
    ]
    return drawing.draw([[*panels, _against_kl(panels[1])]], height=2.3)


def _ends(run: Mapping[str, Any]) -> list[float]:
    return list(run["ends"])


def _fresh(found: Found) -> Figure:
    rows = []
    for start in (CARELESS, CAREFUL):
        plan = f"fresh, {start}"
        right = "3 times in 10" if start == CARELESS else "2 times in 3"
        lines = _lines(found, plan, PARTS["fresh"].methods)
        every = PLANS[plan].every
        panel = Panel(
            f"start right {right}",
            lines,
            lambda run, every=every: [every * (i + 0.5) for i in range(len(run["rewards"]))],
            drawing.rewarded,
            UPDATES,
            "training reward",
        )
        held_out = replace(panel, title="held out", x=drawing.updates, y=drawing.accuracy, y_name="accuracy")
        rows.append([panel, held_out, replace(_against_kl(held_out), y_name="")])
    return drawing.draw(rows)


def _beta(found: Found) -> Figure:
    shown = (
        (m.ON_POLICY, f"fresh, {CAREFUL}", "on-policy AGRO, fresh"),
        (m.AGRO, f"fresh, {CAREFUL}", "AGRO, fresh"),
        (m.AGRO, f"{START}, n = 4", "AGRO, the start's log"),
    )
    shades = (STYLES[1], STYLES[0], STYLES[2], STYLES[6], STYLES[8])
    first = []
    for name, plan, title in shown:
        lines = [
            Line(rf"$\beta$ = {beta:g}", style, found.get((name, plan, beta), []))
            for beta, style in zip(PARTS["beta"].betas or (), shades, strict=True)
        ]
        panel = Panel(title, lines, drawing.updates, drawing.accuracy, UPDATES)
        first.append(panel)
    first[0] = replace(first[0], y_name="accuracy")
    return drawing.draw([first, [_against_kl(panel) for panel in first]])
