"""A source that asks again inside a step: groups that fail get more responses, of which some are trained on.

Guide (arXiv 2506.13923): the policy's with a hint. AMPO (arXiv 2510.02227): those of teachers, the ones first
whose reasoning the policy understands. SOPHIA (arXiv 2507.16814): children of the first responses. A group is
asked again once a step at most.
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

NONE = 1e-3  # share of right responses up to which a group is all wrong; 1 less this: all right (Guide)


class AgainOptions(Section):
    """Fresh groups get more responses in the same step: written with a hint, a teacher's from the store, or
    children of the first."""

    by: Literal["hint", "store", "parents"]
    """what comes to which groups. hint: those without a right response get what the policy (or `model`)
    writes with the prompt's hint (Guide, arXiv 2506.13923), which takes the place of the first responses,
    unless all or none of it is right, and is stored under the prompt without the hint, with log-probs that
    are with it; store: those without a right response get right ones of role "expert" to the same prompt in
    data.store (AMPO, arXiv 2510.02227), in places that a hash of the seed chooses; parents: every group gets
    what the policy (or `model`) writes with one of its responses as a hint (the second stage of SOPHIA,
    arXiv 2507.16814), of which the shortest right one of a good parent takes the place of all, with the
    parent's number in meta.parent"""
    right: float = 1.0
    """the least reward of a right response"""
    alpha: float = 0.5
    """by = "parents": a parent whose children's mean reward isn't above it is a bad one"""
    most: Count | None = None
    """by = "store": so many places at most; one response of the policy stays, whatever it is"""
    choose: Literal["first", "comprehension"] = "first"
    """by = "store": which responses come first. first: the shorter ones; comprehension: those after whose
    reasoning, the text before their answer, the policy finds the right answer likeliest"""
    n: Count | None = None
    """second responses a prompt, where they are sampled; sampler.n where it isn't given"""
    hint: str = "hint"
    """column of the prompts with the hint. A column of the name hint isn't stored with responses that were
    written without it"""
    template: str = "{prompt}\n{hint}"
    """by = "hint": what the policy reads; of messages it is the content of the last one"""
    answer: str = "answer"
    """choose = "comprehension": column of the prompts with the right answer"""
    model: str | None = None
    """by = "hint", "parents": folder or hub name of the model that is asked, where it isn't the policy"""


class AskingAgainSource:
    """The groups of another source. Those asked again have other responses, in part or as a whole."""

    def __init__(self, source: Source, context: Context, options: AgainOptions) -> None:
        """Raises `Refused` where a prompt lacks a column."""
        again, inline = options, context.inline
        config, rollout = inline.config, HintedRollout.of(inline.rollout)
        first = context.copying(replace(inline, rollout=rollout))
        self.first, self.again, self.store, self.seed = first, again, context.store, config.train.seed
        self.prompts = {prompt.id: as_asked(prompt, again) for prompt in context.prompts}
        self.learner: Learner | None = None
        self.asked = 0  # groups, in a step
        self.second: Source | None = None  # None: the teachers in the store
        self.n = again.n or config.sampler.n
        if again.by == "store":
            return
        asked = first
        if again.model:  # its responses are an expert's
            dtype = "bfloat16" if config.policy.dtype == "mixed" else config.policy.dtype
            changes = {"model": again.model, "new": None, "lora": None, "dtype": dtype}
            policy = Policy.load(config.policy.model_copy(update=changes))
            rollout = HintedRollout(policy.encoder, embedded(policy), source=again.model, role="expert")
            asked = replace(inline, rollout=rollout)
        self.second = asked

    def publish(self, learner: Learner) -> None:
        self.first.publish(learner)
        self.learner = learner

    def fill(self, wanted: FillRequest) -> CollectResult:
        made = self.first.fill(wanted)
        first = answered(self.store, made.ids)
        asked = [prompt_id for prompt_id, group in first.items() if self._is_asked(group)]
        more, second = self._ask([p for name in asked for p in self._asked(first[name])], wanted)
        leaving: set[int | None] = set()
        coming: list[Sample] = []
        for prompt_id in asked:
            left, came = self._exchange(wanted.step, first[prompt_id], second.get(prompt_id, ()))
            leaving |= {sample.id for sample in left}
            coming += came
        ids = [i for i in made.ids if i not in leaving] + [s.id for s in coming if s.id is not None]
        self.asked = len(asked) + (self.asked if wanted.before else 0)
        filled = joined([made, more], tuple(ids))
        return replace(filled, measured={**filled.measured, "asked_again": self.asked})

    def _ask(
        self, prompts: Sequence[Prompt], wanted: FillRequest
    ) -> tuple[CollectResult, Mapping[str, Sequence[Sample]]]:
        """Second responses, by prompt_id: `n` that are sampled to each prompt, or right ones of role
        "expert" in the store."""
        if not prompts:
            return CollectResult(), {}
        if self.second is not None:
            request = FillRequest(wanted.step, 0, wanted.first, wanted.before, prompts, self.n)
            made = self.second.fill(request)
            return made, answered(self.store, made.ids)
        teachers = {}
        for prompt in prompts:
            found = self.store.samples(prompt_id=prompt.id, roles=("expert",), skip_damaged=True)
            teachers[prompt.id] = list(filter(self._is_right, found))
        return CollectResult(), teachers

    def _asked(self, group: Sequence[Sample]) -> list[Prompt]:
        """What is asked for a group: its prompt, or the prompt with each of its responses that has a text."""
        prompt = self.prompts[group[0].prompt_id]
        if self.again.by != "parents":
            return [prompt]
        prompts = []
        for parent in (sample for sample in group if sample.response):
            marked = replace(prompt, columns={**prompt.columns, "parent": str(parent.id)})
            prompts.append(hinted(marked, parent.response, self.again.template))
        return prompts

    def _is_asked(self, group: Sequence[Sample]) -> bool:
        """Whether no response is right, or each is a parent."""
        return self.again.by == "parents" or self._accuracy(group) <= NONE

    def _is_right(self, sample: Sample) -> bool:
        return total_reward(sample) >= self.again.right

    def _accuracy(self, group: Sequence[Sample]) -> float:
        return sum(map(self._is_right, group)) / len(group)

    def _exchange(
        self, step: int, first: Sequence[Sample], second: Sequence[Sample]
    ) -> tuple[Sequence[Sample], Sequence[Sample]]:
        """The responses that leave a group, and those that come in their places."""
        if self.again.by == "parents":
            return first, shortest_right(second, self.again.alpha, right=self.again.right)
        if not second:
            return (), ()
        if self.again.by == "hint":
            return (first, second) if NONE <= self._accuracy(second) <= 1 - NONE else ((), ())
        ranked = sorted(second, key=lambda sample: len(sample.response))
        if self.again.choose == "comprehension":
            assert self.learner is not None, "weights are published before a step"
            prompt = self.prompts[first[0].prompt_id]
            ranked = by_comprehension(self.learner, prompt, ranked, str(prompt.columns[self.again.answer]))
        # All of them would leave nothing to compare.
        most = min(self.again.most or len(first), len(first) - 1)
        seed = derive(self.seed, "again", step, first[0].prompt_id)
        places = sorted(
            range(len(first)), key=lambda i: blake2b(f"{seed}/{i}".encode(), digest_size=8).digest()
        )
        taken = ranked[:most]
        return [first[i] for i in places[: len(taken)]], taken


def shortest_right(children: Sequence[Sample], alpha: float, *, right: float = 1.0) -> list[Sample]:
    """The shortest right one of the responses to a prompt whose parent's reward is above α (SOPHIA, arXiv
    2507.16814); the first of equally short ones, and none where no child is right.

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


def by_comprehension(
    learner: Learner, prompt: Prompt, responses: Sequence[Sample], answer: str
) -> list[Sample]:
    """The responses that fit into the policy's context, those first that it understands best (AMPO): by the
    mean probability of the tokens of the right answer after prompt and reasoning, which is the response up to
    where it last has the answer, or all of it where it doesn't have it."""
    valid, texts = [], []
    for response in responses:
        before, found, _ = response.response.rpartition(answer)
        reasoning = before if found else response.response
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
    """The mean probability of an answer's tokens after a prompt and a text. One forward pass.

    Raises `Refused` for what doesn't fit into the policy's context.
    """
    if not contexts:
        return []
    samples = [_with_answer(learner.encoder, prompt, text, answer) for prompt, text in contexts]
    batch = collate(samples, learner.version)
    rows = zip(learner.logp(batch), batch.mask, strict=True)
    return [math.fsum(map(math.exp, logp_T[mask_T].tolist())) / int(mask_T.sum()) for logp_T, mask_T in rows]


def _with_answer(encoder: Encoder, prompt: Prompt, text: str, answer: str) -> Sample:
    """Prompt and text as the context of the answer, whose tokens are the actions."""
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


def as_asked(prompt: Prompt, again: AgainOptions) -> Prompt:
    """The prompt of a second sampling. Raises `Refused` where it lacks a column that this needs."""
    needed = {again.hint} if again.by == "hint" else set()
    needed |= {again.answer} if again.choose == "comprehension" else set()
    for column in sorted(needed):
        if prompt.columns.get(column) is None:
            has = ", ".join(prompt.columns) or "none"
            raise Refused(
                f"prompt {prompt.id}: resample expected a column {column}, it has {has}. What to do: add it "
                "to data.prompts, or name another one (source.options.hint, source.options.answer)"
            )
    plain = without_hint(prompt)
    return hinted(plain, prompt.columns[again.hint], again.template) if again.by == "hint" else plain


def answered(store: Store, ids: Sequence[int]) -> dict[str, list[Sample]]:
    """The responses with a known reward among these, in their order."""
    samples = {sample.id: sample for sample in store.samples(ids=ids, skip_damaged=True)}
    groups: dict[str, list[Sample]] = defaultdict(list)
    for i in ids:
        if i in samples and not math.isnan(total_reward(samples[i])):
            groups[samples[i].prompt_id].append(samples[i])
    return groups


def _problems(phase: Phase, again: AgainOptions) -> Mapping[str, object]:
    data = phase.config.data
    by_store, needs = again.by == "store", f"{phase.config.objective.name} needs {FRESH.what}"
    return {
        'with by = "store" needs data.store': by_store and data.store is None,
        "asks for experts only where all fail: data.experts = 0": by_store and data.experts,
        'with by = "store" asks no model': by_store and again.model is not None,
        'has the option most, which belongs to by = "store"': not by_store and again.most is not None,
        'has the option choose, which belongs to by = "store"': not by_store and again.choose != "first",
        f"has responses of another context or model, but {needs}": FRESH in phase.needs,
    }


@dataclass(frozen=True)
class HintedPrompt(Prompt):
    """A prompt of which a sampler reads another text, such as the one with a hint."""

    shown: Text = ""


class HintedRollout(Rollout):
    """Samples as another rollout does, and to a `HintedPrompt` what is shown of it: the sample has the tokens
    of `Prompt.text` before those of the response, the log-probs with which the response was drawn, and in
    `context_tokens` what was read."""

    @classmethod
    def of(cls, rollout: Rollout) -> HintedRollout:
        return cls(rollout.encoder, rollout.engine, source=rollout.source, role=rollout.role)

    def sample(
        self, prompts: Sequence[Prompt], n: int, options: SamplerConfig, **others: Any
    ) -> Iterator[Sample]:
        """See `Rollout.sample`."""
        asked = dict(zip(others.get("numbers") or range(len(prompts)), prompts))
        read = [Prompt(p.shown, p.id) if isinstance(p, HintedPrompt) else p for p in prompts]
        for sample in super().sample(read, n, options, **others):
            prompt = asked[sample.meta["index"] // n]
            if not isinstance(prompt, HintedPrompt):
                yield sample
                continue
            meta = {**prompt.columns, **sample.meta}
            own = under_own_prompt(sample, self.encoder.prompt(prompt.text))
            yield own.replace(prompt=prompt.text, prompt_id=prompt.id, meta=meta)


def hinted(prompt: Prompt, hint: Any, template: str) -> Prompt:
    """The prompt, shown with its hint. `meta` of its responses names the hint.

    Raises `Refused` for a hint that isn't text, and for a template that can't be filled in.
    """
    if not isinstance(hint, str) or not hint:
        raise Refused(f"prompt {prompt.id}: expected a hint, a text that isn't empty, got {hint!r:.80}")
    try:
        if isinstance(prompt.text, str):
            shown: Text = template.format(prompt=prompt.text, hint=hint)
        else:  # the content of the last message
            *before, last = prompt.text
            shown = [*before, {**last, "content": template.format(prompt=last["content"], hint=hint)}]
    except (LookupError, ValueError) as error:
        raise Refused(
            "source.options.template: expected a text with {prompt} and {hint}, got "
            f"{template!r}: {error!r}"
        ) from None
    return HintedPrompt(prompt.text, prompt.id, {**prompt.columns, "hint": hint}, shown)


def under_own_prompt(sample: Sample, prompt: list[int]) -> Sample:
    """A response with the tokens of its own prompt before it, in place of those that were read."""
    assert sample.tokens is not None
    assert sample.action is not None
    length = int(sample.action.argmax())  # of what was read

    def moved(values: NDArray[Any] | None, unknown: Any) -> NDArray[Any] | None:
        if values is None:
            return None
        return np.concatenate([np.full(len(prompt), unknown, values.dtype), values[length:]])

    own = np.array(prompt, np.int32)
    return sample.replace(
        tokens=np.concatenate([own, sample.tokens[length:]]),
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
    can=lambda inner, again: inner - {"samples_chosen_prompts", "samples_current_weights"},
    problems=_problems,
)
