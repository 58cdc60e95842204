"""Rewards: a number for a response, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any

from agro import config
from agro.config import from_environment
from agro.errors import Refused
from agro.io import plugins
from agro.rewards.builtin import AnswerReward, OverlongReward, exact, overlong
from agro.rewards.function import PREFIX, FunctionReward
from agro.rewards.judge import judge
from agro.rewards.meaning import MeaningfulReward
from agro.rewards.protocol import (
    Reward,
    RewardMaker,
    Score,
    check_failures,
    checked_options,
    score_known,
)
from agro.rewards.shaping import CombinedReward, labeled
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
    "checked_options",
    "load_reward",
    "score_known",
]


def _model(options: Mapping[str, Any], **others: Any) -> Reward:
    """See `agro.rewards.model`, which imports torch and transformers."""
    from agro.rewards.model import model_reward

    return model_reward(options, **others)


BUILTIN: dict[str, RewardMaker] = {
    "exact": RewardMaker(exact),
    "overlong": RewardMaker(overlong),
    "judge": RewardMaker(judge),
    "model": RewardMaker(_model),
}


def maker_of(name: str) -> RewardMaker | None:
    """The built-in or installed reward of this name that takes options; None of a function."""
    if name in BUILTIN:
        return BUILTIN[name]
    if plugins.is_reference(name) or plugins.unknown("rewards", name, tuple(BUILTIN)):
        return None
    part = plugins.load("rewards", name, f"reward {name}")
    return part if isinstance(part, RewardMaker) else None


def load_reward(
    config: config.RewardConfig, objects: Mapping[str, Callable[..., Any]] | None = None
) -> Reward:
    """The reward that the configuration names, its processes started; `close` it after use.

    `objects`: functions by their names in the configuration, which are called in this process.

    Raises `Refused` where there is no such reward or function, or where it has no such option.
    """
    functions = objects or {}
    if config.meaning is not None:
        with ExitStack() as opened:
            scorer = load_reward(config.model_copy(update={"meaning": None}), objects)
            opened.enter_context(closing(scorer))
            try:
                meaning = _load(config.meaning, {}, config, functions)
            except Refused as error:
                raise Refused(f"reward.meaning: {error}") from None
            opened.pop_all()
        return MeaningfulReward(scorer, meaning)
    if not config.functions:
        assert config.name is not None
        return _load(config.name, config.options, config, functions)
    rewards: dict[str, Reward] = {}
    parts = labeled(config.functions)
    with ExitStack() as opened:
        for i, (label, part) in enumerate(parts.items()):
            try:
                reward = opened.enter_context(closing(_load(part.name, part.options, config, functions)))
            except Refused as error:
                raise Refused(f"reward.functions.{i}: {error}") from None
            rewards[label] = reward
        opened.pop_all()
    return CombinedReward(config.title, rewards, parts)


def _load(
    name: str,
    options: dict[str, object],
    config: config.RewardConfig,
    objects: Mapping[str, Callable[..., Any]],
) -> Reward:
    options = from_environment(options, "reward.options")
    where: dict[str, Any] = {"per_token": config.per_token, "per_step": config.per_step}
    if name in objects:
        return FunctionReward(objects[name], options, inline=True, **where)
    check_name(name)
    maker = None if plugins.is_reference(name) else maker_of(name)
    if maker is not None:
        return maker.make(options, timeout=config.timeout, workers=config.workers)
    return FunctionReward(name, options, timeout=config.timeout, workers=config.workers, **where)


def check_name(name: str) -> None:
    """Raise `Refused` where there is no such reward, or no such file of a function."""
    if name.startswith(PREFIX):
        raise Refused(
            f"reward.name: {name} was a function of the Python process that began the run, and can't be "
            "imported. What to do: continue in Python, or write it into a file and give file.py:function"
        )
    if problem := plugins.unknown("rewards", name, tuple(BUILTIN)):
        raise Refused(f"reward.name: {problem}")
    if name not in BUILTIN:
        plugins.absolute("rewards", name, "reward.name")
