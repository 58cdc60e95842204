"""Responses that were written under another text than the prompt under which they are stored.

A sampler reads `HintedPrompt.shown`; the sample has the tokens of `Prompt.text` before those of the
response, the log-probs with which the response was drawn, and in `context_tokens` what was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.config import SamplerConfig
from agro.errors import Refused
from agro.rollout import Rollout
from agro.types import UNKNOWN_VERSION, Prompt, Sample, Text


@dataclass(frozen=True)
class HintedPrompt(Prompt):
    """A prompt of which a sampler reads another text, such as the one with a hint."""

    shown: Text = ""


class HintedRollout(Rollout):
    """Samples as another rollout does, and to a `HintedPrompt` what is shown of it."""

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
    columns = {**prompt.columns, "hint": hint}
    return HintedPrompt(prompt.text, prompt.id, columns, _filled(prompt, hint, template))


def _filled(prompt: Prompt, hint: str, template: str) -> Text:
    """The template with prompt and hint; of messages it is the content of the last one."""
    try:
        if isinstance(prompt.text, str):
            return template.format(prompt=prompt.text, hint=hint)
        *before, last = prompt.text
        return [*before, {**last, "content": template.format(prompt=last["content"], hint=hint)}]
    except (LookupError, ValueError) as error:
        raise Refused(
            "source.options.template: expected a text with {prompt} and {hint}, got "
            f"{template!r}: {error!r}"
        ) from None


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
