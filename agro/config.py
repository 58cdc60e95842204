"""The configuration of a run: frozen, typed, each value with its unit and meaning; an unknown key is refused by name.

A recipe is TOML. `RunConfig.load(path, overrides)` reads one, or a run's own `config.json`; an override is
`section.key=value` with a TOML value (a bare word is text), or `phases.NAME.section.key=value`. A run has one phase, or those listed under `[[phases]]`,
each of which changes some values of the sections above it.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from agro.errors import Refused
from agro.types import Role

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NewModel(Section):
    """A small Llama with random weights and one token a character (or byte), made at the start of a run."""

    alphabet: str = Field("bytes", description="the characters of the vocabulary, or 'bytes' for all 256")
    hidden: Count = Field(128, description="width of the hidden states; a multiple of `heads`")
    layers: Count = Field(4, description="transformer blocks")
    heads: Count = Field(4, description="attention heads of a block")
    context: Count = Field(
        1024, description="tokens that the model can read at once, prompt and response together"
    )
    initializer_range: Positive = Field(
        0.02,
        description="standard deviation of the random weights; a narrow model learns from rewards only with a larger one, about 1/√hidden",
    )


class LoRA(Section):
    """A low-rank adapter (peft): the model's own weights stay, and the reference shares them."""

    rank: Count = Field(16, description="r, the width of the adapter's matrices")
    alpha: Positive = Field(32.0, description="the adapter's output is scaled by alpha / rank")
    targets: tuple[str, ...] = Field(
        ("all-linear",),
        description="names of the modules that get an adapter; all-linear: every linear layer but the head",
    )
    start: str | None = Field(
        None,
        description="folder of an adapter to go on with, instead of an empty one; rank, alpha and targets are its own then",
    )
    merge: bool = Field(
        True,
        description="RUN/model is the model with the adapter merged in; else RUN/model holds the adapter alone",
    )


class Chat(Section):
    """How a prompt becomes the text of a chat model; see `agro.chat`."""

    system: str | None = Field(
        None, description='the system message of conversations that have none; "" is an empty one'
    )
    wrap: bool = Field(
        False,
        description="a prompt that is plain text becomes a conversation of one user message; else it stays text",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="variables that the chat template reads, such as enable_thinking = false",
    )
    template: str | None = Field(
        None,
        description="file of a Jinja template that takes the place of the tokenizer's own, in RUN/model too",
    )


class Policy(Section):
    """The model that is trained, where it runs, and the reference π_ref."""

    model: str | None = Field(
        None,
        description="folder or hub name of a causal language model, or of an adapter, which is merged into its model",
    )
    new: NewModel | None = Field(None, description="instead of `model`: start from random weights")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of weights and updates: in bfloat16 an update smaller than a 256th of a weight rounds away",
    )
    device: str = Field("auto", description="auto: CUDA where there is one, else the CPU")
    threads: int = Field(
        1,
        ge=0,
        description="CPU threads of the process; 0 leaves torch's own choice. A second thread slows small models down",
    )
    temperature: Positive = Field(
        1.0,
        description="of π, π_ref and every log-prob of the trainer; sampler.temperature belongs to the behaviour only",
    )
    reference: Literal["start", "phase", "model", "ema", "periodic"] = Field(
        "start",
        description="π_ref: the weights at the start of the run or of each phase, another model, an exponential moving average of "
        "the policy's weights, or a copy of them renewed every so often",
    )
    reference_model: str | None = Field(None, description="model: the folder or hub name of the reference")
    reference_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="ema: share of the reference's weights that stays at a step"
    )
    reference_every: Count | None = Field(None, description="periodic: steps between copies")
    cache_reference: bool = Field(
        False,
        description="keep the reference's log-probs of each sample in the store, for later steps and other runs with the same reference: "
        "an epoch after the first saves one forward pass of three",
    )
    chat: Chat = Chat()
    lora: LoRA | None = Field(None, description="train an adapter of this kind, not the model's own weights")
    chunk: Count = Field(128, description="positions whose logits exist at once when log-probs are computed")
    trust_remote_code: bool = Field(False, description="run the code that a model on the hub brings along")


class Data(Section):
    """What a step trains on: prompts to sample from, groups of the store, or a share of each."""

    prompts: str | None = Field(
        None,
        description="JSONL file of prompts to sample from (`prompt`, and what the reward reads, such as `answer`)",
    )
    eval_prompts: str | None = Field(None, description="held-out prompts, the same format")
    store: str | None = Field(None, description="the store; RUN/store.db where it is not given")
    eval_store: str | None = Field(
        None,
        description="a store of held-out groups: ½ Var(R) within them is measured (metrics eval_consistency…) at evaluate.beta, or the β of an objective that pulls to the reference",
    )
    value_store: str | None = Field(
        None,
        description="a store of scored samples of the reference: the soft maximum of a prompt's rewards in it is its stored value, "
        'where the objective takes one (squared_consistency, baseline = "stored")',
    )
    replay: Share = Field(
        0.0,
        description="share of each step's groups that comes from the store; 1 trains from the store alone",
    )
    group_size: int | None = Field(
        None,
        ge=1,
        description="responses drawn of a stored group, in whole pairs where the objective needs pairs; all where it is not given",
    )
    roles: tuple[Role, ...] | None = Field(None, description="draw only these roles")
    sources: tuple[str, ...] | None = Field(None, description="draw only these sources")
    max_age: int | None = Field(
        None,
        ge=0,
        description="draw only samples at most this many optimiser steps behind; excludes samples of unknown age",
    )
    order: Literal["least_used", "uniform"] = Field(
        "least_used", description="which stored groups come first: those drawn least (epochs), or any"
    )


class Sampler(Section):
    """How fresh responses are sampled. Temperature first, then top-k, top-p and min-p leave tokens out, in this order."""

    n: Count = Field(4, description="responses a prompt")
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="0 keeps all tokens")
    top_p: Share = Field(
        1.0, description="keeps the likeliest tokens until their probability reaches this; 1 keeps all"
    )
    min_p: Share = Field(
        0.0,
        description="keeps tokens with at least this share of the likeliest one's probability; 0 keeps all",
    )
    max_new: Count = Field(256, description="tokens a response at most")
    stop: tuple[str, ...] = Field((), description="a response ends with the first of these texts")
    batch: Count = Field(64, description="sequences decoded at once")


class RewardPart(Section):
    """One of several rewards."""

    name: str = Field(description="exact, regex, math, module:function or file.py:function")
    weight: float = Field(1.0, description="of its value in the sum; 0 measures it without counting it")
    options: dict[str, Any] = Field({}, description="of this reward, as `reward.options`")
    label: str | None = Field(None, description="its name in metrics and store; `name` where it is not given")


class Reward(Section):
    """One reward, or the weighted sum of several `functions`."""

    name: str | None = Field(
        None,
        description="exact (where neither it nor `functions` is given), regex, math, module:function or file.py:function",
    )
    options: dict[str, Any] = Field(
        {}, description="options of a built-in reward, keyword arguments of a function"
    )
    functions: tuple[RewardPart, ...] = Field(
        (),
        description="instead of `name`: several rewards, each with a weight; the reward is Σ weight · value",
    )
    timeout: Positive = Field(
        10.0, description="seconds a call may take for one response; beyond it the reward stays unknown"
    )
    max_failed: Share = Field(
        0.5, description="the run stops where more than this share of one step's rewards failed"
    )
    workers: Count = Field(
        1, description="processes of each reward that has some: functions, math, regex patterns"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, values: Any) -> Any:
        """A name or functions. Without either the name is put in, so that a run's config.json tells it."""
        if not isinstance(values, dict):
            return values
        for key in ("name", "options"):
            if values.get("functions") and values.get(key):
                raise PydanticCustomError(
                    "reward",
                    "reward.{key} and reward.functions exclude each other: give {key} to each of the functions, or no functions",
                    {"key": key},
                )
        return (
            values
            if values.get("functions") or values.get("name") is not None
            else values | {"name": "exact"}
        )

    @model_validator(mode="after")
    def _parts_differ(self) -> Self:
        labels = [part.label or part.name for part in self.functions]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise PydanticCustomError(
                "reward", "reward.functions: {name} stands twice; give one a label", {"name": twice[0]}
            )
        if labels and not any(part.weight for part in self.functions):
            raise PydanticCustomError("reward", "reward.functions: expected one weight other than 0 at least")
        return self

    @property
    def title(self) -> str:
        """For people: the name, or the sum."""
        return self.name or " + ".join(
            f"{part.weight:g} · {part.label or part.name}" for part in self.functions
        )


class Environment(Section):
    """Responses become episodes of several turns; `sampler.max_new` is then of a turn."""

    name: str = Field(description="verifiers:ENV_ID, or an environment as module:Class or file.py:Class")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    max_turns: Count = Field(8, description="turns of the policy in an episode at most")


class Objective(BaseModel):
    """What is minimised: the name of an objective, and its options."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    name: str = Field("agro", description="one of `agro.objectives.names()`")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Train(Section):
    """Steps, their size, memory, and the optimiser (AdamW)."""

    steps: Count = Field(100, description="batches drawn and trained on")
    seed: int = Field(0, ge=0, description="of weights, sampling and draws")
    groups: Count = Field(16, description="prompts a step")
    updates: Count = Field(1, description="optimiser steps a batch")
    micro_batch: Count | None = Field(
        None,
        description="sequences in one forward pass at most; 16 where neither this nor micro_tokens is given. Doesn't change the result",
    )
    micro_tokens: Count | None = Field(
        None,
        description="tokens in one forward pass at most, padding included; a longer sequence goes alone. Doesn't change the result",
    )
    gradient_checkpointing: bool = Field(
        False, description="compute each layer's activations again in the backward pass rather than keep them"
    )
    offload: tuple[Literal["activations", "optimiser"], ...] = Field(
        (), description="what waits in the CPU's memory while the GPU works on something else"
    )
    lr: Positive = Field(1e-5, description="largest learning rate, which the warm-up ends at")
    value_lr: Positive = Field(
        1e-2,
        description="largest learning rate of the value head, where the objective learns a value; warm-up and schedule as of lr",
    )
    warmup: int = Field(0, ge=0, description="optimiser steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate, over the phase, to 0"
    )
    adam_betas: tuple[Share, Share] = Field(
        (0.9, 0.999), description="decay per update of the gradient's first and second moment"
    )
    adam_eps: Positive = Field(1e-8, description="added to the root of the second moment")
    weight_decay: float = Field(
        0.0, ge=0, description="share of a weight, times the learning rate, that an update takes off"
    )
    clip: float = Field(
        1.0, gt=0, description="largest norm of the gradient of a step; a larger one is scaled down to it"
    )
    max_length: int | None = Field(
        None,
        ge=2,
        description="tokens a sequence at most; the model's context where it is not given. Longer rows are left out and counted",
    )
    max_skipped: Count = Field(
        5, description="steps in a row with a non-finite gradient before the run stops"
    )
    checkpoint_every: Count = Field(
        50, description="steps between checkpoints; a killed run loses fewer than these"
    )
    keep: Count = Field(
        2,
        description="checkpoints kept, besides the one that the phase began with: a damaged one is passed over for the one before",
    )
    show_every: int = Field(
        0, ge=0, description="steps between sample responses on the terminal; 0 shows none"
    )
    push: str | None = Field(
        None,
        description="USER/NAME on the Hugging Face hub: RUN/model is uploaded there after the run; the token is that of "
        "hf auth login, or HF_TOKEN",
    )
    push_private: bool = Field(True, description="a repository that push makes is private")


class Guard(Section):
    """What counts as an explosion, and what happens then: see `agro.train.guard`."""

    loss: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="largest |loss|, in multiples of its median over the last `window` steps; no rule where it is not given",
    )
    kl: Positive | None = Field(
        None, description="largest kl_ref, nats a response; no rule where it is not given"
    )
    window: Annotated[int, Field(ge=5)] = Field(20, description="steps over which `loss` takes the median")
    action: Literal["skip", "stop", "rollback"] = Field(
        "stop",
        description="leave the update out, end the run, or go back to the last checkpoint at half the learning rate",
    )
    rollbacks: Count = Field(3, description="how often a run may go back; then it stops")
    stage_seconds: float = Field(
        600.0,
        ge=0,
        description="a stage without progress for so many seconds is named on the terminal; 0: never",
    )


class Evaluate(Section):
    """Measurements on held-out prompts: before the first step, at the end of each phase, and in between as asked."""

    every: int = Field(
        0, ge=0, description="steps between evaluations on data.eval_prompts; 0: at the ends of phases only"
    )
    keep_best: bool = Field(
        False,
        description="keep the model with the highest eval_reward in RUN/best (the highest of many is flattered by chance)",
    )
    patience: int = Field(
        0,
        ge=0,
        description="evaluations in a row without a higher eval_reward after which the run ends; 0: it doesn't",
    )
    target: float | None = Field(None, description="the run ends where eval_reward reaches this")
    n: Count = Field(1, description="responses a prompt")
    temperature: float = Field(
        1.0,
        ge=0,
        description="of held-out responses; eval_kl_ref is known only where it equals policy.temperature",
    )
    kl: bool = Field(True, description="measure the KL to the reference too; holds a copy of the reference")
    beta: float | None = Field(
        None,
        gt=0,
        description="reward per nat of the response's log-ratio: β at which ½ Var(R) and regret are measured, whatever the objective, and of nothing else; "
        "the objective's own where it is not given. An objective that doesn't read the reference then costs a copy of it and a forward over fresh responses a step",
    )


class Track(Section):
    """Copies of the metrics for other programs; `metrics.jsonl` is always written. They need `agro[track]`."""

    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field((), description="which programs")
    project: str = Field("agro", min_length=1, description="of W&B and trackio")
    name: str | None = Field(None, description="of the run there; the run folder's where it is not given")


class Phase(BaseModel):
    """A name, and values that differ from the run's sections while the phase lasts."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str = Field(
        description="stands in metrics, report and in overrides: `phases.NAME.section.key=value`"
    )


class RunConfig(Section):
    policy: Policy = Policy()
    data: Data = Data()
    sampler: Sampler = Sampler()
    reward: Reward = Reward()
    environment: Environment | None = None
    objective: Objective = Objective()
    train: Train = Train()
    guard: Guard = Guard()
    evaluate: Evaluate = Evaluate()
    track: Track = Track()
    phases: tuple[Phase, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "configuration") -> RunConfig:
        """The configuration of nested values; `where` names them in what is refused."""
        _refuse_infinite(values, where)
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            raise Refused("\n".join(_explain(e, where) for e in error.errors())) from None
        for phase in config.phases:  # a mistake in a phase is found before the first one trains
            config.phase(phase.name, where)
        names = [p.name for p in config.phases]
        if len(set(names)) < len(names):
            raise Refused(f"{where}: phases: expected different names, got {', '.join(names)}")
        return config

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
        """The configuration of a TOML recipe or a run's config.json, changed by `KEY=VALUE` texts."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it isn't UTF-8 text"
            raise Refused(
                f"{path}: can't be read: {why}; expected a TOML recipe or a run's config.json"
            ) from None
        try:
            values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
            raise Refused(f"{path}: {error}") from None
        if not isinstance(values, dict):
            raise Refused(f"{path}: expected an object of sections, got {text!r:.80}")
        for made_by_a_run in ("versions", "run"):
            values.pop(made_by_a_run, None)
        for item in overrides:
            override(values, item)
        return cls.of(values, str(path))

    def phase(self, name: str, where: str = "configuration") -> RunConfig:
        """The configuration of one phase: this one with the phase's values put in."""
        if name not in self.phase_names:
            raise Refused(f"phase: expected one of {', '.join(self.phase_names)}, got {name!r}")
        changes = next((dict(p.model_extra or {}) for p in self.phases if p.name == name), {})
        for key in sorted({"phases", "track"} & changes.keys()):
            raise Refused(f"{where}: phase {name}: {key}: a phase has none of its own")
        return RunConfig.of(_merge(self.model_dump(exclude={"phases"}), changes), f"{where}: phase {name}")

    @property
    def phase_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.phases) or ("train",)


# What may change on the way: limits, when a run ends, what is shown, kept and uploaded. Nothing that a step computes.
FREE = {
    "reward": {"timeout", "max_failed", "workers"},
    "train": {"show_every", "keep", "push", "push_private"},
    "guard": {"stage_seconds", "loss", "kl", "action", "rollbacks"},
    "evaluate": {"patience", "target", "keep_best"},
}


def deciding(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration, as `config.json` holds it, that decides what a step computes."""
    kept = {k: _without_free(k, v) for k, v in values.items() if k in RunConfig.model_fields and k != "track"}
    return kept | {
        "phases": [
            {k: _without_free(k, v) for k, v in phase.items()} for phase in _list(values.get("phases"))
        ]
    }


def take_length(values: dict[str, Any]) -> int | None:
    """Take the last phase's number of steps, which may grow, out of what `deciding` returns; None where it has none of its own."""
    phases = values["phases"]
    section = phases[-1].get("train", {}) if phases else values["train"]
    steps: int | None = section.pop("steps", None)
    return steps


def ending(config: RunConfig) -> list[tuple[int, int, float | None]]:
    """What decides when each phase, or the run in it, ends: steps, patience, target."""
    phases = [config.phase(name) for name in config.phase_names]
    return [(p.train.steps, p.evaluate.patience, p.evaluate.target) for p in phases]


def _without_free(section: str, value: Any) -> Any:
    return (
        {k: v for k, v in value.items() if k not in FREE.get(section, ())}
        if isinstance(value, dict)
        else value
    )


def _merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(out.get(key), dict)
        if key == "objective" and nested and value.get("name", out[key]["name"]) != out[key]["name"]:
            out[key] = dict(value)  # another objective doesn't inherit this one's options
        else:
            out[key] = _merge(out[key], value) if nested else value
    return out


def override(values: dict[str, Any], item: str) -> None:
    """Put `KEY=VALUE`, a dotted path and a TOML value (a bare word is text), into the values of a configuration."""
    key, eq, raw = item.partition("=")
    if not eq or not key.strip():
        raise Refused(f"override {item!r}: expected KEY=VALUE, such as train.steps=20")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    at = values
    *sections, last = key.strip().split(".")
    phases = {p.get("name"): p for p in _list(values.get("phases")) if isinstance(p, dict)}
    if sections and sections[0] == "phases" and len(sections) > 1:
        if sections[1] not in phases:
            raise Refused(
                f"override {item!r}: expected a phase of {', '.join(map(str, phases)) or 'which there is none'}"
            )
        at, sections = phases[sections[1]], sections[2:]
    else:
        own = [str(name) for name, phase in phases.items() if _has(phase, [*sections, last])]
        if own and len(own) == len(phases):
            raise Refused(
                f"override {item!r} would change nothing: every phase sets {key} itself; say phases.{own[0]}.{key}={raw}"
            )
    for section in sections:
        at = at.setdefault(section, {})
        if not isinstance(at, dict):
            raise Refused(f"override {item!r}: {section} is a value, not a section")
    at[last] = value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _has(values: Any, keys: list[str]) -> bool:
    return not keys or (isinstance(values, dict) and keys[0] in values and _has(values[keys[0]], keys[1:]))


def _refuse_infinite(value: Any, where: str, *keys: Any) -> None:
    """Options of objectives and rewards are of any type, but JSON (`config.json`) has neither NaN nor infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused(f"{where}: {'.'.join(map(str, keys))}: expected a finite number, got {value}")
    if isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _refuse_infinite(item, where, *keys, key)


def _explain(error: Any, where: str) -> str:
    loc = [str(x) for x in error["loc"]]
    key = ".".join(loc)
    if error["type"] == "extra_forbidden":
        section: Any = RunConfig
        for part in loc[:-1]:
            section = _section(section, part)
        known = list(section.model_fields)
        near = difflib.get_close_matches(loc[-1], known, 1, 0.5)
        return f"{where}: unknown key {key}; " + (
            f"did you mean {'.'.join([*loc[:-1], near[0]])}?" if near else f"known here: {', '.join(known)}"
        )
    return f"{where}: {key}: {error['msg'][0].lower() + error['msg'][1:]}, got {error['input']!r:.80}"


def _section(model: Any, key: str) -> Any:
    if key not in model.model_fields:  # a place in a list of sections
        return model
    annotation = model.model_fields[key].annotation
    return next(
        (
            a
            for a in (annotation, *getattr(annotation, "__args__", ()))
            if isinstance(a, type) and issubclass(a, BaseModel)
        ),
        model,
    )
