"""Read logs of verifiers and prime-rl: traces of episodes, results of evaluations before v1, exported tokens.

The messages of a trace are a tree, in which each path to a leaf is a sequence to learn from. A message that
several paths share is learned from once. Files round log-probs to 4 decimals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit
from agro.logs.protocol import Context, Item, Row
from agro.logs.records import Record, exchange, fingerprinted, split, until_reply
from agro.logs.values import flag, flags, integer, integers, number, numbers, wrong
from agro.types.conversation import prompt_hash

DECIMALS = 4  # of log-probs, RECORD_FLOAT_DECIMALS of verifiers
Messages = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class _TraceNode:
    """A message, and the tokens that it adds to the sequence."""

    number: int
    parent: int | None
    message: dict[str, Any]
    sampled: bool
    tokens: list[int]
    action: list[bool]
    logps: list[float | None]
    links: list[dict[str, Any]]  # to nodes that it continues in meaning, as a summary does
    call: dict[str, Any] | None  # the model call that made it


def _nodes(trace: dict[str, Any], location: str) -> list[_TraceNode]:
    calls: dict[int, dict[str, Any]] = {}  # model calls by the node that each made
    for i, model_call in enumerate(objects(trace.get("calls") or [], f"{location}.calls")):
        if model_call.get("node") is not None:
            calls[integer(model_call["node"], f"{location}.calls[{i}].node")] = model_call
    nodes = []
    for i, value in enumerate(objects(trace.get("nodes"), f"{location}.nodes")):
        path = f"{location}.nodes[{i}]"
        parent, sampled = value.get("parent"), value.get("sampled", False)
        if parent is not None and (not isinstance(parent, int) or not 0 <= parent < i):
            raise wrong(f"{path}.parent", "the number of an earlier node", parent)
        flag(sampled, f"{path}.sampled")
        content = entry(value.get("message"), f"{path}.message")
        if not isinstance(content.get("role"), str):
            raise wrong(f"{path}.message", "an object with a role", content)
        tokens = integers(value.get("token_ids") or [], f"{path}.token_ids")
        action = flags(value.get("mask") or [], f"{path}.mask", len(tokens))
        logps: list[float | None] = [None] * len(action)  # the file has them for sampled tokens only
        if value.get("logprobs"):
            sampled_logps = iter(numbers(value["logprobs"], f"{path}.logprobs", sum(action)))
            logps = [next(sampled_logps) if is_action else None for is_action in action]
        links = objects(value.get("semantic_parents") or [], f"{path}.semantic_parents")
        turn = _message(content)
        nodes.append(_TraceNode(i, parent, turn, sampled, tokens, action, logps, links, calls.get(i)))
    return nodes


def _message(value: Row) -> Record:
    """A message without null values; one with calls alone has empty content."""
    return {"content": ""} | {name: part for name, part in value.items() if part is not None}


def _branches(nodes: Sequence[_TraceNode], location: str, skipped: list[str]) -> list[list[_TraceNode]]:
    """The paths from a root to each leaf, except to attempts to compact the history that weren't used."""
    parents = {node.parent for node in nodes}
    accepted = {link.get("node") for node in nodes for link in node.links if link.get("type") == "compaction"}
    branches = []
    for leaf in nodes:
        if leaf.number in parents:
            continue
        is_attempt = any(link.get("type") == "compaction_attempt" for link in leaf.links)
        if is_attempt and leaf.number not in accepted:
            skipped.append(f"{location}: node {leaf.number}, an attempt to compact that wasn't used")
            continue
        branch = [leaf]
        while branch[0].parent is not None:
            branch.insert(0, nodes[branch[0].parent])
        branches.append(branch)
    return branches


def _records(
    trace: dict[str, Any], location: str, skipped: list[str], context: Context
) -> list[tuple[str, Record]]:
    """One (name, record) for each branch with a sampled message that no earlier branch has.

    With tokens the record is the complete sequence; its context differs from the prompt if history was
    rewritten. Without tokens it is the new turns after all earlier ones, and turns that weren't sampled can't
    stand among them. What isn't learned from is added to `skipped`, with the reason.
    """
    learned: set[_TraceNode] = set()
    records = []
    prompt: Messages = []
    for position, branch in enumerate(_branches(_nodes(trace, location), location, skipped)):
        new = [node for node in branch if node.sampled and node not in learned]
        if not new:
            skipped.append(f"{location}: branch {position} has no sampled message of its own")
            continue
        learned.update(new)
        is_new = set(new)
        branch = branch[: branch.index(new[-1]) + 1]
        sampled = [node for node in branch if node.sampled]
        has_tokens = all(any(node.action) for node in sampled)
        begin = branch.index(sampled[0] if has_tokens else new[0])
        unsampled = [node for node in branch[begin:] if not node.sampled]
        foreign = [node for node in unsampled if node.message["role"] == "assistant"]
        messages = [node.message for node in branch]
        prompt = prompt or messages[: branch.index(sampled[0])]
        if foreign and not has_tokens:
            raise Refused(
                f"{location}.nodes[{foreign[0].number}]: an assistant turn that wasn't sampled stands among "
                "sampled ones, and without token_ids they can't be told apart"
            )
        action = [is_action for node in branch for is_action in node.action]
        mask = [is_action and node in is_new for node in branch for is_action in node.action]
        is_whole = messages[:begin] == prompt and action == mask and not foreign
        if is_whole or not has_tokens:
            record = split(messages, messages[:begin])
        else:
            record = {"prompt": prompt, "response": messages[-1]["content"], "meta": {}}
        calls = [node.call for node in new if node.call is not None]
        sampling = _sampling(calls)
        if has_tokens:
            logps = [x for node in branch for x in node.logps]
            record |= {"tokens": [t for node in branch for t in node.tokens], "mask": mask}
            record["behavior_logp"] = logps
            if messages[:begin] != prompt:
                record["context_tokens"] = record["tokens"][: action.index(True)]
            if action != mask:
                record["action"] = action
            if any(x is not None for x in logps):
                sampling["logp_decimals"] = DECIMALS
            record = fingerprinted(record, context)
        if sampling:
            record["sampling"] = sampling
        if calls and calls[-1].get("finish_reason") is not None:
            record["meta"]["finish"] = calls[-1]["finish_reason"]
        if calls and isinstance(calls[-1].get("model"), str):
            record["model"] = calls[-1]["model"]
        records.append((f"branch[{position}]", record))
    return records


def _sampling(calls: list[dict[str, Any]]) -> Record:
    """The sampling settings of the first call, and if calls differ, also those of each."""
    settings = []
    for each in calls:
        sampling = dict(entry(each.get("sampling"), "calls.sampling"))
        settings.append(entry(sampling.pop("extra_body", None), "calls.sampling.extra_body") | sampling)
    common: Record = dict(settings[0]) if settings else {}
    return common if all(s == common for s in settings) else common | {"of_calls": settings}


_COLUMNS = ("prompt", "completion", "reward", "example_id", "answer", "tool_defs")
_TRACE_FIELDS = ("info", "metrics", "rewards", "errors", "stop_condition", "ok", "is_timeout", "tools")
_EPISODE_FIELDS = ("env", "run", "task")


def read_episode(row: Row, context: Context) -> list[Item]:
    """Read the branches of the traces that train a policy; `meta.left_out` names the others."""
    items: list[Item] = []
    skipped: list[str] = []
    task = entry(row.get("task"), "task")
    group = entry(row.get("group"), "group").get("id") or task.get("key") or task.get("hash")
    for i, value in enumerate(objects(row["traces"], "traces")):
        location = f"traces[{i}]"
        agent = entry(value.get("agent"), f"{location}.agent")
        if agent.get("trainable") is False:
            skipped.append(f"{location}: of {agent.get('name', 'an agent')}, which isn't trained")
            continue
        records = _records(value, location, skipped, context)
        meta = {name: row[name] for name in _EPISODE_FIELDS if row.get(name) is not None}
        meta |= {name: value[name] for name in _TRACE_FIELDS if value.get(name) not in (None, [], {})}
        meta |= {"trace": value.get("id"), "agent": agent.get("name", "agent")}
        common: dict[str, Any] = {"reward": _reward(value, location, context), "meta": meta}
        data = entry(task.get("data"), "task.data")
        if data.get("answer") is not None:
            common["answer"] = data["answer"]
        work = entry(entry(row.get("run"), "run").get("work"), "run.work")
        policy = entry(work.get("policy"), "run.work.policy")
        start = policy.get("start")
        if isinstance(start, int) and start == policy.get("end"):  # otherwise the weights changed in between
            common["version"] = start
        for name, record in records:
            merged = {**common, **record, "meta": {**meta, **record.get("meta", {})}}
            if len(records) > 1:
                merged["episode"] = str(meta["trace"])
            if group is not None:  # agents of one episode have different prompts
                merged["prompt_id"] = f"{group}:{prompt_hash(merged['prompt'])}"
            items.append(Item.of(merged, f"{location}.{name}"))
    if not items:
        raise Refused(f"traces: expected a message that the policy sampled; {'; '.join(skipped) or 'none'}")
    if skipped:
        for item in items:
            item.records[0]["meta"]["left_out"] = skipped
    return items


def identity(row: Row) -> str:
    return str(row.get("id"))


def _reward(trace: dict[str, Any], location: str, context: Context) -> float | None:
    """The weighted sum of the scores, without null ones, which weren't computed; unknown if all are null."""
    terms = []
    rewards = entry(trace.get("rewards"), f"{location}.rewards")
    for name in context.rewards:
        if name not in rewards:
            raise Refused(f"--reward {name}: no such reward in {location}; there are {', '.join(rewards)}")
    for name, reward in rewards.items():
        part = entry(reward, f"{location}.rewards.{name}")
        score = number(part.get("score"), f"{location}.rewards.{name}.score")
        weight = number(part.get("weight", 1.0), f"{location}.rewards.{name}.weight")
        if context.rewards:
            weight = context.rewards.get(name)
        if score is not None and weight is not None:
            terms.append(score * weight)
    return sum(terms) if terms else None


def read_result(row: Row, context: Context) -> list[Item]:
    """Read a rollout of an evaluation. With `error` the file's reward is 0, which isn't a score."""
    prompt, completion = _messages(row["prompt"]), _messages(row["completion"])
    meta, error, name = omit(row, _COLUMNS), row.get("error"), "example_id" if "example_id" in row else "id"
    if isinstance(completion, list):
        observed = until_reply(reversed(completion))[::-1]
        completion = completion[: len(completion) - len(observed)]
        meta |= {"after": observed} if observed else {}
    if error is not None:
        meta["reward_error"] = f"{error!s:.500}"
    if not isinstance(row[name], str | int):
        raise wrong(name, "text or an integer", row[name])
    record = exchange(prompt, completion, ("prompt", "completion"), meta, answer=row.get("answer"))
    record["reward"] = number(row["reward"], "reward") if error is None else None
    record["prompt_id"] = f"{row[name]}:{prompt_hash(record['prompt'])}"
    record["tools"] = row.get("tool_defs")
    return [Item.of(record, "completion")]


def _messages(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [_message(turn) for turn in objects(value, "prompt, completion")]
