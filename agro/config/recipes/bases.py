"""What recipes of methods have in common, by the data that they train on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Base:
    """Settings by dotted key, the command lines that start such a recipe, and what they require."""

    settings: dict[str, Any]
    commands: tuple[str, ...]
    required: str


TRAIN: dict[str, Any] = {
    "train.steps": 200,
    "train.groups": 16,
    "train.micro_tokens": 8192,
    "train.lr": 1e-6,
    "train.warmup": 10,
}
HELD_OUT: dict[str, Any] = {"hold_out": 0.1, "hold_out_most": 128}  # of [data]
OF_DATA: dict[str, Any] = {f"data.{key}": value for key, value in HELD_OUT.items()}

SAMPLES = Base(
    TRAIN | OF_DATA | {"sampler.n": 8, "sampler.max_new": 256, "evaluate.every": 20},
    (
        "agro train {name} policy.model=MODEL data.prompts=prompts.jsonl \\",
        "  reward.name=my_reward.py:score --out runs/{name}",
    ),
    "policy.model and data.prompts; and a reward unless it is `exact`.",
)
STORED = Base(
    TRAIN | OF_DATA | {"data.replay": 1.0, "train.groups": 32},
    (
        "agro import log.jsonl --store log.db",
        "agro train {name} policy.model=MODEL data.store=log.db --out runs/{name}",
    ),
    "policy.model and data.store, whose responses have rewards.",
)
BASES = {
    "samples": SAMPLES,
    # Two optimizer steps of a batch: in the first one the ratio to the policy before is 1.
    "ratios": replace(SAMPLES, settings=SAMPLES.settings | {"train.updates": 2}),
    # The sampler keeps its weights for some steps, so that ratios to it are far from 1.
    "lagging": replace(SAMPLES, settings=SAMPLES.settings | {"source.sync_every": 20}),
    "experts": Base(
        SAMPLES.settings | {"data.experts": 1, "sampler.n": 7},
        (
            "agro import experts.jsonl --store experts.db",
            "agro train {name} policy.model=MODEL data.prompts=prompts.jsonl data.store=experts.db \\",
            "  reward.name=my_reward.py:score --out runs/{name}",
        ),
        'policy.model, data.prompts, data.store with scored records of role "expert" to the same prompts, '
        "and a reward for the samples unless it is `exact`.",
    ),
    "stored": STORED,
    "supervised": Base(
        STORED.settings
        | {
            "data.group_size": 1,
            "train.steps": 500,
            "train.lr": 1e-5,
            "train.warmup": 25,
            "train.schedule": "cosine",
        }
        | dict.fromkeys(OF_DATA),  # it needs no reference, which stored groups are measured against
        STORED.commands,
        "policy.model and data.store. Of a log with right and wrong responses set data.min_reward, "
        "data.best_of_group or data.sources.",
    ),
    "pairs": Base(
        STORED.settings | {"data.group_size": 8, "objective.singletons": "drop"},
        (
            "agro import preferences.jsonl --store pairs.db",
            "agro check pairs.db --objective {name}",
            "agro train {name} policy.model=MODEL data.store=pairs.db --out runs/{name}",
        ),
        "policy.model and data.store. Rewards aren't used.",
    ),
}

# By dotted key, what its line says in every recipe that has nothing of its own to say.
NOTES = {
    "data.experts": "stored expert responses beside the samples of each prompt",
    "data.replay": "share of each step's groups that comes from the store",
    "data.group_size": "most responses of a prompt in a step",
    "data.hold_out": "of the prompts, to compare the result with the start",
    "data.hold_out_most": "at most so many, and none of fewer than 200; hold_out = 0: none",
    "data.max_age": "optimizer steps",
    "objective.singletons": "prompts without a pair have no gradient; they are counted",
    "train.updates": "of one batch; the ratio differs from 1 from the second on",
    "train.value_lr": "of the value head, which has its own optimizer group",
}
