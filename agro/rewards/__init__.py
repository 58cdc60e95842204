"""Rewards: a number for each response, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any

from agro import config
from agro.config import from_environment, read_options
from agro.errors import Refused
from agro.io import plugins
from agro.rewards.builtin import (
    AnswerReward,
    ExactOptions,
    ModelOptions,
    OverlongOptions,
    OverlongReward,
    exact,
    overlong,
)
from agro.rewards.function import PREFIX, FunctionReward
from agro.rewards.judge import JudgeOptions, judge
from agro.rewards.protocol import Reward, RewardMaker, Score, check_failures, score_known
from agro.rewards.shaping import CombinedReward, MeaningfulReward, labeled, number
from agro.rewards.workers import Pool

__all__ = [
    "AnswerReward",
    "CombinedReward",
    "FunctionReward",
    "OverlongReward",
    "Pool",
    "Reward",
    "RewardMaker",
    "Score",
    "check_failures",
    "load_reward",
    "number",
    "score_known",
]


def _model(options: ModelOptions, **_: Any) -> Reward:
    """See `agro.rewards.model`, which imports torch and transformers."""
    from agro.rewards.model import ModelReward

    return ModelReward(options)


BUILTIN: dict[str, RewardMaker] = {
    "exact": RewardMaker(exact, ExactOptions),
    "overlong": RewardMaker(overlong, OverlongOptions),
    "judge": RewardMaker(judge, JudgeOptions),
    "model": RewardMaker(_model, ModelOptions),
}


def maker_of(name: str) -> RewardMaker | None:
    """The built-in or installed reward of this name that takes options; None for a function."""
    if name in BUILTIN:
        return BUILTIN[name]
    if plugins.is_reference(name) or plugins.unknown("rewards", name, tuple(BUILTIN)):
        return None
    part = plugins.load("rewards", name, f"reward {name}")
    return part if isinstance(part, RewardMaker) else None


def load_reward(
    config: config.RewardConfig, objects: Mapping[str, Callable[..., Any]] | None = None
) -> Reward:
    """Load the configured reward and start its processes; `close` it after use.

    `objects`: functions by their names in the configuration, which are called in this process.

    Raises `Refused` if the reward, its function or an option doesn't exist.
    """
    with ExitStack() as opened:

        def load(name: str, options: dict[str, Any], prefix: str = "") -> Reward:
            try:
                return opened.enter_context(closing(_load(name, options, config, objects or {})))
            except Refused as error:
                raise Refused(f"{prefix}{error}") from None

        reward: Reward
        if config.functions:
            parts = labeled(config.functions)
            rewards = {
                label: load(part.name, part.options, f"reward.functions.{i}: ")
                for i, (label, part) in enumerate(parts.items())
            }
            reward = CombinedReward(config.title, rewards, parts)
        else:
            assert config.name is not None
            reward = load(config.name, config.options)
            if config.places and not isinstance(reward, FunctionReward):
                raise Refused(f"reward.places is for functions, and {config.name} isn't one; remove it")
        if config.meaning is not None:
            reward = MeaningfulReward(reward, load(config.meaning, {}, "reward.meaning: "))
        opened.pop_all()
    return reward


def _load(
    name: str,
    options: dict[str, object],
    config: config.RewardConfig,
    objects: Mapping[str, Callable[..., Any]],
) -> Reward:
    options = from_environment(options, "reward.options")
    if name in objects:
        return FunctionReward(objects[name], options, inline=True, places=config.places)
    check_name(name)
    maker = maker_of(name)
    if maker is not None:
        checked = read_options(maker.options, options, f"reward.options of {name}")
        return maker.make(checked, timeout=config.timeout, workers=config.workers)
    return FunctionReward(name, options, timeout=config.timeout, workers=config.workers, places=config.places)


def check_name(name: str) -> None:
    """Raise `Refused` if there is no such reward, or no such file with a function."""
    if name.startswith(PREFIX):
        raise Refused(
            f"reward.name: {name} was a function of the Python process that started the run, and can't be "
            "imported. What to do: continue in Python, or write it to a file and name it as file.py:function"
        )
    if problem := plugins.unknown("rewards", name, tuple(BUILTIN)):
        raise Refused(f"reward.name: {problem}")
    if name not in BUILTIN:
        plugins.absolute("rewards", name, "reward.name")
