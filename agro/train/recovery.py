"""The checkpoints of a run: those that it commits, the last complete one, from which it resumes, and the
fingerprints of what it reads, by which `--resume` notices changes.

A checkpoint is a folder of safetensors and JSON, never pickles. It is written to a temporary folder, synced
and renamed, and its parent is synced. Only then does one transaction of the store write (run, step, digest),
the row that makes the checkpoint valid. The last few are kept, since a disk may damage one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agro.config import PolicyConfig, RunConfig
from agro.errors import Refused
from agro.io import record_files
from agro.io.files import complete_folder, digest, digest_of_module, digest_of_object, writing
from agro.models.policy import Policy
from agro.models.reference import fingerprint
from agro.rollout import Activity
from agro.runs.folder import Run
from agro.store import Commit, Store
from agro.store.location import exists
from agro.train.learner import AVERAGE, Learner
from agro.train.phases import Phase, Position, derive
from agro.train.stored_tensors import assign
from agro.train.stored_tensors import exists as has_part

POSITION = "position.json"


@dataclass
class Checkpoints:
    """Commits the position of a run, with all that its learner needs to continue there."""

    learner: Learner
    store: Store
    folder: Run
    activity: Activity
    saved: int = -1  # the last step with a checkpoint; -1: none has one

    def commit(self, phase: Phase, position: Position) -> Position:
        """Write a checkpoint, then the row of the store that makes it valid."""
        self.activity.stage("saving")
        with complete_folder(self.folder.checkpoint(position.step)) as temporary:
            self.learner.save(temporary)
            content = asdict(replace(position, digest=""))
            (temporary / POSITION).write_text(json.dumps(content, indent=1), encoding="utf-8")
            files = _digests(temporary)
        names = "".join(f"{name} {files[name]}\n" for name in sorted(files))
        position = replace(position, digest=hashlib.sha256(names.encode()).hexdigest())
        self.folder.sync()
        self.store.ledger.commit(self.folder.id, position.step, position.digest, files=files)
        self.saved = position.step
        self.prune(phase)
        return position

    def commit_done(self, phase: Phase, position: Position) -> None:
        """Commit the last step that was done, unless the weights moved since then."""
        if position.step != self.saved and self.learner.version == position.version:
            self.store.ledger.rewind(self.folder.id, position.step)
            self.commit(phase, position)

    def prune(self, phase: Phase) -> None:
        """Delete all but the one that the phase began with and the last `train.keep` commits."""
        commits = self.store.ledger.commits(self.folder.id)[-phase.config.train.keep :]
        remaining = {phase.begins, *(commit.step for commit in commits)}
        folders = {self.folder.checkpoint(step) for step in remaining}
        for old in set((self.folder.folder / "checkpoints").glob("step-*")) - folders:
            with writing(old):
                shutil.rmtree(old)


def go_back(store: Store, folder: Run, phases: Sequence[Phase], say: Callable[[str], None]) -> Position:
    """The position to resume from. What came after it is undone in the store, or marked as redone.

    Raises `Refused` where the run committed checkpoints but none of them is complete.
    """
    store.tables.check()
    if folder.has_steps() and not store.ledger.knows(folder.id):
        raise Refused(
            f"{store.path}: expected the store that the run in {folder.folder} began with, got one that has "
            "nothing of this run. What to do: put the run's store back, or start a new run with another --out"
        )
    commits = {c.step: c for c in store.ledger.commits(folder.id)}
    problems = [f"row {row} of the commits in {store.path}" for row in store.tables.damaged("commits")]
    chosen: Commit | None = None
    for commit in reversed(commits.values()):
        if problem := _damage(folder, phases, commit, commits):
            problems.append(problem)
            continue
        chosen = commit
        break
    if commits and chosen is None:
        raise Refused(
            f"{folder.folder}: no checkpoint that the run committed is complete: "
            f"{'; '.join(problems[:5])}. What to do: restore one of them from a copy, or start a new run "
            "with another --out"
        )
    step = chosen.step if chosen else 0
    if problems:
        say(f"damaged: {'; '.join(problems)}; resuming from step {step}")
    # Metrics first: where the run is killed in between, its store still knows it.
    for line in folder.forget_after(step or -1):  # the measurement of step 0 is made again
        say(f"damaged: {folder.metrics_file}:{line}; dropped")
    store.ledger.rewind(folder.id, to=chosen)
    return read_position(folder.checkpoint(step), chosen.digest) if chosen else Position()


def start_of(folder: Run, phase: Phase) -> Path | None:
    """The checkpoint that the phase began with; None at the start of the run."""
    return folder.checkpoint(phase.begins) if phase.begins else None


def _damage(folder: Run, phases: Sequence[Phase], commit: Commit, commits: Mapping[int, Commit]) -> str:
    """Why the run can't resume from this commit: damage to its checkpoint, or to its phase's reference."""
    problem = damage(folder.checkpoint(commit.step), commit)
    if problem:
        return problem
    position = read_position(folder.checkpoint(commit.step), commit.digest)
    for phase in phases:
        # Whose reference is, or begins as, the checkpoint that the phase began with.
        is_anchored = phase.begins > 0 and phase.config.policy.reference in ("phase", "ema", "periodic")
        if is_anchored and phase.name == position.phase and position.step < phase.ends:
            anchor = commits.get(phase.begins)
            if anchor is None or anchor.digest != position.anchor:
                return f"step {commit.step}: the commit of step {phase.begins}, its reference, is missing"
            return damage(folder.checkpoint(phase.begins), anchor)
    return ""


def is_checkpoint(folder: Path) -> bool:
    """Whether it is RUN/checkpoints/step-N."""
    return (folder / POSITION).is_file()


def load_checkpoint(folder: Path, config: PolicyConfig) -> Policy:
    """`config`: [policy] of the run. Where the run averages its weights, these are averaged too."""
    run = RunConfig.load(folder.absolute().parents[1] / "config.json")
    policy = Policy.load(config, seed=derive(run.train.seed, "weights"))
    assign(folder, AVERAGE if has_part(folder, AVERAGE) else "model", policy.weights())
    return policy


def read_position(folder: Path, digest: str) -> Position:
    content = json.loads((folder / POSITION).read_text(encoding="utf-8"))
    return Position(**{**content, "digest": digest})


def damage(folder: Path, commit: Commit) -> str:
    """Which files of a committed checkpoint are missing or changed; empty where it is complete."""
    if not folder.is_dir():
        return f"{folder} is missing"
    present = _digests(folder)
    problems = []
    for name, expected in commit.files.items():
        if name not in present:
            problems.append(f"{folder / name} is missing")
        elif present[name] != expected:
            problems.append(f"{folder / name} was changed after it was written")
    return ", ".join(problems)


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 by the name of a file."""
    return {path.name: digest(path) for path in folder.iterdir()}


WRITTEN = {"judge": "cache"}  # by reward, the option that names a file to which a run itself adds
Functions = Mapping[str, Callable[..., Any]]  # rewards that are objects of this process, by their names


def fingerprints(
    config: RunConfig, policy: Policy, reference: Policy | None, functions: Functions
) -> dict[str, str]:
    """By key, of the models, files and code that the configuration names and steps compute with."""
    names = [key for key in ("model", "new") if getattr(config.policy, key) is not None]
    if config.policy.lora is not None and config.policy.lora.start is not None:
        names.append("lora.start")
    if config.policy.chat.template is not None:
        names.append("chat.template")
    digests = {", ".join(f"policy.{name}" for name in names): fingerprint(policy)}
    if reference is not None and config.policy.reference == "model":
        digests["policy.reference_model"] = fingerprint(reference)
    for key in ("prompts", "eval_prompts"):
        if paths := config.data.paths(key):
            digests[f"data.{key}"] = " ".join(map(record_files.fingerprint, paths))
    digests |= of_scoring(config, functions)
    for phase in config.phase_names:
        # The code of the objective, of the engine and of what is around the source, and the samples of stores
        # that are only read.
        part = config.phase(phase)
        found = _of_code("objective", part.objective.name, {})
        found |= _of_files("source", part.source.options) | _of_files("engine", part.engine.options)
        for key, name in {"source.around": part.source.around, "engine.kind": part.engine.kind}.items():
            if code := digest_of_module(name or ""):
                found[key] = code
        for key in ("value_store", "eval_store"):
            path = getattr(part.data, key)
            if path is not None and path != part.data.store and exists(path):
                with Store.open(path, read_only=True) as store:
                    found[f"data.{key}"] = store.ledger.fingerprint()
        _add(digests, phase, found)
    return digests


def of_scoring(config: RunConfig, functions: Functions) -> dict[str, str]:
    """By key, of what responses are made and scored with."""
    digests: dict[str, str] = {}
    if config.scores:
        digests |= _of_code("reward", config.reward.name, functions, config.reward.options)
        digests |= _of_code("reward.meaning", config.reward.meaning, functions)
        for i, part in enumerate(config.reward.functions):
            digests |= _of_code(f"reward.functions.{i}", part.name, functions, part.options)
    for phase in config.phase_names:
        environment = config.phase(phase).environment
        if environment is not None:
            _add(digests, phase, _of_code("environment", environment.name, {}, environment.options))
    return digests


def _add(digests: dict[str, str], phase: str, of_phase: Mapping[str, str]) -> None:
    """Add those of a phase. A key that differs from an earlier phase's has a prefix."""
    for key, value in of_phase.items():
        if digests.setdefault(key, value) != value:
            digests[f"phases.{phase}.{key}"] = value


def _of_code(
    section: str, name: str | None, functions: Functions, options: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Of the code that `name` stands for, and of the files that options name."""
    digests = _of_files(section, options or {}, WRITTEN.get(name or "", ""))
    if name is not None:
        code = digest_of_object(functions[name]) if name in functions else digest_of_module(name)
        if code is not None:
            digests[f"{section}.name"] = code
    return digests


def _of_files(section: str, options: Mapping[str, Any], written: str = "") -> dict[str, str]:
    """Of the files whose path is the text of an option, also of a nested one, but for that of `written`."""
    digests: dict[str, str] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            digests |= _of_files(section, {f"{key}.{name}": of for name, of in value.items()}, written)
        elif isinstance(value, str) and key != written:
            with suppress(OSError, ValueError):  # a text that can't be a path
                if (path := Path(value).expanduser()).is_file():
                    digests[f"{section}.options.{key}"] = digest(path)
    return digests
