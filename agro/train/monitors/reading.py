"""Responses to a few prompts, before and after, beside the log's best: what a run leaves to be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from agro.rollout import Activity, Rollout
from agro.runs.side_by_side import Answer, SideBySide, answers_of
from agro.store import Store
from agro.train.monitors.base import Monitor, View
from agro.train.phases import Phase, derive
from agro.types import Prompt, Sample


class SideBySideResponses(Monitor):
    """Keeps responses of the start and of the latest evaluation in the run folder.

    They are those that were sampled and scored for `data.eval_prompts`. Without these it samples, at the
    start and at the ends of phases, and nothing is scored.
    """

    def __init__(
        self,
        phase: Phase,
        folder: Path,
        rollout: Rollout,
        prompts: Sequence[Prompt],
        initial: SideBySide,
        activity: Activity,
    ) -> None:
        """`initial`: what there is before the start has answered the prompts."""
        self.phase, self.folder, self.rollout = phase, folder, rollout
        self.prompts, self.initial, self.activity = prompts, initial, activity

    def after(self, view: View) -> None:
        is_end = view.step == 0 or view.last
        if not (view.held_out or is_end):
            return
        shown = SideBySide.load(self.folder) if view.step else None
        answers = answers_of(view.held_out or self._sample())
        (shown or self.initial).answered(answers, view.step).save(self.folder)

    def _sample(self) -> Sequence[Sample]:
        self.activity.stage("evaluating")
        config = self.phase.config
        sampler = config.sampler.of_policy(config.evaluate.temperature, 1)
        seed = derive(config.train.seed, "side by side")
        return list(self.rollout.sample(self.prompts, 1, sampler, seed=seed))


def best_of_log(store: Store, run: str, prompt_ids: Iterable[str]) -> dict[str, Answer]:
    """By prompt id the response of the highest known reward, the first of equals; without rewards the one
    that was preferred most often. Without what `run` itself sampled."""
    best: dict[str, Answer] = {}
    for prompt_id in prompt_ids:
        made = {s.id for s in store.samples(prompt_id=prompt_id, run=run, skip_damaged=True)}
        samples = [s for s in store.samples(prompt_id=prompt_id, skip_damaged=True) if s.id not in made]
        scored = [s for s in samples if s.reward is not None]
        chosen = max(scored, key=lambda s: s.reward or 0.0) if scored else _preferred(store, samples)
        if chosen is not None:
            parts = [s.response for s in samples if s is chosen or _is_same_episode(s, chosen)]
            best[prompt_id] = Answer.of("".join(parts), chosen.reward)
    return best


def _is_same_episode(a: Sample, b: Sample) -> bool:
    return a.episode is not None and a.episode == b.episode


def _preferred(store: Store, samples: Sequence[Sample]) -> Sample | None:
    """The response that won the most judgments; None where there are none."""
    by_id = {sample.id: sample for sample in samples if sample.id is not None}
    wins = Counter(pair.winner for pair in store.pairs(by_id) if not pair.is_tie and pair.winner in by_id)
    return by_id[wins.most_common(1)[0][0]] if wins else None
