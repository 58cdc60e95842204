"""What all runs share, read once: the model, the prompts and the logs as tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from agro.config import PolicyConfig
from agro.models.encoding import Encoder
from agro.models.policy import Policy
from agro.objectives.needs import PAIRS, Need
from agro.rollout.prompts import load_prompts
from agro.store import Store
from agro.train.collate import StoredValues
from agro.types import Prompt
from reproductions.arena.kinds import chooses_by_reward
from reproductions.arena.stack import Stack
from reproductions.arena.task import LENGTH, OTHER, START, Files

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


def parts_of(fields: Iterable[Any], at: Sequence[int]) -> list[Any]:
    """Of fields that are lists or tensors these rows."""
    rows = list(at)
    return [[field[i] for i in rows] if isinstance(field, list) else field[rows] for field in fields]


def joined(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Fields that are lists or tensors, one after the other."""
    pairs = zip(first, second, strict=True)
    return [a + b if isinstance(a, list) else torch.cat([a, b]) for a, b in pairs]


class Logged(NamedTuple):
    """The samples of a log."""

    names: list[str]  # [S] of the prompts
    tokens: Tensor  # [S,T] 0 after the end
    mask: Tensor  # [S,N]
    behavior: Tensor  # [S,N] the recorded log-probs
    ref: Tensor  # [S,N] those of the reference
    reward: Tensor  # [S]
    pairs: list[tuple[int, int]]  # the better one first

    def groups(self, needed: Collection[Need]) -> list[list[int]]:
        """The samples to each prompt that an objective can use: judged ones, or right ones alone."""
        usable = set(range(len(self.names)))
        if PAIRS in needed:
            usable = {i for pair in self.pairs for i in pair}
        elif not chooses_by_reward(needed):
            usable = set((self.reward == 1).nonzero()[:, 0].tolist())
        found: dict[str, list[int]] = {}
        for i in sorted(usable):
            found.setdefault(self.names[i], []).append(i)
        return list(found.values())

    def part(self, at: Sequence[int]) -> Logged:
        """These samples, without judgments."""
        return Logged(*parts_of(self[:-1], at), pairs=[])

    def followed_by(self, other: Logged) -> Logged:
        """The samples of both, without judgments."""
        return Logged(*joined(self[:-1], other[:-1]), pairs=[])


class World:
    """The task's files, loaded."""

    def __init__(self, files: Files) -> None:
        policy = Policy.load(PolicyConfig(model=str(files.start)))
        self.encoder, self.size = policy.encoder, files.size
        self.fresh = Asked.of(load_prompts(files.prompts), self.encoder)
        self.held_out = Asked.of(load_prompts(files.held_out), self.encoder)
        self.stack = Stack(policy, self.fresh.tokens.shape[1], LENGTH + 1)
        self.start = self.stack.flat(policy.weights())[None]
        self.logs = {source: self._read(files, source) for source in (START, OTHER)}
        asked = {p.id: p.text for p in load_prompts(files.prompts)}
        self.values = StoredValues.load(files.values, asked)

    def _read(self, files: Files, source: str) -> Logged:
        with Store.open(files.log(source), read_only=True) as store:
            samples = [self.encoder.encode(sample) for sample in store.samples()]
            place = {sample.id: i for i, sample in enumerate(samples)}
            pairs = [(place[pair.winner], place[pair.loser]) for pair in store.pairs()]
        P, N = self.stack.prompt, self.stack.length
        tokens = torch.zeros(len(samples), P + N, dtype=torch.long)
        behavior = torch.zeros(len(samples), N)
        mask = torch.zeros(len(samples), N, dtype=torch.bool)
        for i, sample in enumerate(samples):
            assert sample.tokens is not None
            assert sample.behavior_logp is not None
            end = len(sample.tokens)
            tokens[i, :end] = torch.as_tensor(sample.tokens.copy())
            behavior[i, : end - P] = torch.as_tensor(sample.behavior_logp[P:].copy())
            mask[i, : end - P] = True
        reward = torch.tensor([sample.reward or 0.0 for sample in samples])
        names = [sample.prompt_id for sample in samples]
        return Logged(names, tokens, mask, behavior, self.reference(tokens, mask), reward, pairs)

    @torch.no_grad()
    def reference(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """[S,T], [S,N] -> [S,N] log-probs of the reference, 0 outside the mask."""
        return self.logp(self.stack.logits(self.start, tokens[None])[0], tokens[None])[0] * mask

    def logp(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[R,B,N,V], [R,B,T] -> [R,B,N] log-probs of the responses' tokens."""
        chosen = tokens[:, :, self.stack.prompt :, None]
        return logits.log_softmax(-1).gather(3, chosen)[..., 0]


@cache
def world(files: Files) -> World:
    """Loaded once in each process."""
    torch.set_num_threads(1)
    return World(files)


def order(items: Sequence[Item], size: int, *seed: object) -> Iterator[list[Item]]:
    """Epoch by epoch all items in a random order, `size` at a time, without an incomplete rest."""
    size = min(size, len(items))
    for epoch in itertools.count():
        drawn = random.Random("/".join(map(str, (*seed, epoch)))).sample(items, len(items))
        for i in range(0, len(items) - size + 1, size):
            yield drawn[i : i + size]
