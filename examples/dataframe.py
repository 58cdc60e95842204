"""A run from a pandas DataFrame and a lambda: a tiny new model learns to write sevens, in seconds on a CPU.

For a model of your own, give `model="folder or hub name"` in place of `policy__new`.
"""

import pandas

import agro

prompts = pandas.DataFrame({"prompt": [f"{i}>" for i in range(10)], "answer": ["7"] * 10})
trained = agro.train(
    prompts=prompts,
    reward=lambda completions, answer, **_: [text.count(a) for text, a in zip(completions, answer)],
    beta=0.1,
    policy__new={"alphabet": "0123456789>", "hidden": 16, "layers": 1, "heads": 2, "initializer_range": 0.25},
    sampler={"n": 8, "max_new": 3},
    train={"steps": 10, "groups": 8, "lr": 3e-2},
)
print(trained.metrics[["step", "reward_mean", "kl_ref"]].tail(3))
