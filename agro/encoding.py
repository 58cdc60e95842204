"""Samples as tokens: which of them the prompt holds, which the policy chose, and what can't be encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agro.chat import Chat, Rewritten
from agro.errors import Refused
from agro.types import UNKNOWN_VERSION, Sample, Text, check_turns

Reason = Literal[
    "too long",
    "unknown characters",
    "empty",
    "tokens outside the vocabulary",
    "turns of another tokenizer",
    "template rewrites history",
]


class Unusable(Refused):
    """A sample that a policy can't be trained on; `reason` is what it is counted under."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Encoder:
    """What a policy's tokenizer, chat settings, end tokens and sizes make of prompts and samples."""

    chat: Chat
    eos_ids: tuple[int, ...]  # what ends a response; first what closes a plain text
    vocab_size: int
    context: int  # tokens
    name: str  # of the model, for messages

    @cached_property
    def _prefix(self) -> list[int]:
        """Ids that the tokenizer puts in front of a plain text."""
        full, bare = (
            list(self.chat.tokenizer("a0.", add_special_tokens=x)["input_ids"]) for x in (True, False)
        )
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return full[:at]

    @property
    def fingerprint(self) -> str:
        """Of what decides a text's tokens; see `Chat.fingerprint`."""
        return self.chat.fingerprint

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self.chat.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def prompt(self, text: Text) -> list[int]:
        """Ids of a prompt, with what the tokenizer puts in front (a BOS, where it does so) and nothing behind.

        An empty text is the BOS alone, or the EOS where the tokenizer has no BOS. Messages (and texts, with
        policy.chat.wrap) go through the chat template, followed by its generation prompt.
        """
        return self._begun(self.render(text), text)

    def render(self, text: Text) -> str:
        """The text of a prompt that is encoded: plain, or through the chat template up to where the response begins."""
        if self.chat.is_text(text):
            assert isinstance(text, str)
            return text
        return self.chat.prompt(self.chat.messages(text))

    def _begun(self, rendered: str, prompt: Text) -> list[int]:
        """Ids of the text that a sequence begins with, rendered of `prompt`."""
        ids = (self._prefix if self.chat.is_text(prompt) else []) + self.ids(rendered)
        start = [i for i in (self.chat.tokenizer.bos_token_id, *self.eos_ids) if i is not None][:1]
        if not ids and not start:
            raise Refused(
                f"{self.name}: an empty prompt, and a tokenizer with neither BOS nor EOS to start from"
            )
        return ids or start

    def ids(self, text: str) -> list[int]:
        """Of the text alone, with nothing in front or behind."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Unusable(
                "unknown characters",
                f"text {text!r:.80}: expected Unicode text, got half of a surrogate pair at index {error.start}",
            ) from None
        return list(self.chat.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(self, sample: Sample, max_length: int | None = None) -> Sample:
        """The sample with `tokens`, `action` and `tokenizer` of this encoding.

        Tokens of this very tokenizer are kept. Else prompt and response are encoded each by itself, and an end token
        follows unless there is one, or the response was cut (`meta["finish"] == "length"`). Where `meta["continuation"]` holds the
        response as a list of turns, with users and tools between the assistant's, each turn is encoded by itself, and
        the actions are what the assistant said, end tokens included. What was known of each token of another
        encoding (`learn`, `behavior_logp`, `token_reward`, a version each) is unknown of the new ones, unless both
        are the same.

        Raises `Unusable` with a `reason`: longer than `max_length` or the model's context, characters that the
        tokenizer doesn't know, nothing to learn from, ids outside the model's vocabulary, several turns under a
        template that rewrites earlier ones.
        """
        where = f"sample {sample.id if sample.id is not None else ''} of prompt {sample.prompt_id}".replace(
            "  ", " "
        )
        out = sample if sample.tokens is not None and sample.tokenizer == self.chat.fingerprint else None
        out = out or self._encoded(sample, where)
        assert out.tokens is not None
        if out.tokens.max() >= self.vocab_size:
            raise Unusable(
                "tokens outside the vocabulary",
                f"{where}: tokens: expected ids below {self.vocab_size}, got {out.tokens.max()} at index "
                f"{out.tokens.argmax()}; encode it with the model's own tokenizer",
            )
        limit = min(self.context, max_length or self.context)
        if len(out.tokens) > limit:
            raise Unusable(
                "too long",
                f"{where}: {len(out.tokens)} tokens, expected {limit} at most "
                f"(the model's context is {self.context}, train.max_length {max_length})",
            )
        return out

    def _encoded(self, sample: Sample, where: str) -> Sample:
        parts = self._parts(sample, where)
        for text, chosen in parts:
            self._check_known(text, f"{where}: {'response' if chosen else 'prompt'}")
        pieces = [self.ids(text) for text, _ in parts]
        pieces[0] = self._begun(parts[0][0], sample.prompt)
        if not pieces[-1] or pieces[-1][-1] not in self.eos_ids:
            pieces[-1] += self._closing(sample)
        if not pieces[-1]:
            raise Unusable("empty", f"{where}: the response has no tokens, and no end token belongs to it")
        tokens = np.array([i for piece in pieces for i in piece], dtype=np.int32)
        action = np.array([chosen for piece, (_, chosen) in zip(pieces, parts) for _ in piece])
        if _equal(sample.tokens, tokens) and _equal(sample.action, action):
            return sample.replace(tokenizer=self.chat.fingerprint)
        version = sample.version if isinstance(sample.version, int) else UNKNOWN_VERSION
        return sample.replace(
            tokens=tokens,
            action=action,
            tokenizer=self.chat.fingerprint,
            learn=None,
            behavior_logp=None,
            token_reward=None,
            version=version,
        )

    def _parts(self, sample: Sample, where: str) -> list[tuple[str, bool]]:
        """Prompt and response, or the turns: (text, whether the policy chose it)."""
        turns = sample.meta.get("continuation")
        if turns is None:
            acted = sample.action is not None and not sample.action[sample.action.argmax() :].all()
            if acted or sample.context_tokens is not None:
                raise Unusable(
                    "turns of another tokenizer",
                    f"{where}: its response has tokens that the policy didn't choose, or follows what isn't the prompt, and only "
                    "the tokens of another tokenizer say so; use a model with that tokenizer, or leave the sample out",
                )
            return [(self.render(sample.prompt), False), (sample.response, True)]
        check_turns(turns, f"{where}: meta.continuation")
        if self.chat.is_text(sample.prompt):
            raise Refused(
                f"{where}: its response is a conversation, but its prompt plain text; give messages, or set policy.chat.wrap"
            )
        ends = [self.chat.tokenizer.convert_ids_to_tokens(i) for i in self.eos_ids]
        try:
            return self.chat.turns(sample.prompt, turns, ends, closed=sample.meta.get("finish") != "length")
        except Rewritten as error:
            raise Unusable(
                "template rewrites history",
                f"{where}: the chat template of {self.name} renders a turn otherwise than it was asked for, or once others follow, so no one sequence holds "
                f"what was read before each of them ({error}); give each turn as a sample of its own, or another "
                "policy.chat.template",
            ) from None

    def _closing(self, sample: Sample) -> list[int]:
        """The end token of a response, unless it was cut."""
        if sample.meta.get("finish") == "length":
            return []
        if not self.chat.is_text(sample.prompt) and self.chat.end_id is not None:
            return [self.chat.end_id]
        return list(self.eos_ids[:1])

    def _check_known(self, text: str, where: str) -> None:
        """Raise `Unusable` where a piece of the text becomes the unknown token, and doesn't spell that token itself."""
        unknown = self.chat.tokenizer.unk_token_id
        if unknown is None or unknown not in self.ids(text):
            return
        if not self.chat.tokenizer.split_special_tokens:
            text = text.replace(self.chat.tokenizer.unk_token, "")
        if unknown in self.ids(text):
            bad = [c for c in dict.fromkeys(text) if unknown in self.ids(c)]
            raise Unusable(
                "unknown characters",
                f"{where}: the tokenizer doesn't know {', '.join(map(repr, bad[:5]))}{', …' if len(bad) > 5 else ''}; "
                "use a model whose vocabulary has them, or leave the sample out",
            )


def _equal(known: NDArray[Any] | None, found: NDArray[Any]) -> bool:
    return known is not None and np.array_equal(known, found)
