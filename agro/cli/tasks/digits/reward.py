"""The reward. Change it and train again: this is what the model will do."""


def prefix(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """How far each response agrees with the answer, from its start: 1 for all of it."""
    return [matched(text, right) / len(right) for text, right in zip(completions, answer)]


def matched(text: str, right: str) -> int:
    """Characters of `right` that `text` begins with; 0 for a text that is longer."""
    if len(text) > len(right):
        return 0
    length = 0
    while length < len(text) and text[length] == right[length]:
        length += 1
    return length


prefix.maximum = 1.0  # type: ignore[attr-defined]  # from here on a response passes in `agro eval`
