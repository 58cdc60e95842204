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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agro.config import RunConfig, deciding, ending, take_length
from agro.errors import Refused
from agro.io.files import remove, sync, write, writing
from agro.io.version import __version__
from agro.runs.side_by_side import FILE as SIDE_BY_SIDE
from agro.runs.side_by_side import forget_after
from agro.types import Sample

KEPT = 32  # held-out prompts whose responses are kept
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

    `held_out.jsonl` has a response to each of the first held-out prompts, a line per evaluation, and
    `side_by_side.json` those of the start and of the latest evaluation to others, see `SideBySide`.
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
        self.config_file = folder / "config.json"
        self.metrics_file = folder / "metrics.jsonl"
        self.held_out_file = folder / "held_out.jsonl"
        check_out(folder, resume=resume, makes=True)
        self.changed = False  # since the run was stopped, in what ends it
        self.notes: list[str] = []
        previous = self._before(config, inputs or {}, accept) if resume else {}
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
        self.id = str(previous.get("run", uuid.uuid4().hex))  # killed before its first step it keeps its id
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
            write(self.config_file, json.dumps(self.record, indent=1, ensure_ascii=False) + "\n")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others train in this folder."""
        self._lock.close()

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:08d}"

    def _before(self, config: RunConfig, inputs: Mapping[str, str], accept: Sequence[str]) -> dict[str, Any]:
        """The contents of `config.json`; empty where the run was killed before there was one.

        Raises `Refused` where a value or an input differs that may not change on resume.
        """
        if not self.config_file.exists() and not self.metrics_file.exists():
            return {}
        saved = RunConfig.load(self.config_file)
        self.changed = ending(saved) != ending(config)
        saved_values, current_values = (deciding(c.record()) for c in (saved, config))
        saved_steps, steps = take_length(saved_values), take_length(current_values)
        if saved_steps is not None and steps is not None and steps < saved_steps:
            raise Refused(
                f"{self.folder}: --resume expects at least the steps of before: the last phase had "
                f"{saved_steps}, now it has {steps}; to end early, stop the run with Ctrl-C"
            )
        if saved_steps != steps and config.train.schedule != "constant":
            self.notes.append(
                f"train.schedule = {config.train.schedule} now runs over {steps} steps, not {saved_steps}: "
                "the learning rate is not that of one run of that length"
            )
        different = list(differences(saved_values, current_values))
        if different:
            values = "; ".join(f"{key} was {old}, now it is {new}" for key, old, new in different)
            raise Refused(f"{self.folder}: --resume expects the same configuration, but {values}")
        record: dict[str, Any] = json.loads(self.config_file.read_text(encoding="utf-8"))
        recorded = record.get("inputs", {})
        names = list({**recorded, **inputs})
        allowed = ", ".join(names)
        for name in accept:
            if name not in allowed.split(", "):
                raise Refused(f"--accept {name}: expected an input of the run: {allowed}")
        unknown = [name for name in names if name not in recorded]
        if unknown:
            self.notes.append(
                f"when the run began, no fingerprint of what {', '.join(unknown)} names was recorded, so it "
                "isn't known whether it has changed"
            )
        changed = [name for name in recorded if recorded[name] != inputs.get(name)]
        refused = [name for name in changed if set(accept).isdisjoint(name.split(", "))]
        if refused:
            flags = " ".join(f"--accept {name.split(', ')[0]}" for name in refused)
            raise Refused(
                f"{self.folder}: --resume expects the inputs of before, but what {', '.join(refused)} names "
                "has changed since the run began. What to do: put it back, start a new run, or go on with "
                f"what is there now: --resume {flags}"
            )
        if changed:
            self.notes.append(f"what {', '.join(changed)} names has changed since the run began (--accept)")
        return record

    def has_steps(self) -> bool:
        """Whether the metrics of a step were logged, besides the measurement before the first one."""
        if not self.metrics_file.exists():
            return False
        return any(_step(line) for line in self.metrics_file.read_bytes().splitlines())

    def forget_after(self, step: int) -> list[int]:
        """Drop the metrics of uncommitted steps; return the numbers of other unreadable lines."""
        if self.held_out_file.exists():
            _drop_after(self.held_out_file, step)
        if (self.folder / SIDE_BY_SIDE).exists():
            forget_after(self.folder, step)
        return _drop_after(self.metrics_file, step) if self.metrics_file.exists() else []

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append one object; what isn't a finite number is unknown: null."""
        with writing(self.metrics_file), self.metrics_file.open("a", encoding="utf-8") as f:
            f.write(json.dumps(to_json_values(metrics), allow_nan=False) + "\n")

    def log_held_out(self, step: int, samples: Sequence[Sample]) -> None:
        """Append the first response to each of the first held-out prompts; of an episode its last sample."""
        episode_ends = {int(s.meta["index"]): s for s in samples}
        prompt_ends: dict[str, Sample] = {}
        for index in sorted(episode_ends):
            prompt_ends.setdefault(episode_ends[index].prompt_id, episode_ends[index])
        responses = []
        for sample in list(prompt_ends.values())[:KEPT]:
            record = {"prompt": sample.prompt, "response": sample.response, "reward": sample.reward}
            known = {name: sample.meta.get(name) for name in ("answer", "observations")}
            known["prompt_id"] = sample.prompt_id
            responses.append(record | {name: value for name, value in known.items() if value is not None})
        with writing(self.held_out_file), self.held_out_file.open("a", encoding="utf-8") as f:
            f.write(json.dumps({"step": step, "responses": responses}) + "\n")

    def sync(self) -> None:
        """Wait until the metrics are on the disk."""
        with writing(self.metrics_file):
            if self.metrics_file.exists():
                sync(self.metrics_file)


def _drop_after(path: Path, step: int) -> list[int]:
    """Drop the lines of later steps; return the numbers of unreadable lines, without a torn last one."""
    remaining, unreadable = [], []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        line_step = _step(line)
        if line_step is None:
            unreadable.append(number)
        elif line_step <= step:
            remaining.append(line.decode())
    if unreadable[-1:] == [len(lines)]:  # of a run that was killed
        unreadable.pop()
    write(path, "".join(line + "\n" for line in remaining))
    return unreadable


def _step(line: bytes) -> int | None:
    """The step of a line; None where it is unreadable."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


def to_json_values(value: Any) -> Any:
    """For JSON: None in place of what isn't a finite number."""
    if isinstance(value, Mapping):
        return {k: to_json_values(v) for k, v in value.items()}
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
