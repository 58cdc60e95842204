"""The models that a run saves: RUN/model, RUN/adapter, RUN/best."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agro.config import LoRA
from agro.files import complete_folder
from agro.runs.folder import known
from agro.train.learner import Learner


def save_model(learner: Learner, out: Path, lora: LoRA | None) -> None:
    """Write RUN/model, and RUN/adapter where an adapter was merged into it; each is complete or missing."""
    with complete_folder(out / "model") as folder:
        learner.save_model(folder, merge=lora is None or lora.merge)
    if lora is not None and lora.merge:
        with complete_folder(out / "adapter") as folder:
            learner.save_model(folder, merge=False)


def keep_best(learner: Learner, out: Path, lora: LoRA | None, measured: Mapping[str, Any]) -> None:
    """Write RUN/best: the model, and its metrics in best.json. The folder is complete or missing."""
    with complete_folder(out / "best") as folder:
        learner.save_model(folder, merge=lora is None or lora.merge)
        metrics = known({k: measured[k] for k in ("step", "eval_reward", "eval_reward_se", "eval_n")})
        text = json.dumps(metrics, indent=1, allow_nan=False) + "\n"
        (folder / "best.json").write_text(text, encoding="utf-8")
