"""A source that resamples within a step: groups that fail get second responses, some of which are trained on.

Guide (arXiv 2506.13923): the policy's responses with a hint. AMPO (arXiv 2510.02227): teachers' responses,
first those whose reasoning the policy understands. SOPHIA (arXiv 2507.16814): children of the first
responses. A group is resampled at most once per step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agro.config import Count, SamplerConfig, Section
from agro.errors import Refused
from agro.models.encoding import Encoder, InvalidSample
from agro.models.policy import Policy
from agro.objectives.needs import FRESH
from agro.rollout import CollectResult, Rollout
from agro.rollout.rollout import embedded
from agro.store import Store
from agro.train.around import Context, SourceWrapper
from agro.train.collate import collate, total_reward
from agro.train.learner import Learner
from agro.train.phases import Phase, derive
from agro.train.source import FillRequest, Source, joined, without_hint
from agro.types import UNKNOWN_VERSION, Prompt, Sample, Text

NONE = 1e-3  # a group is all wrong up to this share of right responses, all right from 1 − this on (Guide)


class AgainOptions(Section):
    """Fresh groups get second responses in the same step: written with a hint, a teacher's from the store, or
    children of the first responses."""

    by: Literal["hint", "store", "parents"]
    """which groups get which responses. hint: groups without a right response get what the policy (or
    `model`) writes with the prompt's hint (Guide, arXiv 2506.13923); it replaces the first responses, unless
    all or none is right, and is stored under the prompt without the hint, but with log-probs given the hint;
    store: groups without a right response get right ones of role "expert" to the same prompt in data.store
    (AMPO, arXiv 2510.02227), in places that a hash of the seed chooses; parents: every group gets what the
    policy (or `model`) writes with one of its responses as a hint (the second stage of SOPHIA, arXiv
    2507.16814); the shortest right child of a good parent replaces all of them, with the parent's number in
    meta.parent"""
    right: float = 1.0
    """least reward of a right response"""
    alpha: float = 0.5
    """by = "parents": a good parent's children have a mean reward above this"""
    most: Count | None = None
    """by = "store": most places to fill; one response of the policy always stays"""
    choose: Literal["first", "comprehension"] = "first"
    """by = "store": which responses come first. first: the shortest; comprehension: those after whose
    reasoning, the text before their answer, the policy finds the right answer likeliest"""
    n: Count | None = None
    """second responses per prompt, if they are sampled; by default sampler.n"""
    hint: str = "hint"
    """column of the prompts with the hint. A column named hint isn't stored with responses that were written
    without it"""
    template: str = "{prompt}\n{hint}"
    """by = "hint": what the policy reads; for messages, the content of the last one"""
    answer: str = "answer"
    """choose = "comprehension": column of the prompts with the right answer"""
    model: str | None = None
    """by = "hint", "parents": folder or Hub name of the model to sample, if it isn't the policy"""


class AskingAgainSource:
    """Another source's groups. In the resampled ones, some or all responses are replaced."""

    def __init__(self, source: Source, context: Context, options: AgainOptions) -> None:
        """Raises `Refused` if a prompt lacks a column."""
        inline = context.inline
        config, rollout = inline.config, HintedRollout.of(inline.rollout)
        self.sampler = context.copying(replace(inline, rollout=rollout))
        self.options, self.store, self.seed = options, context.store, config.train.seed
        self.prompts = {prompt.id: second_prompt(prompt, options) for prompt in context.prompts}
        self.learner: Learner | None = None
        self.resampled = 0  # groups in the current step
        self.resampler: Source | None = None  # None: the teachers in the store
        self.n = options.n or config.sampler.n
        if options.by == "store":
            return
        self.resampler = self.sampler
        if options.model:  # its responses are an expert's
            dtype = "bfloat16" if config.policy.dtype == "mixed" else config.policy.dtype
            changes = {"model": options.model, "new": None, "lora": None, "dtype": dtype}
            policy = Policy.load(config.policy.model_copy(update=changes))
            rollout = HintedRollout(policy.encoder, embedded(policy), source=options.model, role="expert")
            self.resampler = replace(inline, rollout=rollout)

    def publish(self, learner: Learner) -> None:
        self.sampler.publish(learner)
        self.learner = learner

    def fill(self, wanted: FillRequest) -> CollectResult:
        sampled = self.sampler.fill(wanted)
        groups = scored_groups(self.store, sampled.ids)
        failed = [prompt_id for prompt_id, group in groups.items() if self._is_resampled(group)]
        prompts = [prompt for prompt_id in failed for prompt in self._second_prompts(groups[prompt_id])]
        resampled, second = self._resample(prompts, wanted)
        removed: set[int | None] = set()
        added: list[Sample] = []
        for prompt_id in failed:
            leaving, coming = self._exchange(wanted.step, groups[prompt_id], second.get(prompt_id, ()))
            removed |= {sample.id for sample in leaving}
            added += coming
        ids = [i for i in sampled.ids if i not in removed] + [s.id for s in added if s.id is not None]
        self.resampled = len(failed) + (self.resampled if wanted.before else 0)
        filled = joined([sampled, resampled], tuple(ids))
        return replace(filled, measured={**filled.measured, "asked_again": self.resampled})

    def _resample(
        self, prompts: Sequence[Prompt], wanted: FillRequest
    ) -> tuple[CollectResult, Mapping[str, Sequence[Sample]]]:
        """Second responses by prompt_id: `n` samples to each prompt, or right ones of role "expert" in the
        store."""
        if not prompts:
            return CollectResult(), {}
        if self.resampler is not None:
            request = FillRequest(wanted.step, 0, wanted.first, wanted.before, prompts, self.n)
            sampled = self.resampler.fill(request)
            return sampled, scored_groups(self.store, sampled.ids)
        teachers = {}
        for prompt in prompts:
            stored = self.store.samples(prompt_id=prompt.id, roles=("expert",), skip_damaged=True)
            teachers[prompt.id] = list(filter(self._is_right, stored))
        return CollectResult(), teachers

    def _second_prompts(self, group: Sequence[Sample]) -> list[Prompt]:
        """A group's prompt, or the prompt with each of its nonempty responses as a hint."""
        prompt = self.prompts[group[0].prompt_id]
        if self.options.by != "parents":
            return [prompt]
        prompts = []
        for parent in (sample for sample in group if sample.response):
            marked = replace(prompt, columns={**prompt.columns, "parent": str(parent.id)})
            prompts.append(hinted(marked, parent.response, self.options.template))
        return prompts

    def _is_resampled(self, group: Sequence[Sample]) -> bool:
        """Whether no response is right, or each is a parent."""
        return self.options.by == "parents" or self._accuracy(group) <= NONE

    def _is_right(self, sample: Sample) -> bool:
        return total_reward(sample) >= self.options.right

    def _accuracy(self, group: Sequence[Sample]) -> float:
        return sum(map(self._is_right, group)) / len(group)

    def _exchange(
        self, step: int, group: Sequence[Sample], second: Sequence[Sample]
    ) -> tuple[Sequence[Sample], Sequence[Sample]]:
        """The responses that leave a group, and those that replace them."""
        if self.options.by == "parents":
            return group, shortest_right(second, self.options.alpha, right=self.options.right)
        if not second:
            return (), ()
        if self.options.by == "hint":
            return (group, second) if NONE <= self._accuracy(second) <= 1 - NONE else ((), ())
        ranked = sorted(second, key=lambda sample: len(sample.response))
        if self.options.choose == "comprehension":
            assert self.learner is not None, "weights are published before a step"
            prompt = self.prompts[group[0].prompt_id]
            answer = str(prompt.columns[self.options.answer])
            ranked = rank_by_comprehension(self.learner, prompt, ranked, answer)
        # Replacing all of them would leave nothing to compare.
        ranked = ranked[: min(self.options.most or len(group), len(group) - 1)]
        seed = derive(self.seed, "again", step, group[0].prompt_id)
        places = sorted(
            range(len(group)), key=lambda i: blake2b(f"{seed}/{i}".encode(), digest_size=8).digest()
        )
        return [group[i] for i in places[: len(ranked)]], ranked


def shortest_right(children: Sequence[Sample], alpha: float, *, right: float = 1.0) -> list[Sample]:
    """The shortest right response to a prompt whose parent's reward is above α (SOPHIA, arXiv 2507.16814);
    the first of equally short ones, and none if no child is right.

    The parent of a sample is meta["parent"]; its reward is the mean of its children's.
    """
    rewards: dict[str, list[float]] = defaultdict(list)
    for child in children:
        rewards[child.meta["parent"]].append(total_reward(child))
    good = []
    for child in children:
        siblings = rewards[child.meta["parent"]]
        if total_reward(child) >= right and math.fsum(siblings) / len(siblings) > alpha:
            assert child.action is not None
            good.append((int(child.action.sum()), child))
    return [min(good, key=lambda pair: pair[0])[1]] if good else []


def rank_by_comprehension(
    learner: Learner, prompt: Prompt, responses: Sequence[Sample], answer: str
) -> list[Sample]:
    """The responses that fit into the policy's context, first those that it understands best (AMPO): by the
    mean probability of the right answer's tokens after prompt and reasoning, which is the response up to its
    last occurrence of the answer, or all of it without one."""
    valid, texts = [], []
    for response in responses:
        prefix, separator, _ = response.response.rpartition(answer)
        reasoning = prefix if separator else response.response
        try:
            learner.encoder.encode(response)
            _with_answer(learner.encoder, prompt, reasoning, answer)
        except InvalidSample:  # it can't be trained on either
            continue
        valid.append(response)
        texts.append((prompt, reasoning))
    scores = answer_probabilities(learner, texts, answer)
    order = sorted(range(len(valid)), key=lambda i: -scores[i])
    return [valid[i] for i in order]


def answer_probabilities(
    learner: Learner, contexts: Sequence[tuple[Prompt, str]], answer: str
) -> list[float]:
    """For each prompt and text, the mean probability of an answer's tokens after them. One forward pass.

    Raises `Refused` for contexts that don't fit into the policy's.
    """
    if not contexts:
        return []
    samples = [_with_answer(learner.encoder, prompt, text, answer) for prompt, text in contexts]
    batch = collate(samples, learner.version)
    rows = zip(learner.logp(batch), batch.mask, strict=True)
    return [math.fsum(map(math.exp, logp_T[mask_T].tolist())) / int(mask_T.sum()) for logp_T, mask_T in rows]


def _with_answer(encoder: Encoder, prompt: Prompt, text: str, answer: str) -> Sample:
    """A sample with prompt and text as context, and the answer's tokens as actions."""
    rendered = encoder.render(prompt.text)
    context = encoder.prompt(prompt.text) + encoder.following(rendered, text)
    tokens = encoder.following(rendered + text, answer)
    if not tokens:
        raise Refused(f"prompt {prompt.id}: expected an answer with tokens, got {answer!r}")
    sample = Sample(
        prompt=prompt.text,
        response=text + answer,
        prompt_id=prompt.id,
        tokens=np.array(context + tokens, np.int32),
        action=np.array([False] * len(context) + [True] * len(tokens)),
        tokenizer=encoder.fingerprint,
    )
    return encoder.encode(sample)


def second_prompt(prompt: Prompt, options: AgainOptions) -> Prompt:
    """The prompt of a second sampling. Raises `Refused` if it lacks a needed column."""
    needed = {options.hint} if options.by == "hint" else set()
    needed |= {options.answer} if options.choose == "comprehension" else set()
    for column in sorted(needed):
        if prompt.columns.get(column) is None:
            has = ", ".join(prompt.columns) or "none"
            raise Refused(
                f"prompt {prompt.id}: resample expected a column {column}, it has {has}. What to do: add it "
                "to data.prompts, or name another one (source.options.hint, source.options.answer)"
            )
    plain = without_hint(prompt)
    return hinted(plain, prompt.columns[options.hint], options.template) if options.by == "hint" else plain


def scored_groups(store: Store, ids: Sequence[int]) -> dict[str, list[Sample]]:
    """The responses with a known reward among these, by prompt_id, in their order."""
    samples = {sample.id: sample for sample in store.samples(ids=ids, skip_damaged=True)}
    groups: dict[str, list[Sample]] = defaultdict(list)
    for i in ids:
        if i in samples and not math.isnan(total_reward(samples[i])):
            groups[samples[i].prompt_id].append(samples[i])
    return groups


def _problems(phase: Phase, options: AgainOptions) -> Mapping[str, object]:
    data = phase.config.data
    by_store, needs = options.by == "store", f"{phase.config.objective.name} needs {FRESH.what}"
    return {
        'with by = "store" needs data.store': by_store and data.store is None,
        "uses experts only if all responses fail: set data.experts = 0": by_store and data.experts,
        'with by = "store" asks no model': by_store and options.model is not None,
        'has the option most, which belongs to by = "store"': not by_store and options.most is not None,
        'has the option choose, which belongs to by = "store"': not by_store and options.choose != "first",
        f"has responses from another context or model, but {needs}": FRESH in phase.needs,
    }


@dataclass(frozen=True)
class HintedPrompt(Prompt):
    """A prompt for which the sampler reads another text, such as the prompt with a hint."""

    shown: Text = ""


class HintedRollout(Rollout):
    """Samples like another rollout, but reads a `HintedPrompt`'s `shown` text: the sample has the tokens of
    `Prompt.text` before the response's, the log-probs with which the response was drawn, and the tokens that
    were read in `context_tokens`."""

    @classmethod
    def of(cls, rollout: Rollout) -> HintedRollout:
        return cls(rollout.encoder, rollout.engine, source=rollout.source, role=rollout.role)

    def sample(
        self, prompts: Sequence[Prompt], n: int, options: SamplerConfig, **arguments: Any
    ) -> Iterator[Sample]:
        """See `Rollout.sample`."""
        by_number = dict(zip(arguments.get("numbers") or range(len(prompts)), prompts))
        shown = [Prompt(p.shown, p.id) if isinstance(p, HintedPrompt) else p for p in prompts]
        for sample in super().sample(shown, n, options, **arguments):
            prompt = by_number[sample.meta["index"] // n]
            if not isinstance(prompt, HintedPrompt):
                yield sample
                continue
            meta = {**prompt.columns, **sample.meta}
            stored = with_prompt_tokens(sample, self.encoder.prompt(prompt.text))
            yield stored.replace(prompt=prompt.text, prompt_id=prompt.id, meta=meta)


def hinted(prompt: Prompt, hint: Any, template: str) -> Prompt:
    """The prompt, shown with its hint. `meta` of its responses names the hint.

    Raises `Refused` for a hint that isn't text, and for an invalid template.
    """
    if not isinstance(hint, str) or not hint:
        raise Refused(f"prompt {prompt.id}: expected a hint, a nonempty text, got {hint!r:.80}")
    try:
        if isinstance(prompt.text, str):
            shown: Text = template.format(prompt=prompt.text, hint=hint)
        else:  # the content of the last message
            *history, message = prompt.text
            content = template.format(prompt=message["content"], hint=hint)
            shown = [*history, {**message, "content": content}]
    except (LookupError, ValueError) as error:
        raise Refused(
            "source.options.template: expected a text with {prompt} and {hint}, got "
            f"{template!r}: {error!r}"
        ) from None
    return HintedPrompt(prompt.text, prompt.id, {**prompt.columns, "hint": hint}, shown)


def with_prompt_tokens(sample: Sample, prompt: list[int]) -> Sample:
    """A response after the tokens of its own prompt, in place of those that were read."""
    assert sample.tokens is not None
    assert sample.action is not None
    length = int(sample.action.argmax())  # of the tokens that were read

    def moved(values: NDArray[Any] | None, unknown: Any) -> NDArray[Any] | None:
        if values is None:
            return None
        return np.concatenate([np.full(len(prompt), unknown, values.dtype), values[length:]])

    return sample.replace(
        tokens=np.concatenate([np.array(prompt, np.int32), sample.tokens[length:]]),
        action=moved(sample.action, False),
        behavior_logp=moved(sample.behavior_logp, np.nan),
        kept_count=moved(sample.kept_count, 0),
        version=sample.version if isinstance(sample.version, int) else moved(sample.version, UNKNOWN_VERSION),
        context_tokens=sample.tokens[:length],
    )


RESAMPLE = SourceWrapper(
    AskingAgainSource,
    AgainOptions,
    needs=frozenset(("shares_engine", "samples_chosen_prompts", "single_turns")),
    can=lambda inner, options: inner - {"samples_chosen_prompts", "samples_current_weights"},
    problems=_problems,
)
