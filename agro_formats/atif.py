"""ATIF, the Agent Trajectory Interchange Format: what Harbor, and many agents, write of a session.

The steps of an agent are rows of one episode: where history was rewritten, another row begins. Steps that
were copied from an earlier trajectory (`is_copied_context`), and those of no model (`llm_call_count` 0), are
context. Fields as in atif 1.8.0: atif/trajectory.py, step.py, metrics.py, observation_result.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, text
from agro.logs.fields import call, exchange, fingerprinted, integer, integers, listed, numbers, one_of, plain
from agro.logs.protocol import Context, Item, Row

Message = dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """Of one call of the model: the prompt's, the completion's, and its log-probs, where they are known."""

    prompt: list[int]
    completion: list[int]
    logp: list[float | None]


@dataclass(frozen=True)
class AtifStep:
    """One step, as messages: of the user, the system or the agent, and what is observed after it."""

    message: Message
    observed: list[Message] = field(default_factory=list)
    is_own: bool = False  # whether the model wrote it here, to be learned from
    tokens: Tokens | None = None
    meta: dict[str, Any] = field(default_factory=dict)


def records(steps: Sequence[AtifStep], context: Context) -> list[dict[str, Any]]:
    """Interchange records of the steps, by their tokens where all own steps have them.

    Raises `Refused` where there is nothing to learn from, or nothing before it.
    """
    new = [step for step in steps if step.is_own]
    if not new:
        raise Refused(
            "steps: expected at least one that the agent's model wrote, and that isn't copied context"
        )
    if steps[0].is_own:
        raise Refused("steps: expected one of the user or the system before the first of the agent")
    if all(step.tokens is not None for step in new):
        return _token_records(steps, context)
    # A row up to each turn of the assistant that isn't its own; what is before it is the row's prompt.
    records, begin = [], _first_own(steps)
    while begin < len(steps):
        inserted = (
            i for i, s in enumerate(steps) if i > begin and not s.is_own and s.message["role"] == "assistant"
        )
        end = next(inserted, len(steps))
        turns, meta = _turns(steps[begin:end])
        record = exchange(_messages(steps[:begin]), turns, ("steps", "steps"))
        records.append(record | {"meta": record.get("meta", {}) | meta})
        begin = end + _first_own(steps[end:])
    return records


def _messages(steps: Sequence[AtifStep]) -> list[Message]:
    return [message for step in steps for message in (step.message, *step.observed)]


def _first_own(steps: Sequence[AtifStep]) -> int:
    return next((i for i, step in enumerate(steps) if step.is_own), len(steps))


def _turns(steps: Sequence[AtifStep]) -> tuple[list[Message], dict[str, Any]]:
    """The messages up to the last own turn; what else is known of the steps, and what came after it."""
    last_own = max(i for i, step in enumerate(steps) if step.is_own)
    observed = [*steps[last_own].observed, *_messages(steps[last_own + 1 :])]
    details = [step.meta for step in steps if step.is_own]
    meta: dict[str, Any] = {"steps": details} if any(details) else {}
    turns = [*_messages(steps[:last_own]), steps[last_own].message]
    return turns, meta | ({"observed_last": observed} if observed else {})


def _token_records(steps: Sequence[AtifStep], context: Context) -> list[dict[str, Any]]:
    """A row up to each own step whose prompt isn't what was there before: rows after the first one have their
    prompt in `context_tokens`."""
    own = [(i, step.tokens) for i, step in enumerate(steps) if step.is_own and step.tokens]
    starts, before = list[int](), list[int]()
    for i, tokens in own:
        if not starts or tokens.prompt[: len(before)] != before:
            starts.append(i)
        before = tokens.prompt + tokens.completion
    begin, records = starts[0], []
    prompt = _messages(steps[:begin])
    for start, end in zip(starts, [*starts[1:], len(steps)]):
        ids, mask, logp = list[int](), list[bool](), list[float | None]()
        for tokens in (tokens for i, tokens in own if start <= i < end):
            prompted = len(tokens.prompt) - len(ids)
            ids += tokens.prompt[len(ids) :] + tokens.completion
            mask += [False] * prompted + [True] * len(tokens.completion)
            logp += [None] * prompted + tokens.logp
        turns, meta = _turns(steps[start:end])
        has_inserted = any(not s.is_own and s.message["role"] == "assistant" for s in steps[start:end])
        if start == begin and not has_inserted:
            record = exchange(prompt, turns, ("steps", "steps"))
        else:  # not as `continuation`: with other tokens the turns would be encoded after the wrong context
            record = {"prompt": prompt, "response": turns[-1].get("content") or "", "meta": {"turns": turns}}
        if start != begin:
            record["context_tokens"] = ids[: mask.index(True)]
        record |= {"tokens": ids, "mask": mask, "meta": record.get("meta", {}) | meta}
        if any(x is not None for x in logp):
            record["behavior_logp"] = logp
        records.append(fingerprinted(record, context))
    return records


_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")
_IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")
_STEP = ("step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "metrics")
_COLUMNS = ("schema_version", "agent", "steps", "subagent_trajectories")


def is_trajectory(row: Row) -> bool:
    return str(row.get("schema_version", "")).startswith("ATIF-v") and "steps" in row


def read(row: Row, context: Context) -> list[Item]:
    return [Item.of(record, name) for name, record in trajectory(row, context)]


def is_call(step: Row) -> bool:
    """Whether the agent's model wrote a step here."""
    is_copy = step.get("is_copied_context")
    return step.get("source") == "agent" and not is_copy and step.get("llm_call_count") != 0


def trajectory(row: Row, context: Context, name: str = "steps") -> list[tuple[str, dict[str, Any]]]:
    """(name, record) of its rows, and of those of agents that it delegated to. There is no reward: that is in
    `result.json` of the trial's folder, see `harbor`."""
    agent = entry(row.get("agent"), "agent")
    meta = omit(row, _COLUMNS) | {"agent": omit(agent, ())}
    parts = list[tuple[str, dict[str, Any]]]()
    values = objects(row["steps"], "steps")
    calls = [step.get("llm_call_count") for step in values]
    merged = any(integer(count, "llm_call_count") > 1 for count in calls if count is not None)
    for i, record in enumerate(records([_step(step, i, merged) for i, step in enumerate(values)], context)):
        record["meta"] = record["meta"] | meta
        record["model"] = agent.get("model_name")
        parts.append((f"{name}[{i}]", record))
    for i, delegated in enumerate(listed(row.get("subagent_trajectories"), "subagent_trajectories")):
        location = f"subagent_trajectories[{i}]"
        for part, record in trajectory(delegated, context, f"{name}.{location}"):
            record["meta"]["subagent"] = delegated.get("trajectory_id")
            parts.append((part, record))
    # The session, where it has several rows, here or in the trajectory that it continues or that continues
    # it: Harbor's Terminus names that one SESSION-cont-NUMBER.
    episode, session = None, row.get("session_id") or row.get("trajectory_id")
    if session is not None:
        session, continues, _ = text(session, "session_id").partition("-cont-")
        is_one = not continues and len(parts) < 2 and not row.get("continued_trajectory_ref")
        episode = None if is_one else session
    return [(part, record | {"episode": episode}) for part, record in parts]


def _step(step: Row, i: int, merged: bool) -> AtifStep:
    """`merged`: several calls are one step somewhere, so that the tokens of calls can't be trusted."""
    name = f"steps[{i}]"
    if integer(step.get("step_id"), f"{name}.step_id") != i + 1:
        raise Refused(
            f"{name}.step_id: expected {i + 1}, got {step['step_id']}: steps are missing or out of order"
        )
    role = one_of(step.get("source"), _ROLES, f"{name}.source")
    if role != "assistant":
        wrong = next((key for key in _AGENT_ONLY if step.get(key) is not None), None)
        if wrong is not None:
            raise Refused(f"{name}.{wrong}: expected only in steps of the agent, got one of the {role}")
    is_own = is_call(step)
    metrics = entry(step.get("metrics"), f"{name}.metrics")
    message: Message = {"role": role, "content": plain(step.get("message"), f"{name}.message")}
    if step.get("reasoning_content") is not None:
        message["reasoning_content"] = text(step["reasoning_content"], f"{name}.reasoning_content")
    calls = listed(step.get("tool_calls"), f"{name}.tool_calls")
    if calls:
        message["tool_calls"] = [
            call(c.get("function_name"), c.get("arguments"), c.get("tool_call_id")) for c in calls
        ]
    return AtifStep(
        message,
        _observed(step, role, name),
        is_own,
        None if merged or not is_own else _tokens(metrics, f"{name}.metrics"),
        omit(step, _STEP) | omit(metrics, _IDS),
    )


def _observed(step: Row, role: str, name: str) -> list[Message]:
    """Results of tools; what belongs to no call is said by the user, or by the system after its step."""
    location = f"{name}.observation"
    messages = []
    for result in listed(entry(step.get("observation"), location).get("results"), f"{location}.results"):
        message: Message = {"role": "user" if role == "assistant" else role}
        if result.get("source_call_id") is not None:
            message = {"role": "tool", "tool_call_id": result["source_call_id"]}
        messages.append(message | {"content": plain(result.get("content"), f"{location}.results.content")})
    return messages


def _tokens(metrics: Row, name: str) -> Tokens | None:
    if metrics.get("prompt_token_ids") is None or metrics.get("completion_token_ids") is None:
        return None
    prompt, completion = (integers(metrics[key], f"{name}.{key}") for key in _IDS[:2])
    logp = metrics.get("logprobs")
    if logp is None:
        return Tokens(prompt, completion, [None] * len(completion))
    return Tokens(prompt, completion, numbers(logp, f"{name}.logprobs", len(completion)))
