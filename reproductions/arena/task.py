"""The task of the arena, made from nothing: prompts, two models that learned from careless teachers, their
logs.

A prompt is five digits, such as `52073>`; a response is right if it is these digits in rising order. Each
model is a Llama of 0.2 million parameters that imitates a teacher of its own. One teacher writes random
digits now and then, the other one swaps neighbors. The first model is where training starts, and the
reference. The second one is the other model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agro.config import RunConfig, SamplerConfig
from agro.io.files import complete_folder
from agro.models.policy import Policy
from agro.rollout.prompts import load_prompts
from agro.rollout.rollout import Rollout, embedded
from agro.store import Pair, Store
from agro.types import Prompt, Sample
from reproductions import harness
from reproductions.arena.training import SilentActivity

DIGITS, LENGTH = "0123456789", 5
SLIP, SWAP = 0.22, 0.2  # how often the teachers err, for each digit and for each two neighbors
GROUPS, N = 8, 4  # prompts and responses of an update
START, OTHER = "the start", "the other"  # the models, as sources of samples


@dataclass(frozen=True)
class Size:
    """How much of everything there is."""

    updates: int = 120  # of a run
    warm_up: int = 300  # updates of imitation, of 64 responses each
    taught: int = 8000  # responses of a teacher
    prompts: int = 512  # to sample from
    logged: int = 256  # other prompts, with responses in the logs
    validation: int = 256  # prompts that choose the settings
    test: int = 512  # prompts that the results are of
    slip: float = SLIP  # how often the start's teacher errs


FULL = Size()
SMALL = Size(updates=2, warm_up=60, taught=2000, prompts=16, logged=32, validation=16, test=16)


@dataclass(frozen=True)
class Files:
    """What `prepare` makes in a folder."""

    folder: Path
    size: Size = FULL

    @property
    def start(self) -> Path:
        return self.folder / "start"

    @property
    def other(self) -> Path:
        return self.folder / "other"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    @property
    def held_out(self) -> Path:
        """The prompts for validation, then those of the test."""
        return self.folder / "held_out.jsonl"

    @property
    def values(self) -> Path:
        """Scored responses of the start to all prompts, for stored values."""
        return self.folder / "values.db"

    def log(self, source: str) -> Path:
        """Responses to the logged prompts."""
        return self.folder / ("log.db" if source == START else "other.db")


def prepare(out: Path, size: Size) -> Files:
    """Make the task's files, once."""
    folder = out / "task"
    if not folder.exists():
        out.mkdir(parents=True, exist_ok=True)
        with complete_folder(folder) as making:
            _make(Files(making, size))
    return Files(folder, size)


def _make(files: Files) -> None:
    rng, size = random.Random(0), files.size
    counts = (size.prompts, size.logged, size.validation + size.test, size.taught, size.taught)
    drawn = harness.different(sum(counts), lambda: "".join(rng.choices(DIGITS, k=LENGTH)) + ">")
    parts = []
    for count in counts:
        parts.append(drawn[:count])
        drawn = drawn[count:]
    fresh, logged, held_out, first, second = parts
    for file, part in (
        (files.prompts, fresh),
        (files.held_out, held_out),
        (files.folder / "logged.jsonl", logged),
    ):
        harness.write_prompts(file, part, answer)
    _imitate(files.start, ((p, _slipping(p, size.slip, rng)) for p in first), size, seed=0)
    _imitate(files.other, ((p, _swapping(p, rng)) for p in second), size, seed=1)
    asked = load_prompts(files.folder / "logged.jsonl")
    for source, model in ((START, files.start), (OTHER, files.other)):
        _log(files.log(source), model, asked, source)
    _log(files.values, files.start, [*asked, *load_prompts(files.prompts)], "values")
    (files.folder / "size.json").write_text(json.dumps(asdict(size)))


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
    SilentActivity(RunConfig.load(Path(__file__).with_name("warm_up.toml"), changes), run).run()
    (run / "model").rename(model)


def _log(file: Path, model: Path, prompts: Sequence[Prompt], source: str) -> None:
    """`N` scored responses of a model to each prompt; each right one is judged better than each wrong one."""
    policy = Policy.load(RunConfig.of({"policy": {"model": str(model)}}).policy)
    sampler = SamplerConfig(n=N, max_new=LENGTH + 1, batch=1024)
    rollout = Rollout(policy.encoder, embedded(policy), source=source)
    samples = []
    for sample in rollout.sample(prompts, N, sampler, seed=0):
        reward = float(sample.response == sample.meta["answer"])
        samples.append(sample.replace(reward=reward, role="log"))
    with Store.open(file) as store:
        ids = store.append(samples)
        store.add_pairs(_judged(samples, ids))


def _judged(samples: Sequence[Sample], ids: Sequence[int]) -> Iterator[Pair]:
    groups: dict[str, list[tuple[float, int]]] = {}
    for sample, i in zip(samples, ids, strict=True):
        groups.setdefault(sample.prompt_id, []).append((sample.reward or 0.0, i))
    for group in groups.values():
        right = [i for reward, i in group if reward == 1]
        wrong = [i for reward, i in group if reward == 0]
        for winner in right:
            for loser in wrong:
                yield Pair(winner, loser)
