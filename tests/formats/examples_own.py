"""agro's own records."""

from __future__ import annotations

from example import MISSING, Example

RECORD = {
    "prompt": "2+2=",
    "response": "4",
    "reward": 1.0,
    "prompt_id": "sum",
    "episode": "e1",
    "answer": "4",
    "tokens": [5, 6, 7, 8],
    "mask": [0, 0, 0, 1],
    "action": [0, 0, 1, 1],
    "tokenizer": "a fingerprint",
    "behavior_logp": [None, None, -0.5, -0.25],
    "sampling": {"temperature": 1.0},
    "token_reward": [None, None, 0.0, 1.0],
    "version": 3,
    "role": "policy",
    "source": "a run",
    "meta": {"finish": "stop"},
}
EXAMPLES = (
    Example(
        "interchange",
        [RECORD, {"prompt": "2+2=", "response": "5", "prompt_id": "sum", "reward": False, "by": "me"}],
        [
            {
                **{name: RECORD[name] for name in ("prompt", "response", "reward", "prompt_id", "episode")},
                **{name: RECORD[name] for name in ("tokens", "tokenizer", "sampling", "version", "role")},
                "learn": [False, False, False, True],
                "action": [False, False, True, True],
                "source": "a run",
                "meta": {"finish": "stop", "answer": "4"},
            },
            {"response": "5", "reward": 0.0, "role": "log", "source": "file:log.jsonl", "meta": {"by": "me"}},
        ],
        groups=1,
        corrupt={
            "prompt": (7, "prompt: expected text, or a list of messages"),
            "response": (None, "response: expected text, got null"),
            "reward": ("1", "reward: expected a finite number"),
            "prompt_id": ([], "prompt_id: expected text or an integer"),
            "episode": (True, "episode: expected text or an integer"),
            "tokens": ([5, 6, -7, 8], "tokens: expected ids of the vocabulary"),
            "mask": ([0, 0, 2, 1], "mask: expected a list of true and false.* at index 2"),
            "action": ([0, 0, 1, 0], "learn: expected a part of action"),
            "tokenizer": (7, "tokenizer: expected text"),
            "behavior_logp": ([None, None, -0.5, 0.25], "behavior_logp: expected log-probs"),
            "sampling": ("hot", "sampling: expected an object"),
            "token_reward": ([1.0], "token_reward: expected one value for each of the 4 tokens"),
            "version": (1.5, "version: expected an integer"),
            "role": ("user", "role: expected one of policy, log, expert"),
            "source": (1, "source: expected text"),
            "meta": ({"answer": "5"}, "answer: the record has '4', and its meta '5'"),
        },
    ),
    Example(
        "preference",
        [{"prompt": "2+2=", "chosen": "4", "rejected": "5", "votes_chosen": 3, "votes_rejected": 1}],
        [{"prompt": "2+2=", "response": "4", "reward": None}, {"prompt": "2+2=", "response": "5"}],
        pairs=[(0, 1)],
        corrupt={
            "prompt": (MISSING, "prompt: expected chosen and rejected to begin with the same text"),
            "chosen": (4, "chosen: expected text, got 4"),
            "rejected": (None, "rejected: expected text, got null"),
            "votes_chosen": (-1, "votes_chosen: expected a"),
            "votes_rejected": (True, "votes_rejected: expected a"),
        },
    ),
    Example(
        "conversation",
        [
            {
                "messages": [
                    {"role": "user", "content": "2+2?"},
                    {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
                    {"role": "tool", "content": "4"},
                    {"role": "assistant", "content": "It is 4."},
                ],
                "reward": 0.5,
            }
        ],
        [{"prompt": [{"role": "user", "content": "2+2?"}], "response": "It is 4.", "reward": 0.5}],
        groups=1,
        corrupt={
            "messages": ([{"role": "user", "content": "2+2?"}], "the last one the assistant's"),
            "reward": ("good", "reward: expected a finite number"),
        },
    ),
)
