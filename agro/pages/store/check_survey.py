"""One pass over all responses of a store, group by group: counts, rewards, lengths, repeats."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agro.pages.store.spread import LENGTHS, Spread, equal_bins
from agro.pages.store.texts import HeldOutOverlap, PromptCopies, near_repeats
from agro.rewards import maker_of
from agro.rollout.prompts import load_prompts
from agro.store import Store
from agro.store.survey import SurveyRow
from agro.types import Text, end_in

INSPECTED = 2000  # groups, about, whose responses are compared pairwise
LARGEST = 64  # responses of such a group, at most


@dataclass
class SourceSurvey:
    """What is known of the responses of one source."""

    rewards: Spread
    lengths: Spread = field(default_factory=lambda: Spread(LENGTHS))  # characters
    tokens: Spread = field(default_factory=lambda: Spread(LENGTHS))  # actions, of rows with tokens
    roles: set[str] = field(default_factory=set)
    rows: int = 0
    with_tokens: int = 0
    with_behavior: int = 0
    with_version: int = 0  # sampled by a run of agro
    ended: int = 0  # whose record says how they ended
    truncated: int = 0

    def to_json(self) -> dict[str, Any]:
        names = ("rows", "with_tokens", "with_behavior", "with_version", "ended", "truncated")
        return {
            **{name: getattr(self, name) for name in names},
            "roles": sorted(self.roles),
            "rewards": self.rewards.to_json(),
            "characters": self.lengths.to_json(),
            "tokens": self.tokens.to_json(),
        }


@dataclass
class StoreSurvey:
    """What a store has.

    A group is all responses to one prompt; the rows of one episode are one response, scored when all of them
    are. `quality` (TQ) and `coverage` (SACo) are those of Schweighofer et al. (arXiv 2111.04714) for each
    prompt: (mean r − min r) / (max r − min r) where rewards differ, and distinct responses / responses where
    there are two or more.
    """

    edges: Sequence[float]  # of the bins of rewards
    stride: int = 1  # every so many groups are looked at for near-repeats
    held_out: HeldOutOverlap | None = None
    copies: PromptCopies | None = None
    groups: int = 0
    responses: int = 0
    sizes: Counter[int] = field(default_factory=Counter)  # groups by responses
    scored_groups: int = 0  # with two or more scored responses
    equal: int = 0  # of those, with equal rewards
    equal_at: Counter[str] = field(default_factory=Counter)  # of those: all lowest, all highest, between
    mixed: int = 0  # groups with several sources
    repeats: int = 0  # responses equal to an earlier one of their group
    inspected: int = 0  # responses that were compared for near-repeats and final answers
    near_repeats: int = 0
    quality: Spread = field(default_factory=lambda: Spread(equal_bins(0, 1, 10)))
    coverage: Spread = field(default_factory=lambda: Spread(equal_bins(0, 1, 10)))
    answers: Spread = field(default_factory=lambda: Spread(equal_bins(0, 1, 10)))
    truncated_rewards: Spread = field(default_factory=Spread)  # rewards
    complete_rewards: Spread = field(default_factory=Spread)
    sources: dict[str, SourceSurvey] = field(default_factory=dict)

    def add(self, rows: Sequence[SurveyRow]) -> None:
        """The rows of one group."""
        for row in rows:
            self._row(row)
        ends = {row.id if row.episode is None else row.episode: row for row in rows}
        rewards = _rewards(rows)
        self.groups += 1
        self.responses += len(ends)
        self.sizes[len(ends)] += 1
        self.mixed += len({row.source for row in rows}) > 1
        self._rewards(rewards)
        if len(ends) > 1:
            self._repeats([row.response for row in ends.values()])

    def _row(self, row: SurveyRow) -> None:
        source = self.sources.get(row.source)
        if source is None:
            source = self.sources[row.source] = SourceSurvey(Spread(self.edges))
        source.rows += 1
        source.roles.add(row.role)
        source.with_tokens += row.knows_tokens
        source.with_behavior += row.knows_behavior
        source.with_version += row.version >= 0
        source.lengths.add(len(row.response))
        if row.length is not None:
            source.tokens.add(row.length)
        if row.reward is not None:
            source.rewards.add(row.reward)
        end = end_in(row.finish)
        if end in ("finished", "cut"):
            self._ending(row, source, truncated=end == "cut")
        if self.held_out is not None:
            self.held_out.responses += self.held_out.overlaps(row.response)

    def _ending(self, row: SurveyRow, source: SourceSurvey, *, truncated: bool) -> None:
        source.ended += 1
        source.truncated += truncated
        if row.reward is not None:
            (self.truncated_rewards if truncated else self.complete_rewards).add(row.reward)

    def _rewards(self, rewards: Sequence[float]) -> None:
        """Of the scored responses of one group."""
        if len(rewards) < 2:
            return
        self.scored_groups += 1
        lowest, highest = min(rewards), max(rewards)
        if lowest < highest:
            mean = sum(rewards) / len(rewards)
            self.quality.add((mean - lowest) / (highest - lowest))
            return
        self.equal += 1
        level = "between"
        if highest == self.edges[0]:
            level = "lowest"
        elif lowest == self.edges[-1]:
            level = "highest"
        self.equal_at[level] += 1

    def _repeats(self, responses: Sequence[str]) -> None:
        distinct = len(set(responses))
        self.repeats += len(responses) - distinct
        self.coverage.add(distinct / len(responses))
        if self.groups % self.stride == 0:
            part = responses[:LARGEST]
            self.inspected += len(part)
            self.near_repeats += near_repeats(part)
            self.answers.add(len(set(map(final_answer, part))) / len(part))

    def total(self, name: str) -> int:
        """Over all sources."""
        return sum(getattr(source, name) for source in self.sources.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "responses": self.responses,
            "sizes": {str(size): count for size, count in sorted(self.sizes.items())},
            "groups_equal": self.equal,
            "groups_equal_at": dict(self.equal_at),
            "groups_of_one": self.sizes[1],
            "groups_mixed": self.mixed,
            "groups_with_rewards": self.scored_groups,
            "near_copies": None if self.copies is None else self.copies.to_json(),
            "repeats": self.repeats,
            "near_repeats": {"compared": self.inspected, "found": self.near_repeats},
            "trajectory_quality": self.quality.to_json(),
            "coverage": self.coverage.to_json(),
            "answer_coverage": self.answers.to_json(),
            "reward_of_truncated": self.truncated_rewards.to_json(),
            "reward_of_ended": self.complete_rewards.to_json(),
            "by_source": {name: source.to_json() for name, source in self.sources.items()},
            "held_out": None if self.held_out is None else self.held_out.to_json(),
        }


def survey(store: Store, groups: int, held_out: Path | None = None, near_copies: float = 1.0) -> StoreSurvey:
    """Survey a store of so many `groups`. `held_out`: a file of prompts that it shouldn't have.

    `near_copies`: as of the configuration's data.
    """
    lowest, highest = store.survey.spread_of_rewards() or (0.0, 1.0)
    edges = equal_bins(lowest, highest)
    edges[-1] = max(highest, edges[-1] if highest <= lowest else highest)
    result = StoreSurvey(edges, stride=max(1, groups // INSPECTED))
    texts = {prompt_id: plain(text) for prompt_id, text in store.survey.each_prompt()}
    result.copies = PromptCopies.of(texts, near_copies)
    if held_out is not None:
        result.held_out = HeldOutOverlap(str(held_out))
        for prompt in load_prompts(held_out):
            result.held_out.learn(plain(prompt.text))
        for text in texts.values():
            result.held_out.stored_prompts += result.held_out.overlaps(text)
    for rows in store.survey.each_group_rows():
        result.add(rows)
    return result


def plain(prompt: Text) -> str:
    """The words of a prompt: of messages all that is text."""
    if isinstance(prompt, str):
        return prompt
    return " ".join(m["content"] for m in prompt if isinstance(m.get("content"), str))


def final_answer(response: str) -> str:
    """What a response concludes, in a canonical form; all of it where it names no answer."""
    maker = maker_of("math")
    return (response.strip() if maker is None else maker.final(response)) or ""


def _rewards(rows: Sequence[SurveyRow]) -> list[float]:
    """Of the scored responses."""
    if all(row.episode is None for row in rows):
        return [row.reward for row in rows if row.reward is not None]
    episode_rewards: dict[int | str, list[float | None]] = defaultdict(list)
    for row in rows:
        episode_rewards[row.id if row.episode is None else row.episode].append(row.reward)
    scored = []
    for rewards in episode_rewards.values():
        if rewards[0] is not None and None not in rewards:
            scored.append(rewards[0])
    return scored
