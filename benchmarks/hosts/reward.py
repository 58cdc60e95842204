"""The rewards of the runs that are killed: shares of right characters, which differ within a group."""


def share(completions, answer, **_):
    return [sum(c == a for c in text) / 3 for text, a in zip(completions, answer)]
