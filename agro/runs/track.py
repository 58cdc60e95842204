"""Metrics for TensorBoard, W&B and trackio. A tracker that fails never stops a run."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from agro.config import RunConfig, TrackConfig
from agro.errors import Refused
from agro.runs.folder import Run


class Tracker(Protocol):
    """A destination of metrics. Steps rise; a resumed run starts after its last checkpoint."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, run: Run, config: RunConfig) -> None:
        self._folder = run.folder / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:  # the steps of a resumed run replace those before
            tensorboard = importlib.import_module("torch.utils.tensorboard")
            self._writer = tensorboard.SummaryWriter(str(self._folder), purge_step=step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Hosted:
    """A run at Weights & Biases, or in RUN/wandb with WANDB_MODE=offline; or one in trackio's local database
    (TRACKIO_DIR), which identifies runs by their names alone. Resuming continues it."""

    def __init__(self, module: str, run: Run, config: RunConfig) -> None:
        hosted = importlib.import_module(module)
        name = config.track.name or run.folder.resolve().name
        settings: dict[str, Any] = {"name": f"{name}-{run.id[:8]}", "embed": False}
        if module == "wandb":  # the terminal belongs to `Progress`
            quiet = hosted.Settings(console="off")
            settings = {"name": name, "id": run.id, "dir": str(run.folder), "settings": quiet}
        self._run = hosted.init(
            project=config.track.project, resume="allow", config=config.record(), **settings
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, tuple[str, Callable[[Run, RunConfig], Tracker]]] = {  # name: (module it needs, tracker)
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "wandb": ("wandb", partial(Hosted, "wandb")),
    "trackio": ("trackio", partial(Hosted, "trackio")),
}


class Trackers:
    """All trackers of a run. One that fails is reported once and dropped."""

    def __init__(self, trackers: Mapping[str, Tracker], say: Callable[[str], None]) -> None:
        self._trackers, self._say = dict(trackers), say

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log the known numbers of a step."""
        numbers = {k: v for k, v in _numbers(metrics) if k != "step"}
        working: dict[str, Tracker] = {}
        for name, tracker in self._trackers.items():
            with _reported(name, self._say):
                tracker.log(metrics["step"], numbers)
                working[name] = tracker
        self._trackers = working

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            with _reported(name, self._say):
                tracker.close()
        self._trackers = {}


def check_trackers(config: TrackConfig) -> None:
    """Raise `Refused` where a tracker of `track.to` can't be imported."""
    for name in config.to:
        try:
            importlib.import_module(TRACKERS[name][0])
        except ImportError as error:
            raise Refused(
                f"track.to: {name} can't be imported ({error}). "
                f"What to do: pip install {name}, or remove {name} from track.to"
            ) from None


def load_trackers(config: RunConfig, run: Run, say: Callable[[str], None]) -> Trackers:
    """Start the trackers of `track.to`. One that can't start is reported by `say` and dropped."""
    started: dict[str, Tracker] = {}
    for name in dict.fromkeys(config.track.to):
        with _reported(name, say):
            started[name] = TRACKERS[name][1](run, config)
    return Trackers(started, say)


@contextmanager
def _reported(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report an error and continue."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # a tracker may fail in any way
        say(f"tracker {name} failed and is dropped; the run continues: {type(error).__name__}: {error}")


def _numbers(metrics: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Finite numbers; those of nested objects under section/name."""
    numbers: list[tuple[str, float]] = []
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            numbers += _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            numbers.append((prefix + key, float(value)))
    return numbers
