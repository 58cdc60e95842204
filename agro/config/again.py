"""Groups of a step that are sampled to a second time: when, by whom, and which responses are trained on."""

from __future__ import annotations

from typing import Literal

from agro.config.section import Count, Section


class AgainConfig(Section):
    """Fresh groups that satisfy a rule get more responses in the same step: written with a hint, by another
    model, by the policy once more, or a teacher's from the store."""

    by: Literal["hint", "store", "model", "policy", "parents"]
    """whose responses. hint: the policy's, with the prompt's hint before it (Guide, arXiv 2506.13923); they
    are stored under the prompt without it, with log-probs that are with it; store: those of role "expert" to
    the same prompt in data.store (AMPO, arXiv 2510.02227); model: those of another model, of role "expert";
    policy: the policy's once more; parents: those that the policy, or `model`, writes with one of the first
    responses as a hint (the second stage of SOPHIA, arXiv 2507.16814); meta.parent is the sample it is of"""
    when: Literal["failed", "equal", "always"] = "failed"
    """which groups. failed: those without a right response; equal: those whose rewards are all equal; always:
    all"""
    right: float = 1.0
    """the least reward of a right response"""
    take: Literal["group", "right", "shortest"] = "group"
    """group: the second responses take the place of the first, unless all or none of them are right; right:
    right ones take the places of responses that a hash of the seed chooses; shortest (by = "parents"): the
    shortest right one whose parent's children have a mean reward above `alpha` takes the place of all"""
    alpha: float = 0.5
    """take = "shortest": a parent whose children's mean reward isn't above it is a bad one"""
    most: Count | None = None
    """take = "right": so many places at most; one response of the policy stays, whatever it is"""
    choose: Literal["first", "comprehension"] = "first"
    """take = "right": which right responses come first. first: the shorter ones; comprehension: those after
    whose reasoning, the text before their answer, the policy finds the right answer likeliest"""
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
    """folder or hub name of the model that is asked: with by = "model", and also with by = "parents" where it
    isn't the policy"""
