"""Experiences of Trinity-RFT, captures and evaluations of tinker-cookbook, data sets of OpenRLHF."""

from __future__ import annotations

import json
import pickle
import sqlite3
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from example import MISSING, Example
from safetensors.torch import save

from agro.types.conversation import prompt_hash

ASK = {"role": "user", "content": "2+2="}
SAY = {"role": "assistant", "content": "4"}
EID = {"batch": 1, "task": 0, "run": 2, "step": 0, "suffix": "a1b2c3"}
LINE = {
    "eid": EID,
    "type": "single_turn",
    "prompt_length": 2,
    "response_length": 2,
    "info": {"model_version": 5},
    "metrics": {"accuracy": 1.0},
    "prompt_text": "2+2=",
    "response_text": "4",
    "reward": 1.0,
}
TENSORS = {
    "tokens": torch.tensor([7, 8, 9, 2], dtype=torch.int32),
    "logprobs": torch.tensor([-0.25, -0.5]),
    "action_mask": torch.tensor([True, False]),
    "token_level_reward": torch.tensor([0.0, 1.0]),
}


def blob(fields: Any, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Experiences as Trinity's Experience.serialize_many writes them."""
    packed, values = pickle.dumps(fields), save({f"0:{name}": x for name, x in tensors.items()})
    return b"TRXP" + struct.pack("<BQQ", 1, len(packed), len(values)) + packed + values


def stored(
    fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], reward: float | None
) -> dict[str, Any]:
    return {"blob": blob({"version": 1, "num_items": 1, "items": [fields]}, tensors), "reward": reward}


def trinity(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE TABLE exp (id INTEGER PRIMARY KEY, task_id TEXT, reward REAL, consumed INTEGER)"
        )
        database.execute("CREATE TABLE exp_blob (id INTEGER PRIMARY KEY, experience_bytes BLOB)")
        for i, row in enumerate(rows, 1):
            database.execute("INSERT INTO exp VALUES (?, '0', ?, 1)", (i, row["reward"]))
            database.execute("INSERT INTO exp_blob VALUES (?, ?)", (i, row["blob"]))


_FIELDS = {
    "eid": EID,
    "reward": 0.25,
    "truncate_status": None,
    "info": {"model_version": 5},
    "metrics": {},
    "prompt_length": 2,
    "response_text": "4",
    "prompt_text": "2+2=",
    "messages": None,
    "custom_fields": [],
}


class Characters:
    """A tokenizer of which a token is a character."""

    fingerprint = "characters"

    def prompt(self, text: Any) -> list[int]:
        return self.ids(text)

    def ids(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


WIRE = {
    "run_id": "r",
    "run_attempt": 0,
    "split": "train",
    "iteration": 3,
    "group_idx": 1,
    "traj_idx": 0,
    "purpose": "rollout",
    "sampling_session_id": "s",
    "seq_id": 11,
    "sample_idx": 0,
    "policy_version": "3",
    "created_at": 1.5,
    "prompt_tokens": [ord(c) for c in "2+2="],
    "sampled_tokens": [ord("4")],
    "logprobs": [-0.5],
    "metadata": {"scope": {"run_id": "r"}},
}


def capture(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        names = ["cursor", *WIRE]
        database.execute(f"CREATE TABLE wire_rows ({', '.join(names)})")
        for i, row in enumerate(rows, 1):
            values = [
                json.dumps(row.get(n)) if isinstance(WIRE[n], list | dict) else row.get(n) for n in WIRE
            ]
            database.execute(f"INSERT INTO wire_rows VALUES ({', '.join('?' * len(names))})", (i, *values))


CAPTURED = {
    "prompt": "2+2=",
    "response": "4",
    "reward": None,
    "prompt_id": f"r:3:1:{prompt_hash('2+2=')}",
    "episode": "r:3:1:0",
    "tokens": [50, 43, 50, 61, 52],
    "action": [False, False, False, False, True],
    "tokenizer": "characters",
    "version": 3,
}
EVALUATED = {
    "idx": 0,
    "benchmark": "sums",
    "example_id": "7",
    "turns": [
        {"role": "user", "content": "2+2=", "token_count": 4, "metadata": {}},
        {"role": "assistant", "content": "5", "token_count": 1, "metadata": {}},
        {"role": "environment", "content": "No.", "token_count": 2, "metadata": {}},
        {"role": "assistant", "content": "4", "token_count": 1, "metadata": {}},
        {"role": "grader", "content": "Right.", "token_count": 2, "metadata": {}},
    ],
    "reward": 1.0,
    "metrics": {"correct": 1.0},
    "logs": {},
    "error": None,
    "time_seconds": 0.5,
}

EXAMPLES = (
    Example(
        "trinity-experiences",
        [
            LINE,
            {**LINE, "eid": {**EID, "run": 3}, "reward": 0.0, "truncate_status": "response_truncated"},
            {**LINE, "truncate_status": "prompt_truncated"},
        ],
        [
            {
                "prompt": "2+2=",
                "response": "4",
                "reward": 1.0,
                "prompt_id": f"1/0:{prompt_hash('2+2=')}",
                "episode": "1/0/2",
                "version": 5,
                "tokens": None,
                "meta": {
                    "eid": EID,
                    "type": "single_turn",
                    "response_length": 2,
                    "info": {"model_version": 5},
                    "metrics": {"accuracy": 1.0},
                },
            },
            {"reward": 0.0, "episode": "1/0/3"},
        ],
        groups=1,
        refused=["truncate_status: the prompt was cut off"],
        corrupt={
            "eid": ({"batch": 1}, "eid: expected batch, task and run"),
            "prompt_text": (MISSING, "prompt_text, messages: expected the texts of one"),
            "response_text": (4, "response_text: expected text, got 4"),
            "reward": ("1", "reward: expected a finite number"),
            "info": ({"model_version": 1.5}, "info.model_version: expected an integer, got 1.5"),
        },
    ),
    Example(
        "trinity-experiences",
        [
            {
                "eid": EID,
                "type": "multi_turn",
                "prompt_length": 2,
                "messages": [ASK, SAY, ASK, SAY],
                "reward": 1.0,
            },
            {"eid": EID, "type": "multi_turn", "prompt_length": 2, "messages": [ASK, SAY]},
        ],
        [{"prompt": [ASK], "response": "4", "reward": 1.0}, {"prompt": [ASK], "reward": None}],
        corrupt={"messages": ([ASK], "the last one the assistant's|messages")},
    ),
    Example(
        "trinity-experiences",
        [
            {
                "eid": EID,
                "type": "dpo",
                "prompt_length": 2,
                "chosen_messages": [ASK, SAY],
                "rejected_messages": [ASK, {**SAY, "content": "5"}],
            }
        ],
        [{"prompt": [ASK], "response": "4"}, {"prompt": [ASK], "response": "5"}],
        pairs=[(0, 1)],
        corrupt={
            "chosen_messages": ([SAY], "expected both to begin with the same messages"),
            "rejected_messages": (7, "rejected_messages: expected a list of objects"),
        },
    ),
    Example(
        "trinity-sqlite",
        [stored(_FIELDS, TENSORS, 1.0), stored(_FIELDS, {}, None)],
        [
            {
                "prompt": "2+2=",
                "response": "4",
                "reward": 1.0,  # of the table, which is newer
                "episode": "1/0/2",
                "version": 5,
                "tokens": [7, 8, 9, 2],
                "action": [False, False, True, False],
                "meta": {
                    "eid": EID,
                    "info": {"model_version": 5},
                    "table": "exp",
                    "id": 1,
                    "consumed": 1,
                    "task_id": "0",
                },
            },
            {"reward": 0.25, "tokens": None},
        ],
        file="buffer.db",
        write=trinity,
        permutes=False,
        groups=1,
        corrupt={
            "blob": (pickle.dumps({"items": []}), "expected Trinity's form TRXP, got another one"),
            "reward": ("one", "reward: expected a finite number"),
        },
    ),
    *(
        Example(
            "trinity-sqlite",
            [stored(_FIELDS, TENSORS, 1.0)],
            [{}],
            "b.db",
            write=trinity,
            corrupt={"blob": wrong},
        )
        for wrong in (
            (
                blob({"items": [print]}, {}),
                "can't be read without running what is inside: it names builtins.print",
            ),
            (blob({"items": [_FIELDS]}, TENSORS)[:-1], "experience_bytes: expected version 1"),
            (blob({"items": [{**_FIELDS, "prompt_length": 9}]}, TENSORS), "prompt_length: expected 1 to 3"),
            (blob({"items": 4}, TENSORS), "items: expected a list of objects, got 4"),
            (
                blob({"items": [_FIELDS]}, {**TENSORS, "logprobs": torch.zeros(3)}),
                "logprobs: expected 2 numbers, one a token, got 3 values",
            ),
        )
    ),
    Example(
        "tinker-capture",
        [WIRE],
        [{**CAPTURED, "meta": {k: v for k, v in WIRE.items() if "tokens" not in k and k != "logprobs"}}],
        file="wire.jsonl",
        options={"tokenizer": Characters()},
        corrupt={
            "prompt_tokens": (["a"], "prompt_tokens: expected a list of integers"),
            "sampled_tokens": ([], "sampled_tokens: expected at least one token"),
            "logprobs": ([], "logprobs: expected 1 numbers, one a token, got 0 values"),
        },
    ),
    Example(
        "tinker-capture",
        [WIRE, {**WIRE, "seq_id": 12, "logprobs": None, "policy_version": "sha"}],
        [CAPTURED, {"version": -1}],
        file="capture.db",
        write=capture,
        options={"tokenizer": Characters()},
    ),
    Example(
        "tinker-evaluations",
        [EVALUATED, {**EVALUATED, "reward": 0.0, "error": "TimeoutError"}],
        [
            {
                "prompt": [ASK],
                "response": "4",
                "reward": 1.0,
                "prompt_id": f"sums:7:{prompt_hash([ASK])}",
            },
            {"reward": None},
        ],
        corrupt={
            "turns": (
                [{"role": "judge", "content": ""}, EVALUATED["turns"][3]],
                r"turns\[0\].role: expected user",
            ),
            "reward": ("1", "reward: expected a finite number"),
        },
    ),
    Example(
        "openrlhf-demonstrations",
        [{"input": "2+2=", "output": "4"}, {"input": [ASK], "output": "4", "datasource": "sums"}],
        [
            {"prompt": "2+2=", "response": "4", "role": "expert", "reward": None},
            {"prompt": [ASK], "response": "4", "meta": {"datasource": "sums"}},
        ],
        corrupt={"output": (4, "output: expected text or a list of messages, got 4")},
    ),
    Example(
        "openrlhf-demonstrations",
        [{"input": [ASK, SAY]}],
        [{"prompt": [ASK], "response": "4", "role": "expert"}],
        corrupt={"input": ([ASK], "these are prompts .OpenRLHF: inputs with labels")},
    ),
    Example(  # preferences without --data.prompt_key
        "trl-preference",
        [{"chosen": [ASK, SAY], "rejected": [ASK, {**SAY, "content": "5"}], "margin": 2.0}],
        [{"prompt": [ASK], "response": "4", "meta": {"margin": 2.0}}, {"response": "5"}],
        pairs=[(0, 1)],
    ),
)
