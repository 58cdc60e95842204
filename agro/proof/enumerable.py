"""A policy small enough to enumerate: every expectation over its responses is a finite sum, in float64.

It has the interface that `agro.train.step.backward` needs, so proofs use the objectives and the step that
train, not a copy of their formulas.

Axes besides those of `agro.types`: X prompts, Y responses to a prompt, C contexts (prefixes of responses).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from agro.objectives.needs import PROPOSAL, PROPOSAL_MEAN, Stream
from agro.types import Batch

END = 0  # the token that ends a response if lengths differ


@dataclass(frozen=True)
class Space:
    """All responses of up to `length` tokens out of `vocabulary`; with `early_end` token 0 ends one, else all
    have full length.

    The tokens at the positions `observed` were written by a tool, not by the policy.
    """

    vocabulary: int = 3
    length: int = 2
    prompts: int = 2
    early_end: bool = False
    observed: tuple[int, ...] = ()

    @cached_property
    def responses(self) -> list[tuple[int, ...]]:
        full = itertools.product(range(self.vocabulary), repeat=self.length)
        cut = (y[: y.index(END) + 1] if self.early_end and END in y else y for y in full)
        return list(dict.fromkeys(cut))

    @cached_property
    def contexts(self) -> list[tuple[int, ...]]:
        """Prefixes after which a token is chosen."""
        return list(dict.fromkeys(y[:t] for y in self.responses for t in range(len(y))))

    @cached_property
    def tokens(self) -> Tensor:
        """[Y,T] padded with 0."""
        return torch.tensor([[*y, *[0] * (self.length - len(y))] for y in self.responses])

    @cached_property
    def lengths(self) -> Tensor:
        """[Y]"""
        return torch.tensor([len(y) for y in self.responses])

    @cached_property
    def mask(self) -> Tensor:
        """[Y,T] the policy's tokens."""
        is_chosen = torch.tensor([t not in self.observed for t in range(self.length)])
        return (torch.arange(self.length)[None] < self.lengths[:, None]) & is_chosen

    def find(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B,T'], [B] -> [B] the numbers of these responses; tokens beyond their lengths aren't read."""
        return self._number[self._code(tokens[:, : self.length], lengths)]

    def _code(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """A response as a number in base V + 1, in which digit 0 means no token."""
        position = torch.arange(tokens.shape[1])
        digits = torch.where(position < lengths[:, None], tokens + 1, 0)
        return (digits * (self.vocabulary + 1) ** position).sum(1)

    @cached_property
    def _number(self) -> Tensor:
        numbers = torch.full(((self.vocabulary + 1) ** self.length,), -1)
        return numbers.index_put((self._code(self.tokens, self.lengths),), torch.arange(len(self.responses)))

    @cached_property
    def places(self) -> Tensor:
        """[Y,T] the context in which each token is chosen; 0 beyond the length."""
        number = {c: i for i, c in enumerate(self.contexts)}
        index = torch.zeros(len(self.responses), self.length, dtype=torch.long)
        for i, y in enumerate(self.responses):
            for t in range(len(y)):
                index[i, t] = number[y[:t]]
        return index


class Table(nn.Module):
    """Logits [X,C,V] that are the parameters themselves."""

    def __init__(self, space: Space, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        shape = (space.prompts, len(space.contexts), space.vocabulary)
        self.logits = nn.Parameter(scale * torch.randn(shape, generator=generator, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.logits


class FollowedPolicy(nn.Module):
    """Logits [X,C,V]: those of `policy` at the prompts where `follows` [X] is set, else those of `table`."""

    def __init__(self, table: nn.Module, policy: nn.Module, follows: Tensor) -> None:
        super().__init__()
        self.table, self.policy, self.follows = table, policy, follows

    def forward(self) -> Tensor:
        return torch.where(self.follows[:, None, None], self.policy(), self.table())


class Network(nn.Module):
    """Logits [X,C,V] from two layers that prompts and contexts share."""

    def __init__(self, space: Space, scale: float, generator: torch.Generator, hidden: int = 6) -> None:
        super().__init__()

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(shape, generator=generator, dtype=torch.float64))

        self.prompt, self.token = draw(space.prompts, hidden), draw(space.length, space.vocabulary, hidden)
        self.mix, self.out = draw(hidden, hidden), draw(hidden, space.vocabulary)
        self.has = torch.zeros(len(space.contexts), space.length * space.vocabulary, dtype=torch.float64)
        for number, context in enumerate(space.contexts):
            for t, v in enumerate(context):
                self.has[number, t * space.vocabulary + v] = 1.0

    def forward(self) -> Tensor:
        read = self.has @ self.token.flatten(0, 1)
        return torch.tanh((self.prompt[:, None] + read[None]) @ self.mix) @ self.out


class TabularValues(nn.Module):
    """A value per context [X,C]; a row has that of the context of its first token."""

    def __init__(self, space: Space, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        shape = (space.prompts, len(space.contexts))
        self.prefix = nn.Parameter(scale * torch.randn(shape, generator=generator, dtype=torch.float64))


class Enumerable:
    """A policy over `space` with the step's interface (`streams`, `model`, `device`, `weights`), and with
    exact expectations.

    The rows of the step are [prompt number, tokens…]: the first column is the prompt.
    """

    device = torch.device("cpu")
    adapter = None
    packs = False  # prompts share no prefix to compute once

    def __init__(self, space: Space, model: nn.Module, value: TabularValues) -> None:
        self.space, self.model, self.value = space, model, value

    @classmethod
    def table(cls, space: Space, seed: int = 0, scale: float = 1.0) -> Enumerable:
        generator = torch.Generator().manual_seed(seed)
        return cls(space, Table(space, scale, generator), TabularValues(space, scale, generator))

    @classmethod
    def network(cls, space: Space, seed: int = 0, scale: float = 0.7) -> Enumerable:
        generator = torch.Generator().manual_seed(seed)
        return cls(space, Network(space, scale, generator), TabularValues(space, scale, generator))

    @classmethod
    def joined(cls, tables: Sequence[Enumerable]) -> Enumerable:
        """Copy tables over spaces that differ only in their prompts into one over all prompts."""
        spaces = [t.space for t in tables]
        policy = cls.table(replace(spaces[0], prompts=sum(s.prompts for s in spaces)))
        with torch.no_grad():
            policy.weights()["logits"].copy_(torch.cat([t.weights()["logits"] for t in tables]))
        return policy

    def following(self, policy: Enumerable, follows: Tensor) -> Enumerable:
        """This behavior, but the current `policy` at the prompts where `follows` [X] is set."""
        return Enumerable(self.space, FollowedPolicy(self.model, policy.model, follows), self.value)

    @property
    def follows(self) -> bool:
        """Whether it follows a policy that is being trained."""
        return isinstance(self.model, FollowedPolicy)

    def weights(self) -> dict[str, Tensor]:
        """The policy's weights, without those of its value."""
        return dict(self.model.named_parameters())

    def parameters(self) -> list[Tensor]:
        """All parameters: the policy's first, then its value's."""
        return [*self.model.parameters(), *self.value.parameters()]

    def zero_grad(self) -> None:
        for p in self.parameters():
            p.grad = None

    def logp_next(self) -> Tensor:
        """[X,C,V] log π of every next token, with gradient."""
        logp: Tensor = self.model().log_softmax(-1)
        return logp

    def logp_tokens(self) -> Tensor:
        """[X,Y,T] log π(y_t | y_<t), 0 beyond the length."""
        s = self.space
        return torch.where(s.mask, self.logp_next()[:, s.places, s.tokens], 0.0)

    def kl_tokens(self, reference: Enumerable) -> Tensor:
        """[X,Y,T] KL(π(·|y_<t) ‖ π_ref(·|y_<t)), with gradient, 0 beyond the length."""
        s, logp = self.space, self.logp_next()
        per_context = (logp.exp() * (logp - reference.logp_next().detach())).sum(-1)
        return torch.where(s.mask, per_context[:, s.places], 0.0)

    def logp(self) -> Tensor:
        """[X,Y] log π(y), with gradient."""
        return self.logp_tokens().sum(2)

    def normalizer(self) -> Tensor:
        """[X,C] log Σ_a exp of the logits, with gradient."""
        total: Tensor = self.model().logsumexp(-1)
        return total

    def proposal(self, need: Stream) -> Tensor:
        """[X,C,V] q ∝ π^(1/κ), or the frequencies of `need.draws` samples of it; without gradient."""
        q = (self.logp_next().detach() / need.temperature).softmax(-1)
        if not need.draws:
            return q
        generator = torch.Generator().manual_seed(int(need.seed))
        tokens = torch.multinomial(q.flatten(0, 1), need.draws, replacement=True, generator=generator)
        return torch.nn.functional.one_hot(tokens, q.shape[-1]).double().mean(1).view(q.shape)

    def streams(
        self,
        tokens: Tensor,
        lengths: Tensor,
        mask: Tensor,
        want: Collection[str] = ("logp",),
        reference: Enumerable | None = None,
        kept: None = None,
    ) -> dict[str, Tensor]:
        """Like `agro.models.policy.Policy.streams`, without kept sets."""
        Y = len(self.space.responses)
        prompt, response = tokens[:, 0], self.space.find(tokens[:, 1:], lengths - 1)
        tables = {k: v for k, v in self._streams(want, reference).items() if k in want}
        width = min(tokens.shape[1], self.space.length + 1)
        streams = {}
        for k, table in tables.items():
            rows = table.flatten(0, 1).index_select(0, prompt * Y + response)
            value = torch.nn.functional.pad(rows[:, : width - 1], (1, mask.shape[1] - width))
            streams[k] = torch.where(mask, value, math.nan)
        if "value" in want:
            start = mask.int().argmax(1) - 1  # the first column is the prompt
            context = self.space.places[response, start]
            streams["value"] = self.value.prefix[prompt, context]
        return streams

    def streams_of(self, batch: Batch, want: Collection[str], reference: Enumerable) -> dict[str, Tensor]:
        """`streams` of a batch."""
        assert batch.tokens is not None
        assert batch.lengths is not None
        return self.streams(batch.tokens, batch.lengths, batch.mask, want, reference)

    def _streams(self, want: Collection[str], reference: Enumerable | None) -> dict[str, Tensor]:
        """[X,Y,T] the streams of all responses; any values beyond their lengths."""
        logp, places = self.logp_next(), self.space.places
        streams = {"logp": logp[:, places, self.space.tokens]}
        if "entropy" in want:
            streams["entropy"] = -(logp.exp() * logp).sum(-1)[:, places]
        if "normalizer" in want:
            streams["normalizer"] = self.normalizer()[:, places]
        if "kl" in want:
            assert reference is not None
            streams["kl"] = self.kl_tokens(reference)
        if {"ref_mean", "ref_square"} & set(want):
            assert reference is not None
            ref = reference.logp_next().detach()
            streams["ref_mean"] = (ref.exp() * (logp - ref)).sum(-1)[:, places]
            streams["ref_square"] = (ref.exp() * (logp - ref).square()).sum(-1)[:, places] / 2
        for need in want:
            if not isinstance(need, Stream):
                continue
            if need in (PROPOSAL, PROPOSAL_MEAN):
                q = self.proposal(need)
                mean, share = (q * logp).sum(-1)[:, places], q[:, places, self.space.tokens]
                streams[need] = mean if need == PROPOSAL_MEAN else share
        if "prefix_value" in want:
            streams["prefix_value"] = self.value.prefix[:, places]
        return streams


def optimum(reference: Tensor, reward: Tensor, beta: float) -> Tensor:
    """[X,Y] log π* = log π_ref + r/β − log Z (AGRO, arXiv 2503.19612, the optimum of the regularized
    objective)."""
    return (reference + reward / beta).log_softmax(-1)


def optimal_value(reference: Enumerable, reward: Tensor, beta: float) -> Tensor:
    """[X] V*(x) = β log E_π_ref exp(r/β)."""
    return beta * (reference.logp().detach() + reward / beta).logsumexp(1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """[X] KL(p ‖ q) of log-probs [X,Y]."""
    return (p.exp() * (p - q)).sum(-1)


def multisets(responses: int, n: int) -> tuple[Tensor, Tensor]:
    """All groups of n responses up to order: [G,n] response numbers, and [G] the number of orders of each."""
    groups = list(itertools.combinations_with_replacement(range(responses), n))
    equal = [math.prod(map(math.factorial, Counter(g).values())) for g in groups]  # orders of equal responses
    return torch.tensor(groups), math.factorial(n) / torch.tensor(equal, dtype=torch.float64)
