"""The reward `model`: what a sequence-classification model gives to prompt and response."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agro.errors import Refused
from agro.models.pretrained import device_of, positions_of, without_bars
from agro.rewards.protocol import Score, checked_options, score_known
from agro.types import Sample, Text

SETTINGS = "reward.json"  # beside a model that an earlier version of agro fitted: what its numbers mean
TEMPLATES = ("auto", "chat", "plain")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RewardModel:
    """A model, its tokenizer, and how a prompt and a response become one sequence."""

    model: Any
    tokenizer: Any
    template: str = "auto"  # chat: a conversation; plain: one text after the other; auto: as the prompt is
    max_length: int = 2**20  # tokens
    label: int = 0  # of a classifier of several labels, whose probability is the reward
    scale: float = 1.0  # reward = scale · logit + shift, of a model with one logit
    shift: float = 0.0

    @classmethod
    def load(
        cls,
        path: str,
        *,
        device: str = "auto",
        dtype: str = "float32",
        template: str = "auto",
        max_length: int | None = None,
        label: str = "",
    ) -> RewardModel:
        """`path`: a folder or hub name."""
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(path)
            architectures = " ".join(config.architectures or [])
            if "Classification" not in architectures:
                raise Refused(
                    f"reward model {path}: expected a sequence-classification model, got {architectures}. "
                    "What to do: train one from it, such as by TRL's RewardTrainer on judged pairs"
                )
            with without_bars():
                model = AutoModelForSequenceClassification.from_pretrained(
                    path, dtype=getattr(torch, dtype), use_safetensors=True
                )
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise Refused(
                f"reward model {path}: expected the folder or hub name of a sequence-classification model "
                "with model.safetensors (pickled weights are not read: convert them with save_pretrained); "
                f"{error}"
            ) from None
        fitted: dict[str, Any] = {}
        if (Path(path) / SETTINGS).is_file():
            fitted = json.loads((Path(path) / SETTINGS).read_text())["model"]
        chosen = cls(
            model.to(device_of(device)).eval(),
            tokenizer,
            fitted.get("template", template) if template == "auto" else template,
            min(max_length or 2**20, positions_of(model)),
            _label(model.config, label),
            fitted.get("scale", 1.0),
            fitted.get("shift", 0.0),
        )
        if chosen.template == "chat" and not tokenizer.chat_template:
            raise Refused(f"reward model {path}: template = chat, but its tokenizer has no chat template")
        return chosen

    def ids(self, prompt: Text, response: str) -> list[int]:
        """The tokens of both. Raises `LookupError` where they are too many or can't be rendered."""
        tokenizer = self.tokenizer
        if self.template == "plain" or (self.template == "auto" and isinstance(prompt, str)):
            if not isinstance(prompt, str):
                raise LookupError("the prompt is a conversation, and the reward model's template is plain")
            ids = tokenizer(prompt + response)["input_ids"]
        elif not tokenizer.chat_template:
            raise LookupError("the prompt is a conversation, and the reward model has no chat template")
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            whole = [*messages, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(whole, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not 0 < len(ids) <= self.max_length:
            raise LookupError(f"{len(ids)} tokens; the reward model takes 1 to {self.max_length}")
        return list(ids)

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[N,L] of sequences of tokens, in one pass."""
        device = self.model.device
        tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
        lengths = torch.tensor([len(row) for row in rows])
        padded = pad_sequence(tokens, batch_first=True).to(device)
        mask = (torch.arange(padded.shape[1])[None] < lengths[:, None]).to(device)
        # Decoders take the last token that isn't padding: none of these rows may end with what pads them.
        ends = {row[-1] for row in rows}
        padding = next(i for i in range(len(ends) + 1) if i not in ends)
        padded = padded.masked_fill(~mask, padding)
        config = self.model.config.get_text_config()
        before, config.pad_token_id = config.pad_token_id, padding
        try:
            found: Tensor = self.model(input_ids=padded, attention_mask=mask.long()).logits
        finally:
            config.pad_token_id = before  # which is saved with the model
        return found.float()

    @torch.no_grad()
    def values(self, rows: Sequence[Sequence[int]], batch: int = 16) -> list[float]:
        """The reward of each sequence; those of about one length are read together."""
        values = [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), batch):
            some = order[start : start + batch]
            logits = self.logits([rows[i] for i in some])
            found = logits[:, 0] * self.scale + self.shift
            if logits.shape[1] > 1:
                found = logits.softmax(1)[:, self.label]
            for i, value in zip(some, found.tolist(), strict=True):
                values[i] = value
        return values


class ModelReward:
    """The reward of a model, in this process. A response that is too long for it has none."""

    name = "model"

    def __init__(self, model: RewardModel, batch: int) -> None:
        self.model, self.batch = model, batch
        self.maximum: float | None = 1.0 if model.model.config.num_labels > 1 else None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_known(samples, lambda s: self.model.ids(s.prompt, s.response), self._score)

    def _score(self, samples: list[Sample], rows: list[list[int]]) -> list[Score]:
        return [
            Score(value) if math.isfinite(value) else Score(None, f"the reward model gave {value}")
            for value in self.model.values(rows, self.batch)
        ]

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        return None

    def close(self) -> None:
        """Nothing is open."""


def model_reward(options: Mapping[str, Any], **_: Any) -> ModelReward:
    """Options: `path`, and those of `RewardModel.load`; `batch`: sequences in one pass (16)."""
    defaults = {"path": str, "device": "auto", "dtype": "float32", "template": "auto", "label": ""}
    loading = checked_options("model", options, {**defaults, "max_length": 2**20, "batch": 16})
    for name in ("max_length", "batch"):
        if loading[name] < 1:
            raise Refused(f"reward.options.{name}: expected 1 or more, got {loading[name]}")
    for name, allowed in (("template", TEMPLATES), ("dtype", DTYPES)):
        if loading[name] not in allowed:
            raise Refused(f"reward.options.{name}: expected {', '.join(allowed)}, got {loading[name]!r:.80}")
    batch = loading.pop("batch")
    return ModelReward(RewardModel.load(loading.pop("path"), **loading), batch)


def _label(config: Any, name: str) -> int:
    """The number of a label."""
    labels = {str(label): int(number) for number, label in (config.id2label or {}).items()}
    if config.num_labels == 1:
        return 0
    if name not in labels:
        raise Refused(
            f"reward.options.label: the model has the labels {', '.join(labels)}; expected the one whose "
            f"probability is the reward, got {name!r}"
        )
    return labels[name]
