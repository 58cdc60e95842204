"""A model's generation_config.json: only its end tokens are used.

A response ends with the tokenizer's EOS, with any token of `eos_token_id`, or with the token by which the
chat template ends an assistant's turn. Temperature, top-k, penalties and the like are ignored, because they
would change the sampling distribution: `[sampler]` decides. The ignored values are shown when a run starts.
The file is saved with the model without changes.
"""

from __future__ import annotations

from typing import Any

from agro import config as configuration
from agro.chat import Chat

_SAMPLER = ("temperature", "top_k", "top_p", "min_p")
_OFF = {  # values without an effect
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
    """The tokens that end a response; the first one ends plain text."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    known = (chat.tokenizer.eos_token_id, *listed, chat.end_id)
    return tuple(dict.fromkeys(int(i) for i in known if i is not None))


def ignored_settings(model: Any, sampler: configuration.Sampler) -> list[str]:
    """The ignored values of the model's generation_config, such as "top_k = 20 (sampler.top_k = 0)"."""
    config = model.generation_config
    ignored = []
    for name in _SAMPLER:
        value, own = getattr(config, name, None), getattr(sampler, name)
        if value is not None and value != own:
            ignored.append(f"{name} = {value} (sampler.{name} = {own})")
    for name, off in _OFF.items():
        value = getattr(config, name, None)
        if value is not None and value != off:
            ignored.append(f"{name} = {value}")
    return ignored
