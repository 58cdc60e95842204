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
