"""Sessions of coding agents, and trajectories of SWE-agent."""

from __future__ import annotations

from typing import Any

from example import Example, document

ASKED = {"role": "user", "content": "List the files."}
LIST = {"id": "c1", "type": "function", "function": {"name": "Bash", "arguments": {"command": "ls"}}}
PEEK = {"id": "c2", "type": "function", "function": {"name": "Read", "arguments": {"path": "a"}}}


def line(uuid: str, parent: str | None, kind: str, content: Any, **others: Any) -> dict[str, Any]:
    """A line of Claude Code: of the assistant one block of a message, `id` the message's."""
    message = {"role": kind, "content": content}
    if kind == "assistant":
        more = {
            "id": others.pop("id", f"msg_{uuid}"),
            "type": "message",
            "model": "claude-m",
            "stop_reason": None,
        }
        message |= more
    return {
        "parentUuid": parent,
        "isSidechain": False,
        "userType": "external",
        "cwd": "/w",
        "sessionId": "s",
        "version": "2.1.183",
        "gitBranch": "main",
        "type": kind,
        "message": message,
        "uuid": uuid,
        "timestamp": "2026-06-19T04:58:18.524Z",
        **others,
    }


def use(call: dict[str, Any]) -> list[dict[str, Any]]:
    function = call["function"]
    return [{"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}]


def result(id: str, text: str) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": id, "content": text, "is_error": False}]


CLAUDE = [
    {"type": "file-history-snapshot", "messageId": "m", "snapshot": {"trackedFileBackups": {}}},
    {"type": "permission-mode", "permissionMode": "default", "sessionId": "s"},
    line("u1", None, "user", "List the files."),
    line("h1", "u1", "attachment", "") | {"type": "attachment", "attachment": {"type": "hook_success"}},
    line("a1", "h1", "assistant", [{"type": "thinking", "thinking": "Hm.", "signature": "x"}], id="msg_1"),
    line("a2", "a1", "assistant", use(LIST), id="msg_1"),
    line("r1", "a2", "user", result("c1", "a"), toolUseResult={"stdout": "a"}),  # two calls at once
    line("a3", "a2", "assistant", use(PEEK), id="msg_1"),
    line("r2", "a3", "user", result("c2", "1"), toolUseResult={"stdout": "1"}),
    line("e1", "r2", "assistant", [{"type": "text", "text": "API Error: 529"}], isApiErrorMessage=True),
    line("a4", "e1", "assistant", [{"type": "text", "text": "One file."}]),
    line("u2", "a4", "user", [{"type": "text", "text": "Sure?"}]),
    line("a5", "u2", "assistant", [{"type": "text", "text": "Yes."}]),
    line("u3", "a4", "user", "And empty ones?"),  # a rewind: the answer before it is of another branch
    line("a6", "u3", "assistant", [{"type": "text", "text": "None."}]),
]
TOOLS = [
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [LIST, PEEK]},
    {"role": "tool", "tool_call_id": "c1", "content": "a"},
    {"role": "tool", "tool_call_id": "c2", "content": "1"},
    {"role": "assistant", "content": "One file."},
]
BRANCH = {"cwd": "/w", "gitBranch": "main", "version": "2.1.183", "api_errors": 1}


def rollout(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {"timestamp": "2026-03-26T10:00:00.000Z", "type": kind, "payload": payload}


def item(kind: str, **others: Any) -> dict[str, Any]:
    return rollout("response_item", {"type": kind, **others})


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return item("message", role=role, content=[{"type": kind, "text": text}])


CODEX = [
    rollout(
        "session_meta",
        {
            "id": "01a0",
            "cwd": "/w",
            "originator": "codex-tui",
            "cli_version": "0.150.0",
            "base_instructions": {"text": "You code."},
        },
    ),
    rollout("event_msg", {"type": "task_started", "turn_id": "1"}),
    rollout("turn_context", {"model": "gpt-m", "cwd": "/w"}),
    said("developer", "No network."),
    said("user", "List the files."),
    rollout("event_msg", {"type": "user_message", "message": "List the files."}),
    item("reasoning", summary=[{"type": "summary_text", "text": "Looking"}], encrypted_content="x"),
    item("function_call", name="shell", arguments='{"command": ["ls"]}', call_id="c1"),
    item("function_call_output", call_id="c1", output="a"),
    item("custom_tool_call", name="apply_patch", input="*** Begin", call_id="c2", status="completed"),
    item("custom_tool_call_output", call_id="c2", output=[{"type": "input_text", "text": "ok"}]),
    item("ghost_snapshot", ghost_commit={"id": "1"}),
    said("assistant", "One file."),
    rollout("event_msg", {"type": "task_started", "turn_id": "2"}),
    said("user", "Sure?"),
    said("assistant", "No."),
    rollout("event_msg", {"type": "thread_rolled_back", "num_turns": 1}),
    rollout("event_msg", {"type": "task_started", "turn_id": "3"}),
    said("user", "Really?"),
    said("assistant", "Yes."),
    rollout(
        "compacted",
        {"message": "", "replacement_history": [said("user", "You listed the files.")["payload"]]},
    ),
    said("assistant", "Done."),
]
SHELL = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": {"command": ["ls"]}}}
PATCH = {"id": "c2", "type": "function", "function": {"name": "apply_patch", "arguments": "*** Begin"}}
SEEN: list[dict[str, Any]] = [
    {"role": "system", "content": "You code."},
    {"role": "system", "content": "No network."},
    ASKED,
]
CODED: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "tool_calls": [SHELL]},
    {"role": "tool", "tool_call_id": "c1", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [PATCH]},
    {"role": "tool", "tool_call_id": "c2", "content": "ok"},
    {"role": "assistant", "content": "One file."},
]
ROLLED = {"id": "01a0", "cwd": "/w", "originator": "codex-tui", "cli_version": "0.150.0"}


def turn(id: str, kind: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"id": id, "timestamp": "2026-01-01T00:00:00Z", "type": kind, "content": content, **others}


LISTED: dict[str, Any] = {
    "id": "c1",
    "name": "list",
    "args": {"path": "."},
    "result": [{"functionResponse": {"id": "c1", "name": "list", "response": {"output": "a"}}}],
    "status": "success",
    "resultDisplay": "1 item",
}
GEMINI: dict[str, Any] = {"sessionId": "s", "projectHash": "h", "startTime": "2026-01-01T00:00:00Z"}
SPOKEN = [
    turn("1", "user", "List the files."),
    turn("2", "info", "Update available."),
    turn(
        "3",
        "gemini",
        "",
        toolCalls=[LISTED],
        thoughts=[{"subject": "Looking", "description": "For files."}],
        model="gemini-m",
    ),
    turn("4", "gemini", "One file.", tokens=None, model="gemini-m"),
]
CALLED = {"id": "c1", "type": "function", "function": {"name": "list", "arguments": {"path": "."}}}
GEMINI_TURNS = [
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "a"},
    {"role": "assistant", "content": "One file."},
]
STEP = {"agent": "primary", "message_type": "action"}
SWE: dict[str, Any] = {
    "environment": "main",
    "trajectory": [
        {"action": "ls", "observation": "a", "response": "Let me look.", "thought": "Let me look."}
    ],
    "history": [
        {"role": "system", "content": "You have a shell.", "agent": "primary"},
        {"role": "assistant", "content": "A demonstration.", "agent": "primary", "is_demo": True},
        {"role": "user", "content": "List the files.", "agent": "primary"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "thought": "Let me look.",
            "action": "ls",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": {}}}],
            **STEP,
        },
        {"role": "tool", "content": "a", "tool_call_ids": ["c1"], "agent": "primary"},
        {"role": "assistant", "content": "One file.", "tool_calls": None, "thinking_blocks": None, **STEP},
    ],
    "info": {"exit_status": "submitted", "submission": "diff", "model_stats": {"api_calls": 2}},
    "replay_config": "{}",
}

EXAMPLES = (
    Example(
        "claude-code",
        CLAUDE,
        [
            {
                "prompt": [ASKED],
                "response": "Yes.",
                "reward": None,
                "source": "claude-m",
                "episode": "s",
                "meta": {
                    **BRANCH,
                    "continuation": [
                        *TOOLS,
                        {"role": "user", "content": "Sure?"},
                        {"role": "assistant", "content": "Yes."},
                    ],
                },
            },
            {
                "prompt": [ASKED, *TOOLS, {"role": "user", "content": "And empty ones?"}],
                "response": "None.",
                "source": "claude-m",
                "episode": "s",
                "meta": BRANCH,
            },
        ],
        file="be29.jsonl",
    ),
    Example(  # an agent that it delegates to
        "claude-code",
        [
            line("u1", None, "user", "Look.", isSidechain=True, agentId="a7"),
            line(
                "a1", "u1", "assistant", [{"type": "text", "text": "Seen."}], isSidechain=True, agentId="a7"
            ),
        ],
        [{"prompt": [{"role": "user", "content": "Look."}], "response": "Seen.", "episode": None}],
        corrupt={
            "parentUuid": ("gone", r"events\[0\].parentUuid: expected an event before it, got 'gone'"),
            "message": (
                {"role": "user", "content": [{"type": "image", "source": {}}]},
                "event u1.content: expected text, got a part of type image",
            ),
        },
    ),
    Example(
        "codex",
        CODEX,
        [
            {
                "prompt": SEEN,
                "response": "No.",
                "source": "gpt-m",
                "episode": "01a0",
                "meta": {
                    **ROLLED,
                    "continuation": [
                        *CODED,
                        {"role": "user", "content": "Sure?"},
                        {"role": "assistant", "content": "No."},
                    ],
                },
            },
            {
                "prompt": [*SEEN, *CODED, {"role": "user", "content": "Really?"}],
                "response": "Yes.",
                "episode": "01a0",
            },
            {"prompt": [{"role": "user", "content": "You listed the files."}], "response": "Done."},
        ],
        file="rollout-2026-03-26T10-00-00-01a0.jsonl",
    ),
    Example(
        "gemini-cli",
        [{**GEMINI, "lastUpdated": "2026-01-01T00:00:01Z", "messages": SPOKEN, "kind": "main"}],
        [
            {
                "prompt": [ASKED],
                "response": "One file.",
                "source": "gemini-m",
                "meta": {
                    "projectHash": "h",
                    "startTime": "2026-01-01T00:00:00Z",
                    "kind": "main",
                    "continuation": GEMINI_TURNS,
                },
            }
        ],
        file="session-2026-01-01T00-00-s.json",
        write=document,
        corrupt={
            "messages": (
                [turn("1", "user", [{"inlineData": {"mimeType": "image/png"}}])],
                r"messages\[0\].content: expected text, got a part of type text",
            )
        },
    ),
    Example(  # JSON Lines: a message again when it is complete, a rewind, and metadata that changes
        "gemini-cli",
        [
            GEMINI,
            *SPOKEN[:2],
            turn("3", "gemini", ""),
            *SPOKEN[2:],
            {"$set": {"summary": "Files."}},
            turn("5", "user", [{"text": "Sure?"}]),
            turn("6", "gemini", "No.", model="gemini-m"),
            {"$rewindTo": "5"},
            turn("7", "user", [{"text": "Really?"}]),
            turn("8", "gemini", [{"text": "Yes."}], model="gemini-m"),
        ],
        [
            {"prompt": [ASKED], "response": "No.", "episode": "s"},
            {
                "prompt": [ASKED, *GEMINI_TURNS, {"role": "user", "content": "Really?"}],
                "response": "Yes.",
                "episode": "s",
            },
        ],
        file="session-2026-01-01T00-00-s.jsonl",
    ),
)
