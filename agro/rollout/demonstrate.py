"""Episodes of a teacher in the format of a policy's own, for imitation (`sft`) or replay."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from agro.errors import Refused
from agro.models.encoding import Encoder
from agro.rollout.envs.protocol import Environment
from agro.rollout.episode import Episode
from agro.types import Prompt, Sample


def demonstrate(
    environment: Environment,
    encoder: Encoder,
    prompt: Prompt,
    turns: Sequence[str],
    *,
    source: str = "teacher",
) -> list[Sample]:
    """The episode in which a teacher writes `turns`; the actions are the tokens of these turns.

    An end token is appended to a turn without a stop text of the environment. The result is one sample,
    unless the chat template rewrites history. The reward is the environment's, or None. Raises `Refused` if
    the episode does not end with the last turn, if the environment raises an error, and for unknown
    characters.
    """
    location = f"demonstration for prompt {prompt.id}"
    episode = Episode(environment, encoder, prompt, encoder.prompt(prompt.text), len(turns) + 1)
    unknown = encoder.chat.tokenizer.unk_token_id
    more = True
    for i, text in enumerate(turns):
        if not more:
            raise Refused(f"{location}: the episode ended ({episode.finish}) after {i} of {len(turns)} turns")
        ids = encoder.following(episode.transcript.text, text)
        if unknown is not None and unknown in ids:
            raise Refused(
                f"{location}: the tokenizer of {encoder.name} doesn't know all characters of {text!r:.80}"
            )
        if not text.endswith(environment.stop or ("\0",)):
            ids = ids + encoder.end_of(prompt.text)
        more = episode.turn(ids, None, cut=False)
    if episode.error:
        raise Refused(f"{location}: {episode.error}")
    if more or not turns:
        raise Refused(f"{location}: the episode goes on after the last turn: {repr(turns)[:80]}; add turns")
    if len(episode.ids) > encoder.context:
        raise Refused(f"{location}: {len(episode.ids)} tokens, but the model's context is {encoder.context}")
    samples = episode.samples(uuid.uuid4().hex, turns[-1], {}, {})
    return [s.replace(role="expert", source=source) for s in samples]
