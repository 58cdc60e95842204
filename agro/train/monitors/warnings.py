"""Warnings: about the metrics of steps, each once per phase, about valid settings that may be unintended, and
about steps from which nothing can be learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agro.config import RunConfig
from agro.models.chat import ignored_settings
from agro.models.policy import Policy
from agro.models.pretrained import LARGE, cores, parameters, positions_of
from agro.objectives.needs import ENTROPY, KL, NORMALIZER, OBSERVED_LOGP, REWARD, grouping
from agro.rollout.engines.capabilities import capabilities
from agro.runs.problems import DWARFED, PATIENCE, WINDOW, phase_problems, way_out
from agro.train.around import source_abilities
from agro.train.check import has_groups_to_measure
from agro.train.collate import describe
from agro.train.monitors import Monitor, View
from agro.train.phases import Phase, options_at
from agro.types import Prompt


def notes(policy: Policy, prompts: Sequence[Prompt], config: RunConfig) -> list[str]:
    texts, count = sum(isinstance(p.text, str) for p in prompts), parameters(policy.model)
    ignored = ignored_settings(policy.model, config.sampler)
    positions, on_gpu = positions_of(policy.model), policy.device.type == "cuda"
    is_large = config.policy.threads == "auto" and count >= LARGE and policy.device.type == "cpu"
    rows = {
        f"{texts} of {len(prompts)} prompts are plain text without a chat template, though the tokenizer has "
        "one; policy.chat.wrap = true makes user messages of them": texts
        and policy.tokenizer.chat_template
        and not config.policy.chat.wrap,
        f"the model's generation_config sets {', '.join(ignored)}; these are ignored, [sampler] "
        "decides": prompts and ignored,
        f"the context is {policy.context} of the model's {positions} tokens: in longer passes, LongRoPE "
        "changes the log-probs of all sequences": policy.context < positions,
        f"engine.kind = {config.engine.kind} decodes on the GPU an operation at a time, without CUDA graphs; "
        "engine.kind = vllm starts vLLM, which samples faster": (
            on_gpu and "shares_weights" in capabilities(config.engine.kind)
        ),
        f"policy.threads = auto: {cores()} CPU threads for {count / 1e6:.0f} million parameters. With "
        "another number of threads the last bits of the weights differ": is_large,
    }
    return [note for note, applies in rows.items() if applies]


def notes_on_settings(phases: Sequence[Phase]) -> list[str]:
    """What the settings alone show, before anything is loaded."""
    lines, unmeasured = [], []
    for phase in phases:
        config, entry, name = phase.config, phase.entry, phase.config.objective.name
        options = entry.defaults() | options_at(config.objective.options, 0)
        unweighted = name == "agro" and options.get("weight") == "none" and config.data.draws_stored
        # Where streams besides log-probs move the policy (see `agro.train.update.kept`).
        moved = phase.needs & {KL, ENTROPY, NORMALIZER, OBSERVED_LOGP}
        has_ratio = config.train.gain_ratio is not None and config.train.step_kl is None
        rows = {
            entry.warnings.options_warning(options) or "": True,
            "agro trains on stored responses without a weight, so that responses which became improbable are "
            "pushed down further and take the good ones with them. On the log of reproductions/offline 0.62 "
            "of the answers were right at the end, and 0.92 with a weight. What to do: objective.weight = "
            '"reference", with weight_power = 0.5, weight_normalize = "group" and weight_baseline = '
            '"optimal", as in the recipe log': unweighted,
            _of_other_weights(config, options.get("anchor"), options.get("baseline")) or "": True,
            f"{name} moves the policy by more than log-probs ({', '.join(sorted(moved))}), so "
            "train.gain_ratio isn't measured and nothing bounds a step. What to do: train.step_kl = "
            "0.005": has_ratio and moved,
        }
        lines += [f"phase {phase.name}: {text}" for text, applies in rows.items() if text and applies]
        if truncated := describe(phases, phase):
            lines.append(truncated)
        beta = phase.diagnostic_beta(config.objective.options)  # a schedule is one
        if has_groups_to_measure(config) and beta is None:
            unmeasured.append(phase.name)
    if unmeasured:
        lines.append(
            f"phase {', '.join(unmeasured)}: without a β towards the reference ½ Var(R) and regret aren't "
            "measured; evaluate.beta (reward per nat) switches them on"
        )
    return lines


def _of_other_weights(config: RunConfig, anchor: str | None, baseline: str | None) -> str | None:
    """Where the baseline needs fresh samples and not all are; where β regularizes to a policy that is the
    trained one at every step."""
    if baseline != "step" and anchor not in ("behavior", "old"):
        return None
    is_current = "samples_current_weights" in source_abilities(config)
    stale = {
        "data.replay": config.data.draws_stored,
        f"train.updates = {config.train.updates}": config.train.updates > 1,
        f"source.kind = {config.source.kind}, whose samples may be of earlier weights": not is_current,
    }
    named = " and ".join(name for name, is_so in stale.items() if is_so)
    if named and baseline == "step":
        return (
            f'objective.baseline = "step" keeps the optimum on fresh samples alone, and with {named} some '
            'aren\'t, so that training ends elsewhere. What to do: objective.baseline = "others", which '
            "keeps it on any samples"
        )
    if anchor not in ("behavior", "old") or config.train.updates > 1 or (anchor == "behavior" and named):
        return None
    return (
        f'{config.objective.name} regularizes to the policy that sampled (anchor = "{anchor}"), which is the '
        "trained one itself at every step, so log π/μ is 0 and objective.beta only scales the gradient. What "
        "to do: source.sync_every or train.updates of 2 or more, or stored responses (data.replay)"
    )


AGAIN = 100  # steps in a row after which a warning is repeated


class Signal(Monitor):
    """Warns of steps in a row without a signal (`no_signal`), and of a share of replay that isn't met."""

    def __init__(self, phase: Phase, say: Callable[[str], None]) -> None:
        self.phase, self.say = phase, say
        self.uses_rewards = REWARD in phase.needs
        self.compares_groups = self.uses_rewards and grouping(phase.needs) is not None
        self.in_a_row = 0
        self.missed_in_a_row = 0

    def after(self, view: View) -> None:
        if not view.step:
            return
        reason, missing = self._why(view.metrics), view.metrics["replay_missing"] or 0
        view.metrics["no_signal"] = reason
        self.in_a_row = self.in_a_row + 1 if reason else 0
        self.missed_in_a_row = self.missed_in_a_row + 1 if missing else 0
        if reason and self._is_time(self.in_a_row):
            mean, groups = view.metrics["reward_mean"], view.metrics["groups"]
            mean_reward = "" if mean is None else f" (mean reward {mean:.3g})"
            if reason == "all rewards are equal":
                mean_reward = f" (each is {mean:.6g}, in {groups} groups)"
            self.say(
                f"step {view.step}: nothing can be learned, {self.in_a_row} steps in a row: "
                f"{reason}{mean_reward}. What to do: {way_out(reason, self.phase.config.data)}"
            )
        if missing and self._is_time(self.missed_in_a_row):
            data, requested = self.phase.config.data, self.phase.stored_groups(view.at - 1)
            keys = ("roles", "sources", "min_reward", "max_age", "max_uses", "best_of_group", "spread")
            limits = {key: getattr(data, key) for key in keys}
            choice = [f"data.{key} = {x}" for key, x in limits.items() if x is not None and x is not False]
            way = "a lower data.replay, or more prompts: a step draws each group of the store once"
            if choice:
                way = f"check the choice by {', '.join(choice)}, or lower data.replay"
            self.say(
                f"step {view.step}: data.replay = {data.replay} asks for {requested} groups of the store, "
                f"and {requested - missing} could be drawn, again; the others are sampled. What to do: {way}"
            )

    def _is_time(self, in_a_row: int) -> bool:
        patience = min(PATIENCE, self.phase.ends - self.phase.begins)
        return in_a_row == patience or in_a_row % AGAIN == 0

    def _why(self, metrics: Mapping[str, Any]) -> str | None:
        """A key of `WAYS_OUT`; None where something can be learned, or where that is unknown."""
        groups = metrics["groups"]
        if groups == 0:
            return "no valid response"
        is_equal, has_no_gradient = metrics["groups_equal"] == groups, metrics["grad_norm"] == 0
        # An objective of single responses may learn from a reward of 0, such as KTO from a thumb down.
        if self.uses_rewards and (self.compares_groups or has_no_gradient):
            if is_equal and metrics["reward_mean"] == 0 and not metrics["reward_std"]:
                return "all rewards are 0"
            if metrics["reward_std"] == 0:
                return "all rewards are equal"
        if self.compares_groups and is_equal:
            return "equal rewards within groups"
        return "a gradient of 0" if has_no_gradient else None


class Warnings(Monitor):
    """Warns where the metrics show that something is wrong with the settings, and names the way out."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.given: set[str] = set()
        self.rows: list[dict[str, Any]] = []  # the metrics of the phase's first step and its last ones

    def after(self, view: View) -> None:
        metrics, entry, config = view.metrics, view.phase.entry, view.phase.config
        options = entry.defaults() | view.options
        if metrics["objective"] is not None:
            self._warn("method", view.step, entry.warnings.metrics_warning(metrics["objective"], options))
        # Of the spread of βρ, unless the method warns of its β itself, or most groups have equal rewards.
        warns_itself = "method" in self.given or entry.warnings.options_warning(options) is not None
        mostly_equal = 2 * (metrics["groups_equal"] or 0) > (metrics["groups"] or 0)
        ratio, length = metrics["kl_to_reward_spread"] or 0.0, metrics["length_mean"]
        if not warns_itself and not mostly_equal and ratio > DWARFED:
            way = "a smaller objective.beta"
            if entry.averages(view.options) == "sum":
                way += f" (about 1/length, {1 / length:.2g}, where rewards go from 0 to 1)"
                if "average" in entry.options.model_fields:
                    way += ', or objective.average = "token"'
            beta = f"β = {view.options['beta']:.3g}, responses of {length:.0f} tokens"
            text = (
                f"within groups the spread of βρ is {ratio:.3g} times that of the rewards (1 at the optimum),"
                f" so that updates mainly follow the log-ratios: {beta}. What to do: {way}"
            )
            self._warn("spread", view.step, text)
        # What the page, too, would say of the phase if it ended here.
        evaluated = any(v is not None for k, v in metrics.items() if k.startswith("eval_"))
        self.rows.append(metrics)
        read = config.train.warmup + config.evaluate.every + 2 * WINDOW  # rows, by `phase_problems`
        if len(self.rows) > read:
            del self.rows[1]
        if evaluated or view.at % WINDOW == 0:
            for problem in phase_problems(self.rows, config):
                self._warn(problem.title, view.step, problem.detail)

    def _warn(self, topic: str, step: int, text: str | None) -> None:
        if text and topic not in self.given:
            self.given.add(topic)
            self.say(f"step {step}: {text}")
