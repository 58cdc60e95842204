"""The reward `model`: the score of a sequence-classification model for prompt and response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agro.errors import Refused
from agro.models.pretrained import device_of, positions_of, without_bars
from agro.rewards.builtin import ModelOptions
from agro.rewards.protocol import Reward, Score, score_known
from agro.types import Sample, Text


class ModelReward(Reward):
    """Scores by a model in this process. A response that is too long for the model has no reward.

    The reward is the logit of a model with one, or a classifier's probability of a label.
    """

    name = "model"
    maximum: float | None = None

    def __init__(self, options: ModelOptions) -> None:
        """Raises `Refused` for any other kind of model."""
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        path, label = options.path, options.label
        try:
            config = AutoConfig.from_pretrained(path)
            architectures = " ".join(config.architectures or [])
            if "Classification" not in architectures:
                raise Refused(
                    f"reward model {path}: expected a sequence-classification model, got {architectures}. "
                    "What to do: train one from it, such as with TRL's RewardTrainer on judged pairs"
                )
            with without_bars():
                model = AutoModelForSequenceClassification.from_pretrained(
                    path, dtype=getattr(torch, options.dtype), use_safetensors=True
                )
            self.tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise Refused(
                f"reward model {path}: expected the folder or hub name of a sequence-classification model "
                "with model.safetensors (pickled weights are not read: convert them with save_pretrained); "
                f"{error}"
            ) from None
        self.template = options.template
        self.max_length, self.batch = min(options.max_length, positions_of(model)), options.batch
        labels = {str(name): int(number) for number, name in (model.config.id2label or {}).items()}
        if model.config.num_labels > 1 and label not in labels:
            raise Refused(
                f"reward.options.label: the model has the labels {', '.join(labels)}; expected the one whose "
                f"probability is the reward, got {label!r}"
            )
        self.label = labels[label] if model.config.num_labels > 1 else 0
        if model.config.num_labels > 1:
            self.maximum = 1.0
        if self.template == "chat" and not self.tokenizer.chat_template:
            raise Refused(f"reward model {path}: template = chat, but its tokenizer has no chat template")
        self.model: Any = model.to(device_of(options.device)).eval()

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_known(samples, lambda s: self.ids(s.prompt, s.response), self._score)

    def _score(self, samples: list[Sample], rows: list[list[int]]) -> list[Score]:
        return [
            Score(value) if math.isfinite(value) else Score(None, f"the reward model gave {value}")
            for value in self.values(rows)
        ]

    def ids(self, prompt: Text, response: str) -> list[int]:
        """The tokens of both. Raises `LookupError` if there are too many or they can't be rendered."""
        tokenizer = self.tokenizer
        if self.template == "plain" or (self.template == "auto" and isinstance(prompt, str)):
            if not isinstance(prompt, str):
                raise LookupError("the prompt is a conversation, and the reward model's template is plain")
            ids = tokenizer(prompt + response)["input_ids"]
        elif not tokenizer.chat_template:
            raise LookupError("the prompt is a conversation, and the reward model has no chat template")
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            conversation = [*messages, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(conversation, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not 0 < len(ids) <= self.max_length:
            raise LookupError(f"{len(ids)} tokens; the reward model takes 1 to {self.max_length}")
        return list(ids)

    @torch.no_grad()
    def values(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The reward of each sequence; sequences of similar length share a pass."""
        values = [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), self.batch):
            batch = order[start : start + self.batch]
            logits = self._logits([rows[i] for i in batch])
            scores = logits.softmax(1)[:, self.label] if logits.shape[1] > 1 else logits[:, 0]
            for i, value in zip(batch, scores.tolist(), strict=True):
                values[i] = value
        return values

    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[N,L] logits of sequences of tokens, in one pass."""
        device = self.model.device
        tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
        lengths = torch.tensor([len(row) for row in rows])
        padded = pad_sequence(tokens, batch_first=True).to(device)
        mask = (torch.arange(padded.shape[1])[None] < lengths[:, None]).to(device)
        # Decoders read the last token that isn't padding, so no row may end with the padding token.
        ends = {row[-1] for row in rows}
        padding = next(i for i in range(len(ends) + 1) if i not in ends)
        config = self.model.config.get_text_config()
        config.pad_token_id = padding
        logits: Tensor = self.model(
            input_ids=padded.masked_fill(~mask, padding), attention_mask=mask.long()
        ).logits
        return logits.float()
