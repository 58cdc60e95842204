"""Encodes samples as tokens, marks those that the policy chose, and says why a sample is invalid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from agro.errors import Refused
from agro.models.chat import Chat
from agro.models.template import NotShown
from agro.types import UNKNOWN_VERSION, Prompt, Sample, Text, check_turns

_CONTEXTS = ("=", "0", "a", ".")  # texts that need not merge with the next one into a token


class InvalidSample(Refused):
    """A sample that a policy can't be trained on. Such samples are counted by `reason`, a short text."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Encoder:
    """Encodes prompts and samples for a policy.

    `eos_ids`: tokens that end a response; plain text gets the first one. `context`: in tokens. `name`: the
    model's, for messages.
    """

    chat: Chat
    eos_ids: tuple[int, ...]
    vocab_size: int
    context: int
    name: str

    @cached_property
    def _prefix(self) -> list[int]:
        """Ids that the tokenizer adds before a plain text."""
        full = list(self.chat.tokenizer("a0.", add_special_tokens=True)["input_ids"])
        plain = list(self.chat.tokenizer("a0.", add_special_tokens=False)["input_ids"])
        start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
        return full[:start]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all that determines a text's tokens; see `Chat.fingerprint`."""
        return self.chat.fingerprint

    @cached_property
    def _marks_start(self) -> bool:
        """Whether a text has other tokens at the start than after other text.

        SentencePiece puts a space before the start of a text, and removes it when decoding.
        """
        return any(self._text(self.ids(c) * 2) != self._text(self.ids(c * 2)) for c in _CONTEXTS)

    def decode(self, ids: Sequence[int], preceding: Sequence[int] = ()) -> str:
        """Decode ids as text without special tokens.

        The text continues the tokens `preceding`, unless these end with a special token.
        """
        if preceding and self._marks_start:
            beginning, text = self._text(preceding[-1:]), self._text([preceding[-1], *ids])
            if text.startswith(beginning):
                return text.removeprefix(beginning)
        return self._text(ids)

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.chat.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that `decode` omits."""
        added = self.chat.tokenizer.added_tokens_decoder
        return frozenset(self.chat.tokenizer.all_special_ids) | {i for i in added if added[i].special}

    def prompt(self, text: Text) -> list[int]:
        """Ids of a prompt, with the tokens that the tokenizer adds before it (such as a BOS), without those
        after it.

        An empty text is the BOS alone, or the EOS if the tokenizer has no BOS. The chat template renders
        messages (and texts, with policy.chat.wrap), with its generation prompt.
        """
        return self._rendered_ids(self.render(text), text)

    def checked_prompt(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt. Raises `InvalidSample` if the chat template doesn't show it, the tokenizer doesn't
        know a character, or there is no room for a response."""
        try:
            ids = self.prompt(prompt.text)
        except NotShown as error:
            raise InvalidSample(error.kind, f"prompt {prompt.id}: {error}") from None
        self._check_known(self.render(prompt.text), ids, f"prompt {prompt.id}")
        if len(ids) >= self.context:
            raise InvalidSample(
                "too long",
                f"prompt {prompt.id}: {len(ids)} tokens leave no room for a response in the model's context "
                f"of {self.context}",
            )
        return ids

    def turn(self, tokens: Sequence[int]) -> tuple[str, str]:
        """What the policy wrote in a turn, and the text of its end token, "" if it has none."""
        decode = self.chat.tokenizer.decode
        is_closed = tokens[-1] in self.eos_ids
        written = decode(tokens[:-1] if is_closed else tokens, clean_up_tokenization_spaces=False)
        return written, decode(tokens[-1:]) if is_closed else ""

    def render(self, text: Text) -> str:
        """The text of a prompt, plain or rendered by the chat template up to the start of the response."""
        if self.chat.is_text(text):
            assert isinstance(text, str)
            return text
        return self.chat.prompt(self.chat.messages(text))

    def _rendered_ids(self, rendered: str, prompt: Text) -> list[int]:
        """Ids of a rendered `prompt` at the start of a sequence."""
        ids = self.ids(rendered)
        if self.chat.is_text(prompt) and ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        if ids:
            return ids
        for start in (self.chat.tokenizer.bos_token_id, *self.eos_ids):
            if start is not None:
                return [start]
        raise Refused(f"{self.name}: an empty prompt needs a BOS or EOS, but the tokenizer has neither")

    def ids(self, text: str) -> list[int]:
        """Ids of the text, without special tokens around it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            label = f"text {text!r:.80}"
            problem = f"expected Unicode text, got half of a surrogate pair at index {error.start}"
            raise InvalidSample("unknown characters", f"{label}: {problem}") from None
        return list(self.chat.tokenizer(text, add_special_tokens=False)["input_ids"])

    def following(self, preceding: str, text: str) -> list[int]:
        """Ids of `text` after the text `preceding`: without the space that SentencePiece puts before a text.

        Raises `InvalidSample` if the tokenizer can't encode it without that space.
        """
        alone = self.ids(text)
        if not (preceding and alone and self._marks_start):
            return alone
        for context in (preceding, *_CONTEXTS):
            start, ids = self.ids(context), self.ids(context + text)
            if not start or self.chat.tokenizer.unk_token_id in start:
                continue
            if ids[: len(start)] == start:
                return ids[len(start) :]
        raise InvalidSample(
            "needs a space before it",
            f"text {text!r:.80}: the tokenizer can't encode it directly after {preceding[-20:]!r}; begin it "
            "with a space, or use another model",
        )

    def encode(self, sample: Sample, max_length: int | None = None) -> Sample:
        """The only one of the sample's `rows`; raises `InvalidSample` if there are several."""
        rows = self.rows(sample, max_length)
        if len(rows) == 1:
            return rows[0]
        raise InvalidSample(
            "several sequences",
            f"{_label(sample)}: the chat template of {self.name} changes earlier turns, so its {len(rows)} "
            "turns are separate sequences, which only training treats as one response",
        )

    def rows(self, sample: Sample, max_length: int | None = None) -> list[Sample]:
        """The sample with `tokens`, `action` and `tokenizer` of this encoding.

        Tokens of the same tokenizer are kept. Otherwise prompt and response are encoded separately, and an
        end token is appended unless there is one or the response was cut (`Sample.end`).
        If `meta["continuation"]` has the response as a list of turns, with user and tool messages between
        the assistant's, each turn is encoded separately, and the actions are the assistant's tokens with
        their end tokens. Per-token values of another encoding (`learn`, `behavior_logp`, kept sets,
        `token_reward`, versions) become unknown, unless both encodings are equal.

        If the template changes earlier turns once others follow, as those of reasoning models do, a
        conversation becomes several rows, as a fresh episode does: each row has its own context, and all have
        one `episode`, so that they count as one response.

        Raises `InvalidSample` with a `reason`: longer than `max_length` or the model's context, characters
        unknown to the tokenizer, an empty response, ids outside the model's vocabulary, words that the chat
        template doesn't show.
        """
        if sample.tokens is not None and sample.tokenizer == self.chat.fingerprint:
            rows = [sample]
        else:
            label = _label(sample)
            try:
                texts = self._texts(sample, label)
            except NotShown as error:
                raise InvalidSample(error.kind, f"{label}: {error}") from None
            rows = [self._row(sample, parts, label, is_last=parts is texts[-1]) for parts in texts]
        if len(rows) > 1:
            episode = sample.episode or f"turns of {_label(sample)}"
            for i, row in enumerate(rows):
                assert row.tokens is not None
                assert row.action is not None
                context = row.tokens[: int(row.action.argmax())] if i else None
                rows[i] = row.replace(episode=episode, context_tokens=context)
        limit = min(self.context, max_length or self.context)
        for row in rows:
            assert row.tokens is not None
            for name, ids in (("tokens", row.tokens), ("kept", row.kept)):
                if ids is not None and ids.max(initial=0) >= self.vocab_size:
                    raise InvalidSample(
                        "tokens outside the vocabulary",
                        f"{_label(row)}: {name}: expected ids below {self.vocab_size}, got {ids.max()} at "
                        f"index {ids.argmax()}; encode it with the model's own tokenizer",
                    )
            if len(row.tokens) > limit:
                raise InvalidSample(
                    "too long",
                    f"{_label(row)}: {len(row.tokens)} tokens, expected {limit} at most "
                    f"(the model's context is {self.context}, train.max_length {max_length})",
                )
        return rows

    def _row(self, sample: Sample, parts: list[tuple[str, bool]], label: str, *, is_last: bool) -> Sample:
        """The sample with the tokens of `parts`: (text, whether the policy chose it)."""
        pieces: list[list[int]] = []
        preceding = ""
        for text, chosen in parts:
            part = f"{label}: {'response' if chosen else 'prompt'}"
            try:
                ids = self.following(preceding, text)
            except InvalidSample as error:
                raise InvalidSample(error.reason, f"{part}: {error}") from None
            self._check_known(text, ids, part)
            pieces.append(ids)
            preceding += text
        pieces[0] = self._rendered_ids(parts[0][0], sample.prompt)
        is_closed = bool(pieces[-1]) and pieces[-1][-1] in self.eos_ids
        if is_last and not is_closed and sample.end != "cut":
            pieces[-1] += self.end_of(sample.prompt)
        if not pieces[-1]:
            raise InvalidSample("empty", f"{label}: the response has neither tokens nor an end token")
        tokens = np.concatenate([np.array(piece, np.int32) for piece in pieces])
        action = np.repeat([chosen for _, chosen in parts], [len(piece) for piece in pieces])
        stored = ((sample.tokens, tokens), (sample.action, action))
        if all(previous is not None and np.array_equal(previous, x) for previous, x in stored):
            return sample.replace(tokenizer=self.chat.fingerprint)
        version = sample.version if isinstance(sample.version, int) else UNKNOWN_VERSION
        return sample.replace(
            tokens=tokens,
            action=action,
            tokenizer=self.chat.fingerprint,
            learn=None,
            behavior_logp=None,
            kept=None,
            kept_count=None,
            token_reward=None,
            version=version,
        )

    def _texts(self, sample: Sample, label: str) -> list[list[tuple[str, bool]]]:
        """The rows of a sample as lists of parts: (text, whether the policy chose it)."""
        turns = sample.meta.get("continuation")
        if turns is not None:
            turns = check_turns(turns, f"{label}: meta.continuation")
        elif sample.context_tokens is not None or (
            sample.action is not None and not sample.action[sample.action.argmax() :].all()
        ):
            raise InvalidSample(
                "turns of another tokenizer",
                f"{label}: the response has tokens that the policy didn't choose, or another context than "
                "the prompt, and only its tokens, which are another tokenizer's, show which; use a model "
                "with that tokenizer, or remove the sample",
            )
        ends = [self.chat.tokenizer.convert_ids_to_tokens(i) for i in self.eos_ids]
        if self.chat.is_text(sample.prompt):
            if turns is not None:
                raise Refused(
                    f"{label}: the response is a conversation, but the prompt is plain text; give messages, "
                    "or set policy.chat.wrap"
                )
            response = self.chat.unended(sample.response, ends)
            self.chat.check_own(response, ends)
            return [[(self.render(sample.prompt), False), (response, True)]]
        history = self.chat.messages(sample.prompt)
        turns = turns or [{"role": "assistant", "content": sample.response}]
        rows: list[list[tuple[str, bool]]] = []
        so_far = ""
        for i, turn in enumerate(turns):  # encode each as if the policy wrote it now
            if turn["role"] == "assistant":
                closed = sample.end != "cut" or i < len(turns) - 1
                context, written = self.chat.reply(history, turn, ends, closed=closed)
                if rows and context.startswith(so_far):
                    rows[-1] += [(context[len(so_far) :], False), (written, True)]
                else:
                    rows.append([(context, False), (written, True)])
                so_far = context + written
            history = [*history, turn]
        return rows

    def end_of(self, prompt: Text) -> list[int]:
        """The end token of a response: the chat template's for messages, the first one for text."""
        if not self.chat.is_text(prompt) and self.chat.end_id is not None:
            return [self.chat.end_id]
        return list(self.eos_ids[:1])

    def _check_known(self, text: str, ids: list[int], label: str) -> None:
        """Raise `InvalidSample` for characters that become the unknown token."""
        unknown = self.chat.tokenizer.unk_token_id
        if unknown is None or unknown not in ids:
            return
        spelled = 0
        if not self.chat.tokenizer.split_special_tokens:
            spelled = text.count(self.chat.tokenizer.unk_token)
            text = text.replace(self.chat.tokenizer.unk_token, "")
        if ids.count(unknown) > spelled:
            bad = [repr(c) for c in dict.fromkeys(text) if unknown in self.ids(c)]
            shown = bad[:5] + ["…"] * (len(bad) > 5) or [f"{text:.20} without a space before it"]
            raise InvalidSample(
                "unknown characters",
                f"{label}: the tokenizer doesn't know {', '.join(shown)}; use a model with a larger "
                "vocabulary, or remove the sample",
            )


def _label(sample: Sample) -> str:
    """Name a sample in messages."""
    prompt = f"prompt {sample.prompt_id}"
    return prompt if sample.id is None else f"sample {sample.id} of {prompt}"
