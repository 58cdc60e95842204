"""Harbor: folders of trials, and of jobs, which hold trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, read_object
from agro.io.jsonlines import Line
from agro.logs.fields import listed, total
from agro.logs.protocol import Context, Item, Row, line_of
from agro.types.conversation import prompt_hash
from agro_formats.atif import is_call, is_trajectory, trajectory

_AGENT_EXCEPTIONS = {  # exceptions after which the reward is that of what the agent did
    *("AgentTimeoutError", "ContextWindowExceededError", "OutputTokenExceededError"),
    *("ContextLengthExceededError", "OutputLengthExceededError"),
    *("AgentSafetyRefusalError", "ContentPolicyViolationError"),
}
_META_COLUMNS = ("task_name", "task_checksum", "trial_name", "source", "agent_info")


def _is_trial(path: Path) -> bool:
    return (path / "result.json").is_file() and ((path / "agent").is_dir() or (path / "steps").is_dir())


def _trials(path: Path) -> list[Path]:
    return [path] if _is_trial(path) else sorted(p for p in path.iterdir() if _is_trial(p))


def is_folder(path: Path) -> bool:
    return path.is_dir() and bool(_trials(path))


def records(path: Path) -> Iterator[Line]:
    """A record a trial: its `result.json`, and its trajectories in order."""
    for i, trial in enumerate(_trials(path), 1):
        yield line_of(str(trial), i, partial(_trial, trial))


def _trial(trial: Path) -> dict[str, Any]:
    result = read_object(trial / "result.json")
    # Those of the agent, each with the ones that continue it; of each step where the task has several.
    names = [str(s.get("step_name")) for s in listed(result.get("step_results"), "step_results")]
    roots = [trial, *(trial / "steps" / name for name in names)]
    folders = [p / "agent" for p in roots if (p / "agent" / "trajectory.json").is_file()]
    if not folders:
        raise Refused("agent/trajectory.json: missing; the agent wrote none, so there is no text")
    return result | {"trajectories": [row for folder in folders for row in _continued(folder)]}


def _continued(folder: Path) -> Iterator[dict[str, Any]]:
    name, seen = "trajectory.json", set[str]()
    while name not in seen:
        seen.add(name)
        row = read_object(folder / name)
        if not is_trajectory(row):
            raise Refused(f"{name}: expected a trajectory with schema_version ATIF-v…, and steps")
        yield row
        name = Path(str(row.get("continued_trajectory_ref") or name)).name


def read(row: Row, context: Context) -> list[Item]:
    """Responses of a task are a group by its prompt: the same words in another environment are another
    task."""
    result = entry(row.get("verifier_result"), "verifier_result")
    rewards = entry(result.get("rewards"), "verifier_result.rewards")
    reward, invalid = _reward(row, rewards, context)
    meta = {name: row[name] for name in _META_COLUMNS if row.get(name) is not None}
    meta |= {"rewards": rewards} | ({"reward_error": invalid} if invalid else {})
    task = row.get("task_checksum") or row["task_name"]
    rows = _with_tokens(objects(row["trajectories"], "trajectories"), row)
    items, episode = list[Item](), f"{row['trial_name']}:{row.get('id', '')}"
    for i, part in enumerate(rows):
        for name, record in trajectory(part, context, f"trajectories[{i}]"):
            group = f"{task}:{prompt_hash(record['prompt'])}"
            record |= {"reward": reward, "episode": episode, "prompt_id": group}
            items.append(Item.of(record | {"meta": record["meta"] | meta}, name))
    if len(items) == 1:
        del items[0].records[0]["episode"]
    return items


def identity(row: Row) -> str:
    return f"harbor:{row.get('id') or row['trial_name']}"


def _reward(row: Row, rewards: Row, context: Context) -> tuple[float | None, str]:
    """The reward, or why there is none: a failed sandbox or provider says nothing about the agent."""
    if not rewards:
        return None, "the verifier gave no reward"
    results = [row, *listed(row.get("step_results"), "step_results")]
    exceptions = [entry(result.get("exception_info"), "exception_info") for result in results]
    for name in [str(one.get("exception_type")) for one in exceptions if one]:
        if name not in _AGENT_EXCEPTIONS:
            return None, f"{name}: the trial failed, so the verifier's reward isn't of what the agent did"
    return total(rewards, list(rewards), context.rewards), ""


def _with_tokens(rows: list[dict[str, Any]], result: Row) -> Sequence[dict[str, Any]]:
    """The trajectories with tokens of `rollout_details`, where the steps have none.

    Its first one is of the agent's own calls, in order. It is used where there are as many as steps.
    """
    agent = entry(result.get("agent_result"), "agent_result")
    details = listed(agent.get("rollout_details"), "agent_result.rollout_details")
    steps = [s for row in rows for s in objects(row["steps"], "steps") if is_call(s)]
    if not details or any(entry(s.get("metrics"), "metrics").get("completion_token_ids") for s in steps):
        return rows
    calls = [details[0].get(name) or [] for name in ("prompt_token_ids", "completion_token_ids", "logprobs")]
    if not len(calls[0]) == len(calls[1]) == len(steps):
        return rows
    logps = calls[2] if len(calls[2]) == len(steps) else [None] * len(steps)
    for step, prompt, completion, logp in zip(steps, calls[0], calls[1], logps):
        ids = {"prompt_token_ids": prompt, "completion_token_ids": completion, "logprobs": logp}
        step["metrics"] = {**entry(step.get("metrics"), "metrics"), **ids}
    return rows
