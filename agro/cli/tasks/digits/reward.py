"""The reward. Change it and train again: the model learns what it rewards."""


def prefix(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Return the share of the answer that each response begins with: 1 for all of it."""
    return [matched(text, right) / len(right) for text, right in zip(completions, answer)]


def matched(text: str, right: str) -> int:
    """Count the characters of `right` that `text` begins with; 0 for a longer text."""
    if len(text) > len(right):
        return 0
    length = 0
    while length < len(text) and text[length] == right[length]:
        length += 1
    return length


prefix.maximum = 1.0  # type: ignore[attr-defined]  # the reward with which a response passes in `agro eval`
