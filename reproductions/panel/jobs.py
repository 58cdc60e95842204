"""The jobs of the panel: what is logged, by whom, with which rewards, and which model learns from it.

A third of the jobs is `kept` for the last look: defaults are chosen on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
    all grades. `distinct`: how many prompts the log's near-copies are of.
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

    @property
    def logs_start(self) -> bool:
        """Whether every response is the start's own, so that its log-probs are known."""
        return self.data != "fresh" and all(author is START for author in self.authors)

    def value(self, prompt: str, response: str) -> float:
        """What a held-out response counts: its grade where the log has grades, else whether it is right."""
        of_response = self.task.grade if self.rewards == "graded" else self.task.right
        return of_response(prompt, response)


def _job(name: str, task: str, teacher: Writer, about: str, **more: object) -> Job:
    return Job(name, about, TASKS[task], teacher, **more)  # type: ignore[arg-type]


EVERY = [
    _job("own", "sort", Writer(slip=0.2), "the start's log, 0/1 rewards", model=Model(128, 1)),
    _job(
        "graded",
        "double",
        Writer(slip=0.16),
        "three authors, noisy grades, groups of 2 to 8",
        authors=(START, Writer(slip=0.3), Writer(swap=0.4)),
        rewards="graded",
        sizes=(2, 8),
        equal=0.2,
        noise=0.15,
    ),
    _job(
        "better",
        "reverse",
        Writer(slip=0.2),
        "a better author, 0/1 rewards",
        authors=(Writer(slip=0.02, drop=0.02),),
    ),
    _job(
        "worse",
        "next letter",
        Writer(slip=0.22),
        "a worse author, right 16 times in 1,024",
        authors=(Writer(slip=0.65),),
        model=Model(64),
    ),
    _job(
        "worse, graded",
        "count",
        Writer(slip=0.15),
        "a worse author, graded",
        authors=(Writer(slip=0.5, swap=0.1),),
        rewards="graded",
        kept=True,
    ),
    _job(
        "long",
        "rounds",
        Writer(slip=0.04),
        "about 53 tokens, right one time in seven",
        sizes=(8, 8),
        groups=4,
        max_new=56,
        model=Model(64),
    ),
    _job(
        "pairs",
        "brackets",
        Writer(slip=0.2),
        "250 noisy judged pairs",
        data="pairs",
        prompts=250,
        sizes=(2, 2),
        wrong=0.15,
        groups=16,
        model=Model(64),
    ),
    _job(
        "stars",
        "merge",
        Writer(slip=0.16),
        "one rating a prompt, from 1 to 5",
        data="one each",
        rewards="stars",
        prompts=1024,
        sizes=(1, 1),
        noise=0.1,
        groups=32,
    ),
    _job(
        "users",
        "weave",
        Writer(slip=0.16),
        "the same of 64 users, some more lenient",
        data="one each",
        rewards="stars",
        prompts=1024,
        sizes=(1, 1),
        noise=0.1,
        users=64,
        lenience=0.25,
        groups=32,
    ),
    _job("fresh", "no repeats", Writer(slip=0.2), "fresh samples", data="fresh", model=Model(96, 2)),
    _job(
        "mislabeled",
        "largest",
        Writer(slip=0.4),
        "two authors, 5% of the rewards wrong",
        authors=(START, Writer(slip=0.2)),
        wrong=0.05,
    ),
    _job(
        "mislabeled more",
        "odd ones",
        Writer(slip=0.3),
        "two authors, 15% of the 0/1 rewards are wrong",
        authors=(START, Writer(slip=0.1, drop=0.1)),
        wrong=0.15,
        kept=True,
    ),
    _job(
        "very long",
        "onward",
        Writer(slip=0.002),
        "200 tokens, after which a response is cut off; right one time in thirty",
        prompts=128,
        warm_up=100,
        groups=4,
        max_new=200,
        model=Model(64, 1),
        updates=80,
    ),
    _job(
        "GPT-2",
        "other case",
        Writer(slip=0.18),
        "another model family",
        model=Model(96, 2, "gpt2"),
    ),
    _job(
        "near-copies",
        "after the tag",
        Writer(slip=0.22),
        "three prompts in 85 near-copies each",
        distinct=3,
        prompts=255,
    ),
    _job(
        "turns",
        "product",
        Writer(slip=0.05),
        "episodes with a calculator",
        environment=True,
        max_new=12,
        model=Model(128, 2),
    ),
    _job(
        "better, graded",
        "nine minus",
        Writer(slip=0.18),
        "a better author, grades with noise",
        authors=(Writer(slip=0.04),),
        rewards="graded",
        noise=0.3,
        kept=True,
    ),
    _job(
        "two each",
        "vowels first",
        Writer(slip=0.18),
        "two responses a prompt, 0/1 rewards",
        prompts=512,
        sizes=(2, 2),
        groups=16,
        kept=True,
    ),
    _job(
        "thumbs",
        "every other",
        Writer(slip=0.2),
        "one response a prompt",
        data="one each",
        rewards="thumbs",
        prompts=1024,
        sizes=(1, 1),
        groups=32,
        kept=True,
    ),
    _job(
        "GPT-NeoX",
        "turn",
        Writer(slip=0.16),
        "another model family",
        model=Model(96, 2, "gpt_neox"),
        kept=True,
    ),
    _job(
        "fresh, graded",
        "there and back",
        Writer(slip=0.15, swap=0.1),
        "grades",
        data="fresh",
        rewards="graded",
    ),
    _job(
        "fresh, rare",
        "neighbors",
        Writer(slip=0.5),
        "rarely right at the start",
        data="fresh",
    ),
    _job(
        "fresh, often",
        "falling letters",
        Writer(slip=0.05),
        "mostly right at the start",
        data="fresh",
        model=Model(64, 2),
    ),
    _job(
        "more pairs",
        "without vowels",
        Writer(slip=0.2, drop=0.05),
        "512 judged pairs, a tenth wrong",
        data="pairs",
        prompts=512,
        sizes=(2, 2),
        wrong=0.1,
        groups=16,
    ),
    _job(
        "better, noisy",
        "letter before",
        Writer(slip=0.18),
        "a better author, grades with noise",
        authors=(Writer(slip=0.04),),
        rewards="graded",
        noise=0.3,
    ),
    _job(
        "fresh, unseen",
        "swapped",
        Writer(slip=0.2),
        "fresh samples",
        data="fresh",
        kept=True,
    ),
    _job(
        "pairs, unseen",
        "ones and zeros",
        Writer(slip=0.09),
        "300 noisy judged pairs",
        data="pairs",
        prompts=300,
        sizes=(2, 2),
        wrong=0.15,
        groups=16,
        kept=True,
    ),
    _job(
        "better, noisy, unseen",
        "halves",
        Writer(slip=0.15),
        "a better author, grades with noise",
        authors=(Writer(slip=0.03),),
        rewards="graded",
        noise=0.3,
        kept=True,
    ),
    _job(
        "worse, unseen",
        "five more",
        Writer(slip=0.2),
        "a worse author, seldom right",
        authors=(Writer(slip=0.6),),
        model=Model(64),
        kept=True,
    ),
]
JOBS = {job.name: job for job in EVERY}


def reward(prompts: Sequence[str], completions: Sequence[str], job: str, **columns: object) -> list[float]:
    """That of a job, as the library's users write it."""
    return [JOBS[job].value(p, text) for p, text in zip(prompts, completions, strict=True)]
