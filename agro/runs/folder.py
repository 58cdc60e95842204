"""The run folder: configuration and metrics."""

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

SET_ASIDE = "set_aside.jsonl"  # held-out prompts of the run's own data, which policies can answer
STAGE = ".stage"  # what a run does now
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


def check_out(
    out: str | Path | None, *, resume: bool, accept: Sequence[str] = (), makes: bool = False
) -> None:
    """Raise `Refused` for a run to continue that isn't named, and where a process that makes the folder of a
    new run finds one there already."""
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

    `held_out.jsonl` has responses to some held-out prompts, or where none are held out to some that were
    trained on, see `agro.runs.side_by_side`: the log's best ones in the first line, then one per evaluation.
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

        `accept`: keys of those that may have changed since the run began.
        `epochs`: by phase what its steps were computed from; see `agro.train.phases`.
        """
        self.folder = folder
        self.metrics_file, self.held_out_file = folder / "metrics.jsonl", folder / HELD_OUT
        self.changed = False  # since the run was stopped, in what ends it
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
            "started_in": os.path.relpath(Path.cwd(), folder),  # where its paths begin
        }
        if made_of := epochs or previous.get("epochs"):
            self.record["epochs"] = made_of
        try:
            with writing(folder):
                for unfinished in [*folder.glob(".*.tmp"), *folder.glob("checkpoints/.*.tmp")]:
                    remove(unfinished)
            write(config_file, json.dumps(self.record, indent=1, ensure_ascii=False) + "\n")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others train in this folder."""
        self._lock.close()

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:08d}"

    def _compare(self, saved: RunConfig, config: RunConfig) -> None:
        """Raise `Refused` where a value differs that may not change on resume."""
        self.changed = ending(saved) != ending(config)
        before, now = (deciding(c.record()) for c in (saved, config))
        steps_before, steps = take_length(before), take_length(now)
        if steps_before is not None and steps is not None and steps < steps_before:
            raise Refused(
                f"{self.folder}: --resume expects at least the steps of before: the last phase had "
                f"{steps_before}, now it has {steps}; to end early, stop the run with Ctrl-C"
            )
        if steps_before != steps and config.train.schedule != "constant":
            self.notes.append(
                f"train.schedule = {config.train.schedule} now runs over {steps} steps, not {steps_before}: "
                "the learning rate is not that of one run of that length"
            )
        different = [f"{key} was {old}, now it is {new}" for key, old, new in differences(before, now)]
        if different:
            raise Refused(
                f"{self.folder}: --resume expects the same configuration, but {'; '.join(different)}"
            )

    def _compare_inputs(
        self, before: Mapping[str, str], now: Mapping[str, str], accept: Sequence[str]
    ) -> None:
        """Raise `Refused` where an input has changed that isn't accepted. A key may name several settings."""
        allowed = ", ".join({**before, **now})
        for name in accept:
            if name not in allowed.split(", "):
                raise Refused(f"--accept {name}: expected an input of the run: {allowed}")
        unknown = ", ".join(key for key in now if key not in before)
        if unknown:
            self.notes.append(
                f"when the run began, no fingerprint of what {unknown} names was recorded, so it isn't known "
                "whether it has changed"
            )
        changed = [key for key in before if before[key] != now.get(key)]
        refused = [key for key in changed if set(accept).isdisjoint(key.split(", "))]
        if refused:
            flags = " ".join(f"--accept {key.split(', ')[0]}" for key in refused)
            raise Refused(
                f"{self.folder}: --resume expects the inputs of before, but what {', '.join(refused)} names "
                "has changed since the run began. What to do: put it back, start a new run, or go on with "
                f"what is there now: --resume {flags}"
            )
        if changed:
            self.notes.append(f"what {', '.join(changed)} names has changed since the run began (--accept)")

    def has_steps(self) -> bool:
        """Whether the metrics of a step were logged, besides the measurement before the first one."""
        return any(step for _, step in lines_by_step(self.metrics_file))

    def forget_after(self, step: int) -> list[int]:
        """Drop what was logged of uncommitted steps; return the unreadable lines of metrics by number."""
        _drop_after(self.held_out_file, step)
        return _drop_after(self.metrics_file, step)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append one object; what isn't a finite number is unknown: null."""
        self._append(self.metrics_file, metrics)

    def log_held_out(
        self, step: int, samples: Sequence[Sample], best_of_log: Callable[[list[str]], Iterable[Response]]
    ) -> None:
        """Append the first response to each of the first of these prompts.

        Before the first line stands one with the best responses of the log, by the ids of prompts.
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
    """The lines of a file, each with its step; None where it is unreadable."""
    lines: list[tuple[bytes, int | None]] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            lines.append((line, int(json.loads(line)["step"])))
        except (ValueError, TypeError, KeyError):
            lines.append((line, None))
    return lines


def _drop_after(path: Path, step: int) -> list[int]:
    """Drop the lines of later steps; return the numbers of unreadable lines, without a torn last one."""
    lines = lines_by_step(path)
    if not lines:
        return []
    remaining = [line.decode() for line, of in lines if of is not None and of <= step]
    write(path, "".join(f"{line}\n" for line in remaining))
    # The last line may be torn, of a run that was killed.
    return [number for number, (_, of) in enumerate(lines[:-1], 1) if of is None]


def to_json_values(value: Any) -> Any:
    """For JSON: None in place of what isn't a finite number."""
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
    """(dotted key, old value, new value) of what differs; phases have their names as keys."""
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
