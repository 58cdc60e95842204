"""A tree of the turns of an environment: which state is expanded next, and what turns are worth.

A turn leads to a state, or ends the episode with a return. Returns are backed up: a turn's value is the mean
return of the episodes that were found below it. `step_pairs` judges the turns of one state (Agent Q,
arXiv 2408.07199).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from agro.errors import Refused
from agro.store import Pair
from agro.types import Prompt, Sample


@dataclass(eq=False)
class State:
    """What the policy reads, after the turns before it."""

    prompt: Prompt
    turns: tuple[str, ...] = ()
    before: Action | None = None  # the turn that led here
    reward: float = 0.0  # of the turns before it
    actions: list[Action] = field(default_factory=list)
    expansions: int = 0


@dataclass(eq=False)
class Action:
    """A turn that was tried in a state: a sample of the store whose prompt is the state."""

    sample: Sample
    text: str
    state: State
    next: State | None = None  # None: the episode ended
    critic: float | None = None  # its value by self-critique; None: not asked
    visits: int = 0  # episodes below it
    total: float = 0.0  # of their returns
    best: float = -math.inf

    @property
    def mean(self) -> float | None:
        """Return of the episodes below it; None where there is none."""
        return self.total / self.visits if self.visits else None

    def ends(self, value: float | None) -> None:
        """The episode ends with it, with this return; None: unknown, which is not backed up."""
        action: Action | None = self
        while action is not None and value is not None:
            action.visits += 1
            action.total += value
            action.best = max(action.best, value)
            action = action.state.before

    def value(self, alpha: float) -> float | None:
        """α · mean + (1 − α) · critic; where one is unknown, the other; None where both are."""
        if self.mean is None or self.critic is None:
            return self.critic if self.mean is None else self.mean
        return alpha * self.mean + (1 - alpha) * self.critic

    @property
    def path_logp(self) -> tuple[float, int]:
        """Nats and tokens of the turns up to it and with it."""
        assert self.sample.behavior_logp is not None
        assert self.sample.action is not None
        logp = self.sample.behavior_logp[self.sample.action]
        before = (0.0, 0) if self.state.before is None else self.state.before.path_logp
        return before[0] + float(logp.sum(dtype="float64")), before[1] + len(logp)


Rule = Callable[[list[State], State], State]  # of (states that may be next, the first one)


class Tree:
    """The tree of one prompt."""

    def __init__(self, prompt: Prompt, rule: Rule) -> None:
        self.start, self.rule = State(prompt), rule

    @property
    def states(self) -> Iterator[State]:
        waiting = [self.start]
        while waiting:
            state = waiting.pop()
            yield state
            waiting += [action.next for action in state.actions if action.next is not None]

    @property
    def actions(self) -> Iterator[Action]:
        return (action for state in self.states for action in state.actions)

    @property
    def best(self) -> float:
        """The largest return found; −∞ where none is known."""
        return max((action.best for action in self.start.actions), default=-math.inf)

    def choose(self) -> State:
        """The state in which turns are tried next, one of those that were expanded least often."""
        states = list(self.states)
        least = min(state.expansions for state in states)
        return self.rule([state for state in states if state.expansions == least], self.start)


def best_first(length_power: float) -> Rule:
    """The state after the turns of the largest log-prob, over their tokens^`length_power`."""

    def priority(state: State) -> float:
        if state.before is None:  # the start is the only state at first; later it comes last
            return -math.inf
        logp, tokens = state.before.path_logp
        return float(logp / tokens**length_power)

    return lambda states, start: max(states, key=priority)


def by_ucb(explore: float, alpha: float = 1.0) -> Rule:
    """Down from the start by the largest value + `explore` · √(log N / n), n the episodes below a turn and N
    those below its state. Turns without an episode come first, by their value by critique."""

    def bound(action: Action) -> tuple[bool, float]:
        value = action.value(alpha) or 0.0
        if not action.visits:
            return True, value
        below = sum(other.visits for other in action.state.actions)
        return False, value + explore * math.sqrt(math.log(below) / action.visits)

    def chosen(states: list[State], start: State) -> State:
        leading: set[int] = set()  # the states, and those above them
        for candidate in states:
            above: State | None = candidate
            while above is not None:
                leading.add(id(above))
                above = None if above.before is None else above.before.state
        state: State | None = start
        while state is not None:
            reached = state
            ways = [a for a in state.actions if a.next is not None and id(a.next) in leading]
            state = max(ways, key=bound).next if ways else None
        return reached

    return chosen


def step_pairs(values: Mapping[int, float], *, theta: float, most: int | None = None) -> list[Pair]:
    """The pairs of one state's actions whose values differ by more than `theta`, the better one first, the
    widest gaps first.

    `values`: by sample of the store. There are as many pairs as the square of the actions; `most` keeps that
    many. Give them to `Store.add_pairs`.
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
