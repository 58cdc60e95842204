"""A search over the turns of an environment, in place of episodes that are sampled from start to end."""

from __future__ import annotations

from typing import Literal

from agro.config.section import Count, Section, Share, field


class SearchConfig(Section):
    """Fresh groups are found by a search: a tree of turns for each prompt. Each turn is a sample of its own,
    whose prompt is what was read before it. `sampler.max_new` is of a turn, `environment.max_turns` the
    depth."""

    by: Literal["ucb", "best"]
    """which state comes next, of those that were expanded least often. ucb: down from the start by the upper
    confidence bound of turns (Agent Q, arXiv 2408.07199); best: the largest log-prob of the turns
    before it over their tokens^`length_power` (BFS-Prover-V2, arXiv 2509.06493)"""
    branches: Count = 4
    """turns that are tried at once in a state"""
    expansions: Count = 8
    """states of a prompt, repeated ones too, in which turns are tried; best ends with the first right
    episode"""
    explore: float = field(1.0, ge=0)
    """ucb: c of Q + c √(log N / n)"""
    length_power: Share = 1.0
    """best: 0 is the log-prob, 1 its mean over tokens"""
    critique: str | None = None
    """a question, such as " Is this a good step? ", that is asked after each turn: the policy's probability
    of `good` is the turn's value by self-critique. Without it turns have values by the search alone"""
    good: str = "yes"
    """the answer that means that a turn is good"""
    alpha: Share = 0.5
    """share of the search in a turn's value; the rest is the self-critique"""
    train: Literal["pairs", "path"] = "pairs"
    """what is trained on. pairs: turns of one state whose values differ by more than `theta`, judged; path:
    the turns of right episodes"""
    theta: float = field(0.2, ge=0)
    """pairs: the values of a pair differ by more"""
    most: Count | None = 8
    """pairs: those of a state with the widest gaps"""
    right: float = 1.0
    """path: the least reward of a right episode"""
