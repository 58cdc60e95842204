"""Rewards: a number for a response, or the reason why there is none."""

from difflib import get_close_matches

from agro import config
from agro.errors import Refused
from agro.rewards.builtin import AnswerReward, exact, regex
from agro.rewards.function import FunctionReward
from agro.rewards.protocol import Reward, Score, check_failures

__all__ = ["AnswerReward", "FunctionReward", "Reward", "Score", "check_failures", "exact", "load_reward", "regex"]


def load_reward(config: config.Reward) -> Reward:
    """The reward that the configuration names, its processes started; `close` it after use.

    Raises `Refused` where there is no such reward or function, or where it has no such option.
    """
    if config.name == "exact":
        return exact(config.options)
    if config.name == "regex":
        return regex(config.options, config.timeout, config.workers)
    if ":" in config.name:
        return FunctionReward(config.name, config.options, timeout=config.timeout, workers=config.workers)
    near = get_close_matches(config.name, ["exact", "regex"], 1, 0.5)
    raise Refused(
        f"reward.name: expected exact, regex, module:function or file.py:function, got {config.name!r}"
        + (f"; did you mean {near[0]}?" if near else "")
    )
