"""ATIF, the Agent Trajectory Interchange Format: what Harbor, and many agents, write of a session.

Fields as in atif 1.8.0: atif/trajectory.py, step.py, metrics.py, observation_result.py. Steps that were
copied from an earlier trajectory (`is_copied_context`), and those of no model (`llm_call_count` 0), are
context.
"""

from __future__ import annotations

from typing import Any

from agro.errors import Refused
from agro.formats.fields import entry, integer, integers, numbers, objects, one_of, rest, text
from agro.formats.nested import call, listed, plain
from agro.formats.protocol import Context, Format, Item, Row
from agro.formats.steps import Message, Step, Tokens, records

_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")
_IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")
_STEP = ("step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "metrics")
_TAKEN = ("schema_version", "agent", "steps", "subagent_trajectories")


def is_trajectory(row: Row) -> bool:
    return str(row.get("schema_version", "")).startswith("ATIF-v") and "steps" in row


def _read(row: Row, context: Context) -> list[Item]:
    """A trajectory has no reward: that is in `result.json` of the trial's folder, see `harbor`."""
    return [Item.of(record, name) for name, record in trajectory(row, context)]


def trajectory(row: Row, context: Context, name: str = "steps") -> list[tuple[str, dict[str, Any]]]:
    """(name, record) of its rows, and of those of agents that it delegated to."""
    agent = entry(row.get("agent"), "agent")
    meta = rest(row, _TAKEN) | {"agent": rest(agent, ())}
    found = list[tuple[str, dict[str, Any]]]()
    for i, record in enumerate(records(_steps(row), context)):
        record["meta"] = record["meta"] | meta
        record["model"] = agent.get("model_name")
        found.append((f"{name}[{i}]", record))
    for i, delegated in enumerate(listed(row.get("subagent_trajectories"), "subagent_trajectories")):
        where = f"subagent_trajectories[{i}]"
        for part, record in trajectory(delegated, context, f"{name}.{where}"):
            record["meta"]["subagent"] = delegated.get("trajectory_id")
            found.append((part, record))
    episode = _episode(row, len(found))
    return [(part, record | {"episode": episode}) for part, record in found]


def _episode(row: Row, rows: int) -> str | None:
    """The session, where it has several rows, here or in the trajectory that it continues or that continues
    it: Harbor's Terminus names that one SESSION-cont-NUMBER."""
    name = row.get("session_id") or row.get("trajectory_id")
    if name is None:
        return None
    session, continues, _ = text(name, "session_id").partition("-cont-")
    return session if continues or rows > 1 or row.get("continued_trajectory_ref") else None


def _steps(row: Row) -> list[Step]:
    given = objects(row["steps"], "steps")
    calls = [step.get("llm_call_count") for step in given]
    merged = any(integer(count, "llm_call_count") > 1 for count in calls if count is not None)
    return [_step(step, i, merged) for i, step in enumerate(given)]


def _step(step: Row, i: int, merged: bool) -> Step:
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
    is_own = role == "assistant" and not step.get("is_copied_context") and step.get("llm_call_count") != 0
    metrics = entry(step.get("metrics"), f"{name}.metrics")
    return Step(
        _message(step, role, name),
        _observed(step, role, name),
        is_own,
        None if merged or not is_own else _tokens(metrics, f"{name}.metrics"),
        rest(step, _STEP) | rest(metrics, _IDS),
    )


def _message(step: Row, role: str, name: str) -> Message:
    message: Message = {"role": role, "content": plain(step.get("message"), f"{name}.message")}
    if step.get("reasoning_content") is not None:
        message["reasoning_content"] = text(step["reasoning_content"], f"{name}.reasoning_content")
    calls = listed(step.get("tool_calls"), f"{name}.tool_calls")
    if calls:
        message["tool_calls"] = [
            call(c.get("function_name"), c.get("arguments"), c.get("tool_call_id")) for c in calls
        ]
    return message


def _observed(step: Row, role: str, name: str) -> list[Message]:
    """Results of tools; what belongs to no call is said by the user, or by the system after its step."""
    where = f"{name}.observation"
    found = []
    for result in listed(entry(step.get("observation"), where).get("results"), f"{where}.results"):
        message: Message = {"role": "user" if role == "assistant" else role}
        if result.get("source_call_id") is not None:
            message = {"role": "tool", "tool_call_id": result["source_call_id"]}
        found.append(message | {"content": plain(result.get("content"), f"{where}.results.content")})
    return found


def _tokens(metrics: Row, name: str) -> Tokens | None:
    if metrics.get("prompt_token_ids") is None or metrics.get("completion_token_ids") is None:
        return None
    prompt, completion = (integers(metrics[key], f"{name}.{key}") for key in _IDS[:2])
    logp = metrics.get("logprobs")
    if logp is None:
        return Tokens(prompt, completion, [None] * len(completion))
    return Tokens(prompt, completion, numbers(logp, f"{name}.logprobs", len(completion)))


FORMATS = (
    Format(
        "atif",
        "ATIF: an agent's trajectory",
        "episodes",
        "atif 1.8.0, Harbor 0.25.0: TRIAL/agent/trajectory.json",
        is_trajectory,
        _read,
        carries=("tokens", "behavior_logp"),
    ),
)
