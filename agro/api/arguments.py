"""Arguments of `agro.train` as the values of a configuration: settings, rewards, objects that are written
into the run folder, and what a run takes that names no method, β or learning rate."""

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
    """A value as JSON and a configuration have it: arrays and scalars of NumPy and torch as lists and
    numbers, tuples as lists, paths and times as text."""
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
    """None for what is missing: NaN, and what pandas has in its place."""
    is_missing = type(value).__name__ in ("NAType", "NaTType") or (
        isinstance(value, float) and value != value
    )
    return None if is_missing else value


def configured(objective: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values of an objective and settings.

    A key is `section.key`, or `section__key`, or a complete section, or else an option of the objective.
    Raises `Refused` for another key, and for one that is given twice.
    """
    values: dict[str, Any] = {}
    unknown: list[str] = []
    put(values, "objective.name", objective)
    for name, value in settings.items():
        key = name.replace("__", ".")
        if name in peers.ALIASES and name != "beta":
            key = name  # which the configuration knows
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
    """Put a value, or each item of a mapping, under a dotted key, which must have none yet."""
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
        raise Refused(f"{dotted}: given twice, as {target[key]!r:.80} and as {value!r:.80}")
    else:
        target[key] = json_value(value)


def _instead(name: str) -> str:
    """What an unknown argument may be here, in brackets; empty where nothing is near."""
    ways = []
    for section, field in RunConfig.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and name in kind.model_fields:
                ways.append(f"{section}__{name}")
    near = f"did you mean {' or '.join(ways)}?" if ways else peers.did_you_mean(name, peers.ALIASES)
    answer = peers.hint(f"objective.{name}") or near
    return f" ({answer})" if answer else ""


LORA = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
OF_THE_MODEL = ("base_model_name_or_path", "task_type")  # agro writes its own


def lora_of(peft: Any) -> dict[str, Any]:
    """The values of `policy.lora` for a `peft.LoraConfig`.

    Raises `Refused` for another configuration of peft's, and where it sets what agro's adapters don't have.
    """
    if type(peft).__name__ != "LoraConfig":
        raise Refused(f"peft: expected a peft.LoraConfig, got {type(peft).__name__}")
    values, defaults, targets = vars(peft), vars(type(peft)()), peft.target_modules
    if peft.task_type not in (None, "CAUSAL_LM"):
        raise Refused(f"peft: task_type: expected CAUSAL_LM, got {peft.task_type}")
    allowed = {*LORA, *OF_THE_MODEL}
    unsupported = [name for name in values if name not in allowed and values[name] != defaults.get(name)]
    if unsupported:
        got = ", ".join(f"{name}={values[name]!r:.40}" for name in unsupported)
        raise Refused(
            f"peft: agro's adapters have {', '.join(LORA)} alone, got {got}. What to do: leave it out, or "
            "give the folder of an adapter that was made with it as policy__lora={'start': FOLDER}"
        )
    if targets != "all-linear" and (targets is None or isinstance(targets, str)):
        raise Refused(
            f"peft: target_modules: expected 'all-linear' or a list of names of modules, got {targets!r}"
        )
    names = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
    return {"rank": peft.r, "alpha": peft.lora_alpha, "targets": names}


def reward_values(rewards: RewardArgument, functions: dict[str, Function]) -> dict[str, Any]:
    """The values of [reward]; functions that only this process has are put into `functions` by their names.

    `rewards`: the name of a reward, a function, or weights by them.
    """
    if rewards is None:
        return {}
    if not isinstance(rewards, Mapping):
        return {"name": _name(rewards, functions)}
    parts = []
    for reward, weight in rewards.items():
        # A function's own name, for metrics; a name needs no other, and neither do functions without one.
        label = None if isinstance(reward, str) else getattr(reward, "__name__", "<")
        label = None if label is None or "<" in label else label
        parts.append({"name": _name(reward, functions), "weight": weight, "label": label})
    return {"functions": parts}


def check_pooled(values: Mapping[str, Any], functions: Mapping[str, Function]) -> None:
    """Raise `Refused` for settings of processes where all rewards are called in this one."""
    named = [part["name"] for part in values.get("functions", ())] or [values.get("name")]
    for key in ("timeout", "workers"):
        if key in values and all(name in functions for name in named):
            raise Refused(
                f"reward.{key} is of rewards in processes of their own, but {', '.join(named)} is called in "
                "this one. What to do: leave it out, or write the function into a file and give "
                "'file.py:function'"
            )


def _name(reward: str | Function, functions: dict[str, Function]) -> str:
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise Refused(
            f"reward: expected a name, 'file.py:function', a function, or weights by them, got {reward!r:.80}"
        )
    # Another process finds it in its module, unless that is a notebook or a script.
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
    """Write the rows of a list, a `datasets.Dataset` or a DataFrame as JSON Lines, and return the path.

    A row is a record; of a list of prompts also text, messages, or a `Prompt`. What is missing (NaN) in a log
    or a DataFrame becomes None. Raises `Refused` for another row, and for a value that JSON doesn't have.
    `name`: "log", or what messages call the prompts.
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
    """The folder or hub name of a model; a model object is written to `folder`, with its tokenizer."""
    if isinstance(model, tuple):
        if len(model) != 2 or tokenizer is not None:
            raise Refused("model: expected (model, tokenizer) and no tokenizer besides, or a model alone")
        model, tokenizer = model
    if is_path(model):
        if tokenizer is not None:
            raise Refused(f"tokenizer: {model} has its own; leave it out, or load the model and give both")
        return str(model)
    if hasattr(model, "peft_config"):
        raise Refused(
            "model: expected a model without an adapter. What to do: give model.merge_and_unload(), or the "
            "model that it belongs to with peft=LoraConfig(…)"
        )
    if not (hasattr(model, "save_pretrained") and hasattr(model, "generate")):
        raise Refused(
            "model: expected a folder, a hub name, or a causal language model of transformers with its "
            f"tokenizer, got {type(model).__name__}"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise Refused(f"tokenizer: expected the tokenizer of the model object, got {tokenizer!r:.80}")
    with complete_folder(folder) as unfinished, without_bars():
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return str(folder)


# The recipes' β = 0.01 is for rewards from 0 to 1 and 256 tokens. It goes with the rewards, and with 1/length
# of longer responses. On shorter ones 0.1 ended .01 to .03 lower (reproductions/panel/studies.py).
LARGEST, PER_TOKEN = 0.01, 0.01 * 256
LETTERS = 4  # of a token, about, where a log has none
OF_METHOD = {
    "data": ("spread",),
    "train": ("gain_ratio", "step_kl", "schedule"),
}  # of a recipe, besides its objective


class Chosen(NamedTuple):
    """Settings by dotted key, and a sentence on each."""

    settings: dict[str, Any]
    notes: list[str]


def choose(values: Mapping[str, Any]) -> Chosen:
    """What nested values of a run leave open, of the method, `objective.beta` and `train.lr`."""
    config = RunConfig.of(values, "agro.train")
    chosen = Chosen({}, [])
    location = None if config.data.store is None else location_of(config.data.store)
    opened = None if location is None or not exists(location) else Store.open(location, read_only=True)
    with opened or nullcontext() as store:
        log = store if config.data.replay_at(0) else None  # that steps draw from
        recipe = _recipe(config, log)
        if recipe:
            # What a recipe says of the method, but for β and what is given, by dotted key.
            theirs = RunConfig.load(recipe)
            for name, value in theirs.objective.options.items():
                if name != "beta":
                    chosen.settings[f"objective.{name}"] = value
            for section, names in OF_METHOD.items():
                given, said = (getattr(each, section).model_fields_set for each in (config, theirs))
                for name in names:
                    if name in said and name not in given:
                        chosen.settings[f"{section}.{name}"] = getattr(getattr(theirs, section), name)
            chosen.notes.append(f"the method is that of recipe {recipe}")
        options = described(get(config.objective.name).options)
        if options.get("beta", {}).get("required", False) and "beta" not in config.objective.options:
            beta, why = _beta(config, log, None if store is None else store.survey.spread_of_rewards())
            chosen.settings["objective.beta"] = beta
            chosen.notes.append(f"objective.beta = {beta:g}, for {why}")
    if "lr" not in config.train.model_fields_set:
        chosen.settings["train.lr"] = "auto"
        chosen.notes.append("train.lr = auto, found at the first step")
    return chosen


def _recipe(config: RunConfig, log: Store | None) -> str:
    """The recipe for the data of a run that says no more of its method than agro and β; empty for another."""
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
    """By the mean length of a log's responses, else the largest that are sampled, and by how far rewards are
    apart, lowest and highest: 0 and 1 where nothing is known."""
    length: float = config.sampler.max_new
    of_length = f"responses of at most {config.sampler.max_new} tokens"
    rows = [] if log is None else [row for group in log.survey.each_group_rows() for row in group]
    if rows:
        length = max(1.0, math.fsum(row.length or len(row.response) / LETTERS for row in rows) / len(rows))
        of_length = f"responses of {short(length)} tokens on average"
    apart, of_rewards = 1.0, "rewards from 0 to 1 (taken to be; none is known yet)"
    if spread is not None and spread[1] > spread[0]:
        apart, of_rewards = spread[1] - spread[0], f"rewards from {spread[0]:g} to {spread[1]:g}"
    beta = float(short(apart * min(LARGEST, PER_TOKEN / length)))
    return beta, f"{of_rewards} and {of_length}"
