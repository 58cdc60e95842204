"""Checks, before a model is loaded, whether an objective can train on a store's samples."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from agro.config import DataConfig, RunConfig
from agro.config.data import RewardScale
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
from agro.store import At, Counts, Group, Pair, SampleSummary, Store
from agro.store.location import Location, check_made, exists
from agro.store.samples import chosen
from agro.store.split import Clusters
from agro.store.survey import Scale
from agro.train.collate import total_reward
from agro.train.phases import Phase, options_at
from agro.types import ROLES, Prompt, Sample

NAMED = 3  # samples or groups that a message names
POLICY = "policy"  # source and role of a run's own samples
Stored = TypeVar("Stored", Group, SampleSummary, Sample)


def check_stores(
    phases: Sequence[Phase], prompts: Sequence[Prompt], path: Location, clusters: Clusters | None = None
) -> None:
    """Check the stores of a run's phases, as far as the samples of fresh phases don't matter.

    `prompts`: the prompts that the run samples to. `path`: the store that phases draw from.
    """
    if not phases[0].config.data.samples_fresh:
        check_made(path)
    if exists(path):
        with Store.open(path, read_only=True) as store:
            store.split.use(clusters)
            store.experience.check_prompts((p.id, p.text) for p in prompts)
            adds = sampled = False  # whether the run adds samples, or new groups, before a phase draws
            for phase in phases:
                data = phase.config.data
                adds = adds or data.samples
                if data.draws_stored:
                    check_names(data, store.counts(), path, adds=adds)
                    if not sampled:
                        check_store(phase, store)
                sampled = sampled or data.samples_fresh
    for phase in phases:
        if phase.config.data.eval_store:
            Store.open(phase.config.data.eval_store, read_only=True, create=False).close()


def check_enough(phases: Sequence[Phase], path: Location, clusters: Clusters | None = None) -> None:
    """Raise `Refused` if the store has fewer groups than a step draws before anything adds to it.

    Checks the phases before the first one that samples. Limits on staleness, with which groups come and go,
    are left to the step. `clusters`: the run's.
    """
    for phase in itertools.takewhile(lambda phase: not phase.config.data.samples_fresh, phases):
        data, waits = phase.config.data, phase.config.source.kind == "elsewhere"
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

    `counts`: those of the store at `path`. With `adds` the run itself adds samples of source and role
    "policy". An empty store is accepted: other processes may fill it.
    """
    if not counts.samples:
        return
    roles, sources = data.drawn_from
    shares = [name for name in data.shares_at(0) if name and name not in ROLES]
    named: dict[str, tuple[Sequence[str] | None, Mapping[str, int]]] = {  # None: all are allowed
        "replay": (shares or None, counts.sources),
        "sources": (None if shares else sources, counts.sources),
        "roles": (roles, counts.roles),
        "reward_scale": (tuple(data.reward_scale) or None, counts.sources),
    }
    for key, (names, having) in named.items():
        if names is None:
            continue
        may_add = adds or key == "reward_scale"  # perhaps for a later phase
        unknown = [name for name in names if name not in having and not (may_add and name == POLICY)]
        # data.roles may allow more roles than the store has.
        if names and (not unknown or (key == "roles" and len(unknown) < len(names))):
            continue
        have = ", ".join(f"{name} ({having[name]})" for name in sorted(having))
        wrong = f"no sample of {path} has {', '.join(unknown)}" if unknown else "an empty list draws nothing"
        raise Refused(
            f"data.{key}: {wrong}; expected some of {have} (samples in brackets). What to do: correct or "
            "remove the name, or import such samples (agro import)"
        )


def check_store(phase: Phase, store: Store, *, fills: bool | None = None) -> list[str]:
    """Raise `Refused` if the objective can't train on what would be drawn; return notes on what isn't drawn.

    `fills`: whether the run adds samples if there are none to draw; by default, whether any step samples.
    """
    config, data = phase.config, phase.config.data
    fills = data.samples_fresh if fills is None else fills
    options = options_at(config.objective.options, 0)
    check = _StoreCheck(config, store, phase.entry.needed(options))
    if not check.samples():
        if fills:
            return ["the store is empty: all groups are sampled until it has some"]
        raise Refused(
            f"data.store: {store.path} has no samples that data.roles, data.sources, data.min_reward and "
            "data.best_of_group admit; import some (agro import)"
        )
    check.contents(answers=fills and config.environment is not None)
    sizes = check.pairs() if PAIRS in check.needs else check.responses()
    if data.spread:
        groups = list(drawn_groups(data, store))
        equal = sum(g.scored > 1 and g.reward_min == g.reward_max for g in groups)
        effect = "aren't drawn" if data.spread is True else "are drawn more seldom"
        if equal:
            check.notes.append(
                f"{equal} of {len(groups)} groups have equal rewards and {effect} (data.spread)"
            )
    remaining = check.groups(sizes, drop=options.get("singletons") == "drop")
    if remaining == 0 and not fills:
        raise Refused(
            f"data.store: no group of {store.path} is left to draw: {'; '.join(check.notes)}. What to do: "
            f"{check.otherwise()}sample more responses to each prompt (data.complete_groups does so in a "
            "run), or score those without a reward (agro score)"
        )
    if REWARD in check.needs:
        check_scales(data, store)
    return check.notes


def drawn_groups(data: DataConfig, store: Store) -> Iterator[Group]:
    """The groups that may be drawn: those of samples that `data` admits, without held-out prompts."""
    return trained(store.survey.each_group(**chosen(data)), data, store)


def trained(stored: Iterable[Stored], data: DataConfig, store: Store) -> Iterator[Stored]:
    """Drop entries of held-out prompts."""
    is_held_out = store.split.held_out(data)
    return (each for each in stored if not is_held_out(each.prompt_id))


@dataclass
class _StoreCheck:
    """Checks a run's stored samples against the needs of its objective, in constant memory."""

    config: RunConfig
    store: Store
    needs: Set[Need]
    notes: list[str] = field(default_factory=list)  # what isn't drawn

    def rows(self) -> Iterator[SampleSummary]:
        data, survey = self.config.data, self.store.survey
        return trained(survey.each_summary(**chosen(data)), data, self.store)

    def otherwise(self) -> str:
        """The recipe for a log of another kind, followed by "or"; else ""."""
        way_out = instead(self.store)
        return f"{way_out}, or " if way_out else ""

    def refusal(
        self, need: Need, names: Sequence[str], total: int, unit: str = "rows", count: int | None = None
    ) -> Refused:
        """The refusal of `count` of `total` units that lack a need; `names`: the first of them."""
        need = changed(need, way_out=self.otherwise() + need.way_out)
        return need.refusal(self.config.objective.name, names, total, unit, count)

    def samples(self) -> int:
        """Count the samples. Refuses missing needs that all must meet, and needs that no sample meets."""
        total, needs = 0, ordered(self.needs)
        missing: dict[Need, list[SampleSummary]] = {need: [] for need in needs}  # the first few
        counts = Counter[Need]()
        missing_by_kind: dict[tuple[object, ...], list[Need]] = {}  # the needs that a kind of samples lacks
        for row in self.rows():
            total += 1
            kind = (row.scored, row.knows_behavior, row.truncation, row.role)
            if kind not in missing_by_kind:
                missing_by_kind[kind] = [n for n in needs if n.applies_to(row.role) and n.missing_in(row)]
            for need in missing_by_kind[kind]:
                counts[need] += 1
                if counts[need] <= NAMED:
                    missing[need].append(row)
        for need in (need for need in needs if counts[need]):
            if counts[need] == total or not need.optional:
                raise self.refusal(need, [*map(named, missing[need])], total, count=counts[need])
            self.notes.append(f"{counts[need]} of {total} samples have no {need} and aren't drawn")
        return total

    def contents(self, *, answers: bool) -> None:
        """Refuse problems that only the samples themselves show: rows of one episode with different rewards,
        a reward without its recorded parts, and a log without replies of an environment.

        `answers`: whether fresh episodes will have replies.
        """
        functions = labeled(self.config.reward.functions) if REWARD_PARTS in self.needs else {}
        if OBSERVED_LOGP in self.needs and not answers:
            self._observations()
        compares = REWARD in self.needs
        rows = [r for r in self.rows() if functions or (compares and r.episode is not None)]
        scored = {row.id for row in rows if row.scored}
        partial = {(row.prompt_id, row.episode) for row in rows if not row.scored}
        first_rows: dict[tuple[str, str], Sample] = {}  # by prompt and episode
        for sample in self.store.samples(ids=[row.id for row in rows], skip_damaged=True):
            if functions and sample.id in scored and (without := unrecorded(sample, functions)):
                raise Refused(
                    f"objective {self.config.objective.name} needs {REWARD_PARTS.what}: sample {sample.id} "
                    f"(prompt {sample.prompt_id}) of {self.store.path} has no value of {without[0]}. What to "
                    f"do: {self.otherwise()}{REWARD_PARTS.way_out}."
                )
            key = (sample.prompt_id, sample.episode)
            if not compares or sample.episode is None or key in partial:
                continue
            other = first_rows.setdefault((sample.prompt_id, sample.episode), sample)
            rewards = total_reward(other), total_reward(sample)
            if rewards[0] != rewards[1]:
                raise Refused(
                    f"{self.store.path}: episode {sample.episode} of prompt {sample.prompt_id}: expected one "
                    f"reward for all rows of an episode, got {rewards[0]:g} in sample {other.id} and "
                    f"{rewards[1]:g} in sample {sample.id}. What to do: score them again (agro score), or "
                    "import each row with the reward of the complete episode"
                )

    def _observations(self) -> None:
        rows = [row.id for row in self.rows()]
        samples = self.store.samples(ids=rows, skip_damaged=True)
        if not any(sample.observed is not None and sample.observed.any() for sample in samples):
            names, unit = [f"sample {i}" for i in rows[:NAMED]], f"samples in {self.store.path}"
            raise OBSERVED_LOGP.refusal(self.config.objective.name, names, len(rows), unit, len(rows))

    def groups(self, sizes: Iterable[tuple[str, int]], *, drop: bool) -> int | None:
        """Refuse groups that are too small, unless `drop`; return how many remain, None without groups.

        `sizes`: responses, or pairs, by prompt.
        """
        need = grouping(self.needs)
        if need is None:
            return None
        joining = self.config.data.complete_groups or 0  # fresh responses
        minimum = 1 if need == PAIRS else need.least
        count, total, names = 0, 0, list[str]()
        for prompt, size in sizes:
            total += 1
            if size + joining < minimum:
                count += 1
                names += [prompt] if len(names) < NAMED else []
        if count and not drop:
            raise self.refusal(need, names, total, f"groups in {self.store.path}", count)
        if count:
            self.notes.append(f"{count} of {total} groups don't have {need.what} and aren't drawn")
        return total - count

    def responses(self) -> Iterator[tuple[str, int]]:
        """By prompt, the number of responses that can be drawn, if there are any."""
        need = grouping(self.needs)
        if need is not None and need.but_experts:
            responses = {(r.prompt_id, r.episode or r.id) for r in self.rows() if need.applies_to(r.role)}
            yield from Counter(prompt for prompt, _ in responses).items()
            return
        for group in drawn_groups(self.config.data, self.store):
            size = group.scored if REWARD in self.needs else group.size
            if size:
                yield group.prompt_id, size

    def pairs(self) -> Iterable[tuple[str, int]]:
        """By prompt, the number of its pairs. Refuses a store without pairs, and missing votes."""
        rows, counts, need = list(self.rows()), self.store.counts(), judging(self.needs)
        judged = pairs_among(rows, self.needs, self.store)
        pairs = [pair for group_pairs in judged.values() for pair in group_pairs]
        reads_ties = need is not None and need.reads_ties
        total = counts.pairs + counts.ties * reads_ties
        if not pairs and counts.ties and not total:
            raise Refused(
                f"objective {self.config.objective.name}: pairs: expected judgments with a winner, but the "
                f"votes of all {counts.ties} judgments in {self.store.path} are equal. What to do: "
                f"{TIES_WAY_OUT}."
            )
        if not pairs:
            unit = f"samples in {self.store.path}"
            error = self.refusal(PAIRS, [*map(named, rows[:NAMED])], len(rows), unit, len(rows))
            excluded = (
                f" The store has {total} pairs, but of samples that data.roles, data.sources and "
                "data.min_reward exclude, of samples without a reward, or of two prompts."
            )
            raise Refused(f"{error}{excluded if total else ''}")
        without_votes = [pair for pair in pairs if pair.votes_winner is None or pair.votes_loser is None]
        if VOTES in self.needs and without_votes:
            names = [f"sample {pair.winner} over sample {pair.loser}" for pair in without_votes]
            raise VOTES.refusal(self.config.objective.name, names, len(pairs), "pairs")
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
    """By prompt, the pairs among these samples, or among the scored ones if rewards are needed.

    Judgments with equal votes are pairs only for objectives that read them.
    """
    need = judging(needs)
    reads_ties = need is not None and need.reads_ties
    prompt = {row.id: row.prompt_id for row in rows if row.scored or REWARD not in needs}
    pairs: dict[str, list[Pair]] = {}
    for pair in store.pairs():
        same = pair.winner in prompt and prompt[pair.winner] == prompt.get(pair.loser)
        if same and (reads_ties or not pair.is_tie):
            pairs.setdefault(prompt[pair.winner], []).append(pair)
    return pairs


def named(row: SampleSummary | Sample) -> str:
    """Name a row in messages."""
    sampled = f", sampled with {row.truncation}" if row.truncation else ""
    return f"sample {row.id} (prompt {row.prompt_id}{sampled})"


Kind = Literal["log", "feedback", "pairs"]  # named after its recipe
MANY = 0.5  # share of scored prompts with one response above which a log is of single responses


def kind_of(store: Store) -> Kind:
    """The kind of data in a store, named after the recipe that trains on it.

    log: rewards of several responses per prompt; feedback: of one; pairs: judgments without such rewards.
    """
    scored = [group.scored for group in store.survey.each_group() if group.scored]
    if not any(size > 1 for size in scored) and judged_prompts(store):
        return "pairs"
    return "feedback" if len(scored) > 1 and scored.count(1) >= MANY * len(scored) else "log"


def instead(store: Store) -> str:
    """The recipe for a log of another kind; "" for one that has groups with rewards to compare."""
    kind = kind_of(store)
    if kind == "log":
        return ""
    data_kind = "judged pairs" if kind == "pairs" else "single responses"
    return f"recipe {kind}, which trains on {data_kind} (agro check {store.path} prints its command)"


def judged_prompts(store: Store) -> int:
    """Count the prompts that have a judgment with a winner."""
    if not store.counts().pairs:
        return 0
    prompts = {row.id: row.prompt_id for row in store.survey.each_summary()}
    return len({prompts.get(pair.winner) for pair in store.pairs() if not pair.is_tie})


def train_command(
    recipe: str, model: str | None, store: Store, log: Path | None, changes: Sequence[str] = ()
) -> str:
    """`agro train RECIPE …`, after `agro import` if the store is a temporary import of a file."""
    path = store.path if log is None else Path(log.name.split(".")[0] + ".db")
    parts = ["agro", "train", recipe, f"policy.model={model or 'MODEL'}", f"data.store={path}", *changes]
    command = shlex.join([*parts, "--out", f"runs/{recipe}"])
    if log is None:
        return command
    return f"{shlex.join(['agro', 'import', str(log), '--store', str(path)])} && {command}"


SCALE_RATIO = 3.0  # the smallest ratio of two sources' largest |reward| that means different scales


class ScaleConflict(NamedTuple):
    """Two sources of different scales with rewards in the same groups."""

    lower: Scale
    higher: Scale
    groups: int
    prompt_id: str  # of one of these groups


def differ_in_scale(a: Scale, b: Scale) -> bool:
    """Whether two ranges of rewards must be on different scales.

    Rewards within [−1, 1] count as one scale, since few or poor responses may use only a part of it.
    """
    sizes = sorted(max(1.0, scale.size) for scale in (a, b))
    return sizes[1] >= SCALE_RATIO * sizes[0]


def find_scale_conflicts(data: DataConfig, store: Store) -> list[ScaleConflict]:
    """The pairs of sources that share a group and, after `data.reward_scale`, differ in scale."""
    scales = {}
    for source, *rewards in store.survey.scales():
        rule = data.reward_scale.get(source, RewardScale())
        scales[source] = Scale(source, *sorted(rule.factor * reward + rule.offset for reward in rewards))
    if not any(differ_in_scale(a, b) for a, b in itertools.combinations(scales.values(), 2)):
        return []
    return _conflicts(data, scales, store.survey.meetings(**chosen(data)))


def _conflicts(
    data: DataConfig, scales: Mapping[str, Scale], meetings: Iterable[tuple[Iterable[str], int, str]]
) -> list[ScaleConflict]:
    """`meetings`: sources that share a group, the number of such groups, and a prompt id of one.

    If both sources have a map, the user's choice is accepted, whatever the ranges.
    """
    conflicts: dict[tuple[str, str], ScaleConflict] = {}
    for names, count, prompt_id in meetings:
        for one, other in itertools.combinations([scales[name] for name in names], 2):
            have_map = one.source in data.reward_scale and other.source in data.reward_scale
            if have_map or not differ_in_scale(one, other):
                continue
            low, high = sorted((one, other), key=lambda scale: scale.size)
            key = low.source, high.source
            groups = count + (conflicts[key].groups if key in conflicts else 0)
            conflicts[key] = ScaleConflict(low, high, groups, prompt_id)
    return list(conflicts.values())


def check_scales(data: DataConfig, store: Store) -> None:
    """Raise `Refused` if sources of different scales share a group and have no map."""
    _refuse(find_scale_conflicts(data, store), str(store.path))


def check_drawn(samples: Sequence[Sample], data: DataConfig) -> None:
    """`check_scales` for the samples of one step, whose rewards are mapped already."""
    rewards: dict[str, list[float]] = {}  # by source
    groups: dict[str, dict[str, None]] = {}  # the sources of each group, in order
    for sample in samples:
        if sample.reward is not None:
            rewards.setdefault(sample.source, []).append(sample.reward)
            groups.setdefault(sample.prompt_id, {})[sample.source] = None
    scales = {source: Scale(source, min(values), max(values)) for source, values in rewards.items()}
    meetings = ((sources, 1, prompt_id) for prompt_id, sources in groups.items())
    _refuse(_conflicts(data, scales, meetings), "this step")


def rescaled(samples: Sequence[Sample], data: DataConfig) -> list[Sample]:
    """Map the samples' rewards to the scale of training; token rewards get only the factor."""
    result = []
    for sample in samples:
        rule, tokens = data.reward_scale.get(sample.source), sample.token_reward
        if rule is not None and sample.reward is not None:
            sample = sample.replace(reward=rule.factor * sample.reward + rule.offset)
        if rule is not None and tokens is not None:
            sample = sample.replace(token_reward=(rule.factor * tokens).astype(tokens.dtype))
        result.append(sample)
    return result


def _refuse(conflicts: Sequence[ScaleConflict], location: str) -> None:
    if not conflicts:
        return
    low, high, count, prompt_id = conflicts[0]
    raise Refused(
        f"rewards of different scales meet in groups of {location} ({count}, such as prompt {prompt_id}): "
        f"those of {low.source} go from {low.lowest:g} to {low.highest:g}, those of {high.source} from "
        f"{high.lowest:g} to {high.highest:g}, and a group compares them. What to do: a map for each of the "
        f'two sources (data.reward_scale, as in "{high.source}" = {{ factor = '
        f"{max(1.0, low.size) / high.size:.3g} }}; {{ factor = 1 }} keeps one as it is), or draw one of "
        "them (data.sources)"
    )
