"""What is taken of a model's own generation_config.json: its end tokens, and nothing else.

A response ends with the tokenizer's EOS, with any token of `eos_token_id`, or with the token by which the chat template
ends an assistant's turn. Temperature, top-k, penalties and the like stay aside: they would make the samples of
another distribution than the policy's, without a word. `[sampler]` says how to sample, and what the model would have had
otherwise is named when a run starts. The file is saved with the model as it was.
"""

from __future__ import annotations

from typing import Any

from agro import config as configuration
from agro.chat import Chat

_SAMPLER = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
}  # theirs: ours
_OFF = {  # values that change nothing
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "num_beams": 1,
}


def end_tokens(model: Any, chat: Chat) -> tuple[int, ...]:
    """What ends a response; first what closes a plain text."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    known = (chat.tokenizer.eos_token_id, *listed, chat.end_id)
    return tuple(dict.fromkeys(int(i) for i in known if i is not None))


def left_aside(model: Any, sampler: configuration.Sampler) -> list[str]:
    """The values of the model's generation_config that sampling goes without, such as "top_k = 20 (sampler.top_k = 0)"."""
    config = model.generation_config
    out = []
    for theirs, ours in _SAMPLER.items():
        value, own = getattr(config, theirs, None), getattr(sampler, ours)
        if value is not None and value != own:
            out.append(f"{theirs} = {value} (sampler.{ours} = {own})")
    out += [
        f"{name} = {value}"
        for name, off in _OFF.items()
        if (value := getattr(config, name, None)) is not None and value != off
    ]
    return out
