"""Responses in a run's held_out.jsonl: the log's best ones, then those of evaluations.

They are to held-out prompts, or where none are held out to some that were trained on; unscored there (reward
None). No number replaces reading: a model can rank logged responses well while what it writes is gibberish.
Which prompts are kept, and shown side by side, is decided by a hash of their ids, never by what was answered.
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
KEPT = 32  # prompts whose responses are kept
LONGEST = 4000  # characters of a response in the file


@dataclass(frozen=True)
class Answer:
    """A response, in which control characters are escapes, and its reward; None: unknown.

    `observations`: where an environment's turns stand in it, as [start, end] in characters.
    """

    response: str
    reward: float | None = None
    observations: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """Of a sample, or of those of an episode: all that follows its prompt, with the reward of its end."""
        parts = [""]
        for sample in samples:
            first, *others = response_parts(sample.response, sample.meta.get("observations"))
            parts = [*parts[:-1], parts[-1] + first, *others]
        ends, room = [0], LONGEST
        for part in parts:
            ends.append(ends[-1] + len(visible(part[:room])))
            room -= len(part[:room])
        places = [[ends[i], ends[i + 1]] for i in range(1, len(parts), 2)]
        return cls(cut("".join(parts), LONGEST), samples[-1].reward, places)

    @property
    def parts(self) -> list[str]:
        return response_parts(self.response, self.observations)


def response_parts(response: str, observations: Any) -> list[str]:
    """A response in turns: the policy's, the environment's, the policy's, …; an odd number of them.

    `observations`: `meta["observations"]` of a sample, as `Episode` writes it, or None. Anything else under
    this name is not ours, and the response one part.
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
    """By which prompts are ordered, the first of which are kept."""
    return noise(0, 0, "side by side", prompt_id), prompt_id


Response = Sequence[Sample]  # one, or those of an episode


def first_responses(samples: Iterable[Sample]) -> list[Response]:
    """To each prompt the one of the lowest number."""
    numbered: dict[str, dict[int, list[Sample]]] = {}
    for sample in samples:
        of_prompt = numbered.setdefault(sample.prompt_id, {})
        of_prompt.setdefault(int(sample.meta["index"]), []).append(sample)
    return [of_prompt[min(of_prompt)] for of_prompt in numbered.values()]


def best_of_log(store: Store, run: str, prompt_ids: Iterable[str]) -> list[Response]:
    """To each prompt the one of the highest known reward, the first of equals; without rewards the one that
    was preferred most often. Without what `run` itself sampled."""
    best: list[Response] = []
    for prompt_id in prompt_ids:
        made = {s.id for s in store.samples(prompt_id=prompt_id, run=run, skip_damaged=True)}
        samples = [s for s in store.samples(prompt_id=prompt_id, skip_damaged=True) if s.id not in made]
        scored = [s for s in samples if s.reward is not None]
        chosen = max(scored, key=lambda s: s.reward or 0.0, default=None)
        if chosen is None:
            by_id = {sample.id: sample for sample in samples if sample.id is not None}
            wins = Counter(p.winner for p in store.pairs(by_id) if not p.is_tie and p.winner in by_id)
            chosen = by_id[wins.most_common(1)[0][0]] if wins else None
        if chosen is not None:
            episode = chosen.episode
            best.append([chosen] if episode is None else [s for s in samples if s.episode == episode])
    return best


def records(responses: Iterable[Response]) -> list[dict[str, Any]]:
    """Those to the first prompts by their `place`, as the file has them."""
    rows = []
    for response in islice(sorted(responses, key=lambda response: place(response[0].prompt_id)), KEPT):
        first = response[0]
        row = {"prompt_id": first.prompt_id, "prompt": first.prompt, "answer": first.meta.get("answer")}
        rows.append(row | asdict(Answer.of(response)))
    return rows


@dataclass
class PromptResponses:
    """A prompt with its right answer where that is known, the response of each evaluation that has one, by
    step, and the log's best one."""

    prompt_id: str
    prompt: Text
    answer: Any = None
    responses: dict[int, Answer] = field(default_factory=dict)
    log: Answer | None = None

    @property
    def text(self) -> str:
        return cut(plain(self.prompt), LONGEST)


def held_out_responses(folder: Path) -> list[PromptResponses]:
    """The prompts of a run's held_out.jsonl by their `place`. Raises `Refused` naming HELD_OUT:LINE."""
    path = folder / HELD_OUT
    found: dict[str, PromptResponses] = {}
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # what has no newline is torn
    for number, line in enumerate(lines, 1):
        try:
            row = loads(line)
            for r in row["responses"]:
                reward = None if r["reward"] is None else float(r["reward"])
                if reward is not None and not isfinite(reward):
                    raise ValueError(f"the reward {reward}")
                answer = Answer(visible(str(r["response"])), reward, r.get("observations", []))
                key = visible(str(r["prompt_id"]))
                plain(r["prompt"])  # raises where it isn't one
                prompt = found.setdefault(key, PromptResponses(key, r["prompt"], r.get("answer")))
                if row.get("log"):
                    prompt.log = answer
                else:
                    prompt.responses[int(row["step"])] = answer
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise Refused(f"{path}:{number}: expected the responses of an evaluation: {error}") from None
    return sorted(found.values(), key=lambda prompt: place(prompt.prompt_id))


def chosen(prompts: int, config: RunConfig) -> str:
    """Which prompts these are."""
    is_held_out = config.data.eval_prompts is not None or config.data.hold_out
    kind = "held-out prompts" if is_held_out else "prompts of those that were trained on"
    return f"{prompts} {kind}, chosen by a hash of their ids and not by what was answered"


OF_LOG = "The log's is the best there, by reward or by preference."


@dataclass(frozen=True)
class SideBySide:
    """The first prompts by their `place`. `step`: of the trained model's answers; None before any."""

    prompts: list[PromptResponses]
    chosen: str
    step: int | None = None

    @classmethod
    def of(cls, folder: Path, config: RunConfig) -> Self | None:
        """Of a run; None where it shows none."""
        shown = held_out_responses(folder)[: config.evaluate.side_by_side]
        if not shown:
            return None
        step = max((step for prompt in shown for step in prompt.responses), default=0) or None
        return cls(shown, chosen(len(shown), config), step)

    def answers(self, prompt: PromptResponses) -> dict[str, Answer | None]:
        """The log's best one and both models'; None where there is none."""
        trained = None if self.step is None else prompt.responses.get(self.step)
        return {"log": prompt.log, "start": prompt.responses.get(0), "trained": trained}

    @property
    def about(self) -> str:
        """Which prompts and responses these are."""
        said = f"{self.chosen}."
        if any(0 in prompt.responses for prompt in self.prompts):
            both = f", the trained model's of step {self.step}, with the same random numbers"
            said += f" The start's responses are of step 0{'' if self.step is None else both}."
        elif self.step is not None:
            said += f" The trained model's responses are of step {self.step}."
        return said + f" {OF_LOG}" * any(prompt.log for prompt in self.prompts)

    def to_json(self) -> dict[str, Any]:
        rows = []
        for prompt in self.prompts:
            sides = {side: answer and asdict(answer) for side, answer in self.answers(prompt).items()}
            rows.append({"prompt_id": prompt.prompt_id, "prompt": prompt.text, **sides})
        return {"about": self.about, "step": self.step, "rows": rows}


def short_text(shown: SideBySide, prompts: int, longest: int) -> list[str]:
    """Lines for the terminal: of the first prompts, each text in one line."""
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
