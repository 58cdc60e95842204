"""Read sessions of coding agents (Claude Code's and Codex's JSON Lines), and trajectories of SWE-agent and
mini-swe-agent.

A new response begins if a rewind or a summary rewrites the history, and for each subagent. None has a reward.
Claude Code's files lack the system prompt and the tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit
from agro.io.jsonlines import Line
from agro.logs import exchanges
from agro.logs.exchanges import Message, blocks
from agro.logs.protocol import Context, Item, Row
from agro.logs.records import exchange, system
from agro.logs.values import identified, integer, wrong
from agro.types.conversation import normalized_message


def gather(lines: Iterator[Line]) -> Iterator[Line]:
    """One record of all events of a file. A broken line is refused alone if it is the last, else the file."""
    events, size, head, broken = list[Row](), 0, None, None
    for line in lines:
        head, size = head or line, size + line.size
        if broken is not None:
            reason = f"{broken.where}: {broken.error}: without this line what follows it can't be understood"
            yield head._replace(value={}, error=reason)
            return
        if line.error:
            broken = line
        else:
            events.append(line.value)
    if head is not None and events:
        yield head._replace(value={"events": events}, size=size, error=None)
    if broken is not None:
        yield broken


@dataclass
class History:
    """Messages that the model saw and wrote; those before `begin` belong to an earlier response."""

    messages: list[Message]
    begin: int = 0
    fields: dict[str, Any] = field(default_factory=dict)  # further fields of the record


def responses(histories: Sequence[History], session: Any, meta: dict[str, Any]) -> list[Item]:
    """One item per history with a new turn. Several are parts of one episode."""
    records = list[dict[str, Any]]()
    for history in histories:
        sampled = [
            i for i, m in enumerate(history.messages) if i >= history.begin and m["role"] == "assistant"
        ]
        if not sampled:
            continue
        if sampled[0] == 0:
            raise Refused("events: expected a message before the first one of the assistant, got none")
        turns = history.messages[sampled[0] : sampled[-1] + 1]
        extras = {**history.fields, "meta": meta | history.fields.get("meta", {})}
        records.append(exchange(history.messages[: sampled[0]], turns, ("events", "events"), **extras))
    if not records:
        raise Refused("events: expected a turn of the assistant, got none")
    if len(records) > 1 and session is not None:
        records = [record | {"episode": str(session)} for record in records]
    return [Item.of(record, f"response[{i}]") for i, record in enumerate(records)]


@dataclass
class _MessageNode:
    """A message of Claude Code, which may span several lines, one per block or tool result."""

    role: str
    parent: str | None
    event: Row  # its first line
    blocks: list[Any] = field(default_factory=list)


def read_claude_code(row: Row, context: Context) -> list[Item]:
    events = objects(row.get("events", [row]), "events")
    nodes, errors = _nodes(events)
    parents = {node.parent for node in nodes.values()}
    histories, seen = list[History](), set[str]()
    for leaf in (key for key in nodes if key not in parents):
        path = list[str]()
        position: str | None = leaf
        while position is not None:
            path.insert(0, position)
            position = nodes[position].parent
        histories.append(_history([nodes[key] for key in path], sum(key in seen for key in path)))
        seen.update(path)
    header = next((event for event in events if "cwd" in event), events[0])
    meta = {name: header[name] for name in ("cwd", "gitBranch", "version") if header.get(name)}
    meta |= {"api_errors": errors} if errors else {}
    return responses(histories, header.get("sessionId"), meta)


def _nodes(events: list[dict[str, Any]]) -> tuple[dict[str, _MessageNode], int]:
    """The messages in order, each under a key, and the number of failed calls."""
    nodes: dict[str, _MessageNode] = {}
    # The message of each event, or the last one before it.
    event_messages: dict[Any, str | None] = {}
    call_messages: dict[Any, str] = {}
    errors, previous = 0, None
    for i, event in enumerate(events):
        location = f"events[{i}]"
        if event.get("uuid") is None:  # a title, a snapshot, a summary for the list of sessions
            continue
        above = event.get("parentUuid")
        if above is not None and above not in event_messages:
            raise Refused(f"{location}.parentUuid: expected an event before it, got {above!r:.80}")
        parent = event_messages.get(above)
        kind = event.get("type")
        is_failed = bool(event.get("isApiErrorMessage"))
        if kind not in ("user", "assistant") or is_failed:
            event_messages[event["uuid"]] = parent
            errors += is_failed
            continue
        message = entry(event.get("message"), f"{location}.message")
        parts = blocks(message.get("content"), location)
        key = str(event["uuid"])
        if kind == "assistant":  # its blocks are on several lines
            key = str(message.get("id") or key)
        calls = [part["tool_use_id"] for part in parts if part.get("tool_use_id")]
        answered = call_messages.get(calls[0]) if calls else None
        if kind == "user" and answered is not None:
            key, parent = f"results of {answered}", answered
        elif "parentUuid" not in event or (kind == "assistant" and above is None):
            parent = previous  # lines without links are consecutive
        node = nodes.setdefault(key, _MessageNode(str(kind), parent, event))
        node.blocks += parts
        call_messages |= {part["id"]: key for part in parts if part.get("type") == "tool_use"}
        event_messages[event["uuid"]] = previous = key
    return nodes, errors


def _history(path: list[_MessageNode], shared: int) -> History:
    """The history along a path, whose first `shared` messages belong to an earlier response."""
    messages, begin = list[Message](), 0
    for i, node in enumerate(path):
        messages += normalized_message(
            {"role": node.role, "content": node.blocks}, f"event {node.event['uuid']}"
        )
        begin = len(messages) if i < shared else begin
    replies = [entry(node.event["message"], "message") for node in path if node.role == "assistant"]
    meta = {name: path[0].event[name] for name in ("isSidechain", "agentId") if path[0].event.get(name)}
    model = replies[-1].get("model") if replies else None
    return History(messages, begin, {"model": model, "meta": meta})


_NO_MESSAGES = (
    *("ghost_snapshot", "compaction", "compaction_summary", "context_compaction", "additional_tools"),
)
_SESSION_KEYS = ("id", "cwd", "originator", "cli_version", "source", "model_provider", "git")


def read_codex(row: Row, context: Context) -> list[Item]:
    session: Row = {}
    model: Any = None
    past = list[History]()  # rewritten histories
    messages, begin = list[Message](), 0
    turns = list[int]()  # the number of messages before each turn that can be rolled back
    for i, event in enumerate(objects(row.get("events", [row]), "events")):
        location, kind = f"events[{i}].payload", event.get("type")
        payload = entry(event.get("payload"), location)
        rewritten: list[Message] | None = None
        if kind == "session_meta" and not session:
            session = payload
            prompt = payload.get("base_instructions")
            prompt = prompt.get("text") if isinstance(prompt, dict) else prompt
            messages += [system(prompt)] if isinstance(prompt, str) and prompt else []
        elif kind == "turn_context":
            model = payload.get("model", model)
        elif kind == "response_item":
            _add_items(messages, [payload], location)
        elif kind == "compacted":
            rewritten, remaining = list[Message](), list[int]()
            location = f"{location}.replacement_history"
            _add_items(rewritten, objects(payload.get("replacement_history"), location), location)
        elif kind == "event_msg" and payload.get("type") in ("task_started", "turn_started"):
            turns.append(len(messages))
        elif kind == "event_msg" and payload.get("type") == "thread_rolled_back":
            back = integer(payload.get("num_turns"), f"{location}.num_turns")
            if not 0 < back <= len(turns):
                raise wrong(f"{location}.num_turns", f"1 to {len(turns)} turns", back)
            rewritten, remaining = messages[: turns[-back]], turns[:-back]
        if rewritten is not None:
            past.append(History(messages, begin, {"model": model}))
            messages, begin, turns = rewritten, len(rewritten), remaining
    meta = {name: session[name] for name in _SESSION_KEYS if session.get(name) is not None}
    return responses([*past, History(messages, begin, {"model": model})], session.get("id"), meta)


def _add_items(messages: list[Message], items: list[dict[str, Any]], name: str) -> None:
    for item in items:
        if item.get("type") not in _NO_MESSAGES:
            exchanges.add_item(messages, item, name)


def identity(row: Row) -> str:
    events = objects(row.get("events", [row]), "events")
    session = next((e["sessionId"] for e in events if e.get("sessionId")), None)
    meta = events[0].get("payload")
    session = meta.get("id") if session is None and isinstance(meta, dict) else session
    return identified({"events": events}, session, len(events))


_EXTRA_KEYS = (
    *("thought", "action", "agent", "message_type"),
    *("tool_call_ids", "tags", "cache_control", "extra"),
)
_COLUMNS = ("trajectory", "history", "messages", "info", "attempts", "replay_config", "trajectory_format")


def read_swe_agent(row: Row, context: Context) -> list[Item]:
    """Read a trajectory, with all attempts of an agent that retries. Demonstrations are context."""
    attempts = objects(row.get("attempts") or [row], "attempts")
    items = list[Item]()
    for i, attempt in enumerate(attempts):
        history = objects(attempt.get("history"), "history")
        messages = [_message(message, f"history[{k}]") for k, message in enumerate(history)]
        last_demo = max((k for k, message in enumerate(history) if message.get("is_demo")), default=-1)
        info = entry(attempt.get("info"), "info")
        meta = omit(row, _COLUMNS) | omit(info, ())
        (item,) = responses([History(messages, last_demo + 1)], None, meta)
        items.append(Item.of(item.records[0], f"attempts[{i}]"))
    return items


def _message(message: Row, name: str) -> Message:
    turn = {key: x for key, x in message.items() if key not in (*_EXTRA_KEYS, "is_demo")}
    if turn.get("role") == "tool" and message.get("tool_call_ids"):
        turn["tool_call_id"] = message["tool_call_ids"][0]
    (parsed,) = exchanges.messages([turn], name)
    return parsed


def read_mini(row: Row, context: Context) -> list[Item]:
    history = [message for message in objects(row["messages"], "messages") if message.get("role") != "exit"]
    messages = [_message(message, f"messages[{k}]") for k, message in enumerate(history)]
    info = entry(row.get("info"), "info")
    model = entry(entry(info.get("config"), "info.config").get("model"), "info.config.model")
    fields = {"model": model.get("model_name")}
    return responses([History(messages, fields=fields)], None, omit(row, _COLUMNS) | omit(info, ("config",)))
