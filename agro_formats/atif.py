"""Read ATIF, the Agent Trajectory Interchange Format, in which Harbor and many agents write sessions; and
Harbor's folders of trials, and of jobs, which hold trials.

The steps of an agent are rows of one episode, and a new row begins if history was rewritten. Steps copied
from an earlier trajectory (`is_copied_context`), and those without a model call (`llm_call_count` 0), are
context. Fields as in atif 1.8.0: atif/trajectory.py, step.py, metrics.py, observation_result.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, read_object, text
from agro.io.jsonlines import Line
from agro.logs.protocol import Context, Item, Row, line_of
from agro.logs.records import Record, call, exchange, fingerprinted
from agro.logs.values import integer, integers, listed, numbers, one_of, total
from agro.types.conversation import prompt_hash, text_of

Message = dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a model call: those of prompt and completion, and the known log-probs of the latter."""

    prompt: list[int]
    completion: list[int]
    logp: list[float | None]


@dataclass(frozen=True)
class AtifStep:
    """A step of the user, the system or the agent as messages, with the observations after it."""

    message: Message
    observed: list[Message] = field(default_factory=list)
    is_own: bool = False  # whether the model wrote it here, so that it is learned from
    tokens: Tokens | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def is_inserted(self) -> bool:
        """Whether it is an assistant turn that the model didn't write here."""
        return self.message["role"] == "assistant" and not self.is_own


def records(steps: Sequence[AtifStep], context: Context) -> list[dict[str, Any]]:
    """Interchange records of the steps, split by their tokens if all own steps have them.

    Raises `Refused` if there is nothing to learn from, or nothing before it.
    """
    own_steps = [i for i, step in enumerate(steps) if step.is_own]
    if not own_steps:
        raise Refused(
            "steps: expected at least one that the agent's model wrote, and that isn't copied context"
        )
    start_step = own_steps[0]
    if start_step == 0:
        raise Refused("steps: expected one of the user or the system before the first of the agent")
    has_tokens = all(steps[i].tokens is not None for i in own_steps)
    records = []
    for start, end in _prompt_spans(steps, own_steps) if has_tokens else _turn_spans(steps, own_steps):
        piece = steps[start:end]
        final = max(i for i, step in enumerate(piece) if step.is_own)
        turns = [*_messages(piece[:final]), piece[final].message]
        details = [step.meta for step in piece if step.is_own]
        meta: dict[str, Any] = {"steps": details} if any(details) else {}
        if observed := [*piece[final].observed, *_messages(piece[final + 1 :])]:
            meta["observed_last"] = observed
        prompt = _messages(steps[: start_step if has_tokens else start])
        if (start != start_step and has_tokens) or any(step.is_inserted for step in piece):
            # Not a `continuation`: without these tokens its turns would be encoded after the wrong context.
            content = turns[-1].get("content") or ""
            record: Record = {"prompt": prompt, "response": content, "meta": {"turns": turns} | meta}
        else:
            record = exchange(prompt, turns, ("steps", "steps"), meta)
        if has_tokens:  # each call's prompt begins with all earlier tokens
            ids, mask, logp = list[int](), list[bool](), list[float | None]()
            for tokens in (step.tokens for step in piece if step.is_own and step.tokens):
                prompted = len(tokens.prompt) - len(ids)
                ids += tokens.prompt[len(ids) :] + tokens.completion
                mask += [False] * prompted + [True] * len(tokens.completion)
                logp += [None] * prompted + tokens.logp
            record |= {"tokens": ids, "mask": mask}
            if any(x is not None for x in logp):
                record["behavior_logp"] = logp
            if start != start_step:
                record["context_tokens"] = ids[: mask.index(True)]
            record = fingerprinted(record, context)
        records.append(record)
    return records


def _messages(steps: Sequence[AtifStep]) -> list[Message]:
    return [message for step in steps for message in (step.message, *step.observed)]


def _turn_spans(steps: Sequence[AtifStep], own_steps: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Spans from an own step to the next inserted assistant turn; everything before a span is its prompt."""
    begin: int | None = own_steps[0]
    while begin is not None:
        inserted = (i for i, step in enumerate(steps) if i > begin and step.is_inserted)
        end = next(inserted, len(steps))
        yield begin, end
        begin = next((i for i in own_steps if i >= end), None)


def _prompt_spans(steps: Sequence[AtifStep], own_steps: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Spans that begin at each own step whose prompt doesn't begin with all earlier tokens."""
    starts, prefix = list[int](), list[int]()
    for i in own_steps:
        tokens = steps[i].tokens
        assert tokens is not None
        if not starts or tokens.prompt[: len(prefix)] != prefix:
            starts.append(i)
        prefix = tokens.prompt + tokens.completion
    return zip(starts, [*starts[1:], len(steps)])


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
    """Whether the agent's model wrote a step in this trajectory."""
    is_copy = step.get("is_copied_context")
    return step.get("source") == "agent" and not is_copy and step.get("llm_call_count") != 0


def trajectory(row: Row, context: Context, name: str = "steps") -> list[tuple[str, dict[str, Any]]]:
    """(name, record) of its rows and those of its subagents. The reward isn't here, but in `result.json` of
    the trial's folder."""
    agent = entry(row.get("agent"), "agent")
    meta = omit(row, _COLUMNS) | {"agent": omit(agent, ("tool_definitions",))}
    parts = list[tuple[str, dict[str, Any]]]()
    values = objects(row["steps"], "steps")
    calls = [step.get("llm_call_count") for step in values]
    # A step that merges several calls makes the tokens of all calls unreliable.
    merged = any(integer(count, "llm_call_count") > 1 for count in calls if count is not None)
    for i, record in enumerate(records([_step(step, i, merged) for i, step in enumerate(values)], context)):
        record["meta"] |= meta
        record |= {"model": agent.get("model_name"), "tools": agent.get("tool_definitions")}
        parts.append((f"{name}[{i}]", record))
    for i, delegated in enumerate(listed(row.get("subagent_trajectories"), "subagent_trajectories")):
        for part, record in trajectory(delegated, context, f"{name}.subagent_trajectories[{i}]"):
            record["meta"]["subagent"] = delegated.get("trajectory_id")
            parts.append((part, record))
    # The session is the episode if it has several rows, here or in a trajectory before or after it, which
    # Harbor's Terminus names SESSION-cont-NUMBER.
    episode, session = None, row.get("session_id") or row.get("trajectory_id")
    if session is not None:
        session, continues, _ = text(session, "session_id").partition("-cont-")
        is_one = not continues and len(parts) < 2 and not row.get("continued_trajectory_ref")
        episode = None if is_one else session
    return [(part, record | {"episode": episode}) for part, record in parts]


def _step(step: Row, i: int, merged: bool) -> AtifStep:
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
    metrics = entry(step.get("metrics"), f"{name}.metrics")
    message: Message = {"role": role, "content": text_of(step.get("message"), f"{name}.message")}
    if step.get("reasoning_content") is not None:
        message["reasoning_content"] = text(step["reasoning_content"], f"{name}.reasoning_content")
    if calls := listed(step.get("tool_calls"), f"{name}.tool_calls"):
        message["tool_calls"] = [
            call(c.get("function_name"), c.get("arguments"), c.get("tool_call_id")) for c in calls
        ]
    # Results of tools. One without a call is a turn of the user, or of the system after its own step.
    location, observed = f"{name}.observation", []
    for result in listed(entry(step.get("observation"), location).get("results"), f"{location}.results"):
        turn: Message = {"role": "user" if role == "assistant" else role}
        if result.get("source_call_id") is not None:
            turn = {"role": "tool", "tool_call_id": result["source_call_id"]}
        observed.append(turn | {"content": text_of(result.get("content"), f"{location}.results.content")})
    is_own, tokens = is_call(step), None
    if is_own and not merged and all(metrics.get(key) is not None for key in _IDS[:2]):
        prompt, completion = (integers(metrics[key], f"{name}.metrics.{key}") for key in _IDS[:2])
        logp: list[float | None] = [None] * len(completion)
        if metrics.get("logprobs") is not None:
            logp = numbers(metrics["logprobs"], f"{name}.metrics.logprobs", len(completion))
        tokens = Tokens(prompt, completion, logp)
    return AtifStep(message, observed, is_own, tokens, omit(step, _STEP) | omit(metrics, _IDS))


_AGENT_EXCEPTIONS = {  # after these exceptions the reward still scores the agent
    *("AgentTimeoutError", "ContextWindowExceededError", "OutputTokenExceededError"),
    *("ContextLengthExceededError", "OutputLengthExceededError"),
    *("AgentSafetyRefusalError", "ContentPolicyViolationError"),
}
_TRIAL = ("task_name", "task_checksum", "trial_name", "source", "agent_info")  # for `meta`


def _trials(path: Path) -> list[Path]:
    """A trial's folder, or the trials in a job's folder."""
    trials = [
        folder
        for folder in (path, *sorted(path.iterdir()))
        if (folder / "result.json").is_file() and ((folder / "agent").is_dir() or (folder / "steps").is_dir())
    ]
    return [path] if path in trials else trials


def is_harbor(path: Path) -> bool:
    return path.is_dir() and bool(_trials(path))


def harbor_records(path: Path) -> Iterator[Line]:
    """One record per trial: its `result.json`, with its trajectories in order."""
    for i, trial in enumerate(_trials(path), 1):
        yield line_of(str(trial), i, partial(_trial, trial))


def _trial(trial: Path) -> dict[str, Any]:
    result = read_object(trial / "result.json")
    # The agent's trajectory, or one per step of the task, each followed by those that continue it.
    names = [str(s.get("step_name")) for s in listed(result.get("step_results"), "step_results")]
    roots = [trial, *(trial / "steps" / name for name in names)]
    folders = [p / "agent" for p in roots if (p / "agent" / "trajectory.json").is_file()]
    if not folders:
        raise Refused("agent/trajectory.json: missing; the agent wrote none, so there is no text")
    trajectories = []
    for folder in folders:
        name, seen = "trajectory.json", set[str]()
        while name not in seen:
            seen.add(name)
            row = read_object(folder / name)
            if not is_trajectory(row):
                raise Refused(f"{name}: expected a trajectory with schema_version ATIF-v…, and steps")
            trajectories.append(row)
            name = Path(str(row.get("continued_trajectory_ref") or name)).name
    return result | {"trajectories": trajectories}


def read_harbor(row: Row, context: Context) -> list[Item]:
    """Read a trial. Responses are grouped by task and prompt, since an equal prompt in another environment is
    another task."""
    result = entry(row.get("verifier_result"), "verifier_result")
    rewards = entry(result.get("rewards"), "verifier_result.rewards")
    # A failure of sandbox or provider says nothing about the agent.
    results = [row, *listed(row.get("step_results"), "step_results")] if rewards else []
    infos = [entry(each.get("exception_info"), "exception_info") for each in results]
    failures = [str(one.get("exception_type")) for one in infos if one]
    failure = next((name for name in failures if name not in _AGENT_EXCEPTIONS), None)
    reward, invalid = None, "" if rewards else "the verifier gave no reward"
    if failure is not None:
        invalid = f"{failure}: the trial failed, so the verifier's reward isn't of what the agent did"
    if not invalid:
        reward = total(rewards, list(rewards), context.rewards)
    meta = {name: row[name] for name in _TRIAL if row.get(name) is not None}
    meta |= {"rewards": rewards} | ({"reward_error": invalid} if invalid else {})
    task = row.get("task_checksum") or row["task_name"]
    rows = objects(row["trajectories"], "trajectories")
    _add_tokens(rows, row)
    items, episode = list[Item](), f"{row['trial_name']}:{row.get('id', '')}"
    for i, part in enumerate(rows):
        for name, record in trajectory(part, context, f"trajectories[{i}]"):
            group = f"{task}:{prompt_hash(record['prompt'])}"
            record |= {"reward": reward, "episode": episode, "prompt_id": group}
            items.append(Item.of(record | {"meta": record["meta"] | meta}, name))
    if len(items) == 1:
        del items[0].records[0]["episode"]
    return items


def harbor_identity(row: Row) -> str:
    return f"harbor:{row.get('id') or row['trial_name']}"


def _add_tokens(rows: list[dict[str, Any]], result: Row) -> None:
    """Add the tokens of `rollout_details` if the trajectories' steps have none.

    Its first entry has the agent's own calls, in order. It is used if there are as many calls as steps.
    """
    agent = entry(result.get("agent_result"), "agent_result")
    details = listed(agent.get("rollout_details"), "agent_result.rollout_details")
    steps = [s for row in rows for s in objects(row["steps"], "steps") if is_call(s)]
    if not details or any(entry(s.get("metrics"), "metrics").get("completion_token_ids") for s in steps):
        return
    prompts, completions, logps = (details[0].get(name) or [] for name in _IDS)
    if not len(prompts) == len(completions) == len(steps):
        return
    logps = logps if len(logps) == len(steps) else [None] * len(steps)
    for step, *calls in zip(steps, prompts, completions, logps):
        step["metrics"] = {**entry(step.get("metrics"), "metrics"), **dict(zip(_IDS, calls))}
