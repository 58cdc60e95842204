"""The section [data], which declares what a step trains on, and schedules of shares."""

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
ROUNDING = 1e-9  # tolerance of a sum of shares above 1


def are_numbers(value: Mapping[str, Any], keys: Iterable[str]) -> bool:
    numbers = [value.get(key) for key in keys]
    return all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in numbers)


def is_schedule(value: Any) -> bool:
    """Whether a value is a well-formed schedule."""
    if not isinstance(value, Mapping) or not value.keys() <= KEYS:
        return False
    valid_shape = value.get("shape", "linear") in ("linear", "cosine")
    return valid_shape and are_numbers(value, {"start", "end", "steps"} | value.keys() - {"shape"})


def value_at(value: Any, step: int) -> Any:
    """Return a constant, or a schedule's value at `step` (from 0).

    A schedule goes from 0 to `start` in `warmup` steps (default: 0), then to `end` in `steps` steps.
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
    """Validate a share from 0 to 1, a schedule of one, or a table of them by name with a sum of at most 1."""
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
    """Return the shares by name at a step (from 0); a single one has the name ""."""
    if isinstance(value, Mapping) and not is_schedule(value):
        return {name: value_at(part, step) for name, part in value.items()}
    return {"": value_at(value, step)}


def last_step(value: Any) -> float:
    """The step from which the shares stay constant."""
    if not isinstance(value, Mapping):
        return 0
    if is_schedule(value):
        return float(max(0, value.get("warmup", 0)) + max(0, value["steps"]))
    return max((last_step(part) for part in value.values()), default=0)


Shares = Annotated[float | dict[str, Any], WrapValidator(lambda value, _: checked_shares(value))]
Paths = str | tuple[str, ...]
Order = Literal["least_used", "uniform", "newest", "age_weighted", "closest"]


class RewardScale(Section):
    """An affine map of rewards: factor · r + offset."""

    factor: float = 1.0
    """factor of rewards, per-token ones included"""
    offset: float = 0.0
    """added to a response's reward"""


class DataConfig(Section):
    """What a step trains on: responses sampled to prompts, groups of the store, or a share of each."""

    prompts: Paths | None = field(None, shared=True)
    """prompts to sample responses to (`prompt`, and columns that the reward reads, such as `answer`): a file
    of JSON Lines, a JSON list, CSV, Excel or Parquet, a folder of datasets, or one on the hub,
    hub:OWNER/NAME:SPLIT; or a list of them"""
    eval_prompts: Paths | None = field(None, shared=True)
    """held-out prompts, the same formats"""
    columns: dict[str, str] = field({}, shared=True)
    """maps fields of a prompt (prompt, prompt_id, answer, …) to columns of these files, by name or JMESPath
    expression, such as { prompt = "question" }; the other columns keep their names"""
    invalid_prompts: Literal["refuse", "drop"] = field("refuse", shared=True)
    """prompts (held-out ones too) that are duplicates, leave no room for a response in the model's context,
    or can't be encoded by the tokenizer: refuse the run before it starts, or drop and count them"""
    store: str | None = field(None, shared=True)
    """the store: a file, or for a run on several hosts postgresql://USER@HOST/DATABASE?schema=NAME; default:
    RUN/store.db"""
    eval_store: str | None = None
    """a store of held-out groups, on which to measure how often log π/π_ref ranks the better response higher
    (metric eval_auc) and, at evaluate.beta or the β of an objective that is regularized toward the reference,
    ½ Var(R) within groups (metrics eval_consistency…)"""
    hold_out: float = field(0.0, ge=0, lt=1, shared=True)
    """share of the prompts of `prompts` and `store`, chosen by a hash of their ids, that are never trained
    on. Replaces eval_store: its metrics are measured on their responses in `store`. Up to 128 of these
    prompts are written to RUN/set_aside.jsonl; see ask_held_out"""
    hold_out_most: Count | None = field(None, shared=True)
    """maximum number of prompts that hold_out holds out. With it, none are held out if these would be fewer
    than 20, if a step needs all groups that may be drawn, or with eval_prompts or eval_store. The run's
    config.json has the resulting share as its hold_out"""
    ask_held_out: bool | None = field(None, shared=True)
    """whether the policy is evaluated on the prompts of RUN/set_aside.jsonl as on eval_prompts, scored by
    [reward]. Default: only without a `store`; with hold_out_most also if there are `prompts` or a reward
    other than the default, `exact`"""
    near_copies: float = field(0.7, gt=0, le=1, shared=True)
    """Jaccard index of the 5-grams of their letters from which two prompts are near-copies (without case,
    spaces, labels such as "Q17:", and 5-grams of more than half of the prompts). Near-copies are held out
    together or not at all (hold_out), and their held-out rewards count as one cluster in the comparison with
    the start. 1: only prompts with the same letters are near-copies"""
    value_store: str | None = field(None, shared=True)
    """a store of scored samples of the reference. The soft maximum of a prompt's rewards in it is the
    prompt's stored value, for objectives that use one (baseline = "stored"); the share of them that isn't
    above a response's own reward is the response's stored quantile"""
    prompt_order: Literal["epochs", "uncertain"] = field("epochs", shared=True)
    """which of `prompts` a step samples responses to. epochs: each once, then all in another order;
    uncertain: at random without replacement, by weights √(V̂(1 − V̂)) + 0.05, out of `candidates` times as
    many in that order. V̂ is the tracked value (value_half_life) with ½ for the mean of the step's other
    prompts, so it is ½ before a prompt's first response. Rewards must be from 0 to 1; others are refused
    (SPO, arXiv 2509.13232)"""
    value_half_life: Positive | None = field(None, shared=True)
    """optimizer steps after which a reward counts half in a prompt's stored value, which is then tracked: the
    mean reward of the run's earlier responses to the prompt and of one more, the mean of the step's other
    prompts (SPO, arXiv 2509.13232). Allows groups of one response (sampler.n = 1). Replaces value_store"""
    replay: Shares = 0.0
    """share of each step's groups that comes from the store; 1 trains from the store alone. Or a schedule,
    such as { start = 0.4, end = 0.0, steps = 50 }; or a table of shares or schedules by role or source, such
    as { policy = 0.25, expert = 0.25 }. The remaining groups are sampled"""
    group_size: int | None = field(None, ge=1)
    """responses to draw from a stored group, in complete pairs if the objective needs pairs; default: all"""
    complete_groups: Count | None = None
    """fresh responses to sample to the prompt of each group drawn from the store, to score with [reward], and
    to train on together with the stored ones: groups of mixed origin, for logs with one response per prompt.
    The reward reads columns such as `answer` from the stored record"""
    reward_scale: dict[str, RewardScale] = field({})
    """for each source, the map of its rewards to a common scale, for groups with several sources: for grades
    from 1 to 5 next to rewards from 0 to 1, { annotators = { factor = 0.25, offset = -0.25 } }. Fresh samples
    have the source "policy". min_reward, best_of_group and spread compare rewards as they are stored"""
    experts: int = field(0, ge=0)
    """maximum number of stored responses with role "expert" that join the fresh samples of each prompt"""
    roles: tuple[Role, ...] | None = None
    """draw only these roles"""
    sources: tuple[str, ...] | None = None
    """draw only these sources"""
    min_reward: float | None = None
    """draw only responses whose reward is known and at least this, such as the correct ones for imitation"""
    best_of_group: bool = False
    """draw only the responses with the highest known reward of their group, ties included; the group is all
    stored responses to the prompt with these roles and sources, of any staleness. With min_reward, a group
    whose best is below it isn't drawn"""
    max_age: int | None = field(None, ge=0)
    """draw only samples of at most this staleness, in optimizer steps; excludes samples of unknown
    staleness"""
    max_uses: Count | None = None
    """draw a stored group at no more than this many of the run's steps"""
    spread: bool | Annotated[float, Field(gt=0, lt=1)] = False
    """true: train only on groups whose rewards differ. No other stored groups are drawn, and fresh ones are
    sampled until there are enough of them (dynamic sampling of DAPO, arXiv 2503.14476). With deterministic
    rewards the optimum is unchanged; with noisy ones it moves, since the selection depends on the noise. A
    number, such as 0.1: stored groups of equal rewards are drawn less often by this factor (of two or more
    groups, at least one and at most half), and both kinds are weighted by their frequency in the store, so
    the optimum is unchanged even with noise; all fresh groups are used"""
    order: Order = "least_used"
    """which stored groups are drawn first. least_used: those drawn at the fewest steps, in another order in
    each epoch; uniform: any, at random (with max_age a first-in first-out buffer, arXiv 2604.08706); newest:
    those with the smallest staleness; age_weighted: at random, in proportion to (1 − age_decay)^staleness;
    closest: those most like samples of the current policy; see candidates"""
    age_decay: float = field(0.01, gt=0, lt=1)
    """for order = "age_weighted": share by which a group is drawn less often per optimizer step of staleness
    (α of AILBoost, arXiv 2404.08513). Samples of unknown staleness aren't drawn"""
    reward_power: Positive | None = None
    """for order = "age_weighted": draw groups in proportion to that weight times the mean of (|reward| +
    1e-6)^reward_power over their responses, out of `candidates` drawn by staleness alone (α of FreshPER,
    arXiv 2604.16918: 0.6)"""
    candidates: Count = 4
    """for order = "closest" (adaptive replay buffer, arXiv 2512.10510): groups, drawn uniformly, that the
    policy scores for each one to train on, at a forward pass over their responses; a group is selected with
    probability ∝ exp(closeness / temperature). With reward_power: groups for each one that it selects. For
    prompt_order = "uncertain": prompts for each one to sample responses to"""
    closeness: Literal["behavior", "likelihood"] = "behavior"
    """closeness of a response, in nats per token: behavior: −|log π − log μ| / T, with the recorded
    log-probs; likelihood: log π / T, as in the paper, which prefers short and common texts. A group's is the
    mean over its responses"""
    temperature: Positive = 0.2
    """for order = "closest": decrease in closeness, in nats per token, at which a group is selected e times
    less often"""
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
        """Whether a step picks more stored groups than it trains on."""
        return self.order == "closest" or self.reward_power is not None

    @property
    def has_held_out_groups(self) -> bool:
        """Whether some stored groups are held out for evaluation."""
        return self.eval_store is not None or (self.hold_out > 0 and self.store is not None)

    def shares_at(self, step: int) -> dict[str, float]:
        """The shares of a step's groups (from 0 in the phase) that come from the store, by role or source;
        "": any."""
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
        """Whether any step samples responses, to prompts of its own or to those of stored groups."""
        return self.samples_fresh or self.complete_groups is not None

    @property
    def replay_text(self) -> str:
        """The share of the store as text: "50%", or "40% to 0%" over the steps of a schedule."""
        start, end = self.replay_at(0), self.replay_at(self.replay_steps)
        return percent(start) if start == end else f"{percent(start)} to {percent(end)}"

    def part(self, name: str) -> DataConfig:
        """A copy that draws only from a share's role or source."""
        if not name:
            return self
        key = "roles" if name in ROLES else "sources"
        return self.model_copy(update={key: (name,), "replay": 1.0})

    @property
    def drawn_from(self) -> tuple[tuple[Role, ...] | None, tuple[str, ...] | None]:
        """The roles and sources to draw from, by `replay`, `roles` and `sources`; None allows any."""
        names = tuple(name for name in self.shares_at(0) if name)
        roles = tuple(role for role in ROLES if role in names)
        if names and len(roles) == len(names):
            return roles, self.sources
        if names and not roles:
            return self.roles, names
        return self.roles, self.sources
