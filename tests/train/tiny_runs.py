"""A run that takes a second: copy a digit string, a few hundred parameters."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rounding import rounding

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Interrupted
from agro.io.worker import load_file
from agro.models.policy import Policy
from agro.rewards import function
from agro.store import Store
from agro.train.feed import Feed, Valid
from agro.train.monitors import Monitor, View
from agro.types import Sample

DIGITS = "0123456789"
REWARDS = Path(__file__).parent / "reward.py"
_rewards, _Pool = load_file(str(REWARDS)), function.Pool


def _pool(location: str, options: Any, **given: Any) -> Any:
    """Functions of reward.py are called in this process: one of their own would take a quarter of a tiny run.
    What such processes do is the matter of tests/rewards, and other files have them here too."""
    file, _, name = location.rpartition(":")
    if file != str(REWARDS):
        return _Pool(location, options, **given)
    return function.Inline(getattr(_rewards, name), options)


function.Pool = _pool  # type: ignore[assignment,misc]


def write_prompts(path: Path, numbers: range) -> str:
    path.write_text(
        "".join(json.dumps({"prompt": f"{i:03d}>", "answer": f"{i % 10}"}) + "\n" for i in numbers)
    )
    return str(path)


def tiny(folder: Path, **changes: Any) -> RunConfig:
    """Fresh AGRO by default; `changes` are dotted keys with __ for the dot."""
    values: dict[str, Any] = {
        "policy": {"new": {"alphabet": DIGITS + ">", "hidden": 16, "layers": 1, "heads": 2, "context": 16}},
        "data": {"prompts": write_prompts(folder / "prompts.jsonl", range(60))},
        "sampler": {"n": 3, "max_new": 3},
        "reward": {"name": f"{REWARDS}:digits"},
        "objective": {"name": "agro", "beta": 0.1},
        # The 12 responses of a step are one pass; tests of several passes set train.micro_batch.
        "train": {"steps": 6, "groups": 4, "micro_batch": 16, "lr": 1e-2, "checkpoint_every": 2},
    }
    for key, value in changes.items():
        *sections, last = key.split("__")
        at = values
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = deepcopy(value)
    return RunConfig.of(values)


def run_tiny(
    folder: Path, name: str = "run", *monitors: Monitor, resume: bool = False, **changes: Any
) -> Path:
    """The tiny run with these changes, in FOLDER/NAME."""
    return Trainer(tiny(folder, **changes), folder / name, monitors=monitors, resume=resume).run()


def copied(digit: str) -> str:
    return digit


def copying(
    folder: Path, steps: int, demonstration: Callable[[str], str] = copied, **changes: Any
) -> RunConfig:
    """Ten prompts, a digit each, to be copied, with a demonstration of each in a store: learned in seconds.

    The reward, whether the response is the digit, is measured; demonstrations have none.
    """
    prompts, store = folder / "digits.jsonl", folder / "demonstrations.db"
    prompts.write_text("".join(json.dumps({"prompt": f"{d}>", "answer": d}) + "\n" for d in DIGITS))
    store.unlink(missing_ok=True)
    with Store.open(store) as opened:
        opened.append(Sample(f"{d}>", demonstration(d), role="expert") for d in DIGITS)
    new = {"alphabet": DIGITS + ">", "hidden": 32, "layers": 1, "heads": 2, "context": 8}
    values = {
        "policy__new": new | {"initializer_range": 0.2},
        "data__prompts": str(prompts),
        "data__store": str(store),
        "reward": {"name": "exact"},
        "sampler": {"n": 2, "max_new": 3},
        "train": {"steps": steps, "groups": 10, "micro_batch": 256, "lr": 1e-2, "checkpoint_every": 1000},
    }
    return tiny(folder, **{**values, **changes})


def write_toml(path: Path, config: RunConfig) -> Path:
    """As a run's config.json, which `RunConfig.load` reads too."""
    path.write_text(json.dumps(config.model_dump(mode="json")))
    return path


def by_someone(groups: int = 8, size: int = 4, **fields: Any) -> list[Sample]:
    """Texts and rewards alone."""
    fields = {"source": "someone", **fields}
    return [
        Sample(f"{100 + g}>", str(i % 10) * (i % 3 + 1), reward=float(i % 2), **fields)
        for g in range(groups)
        for i in range(size)
    ]


def fill_store(path: Path, groups: int = 8, size: int = 4, **fields: Any) -> dict[str, Any]:
    """A log of texts and rewards alone; returns the settings of a run that trains on it alone."""
    with Store.open(path) as store:
        store.append(by_someone(groups, size, **fields))
    return {"data__store": str(path), "data__replay": 1.0}


def log_alone(folder: Path, samples: Iterable[Sample] | None = None, **data: Any) -> dict[str, Any]:
    """`data` of a run on FOLDER/log.db alone, which gets these samples, or someone's, unless it is there."""
    path = folder / "log.db"
    if not path.exists():
        with Store.open(path) as store:
            store.append(by_someone() if samples is None else samples)
    return {"store": str(path), "replay": 1.0, **data}


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def is_mean(row: dict[str, Any], name: str, values: Any, rel: float) -> None:
    """A metric is the mean over groups, and its `_se` the standard error."""
    error = np.std(values, ddof=1) / len(values) ** 0.5
    assert (row[name], row[f"{name}_se"]) == pytest.approx((np.mean(values), error), rel=rel)


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def same(a: Path, b: Path) -> None:
    """Two runs have the same weights, learned values and metrics, but for the time that they took."""
    assert weights(a) == weights(b)
    last = [max((run / "checkpoints").iterdir()) for run in (a, b)]
    values = [[file.read_bytes() for file in checkpoint.glob("value.safetensors")] for checkpoint in last]
    assert values[0] == values[1]
    times = dict.fromkeys(("seconds", "seconds_sample", "seconds_train", "tokens_per_second"))
    assert [row | times for row in metrics(a)] == [row | times for row in metrics(b)]


def run_id(run: Path) -> str:
    return str(json.loads((run / "config.json").read_text())["run"])


def samples_of(run: Path, **which: Any) -> list[Sample]:
    """Those of the run's own store."""
    with Store.open(run / "store.db", read_only=True) as store:
        return list(store.samples(**which))


def logp_rounding(run: Path) -> float:
    """How far the log-probs of a run's samples may be from the learner's, in nats."""
    return rounding(*(s.behavior_logp for s in samples_of(run)))["atol"]


def total_logp(policy: Policy, sample: Sample) -> float:
    """log π(y|x) from the model's own logits."""
    s = policy.encode(sample)
    ids = torch.tensor(s.tokens)[None].long()
    logp = torch.log_softmax(policy.model(ids).logits[0, :-1].double(), -1).gather(1, ids[0, 1:, None])[:, 0]
    return float(logp[torch.tensor(s.action[1:])].detach().sum())


# How far a log-prob of a response may be from itself, in nats: it is −4 log 12, about −10, for four tokens of
# the alphabet of `tiny`.
RESPONSE_ROUNDING = rounding(10.0)["atol"]


def done(run: Path) -> int:
    """The last step that was logged, with a complete line; 0 before there is one."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


class StopAfter(Monitor):
    """Ends the run after a step, as an early stop does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after(self, view: View) -> None:
        if view.step == self.step:
            view.stop = "seen enough"


class InterruptAfter(Monitor):
    """Ctrl-C at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after(self, view: View) -> None:
        if view.step == self.step:
            signal.raise_signal(signal.SIGINT)


def interrupted(config: RunConfig, folder: Path, at: int) -> Path:
    """The run in `folder` ends by Ctrl-C after step `at`."""
    with pytest.raises(Interrupted):
        Trainer(config, folder, monitors=[InterruptAfter(at)]).run()
    return folder


def whole_and_resumed(make: Callable[[Path], RunConfig], folder: Path, at: int) -> tuple[Path, Path]:
    """A run of `make(FOLDER)`, and one that ends by Ctrl-C after step `at` and is resumed: both end with the
    same weights, and measured the same. Each has a folder of its own, also for what `make` writes."""
    runs = [folder / name / "run" for name in ("whole", "resumed")]
    for run in runs:
        run.parent.mkdir()
    Trainer(make(runs[0].parent), runs[0]).run()
    config = make(runs[1].parent)
    interrupted(config, runs[1], at)
    Trainer(config, runs[1], resume=True).run()
    same(runs[1], runs[0])
    return runs[0], runs[1]


@contextmanager
def before_step(look: Callable[[Feed, Valid], None]) -> Iterator[None]:
    """While it lasts, `look` is called with a phase's feed and a step's samples, before their gradient."""
    plain = Feed.valid

    def valid(self: Feed, *args: Any) -> Valid:
        found = plain(self, *args)
        look(self, found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feed, "valid", valid)
        yield
