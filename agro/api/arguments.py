"""Convert the arguments of `agro.train` to configuration values: settings, rewards, and objects, which are
written to the run folder. Choose the method, β and learning rate if none is named."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from agro.config import RunConfig
from agro.errors import Refused
from agro.io import peers
from agro.io.files import complete_folder, write
from agro.io.numbers import short
from agro.io.strictjson import dumps
from agro.models.pretrained import without_bars
from agro.objectives import describe, get
from agro.objectives.options import described
from agro.rewards.function import inline_name, name_of
from agro.store import Store
from agro.store.location import exists, location_of
from agro.train.trainable import kind_of
from agro.types import Prompt

Function = Callable[..., Any]
RewardArgument = str | Function | Mapping[str | Function, float] | None


def is_path(value: Any) -> bool:
    return isinstance(value, str | Path)


def json_value(value: Any) -> Any:
    """Convert a value to JSON: NumPy and torch arrays and scalars to lists and numbers, tuples to lists,
    paths and times to text."""
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [json_value(item) for item in value] if isinstance(value, list | tuple) else value


def _known(value: Any) -> Any:
    """Replace NaN and pandas' missing values with None."""
    is_missing = type(value).__name__ in ("NAType", "NaTType") or (
        isinstance(value, float) and value != value
    )
    return None if is_missing else value


def configured(objective: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nest an objective and settings into sections.

    A key is `section.key`, `section__key`, a complete section, or an option of the objective. Raises
    `Refused` for any other key, and for a key that is set twice.
    """
    values: dict[str, Any] = {}
    unknown: list[str] = []
    put(values, "objective.name", objective)
    for name, value in settings.items():
        key = name.replace("__", ".")
        if name in peers.ALIASES and name != "beta":
            key = name  # the configuration resolves it
        elif "." not in key and name not in RunConfig.model_fields:
            if name not in describe(objective)["options"]:
                unknown.append(name + _instead(name))
            key = f"objective.{name}"
        put(values, key, value)
    if unknown:
        options = ", ".join(describe(objective)["options"])
        raise Refused(
            f"agro.train: unknown: {'; '.join(unknown)}. Expected "
            "settings with their section, such as train__steps=20, where __ is the dot, or options of "
            f"{objective}: {options}"
        )
    return values


def put(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key, which must be unset, to a value, or each of its keys to a mapping's item."""
    *sections, key = dotted.split(".")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise Refused(f"{dotted}: {section} is a value, not a section")
    if isinstance(value, Mapping) and isinstance(target.get(key), dict):
        for inner, item in value.items():
            put(values, f"{dotted}.{inner}", item)
    elif key in target:
        raise Refused(f"{dotted}: set twice, to {target[key]!r:.80} and to {value!r:.80}")
    else:
        target[key] = json_value(value)


def _instead(name: str) -> str:
    """Suggest known settings for an unknown argument, in brackets; empty if nothing is similar."""
    ways = []
    for section, field in RunConfig.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and name in kind.model_fields:
                ways.append(f"{section}__{name}")
    near = f"did you mean {' or '.join(ways)}?" if ways else peers.did_you_mean(name, peers.ALIASES)
    answer = peers.hint(f"objective.{name}") or near
    return f" ({answer})" if answer else ""


LORA = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
MODEL_KEYS = ("base_model_name_or_path", "task_type")  # agro sets these


def lora_of(peft: Any) -> dict[str, Any]:
    """Convert a `peft.LoraConfig` to the values of `policy.lora`.

    Raises `Refused` for any other peft configuration, and for settings that agro's adapters lack.
    """
    if type(peft).__name__ != "LoraConfig":
        raise Refused(f"peft: expected a peft.LoraConfig, got {type(peft).__name__}")
    values, defaults, targets = vars(peft), vars(type(peft)()), peft.target_modules
    if peft.task_type not in (None, "CAUSAL_LM"):
        raise Refused(f"peft: task_type: expected CAUSAL_LM, got {peft.task_type}")
    allowed = {*LORA, *MODEL_KEYS}
    unsupported = [name for name in values if name not in allowed and values[name] != defaults.get(name)]
    if unsupported:
        got = ", ".join(f"{name}={values[name]!r:.40}" for name in unsupported)
        raise Refused(
            f"peft: agro's adapters have {', '.join(LORA)} alone, got {got}. What to do: leave it out, or "
            "pass the folder of an adapter made with it as policy__lora={'start': FOLDER}"
        )
    if targets != "all-linear" and (targets is None or isinstance(targets, str)):
        raise Refused(
            f"peft: target_modules: expected 'all-linear' or a list of module names, got {targets!r}"
        )
    names = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
    return {"rank": peft.r, "alpha": peft.lora_alpha, "targets": names}


def reward_values(rewards: RewardArgument, functions: dict[str, Function]) -> dict[str, Any]:
    """Return the values of [reward], and add functions that only this process has to `functions`.

    `rewards`: the name of a reward, a function, or a mapping from these to weights.
    """
    if rewards is None:
        return {}
    if not isinstance(rewards, Mapping):
        return {"name": _name(rewards, functions)}
    parts = []
    for reward, weight in rewards.items():
        # Metrics label a function by its own name; a named reward or a lambda needs no label.
        label = None if isinstance(reward, str) else getattr(reward, "__name__", "<")
        label = None if label is None or "<" in label else label
        parts.append({"name": _name(reward, functions), "weight": weight, "label": label})
    return {"functions": parts}


def check_pooled(values: Mapping[str, Any], functions: Mapping[str, Function]) -> None:
    """Raise `Refused` for settings of reward processes if all rewards run in this process."""
    named = [part["name"] for part in values.get("functions", ())] or [values.get("name")]
    for key in ("timeout", "workers"):
        if key in values and all(name in functions for name in named):
            raise Refused(
                f"reward.{key} is for rewards in worker processes, but {', '.join(named)} is called in this "
                "one. What to do: leave it out, or write the function to a file and pass "
                "'file.py:function'"
            )


def _name(reward: str | Function, functions: dict[str, Function]) -> str:
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise Refused(
            f"reward: expected a name, 'file.py:function', a function, or weights by them, got {reward!r:.80}"
        )
    # Another process can import it from its module, unless that is a notebook or a script.
    module = sys.modules.get(getattr(reward, "__module__", None) or "")
    if module is not None and module.__name__ != "__main__" and getattr(module, "__spec__", None) is not None:
        with suppress(AttributeError):
            if attrgetter(reward.__qualname__)(module) is reward:
                return name_of(reward)
    name = base = inline_name(reward)
    while name in functions:
        name = f"{base}_{len(functions) + 1}"
    functions[name] = reward
    return name


def write_rows(data: Any, path: Path, name: str) -> str:
    """Write the rows of a list, a `datasets.Dataset` or a DataFrame as JSON Lines and return the path.

    A row is a record; a prompt may also be text, messages, or a `Prompt`. Missing values (NaN) in a log or a
    DataFrame become None. Raises `Refused` for any other row, and for a value that JSON can't represent.
    `name`: "log", or the argument name of the prompts, for messages.
    """
    columns, misses = getattr(data, "column_names", None), name == "log"
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        data, misses = data.to_dict("records"), True
    elif isinstance(columns, dict):
        raise Refused(f"{name}: expected one split of the data set, got {', '.join(columns)}")
    elif not isinstance(data, list | tuple) and columns is None:
        raise Refused(
            f"{name}: expected a path, a list, a datasets.Dataset or a pandas DataFrame, got "
            f"{type(data).__name__}"
        )
    lines = []
    for number, row in enumerate(data):
        location = f"{name}: row {number}"
        if isinstance(row, Prompt):
            row = {"prompt": row.text, "prompt_id": row.id, **row.columns}
        elif isinstance(row, str | list) and name != "log":
            row = {"prompt": row}
        elif not isinstance(row, Mapping):
            raise Refused(f"{location}: expected a dictionary, got {row!r:.80}")
        if misses:
            row = {key: _known(item) for key, item in row.items()}
        lines.append(dumps(json_value(row), location) + "\n")
    if not lines:
        raise Refused(f"{name}: expected at least one row, got none")
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, "".join(lines))
    return str(path)


def model_folder(model: Any, tokenizer: Any, folder: Path) -> str:
    """Return a model's folder or hub name; write a model object and its tokenizer to `folder`."""
    if isinstance(model, tuple):
        if len(model) != 2 or tokenizer is not None:
            raise Refused("model: expected (model, tokenizer) and tokenizer=None, or a model alone")
        model, tokenizer = model
    if is_path(model):
        if tokenizer is not None:
            raise Refused(f"tokenizer: {model} has its own; leave it out, or load the model and pass both")
        return str(model)
    if hasattr(model, "peft_config"):
        raise Refused(
            "model: expected a model without an adapter. What to do: pass model.merge_and_unload(), or the "
            "base model with peft=LoraConfig(…)"
        )
    if not (hasattr(model, "save_pretrained") and hasattr(model, "generate")):
        raise Refused(
            "model: expected a folder, a hub name, or a transformers causal language model with its "
            f"tokenizer, got {type(model).__name__}"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise Refused(f"tokenizer: expected the tokenizer of the model object, got {tokenizer!r:.80}")
    with complete_folder(folder) as unfinished, without_bars():
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return str(folder)


# The recipes' β = 0.01 is for rewards from 0 to 1 and 256 tokens. β scales with the rewards' range, and with
# 1/length of longer responses. On shorter ones 0.1 ended .01 to .03 lower (reproductions/panel/studies.py).
LARGEST, PER_TOKEN = 0.01, 0.01 * 256
LETTERS = 4  # approximate characters per token, for logs without tokens
METHOD_KEYS = {
    "data": ("spread",),
    "train": ("gain_ratio", "step_kl", "schedule"),
}  # settings that belong to a recipe's method, in addition to its objective


class Chosen(NamedTuple):
    """Chosen settings by dotted key, and a sentence about each."""

    settings: dict[str, Any]
    notes: list[str]


def choose(values: Mapping[str, Any]) -> Chosen:
    """Choose the method, `objective.beta` and `train.lr` if nested values leave them open."""
    config = RunConfig.of(values, "agro.train")
    chosen = Chosen({}, [])
    location = None if config.data.store is None else location_of(config.data.store)
    opened = None if location is None or not exists(location) else Store.open(location, read_only=True)
    with opened or nullcontext() as store:
        log = store if config.data.replay_at(0) else None  # the log that steps draw from
        recipe = _recipe(config, log)
        if recipe:
            base = RunConfig.load(recipe)
            for name, value in base.objective.options.items():
                if name != "beta":
                    chosen.settings[f"objective.{name}"] = value
            for section, names in METHOD_KEYS.items():
                explicit, preset = (getattr(each, section).model_fields_set for each in (config, base))
                for name in names:
                    if name in preset and name not in explicit:
                        chosen.settings[f"{section}.{name}"] = getattr(getattr(base, section), name)
            chosen.notes.append(f"the method is that of recipe {recipe}")
        options = described(get(config.objective.name).options)
        if options.get("beta", {}).get("required", False) and "beta" not in config.objective.options:
            beta, reason = _beta(config, log, None if store is None else store.survey.spread_of_rewards())
            chosen.settings["objective.beta"] = beta
            chosen.notes.append(f"objective.beta = {beta:g}, for {reason}")
    if "lr" not in config.train.model_fields_set:
        chosen.settings["train.lr"] = "auto"
        chosen.notes.append("train.lr = auto, found at the first step")
    return chosen


def _recipe(config: RunConfig, log: Store | None) -> str:
    """Return the recipe for the data of a run whose method is just agro and β; empty for other runs."""
    if config.objective.name != "agro" or config.objective.options.keys() - {"beta"} or config.phases:
        return ""
    share = config.data.replay_at(0)
    if log is None:
        return "fresh" if share == 0 and config.train.groups > 1 else ""
    kind = kind_of(log)
    if kind == "log" and share < 1:
        return "mixed"
    return kind if kind in ("log", "feedback") else ""


def _beta(config: RunConfig, log: Store | None, spread: tuple[float, float] | None) -> tuple[float, str]:
    """Choose β from the mean response length of the log, else `sampler.max_new`, and from `spread`, the
    lowest and highest reward, else 0 and 1. Return it with the reason."""
    length: float = config.sampler.max_new
    length_text = f"responses of at most {config.sampler.max_new} tokens"
    rows = [] if log is None else [row for group in log.survey.each_group_rows() for row in group]
    if rows:
        length = max(1.0, math.fsum(row.length or len(row.response) / LETTERS for row in rows) / len(rows))
        length_text = f"responses of {short(length)} tokens on average"
    reward_range, reward_text = 1.0, "rewards from 0 to 1 (assumed; none is known yet)"
    if spread is not None and spread[1] > spread[0]:
        reward_range, reward_text = spread[1] - spread[0], f"rewards from {spread[0]:g} to {spread[1]:g}"
    beta = float(short(reward_range * min(LARGEST, PER_TOKEN / length)))
    return beta, f"{reward_text} and {length_text}"
