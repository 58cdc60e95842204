"""The reward of the tortured run: a share of right characters, so that rewards differ within a group."""


def share(completions, answer, **_):
    return [sum(c == a for c in text) / 3 for text, a in zip(completions, answer)]
