"""What tests of chat templates share: a policy over bytes under a template, and the texts of a row."""

from __future__ import annotations

import itertools
from pathlib import Path

import transformers

from agro.config import ChatConfig, NewModel
from agro.models.policy import Policy
from agro.models.pretrained import new_model
from agro.types import Sample


def bytes_model(folder: Path) -> Path:
    new_model(folder, NewModel(hidden=8, layers=1, heads=1, context=16), 0)
    return folder


def policy_under(
    template: str | None, special: list[str], folder: Path, causal, context: int, /, **settings
) -> Policy:
    """With these special tokens, and settings of [policy.chat]; `folder` has the tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.split_special_tokens = False
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    model = causal("Llama", vocab_size=len(tokenizer), max_position_embeddings=context)
    return Policy(model, tokenizer, chat=ChatConfig(**settings))


def layout_of(policy: Policy, row: Sample) -> list[tuple[str, bool]]:
    """Runs of tokens with and without action, as text."""
    runs = itertools.groupby(zip(row.tokens.tolist(), row.action.tolist()), key=lambda pair: pair[1])
    decode = policy.tokenizer.decode
    return [(decode([i for i, _ in run], skip_special_tokens=False), own) for own, run in runs]
