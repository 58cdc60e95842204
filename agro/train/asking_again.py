"""A source that asks again inside a step: groups that fail get more responses, of which some are trained on.

Guide (arXiv 2506.13923): the policy's with a hint. AMPO (arXiv 2510.02227): those of teachers, the ones first
whose reasoning the policy understands. SOPHIA (arXiv 2507.16814): children of the first responses. A group is
asked again once a step at most.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agro.config import AgainConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rewards.groups import asks_for_hint, keeps_hinted, on_demand, shortest_right
from agro.rollout import CollectResult, Rollout
from agro.rollout.hinted import hinted
from agro.rollout.rollout import embedded
from agro.store import Store
from agro.train.assessing import comprehended
from agro.train.collate import total_reward
from agro.train.learner import Learner
from agro.train.phases import derive
from agro.train.source import FillRequest, InlineSource, Source, joined
from agro.types import Prompt, Sample

Answered = Mapping[str, Sequence[Sample]]  # responses with a known reward, by prompt_id


@dataclass(frozen=True)
class StoredTeachers:
    """Right responses of role "expert" in the store: nothing is sampled."""

    store: Store
    right: float

    def ask(self, prompts: Sequence[Prompt], wanted: FillRequest) -> tuple[CollectResult, Answered]:
        answered = {}
        for prompt in prompts:
            found = self.store.samples(prompt_id=prompt.id, roles=("expert",), skip_damaged=True)
            answered[prompt.id] = [sample for sample in found if total_reward(sample) >= self.right]
        return CollectResult(), answered


@dataclass(frozen=True)
class SecondSampling:
    """`n` responses to each prompt, by a source that samples to chosen prompts."""

    source: Source
    store: Store
    n: int

    def ask(self, prompts: Sequence[Prompt], wanted: FillRequest) -> tuple[CollectResult, Answered]:
        request = FillRequest(wanted.step, 0, wanted.first, wanted.before, prompts, self.n)
        made = self.source.fill(request)
        return made, answered(self.store, made.ids)


class AskingAgainSource:
    """The groups of another source. Those that fail have other responses, in part or as a whole."""

    def __init__(self, first: Source, inline: InlineSource, prompts: Sequence[Prompt]) -> None:
        """`first`: of the first responses; `inline`: one in this process, from which that of another model is
        made; `prompts`: with all of their columns. Raises `Refused` where one lacks a column."""
        config, again = inline.config, inline.config.again
        assert again is not None
        self.first, self.again, self.store, self.seed = first, again, inline.store, config.train.seed
        self.prompts = {prompt.id: as_asked(prompt, again) for prompt in prompts}
        self.learner: Learner | None = None
        self.second: StoredTeachers | SecondSampling
        if again.by == "store":
            self.second = StoredTeachers(self.store, again.right)
        else:
            asked = first
            if again.model:  # its responses are an expert's
                dtype = "bfloat16" if config.policy.dtype == "mixed" else config.policy.dtype
                changes = {"model": again.model, "new": None, "lora": None, "dtype": dtype}
                policy = Policy.load(config.policy.model_copy(update=changes))
                rollout = Rollout(policy.encoder, embedded(policy), source=again.model, role="expert")
                asked = replace(inline, rollout=rollout)
            self.second = SecondSampling(asked, self.store, again.n or config.sampler.n)

    def publish(self, learner: Learner) -> None:
        self.first.publish(learner)
        self.learner = learner

    def fill(self, wanted: FillRequest) -> CollectResult:
        made = self.first.fill(wanted)
        first = answered(self.store, made.ids)
        asked = [prompt_id for prompt_id, group in first.items() if self._fails(group)]
        more, second = CollectResult(), dict[str, Sequence[Sample]]()
        if asked:
            prompts = [prompt for prompt_id in asked for prompt in self._asked(first[prompt_id])]
            more, answers = self.second.ask(prompts, wanted)
            second = dict(answers)
        leaving: set[int | None] = set()
        coming: list[Sample] = []
        for prompt_id in asked:
            left, came = self._exchange(wanted.step, first[prompt_id], second.get(prompt_id, ()))
            leaving |= {sample.id for sample in left}
            coming += came
        ids = [i for i in made.ids if i not in leaving] + [s.id for s in coming if s.id is not None]
        return replace(joined([made, more], tuple(ids)), asked_again=len(asked))

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

    def _fails(self, group: Sequence[Sample]) -> bool:
        if self.again.when == "always":
            return True
        if self.again.when == "equal":
            return len({total_reward(sample) for sample in group}) == 1
        return asks_for_hint(self._accuracy(group))

    def _accuracy(self, group: Sequence[Sample]) -> list[float]:
        return [float(total_reward(sample) >= self.again.right) for sample in group]

    def _exchange(
        self, step: int, first: Sequence[Sample], second: Sequence[Sample]
    ) -> tuple[Sequence[Sample], Sequence[Sample]]:
        """The responses that leave a group, and those that come in their places."""
        if self.again.take == "shortest":
            return first, shortest_right(second, self.again.alpha, right=self.again.right)
        if not second:
            return (), ()
        if self.again.take == "group":
            return (first, second) if keeps_hinted(self._accuracy(second)) else ((), ())
        right = sorted(
            (sample for sample in second if total_reward(sample) >= self.again.right),
            key=lambda sample: len(sample.response),
        )
        prompt = self.prompts[first[0].prompt_id]
        ranked, scores = right, [0.0] * len(right)  # of equal ones the earlier comes first
        if self.again.choose == "comprehension" and right:
            assert self.learner is not None, "weights are published before a step"
            answer = str(prompt.columns[self.again.answer])
            ranked, scores = comprehended(self.learner, prompt, right, answer)
        places = min(self.again.most or len(first), len(first) - 1)
        rewards, seed = self._accuracy(first), derive(self.seed, "again", step, prompt.id)
        taken = on_demand(rewards, scores, k=places, seed=seed) if places and ranked else {}
        return [first[i] for i in taken], [ranked[j] for j in taken.values()]


def as_asked(prompt: Prompt, again: AgainConfig) -> Prompt:
    """The prompt of a second sampling. Raises `Refused` where it lacks a column that this needs."""
    needed = {again.hint} if again.by == "hint" else set()
    needed |= {again.answer} if again.choose == "comprehension" else set()
    for column in sorted(needed):
        if prompt.columns.get(column) is None:
            has = ", ".join(prompt.columns) or "none"
            raise Refused(
                f"prompt {prompt.id}: [again] expected a column {column}, it has {has}. What to do: add it "
                "to data.prompts, or name another one (again.hint, again.answer)"
            )
    plain = without_hint(prompt)
    return hinted(plain, prompt.columns[again.hint], again.template) if again.by == "hint" else plain


def without_hint(prompt: Prompt) -> Prompt:
    """The prompt without a column `hint`: `meta.hint` of a sample says that a hint was read."""
    columns = {name: value for name, value in prompt.columns.items() if name != "hint"}
    return Prompt(prompt.text, prompt.id, columns)


def answered(store: Store, ids: Sequence[int]) -> Answered:
    """The responses with a known reward among these, in their order."""
    samples = {sample.id: sample for sample in store.samples(ids=ids, skip_damaged=True)}
    groups: dict[str, list[Sample]] = defaultdict(list)
    for i in ids:
        if i in samples and not math.isnan(total_reward(samples[i])):
            groups[samples[i].prompt_id].append(samples[i])
    return groups
