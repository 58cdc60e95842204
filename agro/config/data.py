"""What a step trains on: prompts, the store, and the place where samples are made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator
from pydantic_core import PydanticCustomError

from agro.config.sections import Count, Positive, Section, field
from agro.io.numbers import percent
from agro.types import ROLES, Role

KEYS = {"start", "end", "steps", "shape", "warmup"}
EXPECTED = '{start, end, steps, shape = "linear" or "cosine", warmup}'
ROUNDING = 1e-9  # by which shares may add up to more than 1


def are_numbers(value: Mapping[str, Any], keys: Iterable[str]) -> bool:
    numbers = [value.get(key) for key in keys]
    return all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in numbers)


def is_schedule(value: Any) -> bool:
    """Whether a value is a schedule, and not a malformed one."""
    if not isinstance(value, Mapping) or not value.keys() <= KEYS:
        return False
    valid_shape = value.get("shape", "linear") in ("linear", "cosine")
    return valid_shape and are_numbers(value, {"start", "end", "steps"} | value.keys() - {"shape"})


def value_at(value: Any, step: int) -> Any:
    """A constant, or a schedule's value at step `step` (from 0).

    It goes from 0 to `start` in `warmup` steps (0 where not given), then to `end` in `steps` steps.
    """
    if not isinstance(value, Mapping):
        return value
    warmup = value.get("warmup", 0)
    if step < warmup:
        return value["start"] * step / warmup
    step -= warmup
    done = min(1.0, step / value["steps"]) if value["steps"] > 0 else 1.0
    if value.get("shape") == "cosine":
        done = 0.5 * (1 - math.cos(math.pi * done))
    return value["start"] + done * (value["end"] - value["start"])


def checked_shares(value: Any) -> Any:
    """A share from 0 to 1, a schedule of one, or a table of them by name that never add up to more than 1."""
    several = isinstance(value, Mapping) and not is_schedule(value)
    parts = dict(value) if several else {"": value}
    for part in parts.values():
        ends = (part["start"], part["end"]) if is_schedule(part) else (part,)
        if not all(type(end) in (int, float) and 0 <= end <= 1 for end in ends):
            raise PydanticCustomError(
                "shares",
                "expected a share from 0 to 1, a schedule of one ({expected}), or a table of them by role or "
                "source",
                {"expected": EXPECTED},
            )
    steps = math.ceil(last_step(value))
    if several and max(sum(shares_at(value, step).values()) for step in range(steps + 1)) > 1 + ROUNDING:
        raise PydanticCustomError("shares", "expected shares that add up to at most 1 at every step")
    return value if isinstance(value, Mapping) else float(value)


def shares_at(value: Any, step: int) -> dict[str, float]:
    """Shares by name at a step (from 0); a single one is under ""."""
    if isinstance(value, Mapping) and not is_schedule(value):
        return {name: value_at(part, step) for name, part in value.items()}
    return {"": value_at(value, step)}


def last_step(value: Any) -> float:
    """The step from which shares are constant."""
    if not isinstance(value, Mapping):
        return 0
    if is_schedule(value):
        return float(max(0, value.get("warmup", 0)) + max(0, value["steps"]))
    return max((last_step(part) for part in value.values()), default=0)


Shares = Annotated[float | dict[str, Any], WrapValidator(lambda value, _: checked_shares(value))]
Paths = str | tuple[str, ...]
Order = Literal["least_used", "uniform", "newest", "age_weighted", "closest"]


class RewardScale(Section):
    """A map of rewards: factor · r + offset."""

    factor: float = 1.0
    """what rewards are multiplied by; those of tokens too"""
    offset: float = 0.0
    """what is added to the reward of a response"""


class DataConfig(Section):
    """What a step trains on: prompts to sample from, groups of the store, or a share of each."""

    prompts: Paths | None = field(None, shared=True)
    """prompts to sample from (`prompt`, and what the reward reads, such as `answer`): a file of JSON Lines, a
    JSON list, CSV, Excel or Parquet, a folder of datasets, or one on the hub, hub:OWNER/NAME:SPLIT; or a list
    of them"""
    eval_prompts: Paths | None = field(None, shared=True)
    """held-out prompts, the same formats"""
    columns: dict[str, str] = field({}, shared=True)
    """by field of a prompt (prompt, prompt_id, answer, …) its column in these files, a name or a JMESPath
    expression, such as { prompt = "question" }; the other columns keep their names"""
    invalid_prompts: Literal["refuse", "drop"] = field("refuse", shared=True)
    """prompts, held-out ones too, that are there twice, that leave no room for a response in the model's
    context, or that the tokenizer can't encode: refuse the run before it starts, or drop and count them"""
    store: str | None = field(None, shared=True)
    """the store: a file, or for a run on several hosts postgresql://USER@HOST/DATABASE?schema=NAME;
    RUN/store.db where it is not given"""
    eval_store: str | None = None
    """a store of held-out groups: how often log π/π_ref ranks the better response higher (metric eval_auc),
    and at evaluate.beta or the β of an objective that is regularized toward the reference, ½ Var(R) within
    them (metrics eval_consistency…)"""
    hold_out: float = field(0.0, ge=0, lt=1, shared=True)
    """share of the prompts, those of `prompts` and of `store`, chosen by a hash of their ids, that are never
    trained on. What eval_store measures is measured on their responses in `store`. Up to 128 of them are in
    RUN/set_aside.jsonl, see ask_held_out. Instead of eval_store"""
    hold_out_most: Count | None = field(None, shared=True)
    """prompts that hold_out holds out at most. With it none are held out where these would be fewer than 20,
    where a step needs all groups that may be drawn, and with eval_prompts or eval_store. The run's
    config.json has the share that follows as its hold_out"""
    ask_held_out: bool | None = field(None, shared=True)
    """whether the policy answers the prompts of RUN/set_aside.jsonl as it does eval_prompts, scored by
    [reward]. Where it is not given: without a `store`, and with hold_out_most also where there are `prompts`
    or a reward other than the default, `exact`"""
    near_copies: float = field(0.7, gt=0, le=1, shared=True)
    """share of the 5-grams of their letters that two prompts have in common to be near-copies (the Jaccard
    index, without case, spaces and labels such as "Q17:"; 5-grams of more than half of the prompts don't
    count). Near-copies are held out together or not at all (hold_out), and their held-out rewards count as
    one cluster in the comparison with the start; 1: only prompts of the same letters are"""
    value_store: str | None = field(None, shared=True)
    """a store of scored samples of the reference: the soft maximum of a prompt's rewards in it is its stored
    value, where the objective takes one (baseline = "stored"); the share of them that isn't above a
    response's own reward is its stored quantile"""
    prompt_order: Literal["epochs", "uncertain"] = field("epochs", shared=True)
    """which of `prompts` a step samples to. epochs: each once, then all in another order; uncertain: out of
    `candidates` times as many of that order, at random without replacement, by weights √(V̂(1 − V̂)) + 0.05. V̂
    is the tracked value (value_half_life) with ½ for the mean of the step's other prompts, so ½ before a
    prompt's first response. For rewards from 0 to 1, others are refused (SPO, arXiv 2509.13232)"""
    value_half_life: Positive | None = field(None, shared=True)
    """optimizer steps after which a reward counts half in a prompt's stored value, which is then tracked:
    the mean reward of the run's earlier responses to it, with one more, the mean of the step's other prompts
    (SPO, arXiv 2509.13232). Lets a group have one response (sampler.n = 1). Instead of value_store"""
    replay: Shares = 0.0
    """share of each step's groups that comes from the store; 1 trains from the store alone. Or a schedule,
    such as { start = 0.4, end = 0.0, steps = 50 }; or a table of shares or schedules by role or source, such
    as { policy = 0.25, expert = 0.25 }. The rest is sampled"""
    group_size: int | None = field(None, ge=1)
    """responses drawn of a stored group, in complete pairs where the objective needs pairs; all where it is
    not given"""
    complete_groups: Count | None = None
    """fresh responses that are sampled to the prompt of each group drawn from the store, scored with
    [reward], and trained on together with the stored ones: groups of mixed origin, for logs with one response
    a prompt. The reward reads columns such as `answer` from the stored record"""
    reward_scale: dict[str, RewardScale] = field({})
    """by source, a map of its rewards to one scale, for groups with several sources: for grades from 1 to 5
    beside rewards from 0 to 1, { annotators = { factor = 0.25, offset = -0.25 } }. Fresh samples have the
    source "policy". min_reward, best_of_group and spread compare rewards as they are stored"""
    experts: int = field(0, ge=0)
    """stored responses of role "expert", at most, that join the fresh samples of each prompt"""
    roles: tuple[Role, ...] | None = None
    """draw only these roles"""
    sources: tuple[str, ...] | None = None
    """draw only these sources"""
    min_reward: float | None = None
    """draw only responses whose reward is known and at least this, such as the right ones for imitation"""
    best_of_group: bool = False
    """draw only the responses of the highest known reward in their group, ties included; the group is what
    the store has of the prompt of these roles and sources, of any staleness. With min_reward a group whose
    best is below it isn't drawn"""
    max_age: int | None = field(None, ge=0)
    """draw only samples of at most this staleness, in optimizer steps; excludes samples of unknown
    staleness"""
    max_uses: Count | None = None
    """draw a stored group at most at so many steps of the run"""
    spread: bool | Annotated[float, Field(gt=0, lt=1)] = False
    """true: train only on groups whose rewards differ. Of stored groups no others are drawn, and fresh ones
    are sampled until there are enough of them (dynamic sampling of DAPO, arXiv 2503.14476). The optimum stays
    with fixed rewards; with noisy ones it moves, since the choice reads the noise. A number, such as 0.1:
    stored groups of equal rewards are drawn so much more seldom, of two or more groups one at least and half
    at most, and both kinds count as often as the store has them: the optimum stays with noise; all fresh ones
    come"""
    order: Order = "least_used"
    """which stored groups come first. least_used: those drawn at the fewest steps, in an order that is
    another in each epoch; uniform: any (with max_age a first-in first-out buffer, arXiv 2604.08706); newest:
    those of the smallest staleness; age_weighted: at random, by (1 − age_decay)^staleness; closest: those
    most like samples of the present policy, see candidates"""
    age_decay: float = field(0.01, gt=0, lt=1)
    """of order = "age_weighted": a group that is an optimizer step staler is drawn less often by this share
    (α of AILBoost, arXiv 2404.08513). Samples of unknown staleness aren't drawn"""
    reward_power: Positive | None = None
    """of order = "age_weighted": groups are drawn by that weight times the mean over their responses of
    (|reward| + 1e-6)^this, out of `candidates` by staleness alone (α of FreshPER, arXiv 2604.16918: 0.6)"""
    candidates: Count = 4
    """of order = "closest" (adaptive replay buffer, arXiv 2512.10510): groups, drawn uniformly, that the
    policy scores for each one that is trained on, which costs a forward pass over their responses. A group is
    kept with probability ∝ exp(closeness / temperature). Or of reward_power, by which they are kept. Or of
    prompt_order = "uncertain": prompts for each one that is sampled to"""
    closeness: Literal["behavior", "likelihood"] = "behavior"
    """of a response, in nats per token: behavior: −|log π − log μ| / T, with the recorded log-probs; or the
    paper's likelihood, log π / T, which prefers short and common texts. Its mean over a group's responses"""
    temperature: Positive = 0.2
    """of order = "closest": nats per token by which a group that is kept e times less often is less close"""
    max_drift: Positive | None = None
    """drop replayed responses with |log π − log μ| / T above this, in nats per token, and those without
    recorded log-probs; costs a forward pass over stored responses (a guard of replay: the second condition of
    arXiv 2402.10374)"""

    def paths(self, key: str) -> tuple[str, ...]:
        """The files of `key`, "prompts" or "eval_prompts"."""
        value = getattr(self, key) or ()
        return (value,) if isinstance(value, str) else value

    @property
    def draws_candidates(self) -> bool:
        """Whether more stored groups are picked than are trained on."""
        return self.order == "closest" or self.reward_power is not None

    @property
    def has_held_out_groups(self) -> bool:
        """Whether stored groups are measured, and not trained on."""
        return self.eval_store is not None or (self.hold_out > 0 and self.store is not None)

    def shares_at(self, step: int) -> dict[str, float]:
        """Of a step's groups (from 0 in the phase) that come from the store, by role or source; "" is any."""
        return shares_at(self.replay, step)

    def replay_at(self, step: int) -> float:
        """The share of a step's groups that comes from the store."""
        return min(1.0, sum(self.shares_at(step).values()))

    @property
    def replay_steps(self) -> int:
        return math.ceil(last_step(self.replay))

    @property
    def draws_stored(self) -> bool:
        return any(self.replay_at(step) > 0 for step in range(self.replay_steps + 1))

    @property
    def samples_fresh(self) -> bool:
        return any(self.replay_at(step) < 1 for step in range(self.replay_steps + 1))

    @property
    def samples(self) -> bool:
        """Whether some step samples: to prompts of its own, or to those of stored groups."""
        return self.samples_fresh or self.complete_groups is not None

    @property
    def replay_text(self) -> str:
        """The share of the store in words: "50%", or "40% to 0%" over the steps of a schedule."""
        start, end = self.replay_at(0), self.replay_at(self.replay_steps)
        return percent(start) if start == end else f"{percent(start)} to {percent(end)}"

    def part(self, name: str) -> DataConfig:
        """With the role or source of a share as the only one to draw from."""
        if not name:
            return self
        key = "roles" if name in ROLES else "sources"
        return self.model_copy(update={key: (name,), "replay": 1.0})

    @property
    def drawn_from(self) -> tuple[tuple[Role, ...] | None, tuple[str, ...] | None]:
        """The only roles and sources to draw from, by `replay` and by `roles` and `sources`."""
        names = tuple(name for name in self.shares_at(0) if name)
        roles = tuple(role for role in ROLES if role in names)
        if names and len(roles) == len(names):
            return roles, self.sources
        if names and not roles:
            return self.roles, names
        return self.roles, self.sources
