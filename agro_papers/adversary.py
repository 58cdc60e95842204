"""A source whose fresh responses get a reward that is learned while training.

After sampling, it fits a discriminator to the run's newest responses against demonstrations, and scores the
responses with it. So imitation needs no reward, and the policy can't keep writing a text that fools an old
fit. The value of [reward] is measured too, on held-out responses only: if the two diverge, the policy
exploits the learned one.

Checkpoints contain the last fit and the ids of the newest responses, as the state of a monitor.

The discriminator D(h) is a number for a response, h [H] the mean of the policy's hidden states at its tokens.
It is fitted to two responses to one prompt, a demonstration h_E and the policy's h_π, by one of two losses
and a penalty on its slope at points in between:

    logistic   −log σ(D(h_E)) − log σ(−D(h_π))      pairs   −log σ(D(h_E) − D(h_π))
    + λ mean (‖∇D(ĥ)‖ − k)²                         ĥ = u h_E + (1 − u) h_π, u uniform from 0 to 1

The logistic loss is least at D = log p_E/p_π, whose mean over the policy's responses is −KL(p_π ‖ p_E) (GAIL;
the reward of demonstrations in the view of arXiv 2310.06147). Pairs use Bradley–Terry (GAD, arXiv
2511.10643). The penalty bounds the slope: without it, off-policy imitation is unstable (arXiv 2006.16785).

Each fit continues from the last one. Hidden states are standardized by the mean and standard deviation at
the fit, which change as the policy learns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from agro.config import Count, Positive, Section, field
from agro.errors import Refused
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.objectives.needs import REWARD_PARTS
from agro.rollout import CollectResult
from agro.train.around import Context, SourceWrapper
from agro.train.collate import staleness
from agro.train.learner import Learner
from agro.train.monitors import Monitor
from agro.train.phases import Phase, derive
from agro.train.source import FillRequest, Source
from agro.train.stored_tensors import from_text, to_text
from agro.types import Sample
from agro_papers.flow_reward import Scaled, hidden_states

ROWS = 64  # pairs of responses per update
WIDTH = 64  # width of the network's hidden layers


@dataclass(frozen=True)
class Pool:
    """Hidden states of responses, and the number of each one's prompt."""

    states: Tensor  # [N,H]
    prompts: Tensor  # [N] integers

    @classmethod
    def of(cls, policy: Policy, samples: Sequence[Sample], layer: int, numbers: Mapping[str, int]) -> Pool:
        """The pool of encoded samples; `numbers`: the prompts' numbers by id."""
        means = []  # over the tokens that the policy chose
        for sample, states in zip(samples, hidden_states(policy, samples, layer), strict=True):
            assert sample.action is not None
            means.append(states[torch.tensor(sample.action, device=states.device)].mean(0))
        prompts = [numbers[sample.prompt_id] for sample in samples]
        return cls(torch.stack(means), torch.tensor(prompts, device=policy.device))

    def select(self, rows: Tensor) -> Pool:
        """The rows of a mask [N], or with these numbers."""
        return Pool(self.states[rows], self.prompts[rows])


class Discriminator(Scaled):
    """D, with two hidden layers; each fit continues from the last one."""

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__(hidden)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                *(nn.Linear(hidden, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()),
                nn.Linear(WIDTH, 1),
            )

    def forward(self, scaled: Tensor) -> Tensor:
        """[N,H] standardized -> [N]"""
        values: Tensor = self.layers(scaled)[:, 0]
        return values

    def values(self, states: Tensor) -> Tensor:
        """[N,H] -> [N]"""
        return self.forward(self.scaled(states))

    def fit(self, policy: Pool, weight: Tensor, experts: Pool, options: AdversaryOptions, seed: int) -> None:
        """Fit D by AdamW, to each of the policy's responses and a demonstration to its prompt.

        Args:
            policy: the policy's responses, to prompts that `experts` have too.
            weight: [N] relative frequency with which each of these is drawn.
            seed: of the rows drawn for the updates.
        """
        self.to(policy.states.device).requires_grad_(True)
        self.rescale(torch.cat([policy.states, experts.states]))
        demonstrations = [(experts.prompts == p).nonzero()[:, 0] for p in policy.prompts.tolist()]
        counts = torch.tensor([len(rows) for rows in demonstrations])
        random = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        for _ in range(options.steps):
            rows = torch.multinomial(weight.cpu(), ROWS, replacement=True, generator=random)
            chosen = (torch.rand(ROWS, generator=random) * counts[rows]).long()
            partners = torch.stack(
                [demonstrations[row][i] for row, i in zip(rows.tolist(), chosen.tolist(), strict=True)]
            )
            h_policy, h_expert = self.scaled(policy.states[rows]), self.scaled(experts.states[partners])
            share = torch.rand(ROWS, 1, generator=random).to(h_policy.device)
            d_expert, d_policy = self(h_expert), self(h_policy)
            if options.loss == "pairs":
                loss = -logsigmoid(d_expert - d_policy).mean()
            else:
                loss = -(logsigmoid(d_expert) + logsigmoid(-d_policy)).mean()
            points = share * h_expert + (1 - share) * h_policy
            loss = loss + options.penalty * slope_penalty(self, points, options.slope)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.requires_grad_(False)

    def auc(self, policy: Pool, experts: Pool) -> float | None:
        """How often D ranks a demonstration above a response of the policy to the same prompt.

        Equal values count as ½. The mean over responses; None if no prompt has both.
        """
        values, expert_values = self.values(policy.states), self.values(experts.states)
        shares = []
        for value, prompt in zip(values, policy.prompts, strict=True):
            rivals = expert_values[experts.prompts == prompt]
            if len(rivals):
                shares.append(((rivals > value).double() + 0.5 * (rivals == value)).mean())
        return float(torch.stack(shares).mean()) if shares else None


def slope_penalty(network: nn.Module, points: Tensor, slope: float) -> Tensor:
    """[] the mean of (‖∇D‖ − slope)² at points [N,H], differentiable in the network's weights."""
    inputs = points.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(network(inputs).sum(), inputs, create_graph=True)
    excess: Tensor = gradient.norm(dim=1) - slope
    return excess.square().mean()


HELD_OUT = 5  # the discriminator is measured on one in this many prompts, and not fitted to it


class AdversaryOptions(Section):
    """A discriminator that is fitted while training, to the newest responses against demonstrations: stored
    responses of role "expert" to the same prompts. Its value is the reward of fresh responses."""

    every: Count = 1
    """optimizer steps between fits, each of which continues from the last one"""
    newest: Count = 256
    """number of the run's newest responses that it is fitted to; with data.replay each step scores them
    again, so that replayed ones have the current reward too"""
    steps: Count = 50
    """updates per fit, of 64 pairs each"""
    loss: Literal["logistic", "pairs"] = "logistic"
    """logistic: each response is a demonstration or not (GAIL); pairs: which of two responses to a prompt is
    the demonstration (GAD, arXiv 2511.10643)"""
    penalty: float = field(1.0, ge=0)
    """λ of the penalty on its slope; 0 leaves it free"""
    slope: Positive = 1.0
    """k, the target slope: reward per standard deviation of the hidden states"""
    layer: int = -1
    """layer whose hidden states it reads; negative numbers count from the last layer"""
    weight: float = 1.0
    """weight of its value in the reward"""
    own: float = 0.0
    """weight of the value of `reward.name` or `reward.functions` in the reward; 0 measures that value without
    training on it. Held-out responses get only that value"""


class AdversarialSource(Monitor):
    """Scores another source's samples by a discriminator, which it fits regularly."""

    name = "adversary"

    def __init__(self, source: Source, context: Context, options: AdversaryOptions) -> None:
        self.sampler, self.learned, self.config = source, options, context.config
        self.policy, self.store = context.policy, context.store
        self.discriminator: Discriminator | None = None
        self.fitted = -1  # the version of the weights at the last fit
        self.newest: list[int] = []  # ids
        self.experts: dict[str, list[Sample]] = {}  # by prompt_id

    def publish(self, learner: Learner) -> None:
        self.sampler.publish(learner)
        self.version = learner.version

    def fill(self, wanted: FillRequest) -> CollectResult:
        """The inner source's responses, with learned rewards."""
        filled = self.sampler.fill(wanted)
        self.newest = [*self.newest, *filled.ids][-self.learned.newest :]
        is_due = self.fitted < 0 or self.version - self.fitted >= self.learned.every
        every_one = is_due or self.config.data.draws_stored
        ids = sorted({*self.newest, *filled.ids}) if every_one else filled.ids
        samples = list(self.store.samples(ids=ids, skip_damaged=True))
        # The encoded demonstrations to the prompts of these samples. Raises `Refused` without any.
        experts = []
        for prompt_id in dict.fromkeys(sample.prompt_id for sample in samples):
            if prompt_id not in self.experts:
                stored = self.store.samples(prompt_id=prompt_id, roles=("expert",), skip_damaged=True)
                self.experts[prompt_id] = []
                for sample in stored:
                    with suppress(InvalidSample):  # too long, or not of this tokenizer's characters
                        encoded = self.policy.encode(sample, self.config.train.max_length)
                        self.experts[prompt_id].append(encoded)
            experts += self.experts[prompt_id]
        if not experts:
            raise Refused(
                "adversary: expected demonstrations, which are stored responses of role expert, to the "
                f"prompts of this step, but {self.store.path} has none to any of {len(samples)} responses "
                f"(such as prompt {samples[0].prompt_id}). What to do: import some for data.prompts (agro "
                "import FILE --store STORE, with a column role), and set data.store"
            )
        numbers = {name: i for i, name in enumerate(dict.fromkeys(s.prompt_id for s in samples))}
        responses = Pool.of(self.policy, samples, self.learned.layer, numbers)
        demonstrations = Pool.of(self.policy, experts, self.learned.layer, numbers)
        held_out = torch.tensor([is_held_out(name) for name in numbers], device=responses.prompts.device)
        demonstrated = torch.isin(responses.prompts, demonstrations.prompts)
        if not (demonstrated & ~held_out[responses.prompts]).any():
            held_out[:] = False  # it is fitted to all, and not measured
        if is_due:
            rows = demonstrated & ~held_out[responses.prompts]
            if self.discriminator is None:
                seed = derive(self.config.train.seed, "discriminator")
                self.discriminator = Discriminator(responses.states.shape[1], seed)
            weight = self._weights(samples)[rows.cpu()]
            seed = derive(self.config.train.seed, "fit", self.version)
            self.discriminator.fit(responses.select(rows), weight, demonstrations, self.learned, seed)
            self.fitted = self.version
        assert self.discriminator is not None
        values = self.discriminator.values(responses.states).tolist()
        self.store.set_rewards(self._scored(s, value) for s, value in zip(samples, values, strict=True))
        auc = self.discriminator.auc(responses.select(held_out[responses.prompts]), demonstrations)
        return replace(filled, measured={**filled.measured, "learned_auc": auc})

    def state(self) -> Any:
        if self.discriminator is None:
            return None
        tensors = to_text(self.discriminator.state_dict())
        return {"fitted": self.fitted, "newest": self.newest, "tensors": tensors}

    def restore(self, state: Any) -> None:
        self.fitted, self.newest = state["fitted"], state["newest"]
        tensors = from_text(state["tensors"])
        self.discriminator = Discriminator(len(tensors["mean"]), 0).to(self.policy.device)
        self.discriminator.load_state_dict(tensors)
        self.discriminator.requires_grad_(False)

    def _weights(self, samples: Sequence[Sample]) -> Tensor:
        """[N] the weights of replay's draws: with data.order = "age_weighted" (1 − age_decay)^staleness.

        So the experts are compared with the mixture of policies of AILBoost (arXiv 2404.08513).
        """
        data = self.config.data
        decay = data.age_decay if data.order == "age_weighted" else 0.0
        ages = [staleness(sample, self.version) for sample in samples]
        return (1 - decay) ** torch.tensor(ages, dtype=torch.float64)  # known: the run's own

    def _scored(self, sample: Sample, value: float) -> tuple[int, float | None, dict[str, Any]]:
        """A sample's row for the store: its reward and the parts, one of which is [reward]'s value."""
        assert sample.id is not None
        title = self.config.reward.title
        parts = dict(sample.meta.get("reward_parts") or {})
        measured = parts[title] if "learned" in parts else sample.reward
        parts |= {title: measured, "learned": value}
        reward = self.learned.weight * value
        if not self.learned.own:
            return sample.id, reward, {"reward_parts": parts}
        if measured is None:
            return sample.id, None, {"reward_parts": parts, "reward_error": f"{title}: no reward"}
        return sample.id, reward + self.learned.own * measured, {"reward_parts": parts}


def is_held_out(prompt_id: str) -> bool:
    """Whether a discriminator is measured on a prompt instead of fitted to it."""
    return derive("learned reward", prompt_id) % HELD_OUT == 0


def _problems(phase: Phase, options: AdversaryOptions) -> Mapping[str, object]:
    reward = phase.config.reward
    of_parts = REWARD_PARTS in phase.needs or (reward.whiten != "none" and reward.functions)
    return {
        "needs data.store: demonstrations are stored responses": not phase.config.data.store,
        "gives a reward that would be lost if one is made of recorded parts, by reward.whiten or the "
        "advantage of gdpo": of_parts,
    }


ADVERSARY = SourceWrapper(
    AdversarialSource,
    AdversaryOptions,
    needs=frozenset(("shares_engine", "complete_policy", "single_turns")),
    can=lambda inner, options: inner,
    problems=_problems,
)
