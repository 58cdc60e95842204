"""What a run leaves of its steps: metrics in the run folder, in trackers and on the terminal, and responses
to a few prompts, before and after, beside the best of the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from agro.rollout import Activity, Rollout
from agro.runs.folder import Run
from agro.runs.progress import Progress, responses_text
from agro.runs.rundata import HeldOutRewards, write_rewards
from agro.runs.side_by_side import Answer, SideBySide, answers_of
from agro.runs.track import Trackers
from agro.store import Store
from agro.train.monitors import Monitor, View
from agro.train.phases import Phase, derive
from agro.types import Prompt, Sample


class Record(Monitor):
    """metrics.jsonl and copies of it for other programs, and responses and rewards of held-out prompts."""

    def __init__(self, folder: Run, trackers: Trackers) -> None:
        self.folder, self.trackers = folder, trackers
        self.written: HeldOutRewards | None = None

    def after(self, view: View) -> None:
        if view.is_empty:
            return
        self.folder.log(view.metrics)
        if view.held_out:
            self.folder.log_held_out(view.step, view.held_out)
        if view.held_out_rewards is not None and view.held_out_rewards is not self.written:
            # Also after a resume: the file may be of a later step, which is made again.
            write_rewards(self.folder.folder, view.held_out_rewards)
            self.written = view.held_out_rewards
        self.trackers.log(view.metrics)


class Terminal(Monitor):
    """A line per step, and responses every `train.show_every` steps."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.samples: Sequence[Sample] = ()  # that the step trained on

    def receive(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def after(self, view: View) -> None:
        if view.is_empty:
            return
        self.progress.step(view.metrics)
        every = view.phase.config.train.show_every
        if every and view.step and view.at % every == 0 and self.samples:
            self.progress.say(responses_text(view.step, self.samples))
        if view.stop and view.step:
            self.progress.say(f"stopped after step {view.step}: {view.stop}")


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
        responses = view.held_out
        if not responses:
            self.activity.stage("evaluating")
            config = self.phase.config
            sampler = config.sampler.of_policy(config.evaluate.temperature, 1)
            seed = derive(config.train.seed, "side by side")
            responses = list(self.rollout.sample(self.prompts, 1, sampler, seed=seed))
        (shown or self.initial).answered(answers_of(responses), view.step).save(self.folder)


def best_of_log(store: Store, run: str, prompt_ids: Iterable[str]) -> dict[str, Answer]:
    """By prompt id the response of the highest known reward, the first of equals; without rewards the one
    that was preferred most often. Without what `run` itself sampled."""
    best: dict[str, Answer] = {}
    for prompt_id in prompt_ids:
        made = {s.id for s in store.samples(prompt_id=prompt_id, run=run, skip_damaged=True)}
        samples = [s for s in store.samples(prompt_id=prompt_id, skip_damaged=True) if s.id not in made]
        scored = [s for s in samples if s.reward is not None]
        chosen = max(scored, key=lambda s: s.reward or 0.0, default=None)
        if chosen is None:
            by_id = {sample.id: sample for sample in samples if sample.id is not None}
            wins = Counter(p.winner for p in store.pairs(by_id) if not p.is_tie and p.winner in by_id)
            chosen = by_id[wins.most_common(1)[0][0]] if wins else None
        if chosen is not None:
            parts = [chosen]
            if chosen.episode is not None:
                parts = [s for s in samples if s.episode == chosen.episode]
            best[prompt_id] = Answer.of(parts)
    return best
