"""Trainers: verl's dumps of rollouts and of validation, and its data sets, which are prompts; TRL's logged
completions, and the types of data sets of its trainers."""

from __future__ import annotations

from typing import Any

from agro.errors import Refused
from agro.io.json_values import omit, text
from agro.logs.declared import Columns, preference
from agro.logs.fields import common_start, digest, exchange, integer, token_fields, total
from agro.logs.protocol import Context, Item, Row

_TURNS = ("num_turns", "__num_turns__")
DUMP = Columns("input", "output", answer="gts", reward="score", integers=("step",), dropped=("step", "uid"))


def read_dump(row: Row, context: Context) -> list[Item]:
    """Texts are those of the tokens without the special ones. v1's `uid` is SAMPLE_ROLLOUT_OUTPUT: outputs
    of one rollout are pieces of one episode, and ids begin anew in each file."""
    for name in _TURNS:
        if name in row and integer(row[name], name) > 2:
            raise Refused(
                f"{name}: {row[name]} turns in one text: what tools wrote in it can't be told from what the "
                "policy wrote; import the messages of that run from another log"
            )
    record = DUMP.record(row, context)
    if row.get("uid") is not None:
        uid = row["uid"]
        parts = uid.rsplit("_", 2) if isinstance(uid, str) else []
        if len(parts) != 3:
            raise Refused(f"uid: expected SAMPLE_ROLLOUT_OUTPUT, got {uid!r:.80}")
        sample, rollout = parts[0], parts[1]
        file = f"{context.path.parent.name}/{context.path.name}"
        record |= {"prompt_id": f"{file}:{sample}", "episode": f"{file}:{sample}_{rollout}"}
    return [Item.of(record, "output")]


def dump_identity(row: Row) -> str:
    """Each validation asks the same prompts, mostly without randomness: the same responses, at another step.

    Only validation adds `reward`. What was sampled for training at another step is another response.
    """
    step_columns = ("step", "uid", "request_id") if "reward" in row else ()
    return digest({name: value for name, value in row.items() if name not in step_columns})


_COMPLETION = ("step", "prompt", "completion", "advantage")


def _reward(row: Row, context: Context) -> float | None:
    """Besides the columns of TRL there is one of numbers a reward function; NaN or null: it gave None.

    TRL weighs them by its configuration, which isn't in the file.
    """
    numbers = [name for name, value in row.items() if type(value) in (float, int, type(None))]
    rewards = [name for name in numbers if name not in _COMPLETION]
    return total(row, rewards, context.rewards, partial=True)


def read_preference(row: Row, context: Context) -> list[Item]:
    """`chosen` and `rejected` follow the prompt; in older data sets they begin with it."""
    chosen, rejected = row["chosen"], row["rejected"]
    prompt = row.get("prompt")
    if prompt is None:
        prompt = _common(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        chosen, rejected = _after(prompt, chosen), _after(prompt, rejected)
    return preference(
        exchange(prompt, chosen, ("prompt", "chosen")),
        exchange(prompt, rejected, ("prompt", "rejected")),
        row,
        ("prompt", "chosen", "rejected"),
    )


def _common(chosen: Any, rejected: Any) -> Any:
    """The messages, or the text, that both begin with."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        # Up to the end of a word: one that differs belongs to the response.
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


def _after(prompt: Any, response: Any) -> Any:
    """A response without the prompt that it begins with, where both are messages."""
    if isinstance(prompt, list) and isinstance(response, list) and response[: len(prompt)] == prompt:
        return response[len(prompt) :]
    return response


def _label(row: Row, context: Context) -> float:
    label = row["label"]
    if not isinstance(label, bool):
        raise Refused(f"label: expected true or false, got {label!r:.80}")
    return float(label)


def read_stepwise(row: Row, context: Context) -> list[Item]:
    """Steps of one response, each right or wrong, which is the reward of a step's last token: known only with
    the model's tokenizer. `meta` has the steps and their labels. TRL separates steps by a line break, its
    default."""
    prompt, steps, labels = text(row["prompt"], "prompt"), row["completions"], row["labels"]
    if not isinstance(steps, list) or not steps:
        raise Refused(f"completions: expected a list of texts, got {steps!r:.80}")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise Refused(
            f"labels: expected {len(steps)} of true and false, as completions has, got {labels!r:.80}"
        )
    for label in labels:
        if not isinstance(label, bool):
            raise Refused(f"labels: expected true and false, got {label!r:.80}")
    texts = [text(step, f"completions[{i}]") for i, step in enumerate(steps)]
    meta = omit(row, ("prompt", "completions", "labels")) | {"steps": texts, "step_labels": labels}
    record: dict[str, Any] = {"prompt": prompt, "response": "\n".join(texts), "meta": meta}
    if context.tokenizer is not None:
        prompt_ids, ids, rewards = context.tokenizer.prompt(prompt), list[int](), list[float | None]()
        for i, (step, label) in enumerate(zip(texts, labels)):
            new = context.tokenizer.ids(step if i == 0 else "\n" + step)
            ids += new
            rewards += [None] * (len(new) - 1) + [float(label)] * bool(new)
        record |= token_fields(prompt_ids, ids) | {"token_reward": [None] * len(prompt_ids) + rewards}
        record["tokenizer"] = context.tokenizer.fingerprint
    return [Item.of(record, "completions")]


COMPLETIONS = Columns("prompt", "completion", judge=_reward, integers=("step",), messages=True)
UNPAIRED = Columns("prompt", "completion", judge=_label, dropped=("label",), messages=True)
TRL_DEMONSTRATIONS = Columns("prompt", "completion", role="expert", messages=True)
