"""Trajectories of agents: ATIF and Harbor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from example import Example, document

AGENT = {"name": "terminus-2", "version": "2.0", "model_name": "m"}
LIST = {"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
SYSTEM = {"step_id": 1, "source": "system", "message": "You have a shell."}
ASK = {"step_id": 2, "source": "user", "message": "List the files."}
PROMPT = [{"role": "system", "content": "You have a shell."}, {"role": "user", "content": "List the files."}]
LOOK: dict[str, Any] = {
    "step_id": 3,
    "source": "agent",
    "message": "",
    "tool_calls": [LIST],
    "observation": {"results": [{"source_call_id": "c1", "content": "a.txt"}]},
}
SAY: dict[str, Any] = {
    "step_id": 4,
    "source": "agent",
    "message": "One file.",
    "reasoning_content": "It is one.",
}
TURNS = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
    {"role": "assistant", "content": "One file.", "reasoning_content": "It is one."},
]
ATIF = {"schema_version": "ATIF-v1.8", "session_id": "s", "agent": AGENT, "steps": [SYSTEM, ASK, LOOK, SAY]}


def called(
    step: Mapping[str, Any], prompt: list[int], completion: list[Any], logp: Any = None
) -> dict[str, Any]:
    """The step with the tokens of its call."""
    ids = {"prompt_token_ids": prompt, "completion_token_ids": completion, "prompt_tokens": len(prompt)}
    return {**step, "metrics": ids if logp is None else {**ids, "logprobs": logp}}


def atif(*steps: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    return {**ATIF, "steps": [{**step, "step_id": i} for i, step in enumerate(steps, 1)], **others}


RESULT: dict[str, Any] = {
    "id": "9f0c",
    "task_name": "files",
    "trial_name": "files__x1",
    "task_checksum": "abc",
    "agent_info": {"name": "terminus-2", "version": "2.0"},
    "agent_result": {"n_input_tokens": 7},
    "verifier_result": {"rewards": {"reward": 1.0}},
    "exception_info": None,
}


def failed(name: str) -> dict[str, Any]:
    return {"exception_type": name, "exception_message": "…", "exception_traceback": "…"}


def job(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A job's folder. Of each trial the result, and its trajectories by file."""
    path.mkdir(parents=True)
    (path / "result.json").write_text('{"stats": {}}')
    for row in rows:
        trial = path / row["trial_name"]
        (trial / "agent").mkdir(parents=True)
        for name, content in row.get("files", {"trajectory.json": ATIF}).items():
            (trial / "agent" / name).write_text(json.dumps(content))
        result = {name: value for name, value in row.items() if name != "files"}
        (trial / "result.json").write_text(json.dumps(result))


EXAMPLES = (
    Example(
        "atif",
        [ATIF],
        [
            {
                "prompt": PROMPT,
                "response": "One file.",
                "reward": None,
                "episode": None,
                "source": "m",
                "meta": {"continuation": TURNS, "session_id": "s", "agent": AGENT},
            }
        ],
        file="trajectory.json",
        write=document,
        corrupt={
            "steps": ([SYSTEM, ASK], "steps: expected at least one that the agent's model wrote"),
            "agent": ("m", "agent: expected an object, got 'm'"),
        },
    ),
    Example(
        "atif",
        [
            atif(
                ASK, {**SAY, "message": [{"type": "text", "text": "One"}, {"type": "text", "text": " file."}]}
            )
        ],
        [{"prompt": PROMPT[1:], "response": "One file."}],
        corrupt={
            "steps": ([{**ASK, "step_id": 2}], "steps.0..step_id: expected 1, got 2"),
            "schema_version": (1, "expected a format of"),
        },
    ),
    Example(  # a continuation: what was copied is context
        "atif",
        [
            atif(
                {**ASK, "is_copied_context": True},
                {**LOOK, "is_copied_context": True},
                {"source": "user", "message": "Go on."},
                SAY,
                session_id="s-cont-1",
            )
        ],
        [
            {
                "prompt": [
                    PROMPT[1],
                    TURNS[0],
                    TURNS[1],
                    {"role": "user", "content": "Go on."},
                ],
                "response": "One file.",
                "episode": "s",
            }
        ],
    ),
    Example(  # a step that no model made: the turns before and after it are rows of one episode
        "atif",
        [atif(ASK, LOOK, {"source": "agent", "message": "Retry.", "llm_call_count": 0}, SAY)],
        [
            {"prompt": PROMPT[1:], "response": "", "episode": "s"},
            {
                "prompt": [PROMPT[1], TURNS[0], TURNS[1], {"role": "assistant", "content": "Retry."}],
                "response": "One file.",
                "episode": "s",
            },
        ],
    ),
    Example(  # tokens: those of the observation, 6 and 7, are given
        "atif",
        [
            atif(
                ASK, called(LOOK, [1, 2], [3, 4], [-0.5, -0.25]), called(SAY, [1, 2, 3, 4, 6, 7], [8], [-1.0])
            )
        ],
        [
            {
                "prompt": PROMPT[1:],
                "tokens": [1, 2, 3, 4, 6, 7, 8],
                "action": [False, False, True, True, False, False, True],
                "context_tokens": None,
                "episode": None,
            }
        ],
    ),
    Example(  # rewritten history: the second prompt doesn't begin with the first one and its completion
        "atif",
        [atif(ASK, called(LOOK, [1, 2], [3, 4], [-0.5, -0.25]), called(SAY, [1, 2, 6, 7], [8], [-1.0]))],
        [
            {
                "prompt": PROMPT[1:],
                "tokens": [1, 2, 3, 4],
                "context_tokens": None,
                "episode": "s",
                "response": "",
            },
            {
                "prompt": PROMPT[1:],
                "tokens": [1, 2, 6, 7, 8],
                "action": [False, False, False, False, True],
                "context_tokens": [1, 2, 6, 7],
                "episode": "s",
                "response": "One file.",
            },
        ],
        groups=1,
    ),
    Example(  # several calls in one step: tokens can't be trusted, and aren't taken
        "atif",
        [atif(ASK, {**called(SAY, [1, 2], [3]), "llm_call_count": 2})],
        [{"prompt": PROMPT[1:], "response": "One file.", "tokens": None}],
    ),
    Example(  # another agent, to which this one delegated
        "atif",
        [atif(ASK, SAY, subagent_trajectories=[atif(ASK, {**SAY, "message": "2"}, trajectory_id="t")])],
        [
            {"response": "One file.", "episode": "s"},
            {"response": "2", "episode": "s"},
        ],
    ),
    Example(
        "harbor",
        [
            {**RESULT, "trial_name": "a", "id": "1"},
            {**RESULT, "trial_name": "b", "id": "2", "verifier_result": {"rewards": {"reward": 0}}},
            {**RESULT, "trial_name": "c", "id": "3", "exception_info": failed("AgentTimeoutError")},
            {**RESULT, "trial_name": "d", "id": "4", "exception_info": failed("NetworkConnectionError")},
            {**RESULT, "trial_name": "e", "id": "5", "verifier_result": None},
            {**RESULT, "trial_name": "f", "id": "6", "files": {}},
        ],
        [
            {"prompt": PROMPT, "response": "One file.", "reward": 1.0, "episode": None},
            {"reward": 0.0},
            {"reward": 1.0},  # the agent used up its time: the reward is of what it did
            {"reward": None},  # the provider failed
            {"reward": None},
        ],
        groups=1,
        refused=["agent/trajectory.json: missing"],
        file="job",
        write=job,
        corrupt={
            "verifier_result": ({"rewards": {"reward": "1"}}, "reward: expected a finite number"),
            "files": (
                {"trajectory.json": {"steps": []}},
                "trajectory.json: expected a trajectory with schema_version",
            ),
        },
    ),
    Example(  # the same words in another environment are another task
        "harbor",
        [{**RESULT, "trial_name": "a"}, {**RESULT, "id": "2", "trial_name": "b", "task_checksum": "def"}],
        [{"prompt": PROMPT}, {"prompt": PROMPT}],
        groups=2,
        file="job",
        write=job,
    ),
    Example(  # a trajectory that another file continues; several rewards
        "harbor",
        [
            {
                **RESULT,
                "verifier_result": {"rewards": {"tests": 0.5, "style": 1.0}},
                "files": {
                    "trajectory.json": atif(ASK, SAY, continued_trajectory_ref="trajectory.cont-1.json"),
                    "trajectory.cont-1.json": atif(
                        {**ASK, "is_copied_context": True}, {**SAY, "message": "Two."}, session_id="s-cont-1"
                    ),
                },
            }
        ],
        [
            {"response": "One file.", "reward": 1.0, "episode": "files__x1:9f0c"},
            {"response": "Two.", "reward": 1.0, "episode": "files__x1:9f0c"},
        ],
        options={"rewards": {"tests": 1.0, "style": 0.5}},
        file="job",
        write=job,
        corrupt={"verifier_result": ({"rewards": {"tests": 1}}, "--reward style: no such column")},
    ),
    Example(  # tokens from the result, where the steps have none
        "harbor",
        [
            {
                **RESULT,
                "agent_result": {
                    "rollout_details": [
                        {
                            "prompt_token_ids": [[1, 2], [1, 2, 3, 6]],
                            "completion_token_ids": [[3], [4, 5]],
                            "logprobs": [[-0.5], [-0.25, -1.0]],
                        }
                    ]
                },
            }
        ],
        [{"tokens": [1, 2, 3, 6, 4, 5], "action": [False, False, True, False, True, True]}],
        file="job",
        write=job,
    ),
)
