"""The reward of an episode: the environment's, or that of its last turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agro.rewards import Reward, Score
from agro.types import Sample


class EpisodeReward:
    """Keeps rewards and errors of the environment, and scores the other episodes by `inner`.

    `inner` receives the last turn as the response, and as columns "transcript" (everything after the prompt),
    "turns", "tool_calls" and "turn_info". The rows of one episode share its score.
    """

    def __init__(self, inner: Reward) -> None:
        self.inner = inner
        self.name = inner.name
        self.of_environment = False  # whether the environment gave one of the rewards

    @property
    def maximum(self) -> float | None:
        return self.inner.maximum

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        episodes: dict[Any, list[int]] = {}
        for i, sample in enumerate(samples):
            episodes.setdefault(i if sample.episode is None else sample.episode, []).append(i)
        scores: dict[int, Score] = {}
        unscored: dict[int, Sample] = {}
        for rows in episodes.values():
            first = samples[rows[0]]
            if first.reward is not None or first.meta.get("reward_error") is not None:
                self.of_environment = True
                scores[rows[0]] = Score(first.reward, first.meta.get("reward_error"))
            else:
                transcript = "".join(samples[i].response for i in rows)
                response = first.meta.get("last_turn", transcript)
                meta = {**first.meta, "transcript": transcript}
                unscored[rows[0]] = first.replace(response=response, meta=meta)
        scores.update(zip(unscored, self.inner.score(list(unscored.values())), strict=True))
        for rows in episodes.values():
            for i in rows:
                scores[i] = scores[rows[0]]
        return [scores[i] for i in range(len(samples))]

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        return None  # an environment may add columns

    def close(self) -> None:
        self.inner.close()
