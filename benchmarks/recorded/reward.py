"""Rewards of the recorded runs, with TRL's signature; random responses differ in them."""


def share(completions, answer, **_):
    """The share of three characters that are the answer."""
    return [sum(c == a for c in text) / 3 for text, a in zip(completions, answer)]


def places(completions, answer, **_):
    """The share of places where response and answer agree."""
    return [
        sum(c == a for c, a in zip(text, a)) / max(len(text), len(a), 1)
        for text, a in zip(completions, answer)
    ]


def short(completions, **_):
    return [1.0 / (1 + len(text)) for text in completions]


def some_fail(completions, answer, **_):
    """Unknown where a response begins with a digit below 3."""
    return [
        float("nan") if text[:1] in ("0", "1", "2") else text.count(a) / 3
        for text, a in zip(completions, answer)
    ]
