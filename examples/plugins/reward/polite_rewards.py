"""Two rewards: a function, which agro calls in worker processes, and one with checked options."""

from __future__ import annotations

from typing import Any

from agro.config import Section
from agro.rewards import AnswerReward, RewardMaker, Score

POLITE = ("please", "thank", "welcome")


def politeness(completions: list[str], **columns: Any) -> list[float]:
    """The share of polite words that a response has."""
    return [sum(word in text.lower() for word in POLITE) / len(POLITE) for text in completions]


class Options(Section):
    case: bool = True
    """whether case matters"""


def mentions(options: Options, **_: Any) -> AnswerReward:
    """1.0 if the response contains the answer."""

    def form(text: str) -> str:
        return text if options.case else text.casefold()

    def score(responses: list[str], expected: list[str]) -> list[Score]:
        return [Score(float(form(a) in form(r))) for r, a in zip(responses, expected)]

    return AnswerReward("mentions", score)


MENTIONS = RewardMaker(mentions, Options)
