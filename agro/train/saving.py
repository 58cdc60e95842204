"""The models that a run leaves: RUN/model, RUN/adapter, RUN/best."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agro.config import LoRA
from agro.files import whole_folder
from agro.runs.folder import known
from agro.train.learner import Learner


def save_model(learner: Learner, out: Path, lora: LoRA | None) -> None:
    """RUN/model, and RUN/adapter beside a model that an adapter was merged into; each complete or not there."""
    with whole_folder(out / "model") as folder:
        learner.save_model(folder, merge=lora is None or lora.merge)
    if lora is not None and lora.merge:
        with whole_folder(out / "adapter") as folder:
            learner.save_model(folder, merge=False)


def keep_best(learner: Learner, out: Path, lora: LoRA | None, measured: Mapping[str, Any]) -> None:
    """RUN/best: the model, and best.json with those metrics of it; complete or not there."""
    with whole_folder(out / "best") as folder:
        learner.save_model(folder, merge=lora is None or lora.merge)
        metrics = known({k: measured[k] for k in ("step", "eval_reward", "eval_reward_se", "eval_n")})
        text = json.dumps(metrics, indent=1, allow_nan=False) + "\n"
        (folder / "best.json").write_text(text, encoding="utf-8")
