"""Stored experience of Trinity-RFT (JSON Lines, SQLite) and tinker-cookbook (captures, evaluations)."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from agro.errors import Refused
from agro.io import record_files
from agro.io.json_values import entry, objects, omit, text
from agro.io.jsonlines import Line
from agro.logs.fields import (
    digest,
    fingerprinted,
    integer,
    integers,
    number,
    numbers,
    parsed,
    sampled_fields,
    split,
    token_fields,
)
from agro.logs.protocol import Context, Item, Row, line_of
from agro.types.conversation import prompt_hash

_TEXTS = ("prompt_text", "response_text", "messages", "chosen_messages", "rejected_messages")
_TENSORS = ("tokens", "logprobs", "token_level_reward", "action_mask")
_TRINITY_COLUMNS = (*_TEXTS, *_TENSORS, "reward", "prompt_length", "routed_experts", "chosen", "rejected")
_HEAD = struct.Struct("<4sBQQ")  # magic, version, lengths of metadata and of tensors


def _experience(row: Row, context: Context, name: str) -> Item:
    """Experiences of one `eid.run` are pieces of one episode, those of a task in a batch are a group. (A
    later step of an episode has another prompt, so another group.)"""
    status = row.get("truncate_status")
    if status == "prompt_truncated":
        raise Refused("truncate_status: the prompt was cut off, and Trinity learns nothing from the response")
    meta = omit(row, _TRINITY_COLUMNS)
    if row.get("routed_experts") is not None:
        meta["left_out"] = ["routed_experts"]
    if status is not None:
        meta["finish"] = "length"
    common: dict[str, Any] = {"reward": number(row.get("reward"), "reward"), "meta": meta}
    version = entry(row.get("info"), "info").get("model_version")
    if version is not None:
        common["version"] = integer(version, "info.model_version")
    if row.get("chosen_messages") is not None:
        # Both have the prompt inside.
        chosen, rejected = (objects(row[n], n) for n in ("chosen_messages", "rejected_messages"))
        same = takewhile(lambda both: both[0] == both[1], zip(chosen, rejected))
        prompt = [message for message, _ in same]
        if not prompt:
            raise Refused("chosen_messages, rejected_messages: expected both to begin with the same messages")
        better, worse = (
            split({"messages": turns, "prompt": prompt, "meta": meta}) for turns in (chosen, rejected)
        )
        return Item.pair(better, worse)
    record = _texts(row, context)
    record = {**common, **record, "meta": meta | record.get("meta", {})}
    if row.get("tokens") is not None:
        record = fingerprinted(record | _tokens(row), context)
    eid = entry(row.get("eid"), "eid")
    if not {"batch", "task", "run"} <= eid.keys():
        raise Refused(f"eid: expected batch, task and run, got {eid!r:.80}")
    task = f"{eid['batch']}/{eid['task']}"
    ids = {"prompt_id": f"{task}:{prompt_hash(record['prompt'])}", "episode": f"{task}/{eid['run']}"}
    return Item.of(record | ids, name)


def read_line(row: Row, context: Context) -> list[Item]:
    return [_experience(row, context, "experience")]


def _texts(row: Row, context: Context) -> dict[str, Any]:
    if row.get("response_text") is not None and row.get("prompt_text") is not None:
        return {name: text(row[f"{name}_text"], f"{name}_text") for name in ("prompt", "response")}
    if row.get("messages") is not None:
        messages = objects(row["messages"], "messages")
        prompt = list(takewhile(lambda message: message.get("role") != "assistant", messages))
        return split({"messages": messages, "prompt": prompt})
    if row.get("tokens") is None or context.tokenizer is None:
        raise Refused(
            "prompt_text, messages: expected the texts of one; where there are only tokens, --tokenizer"
        )
    ids, n = integers(row["tokens"], "tokens"), integer(row["prompt_length"], "prompt_length")
    return {"prompt": context.tokenizer.decode(ids[:n]), "response": context.tokenizer.decode(ids[n:])}


def _tokens(row: Row) -> dict[str, Any]:
    """Log-probs, rewards and the mask are of the tokens after the prompt."""
    ids, begin = integers(row["tokens"], "tokens"), integer(row["prompt_length"], "prompt_length")
    n = len(ids) - begin
    if begin < 1 or n < 1:
        raise Refused(f"prompt_length: expected 1 to {len(ids) - 1}, below the length of tokens, got {begin}")
    record = sampled_fields(row, ids, n, mask="action_mask", logps="logprobs")
    rewards = row.get("token_level_reward")
    if rewards is not None:
        record["token_reward"] = [None] * begin + numbers(rewards, "token_level_reward", n)
    return record


def read_stored(row: Row, context: Context) -> list[Item]:
    """A row of a table: its columns are newer than what is inside the experiences."""
    newer = {name: row[name] for name in ("table", "id", "consumed", "task_id", "run_id") if name in row}
    if row.get("reward") is not None:
        newer["reward"] = row["reward"]
    return [
        _experience({**experience, **newer}, context, f"experience[{i}]")
        for i, experience in enumerate(row["experiences"])
    ]


def tables(path: Path) -> dict[str, str]:
    """The query of each table of experiences: the bytes are beside the columns, or in NAME_blob."""
    queries = {}
    tables = record_files.columns(path)
    for name, columns in tables.items():
        if "experience_bytes" not in columns:
            continue
        table, blob = name.removesuffix("_blob"), record_files.quoted(name)
        if table != name and table in tables:
            queries[table] = f"SELECT * FROM {record_files.quoted(table)} JOIN {blob} USING (id) ORDER BY id"
        else:
            queries[name] = f"SELECT * FROM {blob} ORDER BY id"
    return queries


def trinity_records(path: Path) -> Iterator[Line]:
    number = 0
    for table, query in tables(path).items():
        for row in record_files.sqlite_rows(path, query):
            number += 1
            read = partial(_experiences, row, table)
            yield line_of(f"{path}:{table}:{row['id']}", number, read)


def _experiences(row: dict[str, Any], table: str) -> dict[str, Any]:
    experiences = _unpacked(row.pop("experience_bytes"))
    return {**row, "table": table, "experiences": experiences}


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and objects, and no class or function that a pickle names."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpacked(blob: Any) -> list[dict[str, Any]]:
    """The experiences of a blob: a pickle of their fields, and safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not isinstance(blob, bytes) or len(blob) < _HEAD.size or blob[:4] != b"TRXP":
        raise Refused(
            "experience_bytes: expected Trinity's form TRXP, got another one; the older one is a pickle, "
            "which can run any program when it is read, and isn't read"
        )
    _, version, n, m = _HEAD.unpack_from(blob)
    if version != 1 or len(blob) != _HEAD.size + n + m:
        raise Refused(
            f"experience_bytes: expected version 1 and {n} + {m} bytes, got version {version} or others"
        )
    fields, tensors = blob[_HEAD.size : _HEAD.size + n], blob[_HEAD.size + n :]
    try:
        listed = _Plain(io.BytesIO(fields)).load()["items"]
        values = {name: tensor.tolist() for name, tensor in load(tensors).items()}
    except (pickle.UnpicklingError, EOFError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"experience_bytes: can't be read without running what is inside: {error}") from None
    items = objects(listed, "items")
    found = [{name: value for name, value in item.items() if value not in (None, [], {})} for item in items]
    for name, value in values.items():
        i, _, tensor = name.partition(":")
        if i.isdigit() and int(i) < len(found):
            found[int(i)][tensor] = value
    return found


_KEY = ("sampling_session_id", "seq_id", "sample_idx")
_JSON = ("prompt_tokens", "sampled_tokens", "logprobs", "metadata")


def read_captured(row: Row, context: Context) -> list[Item]:
    """Token ids without text and rewards: the texts are those of --tokenizer."""
    prompt, sampled = (integers(row[name], name) for name in ("prompt_tokens", "sampled_tokens"))
    if not sampled:
        raise Refused("sampled_tokens: expected at least one token, got none")
    if context.tokenizer is None:
        raise Refused(
            "prompt_tokens: captured samples have no text; name the model whose tokenizer made them "
            "(--tokenizer MODEL)"
        )
    record: dict[str, Any] = {
        "prompt": context.tokenizer.decode(prompt),
        "response": context.tokenizer.decode(sampled),
        **token_fields(prompt, sampled),
        "tokenizer": context.tokenizer.fingerprint,
        "meta": omit(row, _JSON) | ({"metadata": row["metadata"]} if row.get("metadata") else {}),
    }
    if row.get("logprobs") is not None:
        record["behavior_logp"] = [None] * len(prompt) + numbers(row["logprobs"], "logprobs", len(sampled))
    if str(row.get("policy_version")).isdigit():
        record["version"] = int(row["policy_version"])
    if row.get("group_idx") is not None:
        group = f"{row['run_id']}:{row.get('iteration')}:{row['group_idx']}"
        record["prompt_id"] = f"{group}:{prompt_hash(record['prompt'])}"
        if row.get("traj_idx") is not None:
            record["episode"] = f"{group}:{row['traj_idx']}"
    return [Item.of(record, "sampled_tokens")]


def sent_once(row: Row) -> str:
    """A sample that was sent again has the same key, where it has one."""
    keys = [row.get(name) for name in _KEY]
    return digest(dict(row)) if None in keys else digest(keys)


def is_capture(path: Path) -> bool:
    return "sampled_tokens" in record_files.columns(path).get("wire_rows", ())


def tinker_records(path: Path) -> Iterator[Line]:
    def opened(row: dict[str, Any]) -> dict[str, Any]:
        return row | {name: parsed(row[name], name) for name in _JSON if isinstance(row[name], str)}

    query = "SELECT * FROM wire_rows ORDER BY run_id, cursor"
    for i, row in enumerate(record_files.sqlite_rows(path, query), 1):
        yield line_of(f"{path}:{i}", i, partial(opened, row))


def read_trajectory(row: Row, context: Context) -> list[Item]:
    """Turns of an evaluation. What a grader said isn't a turn of the conversation, and what an environment
    said is one of the user."""
    turns = objects(row["turns"], "turns")
    dialogue = [turn for turn in turns if turn.get("role") != "grader"]
    while dialogue and dialogue[-1].get("role") != "assistant":
        dialogue.pop()
    messages = []
    for i, turn in enumerate(dialogue):
        role = turn.get("role")
        if role not in ("system", "user", "assistant", "environment"):
            raise Refused(
                f"turns[{i}].role: expected user, assistant, environment or grader, got {role!r:.80}"
            )
        content = text(turn.get("content"), f"turns[{i}].content")
        messages.append({"role": "user" if role == "environment" else role, "content": content})
    prompt = list(takewhile(lambda message: message["role"] != "assistant", messages))
    record = split({"messages": messages, "prompt": prompt})
    record["reward"] = number(row.get("reward"), "reward")
    record["meta"] |= omit(row, ("turns", "reward")) | {
        "turn_info": [{k: v for k, v in turn.items() if k != "content"} for turn in turns],
        "said_after": [turn for turn in turns if turn not in dialogue],
    }
    if row.get("error") is not None:
        record["meta"]["reward_error"] = f"{row['error']!s:.500}"
        record["reward"] = None
    if row.get("example_id") is not None:
        record["prompt_id"] = f"{row['benchmark']}:{row['example_id']}:{prompt_hash(prompt)}"
    return [Item.of(record, "turns")]
