"""KL to the reference from a few responses to prompts of the store. It needs no reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from agro.config import RunConfig
from agro.models.encoding import Encoder
from agro.rollout import Activity, Rollout
from agro.store import Store
from agro.store.draw_rules import noise
from agro.store.queries import chosen
from agro.train.collate import collate
from agro.train.diagnostics import log_ratios, summary
from agro.train.learner import Learner
from agro.train.monitors.base import Monitor, View
from agro.train.phases import Phase, derive
from agro.train.source import can_be_asked
from agro.types import Prompt


class SampledKL(Monitor):
    """`evaluate.kl_samples` responses of the policy, one a prompt, without truncation.

    Prompts and random numbers are the same at every evaluation, so that differences are not of the draw.
    """

    def __init__(
        self, phase: Phase, learner: Learner, rollout: Rollout, prompts: Sequence[Prompt], activity: Activity
    ) -> None:
        """`prompts`: those that the model can be asked; repeated where there are fewer than responses."""
        self.phase, self.learner, self.rollout = phase, learner, rollout
        self.prompts, self.activity = prompts, activity

    def after(self, view: View) -> None:
        config = self.phase.config
        is_reference = view.step == 0 and config.policy.reference != "model"
        if not view.is_due or is_reference:
            return
        self.activity.stage("evaluating")
        sampler = config.sampler.of_policy(config.policy.temperature, 1)
        prompts = [self.prompts[i % len(self.prompts)] for i in range(config.evaluate.kl_samples)]
        responses = self.rollout.sample(prompts, 1, sampler, seed=derive(config.train.seed, "evaluate KL"))
        batch = collate(sorted(responses, key=lambda s: int(s.meta["index"])), 0)
        logp, ref_logp = self.learner.logp(batch), self.learner.logp(batch, "reference")
        rho_N = log_ratios(batch.to(logp.device).replace(ref_logp=ref_logp), logp)
        view.metrics |= summary("eval_kl_ref", rho_N)
        if view.metrics["kl_ref"] is None and view.step:
            view.metrics["kl_ref"] = view.metrics["eval_kl_ref"]


def prompts_for_kl(
    config: RunConfig, store: Store, run: str, sampled: Sequence[Prompt], encoder: Encoder
) -> list[Prompt]:
    """Up to `evaluate.kl_samples` prompts in the order of a hash, see `first_prompts`."""

    def order(prompt_id: str) -> tuple[int, str]:
        return noise(config.train.seed, 0, "KL", prompt_id), prompt_id

    return first_prompts(config, store, run, sampled, encoder, order, config.evaluate.kl_samples)


def first_prompts(
    config: RunConfig,
    store: Store,
    run: str,
    sampled: Sequence[Prompt],
    encoder: Encoder,
    place: Callable[[str], tuple[int, str]],
    count: int,
) -> list[Prompt]:
    """The first `count` prompts by the `place` of their ids, without those that leave no room.

    With `data.hold_out` the held-out ones, else those that may be drawn. The choice doesn't depend on what
    the run itself adds to the store, so that a resumed run makes the same. Where the store has nothing else,
    `sampled` are chosen from: the prompts that the run samples from.
    """
    hold_out, is_held_out = config.data.hold_out, store.split.held_out(config.data)
    wanted = chosen(config.data)
    if hold_out:
        wanted["min_reward"] = None  # they are held out whatever their rewards
    made_by_run = {row.id for row in store.survey.summaries(run=run)}
    first_ids: dict[str, int] = {}
    for row in store.survey.summaries(**wanted):
        is_candidate = row.id not in made_by_run and row.episode is None
        if is_candidate and (not hold_out or is_held_out(row.prompt_id)):
            first_ids.setdefault(row.prompt_id, row.id)
    prompts_by_id = {prompt.id: prompt for prompt in sampled}

    def load(prompt_id: str) -> list[Prompt]:
        if not first_ids:
            return [prompts_by_id[prompt_id]]
        stored = store.samples(ids=[first_ids[prompt_id]], skip_damaged=True)
        return [Prompt(s.prompt, s.prompt_id) for s in stored if s.context_tokens is None]

    order = sorted(first_ids or prompts_by_id, key=place)
    valid = (prompt for p in order for prompt in load(p) if can_be_asked(prompt, encoder))
    return list(islice(valid, count))
