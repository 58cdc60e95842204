"""The run folder: its configuration and metrics, and what may change when a run is resumed."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import math
import os
import shlex
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agro.config import RunConfig, deciding, ending, take_length
from agro.errors import Refused
from agro.io.files import remove, sync, write, writing
from agro.io.version import __version__
from agro.runs.side_by_side import HELD_OUT, Response, first_responses, records
from agro.types import Sample

SET_ASIDE = "set_aside.jsonl"  # held-out prompts of the run's own data that policies can answer
STAGE = ".stage"  # the run's current activity
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


def check_out(
    out: str | Path | None, *, resume: bool, accept: Sequence[str] = (), makes: bool = False
) -> None:
    """Raise `Refused` for --resume without a folder, and if a new run is to start in a folder with a run."""
    if resume and out is None:
        raise Refused("--resume: expected the folder of the run: agro train RUN --resume")
    if accept and not resume:
        raise Refused("--accept belongs to --resume")
    if makes and out is not None and not resume and (Path(out) / "metrics.jsonl").exists():
        raise Refused(
            f"{out}: there is a run in this folder; continue it with: {resuming(out)}, or set another --out"
        )


def resuming(folder: str | Path) -> str:
    """The command that continues a run."""
    return f"agro train {shlex.quote(str(folder))} --resume"


class Run:
    """A folder with `config.json`, `metrics.jsonl`, `checkpoints/`, `model/` and perhaps `store.db`.

    `held_out.jsonl` has responses to some held-out prompts, or without any, to some that were trained on (see
    `agro.runs.side_by_side`). Its first line has the log's best responses, each other line an evaluation's.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        *,
        resume: bool,
        inputs: Mapping[str, str] | None = None,
        accept: Sequence[str] = (),
        epochs: Mapping[str, Any] | None = None,
    ) -> None:
        """`inputs`: fingerprints of the weights, files and code that the configuration names, by key.

        `accept`: keys of inputs that may have changed since the run began.
        `epochs`: what the steps of each phase were computed from, see `agro.train.phases`.
        """
        self.folder = folder
        self.metrics_file, self.held_out_file = folder / "metrics.jsonl", folder / HELD_OUT
        self.changed = False  # whether the settings that end the run differ from those before the stop
        self.notes: list[str] = []
        check_out(folder, resume=resume, makes=True)
        previous: dict[str, Any] = {}
        config_file = folder / "config.json"
        # A run that was killed before its first step may have no configuration.
        if resume and (config_file.exists() or self.metrics_file.exists()):
            self._compare(RunConfig.load(config_file), config)
            previous = json.loads(config_file.read_text(encoding="utf-8"))
            self._compare_inputs(previous.get("inputs", {}), inputs or {}, accept)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise Refused(
                f"{folder}: another process is training in this folder; wait for it, or set another --out"
            ) from None
        self.id = str(previous.get("run", uuid.uuid4().hex))
        self.record = {
            **config.record(),
            "versions": versions(),
            "run": self.id,
            "inputs": dict(inputs or {}),
            "started_in": os.path.relpath(Path.cwd(), folder),  # relative paths start here
        }
        if epochs_used := epochs or previous.get("epochs"):
            self.record["epochs"] = epochs_used
        try:
            with writing(folder):
                for unfinished in [*folder.glob(".*.tmp"), *folder.glob("checkpoints/.*.tmp")]:
                    remove(unfinished)
            write(config_file, json.dumps(self.record, indent=1, ensure_ascii=False) + "\n")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder's lock."""
        self._lock.close()

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:08d}"

    def _compare(self, saved: RunConfig, config: RunConfig) -> None:
        """Raise `Refused` if a value differs that must not change on resume."""
        self.changed = ending(saved) != ending(config)
        prior, current = (deciding(c.record()) for c in (saved, config))
        old_steps, steps = take_length(prior), take_length(current)
        if old_steps is not None and steps is not None and steps < old_steps:
            raise Refused(
                f"{self.folder}: --resume expects at least as many steps as before: the last phase had "
                f"{old_steps}, now it has {steps}; to end early, stop the run with Ctrl-C"
            )
        if old_steps != steps and config.train.schedule != "constant":
            self.notes.append(
                f"train.schedule = {config.train.schedule} now runs over {steps} steps, not {old_steps}: "
                "the learning rate is not that of one run of that length"
            )
        different = [f"{key} was {old}, now it is {new}" for key, old, new in differences(prior, current)]
        if different:
            raise Refused(
                f"{self.folder}: --resume expects the same configuration, but {'; '.join(different)}"
            )

    def _compare_inputs(
        self, old_inputs: Mapping[str, str], new_inputs: Mapping[str, str], accept: Sequence[str]
    ) -> None:
        """Raise `Refused` if an input has changed and isn't accepted. A key may name several settings."""
        allowed = ", ".join({**old_inputs, **new_inputs})
        for name in accept:
            if name not in allowed.split(", "):
                raise Refused(f"--accept {name}: expected an input of the run: {allowed}")
        unknown = ", ".join(key for key in new_inputs if key not in old_inputs)
        if unknown:
            self.notes.append(
                f"when the run began, no fingerprint of what {unknown} names was recorded, so it isn't known "
                "whether it has changed"
            )
        changed = [key for key in old_inputs if old_inputs[key] != new_inputs.get(key)]
        refused = [key for key in changed if set(accept).isdisjoint(key.split(", "))]
        if refused:
            flags = " ".join(f"--accept {key.split(', ')[0]}" for key in refused)
            raise Refused(
                f"{self.folder}: --resume expects the same inputs, but what {', '.join(refused)} names has "
                "changed since the run began. What to do: restore it, start a new run, or continue with the "
                f"changed input: --resume {flags}"
            )
        if changed:
            self.notes.append(f"what {', '.join(changed)} names has changed since the run began (--accept)")

    def has_steps(self) -> bool:
        """Whether the metrics of a step were logged; the measurement before the first step doesn't count."""
        return any(step for _, step in lines_by_step(self.metrics_file))

    def forget_after(self, step: int) -> list[int]:
        """Drop the logged lines of uncommitted steps; return the numbers of unreadable lines of metrics."""
        _drop_after(self.held_out_file, step)
        return _drop_after(self.metrics_file, step)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append one object; numbers that aren't finite are unknown, and become null."""
        self._append(self.metrics_file, metrics)

    def log_held_out(
        self, step: int, samples: Sequence[Sample], best_of_log: Callable[[list[str]], Iterable[Response]]
    ) -> None:
        """Append the first response to each of the first prompts.

        The file's first line has the log's best responses, which `best_of_log` returns for prompt ids.
        """
        responses = records(first_responses(samples))
        if not self.held_out_file.exists() or not self.held_out_file.stat().st_size:
            best = records(best_of_log([r["prompt_id"] for r in responses]))
            if best:
                self._append(self.held_out_file, {"step": step, "log": True, "responses": best})
        self._append(self.held_out_file, {"step": step, "responses": responses})

    def _append(self, file: Path, content: Any) -> None:
        with writing(file), file.open("a", encoding="utf-8") as f:
            f.write(json.dumps(to_json_values(content), allow_nan=False) + "\n")

    def sync(self) -> None:
        """Wait until the metrics are on the disk."""
        with writing(self.metrics_file):
            if self.metrics_file.exists():
                sync(self.metrics_file)


def lines_by_step(path: Path) -> list[tuple[bytes, int | None]]:
    """The lines of a file, each with its step; None for an unreadable line."""
    lines: list[tuple[bytes, int | None]] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            lines.append((line, int(json.loads(line)["step"])))
        except (ValueError, TypeError, KeyError):
            lines.append((line, None))
    return lines


def _drop_after(path: Path, step: int) -> list[int]:
    """Drop the lines of later steps; return the numbers of unreadable lines, except a torn last one."""
    lines = lines_by_step(path)
    if not lines:
        return []
    remaining = [line.decode() for line, line_step in lines if line_step is not None and line_step <= step]
    write(path, "".join(f"{line}\n" for line in remaining))
    # A killed run may have a torn last line.
    return [number for number, (_, line_step) in enumerate(lines[:-1], 1) if line_step is None]


def to_json_values(value: Any) -> Any:
    """The value for JSON, with None in place of numbers that aren't finite."""
    if isinstance(value, Mapping):
        return {k: to_json_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_values(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    installed = {"python": sys.version.split()[0], "agro": __version__}
    for name in LIBRARIES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a folder that isn't installed
            installed[name] = "unknown"
    return installed


def differences(old_values: Any, new_values: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, old value, new value) of each difference; phases have their names as keys."""
    if isinstance(old_values, dict) and isinstance(new_values, dict):
        for name in {**old_values, **new_values}:
            inner = f"{key}.{name}".removeprefix(".")
            yield from differences(old_values.get(name), new_values.get(name), inner)
    elif isinstance(old_values, list) and isinstance(new_values, list) and len(old_values) == len(new_values):
        for number, (old, new) in enumerate(zip(old_values, new_values, strict=True)):
            name = new.get("name", number) if isinstance(new, dict) else number
            yield from differences(old, new, f"{key}.{name}")
    elif old_values != new_values:
        yield key, json.dumps(old_values, ensure_ascii=False), json.dumps(new_values, ensure_ascii=False)
