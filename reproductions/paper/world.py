"""What all runs share, read once: the model, the prompts and the logs as tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from agro.config import PolicyConfig
from agro.models.encoding import Encoder
from agro.models.policy import Policy
from agro.objectives.needs import REWARD, STORED_QUANTILE, Need
from agro.rollout.prompts import load_prompts
from agro.store import Store
from agro.train.collate import StoredValues
from agro.types import Prompt
from reproductions.paper.stack import Stack
from reproductions.paper.task import LENGTH, LOGS, Size

Item = TypeVar("Item")


class Asked(NamedTuple):
    """Prompts."""

    names: list[str]
    tokens: Tensor  # [M,prompt]
    answers: Tensor  # [M,N] of the right response

    @classmethod
    def of(cls, prompts: Sequence[Prompt], encoder: Encoder) -> Asked:
        tokens = torch.tensor([encoder.checked_prompt(prompt) for prompt in prompts])
        answers = [[*encoder.ids(prompt.columns["answer"]), encoder.eos_ids[0]] for prompt in prompts]
        return cls([prompt.id for prompt in prompts], tokens, torch.tensor(answers))


class Rows(NamedTuple):
    """Samples: of a log, or of one run's update."""

    names: list[str]  # [B] of the prompts
    roles: list[str]  # [B]
    tokens: Tensor  # [B,T] 0 after the end
    mask: Tensor  # [B,N]
    behavior: Tensor  # [B,N] the recorded log-probs
    ref: Tensor  # [B,N] those of the reference; NaN where they aren't needed
    reward: Tensor  # [B]
    age: Tensor  # [B] NaN: unknown

    def part(self, at: Sequence[int]) -> Rows:
        """These rows."""
        rows = list(at)
        return Rows(*([field[i] for i in rows] if isinstance(field, list) else field[rows] for field in self))

    def followed_by(self, other: Rows) -> Rows:
        """Both."""
        pairs = zip(self, other, strict=True)
        return Rows(*(a + b if isinstance(a, list) else torch.cat([a, b]) for a, b in pairs))

    def groups(self, needed: Collection[Need]) -> list[list[int]]:
        """The samples to each prompt that an objective can use: one that doesn't know a good response from a
        bad one is given the right ones alone."""
        found: dict[str, list[int]] = {}
        for i, name in enumerate(self.names):
            if self.reward[i] == 1 or not {REWARD, STORED_QUANTILE}.isdisjoint(needed):
                found.setdefault(name, []).append(i)
        return list(found.values())


class World:
    """The task's files, loaded. `logs`: by source; more may be added."""

    def __init__(self, folder: Path, size: Size) -> None:
        policy = Policy.load(PolicyConfig(model=str(folder / "start")))
        self.encoder, self.size = policy.encoder, size
        prompts = load_prompts(folder / "prompts.jsonl")
        self.fresh = Asked.of(prompts, self.encoder)
        self.held_out = Asked.of(load_prompts(folder / "held_out.jsonl"), self.encoder)
        self.stack = Stack(policy, self.fresh.tokens.shape[1], LENGTH + 1)
        self.start = self.stack.flat(policy.weights())[None]
        self.logs = {source: self._read(folder / file) for source, file in LOGS.items()}
        self.values = StoredValues.load(folder / "values.db", {p.id: p.text for p in prompts})

    def _read(self, log: Path) -> Rows:
        with Store.open(log, read_only=True) as store:
            samples = [self.encoder.encode(sample) for sample in store.samples()]
        count, P, N = len(samples), self.stack.prompt, self.stack.length
        tokens = torch.zeros(count, P + N, dtype=torch.long)
        behavior = torch.zeros(count, N)
        mask = torch.zeros(count, N, dtype=torch.bool)
        for i, sample in enumerate(samples):
            assert sample.tokens is not None
            assert sample.behavior_logp is not None
            end = len(sample.tokens)
            tokens[i, :end] = torch.as_tensor(sample.tokens.copy())
            behavior[i, : end - P] = torch.as_tensor(sample.behavior_logp[P:].copy())
            mask[i, : end - P] = True
        reward = torch.tensor([sample.reward or 0.0 for sample in samples], dtype=torch.float64)
        names, ref = [sample.prompt_id for sample in samples], self.reference(tokens, mask)
        age = torch.full((count,), torch.nan)
        return Rows(names, ["log"] * count, tokens, mask, behavior, ref, reward, age)

    @torch.no_grad()
    def reference(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """[S,T], [S,N] -> [S,N] log-probs of the reference, 0 outside the mask."""
        return self.logp(self.stack.logits(self.start, tokens[None])[0], tokens[None])[0] * mask

    def logp(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[R,B,N,V], [R,B,T] -> [R,B,N] log-probs of the responses' tokens."""
        chosen = tokens[:, :, self.stack.prompt :, None]
        return logits.log_softmax(-1).gather(3, chosen)[..., 0]


def order(items: Sequence[Item], size: int, *seed: object) -> Iterator[list[Item]]:
    """Epoch by epoch all items in a random order, `size` at a time, without an incomplete rest."""
    size = min(size, len(items))
    for epoch in itertools.count():
        drawn = random.Random("/".join(map(str, (*seed, epoch)))).sample(items, len(items))
        for i in range(0, len(items) - size + 1, size):
            yield drawn[i : i + size]
