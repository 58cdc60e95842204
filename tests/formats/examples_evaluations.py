"""Logs of evaluations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from example import MISSING, Example, parquet_table

QUESTION = "Q: What is 2+2?\nA:"
ASK = [{"role": "user", "content": "What is 2+2?"}]


def harness(responses: list[str], filter: str = "strict-match", **more: Any) -> dict[str, Any]:
    """A row of lm-evaluation-harness."""
    return {
        "doc_id": 0,
        "doc": {"question": "What is 2+2?"},
        "target": "4",
        "arguments": {"gen_args_0": {"arg_0": QUESTION, "arg_1": {"until": ["\n"], "temperature": 0.5}}},
        "resps": [responses],
        "filtered_resps": ["4"],
        "filter": filter,
        "metrics": ["exact_match"],
        "doc_hash": "d",
        "prompt_hash": "p",
        "target_hash": "t",
        **more,
    }


LM_EVAL = (
    Example(
        "lm-eval",
        [
            harness([" It is 4."], exact_match=0.0),
            harness([" It is 4."], "flexible-extract", exact_match=1.0),
        ],
        [
            {
                "prompt": QUESTION,
                "response": " It is 4.",
                "reward": 0.0,
                "sampling": {"temperature": 0.5},
                "meta": {
                    "answer": "4",
                    "doc_id": 0,
                    "doc": {"question": "What is 2+2?"},
                    "filtered_resps": ["4"],
                    "filter": "strict-match",
                    "doc_hash": "d",
                    "prompt_hash": "p",
                    "target_hash": "t",
                    "exact_match": 0.0,
                    "gen_kwargs": {"until": ["\n"], "temperature": 0.5},
                },
            }
        ],
        file="samples_gsm8k_2026-08-21.jsonl",
        corrupt={
            "arguments": (
                {"gen_args_0": {"arg_0": QUESTION, "arg_1": " 4"}},
                "log-likelihoods of given answers, and has no generated text",
            ),
            "resps": ([], "resps: expected a list with the list of responses"),
            "exact_match": ("1", "exact_match: expected a finite number"),
        },
    ),
    Example(
        "lm-eval",
        [
            harness([" It is 4."], exact_match=0.0),
            harness([" It is 4."], "flexible-extract", exact_match=1.0),
        ],
        [{"response": " It is 4.", "reward": 1.0}],
        options={"choose": {"filter": "flexible-extract"}},
    ),
    Example(
        "lm-eval",
        [  # repeats: one number for two responses; another metric is a list of theirs
            harness([" 4", " 5"], exact_match=1.0),
            harness([" 4", " 5"], exact_match=1.0, metrics=["exact_match", "each"], each=[1.0, 0.0]),
            harness(["-12.3", "False"], arguments=[[QUESTION, " 4"]], acc=1.0),
        ],
        [
            {"response": " 4", "reward": None},
            {"response": " 5", "reward": None},
            {"response": " 4", "reward": 1.0},
            {"response": " 5", "reward": 0.0},
        ],
        groups=1,
        refused=["no generated text"],
    ),
    Example(
        "lm-eval",
        [  # an older version, and a model behind an API
            {
                **{k: v for k, v in harness([" 4"], exact_match=True).items() if k != "metrics"},
                "arguments": [[[json.dumps(ASK)], {"until": []}]],
            }
        ],
        [{"prompt": ASK, "response": " 4", "reward": 1.0}],
        corrupt={"arguments": ([[7, {"until": []}]], "arguments: expected text, got 7")},
    ),
)

DOC = {"query": "What is 2+2?", "choices": ["4"], "gold_index": [0], "task_name": "gsm8k", "id": "0"}


def details(texts: list[str], **more: Any) -> dict[str, Any]:
    """A row of lighteval."""
    given = {
        "input": "user: What is 2+2?",
        "input_tokens": [5, 6],
        "text": texts,
        "output_tokens": [[9, 2] for _ in texts],
        "reasonings": ["Hm." for _ in texts],
        "logprobs": [],
    }
    return {"doc": DOC, "metric": {"em": 1.0}, "model_response": given, **more}


LIGHTEVAL = (
    Example(
        "lighteval",
        [details(["4"])],
        [
            {
                "prompt": "user: What is 2+2?",
                "response": "4",
                "reward": 1.0,
                "tokens": [5, 6, 9, 2],
                "action": [False, False, True, True],
                "meta": {
                    "answer": "4",
                    "doc": DOC,
                    "metric": {"em": 1.0},
                    "model_response": {},
                    "reasoning": "Hm.",
                },
            }
        ],
        file="details_gsm8k.parquet",
        write=parquet_table,
        corrupt={
            "doc": ("?", "doc: expected an object, got '.'"),
            "model_response": (
                {**details([])["model_response"], "text": None},
                "model_response.text: expected a list",
            ),
            "metric": ({"em": "1"}, "em: expected a finite number"),
        },
    ),
    Example(
        "lighteval",
        [details(["4", "5"], metric={"pass@k": 1.0})],
        [{"response": "4", "reward": None}, {"response": "5", "reward": None}],
        file="details_gsm8k.parquet",
        write=parquet_table,
        groups=1,
    ),
    Example(
        "lighteval",
        [details(["4"]), {**details(["x"]), "model_response": {"input": "", "text": [], "logprobs": [-0.5]}}],
        [{"response": "4"}],
        file="details_mmlu.jsonl",
        refused=["no text was generated"],
        corrupt={"metric": ({"em": 1.0, "f1": 0.5}, "several columns of rewards")},
    ),
)


def state(name: str, texts: list[str], **more: Any) -> dict[str, Any]:
    """A state of a request of HELM; nulls are left out."""
    end = {"finish_reason": {"reason": "stop"}, "logprob": -0.5, "tokens": [{"text": "4", "logprob": -0.5}]}
    reference = {"output": {"text": "4"}, "tags": ["correct"]}
    return {
        "instance": {
            "input": {"text": "What is 2+2?"},
            "references": [reference],
            "split": "test",
            "id": name,
        },
        "train_trial_index": 0,
        "request": {"model": "m", "prompt": QUESTION, "temperature": 0.5, "num_completions": len(texts)},
        "result": {"success": True, "completions": [{"text": text, **end} for text in texts]},
        **more,
    }


def stats(name: str, trial: int = 0, **means: float) -> dict[str, Any]:
    found = [
        {"name": {"name": k, "split": "test"}, "count": 1, "sum": v, "mean": v} for k, v in means.items()
    ]
    return {"instance_id": name, "train_trial_index": trial, "stats": found}


def helm(*scores: dict[str, Any]) -> Any:
    def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        path.mkdir()
        states = {"adapter_spec": {"method": "generation"}, "request_states": list(rows)}
        (path / "scenario_state.json").write_text(json.dumps(states))
        (path / "per_instance_stats.json").write_text(json.dumps(scores))

    return write


HELM = (
    Example(
        "helm",
        [
            state("id1", [" 4"]),
            state("id2", [" 5"]),
            state("id1", [" 4"], reference_index=0, request_mode="original"),
            state("id3", [], result={"success": False, "error": "quota", "completions": []}),
        ],
        [
            {
                "prompt": QUESTION,
                "response": " 4",
                "reward": 1.0,
                "source": "m",
                "sampling": {"temperature": 0.5},
                "meta": {
                    "answer": "4",
                    "instance": state("id1", [])["instance"],
                    "train_trial_index": 0,
                    "stats": {"em": 1.0},
                    "completion": {"logprob": -0.5, "tokens": [{"text": "4", "logprob": -0.5}]},
                    "finish": "stop",
                },
            },
            {"response": " 5", "reward": 0.0},
        ],
        file="run",
        write=helm(stats("id2", em=0.0), stats("id1", em=1.0), stats("id1", 1, em=0.5)),
        refused=["result.success: expected true, got False: quota"],
        corrupt={
            "instance": ("id1", "instance: expected an object, got 'id1'"),
            "request": ({}, "request.prompt: expected text, got None"),
            "result": (MISSING, "result.success: expected true, got None"),
        },
    ),
    Example(
        "helm",
        [state("id1", [" 4", " 5"])],
        [{"response": " 4", "reward": None}, {"response": " 5", "reward": None}],
        file="run",
        write=helm(stats("id1", em=1.0)),
    ),
    Example(
        "helm",
        [state("id1", [" 4"])],
        [{"response": " 4", "reward": 0.25}],
        file="run",
        write=helm(stats("id1", em=1.0, f1=0.25)),
        options={"rewards": {"f1": 1.0}},
    ),
)

PROBLEM = {
    "task_id": "HumanEval/0",
    "prompt": "def add(a, b):\n",
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "assert add(2, 2) == 4",
}
KNOWN = {"task_id": "HumanEval/0", "entry_point": "add", "test": "assert add(2, 2) == 4"}
GOOD, BAD = "    return a + b\n", "    return a\n"


def solved(solution: str, base: str | None, plus: str | None) -> dict[str, Any]:
    """A result of EvalPlus."""
    tests = {"base_fail_tests": [], "plus_fail_tests": []}
    return {"task_id": "HumanEval/0", "solution": solution, "base_status": base, "plus_status": plus, **tests}


def evalplus(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    by_task: dict[str, list[Any]] = {}
    for row in rows:
        by_task.setdefault(row["task_id"], []).append(row)
    path.write_text(json.dumps({"date": "2026-08-01", "hash": "h", "eval": by_task}))


CODE = (
    Example(
        "human-eval",
        [
            {"task_id": "HumanEval/0", "completion": GOOD, "result": "passed", "passed": True},
            {"task_id": "HumanEval/0", "completion": BAD, "result": "failed: ", "passed": False},
            {"task_id": "HumanEval/0", "completion": BAD},
            {"task_id": "HumanEval/0", "solution": PROBLEM["prompt"] + GOOD},
            {"task_id": "HumanEval/0", "solution": "add = sum"},
        ],
        [
            {
                "prompt": PROBLEM["prompt"],
                "prompt_id": "HumanEval/0",
                "response": GOOD,
                "reward": 1.0,
                "meta": {**KNOWN, "result": "passed", "passed": True},
            },
            {"response": BAD, "reward": 0.0},
            {"response": BAD, "reward": None},
            {"response": GOOD, "reward": None, "meta": KNOWN},
            {"response": "add = sum"},
        ],
        groups=1,
        others={"problems.jsonl": [PROBLEM]},
        options={"join": "problems.jsonl"},
        corrupt={
            "task_id": ("HumanEval/1", "task_id: the file of --join has no problem 'HumanEval/1'"),
            "completion": (7, "completion: expected text, got 7"),
            "passed": ("yes", "passed: expected a finite number"),
        },
    ),
    Example(
        "evalplus-results",
        [
            solved("add = sum", "pass", "pass"),
            solved("add = max", "pass", "fail"),
            solved("add = min", "fail", None),
            solved("add = 1", "timeout", "timeout"),
            solved("add = 2", "pass", None),
            solved("add = 3", None, None),
        ],
        [
            {
                "prompt": PROBLEM["prompt"],
                "response": "add = sum",
                "reward": 1.0,
                "meta": {
                    **KNOWN,
                    "base_status": "pass",
                    "plus_status": "pass",
                    "base_fail_tests": [],
                    "plus_fail_tests": [],
                },
            },
            {"response": "add = max", "reward": 0.0},
            {"response": "add = min", "reward": 0.0},
            {"response": "add = 1", "reward": 0.0},
            {"response": "add = 2", "reward": 1.0},
            {"response": "add = 3", "reward": None},
        ],
        file="samples_eval_results.json",
        write=evalplus,
        others={"problems.jsonl": [PROBLEM]},
        options={"join": "problems.jsonl"},
        corrupt={
            "solution": (None, "solution: expected text, got None"),
            "base_status": ("crash", "base_status: expected pass, fail or timeout, got 'crash'"),
            "plus_status": ("crash", "plus_status: expected pass, fail or timeout, got 'crash'"),
        },
    ),
)

EXAMPLES = (*LM_EVAL, *LIGHTEVAL, *HELM, *CODE)
