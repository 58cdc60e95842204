"""Settings with which a run fits into a time or into memory on this machine: `agro train … --fit 30min`.

An adapter comes first, where weights are many or memory asks for it. Then the run is loaded and measured, and
settings get smaller until the dry run's forecast fits: passes and decoded batches for memory; for time the
number of steps, and a step where too few would fit. The learning rate is found at the first step. What is
given isn't changed.

Where the run starts vLLM beside it (recipe card24), they share a GPU: settings follow from the model's shape,
counted before anything is loaded (`agro.models.footprint`). Nothing of it was measured on a GPU.
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
RANK = 16  # of an adapter
ADAPTED = 100_000_000  # weights from which an adapter is chosen on a CPU
PER_WEIGHT = 20  # bytes of a trained weight in float32: itself, its gradient, two moments and the reference
USED = 0.8  # of what is free
ENOUGH, FEWEST = 40, 5  # steps for which a step gets smaller, and with which a run is refused
# Settings for one GPU: each rung needs less memory than those before. The first of enough tokens is taken.
RUNGS: tuple[dict[str, Any], ...] = (
    {"policy.dtype": "bfloat16", "policy.lora.rank": 32, "train.gradient_checkpointing": False},
    {"train.gradient_checkpointing": True},
    {"policy.quantize": "4bit", "policy.lora.merge": False},
    {"policy.lora.rank": 8, "train.offload": ["activations"]},
)
ENOUGH_TOKENS, FEWEST_TOKENS, MOST_TOKENS, MOST_AT_ONCE = 4000, 1000, 32_000, 256


class Limits(NamedTuple):
    """Of a run; None: none."""

    seconds: float | None = None
    bytes: float | None = None

    @classmethod
    def parse(cls, texts: str | Sequence[str]) -> Limits:
        """Such as "30min", "2h", "24GB", or a time and a size."""
        found: dict[str, float] = {}
        for text in [texts] if isinstance(texts, str) else texts:
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|MB|GB)\s*", text)
            name = "bytes" if match and match[2].endswith("B") else "seconds"
            if match is None or float(match[1]) == 0 or name in found:
                raise Refused(
                    f"--fit {text}: expected a time or a size of memory, once each, such as 30min, 2h or 24GB"
                )
            found[name] = float(match[1]) * UNITS[match[2]]
        return cls(**found)


class Fitted(NamedTuple):
    """What was chosen, by dotted key, the run with it, and what that then takes (see `agro.api.plan`)."""

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
            f"{count(f['steps'])} steps take about {seconds} at most{peak}; a setting that you give stays as "
            "it is",
        ]


def items(settings: Mapping[str, Any]) -> list[str]:
    """KEY=VALUE of the command line."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return [f"{key}={text}" for key, text in texts.items()]


@dataclass
class Choice:
    """Settings that are being chosen for a run, by dotted key. `given`: keys that stay as they are."""

    start: RunConfig
    given: Collection[str] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        """The run with what is chosen."""
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
        """What is chosen, for the message that it isn't enough."""
        return f", also with {' '.join(items(self.settings))}" if self.settings else ""

    def put(self, key: str, value: Any) -> bool:
        """Whether it may be chosen; a section that is given has all of its keys."""
        if any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in self.given):
            return False
        self.settings[key] = value
        return True

    def halve(self, sizes: Mapping[str, tuple[int, int]]) -> bool:
        """Halve what is farthest above its least value; whether anything was. `sizes`: value and least."""
        for key, (value, least) in sorted(sizes.items(), key=lambda each: -each[1][0] / each[1][1]):
            if value >= 2 * least and self.put(key, value // 2):
                return True
        return False


def fit(
    config: RunConfig,
    limits: Limits,
    given: Collection[str],
    out: Path | None = None,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
) -> Fitted:
    """Choose for a run in the folder `out`.

    `given`: dotted keys that stay as they are. `rewards`: functions, as of `agro.Trainer`.
    Raises `Refused` where nothing fits, and where the time of a step isn't known.
    """
    if config.phases:
        raise Refused("--fit chooses for a run of one phase, and this one has several: set their train.steps")
    unknown = unknown_sampling(config)
    if config.policy.reference_is_served:
        unknown = unknown or "a server has the reference"
    if limits.seconds is not None and unknown:
        raise Refused(f"--fit: the time of a step isn't known here, for {unknown}: set train.steps")
    choice, free, device = Choice(config, given), limits.bytes, device_of(config.policy.device)
    if free is None:  # what a run could take now; infinity where that is unknown
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
    """Settings with which the run fits on a GPU of so many bytes; what is short where none do, else ""."""
    for rung in RUNGS:
        for key, value in rung.items():
            choice.put(key, value)
        config = choice.config
        has_reference = any(phase.reads_reference for phase in Phase.all(config))
        found, n = Footprint.of(config, has_reference=has_reference), config.sampler.n
        most = min(MOST_TOKENS, shape_of(config.policy).context, config.train.max_length or MOST_TOKENS)
        tokens = found.longest(limit, n, most)
        if tokens >= min(ENOUGH_TOKENS, most):
            break
    if tokens < min(FEWEST_TOKENS, most):
        short, needs = found.peak(FEWEST_TOKENS, n) - limit, found.serving(FEWEST_TOKENS, n)
        return (
            f"{size(short)} short of {count(FEWEST_TOKENS)} tokens: {size(found.resting)} for the trainer's "
            f"weights and {size(needs)} for {n} responses at once"
        )
    choice.put("train.max_length", tokens)
    choice.put("train.micro_tokens", tokens)
    choice.put("sampler.max_new", min(config.sampler.max_new, tokens * 3 // 4))
    if config.engine.starts_server:
        device = device_of(config.policy.device)
        card = float(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else limit
        choice.put("engine.memory", found.share(tokens, limit, card))
    else:
        at_once = int((limit - found.resting) / found.serving(tokens, 1))
        choice.put("sampler.batch", min(MOST_AT_ONCE, at_once))
    return ""


def is_shape(name: str) -> bool:
    """Whether a model has no weights: it is a size of `SIZES`, or a folder without them."""
    folder = Path(name).expanduser()
    return name in SIZES or (folder.is_dir() and not any(folder.glob("*.safetensors")))


def answers(config: RunConfig, limit: float, given: Collection[str]) -> list[str]:
    """Whether a model without weights here fits, in words, or each of `SIZES` where none is given. Nothing
    for one with weights, which a dry run loads."""
    name, ways = config.policy.model, [dict[str, Any]()]
    if config.policy.new is not None or (name is not None and not is_shape(name)):
        return []
    if config.engine.starts_server:
        ways.append({"engine.kind": "hf", "engine.sleep": False})
    found = []
    for model in list(SIZES) if name is None else [name]:
        said = []
        for way in ways:
            choice = Choice(config, given, {"policy.model": model, **way})
            short = for_card(choice, limit)
            if short:
                said.append(f"no, {short}")
                continue
            tokens = choice.config.train.max_length
            del choice.settings["policy.model"]
            said.append(f"yes, {count(tokens)} tokens, with {' '.join(items(choice.settings))}")
            break
        found.append(f"{model}: {'; sampling in the process that trains: '.join(said)}")
    return found


def _for_model(choice: Choice, free: float) -> None:
    """An adapter, and one thread beside other programs."""
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
        choice.put("policy.threads", 1)  # several threads wait for each other beside other programs


def _forecast(choice: Choice, machine: Machine, steps: int) -> dict[str, Any]:
    [phase] = Phase.all(choice.with_settings({"train.steps": steps}))
    return machine.forecast(phase)


def _for_memory(choice: Choice, machine: Machine, steps: int, free: float, limit: float | None) -> None:
    """Smaller passes, then fewer responses at once. Nothing is chosen where the peak is unknown."""
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
    """The steps that fit, with smaller ones where they are too few."""
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
