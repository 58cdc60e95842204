"""From prompts to samples: a configured encoder, engine and, for episodes, environment. An episode's
reward is the environment's, or else that of its last turn.

An episode consists of tokens that the policy chose, and of tokens of the environment. Sampled tokens never
change; only observations are encoded. After a text prompt an observation is appended. Messages are rendered
by the chat template: if the conversation with the new message extends the previous text, the extension is
appended. A template that rewrites earlier turns (such as one that drops earlier reasoning) starts a new row,
whose context is the conversation as rendered now.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agro import config
from agro.config import SamplerConfig
from agro.errors import Refused, without_secrets
from agro.io import plugins
from agro.io.worker import explain
from agro.models.encoding import Encoder
from agro.models.policy import Policy
from agro.rewards import Reward, Score
from agro.rollout.engines import (
    Continuation,
    Engine,
    Request,
    called_with,
    check_section,
    declared,
    engine_of_user,
)
from agro.rollout.envs import Environment, checked
from agro.rollout.envs.process import load_environment
from agro.types import ROUNDING, UNKNOWN_VERSION, Messages, Prompt, Role, Sample, thought_in
from agro.types.kept_sets import ALL, Ids, flat

T = TypeVar("T")
# For the tokens that the policy chose, as in `Continuation`; None if unknown or not recorded.
LogProbs = Sequence[float] | None
Version = int | NDArray[np.int32]  # one for all tokens, or one for each
Kept = Sequence[Ids] | None  # for all tokens of a row, or for none


class EpisodeRow:
    """One sequence: `context` tokens, then actions and observations."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self.action: list[bool] = []
        self.logp: list[float] = []
        self.version: list[int] = []
        self.kept: list[Ids] | None = None  # for each token; None if not recorded
        self.context = len(tokens)
        self.observe(tokens)

    def observe(self, tokens: list[int]) -> None:
        """Append tokens of the context or the environment."""
        self._add(tokens, None, UNKNOWN_VERSION, None, action=False)

    def act(self, tokens: list[int], logp: LogProbs, version: Version, kept: Kept = None) -> None:
        """Append tokens that the policy chose."""
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
        """The row as sample `number` (from 0) of its episode; `fields`: others, which override the row's."""
        length, context = len(self.tokens), self.tokens[: self.context]
        if "response" not in fields:
            fields["response"] = encoder.decode(self.tokens[self.context :], context)
        # The spans of the environment's turns in the response: [start, end] in characters.
        observations, start = [], 0
        ends = [i for i in range(self.context + 1, length) if self.action[i] != self.action[i - 1]]
        for end in [*ends, length] if ends else ():
            stop = len(encoder.decode(self.tokens[self.context : end], context))
            if not self.action[end - 1]:
                observations.append([start, stop])
            start = stop
        versions = {v for v, action in zip(self.version, self.action, strict=True) if action}
        kept, kept_count = (None, None) if self.kept is None else flat(self.kept)
        defaults = {
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
        return Sample(**{**defaults, **fields})


class Transcript:
    """The rows of an episode, and the text or the messages that its next turn continues."""

    def __init__(self, encoder: Encoder, prompt: Prompt, ids: list[int]) -> None:
        """`ids`: the tokens of the prompt."""
        self.encoder = encoder
        self.rows = [EpisodeRow(ids)]
        self.messages: Messages | None = None
        if not encoder.chat.is_text(prompt.text):
            self.messages = list(encoder.chat.messages(prompt.text))
        self.text = self._opening = encoder.render(prompt.text)  # of the last row

    def act(self, tokens: list[int], logp: LogProbs, version: Version, kept: Kept = None) -> None:
        """Append a turn of the policy, including its end token."""
        self.rows[-1].act(tokens, logp, version, kept)
        written, self._end = self.encoder.turn(tokens)
        self.text += written
        if self.messages is not None:
            self.messages.append(self.encoder.chat.message(written, self._opening))

    def observe(self, observation: str, role: str) -> bool:
        """Append an observation; returns False, without a change, if it exceeds the model's context."""
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
        self.sampled = 0  # number of tokens
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
        """Play a turn of the policy and the environment's reply; returns whether another turn follows."""
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
        """Return the result of `call`; if it raises, None, with the cause in `error`."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 only this episode fails
            self.error = without_secrets(f"environment {self.environment.name}: {explain(error, '')}")
            return None

    def samples(
        self, name: str, last_turn: str, meta: dict[str, Any], sampling: dict[str, Any]
    ) -> list[Sample]:
        """One sample, or several under the episode's `name` if a template rewrote history.

        The reward is the sum of the environment's rewards; None if it returned none, or failed.
        """
        rewards = [r for r in self.rewards if r is not None]
        if self.error is None and rewards and len(rewards) < len(self.rewards):
            self.error = (
                f"environment {self.environment.name}: expected a reward at each turn (0.0 for a turn "
                f"that earns nothing) or at none, got a reward at {len(rewards)} of {len(self.rewards)} turns"
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


ATTRIBUTES = ("version", "measured", "check")  # required of an engine


@dataclass(eq=False)
class Rollout:
    """Samples responses. With an environment a response is an episode of at most `max_turns` turns."""

    encoder: Encoder
    engine: Engine
    environment: Environment | PlayingEnvironment | None = None
    max_turns: int = 1
    source: str = "policy"  # of its samples
    role: Role = "policy"  # of its samples
    marks: Mapping[str, Any] = field(default_factory=dict)  # added to the sampler's settings in `sampling`

    def __post_init__(self) -> None:
        self._name = uuid.uuid4().hex  # unique, since other runs have the same seeds and numbers

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        options: SamplerConfig,
        *,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
        skip: Collection[int] = (),
    ) -> Iterator[Sample]:
        """Sample `n` responses per prompt, without rewards; yields each when it finishes.

        `meta` of a sample contains the prompt's columns, "finish" ("stop": an end token or a stop text;
        "length"; "error": the environment failed), "thought" if a chat response has one ("open" or "closed")
        and "index", the number of the response: n · (number of the prompt) + (0 … n-1). Number and `seed`
        determine the noise. A stop text is removed from the text of a response, but not from its tokens. The
        model's context may end a response before `options.max_new`, with "length". An episode is one sample,
        or several if a chat template rewrites history.

        Raises `Refused` before any computation if a prompt leaves no room for a response in the model's
        context, and for an empty stop text or an option that the engine doesn't support.

        Args:
            numbers: of the prompts; None: from 0.
            skip: numbers of responses not to sample.
        """
        check_section("sampler", options, declared(self.engine), f"the engine {type(self.engine).__name__}")
        stops = {"sampler.stop": options.stop}
        if self.environment is not None:
            stops[f"environment {self.environment.name}: stop"] = self.environment.stop
        for name, texts in stops.items():
            if not all(texts):  # an empty one would end every response at its start
                raise Refused(f"{name}: expected texts that aren't empty, got {list(texts)!r}")
        prompt_of: dict[int, Prompt] = {}
        waiting: deque[Request] = deque()
        for number, prompt in zip(numbers or range(len(prompts)), prompts, strict=True):
            ids = self.encoder.checked_prompt(prompt)
            room = min(options.max_new, self.encoder.context - len(ids))
            for index in range(number * n, (number + 1) * n):
                if index not in skip:
                    prompt_of[index] = prompt
                    waiting.append(Request(index, ids, room))
        if self.environment is None:
            return self._responses(prompt_of, waiting, options, seed)
        if isinstance(self.environment, PlayingEnvironment):
            return self.environment.play(self, prompt_of, options, seed)
        return self._episodes(self.environment, prompt_of, waiting, options, seed)

    def _decode(self, waiting: deque[Request], sampler: SamplerConfig, seed: int) -> Iterator[Continuation]:
        """Run the engine. Raises `Refused` for results that violate `Engine`, since it may be a user's."""
        name, requested, answered = type(self.engine).__name__, len(waiting), 0
        with plugins.errors_of(self.engine.decode, f"engine {name}: decode"):
            for done in self.engine.decode(waiting, sampler, seed):
                if not isinstance(done, Continuation):
                    raise Refused(f"engine {name}: expected a Continuation, got {done!r:.80}")
                if problem := self._problem(done):
                    raise Refused(f"engine {name}: response {done.request.number}: expected {problem}")
                remaining = len(waiting)
                yield done
                answered += 1
                requested += len(waiting) - remaining  # the caller may have added some
        if answered != requested:
            raise Refused(f"engine {name} answered {answered} of {requested} requests")

    def _problem(self, done: Any) -> str:
        """What `Continuation` requires and this result violates, "" if nothing."""
        ids, logp, room, vocabulary = done.tokens, done.logp, done.request.room, self.encoder.vocab_size
        if not (isinstance(ids, np.ndarray) and isinstance(logp, np.ndarray)):
            kinds = f"{type(ids).__name__} and {type(logp).__name__}"
            return f"tokens and log-probs as NumPy arrays, got {kinds}"
        if not 1 <= len(ids) <= room:
            return f"1 to {room} tokens, got {len(ids)}"
        if logp.shape != ids.shape:
            return f"a log-prob for each of {len(ids)} tokens, got an array {list(logp.shape)}"
        if ids.min() < 0 or ids.max() >= vocabulary:
            return f"ids from 0 to {vocabulary - 1}, got {ids.min()} to {ids.max()}"
        if (logp > ROUNDING).any():
            return f"log-probs of at most 0, got {logp.max():g}"
        return ""

    def _responses(
        self, prompt_of: dict[int, Prompt], waiting: deque[Request], sampler: SamplerConfig, seed: int
    ) -> Iterator[Sample]:
        """Yield each response as a sample when it finishes."""
        sampling = recorded(sampler, seed) | dict(self.marks)
        for done in self._decode(waiting, sampler, seed):
            prompt, context = prompt_of[done.request.number], done.request.ids
            tokens = done.tokens.tolist()
            text, stopped = before_stop(self.encoder.decode(tokens, context), sampler.stop)
            is_complete = stopped or tokens[-1] in self.encoder.eos_ids
            meta = {
                **prompt.columns,
                "finish": "stop" if is_complete else "length",
                "index": done.request.number,
            }
            if not self.encoder.chat.is_text(prompt.text):  # the template may have opened a thought
                thought = thought_in(self.encoder.render(prompt.text), text)
                meta |= {"thought": thought} if thought else {}
            row = EpisodeRow(context)
            row.act(tokens, done.logp.tolist(), done.version, done.kept)
            yield row.sample(
                self.encoder,
                number=0,
                meta=meta,
                prompt=prompt.text,
                prompt_id=prompt.id,
                response=text,
                sampling=sampling | dict(done.sampling),
                role=self.role,
                source=self.source,
            )

    def _episodes(
        self,
        environment: Environment,
        prompt_of: dict[int, Prompt],
        waiting: deque[Request],
        sampler: SamplerConfig,
        seed: int,
    ) -> Iterator[Sample]:
        """Decode the turns of all episodes together, each as early as possible.

        No KV cache is kept between turns. An episode's noise continues across turns.
        """
        live: dict[int, Episode] = {}
        stops = tuple(dict.fromkeys((*sampler.stop, *environment.stop)))
        turn_sampler = sampler.model_copy(update={"stop": stops})
        for done in self._decode(waiting, turn_sampler, seed):
            number, tokens = done.request.number, done.tokens.tolist()
            episode = live.pop(number, None)
            if episode is None:
                episode = Episode(
                    environment, self.encoder, prompt_of[number], done.request.ids, self.max_turns
                )
            text = self.encoder.decode(tokens, done.request.ids)
            is_complete = tokens[-1] in self.encoder.eos_ids or before_stop(text, stops)[1]
            if episode.turn(
                tokens, done.logp.tolist(), cut=not is_complete, version=done.version, kept=done.kept
            ):
                live[number] = episode
                room = min(sampler.max_new, self.encoder.context - len(episode.ids))
                waiting.appendleft(Request(number, episode.ids, room, episode.sampled))
                continue
            last_turn = before_stop(episode.turns[-1], sampler.stop)[0]
            name = f"{self._name}-{seed}-{number}"
            sampling = recorded(turn_sampler, seed) | dict(self.marks) | dict(done.sampling)
            for sample in episode.samples(name, last_turn, {"index": number}, sampling):
                yield sample.replace(source=self.source, role=self.role)


@runtime_checkable
class PlayingEnvironment(Protocol):
    """An environment whose program decides when the policy is called, such as that of `harness:`."""

    name: str
    stop: tuple[str, ...]

    def play(
        self, rollout: Rollout, prompt_of: Mapping[int, Prompt], sampler: SamplerConfig, seed: int
    ) -> Iterator[Sample]:
        """Yield the samples of each response, an episode's consecutively. `prompt_of`: by response number."""
        ...


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text up to the first stop text, and whether there is one."""
    cuts = [text.index(stop) for stop in stops if stop in text]
    if not cuts:
        return text, False
    return text[: min(cuts)], True


def recorded(sampler: SamplerConfig, seed: int) -> dict[str, Any]:
    """The `sampling` of a sample: what determines its distribution, and the seed; an engine adds to it."""
    excluded = {"n", "batch", "keep_sets", "skip_layers"}
    return {**sampler.model_dump(mode="json", exclude=excluded), "seed": seed}


class EpisodeReward(Reward):
    """Uses the environment's rewards and errors, and scores the other episodes by `inner`.

    `inner` receives the last turn as the response, and as columns "transcript" (everything after the prompt),
    "turns", "tool_calls" and "turn_info". The rows of one episode share its score. The inherited
    `problem` reports nothing, since an environment may add missing columns.
    """

    def __init__(self, inner: Reward) -> None:
        self.inner = inner
        self.name = inner.name
        self.of_environment = False  # whether the environment gave one of the rewards

    @property
    def maximum(self) -> float | None:
        return self.inner.maximum

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        keys = [i if sample.episode is None else sample.episode for i, sample in enumerate(samples)]
        episodes: dict[Any, list[Sample]] = {}
        for key, sample in zip(keys, samples, strict=True):
            episodes.setdefault(key, []).append(sample)
        scores: dict[Any, Score] = {}
        unscored: dict[Any, Sample] = {}
        for key, rows in episodes.items():
            head = rows[0]
            if head.reward is not None or head.meta.get("reward_error") is not None:
                self.of_environment = True
                scores[key] = Score(head.reward, head.meta.get("reward_error"))
            else:
                transcript = "".join(row.response for row in rows)
                response = head.meta.get("last_turn", transcript)
                unscored[key] = head.replace(response=response, meta={**head.meta, "transcript": transcript})
        scores.update(zip(unscored, self.inner.score(list(unscored.values())), strict=True))
        return [scores[key] for key in keys]

    def close(self) -> None:
        self.inner.close()


def embedded(policy: Policy, version: int = -1, *, fused: bool = True) -> Engine:
    """An engine on the weights of `policy` in this process; `fused`: see `engine.fused`."""
    from agro.rollout.engines.hf import HF

    return HF(policy, version, fused=fused)


def load_engine(
    settings: config.EngineConfig, policy: Policy, say: Callable[[str], None], version: int = -1
) -> Engine:
    """Make the configured engine: on the weights of `policy` in this process, on a server that is started for
    it, on running servers, or a user's.

    `say` reports servers that are dropped or used again. `version`: of the weights of `policy`; servers have
    none before the first push.
    """
    if settings.kind == "hf":
        return embedded(policy, version, fused=settings.fused)
    if settings.uses_servers:
        from agro.rollout.engines.server import VLLM, Server, sleep_level

        if settings.kind == "vllm":
            return VLLM(settings, policy, say)
        return Server(settings, policy.encoder, say=say, level=sleep_level(settings, policy))
    make = engine_of_user(settings.kind)
    arguments = (policy, version) if "shares_weights" in declared(make) else (policy.encoder, say)
    with plugins.errors_of(make, called_with(settings)):
        engine = make(*arguments, **settings.options)
    missing = [name for name in ATTRIBUTES if not hasattr(engine, name)]
    if missing:
        raise Refused(
            f"engine.kind: {settings.kind}: expected the attributes of agro.rollout.engines.Engine, got "
            f"none called {', '.join(missing)}. What to do: set them in its constructor"
        )
    return engine


def load_rollout(
    encoder: Encoder,
    engine: Engine,
    environment: config.EnvironmentConfig | None = None,
    source: str = "policy",
) -> Rollout:
    """Make a rollout. Raises `Refused` if the environment can't be created."""
    if environment is None:
        return Rollout(encoder, engine, source=source)
    return Rollout(encoder, engine, load_environment(environment), environment.max_turns, source)
