"""One episode: the turns of a policy, the environment's replies, how it ends, and its samples. A teacher's
turns make one too.

The tokens of an episode: those that the policy chose, and those of the environment.

Sampled tokens never change; only observations are encoded. An observation is appended to a text prompt.
Messages are rendered by the chat template: if the conversation with the new message extends the previous
text, the extension is appended. A template that rewrites earlier turns (such as one that drops earlier
reasoning) starts a new row, whose context is the conversation as rendered now.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agro.errors import Refused, without_secrets
from agro.io.worker import explain
from agro.models.encoding import Encoder
from agro.rollout.envs import Environment, checked
from agro.types import UNKNOWN_VERSION, Messages, Prompt, Sample, thought_in
from agro.types.kept_sets import ALL, Ids, flat

T = TypeVar("T")
# Of the tokens that the policy chose, as in `Continuation`; None where they aren't known, or recorded.
LogProbs = Sequence[float] | None
Version = int | NDArray[np.int32]  # of all, or of each
Kept = Sequence[Ids] | None  # of all of a row, or of none


class EpisodeRow:
    """One sequence: a context, then actions and observations. `context`: tokens before the first action."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self.action: list[bool] = []
        self.logp: list[float] = []
        self.version: list[int] = []
        self.kept: list[Ids] | None = None  # of each token; None where they aren't recorded
        self.context = len(tokens)
        self.observe(tokens)

    def observe(self, tokens: list[int]) -> None:
        """Tokens of the context or the environment."""
        self._add(tokens, None, UNKNOWN_VERSION, None, action=False)

    def act(self, tokens: list[int], logp: LogProbs, version: Version, kept: Kept = None) -> None:
        """Tokens that the policy chose."""
        if kept is not None and self.kept is None:
            self.kept = [ALL] * len(self.tokens)
        self._add(tokens, logp, version, kept, action=True)

    def _add(self, tokens: list[int], logp: LogProbs, version: Version, kept: Kept, *, action: bool) -> None:
        count = len(tokens)
        self.tokens = self.tokens + tokens  # a new list: an engine may still use the old one
        self.action += [action] * count
        self.logp += logp or [math.nan] * count
        self.version += np.broadcast_to(version, count).tolist()
        if self.kept is not None:
            self.kept += kept or [ALL] * count

    def sample(self, encoder: Encoder, *, number: int, meta: dict[str, Any], **fields: Any) -> Sample:
        """The row as sample `number` of its episode, from 0; `fields`: those that it doesn't know."""
        length, context = len(self.tokens), self.tokens[: self.context]
        if "response" not in fields:
            fields["response"] = encoder.decode(self.tokens[self.context :], context)
        # Where the environment's turns stand in the response: [start, end] in characters.
        observations, start = [], 0
        ends = [i for i in range(self.context + 1, length) if self.action[i] != self.action[i - 1]]
        for end in [*ends, length] if ends else ():
            stop = len(encoder.decode(self.tokens[self.context : end], context))
            if not self.action[end - 1]:
                observations.append([start, stop])
            start = stop
        versions = {v for v, action in zip(self.version, self.action, strict=True) if action}
        kept, kept_count = (None, None) if self.kept is None else flat(self.kept)
        known = {
            "tokens": np.array(self.tokens),
            "action": np.array(self.action),
            "behavior_logp": None if np.isnan(self.logp).all() else np.array(self.logp),
            "context_tokens": np.array(context) if number else None,
            "tokenizer": encoder.fingerprint,
            "kept": kept,
            "kept_count": kept_count,
            "meta": {**meta, "observations": observations} if observations else meta,
            "version": versions.pop() if len(versions) == 1 else np.array(self.version),
            "role": "policy",
            "source": "policy",
        }
        return Sample(**{**known, **fields})


class Transcript:
    """The rows of an episode, and the text or the messages that its next turn goes on from."""

    def __init__(self, encoder: Encoder, prompt: Prompt, ids: list[int]) -> None:
        """`ids` are those of the prompt."""
        self.encoder = encoder
        self.rows = [EpisodeRow(ids)]
        self.messages: Messages | None = None
        if not encoder.chat.is_text(prompt.text):
            self.messages = list(encoder.chat.messages(prompt.text))
        self.text = self._opening = encoder.render(prompt.text)  # of the last row

    def act(self, tokens: list[int], logp: LogProbs, version: Version, kept: Kept = None) -> None:
        """A turn of the policy, its end token included."""
        self.rows[-1].act(tokens, logp, version, kept)
        decode = self.encoder.chat.tokenizer.decode
        is_closed = tokens[-1] in self.encoder.eos_ids
        written = decode(tokens[:-1] if is_closed else tokens, clean_up_tokenization_spaces=False)
        self.text += written
        self._end = decode(tokens[-1:]) if is_closed else ""
        if self.messages is not None:
            self.messages.append(self.encoder.chat.message(written, self._opening))

    def observe(self, observation: str, role: str) -> bool:
        """Append an observation. False, without a change, if it doesn't fit into the model's context."""
        row, so_far = self.rows[-1], self.text + self._end
        text = so_far + observation
        message = {"role": role, "content": observation}
        if self.messages is not None:
            try:
                text = self.encoder.render([*self.messages, message])
            except Refused as error:
                raise Refused(
                    f"environment: a message of role {role!r}: {error}; or set another role "
                    "(environment.options.role)"
                ) from None
        new = not text.startswith(so_far)
        ids = self.encoder.ids(text) if new else self.encoder.following(so_far, text[len(so_far) :])
        if (0 if new else len(row.tokens)) + len(ids) >= self.encoder.context:
            return False
        if self.messages is not None:
            self.messages.append(message)
        self.text = self._opening = text
        if new:
            self.rows.append(EpisodeRow(ids))
        else:
            row.observe(ids)
        return True


class Episode:
    """Call `turn` until it returns False; then `samples` returns the episode.

    `finish` is "stop" (the environment is done), "length" (a turn was truncated, or another one would exceed
    the context or `max_turns`) or "error" (the environment raised an error; the reward is unknown).
    """

    def __init__(
        self, environment: Environment, encoder: Encoder, prompt: Prompt, ids: list[int], max_turns: int
    ) -> None:
        self.environment, self.encoder, self.prompt, self.max_turns = environment, encoder, prompt, max_turns
        self.transcript = Transcript(encoder, prompt, ids)
        self.turns: list[str] = []
        self.rewards: list[float | None] = []
        self.infos: list[dict[str, Any]] = []
        self.sampled = 0  # tokens
        self.finish = ""
        self.error: str | None = None
        self.state = self._guarded(lambda: environment.reset(prompt))

    @property
    def ids(self) -> list[int]:
        """The context of the next turn."""
        return self.transcript.rows[-1].tokens

    def turn(
        self,
        tokens: list[int],
        logp: LogProbs,
        *,
        cut: bool,
        version: Version = UNKNOWN_VERSION,
        kept: Kept = None,
    ) -> bool:
        """One turn of the policy, and the environment's reply; returns whether another turn follows."""
        text = self.encoder.decode(tokens, self.ids)
        self.transcript.act(tokens, logp, version, kept)
        self.sampled += len(tokens)
        self.turns.append(text)
        reply = None
        if not self.error:
            reply = self._guarded(lambda: checked(self.environment.step(self.state, text), cut))
        if reply is None:
            self.finish = "error"
            return False
        self.rewards.append(reply.reward)
        self.infos.append(dict(reply.info))
        if cut or reply.done:
            self.finish = "length" if cut else "stop"
            return False
        assert reply.observation is not None
        if len(self.turns) < self.max_turns and self.transcript.observe(reply.observation, reply.role):
            return True
        self.finish = "length"
        return False

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """The result of `call`; where it raises, None, with the cause in `error`."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 only this episode fails
            self.error = without_secrets(f"environment {self.environment.name}: {explain(error, '')}")
            return None

    def samples(
        self, name: str, last_turn: str, meta: dict[str, Any], sampling: dict[str, Any]
    ) -> list[Sample]:
        """One sample, or several under the episode's `name` where a template rewrote history.

        The reward is the sum of the environment's; None where it returned none, or failed.
        """
        rewards = [r for r in self.rewards if r is not None]
        if self.error is None and rewards and len(rewards) < len(self.rewards):
            self.error = (
                f"environment {self.environment.name}: expected a reward at each turn (0.0 where a turn "
                f"earns nothing) or at none, got a reward at {len(rewards)} of {len(self.rewards)} turns"
            )
        meta = {
            **self.prompt.columns,
            **meta,
            "finish": self.finish,
            "turns": len(self.turns),
            "last_turn": last_turn,
            "tool_calls": sum("tool" in info for info in self.infos),
        }
        if any(self.infos):
            meta["turn_info"] = self.infos
        if self.error:
            meta["reward_error"] = self.error
        if thought := thought_in(self.encoder.render(self.prompt.text), last_turn):
            meta["thought"] = thought
        rows = self.transcript.rows
        shared: dict[str, Any] = {
            "prompt": self.prompt.text,
            "prompt_id": self.prompt.id,
            "reward": math.fsum(rewards) if rewards and self.error is None else None,
            "episode": name if len(rows) > 1 else None,
            "sampling": sampling or None,
        }
        return [row.sample(self.encoder, number=i, meta=meta, **shared) for i, row in enumerate(rows)]


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
