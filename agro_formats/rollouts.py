"""Read dumps of rollouts and batches (NeMo-RL, AReaL, SkyRL, slime), and stored experience of Trinity-RFT
(JSON Lines, SQLite) and tinker-cookbook (captures, evaluations)."""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from agro.errors import Refused
from agro.io import record_files
from agro.io.json_values import entry, objects, omit, text
from agro.io.jsonlines import Line
from agro.logs.mapping import Columns
from agro.logs.protocol import Context, Item, Row, line_of
from agro.logs.records import (
    Record,
    assistant,
    common_start,
    fingerprinted,
    sampled_fields,
    split,
    token_fields,
    until_reply,
)
from agro.logs.values import digest, flags, integer, integers, number, numbers, parsed, total, wrong
from agro.types.conversation import prompt_hash

_LISTS = ("content", "token_ids", "token_loss_mask", "generation_logprobs", "advantages", "prev_logprobs")
_NEMO_COLUMNS = ("content", "rewards", "input_lengths", "token_ids", "token_loss_mask", "generation_logprobs")
_STEP = re.compile(r"data_step(\d+)")


def _single(row: Row) -> dict[str, Any]:
    """The row with its lists of one value unpacked, since each row is a batch of one."""
    single = dict(row)
    for name, value in row.items():
        item = value[0] if isinstance(value, list) and len(value) == 1 else None
        if item is not None and (name not in _LISTS or isinstance(item, list)):
            single[name] = item
    return single


def read_nemo_train(row: Row, context: Context) -> list[Item]:
    """Read a training row. Values per token include padding; log-probs of tokens that weren't sampled are 0.

    The messages' texts have no roles. The last one is the response only if everything after the prompt was
    sampled.
    """
    row = _single(row)
    n = integer(row["input_lengths"], "input_lengths")
    ids = integers(row["token_ids"], "token_ids")
    mask = flags(row["token_loss_mask"], "token_loss_mask", len(ids))[:n]
    logps = numbers(row["generation_logprobs"], "generation_logprobs", len(ids))[:n]
    if not 0 < n <= len(ids) or True not in mask:
        raise Refused(
            f"input_lengths: expected tokens to learn from among the first {n} of {len(ids)} tokens"
        )
    start, end, content = mask.index(True), n - mask[::-1].index(True), row["content"]
    if isinstance(content, list) and len(content) > 1 and all(mask[start:]):
        texts = [text(part, f"content[{i}]") for i, part in enumerate(content)]
        prompt, response = "".join(texts[:-1]), texts[-1]
    elif context.tokenizer is not None:
        prompt, response = (context.tokenizer.decode(part) for part in (ids[:start], ids[start:end]))
    else:
        raise Refused(
            "content: expected one sampled turn at the end, got several, or more text after it; name the "
            "model whose tokenizer made token_ids (--tokenizer MODEL)"
        )
    record: Record = {
        "prompt": prompt,
        "response": response,
        "tokens": ids[:end],
        "mask": mask[:end],
        "behavior_logp": [x if is_sampled else None for x, is_sampled in zip(logps[:end], mask)],
        "reward": number(row["rewards"], "rewards"),
        "meta": omit(row, _NEMO_COLUMNS) | _step(context),
    }
    if row.get("sample_loss_mask") is not None and number(row["sample_loss_mask"], "sample_loss_mask") == 0:
        record["meta"]["reward_error"] = f"sample_loss_mask 0: the reward {record['reward']} is a placeholder"
        record["reward"] = None
    return [Item.of(fingerprinted(record, context), "content")]


def _step(context: Context) -> dict[str, int]:
    match = _STEP.search(context.path.name)
    return {"step": int(match[1])} if match else {}


def read_nemo_validation(row: Row, context: Context) -> list[Item]:
    """Read messages; those of the environment after the last turn go into `meta`."""
    row = _single(row)
    messages = objects(row["content"], "content")
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise Refused("content: expected messages with one of the assistant")
    meta = omit(row, ("content", "rewards")) | _step(context)
    if observed := messages[turns[-1] + 1 :]:
        meta["after"] = observed
    reward = number(row["rewards"], "rewards")
    record = split(messages[: turns[-1] + 1], messages[: turns[0]], meta, reward=reward)
    return [Item.of(record, "content")]


def nemo_identity(row: Row) -> str:
    """Each validation repeats the prompts, so that the files of several steps have equal responses."""
    row = _single(row)
    return digest(row["content"], row["rewards"])


_VERSIONS = ("head_version", "tail_version")
ROLLOUT = Columns("prompt", "completion", reward="reward", dropped=("task_id", *_VERSIONS))


def read_areal(row: Row, context: Context) -> list[Item]:
    """Read a rollout, whose texts include special tokens. The prompt is everything before the last tokens, as
    many as were sampled: that is wrong if tools answered in between, which the file doesn't say."""
    head, tail = (integer(row[name], name) for name in _VERSIONS)
    if head > tail:
        raise wrong("head_version", f"at most tail_version, {tail}", head)
    task = row["task_id"]
    if not isinstance(task, str | int) or isinstance(task, bool):
        raise wrong("task_id", "text or an integer", task)
    record = ROLLOUT.record(row, context)
    record["prompt_id"] = f"{task}:{prompt_hash(record['prompt'])}"
    record["meta"] |= {"task_id": task, "special_tokens": "in the text"}
    if head == tail:
        record["version"] = head
    else:  # the weights changed during sampling
        record["meta"] |= {"head_version": head, "tail_version": tail}
    return [Item.of(record, "completion")]


EVALUATION = Columns("input_prompt", "output_response", dropped=("score",))


def read_skyrl(row: Row, context: Context) -> list[Item]:
    """Read an evaluation, whose texts include special tokens. `score` is that of the response, or a list of
    token scores: then the reward is their sum, unknown if one of them is or there are none."""
    record, score = EVALUATION.record(row, context), row["score"]
    record["meta"] |= {"special_tokens": "in the text", "evaluation": context.path.parent.name}
    if isinstance(score, list):
        parts = record["meta"]["token_scores"] = numbers(score, "score", len(score))
        finite = [x for x in parts if x is not None]
        record["reward"] = sum(finite) if finite and len(finite) == len(parts) else None
    else:
        record["reward"] = number(score, "score")
    spec = entry(entry(row.get("env_extras"), "env_extras").get("reward_spec"), "env_extras.reward_spec")
    if spec.get("ground_truth") is not None:
        record["answer"] = spec["ground_truth"]
    return [Item.of(record, "output_response")]


def skyrl_identity(row: Row) -> str:
    """Each evaluation repeats the prompts, so that the folders of several steps have equal responses."""
    return digest(row["input_prompt"], row["output_response"], row["score"], row.get("env_class"))


def is_pickle(path: Path) -> bool:
    if path.suffix not in (".pkl", ".pickle") or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == b"\x80"


def refuse_pickle(path: Path) -> Iterator[Line]:
    raise Refused(
        f"{path}: reading a pickle can run any program, so it isn't read; SkyRL's evaluations are in "
        "dumped_evals/*/*.jsonl, and its training batches in no other form"
    )


_SLIME_COLUMNS = (
    *("prompt", "response", "tokens", "response_length", "reward", "loss_mask", "rollout_log_probs", "label"),
    *("weight_versions", "status"),
)
# Only the names of these columns are stored.
_LARGE = ("rollout_routed_experts", "multimodal_inputs", "multimodal_train_inputs")
_FAILED = ("aborted", "failed", "pending")


def slime_records(path: Path) -> Iterator[Line]:
    """The samples of a dump. A dump with anything but numbers, texts, lists and tensors is refused, since it
    could run a program."""
    import torch

    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise Refused(f"{path}: can't be read without running what is inside: {reason:.200}") from None
    samples = dump.get("samples") if isinstance(dump, Mapping) else None
    if not isinstance(samples, list):
        raise Refused(f"{path}: expected a dump of slime, an object with samples, got {type(dump).__name__}")
    for i, sample in enumerate(samples, 1):
        location = f"{path}:{i}"
        if isinstance(sample, Mapping):
            yield Line(location, i, {**_plain(sample), "dump": dump.get("rollout_id")})
        else:
            yield Line(location, i, {}, f"expected an object, got {sample!r:.80}")


def is_slime(path: Path) -> bool:
    return path.suffix == ".pt" and path.is_file() and zipfile.is_zipfile(path)


def _plain(value: Any) -> Any:
    """The value with lists in place of tensors and tuples, as in JSON."""
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def read_slime(row: Row, context: Context) -> list[Item]:
    """Read a sample. `loss_mask` and log-probs belong to the response's tokens, the last `response_length`
    ones. Samples with the same `rollout_id` are parts of one rollout."""
    prompt, response, status = row["prompt"], text(row["response"], "response"), row.get("status")
    meta = omit(row, (*_SLIME_COLUMNS, *_LARGE)) | {"status": status, "finish": status}
    if large := [name for name in _LARGE if row.get(name) is not None]:
        meta["left_out"] = large
    if status in _FAILED:
        meta["reward_error"] = f"status {status}: the reward {row.get('reward')!r:.80} isn't a score"
    record: Record = {"prompt": prompt, "response": response, "meta": meta}
    if isinstance(prompt, list):
        record = split([*prompt, assistant(response)], prompt, meta)
    record |= {"reward": None if status in _FAILED else _reward(row, context), "answer": row.get("label")}
    if row.get("group_index") is not None:
        record["prompt_id"] = f"{context.path.name}:{integer(row['group_index'], 'group_index')}"
    if row.get("rollout_id") is not None:
        record["episode"] = f"{context.path.name}:{row['rollout_id']}"
    if row.get("tokens"):
        ids, n = integers(row["tokens"], "tokens"), integer(row["response_length"], "response_length")
        if not 0 < n <= len(ids):
            raise wrong("response_length", f"1 to {len(ids)}, as tokens has", n)
        record |= sampled_fields(row, ids, n, mask="loss_mask", logps="rollout_log_probs")
        versions = set(row.get("weight_versions") or ())
        only = versions.pop() if len(versions) == 1 else None
        if isinstance(only, str) and only.isdigit():
            record["version"] = int(only)
        record = fingerprinted(record, context)
    return [Item.of(record, "response")]


def _reward(row: Row, context: Context) -> float | None:
    """The reward; among several, that of --choose reward=NAME, or the sum of those that --reward names."""
    value = row.get("reward")
    if not isinstance(value, dict):
        return number(value, "reward")
    if context.rewards and "reward" not in context.choose:
        return total(value, list(value), context.rewards, partial=True)
    name = context.chosen("reward", map(str, value))
    return number(value[name], f"reward.{name}")


_TEXTS = ("prompt_text", "response_text", "messages", "chosen_messages", "rejected_messages")
_TENSORS = ("tokens", "logprobs", "token_level_reward", "action_mask")
_TRINITY_COLUMNS = (*_TEXTS, *_TENSORS, "reward", "prompt_length", "routed_experts", "chosen", "rejected")
_HEAD = struct.Struct("<4sBQQ")  # magic, version, lengths of metadata and tensors


def _experience(row: Row, context: Context, name: str) -> Item:
    """Read an experience. Those of one `eid.run` are parts of one episode; those of one task in a batch are a
    group. (A later step of an episode has another prompt, and hence another group.)"""
    status = row.get("truncate_status")
    if status == "prompt_truncated":
        raise Refused("truncate_status: the prompt was cut off, and Trinity learns nothing from the response")
    meta = omit(row, _TRINITY_COLUMNS)
    if row.get("routed_experts") is not None:
        meta["left_out"] = ["routed_experts"]
    if status is not None:
        meta["finish"] = "length"
    fields: Record = {"reward": number(row.get("reward"), "reward")}
    version = entry(row.get("info"), "info").get("model_version")
    if version is not None:
        fields["version"] = integer(version, "info.model_version")
    if row.get("chosen_messages") is not None:
        # Both begin with the prompt.
        chosen, rejected = (objects(row[n], n) for n in ("chosen_messages", "rejected_messages"))
        prompt = common_start(chosen, rejected)
        if not prompt:
            raise Refused("chosen_messages, rejected_messages: expected both to begin with the same messages")
        return Item.pair(split(chosen, prompt, meta), split(rejected, prompt, meta))
    record = fields | _texts(row, context, meta)
    if row.get("tokens") is not None:
        record = fingerprinted(record | _tokens(row), context)
    eid = entry(row.get("eid"), "eid")
    if not {"batch", "task", "run"} <= eid.keys():
        raise wrong("eid", "batch, task and run", eid)
    task = f"{eid['batch']}/{eid['task']}"
    ids = {"prompt_id": f"{task}:{prompt_hash(record['prompt'])}", "episode": f"{task}/{eid['run']}"}
    return Item.of(record | ids, name)


def read_line(row: Row, context: Context) -> list[Item]:
    return [_experience(row, context, "experience")]


def _texts(row: Row, context: Context, meta: Record) -> Record:
    if row.get("response_text") is not None and row.get("prompt_text") is not None:
        texts = {name: text(row[f"{name}_text"], f"{name}_text") for name in ("prompt", "response")}
        return {**texts, "meta": meta}
    if row.get("messages") is not None:
        messages = objects(row["messages"], "messages")
        return split(messages, until_reply(messages), meta)
    if row.get("tokens") is None or context.tokenizer is None:
        raise Refused(
            "prompt_text, messages: expected one of these; for tokens alone name the model, --tokenizer MODEL"
        )
    ids, n = integers(row["tokens"], "tokens"), integer(row["prompt_length"], "prompt_length")
    prompt, response = (context.tokenizer.decode(part) for part in (ids[:n], ids[n:]))
    return {"prompt": prompt, "response": response, "meta": meta}


def _tokens(row: Row) -> dict[str, Any]:
    """The tokens, with mask, log-probs and rewards, which the row has for the tokens after the prompt."""
    ids, begin = integers(row["tokens"], "tokens"), integer(row["prompt_length"], "prompt_length")
    n = len(ids) - begin
    if begin < 1 or n < 1:
        raise wrong("prompt_length", f"1 to {len(ids) - 1}, below the length of tokens", begin)
    record = sampled_fields(row, ids, n, mask="action_mask", logps="logprobs")
    rewards = row.get("token_level_reward")
    if rewards is not None:
        record["token_reward"] = [None] * begin + numbers(rewards, "token_level_reward", n)
    return record


def read_stored(row: Row, context: Context) -> list[Item]:
    """Read a row of a table, whose columns are newer than its experiences."""
    newer = {name: row[name] for name in ("table", "id", "consumed", "task_id", "run_id") if name in row}
    if row.get("reward") is not None:
        newer["reward"] = row["reward"]
    return [
        _experience({**experience, **newer}, context, f"experience[{i}]")
        for i, experience in enumerate(row["experiences"])
    ]


def tables(path: Path) -> dict[str, str]:
    """The query for each table of experiences, whose bytes are in the same table or in NAME_blob."""
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
    def opened(row: dict[str, Any], table: str) -> dict[str, Any]:
        return row | {"table": table, "experiences": _unpacked(row.pop("experience_bytes"))}

    number = 0
    for table, query in tables(path).items():
        for row in record_files.sqlite_rows(path, query):
            number += 1
            yield line_of(f"{path}:{table}:{row['id']}", number, partial(opened, row, table))


class _Plain(pickle.Unpickler):
    """Unpickles numbers, texts, lists and objects, but no class or function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpacked(blob: Any) -> list[dict[str, Any]]:
    """The experiences of a blob: a pickle of their fields, and safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not isinstance(blob, bytes) or len(blob) < _HEAD.size or blob[:4] != b"TRXP":
        raise Refused(
            "experience_bytes: expected Trinity's form TRXP, got another one; the older form is a pickle, "
            "which isn't read because reading it can run any program"
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
    filled = [{name: value for name, value in item.items() if value not in (None, [], {})} for item in items]
    for name, value in values.items():
        i, _, tensor = name.partition(":")
        if i.isdigit() and int(i) < len(filled):
            filled[int(i)][tensor] = value
    return filled


_SAMPLE_KEY = ("sampling_session_id", "seq_id", "sample_idx")
_JSON = ("prompt_tokens", "sampled_tokens", "logprobs", "metadata")


def read_captured(row: Row, context: Context) -> list[Item]:
    """Read token ids without text and rewards; --tokenizer decodes the texts."""
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
    """The key of a sample, which is the same if it was sent again; without a key its content."""
    keys = [row.get(name) for name in _SAMPLE_KEY]
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
    """Read the turns of an evaluation. A grader's turns aren't part of the conversation, and an environment's
    turns are the user's."""
    turns = objects(row["turns"], "turns")
    dialogue = [turn for turn in turns if turn.get("role") != "grader"]
    while dialogue and dialogue[-1].get("role") != "assistant":
        dialogue.pop()
    messages = []
    for i, turn in enumerate(dialogue):
        role = turn.get("role")
        if role not in ("system", "user", "assistant", "environment"):
            raise wrong(f"turns[{i}].role", "user, assistant, environment or grader", role)
        content = text(turn.get("content"), f"turns[{i}].content")
        messages.append({"role": "user" if role == "environment" else role, "content": content})
    prompt, error = until_reply(messages), row.get("error")
    meta = omit(row, ("turns", "reward")) | {
        "turn_info": [{k: v for k, v in turn.items() if k != "content"} for turn in turns],
        "said_after": [turn for turn in turns if turn not in dialogue],
    }
    reward = number(row.get("reward"), "reward")
    if error is not None:
        meta["reward_error"], reward = f"{error!s:.500}", None
    record = split(messages, prompt, meta, reward=reward)
    if row.get("example_id") is not None:
        record["prompt_id"] = f"{row['benchmark']}:{row['example_id']}:{prompt_hash(prompt)}"
    return [Item.of(record, "turns")]
