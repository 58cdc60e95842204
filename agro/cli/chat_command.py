"""`agro chat`: a conversation with the result of a run, also blind beside its start."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import PolicySetting, Seed
from agro.cli.run_models import START, MaxNew, MeasuredModel, model_path
from agro.config import RunConfig, SamplerConfig
from agro.errors import Refused
from agro.store import Pair, Store
from agro.types import Prompt, Sample

if TYPE_CHECKING:
    from agro.rollout import Rollout

HELP = "/new begins a new conversation, /quit ends"
ASKED = "better (1, 2, 0 for a tie, Enter to leave it out): "
RATINGS = {"1": 0, "2": 1}  # the position of the better response
TIE = "0"


def chat(
    model: Annotated[str, typer.Argument(metavar="RUN")],
    against: str | None = None,
    store: Path | None = None,
    max_new: MaxNew = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    seed: Seed = 0,
    policy: PolicySetting = None,
) -> None:
    """Args:
    model: A run, or a model: a folder or hub name.
    against: Answer beside another model, blind: start (the run's), or a model.
    store: With --against: where judged pairs go; RUN/chat.db.
    temperature: 0 is greedy.
    """
    run = run_of(model)
    if store is not None and against is None:
        raise Refused("--store: judged pairs need a second model: expected --against beside it, got none")
    if against is not None and store is None and run is None:
        raise Refused(f"--store: expected it, since {model} isn't a run; got none")
    asked = MeasuredModel.of(run, None if run is not None else model, policy, "a model").without_environment()
    name = asked.name
    rollouts = [asked.rollout()]
    if against is not None:
        rollouts.append(asked.other(against if against == START else model_path(against)))
    conversation = Conversation(rollouts, asked.sampler(1, temperature, max_new), random.Random(seed))
    if against is None:
        _talk(conversation, lambda answers: answers[0].sample)
        return
    path = store or Path(model) / "chat.db"
    with Store.open(path) as judged:
        rating = Rating(judged)
        _talk(conversation, rating.ask)
        groups = judged.counts().groups
    print(f"preferred: {model} {rating.counts[0]}, {against} {rating.counts[1]}, ties {rating.ties}")
    if sum(rating.counts):
        command = f"agro train pairs policy.model={name} data.store={path}"
        if groups < RunConfig.load("pairs").train.groups:
            command += f" train.groups={groups}"
        print(f"{path} has the judged pairs; train with: {command}")


def run_of(name: str) -> Path | None:
    """The folder of a run; None for a model, whose folder has a config.json too."""
    path = Path(name)
    if not path.exists() and path.parent != Path() and path.parent.is_dir():
        raise Refused(f"{name}: there is no such run or model in {path.parent}")  # the hub isn't asked then
    is_run = (path / "model").is_dir() or (path / "metrics.jsonl").is_file()
    return path if is_run and (path / "config.json").is_file() else None


@dataclass(frozen=True)
class Answer:
    """A model's response to a line."""

    model: int  # 0: the result; 1: what it is compared with
    sample: Sample


@dataclass
class Conversation:
    """Turns of a user and of a model. Without a chat template each line is a prompt of its own."""

    rollouts: Sequence[Rollout]
    sampler: SamplerConfig
    random: random.Random
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_turns(self) -> bool:
        return all(bool(rollout.encoder.chat.tokenizer.chat_template) for rollout in self.rollouts)

    def answer(self, line: str) -> list[Answer]:
        """A response of each model, in random order."""
        text = [*self.messages, {"role": "user", "content": line}] if self.has_turns else line
        seed = self.random.getrandbits(31)
        answers = []
        for model, rollout in enumerate(self.rollouts):
            (sample,) = rollout.sample([Prompt(text)], 1, self.sampler, seed=seed)
            answers.append(Answer(model, sample))
        self.random.shuffle(answers)
        return answers

    def go_on(self, line: str, answer: Sample) -> None:
        """Continue with one of the responses."""
        self.messages += [
            {"role": "user", "content": line},
            {"role": "assistant", "content": answer.response},
        ]


@dataclass
class Rating:
    """Which of two responses a person prefers, without knowing whose they are."""

    store: Store
    counts: list[int] = field(default_factory=lambda: [0, 0])  # by model, the result first
    ties: int = 0

    def ask(self, answers: Sequence[Answer]) -> Sample:
        """Store the answers and the judgment; returns the response to continue with."""
        rated = input(ASKED).strip()
        while rated not in (*RATINGS, TIE, ""):
            rated = input(ASKED).strip()
        better = RATINGS.get(rated, 0)
        if rated:
            ids = self.store.append(answer.sample for answer in answers)
            votes = (1.0, 1.0) if rated == TIE else (1.0, 0.0)
            self.store.add_pairs([Pair(ids[better], ids[1 - better], *votes)])
        if rated == TIE:
            self.ties += 1
        elif rated:
            self.counts[answers[better].model] += 1
        return answers[better].sample


def _talk(conversation: Conversation, choose: Callable[[Sequence[Answer]], Sample]) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited, and earlier ones taken again
    print(HELP, file=sys.stderr)
    if not conversation.has_turns:
        print("the model has no chat template: each line is a prompt of its own", file=sys.stderr)
    with suppress(EOFError):
        while (line := input("> ")) != "/quit":
            if line == "/new":
                conversation.messages.clear()
            elif line:
                answers = conversation.answer(line)
                for number, answer in enumerate(answers, 1):
                    label = f"{number}: " if len(answers) > 1 else ""
                    print(f"{label}{answer.sample.response}")
                conversation.go_on(line, choose(answers))
        return
    print()  # ends the line of the question
