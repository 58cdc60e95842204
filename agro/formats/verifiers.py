"""verifiers and prime-rl: traces of episodes, results of evaluations before v1, exported tokens.

Fields as written by verifiers 0.4.0: verifiers/v1/episode.py, v1/trace.py:270-440 and v1/graph.py:92-191
(traces); verifiers/legacy/types.py:397-427 at a60a606 and scripts/eval.py:157-206 at 39f0675 (results); and
by prime-rl 559b447: src/prime_rl/monitors/file.py:42-58, src/prime_rl/trainer/rl/token_export.py:44-100.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from agro.errors import Refused
from agro.formats.fields import entry, exchange, number, objects, parsed, rest
from agro.formats.protocol import Context, Format, Item, Row
from agro.formats.traces import Trace, message
from agro.types.prompt import prompt_hash

_TAKEN = ("prompt", "completion", "reward", "example_id", "answer", "is_truncated")
_OF_TRACE = ("info", "metrics", "rewards", "errors", "stop_condition", "ok", "is_timeout", "tools")
_OF_EPISODE = ("env", "run", "task")


def _episode(row: Row, context: Context) -> list[Item]:
    """The branches of the traces that train a policy. What else there is, is named in `meta.left_out`."""
    items: list[Item] = []
    left_out: list[str] = []
    for i, value in enumerate(objects(row["traces"], "traces")):
        where = f"traces[{i}]"
        agent = entry(value.get("agent"), f"{where}.agent")
        if agent.get("trainable") is False:
            left_out.append(f"{where}: of {agent.get('name', 'an agent')}, which isn't trained")
            continue
        trace = Trace.of(value, where)
        records = trace.records(context)
        common = _common(row, value, where, context)
        for name, record in records:
            items.append(Item.of(_whole(record, common, row, len(records) > 1), f"{where}.{name}"))
        left_out += trace.left_out
    if not items:
        raise Refused(f"traces: expected a message that the policy sampled; {'; '.join(left_out) or 'none'}")
    if left_out:
        for item in items:
            item.records[0]["meta"]["left_out"] = left_out
    return items


def _common(row: Row, trace: dict[str, Any], where: str, context: Context) -> dict[str, Any]:
    """What the records of a trace share."""
    meta = {name: row[name] for name in _OF_EPISODE if row.get(name) is not None}
    meta |= {name: trace[name] for name in _OF_TRACE if trace.get(name) not in (None, [], {})}
    meta |= {"trace": trace.get("id"), "agent": entry(trace.get("agent"), "agent").get("name", "agent")}
    common: dict[str, Any] = {"reward": _reward(trace, where, context), "meta": meta}
    data = entry(entry(row.get("task"), "task").get("data"), "task.data")
    if data.get("answer") is not None:
        common["answer"] = data["answer"]
    work = entry(entry(row.get("run"), "run").get("work"), "run.work")
    policy = entry(work.get("policy"), "run.work.policy")
    start = policy.get("start")
    if isinstance(start, int) and start == policy.get("end"):  # else the weights changed in between
        common["version"] = start
    return common


def _whole(record: dict[str, Any], common: dict[str, Any], row: Row, is_piece: bool) -> dict[str, Any]:
    whole = {**common, **record, "meta": {**common["meta"], **record.get("meta", {})}}
    if is_piece:
        whole["episode"] = str(common["meta"]["trace"])
    task = entry(row.get("task"), "task")
    group = entry(row.get("group"), "group").get("id") or task.get("key") or task.get("hash")
    if group is not None:  # agents of one episode have prompts of their own
        whole["prompt_id"] = f"{group}:{prompt_hash(whole['prompt'])}"
    return whole


def _reward(trace: dict[str, Any], where: str, context: Context) -> float | None:
    """The sum of scores times weights. Null is a reward that wasn't computed; where all are, it's unknown."""
    known = []
    rewards = entry(trace.get("rewards"), f"{where}.rewards")
    for name in context.rewards:
        if name not in rewards:
            raise Refused(f"--reward {name}: no such reward in {where}; there are {', '.join(rewards)}")
    for name, reward in rewards.items():
        part = entry(reward, f"{where}.rewards.{name}")
        score = number(part.get("score"), f"{where}.rewards.{name}.score")
        weight = number(part.get("weight", 1.0), f"{where}.rewards.{name}.weight")
        if context.rewards:
            weight = context.rewards.get(name)
        if score is not None and weight is not None:
            known.append(score * weight)
    return sum(known) if known else None


def _result(row: Row, context: Context) -> list[Item]:
    """A rollout of an evaluation. One with `error` has the reward 0, which isn't a score."""
    prompt, completion = _messages(row["prompt"]), _messages(row["completion"])
    after: list[Any] = []
    if isinstance(completion, list):
        after = list(takewhile(lambda turn: turn.get("role") != "assistant", reversed(completion)))[::-1]
        completion = completion[: len(completion) - len(after)]
    record = exchange(prompt, completion, ("prompt", "completion"))
    record["meta"] = record.get("meta", {}) | rest(row, _TAKEN)
    record["reward"] = number(row["reward"], "reward")
    record["answer"] = row.get("answer")
    if row.get("error") is not None:
        record["meta"]["reward_error"] = f"{row['error']!s:.500}"
        record["reward"] = None
    if row.get("is_truncated"):
        record["meta"]["finish"] = "length"
    if after:
        record["meta"]["after"] = after
    name = "example_id" if "example_id" in row else "id"
    if not isinstance(row[name], str | int):
        raise Refused(f"{name}: expected text or an integer, got {row[name]!r:.80}")
    record["prompt_id"] = f"{row[name]}:{prompt_hash(record['prompt'])}"
    return [Item.of(record, "completion")]


def _messages(value: Any) -> Any:
    """Messages with their tool calls as objects: until late 2025 these were JSON in text."""
    if not isinstance(value, list):
        return value
    turns = [dict(turn) for turn in objects(value, "prompt, completion")]
    for turn in turns:
        if isinstance(turn.get("tool_calls"), list):
            calls = [parsed(c, "tool_calls") if isinstance(c, str) else c for c in turn["tool_calls"]]
            turn["tool_calls"] = calls
    return [message(turn) for turn in turns]


def _is_result(row: Row) -> bool:
    if not row.keys() >= {"prompt", "completion", "reward"}:
        return False
    return row.keys() >= {"example_id"} or row.keys() >= {"id", "generation_ms"}


def _exported(row: Row, context: Context) -> NoReturn:
    raise Refused(
        "token_ids: exported tokens of prime-rl have neither text nor rewards (only advantages); import the "
        "run's rollouts/step_*/train/all/traces.jsonl"
    )


def _has(names: Sequence[str]) -> Any:
    return lambda row: row.keys() >= set(names)


FORMATS = (
    Format(
        "verifiers-traces",
        "verifiers v1 and prime-rl: traces of episodes (traces.jsonl)",
        "episodes",
        "verifiers 0.4.0, v1/trace.py:270-440; prime-rl 559b447, monitors/file.py:42-58",
        lambda row: row.keys() >= {"traces", "env", "task"},
        _episode,
        carries=("reward", "tokens", "behavior_logp", "version", "group"),
        identity=lambda row: str(row.get("id")),  # what is in effective/ is in all/ as well
        repeats="verifiers' traces in all/ and effective/",
        weighs=True,
    ),
    Format(
        "verifiers-results",
        "verifiers before v1: results of evaluations (results.jsonl)",
        "samples",
        "verifiers a60a606, legacy/types.py:397-427",
        _is_result,
        _result,
        carries=("reward", "group"),
        over=("trl-prompt-completion", "trl-completions", "trl-unpaired"),
    ),
    Format(
        "prime-rl-tokens",
        "prime-rl: exported tokens, without text and rewards",
        "nothing",
        "prime-rl 559b447, trainer/rl/token_export.py:44-100",
        _has(["schema_version", "token_ids", "inference_logprobs", "loss_mask"]),
        _exported,
    ),
)
