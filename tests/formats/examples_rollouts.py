"""Dumps of rollouts, batches and evaluations of NeMo-RL, AReaL, SkyRL and slime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from example import MISSING, Example

NEMO = {
    "content": ["<user>2+2=</user>", "4<end>"],
    "rewards": 1.0,
    "filtered_rewards": 1.0,
    "input_lengths": 4,
    "token_ids": [7, 8, 9, 2, 0, 0],
    "token_loss_mask": [0, 0, 1, 1, 0, 0],
    "sample_loss_mask": 1.0,
    "advantages": [0.5, 0.5, 0.5, 0.5, 0.0, 0.0],
    "generation_logprobs": [0.0, 0.0, -0.25, -0.5, 0.0, 0.0],
    "prev_logprobs": [0.0, 0.0, -0.25, -0.5, 0.0, 0.0],
    "idx": 0,
}
VALID = {
    "content": [
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4"},
        {"role": "environment", "content": "Environment: correct"},
    ],
    "rewards": 1.0,
    "idx": 0,
}
AREAL = {
    "task_id": 12,
    "sample_idx": 0,
    "seqlen": 9,
    "prompt_len": 7,
    "head_version": 3,
    "tail_version": 3,
    "reward": 1.0,
    "prompt": "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n",
    "completion": "4<|im_end|>",
}
SKY = {
    "input_prompt": "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n",
    "output_response": "4<|im_end|>",
    "score": 1.0,
    "stop_reason": "stop",
    "env_class": "gsm8k",
    "env_extras": {"reward_spec": {"method": "rule", "ground_truth": "4"}},
    "data_source": "openai/gsm8k",
}
SLIME = {
    "group_index": 0,
    "index": 5,
    "prompt": [{"role": "user", "content": "2+2="}],
    "tokens": [7, 8, 9, 2],
    "response": "4",
    "response_length": 2,
    "label": "4",
    "reward": 1.0,
    "loss_mask": [1, 1],
    "weight_versions": ["3"],
    "rollout_log_probs": [-0.25, -0.5],
    "remove_sample": False,
    "status": "completed",
    "metadata": {"level": 1},
}


def dump(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    torch.save({"rollout_id": 4, "samples": [dict(row) for row in rows]}, path)


EXAMPLES = (
    Example(
        "nemo-train-data",
        [
            NEMO,
            {**{name: [value] for name, value in NEMO.items()}, "content": [["<user>2+2=</user>", "5<end>"]]},
            {**NEMO, "sample_loss_mask": 0.0},
        ],
        [
            {
                "prompt": "<user>2+2=</user>",
                "response": "4<end>",
                "reward": 1.0,
                "tokens": [7, 8, 9, 2],
                "action": [False, False, True, True],
                "tokenizer": None,
            },
            {"prompt": "<user>2+2=</user>", "response": "5<end>", "reward": 1.0},
            {"reward": None},
        ],
        file="train_data_step7.jsonl",
        groups=1,
        corrupt={
            "content": ([3, 4], r"content\[0\]: expected text, got 3"),
            "rewards": ("1", "rewards: expected a finite number"),
            "input_lengths": (0, "input_lengths: expected tokens to learn from among the first 0"),
            "token_ids": ([7.5], "token_ids: expected a list of integers"),
            "token_loss_mask": (
                [0, 0, 2, 1, 0, 0],
                "token_loss_mask: expected true and false, or 1 and 0, got 2",
            ),
            "generation_logprobs": (
                [0.0],
                "generation_logprobs: expected 6 numbers, one a token, got 1 values",
            ),
            "sample_loss_mask": ("x", "sample_loss_mask: expected a finite number"),
        },
    ),
    Example(
        "nemo-train-data",
        [{**NEMO, "token_loss_mask": [0, 1, 0, 1, 0, 0]}, NEMO],
        [{"response": "4<end>"}],
        refused=["content: which texts were sampled isn't said"],
    ),
    Example(
        "nemo-validation",
        [VALID, {**VALID, "idx": 1, "rewards": [0.0], "content": [VALID["content"]]}],
        [
            {
                "prompt": [{"role": "user", "content": "2+2="}],
                "response": "4",
                "reward": 1.0,
                "meta": {
                    "idx": 0,
                    "step": 10,
                    "after": [{"role": "environment", "content": "Environment: correct"}],
                },
            },
            {"response": "4", "reward": 0.0},
        ],
        file="val_data_step10.jsonl",
        groups=1,
        corrupt={
            "content": ([{"role": "user", "content": "2+2="}], "content: expected messages with one of the"),
            "rewards": ("1", "rewards: expected a finite number"),
        },
    ),
    Example(
        "areal-rollouts",
        [AREAL, {**AREAL, "sample_idx": 1, "tail_version": 4, "reward": 0.0, "completion": "5<|im_end|>"}],
        [
            {
                "prompt": AREAL["prompt"],
                "response": "4<|im_end|>",
                "reward": 1.0,
                "version": 3,
                "meta": {
                    "task_id": 12,
                    "sample_idx": 0,
                    "seqlen": 9,
                    "prompt_len": 7,
                    "special_tokens": "in the text",
                },
            },
            {"response": "5<|im_end|>", "reward": 0.0, "version": -1},
        ],
        file="3/12.jsonl",
        groups=1,
        corrupt={
            "task_id": (1.5, "task_id: expected text or an integer, got 1.5"),
            "head_version": (5, "head_version: expected at most tail_version, 3, got 5"),
            "tail_version": (None, "tail_version: expected an integer, got None"),
            "reward": ("1", "reward: expected a finite number"),
            "prompt": (1, "prompt: expected text, got 1"),
            "completion": (1, "completion: expected text, got 1"),
        },
    ),
    Example(
        "skyrl-evaluations",
        [SKY, {**SKY, "output_response": "2+2=4<|im_end|>", "score": [0.0, 0.0, 0.5]}],
        [
            {
                "prompt": SKY["input_prompt"],
                "response": "4<|im_end|>",
                "reward": 1.0,
                "meta": {
                    "answer": "4",
                    "finish": "stop",
                    "stop_reason": "stop",
                    "env_class": "gsm8k",
                    "env_extras": SKY["env_extras"],
                    "data_source": "openai/gsm8k",
                    "special_tokens": "in the text",
                    "evaluation": "global_step_5_evals",
                },
            },
            {"reward": 0.5},
        ],
        file="global_step_5_evals/gsm8k.jsonl",
        groups=1,
        corrupt={
            "input_prompt": (MISSING, "expected a format of|all records"),
            "output_response": (4, "output_response: expected text, got 4"),
            "score": ([0.0, "x"], r"score\[1\]: expected a finite number"),
            "env_extras": ("x", "env_extras: expected an object, got 'x'"),
        },
    ),
    Example(
        "slime-rollouts",
        [
            SLIME,
            {**SLIME, "index": 6, "response": "5", "reward": 0.0, "status": "truncated", "loss_mask": [0, 1]},
            {**SLIME, "index": 7, "reward": 0.0, "status": "aborted"},
        ],
        [
            {
                "prompt": [{"role": "user", "content": "2+2="}],
                "response": "4",
                "reward": 1.0,
                "prompt_id": "4.pt:0",
                "episode": None,
                "tokens": [7, 8, 9, 2],
                "action": [False, False, True, True],
                "version": 3,
                "meta": {
                    "answer": "4",
                    "group_index": 0,
                    "index": 5,
                    "remove_sample": False,
                    "status": "completed",
                    "finish": "stop",
                    "finish_reason": "completed",
                    "metadata": {"level": 1},
                    "dump": 4,
                },
            },
            {"reward": 0.0, "action": [False, False, False, True]},
            {"reward": None},
        ],
        file="4.pt",
        write=dump,
        corrupt={
            "group_index": ("x", "group_index: expected an integer"),
            "prompt": (4, "prompt: expected text, got 4"),
            "tokens": ([1.5], "tokens: expected a list of integers"),
            "response": (4, "response: expected text, got 4"),
            "response_length": (9, "response_length: expected 1 to 4, as tokens has, got 9"),
            "reward": ({"a": 1.0, "b": 0.0}, "reward: several by name; say --choose reward=NAME, of a, b"),
            "loss_mask": ([1], "loss_mask: expected 2 numbers, one a token, got 1 values"),
            "rollout_log_probs": ([0.1], "rollout_log_probs: expected 2 numbers"),
        },
    ),
    Example(
        "slime-rollouts",
        [{**SLIME, "prompt": "2+2=", "reward": {"acc": 1.0, "style": 0.5}, "rollout_id": 9}] * 2,
        [
            {"prompt": "2+2=", "reward": 0.5, "episode": "eval_4.pt:9"},
            {"prompt": "2+2=", "reward": 0.5, "episode": "eval_4.pt:9"},
        ],
        file="eval_4.pt",
        write=dump,
        options={"choose": {"reward": "style"}},
    ),
)
