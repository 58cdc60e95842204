"""Rewards with TRL's signature, for tests."""


def digits(completions, answer, **_):
    """The share of characters that are the answer: rewards differ within groups of random responses."""
    return [sum(c == a for c in text) / 3 for text, a in zip(completions, answer)]


def low_answer(completions, answer, **_):
    return [float(a in "01234") for a in answer]


def half_fails(completions, **_):
    return [float("nan") if text[:1] in "01234" else 1.0 for text in completions]


def always_fails(completions, **_):
    raise RuntimeError("no judge today")


def even(completions, **_):
    """Whether a response is an even digit, and nothing else."""
    return [float(text in {"0", "2", "4", "6", "8"}) for text in completions]


def alike(completions, **_):
    return [1.0] * len(completions)


def sevens(completions, **_):
    """A policy from random weights gets 0.09, and learns to get all of it."""
    return [text.count("7") / 3 for text in completions]


def sober(completions, **_):
    """Best at one 7."""
    return [1 - abs(text.count("7") - 1) / 2 for text in completions]


def dense(completion_ids, completions, **_):
    """1 for each token of a response with a 7; a value too few where it begins with 0."""
    rows = [[float("7" in text)] * len(ids) for ids, text in zip(completion_ids, completions)]
    return [row[1:] if text.startswith("0") else row for row, text in zip(rows, completions)]


def stepwise(completions, **_):
    """The length of each part that ends at a 7."""
    return [[float(len(part)) for part in text.split("7") if part.strip()] for text in completions]


def zero(completions, **_):
    return [0.0] * len(completions)
