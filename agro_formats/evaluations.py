"""Results of evaluations: OpenAI Evals, promptfoo, HumanEval and EvalPlus.

OpenAI Evals: logs of runs, one event a line.

As written by openai/evals (0041458): evals/record.py. The first line has the run's `spec`; the events of a
sample, which stand anywhere in the file, have its `sample_id`.

promptfoo: results of evaluations, as JSON (version 3 and later) or JSON Lines.

Fields as in promptfoo (0011eb0): src/types/index.ts, `EvaluateResult` and `EvaluateSummaryV3`. A test without
assertions passes with score 1 (src/assertions/assertionsResult.ts), which says nothing.

Programs for HumanEval's problems and others of its form, joined with the file of problems.

Fields as in human-eval (human_eval/evaluation.py: `result` and `passed` are added to the samples) and in
EvalPlus 0.3.1 at 26d6d00: evalplus/evaluate.py:202-303 (results) and 213-225 (samples).
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
from agro.logs.fields import a_list, grouped, joined_record, number, total, unlisted
from agro.logs.model_calls import identified, identified_by_first, responses
from agro.logs.protocol import Context, Item, Row, line_of
from agro_formats import spans
from agro_formats.spans import described
from agro_formats.table import declared, declared_prompts

_OPENAI_EVALS_COLUMNS = ("prompt", "sampled", "model", "correct", "expected", "picked", "options")


def _gather(lines: Iterator[Line]) -> Iterator[Line]:
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


def _openai_evals_read(row: Row, context: Context) -> list[Item]:
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
    parsed = [_span(i, data, models[0] if models else None) for i, data in enumerate(samplings)]
    answer = next((data["expected"] for data in judged if data.get("expected") is not None), None)
    # The flags, numbers and texts of the events, by name
    scores: spans.Scores = {}
    for data in judged:
        for name, value in data.items():
            is_text = isinstance(value, str) and name not in _OPENAI_EVALS_COLUMNS
            if is_text or isinstance(value, bool | int | float):
                scores.setdefault(name, []).append(value)
    return spans.read(parsed, scores, context, _meta(spec, events[0], [*samplings, *judged]), answer)


def _span(number: int, data: Row, model: Any) -> spans.TraceSpan:
    sampled = data.get("sampled")
    if isinstance(sampled, list):
        sampled = {"choices": [{"text": one} for one in sampled]}
    model = data.get("model") or model
    return spans.TraceSpan(number, None, data.get("prompt"), sampled, is_call=True, model=model)


def _meta(spec: Row, event: Row, data: list[Row]) -> dict[str, Any]:
    details = {name: event.get(name) for name in ("sample_id", "run_id")} | {"eval": spec.get("eval_name")}
    for one in data:
        details |= omit(one, _OPENAI_EVALS_COLUMNS)
    return {name: value for name, value in details.items() if value is not None}


def _openai_evals_fits(row: Row) -> bool:
    spec = row.get("spec")
    if isinstance(spec, dict):
        return "run_id" in spec and "eval_name" in spec
    return row.keys() >= {"run_id", "event_id", "sample_id", "type", "data"}


declared(
    "openai-evals",
    _openai_evals_read,
    _openai_evals_fits,
    gather=_gather,
    identity=lambda row: identified_by_first(row, "events", "run_id", "sample_id"),
)


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


def _promptfoo_results(row: Row) -> list[Any] | None:
    """Those of a file, which may stand in a summary."""
    inner = row.get("results")
    if isinstance(inner, dict):
        inner = inner.get("results")
    return inner if isinstance(inner, list) else None


def _promptfoo_read(row: Row, context: Context) -> list[Item]:
    response = entry(row.get("response"), "response")
    error = response.get("error") or (row.get("error") if "output" not in response else None)
    if row.get("failureReason") == _ERROR or error:
        raise Refused(f"error: the provider gave no response: {error or row.get('error')!r:.200}")
    raw = entry(row.get("prompt"), "prompt").get("raw")
    provider = row.get("provider")
    scores = _promptfoo_scores(row)
    common = {
        "reward": _reward(scores, context),
        "model": provider.get("id") if isinstance(provider, dict) else provider,
        "meta": described(row, _PROMPTFOO_COLUMNS) | ({"scores": scores} if scores else {}),
    }
    return responses(_prompt(text(raw, "prompt.raw")), [_output(response.get("output"))], "response", common)


def _prompt(raw: str) -> Any:
    """Messages where the text is JSON of them."""
    value = unpacked(raw)
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        return exchanges.prompt(value, "prompt.raw")
    return raw


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


def _promptfoo_scores(row: Row) -> dict[str, float | None]:
    """`score` and `success` of the test, and its named scores; none where it has no assertions."""
    graded = entry(row.get("gradingResult"), "gradingResult")
    if not graded or (graded.get("reason") == "No assertions" and not graded.get("componentResults")):
        return {}
    named = entry(row.get("namedScores"), "namedScores")
    values = {**named, "success": row.get("success"), "score": row.get("score")}
    return {name: number(value, name) for name, value in values.items()}


def _reward(scores: dict[str, float | None], context: Context) -> float | None:
    """The test's `score`, which is the weighted mean of its assertions, or what --reward names."""
    if not scores:
        return None
    return total(scores, list(scores), context.rewards or {"score": 1.0})


def _promptfoo_fits(row: Row) -> bool:
    results = _promptfoo_results(row)
    if results:
        row = results[0] if isinstance(results[0], dict) else {}
    return row.keys() >= {"promptIdx", "testIdx", "prompt", "success", "score"}


declared(
    "promptfoo",
    _promptfoo_read,
    _promptfoo_fits,
    gather=lambda lines: unlisted(lines, _promptfoo_results),
    identity=lambda row: identified(row, row.get("id")),
)


_STATUS = {"pass": 1.0, "fail": 0.0, "timeout": 0.0}
_HUMAN_EVAL_COLUMNS = ("task_id", "completion", "solution")


def _sample(row: Row, context: Context) -> list[Item]:
    problem = _problem(row, context)
    record = _program(row, problem)
    record["reward"] = number(row.get("passed"), "passed")
    record["meta"] |= omit(row, _HUMAN_EVAL_COLUMNS)
    return [Item.of(record, "solution" if "solution" in row else "completion")]


def _problem(row: Row, context: Context) -> Row:
    name = text(row["task_id"], "task_id")
    return joined_record(context, "task_id", name, "the file of problems", "problem")


def _program(row: Row, problem: Row) -> dict[str, Any]:
    """A completion continues the prompt. A solution is the whole program, which may begin with the prompt."""
    prompt = text(problem["prompt"], "prompt")
    if "solution" in row:
        response = text(row["solution"], "solution").removeprefix(prompt)
    else:
        response = text(row["completion"], "completion")
    meta = {"task_id": row["task_id"], "entry_point": problem.get("entry_point"), "test": problem.get("test")}
    present = {name: value for name, value in meta.items() if value is not None}
    return {"prompt": prompt, "response": response, "prompt_id": row["task_id"], "meta": present}


def _human_eval_results(path: Path) -> Iterator[Line]:
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


def _result(row: Row, context: Context) -> list[Item]:
    """Both sets of tests must pass; the larger one may not have been run."""
    problem = _problem(row, context)
    record = _program(row, problem)
    verdicts = [_verdict(row.get(name), name) for name in ("base_status", "plus_status")]
    record["reward"] = min((verdict for verdict in verdicts if verdict is not None), default=None)
    record["meta"] |= omit(row, _HUMAN_EVAL_COLUMNS)
    return [Item.of(record, "solution")]


def _verdict(status: Any, name: str) -> float | None:
    if status is None:
        return None
    if status in _STATUS:
        return _STATUS[status]
    raise Refused(f"{name}: expected pass, fail or timeout, got {status!r:.80}")


declared("human-eval", _sample)
declared(
    "evalplus-results",
    _result,
    opens=lambda path: path.name.endswith("eval_results.json"),
    records=_human_eval_results,
)
declared_prompts("human-eval-problems", joined_by=lambda row: str(row["task_id"]))
