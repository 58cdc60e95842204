"""Choose settings with which a run fits a time or a memory limit on this machine: `agro train … --fit 30min`.

A large model, or one that exceeds the memory, first gets an adapter. Then the run is loaded and measured, and
settings shrink until the dry run's forecast fits: passes and decoded batches for memory; the number of steps
for time, and the size of a step if too few steps would fit. The learning rate is chosen at the first step.
Settings that the user fixed stay as they are.

A run that starts its own vLLM (recipe card24) shares the GPU with it: its settings follow from the model's
shape, before anything is loaded (`agro.models.footprint`). None of these formulas was measured on a GPU.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agro.api.plan import Machine, load_average, plan, unknown_sampling
from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.config.override import merge
from agro.errors import Refused
from agro.io.numbers import count, duration, size
from agro.io.processes import cores
from agro.models.adapters import is_adapter
from agro.models.footprint import SIZES, Footprint, host_memory, on_meta, shape_of
from agro.models.pretrained import LARGE, device_of, parameters
from agro.train.phases import Phase
from agro.train.step import TOKENS

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "MB": 1e6, "GB": 1e9}
RANK = 16  # adapter rank
ADAPTED = 100_000_000  # number of weights from which a CPU run gets an adapter
PER_WEIGHT = 20  # bytes of a trained weight in float32: itself, its gradient, two moments and the reference
USED = 0.8  # usable share of free memory
ENOUGH, FEWEST = 40, 5  # with fewer steps a step shrinks; with fewer still the run is refused
# Settings for one GPU; each rung needs less memory than the last. The first with room for enough tokens wins.
RUNGS: tuple[dict[str, Any], ...] = (
    {"policy.dtype": "bfloat16", "policy.lora.rank": 32, "train.gradient_checkpointing": False},
    {"train.gradient_checkpointing": True},
    {"policy.quantize": "4bit", "policy.lora.merge": False},
    {"policy.lora.rank": 8, "train.offload": ["activations"]},
)
ENOUGH_TOKENS, FEWEST_TOKENS, MOST_TOKENS, MOST_AT_ONCE = 4000, 1000, 32_000, 256


class Limits(NamedTuple):
    """Limits of a run; None: no limit."""

    seconds: float | None = None
    bytes: float | None = None

    @classmethod
    def parse(cls, texts: str | Sequence[str]) -> Limits:
        """Parse a text such as "30min", "2h" or "24GB", or a list of one time and one size."""
        limits: dict[str, float] = {}
        for text in [texts] if isinstance(texts, str) else texts:
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|MB|GB)\s*", text)
            name = "bytes" if match and match[2].endswith("B") else "seconds"
            if match is None or float(match[1]) == 0 or name in limits:
                raise Refused(
                    f"--fit {text}: expected a time or a size of memory, once each, such as 30min, 2h or 24GB"
                )
            limits[name] = float(match[1]) * UNITS[match[2]]
        return cls(**limits)


class Fitted(NamedTuple):
    """The chosen settings by dotted key, the run with them, and its forecast (see `agro.api.plan`)."""

    settings: dict[str, Any]
    config: RunConfig
    plan: dict[str, Any]

    def lines(self) -> list[str]:
        [f] = self.plan["phases"]
        seconds, peak = duration(f["seconds_at_most"]), ""
        if f["peak"] is not None:
            peak = f", {size(f['peak'])} of memory"
        return [
            f"--fit chose {' '.join(items(self.settings)) or 'nothing'}",
            f"{count(f['steps'])} steps take about {seconds} at most{peak}; a setting that you fix stays as "
            "it is",
        ]


def items(settings: Mapping[str, Any]) -> list[str]:
    """Format settings as KEY=VALUE for the command line."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return [f"{key}={text}" for key, text in texts.items()]


@dataclass
class Choice:
    """Settings under choice for a run, by dotted key. `pinned`: keys that the user fixed."""

    start: RunConfig
    pinned: Collection[str] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        """The run with the chosen settings."""
        return self.with_settings({})

    def with_settings(self, more: Mapping[str, Any]) -> RunConfig:
        values = self.start.model_dump()
        for key, value in {**self.settings, **more}.items():
            for name in reversed(key.split(".")):
                value = {name: value}
            values = merge(values, value)
        return RunConfig.of(values, "--fit")

    @property
    def also(self) -> str:
        """The chosen settings, for the message that they aren't enough."""
        return f", also with {' '.join(items(self.settings))}" if self.settings else ""

    def put(self, key: str, value: Any) -> bool:
        """Set a key, and return whether it isn't pinned; a pinned section pins all of its keys."""
        if any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in self.pinned):
            return False
        self.settings[key] = value
        return True

    def halve(self, sizes: Mapping[str, tuple[int, int]]) -> bool:
        """Halve the size farthest above its minimum, and return whether one was. `sizes`: value, minimum."""
        for key, (value, minimum) in sorted(sizes.items(), key=lambda each: -each[1][0] / each[1][1]):
            if value >= 2 * minimum and self.put(key, value // 2):
                return True
        return False


def fit(
    config: RunConfig,
    limits: Limits,
    pinned: Collection[str],
    out: Path | None = None,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
) -> Fitted:
    """Choose settings for a run in the folder `out`.

    `pinned`: dotted keys that the user fixed. `rewards`: functions, as for `agro.Trainer`.
    Raises `Refused` if nothing fits, or if the time of a step is unknown.
    """
    if config.phases:
        raise Refused("--fit chooses for a run of one phase, and this one has several: set their train.steps")
    unknown = unknown_sampling(config)
    if config.policy.reference_is_served:
        unknown = unknown or "a server has the reference"
    if limits.seconds is not None and unknown:
        raise Refused(f"--fit: the time of a step isn't known here, for {unknown}: set train.steps")
    choice, free, device = Choice(config, pinned), limits.bytes, device_of(config.policy.device)
    if free is None:  # the memory available now; infinity if unknown
        on_card = device.type == "cuda"
        free = USED * float(torch.cuda.mem_get_info(device)[0] if on_card else host_memory())
    if config.engine.starts_server and config.policy.model is not None:
        short = for_card(choice, free)
        if short:
            raise Refused(f"--fit {size(free)}: {short}. What to do: a smaller model, or a larger GPU")
    else:
        _for_model(choice, free)
    trainer = Trainer(choice.config, out, rewards=rewards)
    with trainer.loaded() as machine:
        machine.measure(Phase.all(trainer.config))
        steps = trainer.config.train.steps or 1  # also in place of epochs
        _for_memory(choice, machine, steps, free, limits.bytes)
        if limits.seconds is not None:
            steps = _for_time(choice, machine, steps, limits.seconds)
        if trainer.config.train.lr != "auto":
            choice.put("train.lr", "auto")
        if choice.config.train.warmup > steps // 10:
            choice.put("train.warmup", steps // 10)
        report = plan(choice.with_settings({"train.steps": steps}), machine) | {"notes": trainer.notes}
        return Fitted(choice.settings, choice.config, report)


def for_card(choice: Choice, limit: float) -> str:
    """Choose settings for a GPU of `limit` bytes. Return "" if the run fits, else what is missing."""
    for rung in RUNGS:
        for key, value in rung.items():
            choice.put(key, value)
        config = choice.config
        has_reference = any(phase.reads_reference for phase in Phase.all(config))
        memory, n = Footprint.of(config, has_reference=has_reference), config.sampler.n
        longest = min(MOST_TOKENS, shape_of(config.policy).context, config.train.max_length or MOST_TOKENS)
        tokens = memory.longest(limit, n, longest)
        if tokens >= min(ENOUGH_TOKENS, longest):
            break
    if tokens < min(FEWEST_TOKENS, longest):
        short, needs = memory.peak(FEWEST_TOKENS, n) - limit, memory.serving(FEWEST_TOKENS, n)
        return (
            f"{size(short)} short of {count(FEWEST_TOKENS)} tokens: {size(memory.resting)} for the trainer's "
            f"weights and {size(needs)} for {n} responses at once"
        )
    choice.put("train.max_length", tokens)
    choice.put("train.micro_tokens", tokens)
    choice.put("sampler.max_new", min(config.sampler.max_new, tokens * 3 // 4))
    if config.engine.starts_server:
        device = device_of(config.policy.device)
        card = float(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else limit
        choice.put("engine.memory", memory.share(tokens, limit, card))
    else:
        at_once = int((limit - memory.resting) / memory.serving(tokens, 1))
        choice.put("sampler.batch", min(MOST_AT_ONCE, at_once))
    return ""


def is_shape(name: str) -> bool:
    """Return whether a model has no weights: it is a size of `SIZES`, or a folder without weights."""
    folder = Path(name).expanduser()
    return name in SIZES or (folder.is_dir() and not any(folder.glob("*.safetensors")))


def answers(config: RunConfig, limit: float, pinned: Collection[str]) -> list[str]:
    """Say whether a model without local weights fits, or which of `SIZES` fit if no model is named. Empty for
    a model with weights, which a dry run loads."""
    name, ways = config.policy.model, [dict[str, Any]()]
    if config.policy.new is not None or (name is not None and not is_shape(name)):
        return []
    if config.engine.starts_server:
        ways.append({"engine.kind": "hf", "engine.sleep": False})
    lines = []
    for model in list(SIZES) if name is None else [name]:
        verdicts = []
        for way in ways:
            choice = Choice(config, pinned, {"policy.model": model, **way})
            short = for_card(choice, limit)
            if short:
                verdicts.append(f"no, {short}")
                continue
            tokens = choice.config.train.max_length
            del choice.settings["policy.model"]
            verdicts.append(f"yes, {count(tokens)} tokens, with {' '.join(items(choice.settings))}")
            break
        lines.append(f"{model}: {'; sampling in the process that trains: '.join(verdicts)}")
    return lines


def _for_model(choice: Choice, free: float) -> None:
    """Choose an adapter for a large model, and one thread if other programs use the cores."""
    policy = choice.start.policy
    name, on_cpu = policy.model, device_of(policy.device).type == "cpu"
    if name is None or is_adapter(name) or (Path(name) / "position.json").is_file():
        return  # a new model, an adapter or a checkpoint
    weights = parameters(on_meta(name, "float32"))
    needed = (on_cpu and weights >= ADAPTED) or PER_WEIGHT * weights > free
    adapted = policy.lora is None and needed and choice.put("policy.lora.rank", RANK)
    if adapted and 2 * 4 * weights > free and not on_cpu:
        choice.put("policy.dtype", "bfloat16")
    load = load_average()
    if on_cpu and weights >= LARGE and load is not None and load > cores() / 2:
        choice.put("policy.threads", 1)  # with busy cores, threads wait for each other


def _forecast(choice: Choice, machine: Machine, steps: int) -> dict[str, Any]:
    [phase] = Phase.all(choice.with_settings({"train.steps": steps}))
    return machine.forecast(phase)


def _for_memory(choice: Choice, machine: Machine, steps: int, free: float, limit: float | None) -> None:
    """Shrink passes, then the decoded batch. Choose nothing if the peak is unknown."""
    while True:
        peak, config = _forecast(choice, machine, steps)["peak"] or 0, choice.config
        tokens = 0 if config.train.micro_batch is not None else config.train.micro_tokens or TOKENS
        passes, at_once = {"train.micro_tokens": (tokens, 256)}, {"sampler.batch": (config.sampler.batch, 8)}
        if peak <= free or not (choice.halve(passes) or choice.halve(at_once)):
            break
    if limit is not None and peak > limit:
        raise Refused(
            f"--fit {size(limit)}: the run needs {size(peak)}{choice.also}. What to do: a smaller model, "
            "policy.dtype=bfloat16 with an adapter, or more memory"
        )


def _for_time(choice: Choice, machine: Machine, wanted: int, seconds: float) -> int:
    """Return the number of steps that fit, shrinking the steps if too few would."""
    while True:
        config = choice.config
        fitting = bisect_right(
            range(1, wanted + 1), seconds, key=lambda n: _forecast(choice, machine, n)["seconds_at_most"]
        )
        fewest = min(FEWEST, wanted)
        forecast = _forecast(choice, machine, fewest)
        sizes = {"train.groups": (config.train.groups, 4)}
        if forecast["fresh_groups"]:
            sizes |= {"sampler.max_new": (config.sampler.max_new, 32), "sampler.n": (config.sampler.n, 4)}
        if forecast["stored_groups"] and config.data.group_size:
            sizes["data.group_size"] = (config.data.group_size, 2)
        if fitting >= min(ENOUGH, wanted) or not choice.halve(sizes):
            break
    if fitting < fewest:
        evaluating = forecast.get("seconds_evaluating_at_most", 0.0)
        one = (forecast["seconds_at_most"] - evaluating) / fewest
        raise Refused(
            f"--fit {duration(seconds)}: one step takes {duration(one)} and the measurements "
            f"{duration(evaluating)}{choice.also}. What to do: a longer time, a smaller model, or fewer "
            "held-out prompts"
        )
    if fitting < wanted:
        choice.put("train.steps", fitting)
    return fitting
