"""How probable the policy itself finds an answer: after a teacher's reasoning, or about a turn of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agro.errors import Refused
from agro.models.encoding import Encoder, InvalidSample
from agro.train.collate import collate
from agro.train.learner import Learner
from agro.types import Prompt, Sample
from agro_papers.groups import comprehension


def comprehended(
    learner: Learner, prompt: Prompt, responses: Sequence[Sample], answer: str
) -> tuple[list[Sample], list[float]]:
    """The responses that fit into the policy's context, and how well it understands each (AMPO).

    The score is the mean probability of the tokens of the right answer after prompt and reasoning, which is
    the response up to where it last has the answer, or all of it where it doesn't have it.
    """
    valid: list[Sample] = []
    for response in responses:
        try:
            learner.encoder.encode(response)
            _with_answer(learner.encoder, prompt, _reasoning(response, answer), answer)
        except InvalidSample:  # it can't be trained on either
            continue
        valid.append(response)
    texts = [(prompt, _reasoning(response, answer)) for response in valid]
    return valid, answer_probabilities(learner, texts, answer)


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
    logp_BT = learner.logp(batch)
    return [
        comprehension(logp_T[mask_T].tolist(), share=0.0)
        for logp_T, mask_T in zip(logp_BT, batch.mask, strict=True)
    ]


def _reasoning(response: Sample, answer: str) -> str:
    before, found, _ = response.response.rpartition(answer)
    return before if found else response.response


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
