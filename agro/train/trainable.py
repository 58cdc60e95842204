"""Whether an objective can train on what a store has, checked before a model is loaded."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

from agro.config import DataConfig, RunConfig
from agro.errors import Refused
from agro.objectives import Need
from agro.objectives.needs import (
    OBSERVED_LOGP,
    PAIRS,
    PAIRS_AND_TIES,
    REWARD,
    REWARD_PARTS,
    TIES_WAY_OUT,
    VOTES,
    changed,
    grouping,
    judging,
    ordered,
)
from agro.rewards.shaping import labeled, unrecorded
from agro.store import At, Counts, Pair, SampleSummary, Store
from agro.store.location import Location, check_made, exists
from agro.store.queries import chosen
from agro.store.split import Clusters
from agro.store.survey import Scale
from agro.train.collate import total_reward
from agro.train.phases import Phase, options_at
from agro.types import ROLES, Prompt, Sample

NAMED = 3  # samples or groups in a message
POLICY = "policy"  # source and role of the samples that a run makes itself


def check_stores(
    phases: Sequence[Phase], prompts: Sequence[Prompt], path: Location, clusters: Clusters | None = None
) -> None:
    """Check the stores of a run's phases before a model is loaded; what a fresh phase adds is unknown yet.

    `prompts`: those that the run samples from. `path`: the store that phases draw from.
    """
    stored_only = list(takewhile(lambda phase: not phase.config.data.samples_fresh, phases))
    adds = False  # whether the run has added samples of its own before a phase draws
    if stored_only:
        check_made(path)
    if exists(path):
        with Store.open(path, read_only=True) as store:
            store.split.use(clusters)
            store.experience.check_prompts((p.id, p.text) for p in prompts)
            for data in (phase.config.data for phase in phases):
                adds = adds or data.samples
                if data.draws_stored:
                    check_names(data, store.counts(), path, adds=adds)
            for phase in phases[: len(stored_only) + 1]:
                if phase.config.data.draws_stored:
                    check_store(phase, store)
    for data in (phase.config.data for phase in phases):
        if data.eval_store:
            Store.open(data.eval_store, read_only=True, create=False).close()


def check_enough(phases: Sequence[Phase], path: Location, clusters: Clusters | None = None) -> None:
    """Raise `Refused` where the store has fewer groups than a step draws, before anything adds to it.

    Of the first phases, up to one that samples. Staleness, by which groups come and go, is left to the step.
    `clusters`: the run's.
    """
    for phase in takewhile(lambda phase: not phase.config.data.samples_fresh, phases):
        data = phase.config.data
        waits = phase.config.source.kind == "elsewhere"
        if waits or data.max_age is not None or data.order == "age_weighted":
            continue
        with Store.open(path, read_only=True) as store:
            store.split.use(clusters)
            try:
                for rule in phase.rules(0):
                    store.draws.require(rule, At("", 0, 0, 0))
            except Refused as error:
                way_out = instead(store)
                raise Refused(f"{error}, or {way_out}" if way_out else str(error)) from None


def check_names(data: DataConfig, counts: Counts, path: Location, *, adds: bool) -> None:
    """Raise `Refused` for a source that `data` names, or for `data.roles`, that no sample of the store has.

    `counts`: of the store, which is at `path`. With `adds` the run samples too, which makes samples of source
    and role "policy". An empty store is accepted: other processes may fill it.
    """
    if not counts.samples:
        return
    roles, sources = data.drawn_from
    in_shares = tuple(name for name in data.shares_at(0) if name and name not in ROLES)
    settings: dict[str, tuple[Sequence[str] | None, Mapping[str, int]]] = {  # None allows all
        "replay": (in_shares or None, counts.sources),
        "sources": (None if in_shares else sources, counts.sources),
        "roles": (roles, counts.roles),
        "reward_scale": (tuple(data.reward_scale) or None, counts.sources),
    }
    for key, (names, having) in settings.items():
        may_add = adds or key == "reward_scale"  # perhaps for a later phase
        unknown = [name for name in names or () if name not in having and not (may_add and name == POLICY)]
        # A choice among the few roles that there are may allow for more than the store has.
        is_met = key == "roles" and names is not None and len(unknown) < len(names)
        if names is None or is_met or (names and not unknown):
            continue
        have = ", ".join(f"{name} ({having[name]})" for name in sorted(having))
        wrong = f"no sample of {path} has {', '.join(unknown)}" if unknown else "an empty list draws nothing"
        raise Refused(
            f"data.{key}: {wrong}; expected some of (with the number of samples) {have}. What to do: correct "
            "or remove the name, or import such samples (agro import)"
        )


def check_store(phase: Phase, store: Store, *, fills: bool | None = None) -> list[str]:
    """Raise `Refused` where the objective can't train on what would be drawn; returns notes on the rest.

    `fills`: whether a run adds samples where there are none to draw; by default where some step samples.
    """
    config, data = phase.config, phase.config.data
    fills = data.samples_fresh if fills is None else fills
    options = options_at(config.objective.options, 0)
    check = _StoreCheck(config, store, phase.entry.needed(options))
    check.samples()
    if not check.total and fills:
        return ["the store is empty: all groups are sampled until it isn't"]
    if not check.total:
        raise Refused(
            f"data.store: {store.path} has no samples that data.roles, data.sources, data.min_reward and "
            "data.best_of_group admit; import some (agro import)"
        )
    check.episodes()
    check.parts()
    check.observations(fills=fills)
    sizes = check.pairs() if PAIRS in check.needs else check.responses()
    if data.spread:
        groups = [g for g in store.survey.each_group(**chosen(data)) if check.is_drawn(g.prompt_id)]
        equal = sum(g.scored > 1 and g.reward_min == g.reward_max for g in groups)
        share = f"{equal} of {len(groups)} groups"
        drawn = "aren't drawn" if data.spread is True else "are drawn more seldom"
        check.notes += [f"{share} have equal rewards and {drawn} (data.spread)"] if equal else []
    remaining = check.groups(sizes, drop=options.get("singletons") == "drop")
    if remaining == 0 and not fills:
        raise Refused(
            f"data.store: no group of {store.path} is left to draw: {'; '.join(check.notes)}. What to do: "
            f"{check.otherwise}sample more responses to each prompt (data.complete_groups does it in a run), "
            "or score those that have no reward (agro score)"
        )
    if REWARD in check.needs:
        check_scales(data, store)
    return check.notes


@dataclass
class _StoreCheck:
    """The stored samples of a run against the needs of its objective, read in constant memory."""

    config: RunConfig
    store: Store
    needs: Set[Need]
    notes: list[str] = field(default_factory=list)  # what isn't drawn
    total: int = 0  # samples
    in_episodes: list[SampleSummary] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.config.objective.name

    @property
    def otherwise(self) -> str:
        """The recipe for the log, and "or" before other ways; "" where it isn't of another kind."""
        way_out = instead(self.store)
        return f"{way_out}, or " if way_out else ""

    @cached_property
    def is_drawn(self) -> Callable[[str], bool]:
        """Whether a prompt isn't held out."""
        is_held_out = self.store.split.held_out(self.config.data)
        return lambda prompt_id: not is_held_out(prompt_id)

    def rows(self) -> Iterator[SampleSummary]:
        rows = self.store.survey.each_summary(**chosen(self.config.data))
        return (row for row in rows if self.is_drawn(row.prompt_id))

    def samples(self) -> None:
        """Count the samples. Refuse those without a need that all must have, or that none has."""
        needs = ordered(self.needs)
        missing: dict[Need, list[SampleSummary]] = {need: [] for need in needs}  # the first ones
        counts = Counter[Need]()
        missing_by_kind: dict[tuple[object, ...], list[Need]] = {}  # what a kind of samples doesn't have
        for row in self.rows():
            self.total += 1
            kind = (row.scored, row.knows_behavior, row.truncation, row.role)
            if kind not in missing_by_kind:
                missing_by_kind[kind] = [n for n in needs if n.applies_to(row.role) and n.missing_in(row)]
            for need in missing_by_kind[kind]:
                counts[need] += 1
                if counts[need] <= NAMED:
                    missing[need].append(row)
            if row.episode is not None:
                self.in_episodes.append(row)
        for need in (need for need in needs if counts[need]):
            if counts[need] == self.total or not need.optional:
                other = changed(need, way_out=self.otherwise + need.way_out)
                raise other.refusal(self.name, _named(missing[need]), self.total, count=counts[need])
            self.notes.append(f"{counts[need]} of {self.total} samples have no {need} and aren't drawn")

    def episodes(self) -> None:
        """Refuse rows of one episode with different rewards: they are one response."""
        if REWARD not in self.needs:
            return
        parts = self.in_episodes
        unscored = {(row.prompt_id, row.episode) for row in parts if not row.scored}
        rows = [row.id for row in parts if (row.prompt_id, row.episode) not in unscored]
        episode_samples: dict[tuple[str, str | None], Sample] = {}
        for sample in self.store.samples(ids=rows, skip_damaged=True):
            other = episode_samples.setdefault((sample.prompt_id, sample.episode), sample)
            rewards = total_reward(other), total_reward(sample)
            if rewards[0] != rewards[1]:
                raise Refused(
                    f"{self.store.path}: episode {sample.episode} of prompt {sample.prompt_id}: expected one "
                    f"reward for all rows of an episode, got {rewards[0]:g} in sample {other.id} and "
                    f"{rewards[1]:g} in sample {sample.id}. What to do: score them again (agro score), or "
                    "import each row with the reward of the complete episode"
                )

    def parts(self) -> None:
        """Refuse a stored response that has a reward, and not what each of the run's functions gave it."""
        if REWARD_PARTS not in self.needs:
            return
        functions = labeled(self.config.reward.functions)
        scored = [row.id for row in self.rows() if row.scored]
        for sample in self.store.samples(ids=scored, skip_damaged=True):
            if missing := unrecorded(sample, functions):
                raise Refused(
                    f"objective {self.name} needs {REWARD_PARTS.what}: sample {sample.id} (prompt "
                    f"{sample.prompt_id}) of {self.store.path} has no value of {missing[0]}. What to do: "
                    f"{self.otherwise}{REWARD_PARTS.way_out}."
                )

    def observations(self, *, fills: bool) -> None:
        """Refuse a log in which no environment answered, unless fresh episodes may have answers (`fills`)."""
        if OBSERVED_LOGP not in self.needs or (fills and self.config.environment is not None):
            return
        rows = [row.id for row in self.rows()]
        samples = self.store.samples(ids=rows, skip_damaged=True)
        if not any(sample.observed is not None and sample.observed.any() for sample in samples):
            names = [f"sample {i}" for i in rows[:NAMED]]
            raise OBSERVED_LOGP.refusal(
                self.name, names, len(rows), f"samples in {self.store.path}", len(rows)
            )

    def groups(self, sizes: Iterable[tuple[str, int]], *, drop: bool) -> int | None:
        """Refuse groups that are too small, unless `drop`; returns how many are left, None without groups.

        `sizes`: responses, or pairs, by prompt.
        """
        need = grouping(self.needs)
        if need is None:
            return None
        fresh = self.config.data.complete_groups or 0  # responses that join each of them
        minimum = 1 if need == PAIRS else need.least
        count, total, names = 0, 0, list[str]()
        for prompt, size in sizes:
            total += 1
            if size + fresh < minimum:
                count += 1
                names += [prompt] if len(names) < NAMED else []
        if count and not drop:
            other = changed(need, way_out=self.otherwise + need.way_out)
            raise other.refusal(self.name, names, total, f"groups in {self.store.path}", count)
        if count:
            self.notes.append(f"{count} of {total} groups don't have {need.what} and aren't drawn")
        return total - count

    def responses(self) -> Iterator[tuple[str, int]]:
        """By prompt the number of responses that can be drawn, where there are any."""
        need = grouping(self.needs)
        if need is not None and need.but_experts:
            responses = {(r.prompt_id, r.episode or r.id) for r in self.rows() if need.applies_to(r.role)}
            yield from Counter(prompt for prompt, _ in responses).items()
            return
        for group in self.store.survey.each_group(**chosen(self.config.data)):
            size = group.scored if REWARD in self.needs else group.size
            if size and self.is_drawn(group.prompt_id):
                yield group.prompt_id, size

    def pairs(self) -> Iterable[tuple[str, int]]:
        """By prompt the number of its pairs. Refuses a store without pairs, and missing votes."""
        rows = list(self.rows())
        judged = pairs_among(rows, self.needs, self.store)
        pairs = [pair for group_pairs in judged.values() for pair in group_pairs]
        counts = self.store.counts()
        judged_by = judging(self.needs)
        reads_ties = judged_by is not None and judged_by.reads_ties
        total = counts.pairs + counts.ties * reads_ties
        if not pairs and counts.ties and not total:
            raise Refused(
                f"objective {self.name}: pairs: expected judgments with a winner, but the votes of all "
                f"{counts.ties} judgments in {self.store.path} are equal. What to do: {TIES_WAY_OUT}."
            )
        if not pairs:
            need = changed(PAIRS, way_out=self.otherwise + PAIRS.way_out)
            unit = f"samples in {self.store.path}"
            error = need.refusal(self.name, _named(rows[:NAMED]), len(rows), unit, len(rows))
            excluded = (
                f" The store has {total} pairs: of samples that data.roles, data.sources and data.min_reward "
                "exclude, of samples without a reward, or of two prompts."
            )
            raise Refused(f"{error}{excluded if total else ''}")
        without_votes = [pair for pair in pairs if pair.votes_winner is None or pair.votes_loser is None]
        if VOTES in self.needs and without_votes:
            names = [f"sample {pair.winner} over sample {pair.loser}" for pair in without_votes]
            raise VOTES.refusal(self.name, names, len(pairs), "pairs")
        if total > len(pairs):
            self.notes.append(f"{total - len(pairs)} of {total} pairs aren't drawn")
        sizes = {row.prompt_id: len(judged.get(row.prompt_id, ())) for row in rows}
        if counts.ties and not reads_ties:
            self.notes.append(
                f"{counts.ties} of {counts.pairs + counts.ties} judgments have equal votes: they have no "
                "winner and aren't drawn"
            )
            tied = pairs_among(rows, {PAIRS_AND_TIES}, self.store).keys() - judged.keys()
            sizes = {prompt: size for prompt, size in sizes.items() if prompt not in tied}
        return sizes.items()


def pairs_among(rows: Iterable[SampleSummary], needs: Set[Need], store: Store) -> dict[str, list[Pair]]:
    """By prompt the pairs of two of these samples, with rewards where these are needed.

    Judgments with equal votes are pairs only to objectives that read them.
    """
    prompt = {row.id: row.prompt_id for row in rows if row.scored or REWARD not in needs}
    pairs: dict[str, list[Pair]] = {}
    need = judging(needs)
    for pair in store.pairs():
        if pair.is_tie and not (need is not None and need.reads_ties):
            continue
        if pair.winner in prompt and prompt[pair.winner] == prompt.get(pair.loser):
            pairs.setdefault(prompt[pair.winner], []).append(pair)
    return pairs


def _named(rows: Sequence[SampleSummary]) -> list[str]:
    return [named(row.id, row.prompt_id, row.truncation) for row in rows]


def named(id: int | None, prompt_id: str, truncation: str) -> str:
    sampled = f", sampled with {truncation}" if truncation else ""
    return f"sample {id} (prompt {prompt_id}{sampled})"


Kind = Literal["log", "feedback", "pairs"]  # also the name of the recipe for it
MANY = 0.5  # of the prompts with a reward, which have one response


def kind_of(store: Store) -> tuple[Kind, int]:
    """What a store has, by the recipe that trains on it, and at how many prompts.

    log: rewards of several responses a prompt; feedback: of one; pairs: judgments, and no such rewards.
    """
    scored = [group.scored for group in store.survey.each_group() if group.scored]
    judged = judged_prompts(store)
    if judged and not any(size > 1 for size in scored):
        return "pairs", judged
    is_single = len(scored) > 1 and scored.count(1) >= MANY * len(scored)
    return ("feedback" if is_single else "log"), len(scored)


def instead(store: Store) -> str:
    """The recipe for a log of another kind; "" for one that has groups with rewards to compare."""
    kind, _ = kind_of(store)
    if kind == "log":
        return ""
    what = "judged pairs" if kind == "pairs" else "single responses"
    return f"recipe {kind}, which trains on {what} (agro check {store.path} prints its command)"


def judged_prompts(store: Store) -> int:
    """How many prompts have a judgment with a winner."""
    if not store.counts().pairs:
        return 0
    prompts = {row.id: row.prompt_id for row in store.survey.each_summary()}
    return len({prompts.get(pair.winner) for pair in store.pairs() if not pair.is_tie})


def train_command(
    recipe: str, model: str | None, store: Store, log: Path | None, changes: Sequence[str] = ()
) -> str:
    """`agro train RECIPE …`, after `agro import` where the store was filled from a file for a look."""
    path = store.path if log is None else Path(log.name.split(".")[0] + ".db")
    parts = [] if log is None else ["agro", "import", str(log), "--store", str(path), "&&"]
    parts += ["agro", "train", recipe, f"policy.model={model or 'MODEL'}", f"data.store={path}", *changes]
    quoted = [part if part == "&&" else shlex.quote(part) for part in [*parts, "--out", f"runs/{recipe}"]]
    return " ".join(quoted)


SCALE_RATIO = 3.0  # times the largest |reward| of one source is that of another, at least, on another scale


class ScaleConflict(NamedTuple):
    """Two sources of different scales that scored responses to one prompt."""

    lower: Scale
    higher: Scale
    groups: int
    prompt_id: str  # of one of them


def differ_in_scale(a: Scale, b: Scale) -> bool:
    """Whether two ranges of rewards can't be of one scale, as far as it shows.

    Rewards within [−1, 1] count as one scale, since few or poor responses may only use a part of it.
    """
    sizes = sorted(max(1.0, scale.size) for scale in (a, b))
    return sizes[1] >= SCALE_RATIO * sizes[0]


def find_scale_conflicts(data: DataConfig, store: Store) -> list[ScaleConflict]:
    """The pairs of sources whose rewards, by `data.reward_scale`, differ in scale and meet in a group."""
    scales = {s.source: _mapped(s, data) for s in store.survey.scales()}
    if not any(differ_in_scale(a, b) for a in scales.values() for b in scales.values()):
        return []
    conflicts: dict[tuple[Scale, Scale], ScaleConflict] = {}
    for names, count, prompt_id in store.survey.meetings(**chosen(data)):
        for low, high in _conflicting([scales[name] for name in names], data):
            previous = conflicts.get((low, high))
            groups = count + (previous.groups if previous else 0)
            conflicts[low, high] = ScaleConflict(low, high, groups, prompt_id)
    return list(conflicts.values())


def check_scales(data: DataConfig, store: Store) -> None:
    """Raise `Refused` where sources of different scales meet in a group and have no map."""
    conflicts = find_scale_conflicts(data, store)
    if conflicts:
        raise _refusal(conflicts[0], f"{conflicts[0].groups} groups of {store.path}")


def rescaled(samples: Sequence[Sample], data: DataConfig) -> list[Sample]:
    """The samples with rewards of the scale that training uses; token rewards have the factor alone."""
    if not data.reward_scale:
        return list(samples)
    result = []
    for sample in samples:
        rule = data.reward_scale.get(sample.source)
        reward, tokens = sample.reward, sample.token_reward
        if rule is not None and reward is not None:
            reward = rule.factor * reward + rule.offset
        if rule is not None and tokens is not None:
            tokens = (rule.factor * tokens).astype(tokens.dtype)
        result.append(sample if rule is None else sample.replace(reward=reward, token_reward=tokens))
    return result


def check_drawn(samples: Sequence[Sample], data: DataConfig) -> None:
    """`check_scales` of the samples of one step, whose rewards are mapped."""
    rewards: dict[str, list[float]] = {}  # by source
    groups: dict[str, dict[str, None]] = {}  # the sources of each group, in order
    for sample in samples:
        if sample.reward is not None:
            rewards.setdefault(sample.source, []).append(sample.reward)
            groups.setdefault(sample.prompt_id, {})[sample.source] = None
    scales = {source: Scale(source, min(values), max(values)) for source, values in rewards.items()}
    for prompt_id, sources in groups.items():
        for low, high in _conflicting([scales[source] for source in sources], data):
            raise _refusal(ScaleConflict(low, high, 1, prompt_id), "a group of this step")


def _conflicting(scales: Sequence[Scale], data: DataConfig) -> Iterator[tuple[Scale, Scale]]:
    """The pairs, smaller one first, that differ. A map is the user's word, whatever the ranges are then."""
    for low, high in itertools.product(scales, repeat=2):
        have_map = low.source in data.reward_scale and high.source in data.reward_scale
        if low.size < high.size and differ_in_scale(low, high) and not have_map:
            yield low, high


def _mapped(scale: Scale, data: DataConfig) -> Scale:
    rule = data.reward_scale.get(scale.source)
    if rule is None:
        return scale
    ends = sorted(rule.factor * reward + rule.offset for reward in (scale.lowest, scale.highest))
    return Scale(scale.source, *ends)


def _refusal(conflict: ScaleConflict, location: str) -> Refused:
    low, high = conflict.lower, conflict.higher
    return Refused(
        f"rewards of different scales meet in {location} (for one: prompt {conflict.prompt_id}): those of "
        f"{low.source} go from {low.lowest:g} to {low.highest:g}, those of {high.source} from "
        f"{high.lowest:g} to {high.highest:g}, and a group compares them. What to do: a map for each of the "
        f'two sources (data.reward_scale, as in "{high.source}" = {{ factor = '
        f"{max(1.0, low.size) / high.size:.3g} }}; {{ factor = 1 }} keeps one as it is), or draw one of "
        "them (data.sources)"
    )
