"""Published sets of rated and ranked responses: UltraFeedback, four rated responses an instruction and pairs
made of them; and OpenAssistant, trees of messages and the table of their messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.datasets import on_hub
from agro.io.json_values import entry, objects, omit, text
from agro.io.jsonlines import Line
from agro.io.record_files import read_records
from agro.logs.fields import exchange, listed, number, one_of, rating, total, user
from agro.logs.protocol import Context, Item, Row, SkipRecord
from agro.store.export import ENDINGS
from agro_formats.judgments import rank_judgments

_COLUMNS = ("instruction", "models", "completions")
_OVERALL = ("overall_score", "fine-grained_score")
_BINARIZED = ("prompt", "prompt_id", "chosen", "rejected", "messages", "score_chosen", "score_rejected")


def read_ultrafeedback(row: Row, context: Context) -> list[Item]:
    """The models were asked with different system prompts: responses with the same one are a group.

    The prompt is the instruction after `custom_system_prompt`, with which the responses were made, but those
    of wizardlm-7b (OpenBMB/UltraFeedback e662fd2, src/comparison_data_generation/main.py).
    """
    instruction = text(row["instruction"], "instruction")
    models, meta = row["models"], omit(row, _COLUMNS)
    items = []
    for i, completion in enumerate(objects(row["completions"], "completions")):
        name, prompt = f"completions[{i}]", [user(instruction)]
        model, system = completion.get("model"), completion.get("custom_system_prompt")
        if model is None and isinstance(models, list) and i < len(models):
            model = models[i]
        if system and model != "wizardlm-7b":
            prompt.insert(0, {"role": "system", "content": text(system, f"{name}.custom_system_prompt")})
        record = {
            "prompt": prompt if len(prompt) > 1 else instruction,
            "response": text(completion.get("response"), f"{name}.response"),
            "reward": _reward(completion, name, context),
            "model": model,
            "meta": meta | omit(completion, ("response", "model", "custom_system_prompt")),
        }
        items.append(Item.of(record, name))
    return items


def _reward(completion: Row, name: str, context: Context) -> float | None:
    """The rating of the chosen aspect, or the mean of all, which is unknown where one of them is."""
    annotations = entry(completion.get("annotations"), f"{name}.annotations")
    overall = [column for column in _OVERALL if column in completion]
    choices = [*annotations, "mean", *overall]
    aspect = context.choose.get("aspect")
    if aspect not in choices:
        got = "" if aspect is None else f", got {aspect}"
        raise Refused(f"aspect: expected --choose aspect=NAME of {', '.join(choices)}{got}")
    if aspect in overall:
        return rating(completion[aspect], f"{name}.{aspect}")
    if aspect != "mean":
        return _rated(annotations, aspect, name)
    ratings = [_rated(annotations, each, name) for each in annotations]
    numbers = [x for x in ratings if x is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(ratings) else None


def _rated(annotations: Row, aspect: str, name: str) -> float | None:
    location = f"{name}.annotations.{aspect}"
    return rating(entry(annotations[aspect], location).get("Rating"), f"{location}.Rating")


def read_binarized(row: Row, context: Context) -> list[Item]:
    """`chosen` and `rejected` are complete conversations, and `messages` is the chosen one again."""
    chosen, rejected = objects(row["chosen"], "chosen"), objects(row["rejected"], "rejected")
    prompt = chosen[:-1]
    if not prompt or rejected[:-1] != prompt:
        raise Refused("rejected: expected the messages of chosen, and then another response")
    meta: dict[str, Any] = omit(row, _BINARIZED)
    copies = {"prompt": chosen[-2].get("content"), "messages": chosen}  # columns that repeat the chosen one
    meta |= {name: row[name] for name, same in copies.items() if row.get(name, same) != same}
    records = []
    for turns, name in ((chosen, "chosen"), (rejected, "rejected")):
        record = exchange(prompt, turns[-1:], ("prompt", name))
        record["prompt_id"] = row["prompt_id"]
        record["reward"] = number(row[f"score_{name}"], f"score_{name}")
        record["meta"] = record.get("meta", {}) | meta
        records.append(record)
    return [Item.pair(records[0], records[1])]


_ROLES = {"prompter": "user", "assistant": "assistant"}
_LABELS = (
    *("spam", "fails_task", "lang_mismatch", "pii", "not_appropriate", "hate_speech", "sexual_content"),
    *("quality", "toxicity", "humor", "helpfulness", "creativity", "violence"),
)
_MESSAGE = {"message_id", "text", "role"}


def read_tree(row: Row, context: Context) -> list[Item]:
    """The replies of each message of a prompter are one item. The one with the lowest rank is the best."""
    if "prompt" in row:
        root, name, common = row["prompt"], "prompt", omit(row, ("prompt",))
    elif "replies" in row:
        root, name, common = row, "message", dict[str, Any]()
    else:
        raise Refused(
            "a message without its tree; expected a table of messages in a file that ends with "
            f"{', '.join(ENDINGS)}, or trees"
        )
    items = []
    todo: list[tuple[list[dict[str, Any]], Any, str]] = [([], root, name)]  # after the turns before it
    while todo:
        history, message, location = todo.pop()
        role = one_of(entry(message, location).get("role"), _ROLES, f"{location}.role")
        turns = [*history, {"role": role, "content": text(message.get("text"), f"{location}.text")}]
        replies = {
            f"{location}.replies[{i}]": m for i, m in enumerate(listed(message.get("replies"), location))
        }
        responses = {at: reply for at, reply in replies.items() if reply.get("role") == "assistant"}
        if responses:
            records = [_record(turns, reply, at, common, context) for at, reply in responses.items()]
            ranks = [number(reply.get("rank"), f"{at}.rank") for at, reply in responses.items()]
            items.append(Item(tuple(records), tuple(responses), rank_judgments(ranks)))
        todo += [(turns, reply, location) for location, reply in reversed(replies.items())]
    if not items:
        raise SkipRecord("trees without a reply of an assistant")
    return items


def _record(
    prompt: list[dict[str, Any]], message: Row, name: str, common: dict[str, Any], context: Context
) -> dict[str, Any]:
    """A reply, with the mean of what people said by label. In `datasets` names and values are lists."""
    labels = entry(message.get("labels"), f"{name}.labels")
    if isinstance(labels.get("name"), list):
        labels = dict(zip(labels["name"], labels.get("value", ()), strict=True))
    else:
        labels = {key: entry(label, f"{name}.labels.{key}").get("value") for key, label in labels.items()}
    scores = {"rank": message.get("rank")} | dict.fromkeys(_LABELS) | labels
    meta = common | omit(message, ("text", "role", "replies", "model_name", "labels"))
    return {
        "prompt": prompt,
        "response": text(message.get("text"), f"{name}.text"),
        "model": message.get("model_name"),
        "reward": total(scores, list(scores), context.rewards) if context.rewards else None,
        "meta": meta | ({"labels": labels} if labels else {}),
    }


def is_table(path: Path) -> bool:
    """Whether a file's first record is a message."""
    if on_hub(path):
        return str(path).lower().startswith("hub:openassistant/oasst")
    if not (path.is_dir() or path.name.endswith(ENDINGS)):
        return False
    try:
        line = next(read_records(path), None)
    except Refused:  # which reading it says again
        return False
    return line is not None and is_message(line.value)


def is_message(row: Row) -> bool:
    return row.keys() >= _MESSAGE and row["role"] in list(_ROLES) and "replies" not in row


def trees(path: Path) -> Iterator[Line]:
    """The trees of a table. A tree's messages are one after the other, each below the one that it answers."""
    tree: Line | None = None
    above: dict[str, dict[str, Any]] = {}
    wrong: list[Line] = []
    for line in read_records(path):
        message = {**line.value, "replies": []}
        parent = str(line.value.get("parent_id"))
        if line.error is None and line.value.get("parent_id") is None:
            yield from ([tree] if tree else []) + wrong
            tree, above, wrong = line._replace(value={"prompt": message}), {}, []
        elif line.error is not None:
            wrong.append(line)
            continue
        elif tree is None or parent not in above:
            error = f"parent_id: expected the message_id of one above it in its tree, got {parent!r:.80}"
            wrong.append(line._replace(value={}, error=error))
            continue
        else:
            above[parent]["replies"].append(message)
            tree = tree._replace(size=tree.size + line.size)
        above[str(message.get("message_id"))] = message
    yield from ([tree] if tree else []) + wrong
