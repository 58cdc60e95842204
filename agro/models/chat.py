"""Conversations as text by a chat template, and what ends a response.

The generation prompt, which opens the assistant's turn, is added by `Chat.prompt` only. All of it belongs
to the prompt, including a thinking block that the template opens.

A response ends with the tokenizer's EOS, with an `eos_token_id` of the model's generation_config.json, or
with the token by which the chat template ends an assistant's turn. Nothing else of generation_config.json is
used: temperature, top-k, penalties and the like would change the sampling distribution, which `[sampler]`
sets. The values that are ignored are shown when a run starts. The file is saved with the model, unchanged.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from agro import config as configuration
from agro.errors import Refused
from agro.types import Messages, Text

_FREE = {"tools", "documents"}  # parameters of apply_chat_template that are the user's
_SYSTEM = ("system", "developer")
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


class Rewritten(ValueError):
    """The template renders a turn differently once other turns follow it.

    Then no single sequence contains the context of every turn. Qwen3 and DeepSeek-R1 drop the thinking of
    earlier turns in this way.
    """


@dataclass(frozen=True)
class Chat:
    """Renders prompts with a tokenizer's chat template and the settings of `[policy.chat]`."""

    tokenizer: Any
    system: str | None = None
    wrap: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any, config: configuration.ChatConfig) -> Chat:
        """Set the tokenizer's template to the configured one, so that it is saved with the model.

        Raises `Refused` for settings that would have no effect.
        """
        if config.template is not None:
            tokenizer.chat_template = _read(config.template)
        template = tokenizer.chat_template
        if config != configuration.ChatConfig() and not template:
            raise Refused("[policy.chat]: the tokenizer has no chat template; set policy.chat.template")
        for name in config.options:
            if name in set(inspect.signature(tokenizer.apply_chat_template).parameters) - _FREE:
                raise Refused(
                    f"policy.chat.options: {name}: expected a variable of the template; agro sets this one"
                )
            if not re.search(rf"\b{re.escape(name)}\b", json.dumps(template)):
                raise Refused(
                    f"policy.chat.options: {name}: the chat template doesn't use it, so it has no effect. "
                    "What to do: policy.chat.options={}, or only with variables that the template has"
                )
        return cls(tokenizer, config.system, config.wrap, config.options)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the SHA-256 of everything that determines the ids of a prompt and a response."""
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            definition = json.loads(backend.to_str())
            for passing in ("truncation", "padding"):  # left behind by the last call
                definition.pop(passing, None)
        else:
            definition = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
        special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token]
        decides = [definition, special, tokenizer.chat_template]
        if self._settings:
            decides.append(self._settings)
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        settings = {"system": self.system, "wrap": self.wrap or None, "options": dict(self.options) or None}
        return {name: value for name, value in settings.items() if value is not None}

    def is_text(self, prompt: Text) -> bool:
        """Whether a prompt stays plain text. Raises `Refused` where that would ignore `[policy.chat]`."""
        if not isinstance(prompt, str) or self.wrap:
            return False
        if self._settings:
            setting = next(iter(self._settings))
            raise Refused(
                f"prompt {prompt!r:.80}: policy.chat.{setting} is for conversations, but this is plain text; "
                "set policy.chat.wrap = true, which makes it a user message, or remove the setting"
            )
        return True

    def messages(self, prompt: Text) -> Messages:
        """A prompt as a conversation, with the system message."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system is None or any(m["role"] in _SYSTEM for m in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def prompt(self, messages: Messages) -> str:
        """A conversation up to the start of the assistant's turn."""
        return self._rendered(messages, add_generation_prompt=True)

    def turns(
        self, prompt: Text, turns: Messages, ends: Collection[str], *, closed: bool = True
    ) -> list[tuple[str, bool]]:
        """A prompt and its following turns as one text, in parts: (text, whether the assistant chose it).

        A part of the assistant ends with the first of `ends`, the texts of the end tokens. What the
        template adds after it belongs to the next part. The last turn has no end token unless it is
        `closed`.

        Raises `Rewritten` where the template changes earlier turns.
        """
        parts: list[tuple[str, bool]] = []
        history, so_far = list(self.messages(prompt)), ""
        for turn in turns:
            if turn["role"] == "assistant":
                opening = self.prompt(history)
                with_turn = self._rendered([*history, turn])
                if not (opening.startswith(so_far) and with_turn.startswith(opening)):
                    raise Rewritten(
                        f"turn {len(history)}: the text before it is rendered in more than one way"
                    )
                answer = self._assistant_part(with_turn[len(opening) :], ends)
                parts += [(opening[len(so_far) :], False), (answer, True)]
                so_far = opening + answer
            history.append(turn)
        if not closed:
            answer = parts[-1][0]
            end = next((end for end in ends if answer.endswith(end)), "")
            parts[-1] = (answer.removesuffix(end), True)
        return parts

    @cached_property
    def ending(self) -> str:
        """What the template adds after an assistant's turn; "" where that is unknown."""
        try:
            text = self._rendered(
                [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]
            )
        except Refused:
            return ""
        return text.rpartition("pong")[2] if "pong" in text else ""

    @cached_property
    def end_id(self) -> int | None:
        """The special token that ends an assistant's turn; None without one."""
        added = self.tokenizer.added_tokens_decoder
        ids = self.tokenizer(self.ending, add_special_tokens=False)["input_ids"]
        return next((i for i in ids if i in added and added[i].special), None)

    def _assistant_part(self, text: str, ends: Collection[str]) -> str:
        """The assistant's part of a rendered turn."""
        stops = [text.find(end) + len(end) for end in ends if end in text]
        if stops:
            return text[: min(stops)]
        return text.removesuffix(self.ending)

    def _rendered(self, messages: Messages, **options: bool) -> str:
        if not self.tokenizer.chat_template:
            raise Refused(
                f"prompt {messages!r:.80}: messages, but the tokenizer has no chat template; "
                "give prompts as text, or set policy.chat.template"
            )
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, **options, **self.options
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise Refused(f"prompt {messages!r:.80}: the chat template fails: {error}") from None
        return text


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"policy.chat.template: {path}: expected the file of a Jinja template: {error}"
        ) from None


def end_tokens(model: Any, chat: Chat) -> tuple[int, ...]:
    """The tokens that end a response; the first one ends plain text."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    ids = (chat.tokenizer.eos_token_id, *listed, chat.end_id)
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def ignored_settings(model: Any, sampler: configuration.SamplerConfig) -> list[str]:
    """The ignored values of the model's generation_config, such as "top_k = 20 (sampler.top_k = 0)"."""
    config = model.generation_config
    ignored = []
    for name in _SAMPLER:
        value, configured = getattr(config, name, None), getattr(sampler, name)
        if value is not None and value != configured:
            ignored.append(f"{name} = {value} (sampler.{name} = {configured})")
    for name, off in _OFF.items():
        value = getattr(config, name, None)
        if value is not None and value != off:
            ignored.append(f"{name} = {value}")
    return ignored
