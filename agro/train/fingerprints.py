"""Fingerprints of what a run reads besides its configuration, by which `--resume` notices changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agro.config import RunConfig
from agro.io import record_files
from agro.io.files import digest, digest_of_module, digest_of_object
from agro.models.policy import Policy
from agro.models.reference import fingerprint
from agro.store import Store
from agro.store.location import exists

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
    return digests | of_scoring(config, functions) | _of_phases(config, _of_training)


def of_scoring(config: RunConfig, functions: Functions) -> dict[str, str]:
    """By key, of what responses are made and scored with."""
    digests: dict[str, str] = {}
    if config.scores:
        digests |= _of_code("reward", config.reward.name, config.reward.options, functions)
        digests |= _of_code("reward.meaning", config.reward.meaning, {}, functions)
        for i, part in enumerate(config.reward.functions):
            digests |= _of_code(f"reward.functions.{i}", part.name, part.options, functions)
    return digests | _of_phases(config, _environment)


def _of_phases(config: RunConfig, describe: Callable[[RunConfig], dict[str, str]]) -> dict[str, str]:
    """What `describe` returns for each phase. A key that differs from an earlier phase's has a prefix."""
    digests: dict[str, str] = {}
    for name in config.phase_names:
        for key, value in describe(config.phase(name)).items():
            if digests.setdefault(key, value) != value:
                digests[f"phases.{name}.{key}"] = value
    return digests


def _environment(config: RunConfig) -> dict[str, str]:
    if config.environment is None:
        return {}
    return _of_code("environment", config.environment.name, config.environment.options, {})


def _of_training(config: RunConfig) -> dict[str, str]:
    """The code of the objective, of the engine and of what is around the source, and the samples of stores
    that are only read."""
    digests = _of_code("objective", config.objective.name, {}, {})
    digests |= _of_code("source", None, config.source.options, {})
    digests |= _of_code("engine", None, config.engine.options, {})
    for key, name in {"source.around": config.source.around, "engine.kind": config.engine.kind}.items():
        if code := digest_of_module(name or ""):
            digests[key] = code
    for key in ("value_store", "eval_store"):
        path = getattr(config.data, key)
        if path is not None and path != config.data.store and exists(path):
            with Store.open(path, read_only=True) as store:
                digests[f"data.{key}"] = store.ledger.fingerprint()
    return digests


def _of_code(
    section: str, name: str | None, options: Mapping[str, Any], functions: Functions
) -> dict[str, str]:
    """Of the code that `name` stands for, and of the files that options name."""
    read = [(key, path) for key, path in _files(options) if key != WRITTEN.get(name or "")]
    digests = {f"{section}.options.{key}": digest(path) for key, path in read}
    if name is None:
        return digests
    code = digest_of_object(functions[name]) if name in functions else digest_of_module(name)
    return digests if code is None else digests | {f"{section}.name": code}


def _files(options: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """The options whose text is the path of a file, by their dotted keys."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", path) for inner, path in _files(value))
        elif isinstance(value, str):
            with suppress(OSError, ValueError):  # a text that can't be a path
                if (path := Path(value).expanduser()).is_file():
                    yield key, path
