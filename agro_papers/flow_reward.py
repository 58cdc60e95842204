"""Rewards of tokens from a flow on the policy's hidden states: RLFR (arXiv 2510.10201).

A small network learns the velocity from noise to the hidden states of trusted responses, at one layer. If its
error on another response's tokens is large, these are unlike trusted ones and get a lower reward.

    x_t = t h + (1 − t) z,  u = h − z,  z normal        s = t / (1 − t) · mean_H (v(x_t, t, c) − u)²

h [H] is the hidden state after a token and c the one before it. s is scaled to [−1, 1] within a response,
values near 0 become 0, and the reward of a token is −coef · s.

Choices that differ from the paper's code or that the text leaves open: one layer, not several; the context is
the hidden state of the previous token; hidden states are standardized by mean and standard deviation of the
trusted ones; v is a network with two hidden layers.

As a source, the flow is fitted again regularly to the hidden states of trusted responses, which change as the
policy learns. A response has its token rewards as soon as it is in the store. Before the first fit, while no
response is trusted, it has none. Checkpoints contain the last fit and the ids of the newest responses, as the
state of a monitor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from agro.config import Count, Section, Share, field
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.pretrained import decoder_layers
from agro.objectives.needs import REWARD_PARTS
from agro.rollout import CollectResult, Rollout
from agro.train.around import Context, SourceWrapper
from agro.train.learner import Learner
from agro.train.monitors import Monitor
from agro.train.phases import derive
from agro.train.source import FillRequest, Source
from agro.train.stored_tensors import from_text, to_text
from agro.types import Sample

ROWS = 32  # responses whose hidden states are computed at once
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


class Scaled(nn.Module):
    """A network on hidden states [N,H], with mean and standard deviation of the states at its fit."""

    mean: Tensor  # [H]
    std: Tensor  # [H]

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(hidden))
        self.register_buffer("std", torch.ones(hidden))

    def rescale(self, states: Tensor) -> None:
        """Set mean and standard deviation to those of these states."""
        self.mean, self.std = states.mean(0), states.std(0, correction=0).clamp(min=1e-6)

    def scaled(self, states: Tensor) -> Tensor:
        return (states - self.mean) / self.std


class Flow(Scaled):
    """v(x, t, c): [N,H], [N], [N,H] -> [N,H], of standardized states."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__(hidden)
        self.layers = nn.Sequential(
            nn.Linear(2 * hidden + 1, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, hidden),
        )

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        velocity: Tensor = self.layers(torch.cat([x, context, time[:, None]], 1))
        return velocity


def flow_errors(velocity: Velocity, states: Tensor, context: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """[N] mean over H of (v − u)², of states, contexts and noise [N,H] at times [N] in [0,1)."""
    t = time[:, None]
    x = t * states + (1 - t) * noise
    return (velocity(x, time, context) - (states - noise)).square().mean(1)


def token_rewards(score: Tensor, mask: Tensor, *, coef: float, threshold: float = 0.0) -> Tensor:
    """−coef · s at the positions of `mask`, 0 elsewhere, with s the `score` scaled within each row.

    For equal scores all rewards are 0. (Scaled to [−1, 1] they would all be −1, a bonus.)

    Args:
        score: [B,T].
        mask: [B,T].
        threshold: smaller |s| become 0.
    """
    low = torch.where(mask, score, torch.inf).amin(1, keepdim=True)
    spread = torch.where(mask, score, -torch.inf).amax(1, keepdim=True) - low
    differs = mask & (spread > 0)
    s = torch.where(differs, 2 * (score - low) / spread - 1, 0.0)
    return -coef * torch.where(s.abs() < threshold, 0.0, s)


@torch.no_grad()
def hidden_states(policy: Policy, samples: Sequence[Sample], layer: int) -> list[Tensor]:
    """The output [T,H] of a layer for each encoded sample; negative numbers count from the last layer."""
    states_per_sample: list[Tensor] = []
    outputs: list[Tensor] = []
    layers = decoder_layers(policy.model)
    if not -len(layers) <= layer < len(layers):
        raise Refused(f"layer: expected one of the model's {len(layers)} layers, got {layer}")
    block = layers[layer]
    handle = block.register_forward_hook(lambda module, args, states: outputs.append(states))
    try:
        for start in range(0, len(samples), ROWS):
            tokens = [torch.tensor(s.tokens, dtype=torch.long) for s in samples[start : start + ROWS]]
            lengths = torch.tensor([len(row) for row in tokens])
            policy.hidden(pad_sequence(tokens, batch_first=True), lengths, packs=False)
            states_per_sample += [
                row[:n].float() for row, n in zip(outputs.pop(), lengths.tolist(), strict=True)
            ]
    finally:
        handle.remove()
    return states_per_sample


@dataclass(frozen=True)
class FlowReward:
    """A fitted flow; `fit` makes one."""

    policy: Policy
    layer: int
    flow: Flow

    @classmethod
    def fit(
        cls,
        policy: Policy,
        trusted: Sequence[Sample],
        *,
        layer: int = -1,
        width: int = 256,
        steps: int = 1000,
        seed: int = 0,
    ) -> FlowReward:
        """Learn the velocity on the responses of `trusted`, by AdamW. Raises `Refused` if there are none.

        Args:
            layer: the layer whose output is read; negative numbers count from the last layer.
            width: width of the network's hidden layers.
            steps: updates, of 256 tokens each.
        """
        if not trusted:
            raise Refused("flow reward: expected trusted responses to fit the flow to, got none")
        states, context = _pairs(policy, trusted, layer)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            flow = Flow(states.shape[1], width).to(policy.device)
            flow.rescale(states)
            states, context = flow.scaled(states), flow.scaled(context)
            optimizer = torch.optim.AdamW(flow.parameters(), lr=1e-3)
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / steps)
                rows = torch.randint(len(states), (256,), device=states.device)
                h, time = states[rows], torch.rand(256, device=states.device)
                loss = flow_errors(flow, h, context[rows], torch.randn_like(h), time).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return cls(policy, layer, flow.requires_grad_(False))

    @classmethod
    def load(cls, policy: Policy, layer: int, tensors: Mapping[str, Tensor]) -> FlowReward:
        """The flow with the tensors of `flow.state_dict()`, on a policy's hidden states."""
        flow = Flow(len(tensors["mean"]), len(tensors["layers.0.bias"]))
        flow.load_state_dict(tensors)
        return cls(policy, layer, flow.to(policy.device).requires_grad_(False))

    def scores(
        self, samples: Sequence[Sample], *, times: Sequence[float] = (0.8,), draws: int = 1, seed: int = 0
    ) -> list[NDArray[np.float32]]:
        """s [T] of each sample, the mean over `times` and `draws` of noise; NaN at unchosen tokens."""
        encoded = [self.policy.encode(sample) for sample in samples]
        states, context = _pairs(self.policy, encoded, self.layer)
        states, context = self.flow.scaled(states), self.flow.scaled(context)
        noise = torch.Generator().manual_seed(seed)
        total = torch.zeros(len(states), device=states.device)
        for time in times:
            for _ in range(draws):
                z = torch.randn(states.shape, generator=noise).to(states.device)
                t = torch.full((len(states),), time, device=states.device)
                total += time / (1 - time) * flow_errors(self.flow, states, context, z, t)
        values = iter(total.div_(len(times) * draws).cpu().numpy())
        scores = []
        for sample in encoded:
            assert sample.action is not None
            row = np.full(len(sample.action), np.nan, np.float32)
            row[_scored(sample)] = [next(values) for _ in range(int(_scored(sample).sum()))]
            scores.append(row)
        return scores

    def reward(self, samples: Sequence[Sample], *, coef: float, threshold: float = 0.0) -> list[Sample]:
        """The encoded samples with `token_reward`, which training adds to `reward`; see `token_rewards`."""
        rewarded = []
        for sample, score in zip(samples, self.scores(samples), strict=True):
            is_scored = ~np.isnan(score)
            score_T, mask_T = torch.from_numpy(score)[None], torch.from_numpy(is_scored)[None]
            reward = token_rewards(score_T, mask_T, coef=coef, threshold=threshold)[0].numpy()
            encoded = self.policy.encode(sample)
            rewarded.append(encoded.replace(token_reward=np.where(is_scored, reward, np.nan)))
        return rewarded


def _scored(sample: Sample) -> NDArray[np.bool_]:
    """[T] whether the policy chose the token and another one precedes it."""
    assert sample.action is not None
    return sample.action & (np.arange(len(sample.action)) > 0)


def _pairs(policy: Policy, samples: Sequence[Sample], layer: int) -> tuple[Tensor, Tensor]:
    """Hidden states [N,H] after and before each token that the policies of the samples chose."""
    encoded = [policy.encode(sample) for sample in samples]
    current, previous = [], []
    for sample, states in zip(encoded, hidden_states(policy, encoded, layer)):
        positions = torch.from_numpy(np.flatnonzero(_scored(sample))).to(states.device)
        current.append(states[positions])
        previous.append(states[positions - 1])
    return torch.cat(current), torch.cat(previous)


class FlowOptions(Section):
    """Token rewards by a flow that is fitted while training, to trusted responses (RLFR, arXiv 2510.10201):
    the newest of the run with a reward of `min_reward`, and those of role "expert" in the store."""

    min_reward: float
    """least reward of a trusted response"""
    coef: float = field(0.01, ge=0)
    """largest reward of a token, up or down; it is added to the response's reward"""
    threshold: Share = 0.0
    """smaller deviations, as shares of a response's largest, become 0"""
    every: Count = 20
    """optimizer steps between fits, each of which starts from scratch"""
    newest: Count = 256
    """number of the run's newest responses that may be trusted, and of the experts'"""
    steps: Count = 500
    """updates per fit, of 256 tokens each"""
    layer: int = -1
    """layer whose hidden states it reads; negative numbers count from the last layer"""


class FlowRollout(Rollout):
    """Samples like another rollout, with token rewards once there is a flow."""

    flow: FlowReward | None = None

    def __init__(self, rollout: Rollout, config: FlowOptions) -> None:
        super().__init__(rollout.encoder, rollout.engine, source=rollout.source)
        self.config = config

    def sample(self, *args: Any, **kwargs: Any) -> Iterator[Sample]:
        """See `Rollout.sample`; yields as many responses at once as the flow reads at once."""
        sampled, flow, config = super().sample(*args, **kwargs), self.flow, self.config
        if flow is None:
            yield from sampled
            return
        while chunk := list(itertools.islice(sampled, ROWS)):
            yield from flow.reward(chunk, coef=config.coef, threshold=config.threshold)


class FlowSource(Monitor):
    """Samples in this process, step by step, and fits the flow that rewards tokens."""

    name = "flow"

    def __init__(self, source: Source, context: Context, options: FlowOptions) -> None:
        self.flow, self.policy = options, context.policy
        self.rollout = FlowRollout(context.inline.rollout, options)
        self.sampler = replace(context.inline, rollout=self.rollout)
        self.fitted = -1  # the version of the weights at the last fit
        self.newest: list[int] = []  # ids

    def publish(self, learner: Learner) -> None:
        """Fit the flow if the last fit is `every` optimizer steps old, to trusted responses: the run's newest
        with a reward of `min_reward`, and the store's expert responses."""
        self.sampler.publish(learner)
        if self.fitted >= 0 and learner.version - self.fitted < self.flow.every:
            return
        store, options = self.sampler.store, self.flow
        newest = store.samples(ids=self.newest, skip_damaged=True)
        experts = store.samples(roles=("expert",), skip_damaged=True)
        trusted = [s for s in newest if s.reward is not None and s.reward >= options.min_reward]
        trusted += itertools.islice(experts, options.newest)
        if trusted:
            seed = derive(self.sampler.config.train.seed, "flow", learner.version)
            sizes = {"layer": options.layer, "steps": options.steps}
            self.rollout.flow = FlowReward.fit(self.policy, trusted, **sizes, seed=seed)
            self.fitted = learner.version

    def fill(self, wanted: FillRequest) -> CollectResult:
        filled = self.sampler.fill(wanted)
        self.newest = [*self.newest, *filled.ids][-self.flow.newest :]
        return filled

    def state(self) -> Any:
        flow = None if self.rollout.flow is None else to_text(self.rollout.flow.flow.state_dict())
        return {"fitted": self.fitted, "newest": self.newest, "tensors": flow}

    def restore(self, state: Any) -> None:
        self.fitted, self.newest = state["fitted"], state["newest"]
        if state["tensors"] is not None:
            tensors = from_text(state["tensors"])
            self.rollout.flow = FlowReward.load(self.policy, self.flow.layer, tensors)


FLOW_REWARD = SourceWrapper(
    FlowSource,
    FlowOptions,
    needs=frozenset(("samples_current_weights", "shares_engine", "complete_policy", "single_turns")),
    can=lambda inner, options: inner,
    problems=lambda phase, options: {
        "adds rewards of tokens, which the advantage of gdpo would lose": REWARD_PARTS in phase.needs
    },
)
