"""Sets of judged and of demonstrated responses."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from example import MISSING, Example


def comma_separated(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file; objects and lists are written as JSON."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        for row in rows:
            table.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def rated(model: str, response: str, helpfulness: str, honesty: str) -> dict[str, Any]:
    return {
        "model": model,
        "response": response,
        "annotations": {
            "helpfulness": {"Rating": helpfulness, "Rationale": "…", "Type": ["1"]},
            "honesty": {"Rating": honesty, "Rationale": "…"},
        },
        "custom_system_prompt": f"You are {model}.",
        "overall_score": 7.5,
    }


ULTRA = {
    "source": "evol_instruct",
    "instruction": "Name a color.",
    "models": ["a", "b", "c", "d"],
    "completions": [
        rated("a", "Blue.", "5", "4"),
        rated("b", "Red.", "3", "N/A"),
        rated("c", "Tuesday.", "1", "2"),
        rated("d", "I can't.", "N/A", "5"),
    ],
}
OPEN_R1 = {
    "problem": "2+2?",
    "solution": None,
    "answer": "4",
    "source": "olympiads",
    "uuid": "u",
    "generations": ["<think>…</think> 4", "5", "<think>"],
    "is_reasoning_complete": [True, True, False],
    "correctness_math_verify": [True, False, None],
    "correctness_llama": None,
    "correctness_count": 1,
    "messages": [user("2+2?"), assistant("<think>…</think> 4")],
}
BINARIZED = {
    "prompt": "Name a color.",
    "prompt_id": "f0e1",
    "chosen": [user("Name a color."), assistant("Blue.")],
    "rejected": [user("Name a color."), assistant("Tuesday.")],
    "messages": [user("Name a color."), assistant("Blue.")],
    "score_chosen": 8.0,
    "score_rejected": 1.5,
}
HH = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: A color?\n\nAssistant: Blue.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: A color?\n\nAssistant: No.",
}
TALK = [user("Hi"), assistant("Hello!"), user("A color?")]
STEER = {
    "prompt": "A color?",
    "response": "Blue.",
    "helpfulness": 4,
    "correctness": 3,
    "coherence": 4,
    "complexity": 1,
    "verbosity": 0,
}
STEER3 = {
    "domain": "general",
    "language": "english",
    "context": TALK,
    "response1": "Blue.",
    "response2": "No.",
    "overall_preference": -2,
    "individual_preference": [
        {"score": -3, "reasoning": "Better."},
        {"score": 1, "reasoning": "Worse."},
        {"score": 0, "reasoning": "The same."},
    ],
}
ARENA = {
    "id": "7",
    "model_a": "m",
    "model_b": "n",
    "winner": "model_b",
    "conversation_a": [user("A color?"), assistant("No."), user("Please."), assistant("Red.")],
    "conversation_b": [
        user([{"type": "text", "text": "A color?"}]),
        assistant([{"type": "text", "text": "Blue."}]),
    ],
    "language": "en",
}
KAGGLE = {
    "id": 30192,
    "model_a": "m",
    "model_b": "n",
    "prompt": '["A color?", "Another?"]',
    "response_a": '["Blue.", "Red."]',
    "response_b": '["No.", "No."]',
    "winner_model_a": 1,
    "winner_model_b": 0,
    "winner_tie": 0,
}

MATH = {
    "problem": "What is $\\frac{1}{2}+\\frac{1}{2}$?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": "Halves: $\\boxed{2}$ of them. So $\\boxed{\\frac{2}{2}}$.",
}

EXAMPLES = (
    Example(
        "math",
        [MATH, MATH | {"problem": "1+1?", "solution": "Two.", "answer": "2"}],
        [
            {
                "prompt": "What is $\\frac{1}{2}+\\frac{1}{2}$?",
                "response": "Halves: $\\boxed{2}$ of them. So $\\boxed{\\frac{2}{2}}$.\n\n"
                "The final answer is $\\frac{2}{2}$.",
                "reward": None,
                "role": "expert",
                "meta": {"answer": "\\frac{2}{2}", "level": "Level 1", "type": "Prealgebra"},
            },
            {"prompt": "1+1?", "response": "Two.\n\nThe final answer is $2$.", "role": "expert"},
        ],
        corrupt={
            "solution": (
                "Two.",
                "or a column answer; got 'Two.'",
            ),
            "problem": (None, "problem: expected text, got None"),
        },
    ),
    Example(
        "ultrafeedback",
        [ULTRA],
        [
            {
                "prompt": [{"role": "system", "content": "You are a."}, user("Name a color.")],
                "response": "Blue.",
                "reward": 5.0,
                "source": "a",
            },
            {"response": "Red.", "reward": 3.0, "source": "b"},
            {"response": "Tuesday.", "reward": 1.0, "source": "c"},
            {
                "prompt": [{"role": "system", "content": "You are d."}, user("Name a color.")],
                "response": "I can't.",
                "reward": None,
                "source": "d",
            },
        ],
        groups=4,
        options={"choose": {"aspect": "helpfulness"}},
        corrupt={
            "instruction": (None, "instruction: expected text, got None"),
            "completions": ([{"model": "a"}], "completions.0..response: expected text, got None"),
        },
    ),
    Example(  # one model had no system prompt, another is said to have had one, and hadn't
        "ultrafeedback",
        [
            {
                **ULTRA,
                "completions": [
                    rated("a", "Blue.", "5", "4") | {"custom_system_prompt": None},
                    rated("wizardlm-7b", "Red.", "3", "2"),
                ],
            }
        ],
        [{"prompt": "Name a color."}, {"prompt": "Name a color."}],
        groups=1,
        options={"choose": {"aspect": "helpfulness"}},
    ),
    Example(
        "open-r1-math",
        [OPEN_R1, {**OPEN_R1, "problem": "3+3?", "generations": ["6"]}],
        [
            {
                "prompt": [user("2+2?")],
                "response": "<think>…</think> 4",
                "reward": 1.0,
                "meta": {
                    "answer": "4",
                    "source": "olympiads",
                    "uuid": "u",
                    "correctness_count": 1,
                    "is_reasoning_complete": True,
                    "correctness_math_verify": True,
                },
            },
            {"response": "5", "reward": 0.0},
            {"response": "<think>", "reward": None},
        ],
        groups=1,
        corrupt={
            "correctness_math_verify": ([True], "correctness_math_verify: expected one for each of the 3"),
            "generations": (["4", None, "5"], "generations.1.: expected text, got None"),
            "problem": (None, "problem: expected text, got None"),
        },
        refused=["is_reasoning_complete: expected one for each of the 1 generations"],
    ),
    Example(
        "open-r1-math",
        [OPEN_R1 | {"correctness_llama": [False, True, True]}],
        [{"reward": 0.0}, {"reward": 1.0}, {"reward": 1.0}],
        options={"choose": {"verifier": "llama"}},
    ),
    Example(  # the mean, which is unknown where one rating is
        "ultrafeedback",
        [ULTRA],
        [{"reward": 4.5}, {"reward": None}, {"reward": 1.5}, {"reward": None}],
        options={"choose": {"aspect": "mean"}},
        corrupt={
            "completions": (
                [rated("a", "Blue.", "good", "4")],
                "helpfulness.Rating: expected a number or 'N/A', got 'good'",
            )
        },
    ),
    Example(
        "ultrafeedback",
        [ULTRA, {**ULTRA, "completions": [{"model": "a", "response": "?", "annotations": {}}]}],
        [{"reward": 7.5}] * 4,
        options={"choose": {"aspect": "overall_score"}},
        refused=["aspect: expected --choose aspect=NAME of mean, got overall_score"],
    ),
    Example(
        "ultrafeedback-binarized",
        [BINARIZED],
        [
            {
                "prompt": [user("Name a color.")],
                "response": "Blue.",
                "reward": 8.0,
                "prompt_id": "f0e1",
                "meta": {},
            },
            {"response": "Tuesday.", "reward": 1.5, "prompt_id": "f0e1"},
        ],
        pairs=[(0, 1)],
        corrupt={
            "rejected": ([user("Another."), assistant("No.")], "rejected: expected the messages of chosen"),
            "score_chosen": ("8", "score_chosen: expected a finite number"),
            "prompt_id": (1.5, "prompt_id: expected text or an integer"),
        },
    ),
    Example(
        "hh-rlhf",
        [HH, {**HH, "rejected": "\n\nHuman: Hey\n\nAssistant: No."}],
        [{"prompt": TALK, "response": "Blue."}, {"prompt": TALK, "response": "No."}],
        pairs=[(0, 1)],
        refused=["rejected: expected the turns of chosen, and then another response"],
        corrupt={"chosen": ("\n\nHuman: Hi", "chosen: expected turns that begin with")},
    ),
    Example(  # with the prompt in a column of its own, as in Dahoas/full-hh-rlhf
        "hh-rlhf",
        [
            {
                "prompt": "\n\nHuman: A color?\n\nAssistant:",
                "response": " Blue.",
                "chosen": " Blue.",
                "rejected": " No.",
            }
        ],
        [{"prompt": [user("A color?")], "response": "Blue.", "meta": {}}, {"response": "No."}],
        pairs=[(0, 1)],
    ),
    Example(
        "helpsteer",
        [STEER, {**STEER, "response": "No.", "helpfulness": 0}],
        [{"prompt": "A color?", "response": "Blue.", "reward": 4.0}, {"response": "No.", "reward": 0.0}],
        options={"rewards": {"helpfulness": 1.0}},
        groups=1,
        corrupt={
            "helpfulness": ("much", "helpfulness: expected a finite number"),
            "prompt": (7, "prompt: expected text, got 7"),
            "response": (None, "response: expected text, got None"),
        },
    ),
    Example(  # numbers are text in CSV
        "helpsteer",
        [STEER],
        [{"reward": 5.5}],
        options={"rewards": {"helpfulness": 1.0, "correctness": 0.5}},
        file="train.csv",
        write=comma_separated,
    ),
    Example(
        "helpsteer-preference",
        [
            STEER3,
            {**STEER3, "response1": "3", "overall_preference": 1, "individual_preference": []},
            {**STEER3, "response1": "4", "overall_preference": 0, "individual_preference": []},
        ],
        [
            {"prompt": TALK, "response": "Blue."},
            {"response": "No."},
            {"response": "No."},
            {"response": "3"},
            {"response": "4"},
            {"response": "No."},
        ],
        pairs=[(0, 1), (2, 3), (4, 5)],
        groups=1,
        corrupt={
            "overall_preference": (4, "overall_preference: expected an integer from -3 to 3, got 4"),
            "context": ("Hi", "context: expected a list of objects"),
            "response1": (None, "response1: expected text, got None"),
            "individual_preference": (
                [{"score": "-1"}],
                "individual_preference.0..score: expected a finite number",
            ),
        },
    ),
    Example(
        "helpsteer-preference",
        [
            {
                "prompt": "A color?",
                "response_1": "No.",
                "response_2": "Blue.",
                "preference_strength": 3,
                "split": "train",
            }
        ],
        [
            {"prompt": "A color?", "response": "Blue.", "meta": {"preference_strength": 3, "split": "train"}},
            {"response": "No."},
        ],
        pairs=[(0, 1)],
    ),
    Example(
        "arena",
        [ARENA, {**ARENA, "id": "8", "winner": "tie"}, {**ARENA, "id": "9", "winner": "both_bad"}],
        [
            {"prompt": [user("A color?")], "response": "Blue.", "source": "n"},
            {"response": "Red.", "source": "m"},
            {"response": "Red."},
            {"response": "Blue."},
            {"response": "Red.", "reward": None},
            {"response": "Blue.", "reward": None},
        ],
        pairs=[(0, 1), (2, 3)],
        groups=1,
        corrupt={
            "winner": ("a", "winner: expected model_a, model_b, tie or both_bad, got 'a'"),
            "conversation_a": (
                [user("?"), assistant("!")],
                "expected the messages before the first response",
            ),
            "conversation_b": ([user("A color?")], "conversation_b|messages"),
        },
    ),
    Example(
        "arena",
        [{**ARENA, "winner": "both_bad"}],
        [{"response": "Red.", "reward": 0.0}, {"response": "Blue.", "reward": 0.0}],
        options={"choose": {"both_bad": "zero"}},
    ),
    Example(
        "arena-55k",
        [KAGGLE, {**KAGGLE, "id": 4, "response_a": '["Blue.", null]'}],
        [
            {"prompt": [user("A color?")], "response": "Red.", "source": "m"},
            {"prompt": [user("A color?")], "response": "No.", "source": "n"},
        ],
        pairs=[(0, 1)],
        refused=["response_a: expected a list of texts"],
        file="train.csv",
        write=comma_separated,
        corrupt={
            "winner_tie": (
                1,
                "winner: expected one of winner_model_a, winner_model_b, winner_tie to be 1, got 2",
            ),
            "prompt": (
                '["A color?"]',
                "prompt: expected as many turns as the responses have, got 1, 2 and 2",
            ),
        },
    ),
    Example(
        "sharegpt",
        [
            {
                "system": "Be brief.",
                "conversations": [
                    {"from": "human", "value": "A color?"},
                    {"from": "gpt", "value": "Blue."},
                    {"from": "human", "value": "The time?"},
                    {"from": "function_call", "value": '{"name": "clock", "arguments": {}}'},
                    {"from": "observation", "value": "12:00"},
                    {"from": "gpt", "value": "Noon."},
                ],
                "tools": "[]",
            }
        ],
        [
            {
                "prompt": [
                    {"role": "system", "content": "Be brief."},
                    user("A color?"),
                    assistant("Blue."),
                    user("The time?"),
                ],
                "response": "Noon.",
                "role": "expert",
                "reward": None,
                "meta": {
                    "continuation": [
                        {
                            **assistant(""),
                            "tool_calls": [
                                {"type": "function", "function": {"name": "clock", "arguments": {}}}
                            ],
                        },
                        {"role": "tool", "content": "12:00"},
                        assistant("Noon."),
                    ],
                    "tools": "[]",
                },
            }
        ],
        corrupt={
            "conversations": (
                [{"from": "you", "value": "Hi"}],
                "conversations.0..from: expected one of human",
            ),
            "system": (7, "system: expected text, got 7"),
        },
    ),
    Example(
        "sharegpt-preference",
        [
            {
                "conversations": [{"from": "human", "value": "A color?"}],
                "chosen": {"from": "gpt", "value": "Blue."},
                "rejected": {"from": "gpt", "value": "No."},
            }
        ],
        [{"prompt": [user("A color?")], "response": "Blue."}, {"response": "No."}],
        pairs=[(0, 1)],
        corrupt={
            "chosen": ({"from": "gpt"}, "chosen.value: expected text, got None"),
            "rejected": (7, "rejected"),
        },
    ),
    Example(
        "sharegpt-unpaired",
        [
            {
                "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}],
                "kto_tag": tag,
            }
            for tag in (True, False, None)
        ],
        [{"response": "!", "reward": 1.0}, {"reward": 0.0}, {"reward": None}],
        groups=1,
        corrupt={"kto_tag": ("maybe", "kto_tag: expected a finite number, or one of the words up")},
    ),
    Example(
        "alpaca",
        [
            {"instruction": "Name a color.", "input": "In German.", "output": "Blau.", "text": "…"},
            {"instruction": "Name a color.", "input": "", "output": "Blue.", "text": "…"},
        ],
        [
            {
                "prompt": "Name a color.\nIn German.",
                "response": "Blau.",
                "role": "expert",
                "meta": {"text": "…"},
            },
            {"prompt": "Name a color.", "response": "Blue.", "reward": None},
        ],
        corrupt={
            "instruction": (7, "instruction: expected text, got 7"),
            "input": (7, "input: expected text, got 7"),
            "output": (None, "output: expected text, got None"),
        },
    ),
    Example(
        "alpaca",
        [
            {
                "instruction": "A color?",
                "output": "Blue.",
                "system": "Be brief.",
                "history": [["Hi", "Hello!"]],
            }
        ],
        [{"prompt": [{"role": "system", "content": "Be brief."}, *TALK], "response": "Blue."}],
        corrupt={"history": ([["Hi"]], "history.0.: expected a text of the user and one of the assistant")},
    ),
    Example(
        "unpaired",
        [
            {"instruction": "A color?", "input": "", "output": "Blue.", "kto_tag": True},
            {"instruction": "A color?", "input": "", "output": "No.", "kto_tag": False},
        ],
        [{"prompt": "A color?", "response": "Blue.", "reward": 1.0}, {"response": "No.", "reward": 0.0}],
        corrupt={"kto_tag": (0, "kto_tag: expected true or false, or thumbs as 1 and -1, got 0")},
    ),
    Example(
        "unpaired",
        [
            {"prompt": "A color?", "response": text, "thumbs": thumbs}
            for text, thumbs in (("Blue.", 1), ("No.", -1))
        ],
        [{"prompt": "A color?", "response": "Blue.", "reward": 1.0}, {"response": "No.", "reward": 0.0}],
        corrupt={"thumbs": (5, "thumbs: expected true or false, or thumbs as 1 and -1, got 5")},
    ),
    Example(
        "instruction-preference",
        [{"instruction": "A color?", "input": "In German.", "chosen": "Blau.", "rejected": "Blue."}],
        [{"prompt": "A color?\nIn German.", "response": "Blau."}, {"response": "Blue."}],
        pairs=[(0, 1)],
        corrupt={"chosen": (7, "chosen: expected text, got 7")},
    ),
    Example(
        "instruction-preference",
        [
            {
                "system": "Be brief.",
                "question": "A color?",
                "chosen_response": "Blue.",
                "rejected_response": "No.",
            }
        ],
        [
            {
                "prompt": [{"role": "system", "content": "Be brief."}, user("A color?")],
                "response": "Blue.",
                "meta": {},
            },
            {"response": "No."},
        ],
        pairs=[(0, 1)],
        corrupt={"question": (MISSING, "expected a format of `agro formats`")},
    ),
    Example(
        "messages-preference",
        [{"messages": TALK, "chosen": assistant("Blue."), "rejected": assistant("No.")}],
        [{"prompt": TALK, "response": "Blue."}, {"prompt": TALK, "response": "No."}],
        pairs=[(0, 1)],
        corrupt={"rejected": (user("No."), "the last one the assistant's")},
    ),
    Example(
        "distilabel",
        [{"instruction": "A color?", "generations": ["Blue.", "No."], "ratings": [5.0, None]}],
        [{"prompt": "A color?", "response": "Blue.", "reward": 5.0}, {"response": "No.", "reward": None}],
        groups=1,
        corrupt={
            "ratings": ([5.0], "ratings: expected one for each of the generations"),
            "generations": (["Blue.", None], "generations.1.: expected text, got None"),
        },
    ),
)
