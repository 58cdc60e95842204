"""One episode: the turns of a policy, what the environment says to them, how it ends, and the samples it leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from agro.encoding import Encoder
from agro.envs.protocol import Environment, Turn
from agro.rewards.worker import explain
from agro.rollout.transcript import Row, Transcript
from agro.strictjson import dumps
from agro.types import UNKNOWN_VERSION, Prompt, Sample


class Episode:
    """Play it with `turn` until that says it has ended; then `samples` are its rows.

    `finish` is "stop" (the environment said done), "length" (a turn was cut, or there was no room for another one:
    in the context, or under `max_turns`) or "error" (the environment raised; the reward stays unknown).
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
        """What the next turn reads."""
        return self.transcript.rows[-1].tokens

    def turn(
        self, tokens: list[int], logp: Sequence[float] | None, *, cut: bool, version: int = UNKNOWN_VERSION
    ) -> bool:
        """One turn of the policy, and the environment's answer to it. Whether another one follows."""
        self.transcript.act(tokens, None if logp is None else list(logp), version)
        self.sampled += len(tokens)
        text = self.encoder.decode(tokens)
        self.turns.append(text)
        said = (
            None
            if self.error
            else self._guarded(lambda: checked(self.environment.step(self.state, text), cut))
        )
        if said is None:
            self.finish = "error"
            return False
        self.rewards.append(said.reward)
        self.infos.append(dict(said.info))
        if cut or said.done:
            self.finish = "length" if cut else "stop"
            return False
        assert said.observation is not None
        if len(self.turns) < self.max_turns and self.transcript.observe(said.observation, said.role):
            return True
        self.finish = "length"
        return False

    def _guarded(self, call: Any) -> Any:
        """What `call` gives; where it raises, None and the cause in `error`."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 an environment is anyone's: its failure ends one episode, not the run
            self.error = f"environment {self.environment.name}: {explain(error, '')}"
            return None

    def reward(self) -> float | None:
        """The sum of what the environment gave; None where it left scoring to the configured reward, or failed."""
        known = [r for r in self.rewards if r is not None]
        if self.error is None and known and len(known) < len(self.rewards):
            self.error = (
                f"environment {self.environment.name}: a reward at {len(known)} of {len(self.rewards)} turns; "
                "expected one at each (0.0 where a turn earns nothing), or none"
            )
        return math.fsum(known) if known and self.error is None else None

    def samples(
        self, name: str, last_turn: str, meta: dict[str, Any], sampling: dict[str, Any]
    ) -> list[Sample]:
        """One sample, or several under the episode's `name` where a template rewrote history."""
        reward, rows = self.reward(), self.transcript.rows
        meta = {**self.prompt.columns, **meta, **self._outcome(last_turn)}
        episode = name if len(rows) > 1 else None
        return [self._sample(row, i, meta, reward, episode, sampling) for i, row in enumerate(rows)]

    def _outcome(self, last_turn: str) -> dict[str, Any]:
        """What `meta` says of how the episode went."""
        outcome = {
            "finish": self.finish,
            "turns": len(self.turns),
            "last_turn": last_turn,
            "tool_calls": sum("tool" in info for info in self.infos),
        }
        if any(self.infos):
            outcome["turn_info"] = self.infos
        if self.error:
            outcome["reward_error"] = self.error
        return outcome

    def _sample(
        self,
        row: Row,
        number: int,
        meta: dict[str, Any],
        reward: float | None,
        episode: str | None,
        sampling: dict[str, Any],
    ) -> Sample:
        versions = {v for v, action in zip(row.version, row.action, strict=True) if action}
        return Sample(
            prompt=self.prompt.text,
            prompt_id=self.prompt.id,
            response=self.encoder.decode(row.tokens[row.context :]),
            reward=reward,
            episode=episode,
            tokens=np.array(row.tokens),
            action=np.array(row.action),
            behavior_logp=None if np.isnan(row.logp).all() else np.array(row.logp),
            context_tokens=np.array(row.tokens[: row.context]) if number else None,
            tokenizer=self.encoder.fingerprint,
            meta=meta,
            sampling=sampling or None,
            version=versions.pop() if len(versions) == 1 else np.array(row.version),
            role="policy",
            source="policy",
        )


def checked(said: Any, cut: bool) -> Turn:
    """Raise unless it is a `Turn` with which the episode can go on."""
    if not isinstance(said, Turn):
        raise TypeError(f"step returned {said!r:.80}, expected agro.envs.Turn")
    if said.reward is not None and not (isinstance(said.reward, (int, float)) and math.isfinite(said.reward)):
        raise ValueError(f"reward: expected a finite number or None, got {said.reward!r:.80}")
    if said.observation is not None and not isinstance(said.observation, str):
        raise TypeError(f"observation: expected text or None, got {said.observation!r:.80}")
    (said.observation or "").encode()  # half of a surrogate pair has no tokens
    if not (said.done or cut) and not said.observation:
        raise ValueError("step was neither done nor gave an observation")
    dumps(dict(said.info), "info")
    return said
