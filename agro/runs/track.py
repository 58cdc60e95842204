"""Send metrics to TensorBoard, W&B and trackio. A tracker that fails never stops a run."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agro.config import RunConfig, TrackConfig
from agro.errors import Refused
from agro.runs.folder import Run

# The module that each tracker needs. All but the first have the same calls to begin, log and finish a run.
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class TensorBoard:
    """Event files in RUN/tensorboard. Steps rise; a resumed run starts after its last checkpoint."""

    def __init__(self, run: Run) -> None:
        self._folder = run.folder / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:  # the steps of a resumed run replace those before
            tensorboard = importlib.import_module(MODULES["tensorboard"])
            self._writer = tensorboard.SummaryWriter(str(self._folder), purge_step=step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Hosted:
    """A run at Weights & Biases (with WANDB_MODE=offline in RUN/wandb), or in trackio's local database
    (TRACKIO_DIR), which identifies runs by name alone. A resumed run continues it."""

    def __init__(self, module: str, run: Run, config: RunConfig) -> None:
        hosted = importlib.import_module(module)
        name = config.track.name or run.folder.resolve().name
        settings: dict[str, Any] = {"name": f"{name}-{run.id[:8]}", "embed": False}
        if module == "wandb":  # the terminal belongs to `RunActivity`
            quiet = hosted.Settings(console="off")
            settings = {"name": name, "id": run.id, "dir": str(run.folder), "settings": quiet}
        self._run = hosted.init(
            project=config.track.project, resume="allow", config=config.record(), **settings
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All trackers of a run. One that fails is reported once and dropped."""

    def __init__(self, trackers: Mapping[str, TensorBoard | Hosted], say: Callable[[str], None]) -> None:
        self._trackers, self._say = dict(trackers), say

    @classmethod
    def of(cls, config: RunConfig, run: Run, say: Callable[[str], None]) -> Trackers:
        """Start the trackers of `track.to`."""
        trackers = cls({}, say)
        for name in dict.fromkeys(config.track.to):
            with trackers._reported(name):
                is_hosted = name != "tensorboard"
                trackers._trackers[name] = Hosted(name, run, config) if is_hosted else TensorBoard(run)
        return trackers

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log the known numbers of a step."""
        numbers = {k: v for k, v in _numbers(metrics) if k != "step"}
        for name in list(self._trackers):
            with self._reported(name):
                self._trackers[name].log(metrics["step"], numbers)

    def close(self) -> None:
        for name in list(self._trackers):
            with self._reported(name):
                self._trackers.pop(name).close()

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """Report an error, drop the tracker and continue."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a tracker may fail in any way
            self._trackers.pop(name, None)
            cause = f"{type(error).__name__}: {error}"
            self._say(f"tracker {name} failed and is dropped; the run continues: {cause}")


def check_trackers(config: TrackConfig) -> None:
    """Raise `Refused` if a tracker of `track.to` can't be imported."""
    for name in config.to:
        try:
            importlib.import_module(MODULES[name])
        except ImportError as error:
            raise Refused(
                f"track.to: {name} can't be imported ({error}). "
                f"What to do: pip install {name}, or remove {name} from track.to"
            ) from None


def _numbers(metrics: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """The finite numbers; those of nested objects are named section/name."""
    numbers: list[tuple[str, float]] = []
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            numbers += _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            numbers.append((prefix + key, float(value)))
    return numbers
