"""Read agro's own records (responses, preferences, conversations), verl's dumps of rollouts and validation,
and TRL's logged completions and data set types."""

from __future__ import annotations

from typing import Any

from agro.errors import Refused
from agro.io.json_values import are_messages, entry, is_unknown, messages_in, omit, text
from agro.logs.interchange import PREFERENCE, typed_fields
from agro.logs.mapping import Columns
from agro.logs.protocol import Context, Item, Row
from agro.logs.records import (
    Record,
    common_start,
    exchange,
    pair_after,
    score_columns,
    scored_pair,
    split,
    token_fields,
)
from agro.logs.values import digest, flag, integer, list_of_length, number_in, parsed, total, wrong

_NO_TEXT = {  # fields that aren't text
    *("tokens", "mask", "action", "behavior_logp", "sampling", "context_tokens", "token_reward"),
    *("kept", "kept_count", "version", "meta", "messages", "votes_chosen", "votes_rejected"),
}


def read_response(row: Row, context: Context) -> list[Item]:
    record = _typed(row, context)
    return [Item.of(record if "tokens" in record else _with_response(record, record["response"]))]


def _with_response(record: Record, response: Any, name: str = "response") -> Record:
    """The record with this response. Prompt and response may be messages, also as JSON text."""
    turns, prompt = messages_in(response), record.get("prompt")
    if not are_messages(turns) and messages_in(prompt) is prompt:
        return {**record, "response": response}
    if prompt is not None:
        parts = exchange(prompt, turns, ("prompt", name))
    elif turns[0]["role"] != "assistant":
        parts = split(turns)
    else:  # the prompt is joined by its id
        parts = exchange("", turns, ("prompt", name))
        del parts["prompt"]
    return {**record, **parts, "meta": entry(record.get("meta"), "meta") | parts["meta"]}


def _typed(row: Row, context: Context) -> Record:
    """The record with the numbers, lists and objects that are written as text parsed."""
    record = dict(row)
    for name, value in record.items() if context.is_text else ():
        if name == "reward":
            record[name] = number_in(value)
        elif name in _NO_TEXT and isinstance(value, str):
            record[name] = parsed(value, name)
    return record


def read_preference(row: Row, context: Context) -> list[Item]:
    row = _typed(row, context)
    responses = {name: row.get(name) for name in ("chosen", "rejected")}
    conversations = {name: "" for name, turns in responses.items() if isinstance(messages_in(turns), list)}
    pair = typed_fields({**row, **conversations}, PREFERENCE)
    if not is_unknown(row.get("reward")):
        raise Refused(
            f"reward: the record has two responses, and one reward, {row['reward']!r:.80}; expected "
            "score_chosen and score_rejected, or none (--map meta.reward=reward keeps it beside them)"
        )
    names = {*PREFERENCE, *score_columns(row), "reward"}
    common = {name: value for name, value in row.items() if name not in names}
    chosen, rejected = (_with_response(common, response, name) for name, response in responses.items())
    return scored_pair(chosen, rejected, row, (pair.get("votes_chosen"), pair.get("votes_rejected")))


def read_conversation(row: Row, context: Context) -> list[Item]:
    record = _typed(row, context)
    messages, prompt = messages_in(record.pop("messages")), record.pop("prompt", None)
    if isinstance(messages, list) and any(isinstance(m, dict) and "loss" in m for m in messages):
        raise Refused("messages: some have `loss`, which selects what is learned; give --format swift-turns")
    return [Item.of(record | split(messages, prompt, record.get("meta")), "messages")]


_TURNS = ("num_turns", "__num_turns__")
DUMP = Columns("input", "output", answer="gts", reward="score", integers=("step",), dropped=("step", "uid"))


def read_dump(row: Row, context: Context) -> list[Item]:
    """Texts are decoded without special tokens. v1's `uid` is SAMPLE_ROLLOUT_OUTPUT: outputs of one rollout
    are parts of one episode, and ids start again in each file."""
    for name in _TURNS:
        if name in row and integer(row[name], name) > 2:
            raise Refused(
                f"{name}: {row[name]} turns in one text: what tools wrote in it can't be told from what the "
                "policy wrote; import the messages of that run from another log"
            )
    record, uid = DUMP.record(row, context), row.get("uid")
    if uid is not None:
        parts = uid.rsplit("_", 2) if isinstance(uid, str) else []
        if len(parts) != 3:
            raise wrong("uid", "SAMPLE_ROLLOUT_OUTPUT", uid)
        sample = f"{context.path.parent.name}/{context.path.name}:{parts[0]}"
        record |= {"prompt_id": sample, "episode": f"{sample}_{parts[1]}"}
    return [Item.of(record, "output")]


def dump_identity(row: Row) -> str:
    """Each validation repeats the prompts, mostly without randomness, so that responses recur at other steps.

    Only validation adds `reward`. A training response at another step is a different one.
    """
    step_columns = ("step", "uid", "request_id") if "reward" in row else ()
    return digest({name: value for name, value in row.items() if name not in step_columns})


_COMPLETION = ("step", "prompt", "completion", "advantage")


def _sum_of_rewards(row: Row, context: Context) -> float | None:
    """Sum the columns of the reward functions: those of numbers that aren't TRL's. NaN or null means None.

    TRL's weights are in its configuration, which isn't in the file.
    """
    numbers = [name for name, value in row.items() if type(value) in (float, int, type(None))]
    rewards = [name for name in numbers if name not in _COMPLETION]
    return total(row, rewards, context.rewards, partial=True)


def read_trl_preference(row: Row, context: Context) -> list[Item]:
    """Read `chosen` and `rejected`, which follow the prompt, or begin with it in older data sets."""
    sides, prompt = {"chosen": row["chosen"], "rejected": row["rejected"]}, row.get("prompt")
    begins = prompt
    if prompt is None:
        begins = prompt = _common(row["chosen"], row["rejected"])
    elif not isinstance(prompt, list):
        begins = None
    for name, response in sides.items():
        if begins is not None and type(response) is type(begins) and response[: len(begins)] == begins:
            sides[name] = response[len(begins) :]
    return pair_after(prompt, sides, row, ("prompt",))


def _common(chosen: Any, rejected: Any) -> Any:
    """The messages or the text with which both begin."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        # Cut at the end of a word: a word that differs belongs to the response.
        both = enumerate(zip(chosen, rejected))
        length = next((i for i, (a, b) in both if a != b), min(len(chosen), len(rejected)))
        start = chosen[:length]
        if start not in (chosen, rejected):
            start = start[: max(start.rfind(space) for space in " \n\t") + 1].rstrip(" ")
        if not start or start in (chosen, rejected):
            raise Refused("prompt: expected chosen and rejected to begin with the same text, and then differ")
        return start
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise Refused("chosen, rejected: expected two texts, or two lists of messages, the prompt inside")
    prompt = common_start(chosen, rejected)
    if not prompt or len(prompt) in (len(chosen), len(rejected)):
        raise Refused("prompt: expected chosen and rejected to begin with the same messages, and then differ")
    return prompt


def read_stepwise(row: Row, context: Context) -> list[Item]:
    """Read the steps of one response, each right or wrong. The label is the reward of the step's last token,
    which only the model's tokenizer finds. `meta` has the steps and their labels. Steps are separated by a
    line break, TRL's default."""
    prompt, steps = text(row["prompt"], "prompt"), row["completions"]
    if not isinstance(steps, list) or not steps:
        raise wrong("completions", "a list of texts", steps)
    labels = list_of_length(row["labels"], "labels", len(steps), "of true and false, as completions has")
    for label in labels:
        flag(label, "labels")
    texts = [text(step, f"completions[{i}]") for i, step in enumerate(steps)]
    meta = omit(row, ("prompt", "completions", "labels")) | {"steps": texts, "step_labels": labels}
    record: Record = {"prompt": prompt, "response": "\n".join(texts), "meta": meta}
    if context.tokenizer is not None:
        prompt_ids, ids, rewards = context.tokenizer.prompt(prompt), list[int](), list[float | None]()
        for i, (step, label) in enumerate(zip(texts, labels)):
            new = context.tokenizer.ids(step if i == 0 else "\n" + step)
            ids += new
            rewards += [None] * (len(new) - 1) + [float(label)] * bool(new)
        record |= token_fields(prompt_ids, ids) | {"token_reward": [None] * len(prompt_ids) + rewards}
        record["tokenizer"] = context.tokenizer.fingerprint
    return [Item.of(record, "completions")]


COMPLETIONS = Columns("prompt", "completion", judge=_sum_of_rewards, integers=("step",), messages=True)
UNPAIRED = Columns(
    "prompt",
    "completion",
    judge=lambda row, context: float(flag(row["label"], "label")),
    dropped=("label",),
    messages=True,
)
TRL_DEMONSTRATIONS = Columns("prompt", "completion", role="expert", messages=True)
