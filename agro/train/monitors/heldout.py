"""Measurements on data that a phase doesn't train on: fresh responses to held-out prompts, unscored responses
with their KL to the reference, and stored groups of any origin, with AGRO's loss and whether π ranks right
responses above wrong ones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agro.config import DataConfig, RunConfig
from agro.errors import Refused
from agro.io.numbers import none_if_nan
from agro.models.encoding import Encoder
from agro.objectives.needs import GROUPS, REWARD
from agro.objectives.reduce import Groups
from agro.rewards import Reward
from agro.rollout import Activity, Rollout
from agro.rollout.evaluate import Heldout, heldout
from agro.runs.rundata import COMPARED, GAIN, LOGGED, HeldOutRewards
from agro.runs.side_by_side import place
from agro.stats.intervals import standard_error
from agro.stats.off_policy import compare_on_log
from agro.stats.paired import compare
from agro.store import DrawnGroups, Store
from agro.store.location import location_of
from agro.store.samples import Filter, chosen
from agro.store.split import cluster_names
from agro.store.survey import Scale
from agro.train import measure
from agro.train.check import may_measure_kl
from agro.train.collate import collate
from agro.train.feed import one_each, select_valid
from agro.train.learner import Learner
from agro.train.measure import summary
from agro.train.monitors import Monitor, View
from agro.train.phases import SHIFT, Phase, derive
from agro.train.source import can_be_asked
from agro.train.trainable import differ_in_scale, rescaled
from agro.types import Batch, Prompt, Sample, prompt_hash

TOGETHER = 64  # groups per batch


class NothingToRank(Refused):
    """No held-out prompt has two scored responses."""


@dataclass(eq=False)
class HeldOutPrompts(Monitor):
    """Measures the held-out reward and its parts, and its gain over the start on the same prompts; on samples
    of the policy itself also KL to the reference, ½ Var(R) and regret.

    It measures at step 0, every `evaluate.every` steps and after the phase's last step, with the same random
    numbers each time. Its state has the rewards at step 0 and at the latest evaluation, by prompt, which the
    run folder has too. A part of the reward with weight 0 is measured but not optimized: if it diverges from
    the optimized ones, the run's problems report it (`agro.runs.problems`).
    """

    name = "held-out prompts"

    phase: Phase
    learner: Learner
    rollout: Rollout
    reward: Reward
    prompts: Sequence[Prompt]
    activity: Activity
    measured: HeldOutRewards | None = None

    def __post_init__(self) -> None:
        self.texts = {prompt.id: prompt_hash(prompt.text) for prompt in self.prompts}
        near_copies = self.phase.config.data.near_copies
        self.clusters = cluster_names({prompt.id: prompt.text for prompt in self.prompts}, near_copies)

    def after(self, view: View) -> None:
        view.held_out_rewards = self.measured
        if not view.is_due:
            return
        self.activity.stage("evaluating")
        config = self.phase.config
        sampler = config.sampler.of_policy(config.evaluate.temperature, config.evaluate.n)
        seed = derive(config.train.seed, "evaluate")
        result = heldout(self.rollout, self.reward, self.prompts, sampler, seed)
        keys = [prompt.id for prompt in self.prompts]
        rewards = dict(zip(keys, map(none_if_nan, result.means.tolist()), strict=True))
        previous = self.measured if view.step else None
        unscored: dict[str, tuple[float, float]] = {}
        for key, unknown in zip(keys, np.isnan(result.rewards).mean(1).tolist(), strict=True):
            at_start = unknown if previous is None else previous.unscored.get(key, (0.0, 0.0))[0]
            if at_start or unknown:
                unscored[key] = at_start, unknown
        start = rewards if previous is None else previous.start
        self.measured = HeldOutRewards(view.step, rewards, start, self.texts, self.clusters, unscored)
        view.held_out, view.held_out_rewards = result.samples, self.measured
        view.metrics |= self._describe(result, view.options)
        if len(config.reward.functions) > 1:
            view.metrics |= _parts(result.samples)
        if view.step:
            view.metrics |= self._compare(self.measured)
            _stand_in(view)
            return
        entry = self.phase.entry
        if warning := entry.warnings.rewards_warning(result.rewards, entry.defaults() | view.options):
            self.activity.say(warning)

    def state(self) -> Any:
        return None if self.measured is None else dict(vars(self.measured))

    def restore(self, state: Any) -> None:
        self.measured = HeldOutRewards.of(state, "the checkpoint's rewards of held-out prompts")

    def _compare(self, measured: HeldOutRewards) -> dict[str, Any]:
        """Compare with the start; empty if fewer than two prompts have a reward at both steps."""
        keys = list(measured.rewards)
        start, end = (
            np.array([rewards.get(key) for key in keys], dtype=np.float64)
            for rewards in (measured.start, measured.rewards)
        )
        if np.count_nonzero(~np.isnan(start + end)) < 2:
            return {}
        shares = np.array([measured.unscored.get(key, (0.0, 0.0)) for key in keys])
        labels = _labels(self.clusters[key] for key in keys)
        comparison = compare(start, end, labels, (shares[:, 0], shares[:, 1]))
        numbers = {f"{GAIN}_{name}": getattr(comparison, name) for name in COMPARED}
        return {GAIN: comparison.difference, **numbers}

    def _describe(self, result: Heldout, options: dict[str, Any]) -> dict[str, Any]:
        config = self.phase.config
        metrics: dict[str, Any] = {
            "eval_reward": result.mean,
            "eval_reward_se": result.se,
            "eval_n": result.rewards.size - result.unscored,
            "eval_unscored": result.unscored,
        }
        if not may_measure_kl(config) or self.learner.reference_key is None:
            return metrics
        batch, logp = _referred(result.samples, self.learner)
        metrics["eval_kl_ref"] = measure.kl_of(batch, logp)
        kl_M = measure.log_ratios(batch, logp).reshape(-1, config.evaluate.n).mean(1)
        metrics["eval_kl_ref_se"] = standard_error(kl_M)
        beta = self.phase.diagnostic_beta(options)
        if beta:
            metrics |= measure.fresh_metrics(batch, logp, beta, options.get("average", "sum"))
        return metrics


def _parts(samples: Sequence[Sample]) -> dict[str, Any]:
    """The mean of each part of the reward over prompts, and its standard error."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in one_each(samples):
        for name, value in sample.meta.get("reward_parts", {}).items():
            if value is not None:
                values[name][sample.prompt_id].append(value)
    means, errors = dict[str, float](), dict[str, float | None]()
    for name, prompt_values in values.items():
        prompt_means = np.array([np.mean(parts) for parts in prompt_values.values()])
        means[name] = float(prompt_means.mean())
        errors[name] = standard_error(prompt_means) if len(prompt_means) > 1 else None
    return {"eval_reward_parts": means, "eval_reward_parts_se": errors}


def _labels(names: Iterable[str]) -> list[int]:
    """Number the names in the order of their first occurrence."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _referred(samples: Sequence[Sample], learner: Learner) -> tuple[Batch, Tensor]:
    """A batch with its log-probs under π_ref, and its log-probs [B,T] under π."""
    batch = collate(samples, 0)
    logp, ref_logp = learner.logp(batch), learner.logp(batch, "reference")
    return batch.to(logp.device).replace(ref_logp=ref_logp), logp


def _stand_in(view: View) -> None:
    """Use the held-out KL if the step's own samples don't measure one."""
    if view.metrics["kl_ref"] is None and view.step:
        view.metrics["kl_ref"] = view.metrics["eval_kl_ref"]


class MeasuredShift(Monitor):
    """Measures how far the log's mean reward is above the policy's on held-out prompts when a phase begins.

    The shift is 0 if that doesn't exceed two standard errors, and unknown without rewards on one scale.
    """

    name = SHIFT

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self.store, self.say = store, say
        self.shift: float | None = None

    def after(self, view: View) -> None:
        if view.step in (0, view.phase.ends) and view.held_out_rewards is not None:
            self.shift = self._measure(view.held_out_rewards, view.phase.config.data)
        if view.step == 0:
            view.metrics["baseline_shift"] = self.shift

    def _measure(self, measured: HeldOutRewards, data: DataConfig) -> float | None:
        log_means = [group.reward_mean for group in self.store.groups(**chosen(data))]
        log, policy = (
            np.array([x for x in means if x is not None]) for means in (log_means, measured.rewards.values())
        )
        ranges = [Scale("", x.min(initial=0.0), x.max(initial=0.0)) for x in (log, policy)]
        if min(len(log), len(policy)) < 2 or data.reward_scale or differ_in_scale(*ranges):
            self.say("objective.baseline_shift: the log's rewards and the policy's can't be compared: none")
            return None
        gain = float(log.mean() - policy.mean())
        error = math.hypot(standard_error(log), standard_error(policy))
        shift = gain if gain > 2 * error else 0.0
        self.say(
            f"objective.baseline_shift = {shift:.3f}, falling to 0 over the phase: the log's mean reward is "
            f"{gain:.3f} ± {error:.3f} above the policy's on held-out prompts"
        )
        return shift

    def state(self) -> float | None:
        return self.shift

    def restore(self, state: Any) -> None:
        self.shift = float(state)


class HeldOutLog(Monitor):
    """Measures AUC, and ½ Var(R) if there is a β, within groups of `data.eval_store`, or of held-out prompts
    of `data.store`.

    If the log has untruncated behavior log-probs of all tokens, it also estimates the gain over the start
    off-policy. Its state has the start's log-weights: [N] Σ log π − log μ of each response.
    """

    name = "held-out log"

    def __init__(
        self,
        phase: Phase,
        learner: Learner,
        groups: Sequence[Sequence[Sample]],
        activity: Activity,
        clusters: Mapping[str, str],
        dropped: int = 0,
    ) -> None:
        """`groups`: encoded and scored samples, at least two per group. `dropped`: number of invalid ones.

        `clusters`: by prompt id, the name of its near-copies; other prompts are clusters of one.
        """
        self.phase, self.learner, self.activity, self.dropped = phase, learner, activity, dropped
        self.knows_behavior = all(s.knows_behavior and not s.truncation for s in chain.from_iterable(groups))
        self.prompt_ids = [samples[0].prompt_id for samples in groups]
        self.start: list[float] = []  # log-weights
        self.latest: list[float] = []
        self._batches: list[Batch] = []  # with their log-probs under π_ref
        for begin in range(0, len(groups), TOGETHER):
            batch = collate(list(chain.from_iterable(groups[begin : begin + TOGETHER])), 0)
            ref_logp = learner.logp(batch, "reference")
            self._batches.append(batch.to(ref_logp.device).replace(ref_logp=ref_logp))
        names: list[str] = []
        rewards: list[float] = []
        for batch in self._batches:
            batch_groups = Groups.of(batch)
            rewards += batch_groups.reward.tolist()
            keys = [batch.group_names[group] for group in batch_groups.group.tolist()]
            names += [clusters.get(key, key) for key in keys]
        self._rewards, self._labels = np.array(rewards), np.array(_labels(names), np.int64)
        best_kl = np.concatenate([measure.kl_of_best(batch) for batch in self._batches])
        self._kl_of_best = summary("eval_kl_of_best", best_kl, error=False)

    @classmethod
    def load(
        cls,
        phase: Phase,
        learner: Learner,
        activity: Activity,
        clusters: Mapping[str, str] | None = None,
    ) -> HeldOutLog:
        """Load the valid samples. Raises `NothingToRank` if no group remains.

        `clusters`: those by which the run holds prompts out; by default the store's.
        """
        config, data = phase.config, phase.config.data
        path = data.eval_store or data.store
        assert path is not None
        chosen: Filter = {} if data.eval_store else {"roles": data.roles, "sources": data.sources}
        with Store.open(location_of(path), read_only=True, create=False) as store:
            stored = store.samples(**chosen)
            if data.hold_out:
                store.split.use(clusters)
                is_held_out = store.split.held_out(data)
                stored = filter(lambda sample: is_held_out(sample.prompt_id), stored)
            order: dict[str, int] = {}  # of the groups' first samples; groups become contiguous
            samples = sorted(stored, key=lambda sample: order.setdefault(sample.prompt_id, len(order)))
        samples = rescaled(samples, data)
        valid = select_valid(DrawnGroups(samples), learner.encoder, config.train.max_length, {REWARD, GROUPS})
        groups_of: dict[str, list[Sample]] = {}
        for sample in valid.samples:
            groups_of.setdefault(sample.prompt_id, []).append(sample)
        groups = [group for group in groups_of.values() if len(one_each(group)) > 1]
        if not groups:
            key = "hold_out" if data.hold_out else "eval_store"
            raise NothingToRank(
                f"data.{key}: {path}: expected groups of two or more scored responses, got none among "
                f"{len(order)} groups; dropped: {dict(valid.dropped) or 'nothing'}. "
                f"What to do: remove data.{key}, or measure the model's own responses "
                "(data.eval_prompts and a reward)"
            )
        return cls(phase, learner, groups, activity, clusters or {}, len(samples) - sum(map(len, groups)))

    def measure(self, beta: float | None, average: str = "sum") -> dict[str, Any]:
        """Means over groups with their standard errors; groups are the independent units.

        `beta`: in reward per nat; without it ½ Var(R) isn't measured. `average`: as the option of agro.
        """
        columns: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
        self.latest = []
        for batch in self._batches:
            assert batch.ref_logp is not None
            logp = self.learner.logp(batch)
            if self.knows_behavior:
                assert batch.behavior_logp is not None
                self.latest += Groups.of(batch).sum_tokens(logp - batch.behavior_logp).tolist()
            best, worst = measure.best_and_worst(batch, logp)
            columns["eval_auc"].append(measure.ranking(batch, logp, average))
            columns["eval_log_ratio_best"].append(best)
            columns["eval_log_ratio_worst"].append(worst)
            columns["eval_ratio_mean"].append(measure.log_mean_ratios(batch, logp))
            if beta:
                half = measure.distances(batch, logp, beta, average)[0]
                start = measure.distances(batch, batch.ref_logp, beta, average)[0]  # R = r
                columns["eval_consistency"].append(half)
                columns["eval_consistency_fall"].append(start - half)
        values = {name: np.concatenate(parts) for name, parts in columns.items()}
        metrics: dict[str, Any] = {"eval_groups": len(self.prompt_ids), "eval_dropped": self.dropped}
        metrics |= {"eval_auc_groups": len(values["eval_auc"]), **self._kl_of_best}
        metrics |= measure.exponential("eval_ratio_mean", values.pop("eval_ratio_mean"))
        for name, group_values in values.items():
            metrics |= summary(name, group_values)
        return metrics

    def after(self, view: View) -> None:
        if not view.is_due:
            return
        self.activity.stage("evaluating")
        beta = self.phase.diagnostic_beta(view.options)
        view.metrics |= self.measure(beta, view.options.get("average", "sum"))
        if view.step == 0:
            self.start = self.latest
        elif self.start and len(self.start) == len(self.latest):
            gain = compare_on_log(np.array(self.start), np.array(self.latest), self._rewards, self._labels)
            view.metrics |= {f"{LOGGED}_ess": gain.ess, f"{LOGGED}_weight": gain.mean_weight}
            if not gain.obstacle:  # else the numbers are meaningless; ess and weight show why
                numbers = {
                    f"{LOGGED}_{name}": getattr(gain, name) for name in ("low", "high", "p", "clusters")
                }
                view.metrics |= {LOGGED: gain.difference, f"{LOGGED}_n": len(self.prompt_ids), **numbers}

    def state(self) -> Any:
        return self.start

    def restore(self, state: Any) -> None:
        self.start = list(map(float, state))


@dataclass(eq=False)
class Unscored(Monitor):
    """Samples responses to show if no reward scores held-out ones, and measures the KL to the reference.

    Prompts and random numbers are the same at every evaluation, so differences don't come from sampling.
    """

    learner: Learner
    rollout: Rollout
    prompts: Sequence[Prompt]  # one per response
    activity: Activity
    measures_kl: bool

    def after(self, view: View) -> None:
        if not view.is_due:
            return
        self.activity.stage("evaluating")
        config = view.phase.config
        sampler = config.sampler.of_policy(config.evaluate.temperature, 1)
        seed = derive(config.train.seed, "evaluate")
        view.held_out = list(self.rollout.sample(self.prompts, 1, sampler, seed=seed))
        is_reference = view.step == 0 and config.policy.reference != "model"
        if self.measures_kl and not is_reference:
            ordered = sorted(view.held_out, key=lambda s: int(s.meta["index"]))
            batch, logp = _referred(ordered, self.learner)
            view.metrics |= summary("eval_kl_ref", measure.log_ratios(batch, logp))
            _stand_in(view)


def first_prompts(
    config: RunConfig, store: Store, run: str, sampled: Sequence[Prompt], encoder: Encoder, count: int
) -> list[Prompt]:
    """The first `count` prompts by their `place`, without those that leave no room for a response.

    With `data.hold_out` these are held-out prompts, else those that may be drawn. The choice ignores what the
    run itself adds to the store, so a resumed run makes the same choice. If the store has nothing else, they
    come from `sampled`, the prompts that the run samples to.
    """
    hold_out, is_held_out = config.data.hold_out, store.split.held_out(config.data)
    wanted = chosen(config.data)
    if hold_out:
        wanted["min_reward"] = None  # prompts are held out whatever their rewards
    made_by_run = {row.id for row in store.survey.summaries(run=run)}
    first_ids: dict[str, int] = {}
    for row in store.survey.summaries(**wanted):
        is_candidate = row.id not in made_by_run and row.episode is None
        if is_candidate and (not hold_out or is_held_out(row.prompt_id)):
            first_ids.setdefault(row.prompt_id, row.id)
    prompts_by_id = {prompt.id: prompt for prompt in sampled}
    prompts: list[Prompt] = []
    for prompt_id in sorted(first_ids or prompts_by_id, key=place):
        if len(prompts) == count:
            break
        prompt = prompts_by_id.get(prompt_id)
        if first_ids:
            stored = store.samples(ids=[first_ids[prompt_id]], skip_damaged=True)
            sampleable = [Prompt(s.prompt, s.prompt_id) for s in stored if s.context_tokens is None]
            prompt = sampleable[0] if sampleable else None
        if prompt is not None and can_be_asked(prompt, encoder):
            prompts.append(prompt)
    return prompts
