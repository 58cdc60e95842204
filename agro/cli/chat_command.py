"""`agro chat`: a conversation with the result of a run, also blind beside its start."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import PolicySetting, Seed
from agro.cli.run_models import START, MaxNew, MeasuredModel, model_path
from agro.config import RunConfig, SamplerConfig
from agro.errors import Refused
from agro.store import Pair, Store
from agro.types import Prompt

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
    rollouts = [asked.rollout()]
    if against is not None:
        rollouts.append(asked.other(against if against == START else model_path(against)))
    sampler, rng = asked.sampler(1, temperature, max_new), random.Random(seed)
    if against is None:
        _talk(rollouts, sampler, rng, None)
        return
    path = store or Path(model) / "chat.db"
    with Store.open(path) as judged:
        counts = _talk(rollouts, sampler, rng, judged)
        groups = judged.counts().groups
    print(f"preferred: {model} {counts[0]}, {against} {counts[1]}, ties {counts[TIE]}")
    if counts[0] + counts[1]:
        command = f"agro train pairs policy.model={asked.name} data.store={path}"
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


def _talk(
    rollouts: Sequence[Rollout], sampler: SamplerConfig, rng: random.Random, judged: Store | None
) -> Counter[Any]:
    """Until the user leaves: a response of each model to each line, in random order, of which with two the
    user chooses without knowing whose they are. The choices and both responses go into `judged`.

    Returns how often each model was preferred, by its number, and ties. Without a chat template each line is
    a prompt of its own.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited, and earlier ones taken again
    print(HELP, file=sys.stderr)
    has_turns = all(bool(rollout.encoder.chat.tokenizer.chat_template) for rollout in rollouts)
    if not has_turns:
        print("the model has no chat template: each line is a prompt of its own", file=sys.stderr)
    counts, messages = Counter[Any](), list[dict[str, Any]]()
    with suppress(EOFError):
        while (line := input("> ")) != "/quit":
            if line == "/new":
                messages.clear()
            if line in ("/new", ""):
                continue
            text = [*messages, {"role": "user", "content": line}] if has_turns else line
            number = rng.getrandbits(31)
            answers = []
            for model, rollout in enumerate(rollouts):
                (sample,) = rollout.sample([Prompt(text)], 1, sampler, seed=number)
                answers.append((model, sample))
            rng.shuffle(answers)
            for place, (_, sample) in enumerate(answers, 1):
                print(f"{place}: {sample.response}" if len(answers) > 1 else sample.response)
            better, chosen = answers[0]
            if judged is not None:
                while (rated := input(ASKED).strip()) not in (*RATINGS, TIE, ""):
                    pass
                better, chosen = answers[RATINGS.get(rated, 0)]
                if rated:
                    ids = judged.append(sample for _, sample in answers)
                    winner = RATINGS.get(rated, 0)
                    votes = (1.0, 1.0) if rated == TIE else (1.0, 0.0)
                    judged.add_pairs([Pair(ids[winner], ids[1 - winner], *votes)])
                    counts[TIE if rated == TIE else better] += 1
            messages += [
                {"role": "user", "content": line},
                {"role": "assistant", "content": chosen.response},
            ]
        return counts
    print()  # ends the line of the question
    return counts
