"""Responses in a run's held_out.jsonl, to read side by side: the log's best ones, then those of evaluations.

They answer held-out prompts, or without any, some that were trained on, unscored then (reward None). No
number replaces reading: a model can rank logged responses well and still write gibberish. A hash of their ids
selects the prompts that are stored and shown, whatever the responses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Self

from agro.config import RunConfig
from agro.errors import Refused
from agro.io.strictjson import loads
from agro.io.terminal import cut, plain, visible
from agro.store import Store
from agro.store.draw_rules import noise
from agro.types import Sample, Text

HELD_OUT = "held_out.jsonl"
KEPT = 32  # prompts whose responses are stored
LONGEST = 4000  # characters of a response in the file


@dataclass(frozen=True)
class Answer:
    """A response, with control characters escaped, and its reward; None if unknown.

    `observations`: the spans of an environment's turns, as [start, end] in characters.
    """

    response: str
    reward: float | None = None
    observations: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """The answer of a sample or of an episode: everything after its prompt, with the last reward."""
        parts = [""]
        for sample in samples:
            opening, *more = response_parts(sample.response, sample.meta.get("observations"))
            parts = [*parts[:-1], parts[-1] + opening, *more]
        ends, room = [0], LONGEST
        for part in parts:
            ends.append(ends[-1] + len(visible(part[:room])))
            room -= len(part[:room])
        spans = [[ends[i], ends[i + 1]] for i in range(1, len(parts), 2)]
        return cls(cut("".join(parts), LONGEST), samples[-1].reward, spans)

    @property
    def parts(self) -> list[str]:
        return response_parts(self.response, self.observations)


def response_parts(response: str, observations: Any) -> list[str]:
    """Split a response into turns: the policy's, the environment's, the policy's, …; an odd number of them.

    `observations`: `meta["observations"]` of a sample, as `Episode` writes it, or None. For anything else,
    which another program wrote, the response is one part.
    """
    try:
        ends = [min(end, len(response)) for start, end in observations or () for end in (start, end)]
    except (TypeError, ValueError):
        ends = []
    ends = [0, *ends, len(response)]
    if ends != sorted(ends):
        return [response]
    return [response[start:end] for start, end in pairwise(ends)]


def place(prompt_id: str) -> tuple[int, str]:
    """The sort key of prompts; the responses to the first ones are stored."""
    return noise(0, 0, "side by side", prompt_id), prompt_id


Response = Sequence[Sample]  # one sample, or those of an episode


def first_responses(samples: Iterable[Sample]) -> list[Response]:
    """The response with the lowest index to each prompt."""
    numbered: dict[str, dict[int, list[Sample]]] = {}
    for sample in samples:
        indexed = numbered.setdefault(sample.prompt_id, {})
        indexed.setdefault(int(sample.meta["index"]), []).append(sample)
    return [indexed[min(indexed)] for indexed in numbered.values()]


def best_of_log(store: Store, run: str, prompt_ids: Iterable[str]) -> list[Response]:
    """The response to each prompt with the highest known reward, the first of equals; without rewards the one
    preferred most often. What `run` itself sampled is excluded."""
    best: list[Response] = []
    for prompt_id in prompt_ids:
        fresh_ids = {s.id for s in store.samples(prompt_id=prompt_id, run=run, skip_damaged=True)}
        samples = [s for s in store.samples(prompt_id=prompt_id, skip_damaged=True) if s.id not in fresh_ids]
        scored = [s for s in samples if s.reward is not None]
        chosen = max(scored, key=lambda s: s.reward or 0.0, default=None)
        if chosen is None:
            stored = {sample.id: sample for sample in samples if sample.id is not None}
            wins = Counter(p.winner for p in store.pairs(stored) if not p.is_tie and p.winner in stored)
            chosen = stored[wins.most_common(1)[0][0]] if wins else None
        if chosen is not None:
            episode = chosen.episode
            best.append([chosen] if episode is None else [s for s in samples if s.episode == episode])
    return best


def records(responses: Iterable[Response]) -> list[dict[str, Any]]:
    """The responses to the first prompts by `place`, as rows of the file."""
    rows = []
    for response in islice(sorted(responses, key=lambda response: place(response[0].prompt_id)), KEPT):
        sample = response[0]
        row = {"prompt_id": sample.prompt_id, "prompt": sample.prompt, "answer": sample.meta.get("answer")}
        rows.append(row | asdict(Answer.of(response)))
    return rows


@dataclass
class PromptResponses:
    """A prompt with its reference answer if known, the responses of evaluations by step, and the log's best
    one."""

    prompt_id: str
    prompt: Text
    answer: Any = None
    responses: dict[int, Answer] = field(default_factory=dict)
    log: Answer | None = None

    @property
    def text(self) -> str:
        return cut(plain(self.prompt), LONGEST)


def held_out_responses(folder: Path) -> list[PromptResponses]:
    """The prompts of a run's held_out.jsonl by `place`. Raises `Refused` with HELD_OUT:LINE."""
    path = folder / HELD_OUT
    prompts: dict[str, PromptResponses] = {}
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # a line without newline is torn
    for number, line in enumerate(lines, 1):
        try:
            row = loads(line)
            for r in row["responses"]:
                reward = None if r["reward"] is None else float(r["reward"])
                if reward is not None and not isfinite(reward):
                    raise ValueError(f"the reward {reward}")
                answer = Answer(visible(str(r["response"])), reward, r.get("observations", []))
                key = visible(str(r["prompt_id"]))
                plain(r["prompt"])  # raises if it isn't one
                prompt = prompts.setdefault(key, PromptResponses(key, r["prompt"], r.get("answer")))
                if row.get("log"):
                    prompt.log = answer
                else:
                    prompt.responses[int(row["step"])] = answer
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise Refused(f"{path}:{number}: expected the responses of an evaluation: {error}") from None
    return sorted(prompts.values(), key=lambda prompt: place(prompt.prompt_id))


def chosen(prompts: int, config: RunConfig) -> str:
    """A description of the prompts."""
    is_held_out = config.data.eval_prompts is not None or config.data.hold_out
    kind = "held-out prompts" if is_held_out else "prompts of those that were trained on"
    return f"{prompts} {kind}, chosen by a hash of their ids and not by what was answered"


OF_LOG = "The log's is the best there, by reward or by preference."


@dataclass(frozen=True)
class SideBySide:
    """The first prompts by `place`. `step`: that of the trained model's answers; None before any."""

    prompts: list[PromptResponses]
    chosen: str
    step: int | None = None

    @classmethod
    def of(cls, folder: Path, config: RunConfig) -> Self | None:
        """The prompts of a run; None if it shows none."""
        shown = held_out_responses(folder)[: config.evaluate.side_by_side]
        if not shown:
            return None
        step = max((step for prompt in shown for step in prompt.responses), default=0) or None
        return cls(shown, chosen(len(shown), config), step)

    def answers(self, prompt: PromptResponses) -> dict[str, Answer | None]:
        """The log's best answer and both models' answers; None for a missing one."""
        trained = None if self.step is None else prompt.responses.get(self.step)
        return {"log": prompt.log, "start": prompt.responses.get(0), "trained": trained}

    @property
    def about(self) -> str:
        """A description of the prompts and responses."""
        text = f"{self.chosen}."
        if any(0 in prompt.responses for prompt in self.prompts):
            both = f", the trained model's of step {self.step}, with the same random numbers"
            text += f" The start's responses are of step 0{'' if self.step is None else both}."
        elif self.step is not None:
            text += f" The trained model's responses are of step {self.step}."
        return text + f" {OF_LOG}" * any(prompt.log for prompt in self.prompts)

    def to_json(self) -> dict[str, Any]:
        rows = []
        for prompt in self.prompts:
            sides = {side: answer and asdict(answer) for side, answer in self.answers(prompt).items()}
            rows.append({"prompt_id": prompt.prompt_id, "prompt": prompt.text, **sides})
        return {"about": self.about, "step": self.step, "rows": rows}


def short_text(shown: SideBySide, prompts: int, longest: int) -> list[str]:
    """Lines for the terminal with the first prompts and their responses, each in one line."""
    lines = []
    for prompt in shown.prompts[:prompts]:
        lines.append(f"prompt   {_one_line(prompt.text, longest)}")
        for side, answer in shown.answers(prompt).items():
            if answer is not None:
                reward = "" if answer.reward is None else f"{answer.reward:g}: "
                lines.append(f"{side:<8} {reward}{_one_line(answer.response, longest) or '(empty)'}")
    return lines


def _one_line(text: str, longest: int) -> str:
    return cut(" ".join(text.split()), longest)
