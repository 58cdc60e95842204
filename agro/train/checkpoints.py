"""The policy of a run at one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from agro import config as configuration
from agro.config import RunConfig
from agro.policy import Policy
from agro.train.learner import AVERAGE, read_weights
from agro.train.phases import derive
from agro.train.state import POSITION


def is_checkpoint(folder: Path) -> bool:
    """Whether it is RUN/checkpoints/step-N."""
    return (folder / POSITION).is_file()


def run_of(folder: Path) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    return folder.absolute().parents[1]


@torch.no_grad()
def load_checkpoint(folder: Path, config: configuration.Policy) -> Policy:
    """`config`: [policy] of the run. Where the run averages its weights, these are averaged too."""
    run = RunConfig.load(run_of(folder) / "config.json")
    policy = Policy.load(config, seed=derive(run.train.seed, "weights"))
    averaged = folder / AVERAGE
    file = averaged if averaged.exists() else folder / "model.safetensors"
    weights = policy.weights()
    for name, value in read_weights(file, weights).items():
        weights[name].copy_(value)
    return policy
