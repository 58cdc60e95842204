"""Results of evaluations: OpenAI Evals, promptfoo, HumanEval and EvalPlus.

A log of OpenAI Evals has one event a line: the first one the run's `spec`, others a `sample_id`, anywhere in
the file. Programs for HumanEval's problems and others of its form are joined with the file of problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, text, unpacked
from agro.io.jsonlines import Line, content
from agro.logs import exchanges
from agro.logs.fields import a_list, grouped, joined_record, number, total
from agro.logs.model_calls import responses
from agro.logs.protocol import Context, Item, Row, line_of
from agro_formats import spans
from agro_formats.spans import described

_OPENAI_EVALS_COLUMNS = ("prompt", "sampled", "model", "correct", "expected", "picked", "options")


def gather_openai_evals(lines: Iterator[Line]) -> Iterator[Line]:
    """A record a sample, with the run's `spec`."""
    spec: dict[str, Any] = {}
    for line in grouped(lines, lambda row: row.get("sample_id"), "events"):
        if line.error:
            yield line
            continue
        events = line.value["events"]
        spec = next((row["spec"] for row in events if "spec" in row), spec)
        events = [row for row in events if "spec" not in row and "final_report" not in row]
        if events:
            yield line._replace(value={"spec": spec, "events": events})


def read_openai_evals(row: Row, context: Context) -> list[Item]:
    """What was sampled for a sample, with what its events of `match` and `metrics` say of it.

    Where a model grades, the first sampling is of the model that is graded.
    """
    spec, events = entry(row.get("spec"), "spec"), objects(row.get("events", [row]), "events")
    data_by_type: dict[str, list[Row]] = {}
    for i, event in enumerate(events):
        data_by_type.setdefault(str(event.get("type")), []).append(
            entry(event.get("data"), f"events[{i}].data")
        )
    samplings = data_by_type.get("sampling", [])
    if not samplings:
        errors = [f"{data.get('type')}: {data.get('message')}" for data in data_by_type.get("error", [])]
        raise Refused(f"events: expected one of type sampling, got none{errors or ''!s:.300}")
    judged = data_by_type.get("match", []) + data_by_type.get("metrics", [])
    if any("choice" in data for data in data_by_type.get("metrics", [])):
        samplings = samplings[:1]
    models = a_list(spec.get("completion_fns"), "spec.completion_fns")
    parsed = []
    for i, data in enumerate(samplings):
        sampled, model = data.get("sampled"), data.get("model") or (models[0] if models else None)
        if isinstance(sampled, list):
            sampled = {"choices": [{"text": one} for one in sampled]}
        parsed.append(spans.TraceSpan(i, None, data.get("prompt"), sampled, is_call=True, model=model))
    answer = next((data["expected"] for data in judged if data.get("expected") is not None), None)
    # The flags, numbers and texts of the events, by name
    scores: spans.Scores = {}
    for data in judged:
        for name, value in data.items():
            is_text = isinstance(value, str) and name not in _OPENAI_EVALS_COLUMNS
            if is_text or isinstance(value, bool | int | float):
                scores.setdefault(name, []).append(value)
    details = {"sample_id": events[0].get("sample_id"), "run_id": events[0].get("run_id")}
    details["eval"] = spec.get("eval_name")
    for data in [*samplings, *judged]:
        details |= omit(data, _OPENAI_EVALS_COLUMNS)
    meta = {name: value for name, value in details.items() if value is not None}
    return spans.read(parsed, scores, context, meta, answer)


_ERROR = 2  # failureReason of a test whose provider failed; 1 is an assertion's
_PROMPTFOO_COLUMNS = (
    "prompt",
    "response",
    "provider",
    "success",
    "score",
    "namedScores",
    "tokenUsage",
    "latencyMs",
)


def read_promptfoo(row: Row, context: Context) -> list[Item]:
    """The reward is the test's `score`, the weighted mean of its assertions, or what --reward names. A test
    without assertions has no scores."""
    response = entry(row.get("response"), "response")
    error = response.get("error") or (row.get("error") if "output" not in response else None)
    if row.get("failureReason") == _ERROR or error:
        raise Refused(f"error: the provider gave no response: {error or row.get('error')!r:.200}")
    raw = text(entry(row.get("prompt"), "prompt").get("raw"), "prompt.raw")
    messages = unpacked(raw)
    is_chat = isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)
    prompt = exchanges.prompt(messages, "prompt.raw") if is_chat and messages else raw
    graded = entry(row.get("gradingResult"), "gradingResult")
    scores: dict[str, float | None] = {}
    if graded and (graded.get("reason") != "No assertions" or graded.get("componentResults")):
        named = entry(row.get("namedScores"), "namedScores")
        values = {**named, "success": row.get("success"), "score": row.get("score")}
        scores = {name: number(value, name) for name, value in values.items()}
    provider = row.get("provider")
    common = {
        "reward": total(scores, list(scores), context.rewards or {"score": 1.0}) if scores else None,
        "model": provider.get("id") if isinstance(provider, dict) else provider,
        "meta": described(row, _PROMPTFOO_COLUMNS) | ({"scores": scores} if scores else {}),
    }
    return responses(prompt, [_output(response.get("output"))], "response", common)


def _output(value: Any) -> Any:
    """Text, or calls of tools."""
    if isinstance(value, str):
        return value
    calls = value if isinstance(value, list) else [value]
    if calls and all(isinstance(one, dict) and "function" in one for one in calls):
        return {"role": "assistant", "content": "", "tool_calls": calls}
    raise Refused(
        f"response.output: expected text, got {value!r:.80}: promptfoo or a transform made a value of it, so "
        "that the model's own text isn't there"
    )


_STATUS = {"pass": 1.0, "fail": 0.0, "timeout": 0.0}
_HUMAN_EVAL_COLUMNS = ("task_id", "completion", "solution")


def _program(row: Row, context: Context, reward: float | None) -> list[Item]:
    """A completion continues the prompt. A solution is the whole program, which may begin with the prompt."""
    task = text(row["task_id"], "task_id")
    problem = joined_record(context, "task_id", task, "the file of problems", "problem")
    prompt, name = text(problem["prompt"], "prompt"), "solution" if "solution" in row else "completion"
    response = text(row[name], name)
    tests = {"task_id": task, "entry_point": problem.get("entry_point"), "test": problem.get("test")}
    record = {
        "prompt": prompt,
        "response": response.removeprefix(prompt) if name == "solution" else response,
        "prompt_id": task,
        "reward": reward,
        "meta": {k: x for k, x in tests.items() if x is not None} | omit(row, _HUMAN_EVAL_COLUMNS),
    }
    return [Item.of(record, name)]


def read_human_eval(row: Row, context: Context) -> list[Item]:
    return _program(row, context, number(row.get("passed"), "passed"))


def is_evalplus(path: Path) -> bool:
    return path.name.endswith("eval_results.json")


def evalplus_records(path: Path) -> Iterator[Line]:
    """The solutions of all problems in EvalPlus' file of results."""
    import ijson

    number = 0
    try:
        with content(path) as (file, _):
            for name, solutions in ijson.kvitems(file, "eval", use_float=True):
                for solution in solutions if isinstance(solutions, list) else [solutions]:
                    number += 1
                    yield line_of(f"{path}:{number}", number, partial(_solution, name, solution))
    except ijson.JSONError as error:
        raise Refused(f"{path}: expected EvalPlus' results, with `eval`: {error}") from None


def _solution(name: str, solution: Any) -> dict[str, Any]:
    return {"task_id": name, **entry(solution, name)}


def read_evalplus(row: Row, context: Context) -> list[Item]:
    """Both sets of tests must pass; the larger one may not have been run."""
    verdicts = []
    for name in ("base_status", "plus_status"):
        if row.get(name) not in (None, *_STATUS):
            raise Refused(f"{name}: expected pass, fail or timeout, got {row[name]!r:.80}")
        if row.get(name) is not None:
            verdicts.append(_STATUS[row[name]])
    return _program(row, context, min(verdicts, default=None))
