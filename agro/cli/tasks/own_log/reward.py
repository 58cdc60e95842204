"""The reward of fresh responses, to measure with. Training uses the log's rewards."""


def right(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Return 1 for the answer, 0 for anything else."""
    return [float(text == wanted) for text, wanted in zip(completions, answer)]


right.maximum = 1.0  # type: ignore[attr-defined]  # the reward with which a response passes in `agro eval`
