"""What the log, the start and the trained model answered to the same few prompts, in side_by_side.json.

No number replaces reading: a model can rank logged responses well while what it writes is gibberish. Which
prompts are shown is decided by a hash of their ids, never by what was answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from agro.errors import Refused
from agro.io.files import write
from agro.io.terminal import cut, plain, visible
from agro.store.draw_rules import noise
from agro.types import Prompt, Sample

FILE = "side_by_side.json"
LONGEST = 4000  # characters of a text in the file
SIDES = ("log", "start", "trained")
Harmless = Annotated[str, AfterValidator(visible)]  # also where somebody changed the file


@dataclass(frozen=True)
class Answer:
    """A response, in which control characters are escapes, and its reward; None: unknown.

    `observations`: where an environment's turns stand in it, as [start, end] in characters.
    """

    response: Harmless
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
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


@dataclass(frozen=True)
class Row:
    """The answers to one prompt; None where there is none: `log` is the best of the log, where it has any."""

    prompt_id: Harmless
    prompt: Harmless
    log: Answer | None = None
    start: Answer | None = None
    trained: Answer | None = None


@dataclass(frozen=True)
class SideBySide:
    """Rows in the order of the hash. `held_out`: whether the prompts aren't trained on.

    `step`: of the trained model's answers; None before they were sampled.
    """

    rows: tuple[Row, ...]
    held_out: bool
    step: int | None = None

    @classmethod
    def start(cls, prompts: Iterable[Prompt], log: Mapping[str, Answer], *, held_out: bool) -> Self:
        """Without answers of a model. `log`: the best response to each prompt, by its id."""
        rows = (Row(p.id, cut(plain(p.text), LONGEST), log.get(p.id)) for p in prompts)
        return cls(tuple(rows), held_out)

    def answered(self, answers: Mapping[str, Answer], step: int) -> Self:
        """With a model's answers by prompt id: of the start where `step` is 0, else of the trained model."""
        rows = []
        for row in self.rows:
            answer = answers.get(row.prompt_id)
            rows.append(replace(row, trained=answer) if step else replace(row, start=answer))
        return replace(self, rows=tuple(rows), step=step or self.step)

    @property
    def sides(self) -> tuple[str, ...]:
        """Those that some row has."""
        return tuple(side for side in SIDES if any(getattr(row, side) for row in self.rows))

    @property
    def about(self) -> str:
        """Which prompts and responses these are."""
        kind = "held-out prompts" if self.held_out else "prompts of those that were trained on"
        models = "The start's responses are of step 0"
        if self.step is not None:
            models += f", the trained model's of step {self.step}, with the same random numbers"
        log = ". The log's is the one of the highest reward there" if "log" in self.sides else ""
        return (
            f"{len(self.rows)} {kind}, chosen by a hash of their ids and not by what was answered. "
            f"{models}{log}."
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, folder: Path) -> None:
        """Write the file of a run's folder, completely or not at all."""
        write(folder / FILE, json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> SideBySide | None:
        """Of a run; None where it has none. Raises `Refused` for a file that isn't what `save` writes."""
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            return FORM.validate_json(path.read_bytes(), strict=True)
        except ValidationError as error:
            [first, *_] = error.errors()
            expected = "expected responses side by side, as a run writes them"
            raise Refused(f"{path}: {expected}: {first['loc']}: {first['msg']}") from None


FORM = TypeAdapter(SideBySide)


def forget_after(folder: Path, step: int) -> None:
    """Drop the trained model's answers where they are of a later step, which is made again."""
    shown = SideBySide.load(folder)
    if shown is not None and (shown.step or 0) > step:
        rows = tuple(replace(row, trained=None) for row in shown.rows)
        replace(shown, rows=rows, step=None).save(folder)


def place(prompt_id: str) -> tuple[int, str]:
    """By which prompts are ordered, the first of which are shown."""
    return noise(0, 0, "side by side", prompt_id), prompt_id


def answers_of(samples: Iterable[Sample]) -> dict[str, Answer]:
    """By prompt id the first response."""
    responses: dict[str, dict[int, list[Sample]]] = {}
    for sample in samples:
        of_prompt = responses.setdefault(sample.prompt_id, {})
        of_prompt.setdefault(int(sample.meta["index"]), []).append(sample)
    return {key: Answer.of(found[min(found)]) for key, found in responses.items()}


def short_text(shown: SideBySide, rows: int, longest: int) -> list[str]:
    """Lines for the terminal: of the first rows, each text in one line."""
    lines = []
    for row in shown.rows[:rows]:
        lines.append(f"prompt   {_one_line(row.prompt, longest)}")
        for side in shown.sides:
            answer = getattr(row, side)
            if answer is not None:
                reward = "" if answer.reward is None else f"{answer.reward:g}: "
                lines.append(f"{side:<8} {reward}{_one_line(answer.response, longest) or '(empty)'}")
    return lines


def _one_line(text: str, longest: int) -> str:
    return cut(" ".join(text.split()), longest)
