"""Read instruction data with responses, preferences or labels.

These are ShareGPT's conversations (`from` and `value`), Alpaca's columns with their variants, data sets with
OpenRLHF's default columns (it writes no log, and its preferences are like TRL's), and ms-swift's logged
completions and data sets.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, text, unpacked
from agro.logs.mapping import Columns
from agro.logs.protocol import Context, Item, Row
from agro.logs.records import Record, assistant, exchange, in_step, pair_after, split, system, user
from agro.logs.values import a_list, as_reward, flag, integer, number, one_of, total, wrong
from agro.rollout.prompts import OPENRLHF, ends_with_assistant, math_problem

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard"), "assistant"),
    "system": "system",
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
    "function_call": "assistant",
}
_COLUMNS = ("conversations", "system", "chosen", "rejected")
LABELS = ("kto_tag", "desirable", "thumbs", "label")


def labeled(row: Row, context: Context) -> float | None:
    """The reward of a response by its KTO label: 1 if desirable, 0 if not, None if unknown. A label is true
    or false, or a thumb (1 or -1, or a word)."""
    names = [name for name in LABELS if name in row]
    if len(names) > 1:
        raise Refused(f"label: expected one of the columns {', '.join(LABELS)}, got {', '.join(names)}")
    value = row[names[0]]
    if value is None:
        return None
    if isinstance(value, bool):
        return float(value)
    if not context.word_rewards and str(value) in ("1", "-1"):
        return float(str(value) == "1")
    if not isinstance(value, str) and not context.word_rewards:
        raise wrong(names[0], "true or false, or thumbs as 1 and -1", value)
    reward: float | None = as_reward(value, context, names[0])
    return reward


def is_sharegpt(row: Row) -> bool:
    turns = unpacked(row.get("conversations"))
    turn = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(turn, dict) and (turn.keys() >= {"from", "value"} or turn.keys() >= {"role", "content"})


def _conversation(row: Row) -> list[dict[str, Any]]:
    turns = objects(unpacked(row["conversations"]), "conversations")
    messages = [message(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
    if row.get("system"):
        messages.insert(0, system(text(row["system"], "system")))
    return messages


def message(value: Any, name: str) -> dict[str, Any]:
    """A turn as a message; one with `role` is returned unchanged."""
    turn = entry(value, name)
    if "role" in turn:
        return turn
    role = one_of(turn.get("from"), _ROLES, f"{name}.from")
    if turn["from"] != "function_call":
        return {"role": role, "content": text(turn.get("value"), f"{name}.value")}
    calls = unpacked(turn.get("value"))
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(each, dict) and "name" in each for each in calls):
        raise wrong(f"{name}.value", "calls as JSON with name and arguments", turn.get("value"))
    return {"role": role, "content": "", "tool_calls": calls}


def read_sharegpt(row: Row, context: Context) -> list[Item]:
    return [Item.of(split(_conversation(row), meta=omit(row, _COLUMNS), role="expert"), "conversations")]


def read_sharegpt_unpaired(row: Row, context: Context) -> list[Item]:
    meta = omit(row, (*_COLUMNS, *LABELS))
    record = split(_conversation(row), meta=meta, reward=labeled(row, context))
    return [Item.of(record, "conversations")]


def read_sharegpt_preference(row: Row, context: Context) -> list[Item]:
    sides = {}
    for name in ("chosen", "rejected"):
        turn = unpacked(row.get(name))
        sides[name] = turn if isinstance(turn, str) else [message(turn, name)]
    return pair_after(_conversation(row), sides, row, ("conversations", "system"), "conversations")


ENDING = "\n\nThe final answer is {answer}."  # appended to a solution; the reward looks for the answer there


def read_solved(row: Row, context: Context) -> list[Item]:
    r"""Read MATH: the solution, and a last sentence with its answer, the content of the last \boxed{…}."""
    problem = math_problem(row)
    record = {
        "prompt": problem["prompt"],
        "response": row["solution"].rstrip() + ENDING.format(answer=f"${problem['answer']}$"),
        "answer": problem["answer"],
        "role": "expert",
        "meta": omit(row, ("problem", "solution", "answer")),
    }
    return [Item.of(record, "solution")]


_PROMPTS = ("instruction", "question", "query", "input", "prompt")  # `input` may also continue an instruction
_RESPONSES = ("output", "completion", "response")
_PAIRS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
_PROMPT_COLUMNS = (*_PROMPTS, "system", "system_prompt", "history")


def _prompt(row: Row) -> Any:
    """The prompt: text, or messages if there is a system prompt or a history."""
    name = next((name for name in _PROMPTS if row.get(name) is not None), None)
    if name is None:
        names = ", ".join(name for name in _PROMPTS if name in row) or ", ".join(_PROMPTS)
        raise Refused(f"{names}: expected text, got {'null' if names in row else 'none'}")
    instruction = text(row[name], name)
    if name != "input" and row.get("input"):
        instruction += "\n" + text(row["input"], "input")
    history = _turns(row)
    return [*history, user(instruction)] if history else instruction


def _turns(row: Row) -> list[Record]:
    """The system prompt, and the earlier turns, which `history` has as pairs of texts."""
    turns = list[Record]()
    if instructions := row.get("system") or row.get("system_prompt"):
        turns.append(system(text(instructions, "system")))
    for i, pair in enumerate(a_list(unpacked(row.get("history")) or None, "history")):
        name = f"history[{i}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise wrong(name, "a text of the user and one of the assistant", pair)
        question, answer = pair
        turns += [user(text(question, name)), assistant(text(answer, name))]
    return turns


ALPACA = Columns("prompt", "output", role="expert", compose=_prompt, dropped=_PROMPT_COLUMNS)
UNPAIRED = Columns("prompt", _RESPONSES, judge=labeled, compose=_prompt, dropped=(*_PROMPT_COLUMNS, *LABELS))


def _sides(row: Row) -> tuple[str, str] | None:
    """The columns of the better and the worse response; None without them."""
    return next((names for names in _PAIRS if row.keys() >= set(names)), None)


def read_instruction_preference(row: Row, context: Context) -> list[Item]:
    prompt, sides = _prompt(row), {}
    for name in _sides(row) or _PAIRS[0]:
        turn = unpacked(row[name])
        sides[name] = text(message(turn, name).get("content"), name) if isinstance(turn, dict) else turn
    return pair_after(prompt, sides, row, _PROMPT_COLUMNS)


def read_after_messages(row: Row, context: Context) -> list[Item]:
    prompt = objects(row["messages"], "messages")
    sides = {name: [message(row[name], name)] for name in ("chosen", "rejected")}
    return pair_after(prompt, sides, row, ("messages",), "messages")


def is_preference(row: Row) -> bool:
    """Whether a row is a preference of these forms. Agro's and TRL's have a complete `prompt`."""
    names = _sides(row)
    if names is None or row.keys().isdisjoint(_PROMPTS) or isinstance(row[names[0]], list):
        return False
    has_more = not row.keys().isdisjoint({"system", "system_prompt", "history"})
    return "prompt" not in row or has_more or names != _PAIRS[0]


def read_rated(row: Row, context: Context) -> list[Item]:
    prompt, meta = _prompt(row), omit(row, {*_PROMPT_COLUMNS, "generations", "ratings"})
    items = []
    for name, one in in_step(row, "generations", ("ratings",)):
        response, reward = (
            text(one["generations"], name),
            number(one["ratings"], f"ratings of {name}", is_text=True),
        )
        items.append(Item.of(exchange(prompt, response, ("prompt", name), meta, reward=reward), name))
    return items


_VERIFIERS = {"math_verify": "correctness_math_verify", "llama": "correctness_llama"}
_RESPONSE_COLUMNS = ("is_reasoning_complete", "finish_reasons", *_VERIFIERS.values())


def read_verified(row: Row, context: Context) -> list[Item]:
    """Read generations; columns have a value for each, or are unknown. `messages` repeats one of them."""
    column = _VERIFIERS[context.chosen("verifier", _VERIFIERS, "math_verify")]
    prompt = [user(text(row["problem"], "problem"))]
    items = []
    for name, one in in_step(row, "generations", _RESPONSE_COLUMNS):
        record = {
            "prompt": prompt,
            "response": text(one["generations"], name),
            "reward": number(one[column], f"{column} of {name}"),
            "answer": row.get("answer"),
            "meta": omit(one, ("problem", "answer", "messages", "generations")),
        }
        items.append(Item.of(record, name))
    return items


OPENRLHF_DEMONSTRATIONS = Columns("input", "output", role="expert", messages=True)


def read_openrlhf(row: Row, context: Context) -> list[Item]:
    if "output" in row:
        return OPENRLHF_DEMONSTRATIONS.read(row, context)
    return [Item.of(split(row["input"], meta=omit(row, ("input",)), role="expert"), "output")]


def is_openrlhf(row: Row) -> bool:
    columns = row.keys() - OPENRLHF
    return columns == {"input", "output"} or (columns == {"input"} and ends_with_assistant(row))


_STEP = ("step", "gen_step")  # the Megatron trainer writes gen_step
_NO_REWARD = (*_STEP, "advantages", "entropy", "advantage")
COMPLETION = Columns("prompt", "completion", messages=True)


def read_completions(row: Row, context: Context) -> list[Item]:
    """Read a line, whose columns are lists of equal length, with one value per response."""
    rewards = [
        name
        for name, values in row.items()
        if name not in _NO_REWARD
        and all(isinstance(x, int | float | None) and not isinstance(x, bool) for x in a_list(values, name))
    ]
    step = next(name for name in _STEP if name in row)
    items = []
    for name, one in in_step(row, "completion", row):
        record = COMPLETION.record(one, context)
        record["reward"] = total(one, rewards, context.rewards, partial=True)
        record["meta"][step] = integer(one[step], step)
        items.append(Item.of(record, name))
    return items


def read_pair(row: Row, context: Context) -> list[Item]:
    """Read a preference: the assistant's last turn, and another one or another end of the conversation."""
    messages = _without_loss(objects(row["messages"], "messages"))
    meta = omit(row, ("messages", "rejected_response", "rejected_messages"))
    chosen = split(messages, meta=meta)
    if "rejected_messages" in row:
        rejected = _without_loss(objects(row["rejected_messages"], "rejected_messages"))
    elif isinstance(row["rejected_response"], list):
        rejected = chosen["prompt"] + _without_loss(objects(row["rejected_response"], "rejected_response"))
    else:
        rejected = [*messages[:-1], assistant(text(row["rejected_response"], "rejected_response"))]
    worse = split(rejected, meta=meta)
    if chosen["prompt"] != worse["prompt"]:
        raise Refused("messages: expected the rejected ones to have the same messages before the response")
    return [Item.pair(chosen, worse)]


def _without_loss(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without the keys that select what is learned from."""
    return [{k: v for k, v in message.items() if k not in ("loss", "loss_scale")} for message in messages]


def read_turns(row: Row, context: Context) -> list[Item]:
    """Read a conversation of which some turns are learned from. Turns with `loss` false are context, and
    those between two of them are one response. A KTO `label` becomes the reward."""
    messages = objects(row["messages"], "messages")
    label = row.get("label")
    common: Record = {"role": "expert"} if label is None else {"reward": flag(label, "label")}
    scales = [message.get("loss_scale") for message in messages]
    conversation, meta = _without_loss(messages), omit(row, ("messages", "label"))
    if any(scale is not None for scale in scales):
        meta["loss_scale"] = scales
    items = []
    for start, end in _learned(messages):
        prompt = conversation[:start] if start else None
        items.append(Item.of(split(conversation[: end + 1], prompt, meta, **common), f"messages[{end}]"))
    return items


def _learned(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The first and last message of each run of turns to learn from; (0, last) if no `loss` is false."""
    losses = {i: flag(m["loss"], f"messages[{i}].loss") for i, m in enumerate(messages) if "loss" in m}
    if not losses:
        return [(0, len(messages) - 1)]
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    groups = groupby(turns, key=lambda i: losses.get(i, True))
    runs = [list(run) for is_learned, run in groups if is_learned]
    if not runs:
        raise Refused("messages: expected a turn of the assistant to learn from, got loss false in all")
    return [(run[0], run[-1]) for run in runs]


def read_query(row: Row, context: Context) -> list[Item]:
    """Read `query` and `response` with earlier turns in `history`, or pairs of turns in `conversation`."""
    if "conversation" in row:
        name, turns = "conversation", objects(row["conversation"], "conversation")
        messages = _turns(omit(row, ("history",)))
        pairs = [(turn.get("human"), turn.get("assistant")) for turn in turns]
    else:
        name, messages = "query, response", _turns(row)
        pairs = [(row.get("query"), row.get("response"))]
    for question, answer in pairs:
        messages += [user(text(question, name)), assistant(text(answer, name))]
    if not pairs:
        raise Refused("conversation: expected at least one pair of turns, got none")
    names = ("conversation", "history", "query", "response", "system", "system_prompt", "rejected_response")
    chosen = {"prompt": messages[:-1], "response": messages[-1]["content"], "meta": omit(row, names)}
    if row.get("rejected_response") is None:
        return [Item.of(chosen | {"role": "expert"})]
    return [Item.pair(chosen, chosen | {"response": text(row["rejected_response"], "rejected_response")})]
