"""The jobs of the panel, by jobs.toml: what is logged, by whom, with which rewards, which model learns."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agro.errors import Refused
from reproductions.panel.tasks import TASKS, Task, Writer

Data = Literal["groups", "one each", "pairs", "fresh"]  # what a job gives to train on
Rewards = Literal["right", "graded", "stars", "thumbs"]
START = Writer()  # stands for the model that training starts from


@dataclass(frozen=True)
class Model:
    """A new model: its size, and its class in transformers."""

    hidden: int = 96
    layers: int = 2
    family: Literal["llama", "gpt2", "gpt_neox"] = "llama"


@dataclass(frozen=True)
class Job:
    """One thing to learn.

    `teacher`: whom the start imitates, in `warm_up` updates. `authors`: who wrote the log, response by
    response in turn; `START` is the start itself, with the log-probs of its responses. `sizes`: the fewest
    and the most responses of a prompt. `equal`: share of groups whose rewards are equal. `noise`: standard
    deviation of what is added to a grade. `wrong`: share of 0/1 rewards or of judgments that are the wrong
    way round. `users`: how many rate, in turn; `lenience`: standard deviation of what each adds to
    all grades. `distinct`: how many prompts the log's near-copies are of. `kind`: what it gives to train on,
    in the words of the guide's table.
    """

    name: str
    about: str
    task: Task
    teacher: Writer
    data: Data = "groups"
    authors: tuple[Writer, ...] = (START,)
    rewards: Rewards = "right"
    model: Model = Model()
    prompts: int = 256  # in the log, or to sample from
    sizes: tuple[int, int] = (4, 4)
    equal: float = 0.0
    noise: float = 0.0
    wrong: float = 0.0
    users: int = 0
    lenience: float = 0.0
    distinct: int | None = None
    start: Path | None = None  # a model to begin with, in place of one that is made
    environment: bool = False
    warm_up: int = 300  # updates of imitation
    together: int = 64  # responses of such an update
    updates: int = 100
    groups: int = 8  # prompts an update
    max_new: int = 16  # tokens of a response, or of a turn
    kept: bool = False
    kind: str = ""

    @property
    def logs_start(self) -> bool:
        """Whether every response is the start's own, so that its log-probs are known."""
        return self.data != "fresh" and all(author is START for author in self.authors)

    def value(self, prompt: str, response: str) -> float:
        """What a held-out response counts: its grade where the log has grades, else whether it is right."""
        of_response = self.task.grade if self.rewards == "graded" else self.task.right
        return of_response(prompt, response)


def job_of(name: str, given: Mapping[str, Any]) -> Job:
    """Of a section of jobs.toml."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    if "authors" in values:
        values["authors"] = tuple(START if of == "start" else Writer(**of) for of in values["authors"])
    if "model" in values:
        values["model"] = Model(**values["model"])
    return Job(
        **{**values, "name": name, "task": TASKS[values["task"]], "teacher": Writer(**values["teacher"])}
    )


EVERY = [
    job_of(name, given)
    for name, given in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
]
JOBS = {job.name: job for job in EVERY}


def reward(prompts: Sequence[str], completions: Sequence[str], job: str, **columns: object) -> list[float]:
    """That of a job, as the library's users write it."""
    return [JOBS[job].value(p, text) for p, text in zip(prompts, completions, strict=True)]


def chosen(only: Sequence[str], known: Iterable[str], option: str) -> list[str]:
    """The names that are asked for, in their own order; all where none is."""
    names = list(known)
    for name in only:
        if name not in names:
            raise Refused(f"{option}: expected one of {', '.join(names)}; got {name}")
    return [name for name in names if name in only] if only else names
