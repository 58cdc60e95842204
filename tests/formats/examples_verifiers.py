"""Traces and results of verifiers and prime-rl."""

from __future__ import annotations

from typing import Any

from example import Example

from agro.types.conversation import prompt_hash

ASK = {"role": "user", "content": "2+2="}
SAY = {"role": "assistant", "content": "Five."}


def node(parent: int | None, role: str, content: str, tokens: list[int], **more: Any) -> dict[str, Any]:
    """One as verifiers writes it; with `logprobs` it was sampled, and these are of its last tokens."""
    logps = more.get("logprobs", [])
    mask = [i >= len(tokens) - len(logps) for i in range(len(tokens))]
    made: dict[str, Any] = {} if parent is None else {"parent": parent}
    made |= {"message": {"role": role, "content": content}, "sampled": bool(logps)}
    return made | {"token_ids": tokens, "mask": mask, "logprobs": logps} | more


NODES = [
    node(None, "user", "2+2=", [1, 2]),
    node(0, "assistant", "Five.", [3, 4], logprobs=[-0.1235]),
    node(1, "user", "Sure?", [5]),
    node(2, "assistant", "Four.", [6, 7], logprobs=[-0.5, -0.25]),
    node(1, "user", "Really?", [8]),
    node(4, "assistant", "Yes.", [9], logprobs=[-1.0]),
]
CALLS = [
    {"node": i, "model": "small", "sampling": {"temperature": 0.7}, "finish_reason": "stop"}
    for i in (1, 3, 5)
]
TRACE = {
    "version": 1,
    "id": "t1",
    "task": {"type": "Sum", "data": {"answer": "4"}},
    "agent": {"config": {}, "name": "solver", "trainable": True},
    "nodes": NODES,
    "calls": CALLS,
    "rewards": {
        "exact": {"score": 1.0, "weight": 0.5},
        "style": {"score": 0.5, "weight": 1.0},
        "judge": None,
    },
    "metrics": {"turns": 3.0},
    "is_completed": True,
    "ok": True,
    "stop_condition": "agent_completed",
}
EPISODE = {
    "id": "e1",
    "env": {"id": "sums", "name": "sums"},
    "task": {"type": "Sum", "data": {"answer": "4"}, "key": "sum-4", "hash": "ab"},
    "group": {"id": "g7"},
    "run": {
        "type": "train",
        "id": "r",
        "work": {"type": "train", "step": 3, "policy": {"start": 3, "end": 3}},
    },
    "ok": True,
    "traces": [TRACE],
}
JUDGE = {**TRACE, "id": "t2", "agent": {"config": {}, "name": "judge", "trainable": False}}
PLAIN = {**TRACE, "nodes": [{k: n[k] for k in ("parent", "message", "sampled") if k in n} for n in NODES]}
ATTEMPT = [{"node": 1, "type": "compaction_attempt"}]


def traces(**more: Any) -> dict[str, Any]:
    return {**EPISODE, "traces": [{**TRACE, **more}]}


EXAMPLES = (
    Example(  # two branches that share the first turn
        "verifiers-traces",
        [{**EPISODE, "traces": [TRACE, JUDGE]}],
        [
            {
                "prompt": [ASK],
                "response": "Four.",
                "reward": 1.0,
                "prompt_id": f"g7:{prompt_hash([ASK])}",
                "episode": "t1",
                "tokens": [1, 2, 3, 4, 5, 6, 7],
                "action": [False, False, False, True, False, True, True],
                "learn": None,
                "context_tokens": None,
                "sampling": {"temperature": 0.7, "logp_decimals": 4},
                "source": "small",
                "version": 3,
                "meta": {
                    "continuation": [SAY, {"role": "user", "content": "Sure?"}, {**SAY, "content": "Four."}],
                    "env": EPISODE["env"],
                    "run": EPISODE["run"],
                    "task": EPISODE["task"],
                    "metrics": {"turns": 3.0},
                    "rewards": TRACE["rewards"],
                    "stop_condition": "agent_completed",
                    "ok": True,
                    "trace": "t1",
                    "agent": "solver",
                    "finish": "stop",
                    "answer": "4",
                    "left_out": ["traces[1]: of judge, which isn't trained"],
                },
            },
            {
                "prompt": [ASK],
                "response": "Yes.",
                "reward": 1.0,
                "episode": "t1",
                "tokens": [1, 2, 3, 4, 8, 9],
                "action": [False, False, False, True, False, True],
                "learn": [False, False, False, False, False, True],
            },
        ],
        file="traces.jsonl",
        groups=1,
        corrupt={
            "traces": (
                [{**TRACE, "nodes": [node(4, "user", "?", [])]}],
                r"nodes\[0\].parent: expected the number",
            ),
            "group": ("g7", "group: expected an object, got 'g7'"),
            "task": ("sum", "task: expected an object, got 'sum'"),
            "run": ([], "run: expected an object"),
        },
    ),
    *(
        Example("verifiers-traces", [EPISODE], [{}, {}], corrupt={"traces": ([{**TRACE, **wrong}], said)})
        for wrong, said in (
            ({"agent": "solver"}, r"traces\[0\].agent: expected an object"),
            ({"rewards": {"a": {"score": "1"}}}, r"rewards.a.score: expected a finite number"),
            ({"rewards": {"a": {"score": 1, "weight": "x"}}}, r"rewards.a.weight: expected a finite number"),
            ({"calls": {"node": 1}}, "calls: expected a list of objects"),
            ({"nodes": [{**NODES[0], "sampled": 1}]}, "sampled: expected true or false, got 1"),
            ({"nodes": [{**NODES[0], "message": {}}]}, "message: expected an object with a role"),
            ({"nodes": [{**NODES[0], "token_ids": ["1"]}]}, "token_ids: expected a list of integers"),
            ({"nodes": [{**NODES[0], "mask": [True]}]}, "mask: expected 2 numbers, one a token"),
            ({"nodes": [NODES[0], {**NODES[1], "logprobs": [-0.1, -0.2]}]}, "logprobs: expected 1 numbers"),
            ({"nodes": NODES[:1]}, "traces: expected a message that the policy sampled"),
        )
    ),
    Example(  # no reward was computed, the weights changed meanwhile, and nothing went on from an attempt
        "verifiers-traces",
        [
            {
                **traces(
                    rewards={"exact": None},
                    nodes=[
                        *NODES[:4],
                        {**NODES[4], "semantic_parents": []},
                        NODES[5] | {"semantic_parents": ATTEMPT},
                    ],
                ),
                "run": {"type": "train", "work": {"policy": {"start": 3, "end": 4}}},
            }
        ],
        [{"response": "Four.", "reward": None, "version": -1, "episode": None}],
    ),
    Example(  # a rewritten history begins at another root
        "verifiers-traces",
        [traces(nodes=[*NODES[:4], node(None, "user", "So?", [8]), NODES[5]])],
        [
            {"prompt": [ASK], "response": "Four.", "context_tokens": None, "learn": None},
            {"prompt": [ASK], "response": "Yes.", "tokens": [8, 9], "context_tokens": [8], "episode": "t1"},
        ],
        groups=1,
    ),
    Example(  # without tokens, as from a provider: the second branch has its own context as prompt
        "verifiers-traces",
        [{**EPISODE, "traces": [PLAIN]}],
        [
            {"prompt": [ASK], "response": "Four.", "tokens": None, "sampling": {"temperature": 0.7}},
            {
                "prompt": [ASK, SAY, {"role": "user", "content": "Really?"}],
                "response": "Yes.",
                "episode": "t1",
                "tokens": None,
            },
        ],
        groups=2,
        options={"rewards": {"style": 2.0}},
    ),
)
