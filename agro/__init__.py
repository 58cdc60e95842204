"""agro: reinforcement learning for language models from any generation.

The names below are imported when they are first used, so that `import agro` and the command line's `--help`
are fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agro.io.version import __version__ as __version__

if TYPE_CHECKING:
    from agro.api import Proposal as Proposal
    from agro.api import Trained as Trained
    from agro.api import propose as propose
    from agro.api import train as train
    from agro.api.reporting_trainer import Trainer as Trainer
    from agro.config import RunConfig as RunConfig
    from agro.errors import Refused as Refused
    from agro.models.policy import Policy as Policy
    from agro.store import Store as Store
    from agro.types import Batch as Batch
    from agro.types import Prompt as Prompt
    from agro.types import Sample as Sample

_HOMES = {
    "Batch": "agro.types",
    "Policy": "agro.models.policy",
    "Prompt": "agro.types",
    "Proposal": "agro.api",
    "Refused": "agro.errors",
    "RunConfig": "agro.config",
    "Sample": "agro.types",
    "Store": "agro.store",
    "Trained": "agro.api",
    "Trainer": "agro.api.reporting_trainer",
    "propose": "agro.api",
}

__all__ = [
    "Batch",
    "Policy",
    "Prompt",
    "Proposal",
    "Refused",
    "RunConfig",
    "Sample",
    "Store",
    "Trained",
    "Trainer",
    "propose",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("agro.train")  # a package that can be called: it calls agro.api.train
    if name not in _HOMES:
        raise AttributeError(f"module 'agro' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
