"""A source that searches a tree of turns for each prompt of a step, in place of sampling complete episodes.

Agent Q (arXiv 2408.07199): the search and the policy's own critique judge turns of one state.
BFS-Prover-V2 (arXiv 2509.06493): the turns of right episodes, found best first, are imitated. The tree is in
the store: each turn is a sample whose prompt is the state, and `meta` names the previous turn.

A turn leads to a state, or ends the episode with a return. Returns are backed up: a turn's value is the mean
return of the episodes below it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from dataclasses import field as default
from typing import Any, Literal

from agro.config import Count, Section, Share, field
from agro.errors import Refused
from agro.objectives.needs import PAIRS
from agro.rollout import CollectResult
from agro.rollout.envs import Environment, Turn, checked
from agro.store import Pair
from agro.train.around import Abilities, Context, SourceWrapper
from agro.train.learner import Learner
from agro.train.phases import Phase
from agro.train.source import FillRequest, InlineSource, Source, can_be_asked, joined
from agro.types import Prompt, Sample
from agro_papers.resample import answer_probabilities


@dataclass(eq=False)
class State:
    """What the policy reads after some turns."""

    prompt: Prompt
    turns: tuple[str, ...] = ()
    parent: Action | None = None  # the turn that led here
    reward: float = 0.0  # sum over the previous turns
    actions: list[Action] = default(default_factory=list)
    expansions: int = 0


@dataclass(eq=False)
class Action:
    """A turn tried in a state: a stored sample whose prompt is the state."""

    sample: Sample
    text: str
    state: State
    next: State | None = None  # None: the episode ended
    critic: float | None = None  # its value by self-critique; None: not computed
    visits: int = 0  # number of episodes below it
    total: float = 0.0  # sum of their returns
    best: float = -math.inf  # the largest of them

    @property
    def mean(self) -> float | None:
        """Mean return of the episodes below it; None without one."""
        return self.total / self.visits if self.visits else None

    def ends(self, value: float | None) -> None:
        """Back up the return of the episode that ends with it; None: unknown, not backed up."""
        action: Action | None = self
        while action is not None and value is not None:
            action.visits += 1
            action.total += value
            action.best = max(action.best, value)
            action = action.state.parent

    def value(self, alpha: float) -> float | None:
        """α · mean + (1 − α) · critic; if one is unknown, the other; None if both are."""
        if self.mean is None or self.critic is None:
            return self.critic if self.mean is None else self.mean
        return alpha * self.mean + (1 - alpha) * self.critic

    @property
    def path_logp(self) -> tuple[float, int]:
        """Nats and tokens of the turns up to and including it."""
        assert self.sample.behavior_logp is not None
        assert self.sample.action is not None
        logp = self.sample.behavior_logp[self.sample.action]
        nats, tokens = (0.0, 0) if self.state.parent is None else self.state.parent.path_logp
        return nats + float(logp.sum(dtype="float64")), tokens + len(logp)


Rule = Callable[[list[State], State], State]  # (candidate states, the start) -> the state to expand


class Tree:
    """The tree of one prompt."""

    def __init__(self, prompt: Prompt, rule: Rule) -> None:
        self.start, self.rule = State(prompt), rule

    @property
    def states(self) -> Iterator[State]:
        stack = [self.start]
        while stack:
            state = stack.pop()
            yield state
            stack += [action.next for action in state.actions if action.next is not None]

    @property
    def actions(self) -> Iterator[Action]:
        return (action for state in self.states for action in state.actions)

    @property
    def best(self) -> float:
        """The largest return; −∞ if none is known."""
        return max((action.best for action in self.start.actions), default=-math.inf)

    def choose(self) -> State:
        """The state to expand next, one of those that were expanded least often."""
        states = list(self.states)
        fewest = min(state.expansions for state in states)
        return self.rule([state for state in states if state.expansions == fewest], self.start)


def best_first(length_power: float) -> Rule:
    """The rule that expands the state after the turns with the largest log-prob / tokens^`length_power`."""

    def priority(state: State) -> float:
        if state.parent is None:  # the start is the only state at first; later it comes last
            return -math.inf
        logp, tokens = state.parent.path_logp
        return float(logp / tokens**length_power)

    return lambda states, start: max(states, key=priority)


def by_ucb(explore: float, alpha: float = 1.0) -> Rule:
    """The rule that descends from the start by the largest value + `explore` · √(log N / n), where n counts
    the episodes below a turn and N those below its state. Turns without an episode come first, ordered by
    their value by critique."""

    def bound(action: Action) -> tuple[bool, float]:
        value = action.value(alpha) or 0.0
        if not action.visits:
            return True, value
        total = sum(sibling.visits for sibling in action.state.actions)
        return False, value + explore * math.sqrt(math.log(total) / action.visits)

    def chosen(states: list[State], start: State) -> State:
        leading: set[int] = set()  # the states and their ancestors
        for candidate in states:
            ancestor: State | None = candidate
            while ancestor is not None:
                leading.add(id(ancestor))
                ancestor = None if ancestor.parent is None else ancestor.parent.state
        state: State | None = start
        while state is not None:
            reached = state
            ways = [a for a in state.actions if a.next is not None and id(a.next) in leading]
            state = max(ways, key=bound).next if ways else None
        return reached

    return chosen


def step_pairs(values: Mapping[int, float], *, theta: float, most: int | None = None) -> list[Pair]:
    """The pairs of one state's actions whose values differ by more than `theta`, the better action first, the
    widest gaps first.

    `values`: by id of the stored sample. The number of pairs grows as the square of the actions; `most`
    limits it. Give them to `Store.add_pairs`.
    """
    if not theta >= 0:
        raise Refused(f"pairs: expected theta of 0 or more, got {theta}")
    ranked = sorted(((value, sample) for sample, value in values.items()), reverse=True)
    gaps = [
        (better - worse, Pair(winner, loser))
        for (better, winner), (worse, loser) in itertools.combinations(ranked, 2)
        if better - worse > theta
    ]
    gaps.sort(key=lambda gap: -gap[0])
    return [pair for _, pair in gaps[:most]]


class SearchOptions(Section):
    """Fresh groups come from a search: a tree of turns for each prompt. Each turn is a sample, whose prompt
    is what was read before it. `sampler.max_new` limits a turn, `environment.max_turns` the depth."""

    by: Literal["ucb", "best"]
    """which state comes next, of those that were expanded least often. ucb: down from the start by the upper
    confidence bound of turns (Agent Q, arXiv 2408.07199); best: the largest log-prob of the turns before
    it over their tokens^`length_power` (BFS-Prover-V2, arXiv 2509.06493)"""
    branches: Count = 4
    """turns that are tried at once in a state"""
    expansions: Count = 8
    """number of expansions per prompt, repeated states included; best ends with the first right episode"""
    explore: float = field(1.0, ge=0)
    """ucb: c of Q + c √(log N / n)"""
    length_power: Share = 1.0
    """best: 0 is the log-prob, 1 its mean over tokens"""
    critique: str | None = None
    """a question, such as " Is this a good step? ", to ask after each turn: the policy's probability of
    `good` is the turn's value by self-critique. Without it, only the search gives turns values"""
    good: str = "yes"
    """the answer that means that a turn is good"""
    alpha: Share = 0.5
    """share of the search in a turn's value; the rest is the self-critique"""
    train: Literal["pairs", "path"] = "pairs"
    """what to train on. pairs: judged pairs of turns of one state whose values differ by more than `theta`;
    path: the turns of right episodes"""
    theta: float = field(0.2, ge=0)
    """pairs: least difference of a pair's values, exclusive"""
    most: Count | None = 8
    """pairs: most pairs per state, those with the widest gaps"""
    right: float = 1.0
    """path: least reward of a right episode"""


class SearchingSource:
    """A source whose fresh groups are states of search trees, and their responses turns."""

    def __init__(self, source: Source, context: Context, options: SearchOptions) -> None:
        inline, environment = context.inline, context.environment
        assert environment is not None
        assert context.config.environment is not None
        self.turns = context.copying(single_turns(inline, environment))  # with or without a lag
        self.prompts, self.store, self.encoder = inline.prompts, context.store, inline.rollout.encoder
        self.environment = environment
        self.search, self.depth = options, context.config.environment.max_turns
        self.learner: Learner | None = None

    def publish(self, learner: Learner) -> None:
        self.turns.publish(learner)
        self.learner = learner

    def fill(self, wanted: FillRequest) -> CollectResult:
        search = self.search
        rule, ends = by_ucb(search.explore, search.alpha), math.inf
        if search.by == "best":
            rule, ends = best_first(search.length_power), search.right
        trees = [Tree(prompt, rule) for prompt in self.prompts.take(wanted.first, wanted.groups)]
        parts = [CollectResult()]
        tried = 0
        for _ in range(search.expansions):
            states = [tree.choose() for tree in trees if tree.best < ends]
            if not states:
                break
            parts.append(self._expand(states, replace(wanted, before=tried)))
            tried += len(states)
        actions = [action for tree in trees for action in tree.actions]
        # The stored reward of a turn: for pairs the search's mean, for paths the best return below it.
        rows = []
        for action in actions:
            value = action.mean if search.train == "pairs" else action.best
            meta = {"tree": {"visits": action.visits, "searched": action.mean, "critic": action.critic}}
            rows.append((action.sample.stored_id, value if action.visits else None, meta))
        self.store.set_rewards(rows)
        ids = {action.sample.stored_id for action in actions if action.best >= search.right}
        if search.train == "pairs":
            pairs = [pair for tree in trees for state in tree.states for pair in self._pairs(state)]
            self.store.add_pairs(pairs)
            ids = {i for pair in pairs for i in (pair.winner, pair.loser)}
        filled = joined(parts, tuple(sorted(ids)))
        return replace(filled, measured={**filled.measured, "searched": tried})

    def _pairs(self, state: State) -> list[Pair]:
        """The judged pairs of a state's turns."""
        values = {}
        for action in state.actions:
            value = action.value(self.search.alpha)
            if value is not None:
                values[action.sample.stored_id] = value
        return step_pairs(values, theta=self.search.theta, most=self.search.most)

    def _expand(self, states: Sequence[State], wanted: FillRequest) -> CollectResult:
        """Try turns in these states, and let the environment answer them."""
        n = self.search.branches
        prompts = [state.prompt for state in states]
        filled = self.turns.fill(FillRequest(wanted.step, 0, wanted.first, wanted.before, prompts, n))
        samples = {sample.id: sample for sample in self.store.samples(ids=filled.ids)}
        actions = []
        for k, state in enumerate(states):
            state.expansions += 1
            for i in filled.ids[k * n : (k + 1) * n]:
                tokens, chosen = samples[i].tokens, samples[i].action
                assert tokens is not None
                assert chosen is not None
                start = int(chosen.argmax())
                # The text includes the stop text that ended the turn.
                text = self.encoder.decode(tokens[start:].tolist(), tokens[:start].tolist())
                action = Action(samples[i], text, state)
                self._answer(action)
                state.actions.append(action)
                actions.append(action)
        if self.search.critique is not None:
            assert self.learner is not None, "weights are published before a step"
            question = self.search.critique
            contexts = [(a.state.prompt, a.text + question) for a in actions]
            critics = answer_probabilities(self.learner, contexts, self.search.good)
            for action, critic in zip(actions, critics, strict=True):
                action.critic = critic
        return filled

    def _answer(self, action: Action) -> None:
        """Replay the turns and let the environment answer the last one: the next state, or the end."""
        state, sample, text = action.state, action.sample, action.text
        cut = sample.meta["finish"] == "length"
        reply = self._replayed(state, text, cut=cut)
        if reply is None:
            return
        reward = None if reply.reward is None else state.reward + reply.reward
        turns = (*state.turns, text)
        following = None
        if not (reply.done or cut) and len(turns) < self.depth:
            following = self._following(state, text, reply, sample)
        if following is None or reward is None:
            action.ends(reward)
            return
        action.next = State(following, turns, action, reward)

    def _replayed(self, state: State, text: str, *, cut: bool) -> Turn | None:
        """The answer to a turn, as the same prompt and turns give the same answers. None if it fails."""
        start = state
        while start.parent is not None:
            start = start.parent.state
        root = Prompt(start.prompt.text, columns=state.prompt.columns)
        try:
            played = self.environment.reset(root)
            for turn in state.turns:
                self.environment.step(played, turn)
            return checked(self.environment.step(played, text), cut)
        except Exception:  # noqa: BLE001 only this turn fails: its value stays unknown
            return None

    def _following(self, state: State, text: str, reply: Turn, sample: Sample) -> Prompt | None:
        """What the policy reads next; None if that leaves no room for a turn."""
        assert reply.observation is not None
        history = state.prompt.text
        if isinstance(history, str):
            following: Any = history + text + reply.observation
        else:
            answer = {"role": "assistant", "content": text}
            following = [*history, answer, {"role": reply.role, "content": reply.observation}]
        prompt = Prompt(following, columns={**state.prompt.columns, "parent": str(sample.id)})
        return prompt if can_be_asked(prompt, self.encoder) else None


def single_turns(source: InlineSource, environment: Environment) -> InlineSource:
    """The same source for single turns, without a reward."""
    rollout = copy(source.rollout)
    rollout.environment = None
    stops = tuple(dict.fromkeys((*source.config.sampler.stop, *environment.stop)))
    sampler = source.config.sampler.model_copy(update={"stop": stops})
    config = source.config.model_copy(update={"sampler": sampler})
    return replace(source, rollout=rollout, config=config, reward=None)


def _can(inner: Abilities, search: SearchOptions) -> Abilities:
    inner -= {"samples_chosen_prompts", "whole_groups"}
    return inner | {"judges_pairs"} if search.train == "pairs" else inner


def _problems(phase: Phase, search: SearchOptions) -> Mapping[str, object]:
    kind = "pairs" if search.train == "pairs" else "no pairs"
    name = phase.config.objective.name
    return {
        "searches over the turns of an [environment]: set one": phase.config.environment is None,
        f'with train = "{search.train}" is for objectives that need {kind}, got {name}': (
            (search.train == "pairs") != (PAIRS in phase.needs)
        ),
    }


TREE_SEARCH = SourceWrapper(
    SearchingSource,
    SearchOptions,
    needs=frozenset(("shares_engine", "samples_chosen_prompts")),
    can=_can,
    problems=_problems,
)
