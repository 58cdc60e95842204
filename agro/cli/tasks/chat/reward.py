"""The reward. With messages as prompts a completion is a list of messages; the last one has the text."""


def larger(completions: list[list[dict[str, str]]], answer: list[str], **columns: object) -> list[float]:
    """Return 1 for the answer alone, ½ for the answer with more text behind it, else 0."""
    return [score(messages[-1]["content"], wanted) for messages, wanted in zip(completions, answer)]


def score(text: str, wanted: str) -> float:
    if text == wanted:
        return 1.0
    return 0.5 if text.startswith(wanted) else 0.0


larger.maximum = 1.0  # type: ignore[attr-defined]  # the reward with which a response passes in `agro eval`
