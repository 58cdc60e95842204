"""The metrics of `metrics.jsonl`, each declared once, and those that may say which model is best.

Rows, report and guide are made from `METRICS`: `python -m agro.runs.metrics` prints the table of
docs/metrics.md. `FOLLOWED` has the choices of `evaluate.metric`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, cast

LOGGED = "eval_logged_gain"  # the same by an off-policy estimate on the log
GAIN = "eval_gain"  # the difference to the start; its interval and test have this prefix
Kind = Literal["number", "text", "object"]


@dataclass(frozen=True)
class Metric:
    """One metric: its unit, a sentence for readers, how it is computed, and the kind of its JSON value."""

    name: str
    unit: str
    caption: str
    computed: str
    kind: Kind = "number"


# Below the title of each group its metrics: name [unit, kind], caption, and after = how it is computed. A
# line that is indented continues the one before it. ± is the standard error of the metric above, over what
# follows.
_TABLE = """
# Position
step [steps] Steps of the run so far.
    = counted over all phases; 0 is before the first
phase [, text] Name of the phase.
    = `phases.name`
version [optimizer steps] Version of the weights.
    = optimizer steps since the start of the run
# Reward
reward_mean [reward] Mean reward of the responses in the step.
    = mean over scored responses
reward_std [reward] Spread of the rewards in the step.
    = standard deviation (n − 1)
reward_parts [reward, object] Mean of each part, where the reward has several.
    = mean over responses, before weighting
reward_shares [share, object] How much of the reward's differences within groups each part makes. One near 0
    is hardly trained on; one below 0 works against the others.
    = Cov(weighted part, sum) / Var(sum) within groups, before whitening
# Learned reward
learned_auc [share of pairs] How often the reward that is learned while training ranks the better of two
    responses higher. Chance is 0.5. With reward.learned it falls to that as responses become like
    demonstrations.
    = reward.learned: of a demonstration and a response to a prompt that it wasn't fitted to; reward.flow:
    of two fresh responses to one prompt, by their own reward
# Held-out prompts
eval_reward [reward] Mean reward on held-out prompts.
    = mean over prompts of the mean over `evaluate.n` responses
eval_reward_se [reward] ± prompts
eval_gain [reward] How much the held-out reward is above that of the start.
    = mean over prompts of the difference in their mean reward, paired
eval_gain_low [reward] Lower end of the 95 % interval of `eval_gain`.
    = Tango's of right and wrong, else a studentized bootstrap; of clusters Student's t
eval_gain_high [reward] Upper end of the 95 % interval of `eval_gain`.
    = Tango's of right and wrong, else a studentized bootstrap; of clusters Student's t
eval_gain_p [probability] Probability of such a difference or a larger one if nothing had been learned.
    = two-sided: McNemar's exact test of right and wrong, else random signs of clusters
eval_gain_n [prompts] Prompts in `eval_gain`.
    = those with a reward at both steps
eval_gain_clusters [clusters] Clusters of near-copies that these prompts are in; as many where no two are.
    = `data.near_copies`; test and interval draw clusters
eval_gain_detectable [reward] The difference that so many prompts show four times out of five.
    = 2.8 standard errors of `eval_gain`
eval_reward_parts [reward, object] Mean of each part of the reward on held-out prompts, also of those with
    weight 0.
    = mean over prompts, before weighting
eval_reward_parts_se [reward, object] ± prompts
eval_n [responses] Held-out responses with a reward.
    = count
eval_unscored [responses] Held-out responses without a reward.
    = count
eval_kl_ref [nats per response] KL divergence from the reference on held-out prompts, or on prompts of the
    store.
    = mean over responses of Σ log π − log π_ref
eval_kl_ref_se [nats per response] ± prompts; over responses on those of the store
eval_fresh_consistency [reward²] ½ Var(R) of the policy's own responses to held-out prompts. It is 0 at the
    optimum.
    = ½ variance of R = r − β log π/π_ref within a prompt, mean over prompts
eval_fresh_consistency_se [reward²] ± prompts
eval_regret [reward] Estimated regret on held-out prompts.
    = as `regret`, mean over prompts
eval_regret_se [reward] ± prompts
eval_fresh_groups [prompts] Prompts in `eval_fresh_consistency` and `eval_regret`.
    = those with two scored responses or more
# Held-out store
eval_consistency [reward²] AGRO's loss on held-out groups of a store. Lower is better.
    = ½ variance of R = r − β log π/π_ref within a group, mean over groups
eval_consistency_se [reward²] ± groups
eval_consistency_fall [reward²] Improvement of `eval_consistency` over the reference.
    = ½ Var(r) − ½ Var(R), mean over the same groups
eval_consistency_fall_se [reward²] ± groups
eval_logged_gain [reward] Off-policy estimate of how much the mean reward is above the start's, on logged
    responses.
    = Σ w r / Σ w of the policy − that of the start, w = π/μ; from 30 effective responses on
eval_logged_gain_low [reward] Lower end of the 95 % interval of `eval_logged_gain`.
    = t of the jackknife over clusters of prompts, corrected for skewness
eval_logged_gain_high [reward] Upper end of the 95 % interval of `eval_logged_gain`.
    = t of the jackknife over clusters of prompts, corrected for skewness
eval_logged_gain_p [probability] Probability of such a `eval_logged_gain` or a larger one if nothing had
    been learned.
    = two-sided, of the same t
eval_logged_gain_n [prompts] Prompts in `eval_logged_gain`.
    = held-out groups
eval_logged_gain_clusters [clusters] Clusters of near-copies that these are in.
    = `data.near_copies`
eval_logged_gain_ess [responses] Effective responses of the log, of the policy or the start, whichever has
    fewer.
    = (Σ w)² / Σ w²
eval_logged_gain_weight [ratio] Mean weight, 1 where the log has what a policy writes; of policy and start
    the farther one.
    = mean of w; between ½ and 2 there is an estimate
eval_groups [groups] Groups of the held-out store.
    = those with two valid responses or more
eval_auc [share of pairs] How often log π/π_ref ranks the better of two held-out responses higher. Chance is
    0.5.
    = AUC of log π/π_ref for the reward within a prompt, equal ratios as ½; mean over prompts
eval_auc_se [share of pairs] ± prompts
eval_auc_groups [prompts] Prompts in `eval_auc`.
    = those with unequal rewards
eval_log_ratio_best [nats per response] `log_ratio_best` on held-out groups.
    = mean over the prompts of `eval_auc`
eval_log_ratio_best_se [nats per response] ± prompts
eval_log_ratio_worst [nats per response] `log_ratio_worst` on held-out groups.
    = mean over the prompts of `eval_auc`
eval_log_ratio_worst_se [nats per response] ± prompts
eval_ratio_mean [ratio] `ratio_mean` on held-out groups.
    = mean of π/π_ref in a group, mean over groups; at most 1.8e308
eval_ratio_mean_se [ratio] ± groups
eval_kl_of_best [nats per response] `kl_of_best` on held-out groups.
    = mean over the prompts of `eval_auc`
eval_dropped [responses] Stored held-out responses that were dropped.
    = count
# Objective
loss [the objective's] Loss of the objective; see below.
    = value before the first update
objective [, object] The objective's own metrics; see below.
    = by the objective
beta [reward per nat] β of the step.
    = `objective.beta`, its schedule or its tuned value
kl_ref [nats per response] KL divergence of fresh responses from the reference.
    = mean over fresh responses of Σ log π − log π_ref; without any, `eval_kl_ref`
log_ratio_best [nats per response] Mean log π/π_ref of the stored responses with the highest reward of their
    group.
    = mean over the stored groups of the step with unequal rewards; where no prompt has two stored
    responses, all of them are one group
log_ratio_worst [nats per response] Mean log π/π_ref of the stored responses with the lowest reward of their
    group.
    = mean over the same groups
ratio_mean [ratio] Mean π/π_ref of stored responses. It is 1 in expectation on samples of the reference.
    = mean over the stored responses of the step; at most 1.8e308
kl_of_best [nats per response] KL divergence of a policy that writes only the best of the stored responses.
    = −log(share of responses with the highest reward of the group), mean over the groups of
    `log_ratio_best`
kl_of_best_groups [groups] Groups in `kl_of_best`: prompts with several stored responses of unequal rewards.
    = count; 1 where no prompt of the step has two, whose responses are one group
regret [reward] Estimate of how far the regularized reward is below the best. Biased low, and unknown where
    no rewards differ.
    = β log mean exp(R/β) − mean R in fresh groups; at most max R − mean R
kl_to_reward_spread [ratio] Spread of β log π/π_ref within groups, relative to the spread of the rewards.
    = β · std(log π/π_ref) / std(r), both within groups
# Gradient
grad_norm [] Gradient norm before clipping.
    = L2 norm over all trained parameters
grad_norm_clipped [] Gradient norm after clipping.
    = min(`grad_norm`, `train.clip`)
lr [] Learning rate.
    = `train.lr` and its schedule, lowered to stay within `train.step_kl`, at the first update of the step
step_kl [nats per token] How far the step changed the policy, with `train.step_kl`.
    = ½ mean (log π after − log π before)² over the step's tokens, at the first update of the step
# Throughput
tokens [tokens] Tokens trained on.
    = count over the batch
sampled_tokens [tokens] Tokens sampled in the step.
    = count over fresh responses
seconds [s] Duration of the step.
    = `seconds_sample` + `seconds_train`
seconds_sample [s] Time for drawing, sampling and scoring.
    = wall time
seconds_train [s] Time for gradients and updates.
    = wall time
tokens_per_second [tokens/s] Speed.
    = (`tokens` + `sampled_tokens`) / `seconds`
draft_accepted [share] Share of the tokens proposed by `sampler.draft` that were accepted.
    = proposed tokens that are in a response / proposed ones
# Batch
staleness_mean [optimizer steps] Mean staleness: updates since the weights that wrote a response.
    = mean over samples of a known version
staleness_max [optimizer steps] Largest staleness in the batch.
    = maximum over the same samples
sampler_version [optimizer steps] Version of the weights that sampled, with source.sync_every or
    source.sync_from.
    = of the copy in RUN/weights/synced
aggregate_kl [nats per response] With source.props: KL of the newest responses, taken together, from the
    policy.
    = mean of log p̂ − log π, p̂ a response's share of those to its prompt
proposal_kl [nats per token] With source.props: how far the sampler was trained away from the policy.
    = mean of w − 1 − log w on the newest responses, w = φ/π
length_mean [tokens] Mean length of a response.
    = tokens of the policy / responses
truncated_share [share] Share of responses that reached the limit of tokens before their end.
    = over responses whose end is known
groups [groups] Groups in the batch.
    = count of prompts
groups_merged [groups] Groups of fresh and stored responses: of prompts that were sampled and drawn in one
    step.
    = count; each is one group in `groups`
asked_again [groups] Fresh groups that failed and got responses a second time, by `[again]`.
    = count, whether or not any of these responses is trained on; unknown without `[again]`
searched [states] States in which turns were tried, by `[search]`.
    = count, a state that was expanded twice as two; unknown without `[search]`
hinted [responses] Responses in the batch that were written with a hint.
    = `meta.hint`
experts [responses] Responses in the batch of role `expert`.
    = count
same_meaning [responses] Responses that mean the same as another one to their prompt.
    = count, by `reward.meaning`; unknown without it
groups_equal [groups] Groups whose rewards are all equal.
    = count; they teach little
replay_share [share] Share of groups drawn from the store.
    = prompts with stored responses / (these + prompts with fresh ones)
# Problems
no_signal [, text] Why nothing can be learned from the step.
    = no valid response, all rewards are 0, equal rewards within groups, or a gradient of 0
replay_missing [groups] Groups that `data.replay` asked of the store, and that it didn't have.
    = groups asked for − groups picked; they are sampled instead
rewards_failed [responses] Responses whose reward failed.
    = count over fresh responses
requests_failed [requests] Requests to the engine that failed and were asked again.
    = count over the requests of the step
push_error [nats per token] How far the log-probs of servers were from the trainer's after new weights.
    = mean |log π_server − log π| over fixed tokens; the largest of the servers that are used
servers [servers] Servers that are used.
    = those with new weights that passed their probe
servers_dropped [, object] Servers that aren't used, and why.
    = problem by URL
dropped [responses] Responses drawn but dropped before training.
    = count
dropped_reasons [responses, object] Dropped responses by reason.
    = counts
skipped [updates] Updates skipped.
    = count; invalid gradient, guard, or no valid response
rolled_back [] Rollbacks to a checkpoint.
    = 1 where the guard rolled back
logp_diff_mean [nats per token] Mean difference between the log-probs of sampler and trainer, on tokens
    sampled for the step.
    = mean |log π − log μ|, where the sampler draws from the policy, or log π is over its kept sets
logp_diff_max [nats per token] Largest such difference.
    = max |log π − log μ|
logp_diff_fresh [nats per token] The mean difference on responses of the current weights; `guard.logp_diff`
    is its limit.
    = mean |log π − log μ| over such tokens of staleness 0
"""
_ROW = re.compile(r"(\w+) \[([^,\]]*)(?:, (\w+))?\] (?:± (.+)|(.+?) = (.+))")


def _groups() -> dict[str, tuple[Metric, ...]]:
    groups: dict[str, tuple[Metric, ...]] = {}
    for line in re.sub(r"\n +", " ", _TABLE.strip()).splitlines():
        if line.startswith("# "):
            group = line.removeprefix("# ")
            groups[group] = ()
            continue
        row = _ROW.fullmatch(line)
        assert row is not None, line
        name, unit, kind, over, caption, computed = row.groups()
        if over:
            caption = f"Standard error of `{name.removesuffix('_se')}`."
            computed = f"standard deviation / √n over {over}"
        groups[group] += (Metric(name, unit, caption, computed, cast(Kind, kind or "number")),)
    return groups


GROUPS = _groups()
METRICS: dict[str, Metric] = {metric.name: metric for group in GROUPS.values() for metric in group}


def empty_metrics() -> dict[str, Any]:
    """A row of `metrics.jsonl` in which every value is unknown."""
    return dict.fromkeys(METRICS)


def table() -> str:
    """The metrics in Markdown, one table per group."""
    lines: list[str] = []
    for group, metrics in GROUPS.items():
        lines += [f"### {group}", "", "| metric | unit | meaning | computed as |", "|---|---|---|---|"]
        for m in metrics:
            computed = m.computed.replace("|", "\\|")
            lines.append(f"| `{m.name}` | {m.unit} | {m.caption} | {computed} |")
        lines.append("")
    return "\n".join(lines)


@dataclass(frozen=True)
class SelectionMetric:
    """A held-out metric that says which model is best."""

    title: str  # for people
    needs: str  # what it is measured on
    lower: bool = False  # whether lower values are better


LOG = "held-out groups (data.hold_out or data.eval_store)"
FOLLOWED = {
    "eval_reward": SelectionMetric("held-out reward", "data.eval_prompts"),
    "eval_auc": SelectionMetric("held-out AUC", LOG),
    "eval_consistency": SelectionMetric("held-out ½ Var(R)", f"{LOG} and a β (evaluate.beta)", lower=True),
    "eval_log_ratio_best": SelectionMetric("held-out log-ratio of the best responses", LOG),
}


if __name__ == "__main__":
    print(table(), end="")
