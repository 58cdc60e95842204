"""Fingerprints of what a run reads besides its configuration, by which `--resume` notices changes.

Code is fingerprinted with the modules that it imports, directly or not, from its own folder, the working
directory and other folders of `sys.path`. Installed packages aren't, nor is what code opens or imports by a
name that it computes.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from agro.config import RunConfig
from agro.io.files import digest
from agro.logs import record_files
from agro.models.policy import Policy
from agro.models.reference import fingerprint
from agro.store import Store
from agro.store.location import exists

PACKAGES = ("site-packages", "dist-packages")
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
    digests |= _of_prompts(config) | of_scoring(config, functions)
    digests |= _of_phases(config, _objective_and_stores)
    return digests


def of_scoring(config: RunConfig, functions: Functions) -> dict[str, str]:
    """By key, of what responses are made and scored with."""
    digests: dict[str, str] = {}
    if config.scores:
        digests |= _of_code("reward", config.reward.name, config.reward.options, functions)
        digests |= _of_code("reward.meaning", config.reward.meaning, {}, functions)
        for i, part in enumerate(config.reward.functions):
            digests |= _of_code(f"reward.functions.{i}", part.name, part.options, functions)
    return digests | _of_phases(config, _environment)


def _of_prompts(config: RunConfig) -> dict[str, str]:
    digests = {}
    for key in ("prompts", "eval_prompts"):
        if paths := config.data.paths(key):
            digests[f"data.{key}"] = " ".join(map(record_files.fingerprint, paths))
    return digests


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


def _objective_and_stores(config: RunConfig) -> dict[str, str]:
    """The objective's code, and the samples of stores that are only read."""
    digests = _of_code("objective", config.objective.name, {}, {})
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
    digests = {f"{section}.options.{key}": digest(path) for key, path in _files(options)}
    if name is None:
        return digests
    code = _of_object(functions[name]) if name in functions else _of_module(name)
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


def _of_object(function: Callable[..., Any]) -> str | None:
    """Of the source text of a function or of an object's class; None where it is unknown."""
    code = inspect.unwrap(function) if inspect.isroutine(function) else type(function)
    try:
        return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()
    except (OSError, TypeError):
        return None


def _of_module(name: str) -> str | None:
    """Of file.py:NAME, module:NAME or verifiers:ENV_ID; None without a file, as of a built-in name."""
    location, _, attribute = name.rpartition(":")
    if location == "verifiers":
        location = attribute.rpartition("/")[2].replace("-", "_")
    importlib.invalidate_caches()
    folders = _folders_of_code()
    files: dict[str, Path] = {}
    if location.endswith(".py"):
        path = Path(location).expanduser()
        folders.insert(0, str(path.resolve().parent))
        files = {"": path} if path.is_file() else {}
    elif location:
        files = dict(_find(location, folders)) or _installed(location)
    if not files:
        return None
    total = hashlib.sha256()
    for module, content in sorted(_with_imports(files, folders).items()):
        total.update(f"{module} {content}\n".encode())
    return total.hexdigest()


def _with_imports(files: Mapping[str, Path], folders: Sequence[str]) -> dict[str, str]:
    """SHA-256 by module, of files and of what they import from `folders`."""
    digests: dict[str, str] = {}
    pending = list(files.items())
    while pending:
        module, path = pending.pop()
        if module in digests:
            continue
        digests[module] = digest(path)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for imported in _imports(path, package):
            if imported.partition(".")[0] != "agro":  # its version is in config.json
                pending += _find(imported, folders)
    return digests


def _imports(path: Path, package: str) -> Iterator[str]:
    """The modules that a file imports, and names in them, which may be modules too."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # not Python's own source text
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # beyond the top-level package
                start = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield from (f"{start}.{alias.name}" for alias in node.names)


def _find(module: str, folders: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """A module's file and those of the packages that it is in, without importing them."""
    locations: Sequence[str] | None = folders
    name = ""
    for part in module.split("."):
        spec = PathFinder.find_spec(part, locations) if locations else None
        if spec is None:
            return
        name = f"{name}.{part}".removeprefix(".")
        if spec.has_location and spec.origin is not None:
            yield name, Path(spec.origin)
        locations = spec.submodule_search_locations and list(spec.submodule_search_locations)


def _installed(module: str) -> dict[str, Path]:
    """The file of a module outside the folders of the user's own code."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return {}
    if spec is None or not spec.has_location or spec.origin is None:
        return {}
    return {module: Path(spec.origin)}


def _folders_of_code() -> list[str]:
    """The folders that modules are imported from, without those of installed packages."""
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = []
    for folder in dict.fromkeys([os.getcwd(), *sys.path]):
        path = Path(folder)
        is_installed = any(path.is_relative_to(i) for i in installed) or path.name in PACKAGES
        if folder and not is_installed:
            folders.append(folder)
    return folders
