"""The task, made from nothing: prompts, two models that learned from careless teachers, their logs.

A prompt is five digits, such as `52073>`; a response is right if it is these digits in rising order. Each
model is a Llama of 0.2 million parameters that imitates a teacher of its own. One teacher writes random
digits now and then, the other one swaps neighbors. The first model is where training starts, and the
reference. The second one is the other model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agro.config import RunConfig, SamplerConfig
from agro.io.files import complete_folder
from agro.models.policy import Policy
from agro.rollout.prompts import load_prompts
from agro.rollout.rollout import Rollout, embedded
from agro.store import Store
from agro.types import Prompt, Sample
from reproductions import harness

DIGITS, LENGTH = "0123456789", 5
SWAP = 0.2  # how often the other's teacher swaps two neighbors
N = 4  # responses to a prompt of a log
START, OTHER = "the start", "the other"  # the models, as sources of samples
LOGS = {START: "log.db", OTHER: "other.db"}  # their responses to the logged prompts


@dataclass(frozen=True)
class Size:
    """How much of everything there is."""

    warm_up: int = 300  # updates of imitation, of 64 responses each
    taught: int = 8000  # responses of a teacher
    prompts: int = 512  # to sample from
    logged: int = 256  # other prompts, with responses in the logs
    validation: int = 256  # prompts that choose the settings
    test: int = 512  # prompts that the results are of
    slip: float = 0.22  # how often the start's teacher errs, for each digit


def prepare(folder: Path, size: Size) -> Path:
    """Make the task's files, once: start and other (models), their logs, prompts.jsonl, held_out.jsonl (the
    prompts for validation, then those of the test), and values.db, scored responses of the start."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with complete_folder(folder) as making:
            _make(making, size)
    return folder


def _make(folder: Path, size: Size) -> None:
    rng = random.Random(0)
    counts = (size.prompts, size.logged, size.validation + size.test, size.taught, size.taught)
    drawn = harness.different(sum(counts), lambda: "".join(rng.choices(DIGITS, k=LENGTH)) + ">")
    parts = []
    for count in counts:
        parts.append(drawn[:count])
        drawn = drawn[count:]
    fresh, logged, held_out, first, second = parts
    for name, part in (("prompts", fresh), ("held_out", held_out), ("logged", logged)):
        harness.write_prompts(folder / f"{name}.jsonl", part, answer)
    _imitate(folder / "start", ((p, _slipping(p, size.slip, rng)) for p in first), size, seed=0)
    _imitate(folder / "other", ((p, _swapping(p, rng)) for p in second), size, seed=1)
    asked = load_prompts(folder / "logged.jsonl")
    for source, model in ((START, "start"), (OTHER, "other")):
        _log(folder / LOGS[source], folder / model, asked, source)
    every = [*asked, *load_prompts(folder / "prompts.jsonl")]
    _log(folder / "values.db", folder / "start", every, "values")


def answer(prompt: str) -> str:
    return "".join(sorted(prompt[:-1]))


def _slipping(prompt: str, slip: float, rng: random.Random) -> str:
    return "".join(rng.choice(DIGITS) if rng.random() < slip else digit for digit in answer(prompt))


def _swapping(prompt: str, rng: random.Random) -> str:
    digits = list(answer(prompt))
    for i in range(LENGTH - 1):
        if rng.random() < SWAP:
            digits[i], digits[i + 1] = digits[i + 1], digits[i]
    return "".join(digits)


def _imitate(model: Path, lessons: Iterator[tuple[str, str]], size: Size, seed: int) -> None:
    """Train a new model on a teacher's responses, and write it into the folder `model`."""
    run = model.parent / f"{model.name}-warm-up"
    store = model.parent / f"{model.name}-lessons.db"
    with Store.open(store) as opened:
        opened.append(Sample(prompt, text, role="expert", source="teacher") for prompt, text in lessons)
    changes = [f"data.store={store}", f"train.steps={size.warm_up}", f"train.seed={seed}"]
    harness.SilentTrainer(RunConfig.load(Path(__file__).with_name("warm_up.toml"), changes), run).run()
    (run / "model").rename(model)


def _log(file: Path, model: Path, prompts: Sequence[Prompt], source: str) -> None:
    """`N` scored responses of a model to each prompt."""
    policy = Policy.load(RunConfig.of({"policy": {"model": str(model)}}).policy)
    sampler = SamplerConfig(n=N, max_new=LENGTH + 1, batch=1024)
    rollout = Rollout(policy.encoder, embedded(policy), source=source)
    drawn = rollout.sample(prompts, N, sampler, seed=0)
    with Store.open(file) as store:
        store.append([s.replace(reward=float(s.response == s.meta["answer"]), role="log") for s in drawn])
