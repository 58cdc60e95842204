"""The models that a run leaves: RUN/model, RUN/adapter, RUN/best."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agro.config import LoRA
from agro.files import whole_folder
from agro.policy import Policy
from agro.runs.folder import known


def save_model(policy: Policy, out: Path, lora: LoRA | None) -> None:
    """RUN/model, and RUN/adapter beside a model that an adapter was merged into; each whole or not there."""
    with whole_folder(out / "model") as folder:
        policy.save(folder, merge=lora is None or lora.merge)
    if lora is not None and lora.merge:
        with whole_folder(out / "adapter") as folder:
            policy.save(folder, merge=False)


def keep_best(policy: Policy, out: Path, lora: LoRA | None, measured: Mapping[str, Any]) -> None:
    """RUN/best: the model, and best.json with what was `measured` of it; whole or not there."""
    with whole_folder(out / "best") as folder:
        policy.save(folder, merge=lora is None or lora.merge)
        told = known({k: measured[k] for k in ("step", "eval_reward", "eval_reward_se", "eval_n")})
        (folder / "best.json").write_text(
            json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
