"""A reward model trained from judged pairs or from ratings, and what it is worth on prompts held out.

Pairs, Bradley and Terry's loss with p the probability that the first response is the better one:

    −p log σ(s_1 − s_2) − (1 − p) log σ(s_2 − s_1)

p is 1 without votes, else the posterior mean (votes + 1)/(all votes + 2) of them under a uniform prior.
Ratings, regression: (s − (r − mean)/std)², with mean and std of the ratings that are trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import logsigmoid

from agro.errors import Refused
from agro.rewards.model import RewardModel

Kind = Literal["pairs", "ratings"]


@dataclass(frozen=True)
class Fitting:
    """How a model is fitted. `batch`: comparisons, or ratings, of an update."""

    kind: Kind
    epochs: int
    batch: int
    lr: float
    seed: int


@dataclass(frozen=True)
class Comparison:
    """Two of the responses to one prompt, by their places, and the probability that the first is better."""

    first: int
    second: int
    p: float
    prompt: str  # id


@dataclass(frozen=True)
class Judged:
    """What a reward model is fitted to. `rows` are sequences of tokens, `length` those of the response."""

    rows: list[list[int]]
    length: list[int]  # characters of the response
    comparisons: list[Comparison]
    ratings: list[tuple[int, float, str]]  # place, rating, prompt's id

    def split(self, is_held_out: Callable[[str], bool]) -> tuple[Judged, Judged]:
        """Those that are trained on, and those that are held out."""

        def part(held_out: bool) -> Judged:
            comparisons = [c for c in self.comparisons if is_held_out(c.prompt) is held_out]
            ratings = [r for r in self.ratings if is_held_out(r[2]) is held_out]
            return replace(self, comparisons=comparisons, ratings=ratings)

        return part(held_out=False), part(held_out=True)


def by_rating(ratings: Sequence[tuple[int, float, str]]) -> list[Comparison]:
    """Each two responses to one prompt whose ratings differ, the better one first."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for place, rating, prompt in ratings:
        groups.setdefault(prompt, []).append((place, rating))
    found = []
    for prompt, rated in groups.items():
        for one, other in combinations(rated, 2):
            if one[1] != other[1]:
                better, worse = sorted((one, other), key=lambda place: -place[1])
                found.append(Comparison(better[0], worse[0], 1.0, prompt))
    return found


def fit(
    model: RewardModel, judged: Judged, options: Fitting, say: Callable[[int, int, float], None]
) -> RewardModel:
    """Train the model's weights by AdamW, with the rate rising over a tenth of the updates and then falling.

    Args:
        say: told the update, how many there are, and the loss.
    Returns:
        the model with the scale of its ratings; that of pairs is 1.
    """
    is_pairs = options.kind == "pairs"
    items: Sequence[Any] = judged.comparisons if is_pairs else judged.ratings
    if len(items) < 2:
        raise Refused(f"fit-reward: expected {options.kind} to train on, got {len(items)}")
    mean, std = 0.0, 1.0
    if not is_pairs:
        ratings = np.array([rating for _, rating, _ in judged.ratings])
        mean, std = float(ratings.mean()), float(ratings.std())
        if ratings.min() == ratings.max():
            raise Refused(f"fit-reward: all {len(ratings)} ratings that are trained on are {mean:g}")
    random = torch.Generator().manual_seed(options.seed)
    updates = options.epochs * -(-len(items) // options.batch)
    weights = [w for w in model.model.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.lr)
    rising = max(1, updates // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: min((at + 1) / rising, (updates - at) / max(1, updates - rising))
    )
    model.model.train()
    for update, some in enumerate(_batches(items, options, random), 1):
        if is_pairs:
            places = [place for c in some for place in (c.first, c.second)]
            scores = model.logits([judged.rows[place] for place in places])[:, 0].view(-1, 2)
            difference = scores[:, 0] - scores[:, 1]
            p = torch.tensor([c.p for c in some], device=difference.device)
            loss = -(p * logsigmoid(difference) + (1 - p) * logsigmoid(-difference)).mean()
        else:
            scores = model.logits([judged.rows[place] for place, _, _ in some])[:, 0]
            target = torch.tensor([(rating - mean) / std for _, rating, _ in some], device=scores.device)
            loss = (scores - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        say(update, updates, loss.item())
    model.model.eval()
    return replace(model, scale=std, shift=mean)


def _batches(items: Sequence[Any], options: Fitting, random: torch.Generator) -> Iterator[list[Any]]:
    for _ in range(options.epochs):
        order = torch.randperm(len(items), generator=random).tolist()
        for start in range(0, len(order), options.batch):
            yield [items[i] for i in order[start : start + options.batch]]


def posterior_mean(votes: float, others: float) -> float:
    """Of the probability that a vote is for the first, under a uniform prior."""
    return (votes + 1) / (votes + others + 2)


@dataclass(frozen=True)
class Ranked:
    """Held-out comparisons with a clear winner, and how the model ranks them. [N] each, winner first."""

    prompts: list[str]
    margin: NDArray[np.float64]  # score of the better response − that of the worse
    longer: NDArray[np.float64]  # characters of the better response − those of the worse

    @classmethod
    def of(cls, judged: Judged, values: Mapping[int, float]) -> Ranked:
        """`values`: by places in `judged.rows`. Ties are left out."""
        clear = []
        for c in judged.comparisons:
            if c.p != 0.5:
                better, worse = (c.first, c.second) if c.p > 0.5 else (c.second, c.first)
                clear.append((better, worse, c.prompt))
        margin = [values[better] - values[worse] for better, worse, _ in clear]
        longer = [float(judged.length[better] - judged.length[worse]) for better, worse, _ in clear]
        return cls([prompt for _, _, prompt in clear], np.array(margin), np.array(longer))

    @property
    def right(self) -> NDArray[np.float64]:
        """[N] 1 where the better response is ranked higher, ½ where both are equal, else 0."""
        return (np.sign(self.margin) + 1) / 2

    def by_prompt(self) -> NDArray[np.float64]:
        """The share of each prompt's comparisons that is right: those of one prompt aren't independent."""
        groups: dict[str, list[float]] = {}
        for prompt, value in zip(self.prompts, self.right.tolist(), strict=True):
            groups.setdefault(prompt, []).append(value)
        return np.array([np.mean(group) for group in groups.values()])

    def calibration(self, bins: int = 5) -> list[dict[str, float]]:
        """What the model says, σ|margin|, from ½ to 1, against how often it is right."""
        says = 1 / (1 + np.exp(-np.abs(self.margin)))
        edges = np.quantile(says, np.linspace(0, 1, bins + 1)[1:-1])
        places = np.searchsorted(edges, says, side="right")
        rows = []
        for part in (places == b for b in range(bins)):
            if part.any():
                right = float(self.right[part].mean())
                rows.append({"n": int(part.sum()), "says": float(says[part].mean()), "right": right})
        return rows

    def length_bias(self) -> dict[str, float | None]:
        """How the ranking depends on length, in pairs of different length.

        longer_judged, longer_ranked: the share of pairs in which the longer response is the better one by the
        judgments, by the model. right_longer, right_shorter: accuracy where the better one is the longer, the
        shorter. baseline: the accuracy of always choosing the longer, or always the shorter.
        """
        differ = self.longer != 0
        longer, right = self.longer[differ] > 0, self.right[differ]
        judged = _mean(longer)
        return {
            "n": int(differ.sum()),
            "longer_judged": judged,
            "longer_ranked": _mean(np.where(longer, right, 1 - right)),
            "right_longer": _mean(right[longer]),
            "right_shorter": _mean(right[~longer]),
            "baseline": None if judged is None else max(judged, 1 - judged),
        }


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None
