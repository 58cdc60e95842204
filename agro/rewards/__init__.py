"""Rewards: a number for a response, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any

from agro import config
from agro.config import from_environment
from agro.errors import Refused
from agro.io.nearest import nearest
from agro.rewards.builtin import AnswerReward, OverlongReward, exact, mathematical, overlong, regex
from agro.rewards.code import code
from agro.rewards.function import PREFIX, FunctionReward, located
from agro.rewards.judge import judge
from agro.rewards.meaning import MeaningfulReward
from agro.rewards.protocol import Reward, Score, check_failures
from agro.rewards.shaping import CombinedReward, labeled

__all__ = [
    "AnswerReward",
    "CombinedReward",
    "FunctionReward",
    "OverlongReward",
    "Reward",
    "Score",
    "check_failures",
    "load_reward",
]


def _model(options: Mapping[str, Any], **others: Any) -> Reward:
    """See `agro.rewards.model`, which imports torch and transformers."""
    from agro.rewards.model import model_reward

    return model_reward(options, **others)


BUILTIN: dict[str, Callable[..., Reward]] = {
    "exact": exact,
    "regex": regex,
    "math": mathematical,
    "overlong": overlong,
    "code": code,
    "judge": judge,
    "model": _model,
}


def load_reward(
    config: config.RewardConfig, objects: Mapping[str, Callable[..., Any]] | None = None
) -> Reward:
    """The reward that the configuration names, its processes started; `close` it after use.

    `objects`: functions by their names in the configuration, which are called in this process.

    Raises `Refused` where there is no such reward or function, or where it has no such option.
    """
    functions = objects or {}
    if config.meaning is not None:
        return _load_meaningful(config, config.meaning, functions)
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


def _load_meaningful(
    config: config.RewardConfig, name: str, objects: Mapping[str, Callable[..., Any]]
) -> MeaningfulReward:
    with ExitStack() as opened:
        scorer = load_reward(config.model_copy(update={"meaning": None}), objects)
        opened.enter_context(closing(scorer))
        try:
            meaning = _load(name, {}, config, objects)
        except Refused as error:
            raise Refused(f"reward.meaning: {error}") from None
        opened.pop_all()
    return MeaningfulReward(scorer, meaning)


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
    if name in BUILTIN:
        return BUILTIN[name](options, timeout=config.timeout, workers=config.workers)
    if name.startswith(PREFIX) or ":" not in name:
        check_name(name)  # others are located as they are loaded
    return FunctionReward(name, options, timeout=config.timeout, workers=config.workers, **where)


def check_name(name: str) -> None:
    """Raise `Refused` where there is no such reward, or no such file of a function."""
    if name.startswith(PREFIX):
        raise Refused(
            f"reward.name: {name} was a function of the Python process that began the run, and can't be "
            "imported. What to do: continue in Python, or write it into a file and give file.py:function"
        )
    if name in BUILTIN:
        return
    if ":" not in name:
        near = nearest(name, BUILTIN)
        raise Refused(
            f"reward.name: expected {', '.join(BUILTIN)}, module:function or file.py:function, got {name!r}"
            + (f"; did you mean {near}?" if near else "")
        )
    located(name)
