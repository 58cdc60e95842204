"""The model that a job starts from: a new one that imitates a careless teacher.

Made by a plain loop, not by the library's trainer: it isn't what is compared, and so it costs a fifth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from agro.config import NewModel, RunConfig
from agro.models.policy import Policy
from agro.models.pretrained import new_model
from reproductions.calculator import run as calculator
from reproductions.panel.jobs import Job, Model

HEADS = 4  # of attention
RATE, WARM_UP = 3e-3, 20  # learning rate, and updates until it is reached
IGNORED = -100  # the target of tokens that aren't learned


def create(job: Job, folder: Path, context: int) -> None:
    """Write a model with random weights, of the job's class, with a token for each character."""
    model = job.model
    spec = NewModel(
        alphabet=job.task.alphabet, hidden=model.hidden, layers=model.layers, heads=HEADS, context=context
    )
    new_model(folder, spec, seed=0)
    if model.family == "llama":
        return
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for file in folder.iterdir():
        file.unlink()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        other = _of_family(model, context, tokenizer)
    other.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _of_family(model: Model, context: int, tokenizer: Any) -> PreTrainedModel:
    special: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config: PretrainedConfig
    if model.family == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        size = {"n_positions": context, "n_embd": model.hidden, "n_layer": model.layers, "n_head": HEADS}
        return GPT2LMHeadModel(GPT2Config(**special, **size, **off))
    config = GPTNeoXConfig(
        **special,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=HEADS,
        intermediate_size=4 * model.hidden,
        max_position_embeddings=context,
    )
    return GPTNeoXForCausalLM(config)


def imitate(
    job: Job, initial: Path, prompts: Sequence[str], rng: random.Random, environment: dict[str, Any] | None
) -> Policy:
    """The model of the folder `initial` after training on the teacher's responses to `prompts`."""
    policy = Policy.load(RunConfig.of({"policy": {"model": str(initial)}}).policy)
    tokens, mask = _lessons(job, policy, initial, prompts, rng, environment)
    targets = tokens.where(mask, IGNORED)
    weights = list(policy.trained().values())
    adam = torch.optim.AdamW(weights, RATE, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    order = _order(len(tokens), job.together, rng)
    policy.model.train()
    for update in range(job.warm_up):
        rows = next(order)
        logits = policy.model(input_ids=tokens[rows, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), targets[rows, 1:].flatten(), ignore_index=IGNORED)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for group in adam.param_groups:
            group["lr"] = RATE * _share(update, job.warm_up)
        adam.step()
    policy.model.eval()
    return policy


def _share(update: int, updates: int) -> float:
    """Of the learning rate: rising, then a half cosine to 0."""
    if update < WARM_UP:
        return (update + 1) / WARM_UP
    done = (update - WARM_UP) / max(1, updates - WARM_UP)
    return 0.5 * (1 + math.cos(math.pi * done))


def _order(count: int, together: int, rng: random.Random) -> Iterator[list[int]]:
    size = min(together, count)
    while True:
        drawn = rng.sample(range(count), count)
        for i in range(0, count - size + 1, size):
            yield drawn[i : i + size]


def _lessons(
    job: Job,
    policy: Policy,
    initial: Path,
    prompts: Sequence[str],
    rng: random.Random,
    environment: dict[str, Any] | None,
) -> tuple[Tensor, Tensor]:
    """[B,T] tokens of prompt and response, 0 after the end, and which of them are learned."""
    if environment is not None:
        config = RunConfig.of({"policy": {"model": str(initial)}, "environment": environment})
        taught = calculator.lessons(config, prompts, rng)
        encoded = [policy.encoder.encode(sample) for sample in taught]
        rows = [s.tokens.tolist() for s in encoded if s.tokens is not None]
        masks = [s.mask.tolist() for s in encoded]
    else:
        texts = [job.teacher.write(job.task, prompt, rng) for prompt in prompts]
        both = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        end = policy.encoder.eos_ids[0]
        rows = [[*ids, end] for ids in policy.encoder.chat.tokenizer(both)["input_ids"]]
        masks = [
            [False] * (len(row) - len(text) - 1) + [True] * (len(text) + 1)
            for row, text in zip(rows, texts, strict=True)
        ]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (row, of_row) in enumerate(zip(rows, masks, strict=True)):
        tokens[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = torch.tensor(of_row)
    return tokens, mask
