"""Read results of evaluations: samples of lm-evaluation-harness, one row per filter; lighteval's details of a
task; HELM, a run's folder or its scenario_state.json; OpenAI Evals, promptfoo, HumanEval and EvalPlus.

A log of OpenAI Evals has one event per line: first the run's `spec`, then events with a `sample_id`, in any
order. Programs for problems in HumanEval's form are joined with the file of problems.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, text, unpacked
from agro.io.jsonlines import Line
from agro.logs import exchanges
from agro.logs.protocol import Context, Item, Row, ScoredDocument, SkipRecord, line_of
from agro.logs.records import grouped, settings, token_fields, unlisted, with_thought
from agro.logs.values import a_list, list_of_length, number, parsed, total, wrong
from agro_formats.traces import Scores, TraceSpan, described, read_spans, responses

_NO_METRICS = (
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"),
    *("doc_hash", "prompt_hash", "target_hash"),
)


def read_lm_eval(row: Row, context: Context) -> list[Item]:
    """Read the rows of one filter. A response has one row per filter, with that filter's metrics.

    A metric belongs to the row. If the row has several responses, theirs are unknown unless it is a list.
    """
    name = row.get("filter")
    wanted = context.choose.get("filter", context.notes.setdefault("filter", name))
    if name != wanted:
        raise SkipRecord(f"of the filter {name}; taken is {wanted} (--choose filter=NAME)")
    prompt, gen_kwargs = _arguments(row["arguments"])
    resps = row["resps"]
    if not (isinstance(resps, list) and len(resps) == 1 and isinstance(resps[0], list) and resps[0]):
        raise wrong("resps", "a list with the list of responses", resps)
    count, metrics = len(resps[0]), dict[str, list[Any]]()
    for metric in _metric_names(row, (int, float)):
        value = row.get(metric)
        if isinstance(value, list) and len(value) == count:
            metrics[metric] = value
        elif count == 1:
            metrics[metric] = [value]
    common = {
        "prompt": prompt,
        "answer": row.get("target"),
        "sampling": settings(gen_kwargs),
        "meta": omit(row, ("arguments", "resps", "target", "metrics")) | {"gen_kwargs": gen_kwargs},
    }
    items = []
    for i, response in enumerate(resps[0]):
        name, parts = f"resps[0][{i}]", {metric: values[i] for metric, values in metrics.items()}
        reward = _reward(parts, parts, context.rewards, 1 if metrics else count, "responses")
        items.append(Item.of({**common, "response": text(response, name), "reward": reward}, name))
    return items


def _arguments(arguments: Any) -> tuple[Any, dict[str, Any]]:
    """The rendered prompt and the settings, which older versions list without names."""
    if isinstance(arguments, dict):
        generation = entry(arguments.get("gen_args_0"), "arguments.gen_args_0")
        prompt, gen_kwargs = generation.get("arg_0"), generation.get("arg_1")
    else:
        if not isinstance(arguments, list) or not arguments:
            raise wrong("arguments", "a list of requests", arguments)
        prompt, gen_kwargs = list_of_length(arguments[0], "arguments", 2, "arguments of a request")
    if not isinstance(gen_kwargs, dict):
        way_out = "this task takes log-likelihoods of given answers, and has no generated text"
        raise wrong("arguments", "the settings of a generation", gen_kwargs, way_out)
    if isinstance(prompt, list) and len(prompt) == 1:  # messages, for a model behind an API
        return objects(parsed(text(prompt[0], "arguments"), "arguments"), "arguments"), gen_kwargs
    return text(prompt, "arguments"), gen_kwargs


def _metric_names(row: Row, kinds: tuple[type, ...] = (object,)) -> list[str]:
    """The names of a row's metrics; older versions don't list them: all other columns of these `kinds`."""
    names = row.get("metrics")
    if isinstance(names, list):
        return [text(name, f"metrics[{i}]") for i, name in enumerate(names)]
    return [name for name in row if name not in _NO_METRICS and isinstance(row[name], kinds)]


def lm_eval_scored(row: Row) -> ScoredDocument:
    """The document with its scores by "METRIC,FILTER", as the harness names them in its results. The output
    may be text, or the log-likelihoods of given answers."""
    scores = {}
    for name in _metric_names(row):
        value = row.get(name)
        values = value if isinstance(value, list) and value else [value]
        if all(isinstance(x, int | float) for x in values):  # otherwise the metric is the task's
            key = f"{name},{row['filter']}" if "filter" in row else str(name)
            scores[key] = sum(values) / len(values)
    return ScoredDocument("", str(row["doc_id"]), _as_text(row["doc"]), _as_text(row["arguments"]), scores)


def _as_text(value: Any) -> str:
    """One line per value, after its name, without brackets, which the search for near-copies would count."""
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_as_text(item)}" for name, item in value.items())
    return "\n".join(map(_as_text, value)) if isinstance(value, list) else str(value)


def _reward(
    metrics: Row, columns: Collection[str], weights: Mapping[str, float], count: int, noun: str
) -> float | None:
    """The reward by a document's metrics; with several responses it is unknown, and --reward is refused."""
    if count == 1:
        return total(metrics, columns, weights) if columns or weights else None
    if weights:
        raise Refused(
            f"--reward {next(iter(weights))}: one number for {count} {noun}; leave --reward out and score "
            "each (agro score)"
        )
    return None


def read_lighteval(row: Row, context: Context) -> list[Item]:
    """Read a document's responses. Its metrics are unknown for each of several responses."""
    doc, output = entry(row["doc"], "doc"), entry(row["model_response"], "model_response")
    texts = output.get("text")
    if not isinstance(texts, list):
        raise wrong("model_response.text", "a list of texts", texts)
    if not texts:
        raise Refused("model_response.text: no text was generated: the task takes log-probs of given answers")
    metric = entry(row["metric"], "metric")
    measured = [name for name, value in metric.items() if value is not None]
    reasonings = a_list(output.get("reasonings"), "model_response.reasonings")
    prompt_ids = a_list(output.get("input_tokens"), "model_response.input_tokens")
    ids = (prompt_ids and output.get("output_tokens")) or [[]] * len(texts)
    ids = list_of_length(ids, "model_response.output_tokens", len(texts), "lists, one per response")
    choices, gold = a_list(doc.get("choices"), "doc.choices"), doc.get("gold_index")
    indices = gold if isinstance(gold, list) else [gold]
    right = [choices[index] for index in indices if isinstance(index, int) and 0 <= index < len(choices)]
    details = omit(output, ("input", "text", "input_tokens", "output_tokens", "reasonings"))
    details = {name: value for name, value in details.items() if value != []}
    meta = omit(row, ("model_response",)) | {"model_response": details}
    common = {
        "prompt": output.get("input") or text(doc.get("query"), "doc.query"),
        "reward": _reward(metric, measured, context.rewards, len(texts), "responses"),
        "answer": _one_or_all(right),
    }
    items = []
    for index, response in enumerate(texts):
        record = {**common, "response": text(response, f"model_response.text[{index}]"), "meta": meta}
        if index < len(reasonings):
            record = with_thought(record, reasonings[index])
        own = a_list(ids[index], f"model_response.output_tokens[{index}]")
        items.append(Item.of(record | (token_fields(prompt_ids, own) if own else {}), f"text[{index}]"))
    return items


def _one_or_all(answers: list[Any]) -> Any:
    """The only right answer, a list of several, or None."""
    return answers[0] if len(answers) == 1 else answers or None


def lighteval_scored(row: Row) -> ScoredDocument:
    doc, metric = entry(row["doc"], "doc"), entry(row["metric"], "metric")
    scores = {name: number(value, f"metric.{name}") for name, value in metric.items()}
    document = _as_text([doc.get("query"), doc.get("choices")])
    prompt = _as_text(entry(row["model_response"], "model_response").get("input") or doc.get("query"))
    return ScoredDocument(str(doc.get("task_name") or ""), str(doc.get("id")), document, prompt, scores)


_STATES, _STATS = "scenario_state.json", "per_instance_stats.json"


def is_helm(path: Path) -> bool:
    return path.name == _STATES or (path / _STATES).is_file()


def helm_records(path: Path) -> Iterator[Line]:
    """The request states, each with the statistics of its instance, trial and perturbation."""
    import ijson

    folder = path.parent if path.name == _STATES else path
    states_path, stats_path = folder / _STATES, folder / _STATS
    stats: dict[str, list[Any]] = {}

    def key(instance: Any, item: Row, perturbation: Any) -> str:
        return json.dumps([instance, item.get("train_trial_index"), perturbation], sort_keys=True)

    def joined(state: Any) -> dict[str, Any]:
        fields = entry(state, "request_states")
        instance = entry(fields.get("instance"), "instance")
        name = key(instance.get("id"), fields, instance.get("perturbation"))
        return fields | {"stats": stats.get(name, [])}

    try:
        if stats_path.is_file():
            with stats_path.open("rb") as file:
                for item in ijson.items(file, "item", use_float=True):
                    name = key(item.get("instance_id"), item, item.get("perturbation"))
                    stats.setdefault(name, []).extend(item.get("stats", []))
        with states_path.open("rb") as file:
            for number, state in enumerate(ijson.items(file, "request_states.item", use_float=True), 1):
                yield line_of(f"{states_path}:{number}", number, partial(joined, state))
    except ijson.JSONError as error:
        raise Refused(f"{folder}: expected HELM's {_STATES} and {_STATS}: {error}") from None
    except OSError as error:
        raise Refused(f"{states_path}: can't be read: {error.strerror or error}") from None


def read_helm(row: Row, context: Context) -> list[Item]:
    """Read the completions of an instance. Its scores are unknown for each of several completions. Log-probs
    belong to pieces of text, and only go into `meta`."""
    if row.get("reference_index") is not None or row.get("request_mode") == "calibration":
        raise SkipRecord("log-probs of given answers, no free responses")
    request, result = entry(row["request"], "request"), entry(row.get("result"), "result")
    if result.get("success") is not True:
        raise Refused(f"result.success: expected true, got {result.get('success')}: {result.get('error')}")
    completions = objects(result.get("completions"), "result.completions")
    prompt = request.get("messages") or text(request.get("prompt"), "request.prompt")
    values: dict[str, float | None] = {}  # means by name; unknown without a count
    for stat in objects(row["stats"], "stats"):
        name = text(entry(stat.get("name"), "stats.name").get("name"), "stats.name.name")
        values[name] = number(stat.get("mean"), f"stats.{name}.mean")
    right = []
    references = entry(row["instance"], "instance").get("references") or []
    for reference in objects(references, "instance.references"):
        if "correct" in reference.get("tags", []):
            right.append(entry(reference.get("output"), "instance.references.output").get("text"))
    common = {
        "prompt": prompt,
        "reward": _reward(values, values, context.rewards, len(completions), "completions"),
        "answer": _one_or_all(right),
        "sampling": settings(request),
        "model": request.get("model"),
    }
    meta = omit(row, ("request", "result", "stats"))
    meta["stats"] = {name: value for name, value in values.items() if value is not None}
    items = []
    for index, completion in enumerate(completions):
        response = text(completion.get("text"), f"result.completions[{index}].text")
        reason = entry(completion.get("finish_reason"), "finish_reason").get("reason")
        details = {"completion": omit(completion, ("text", "finish_reason", "thinking")), "finish": reason}
        record = {**common, "response": response, "meta": meta | omit(details, ())}
        record = with_thought(record, entry(completion.get("thinking"), "thinking").get("text"))
        items.append(Item.of(record, f"completions[{index}]"))
    return items


_OPENAI_EVALS_COLUMNS = ("prompt", "sampled", "model", "correct", "expected", "picked", "options")


def gather_openai_evals(lines: Iterator[Line]) -> Iterator[Line]:
    """One record per sample, with the run's `spec`."""
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
    """Read the responses of a sample, with the scores in its `match` and `metrics` events.

    If a model grades, the first sampling is that of the graded model.
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
        raise Refused(f"events: expected one of type sampling, got none {errors or ''!s:.300}".strip())
    judged = data_by_type.get("match", []) + data_by_type.get("metrics", [])
    if any("choice" in data for data in data_by_type.get("metrics", [])):
        samplings = samplings[:1]
    models = a_list(spec.get("completion_fns"), "spec.completion_fns")
    parsed = []
    for i, data in enumerate(samplings):
        sampled, model = data.get("sampled"), data.get("model") or (models[0] if models else None)
        if isinstance(sampled, list):
            sampled = {"choices": [{"text": one} for one in sampled]}
        parsed.append(TraceSpan(i, None, data.get("prompt"), sampled, is_call=True, model=model))
    answer = next((data["expected"] for data in judged if data.get("expected") is not None), None)
    scores: Scores = {}
    for data in judged:
        for name, value in data.items():
            is_text = isinstance(value, str) and name not in _OPENAI_EVALS_COLUMNS
            if is_text or isinstance(value, bool | int | float):
                scores.setdefault(name, []).append(value)
    details = {"sample_id": events[0].get("sample_id"), "run_id": events[0].get("run_id")}
    details["eval"] = spec.get("eval_name")
    for data in [*samplings, *judged]:
        details |= omit(data, _OPENAI_EVALS_COLUMNS)
    return read_spans(parsed, scores, context, omit(details, ()), answer)


_ERROR = 2  # failureReason of a test whose provider failed; 1 is an assertion's
_PROMPTFOO_COLUMNS = (
    *("prompt", "response", "provider", "success", "score", "namedScores", "tokenUsage", "latencyMs"),
)


def read_promptfoo(row: Row, context: Context) -> list[Item]:
    """Read a test. The reward is its `score`, the weighted mean of its assertions, or what --reward names. A
    test without assertions has no scores."""
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
    output = response.get("output")
    calls = output if isinstance(output, list) else [output]
    reply = {"content": output}
    if calls and all(isinstance(one, dict) and "function" in one for one in calls):
        reply = {"role": "assistant", "content": "", "tool_calls": calls}
    elif not isinstance(output, str):
        cause = "promptfoo or a transform made a value of it, so that the model's own text isn't there"
        raise wrong("response.output", "text", output, cause)
    return responses(prompt, [reply], "response", common)


_STATUS = {"pass": 1.0, "fail": 0.0, "timeout": 0.0}
_HUMAN_EVAL_COLUMNS = ("task_id", "completion", "solution")


def _program(row: Row, context: Context, reward: float | None) -> list[Item]:
    """Read a completion, which continues the prompt, or a solution, a program that may begin with it."""
    task = text(row["task_id"], "task_id")
    problem = context.joined_record("task_id", task, "the file of problems", "problem")
    prompt, name = text(problem["prompt"], "prompt"), "solution" if "solution" in row else "completion"
    response = text(row[name], name)
    tests = {"task_id": task, "entry_point": problem.get("entry_point"), "test": problem.get("test")}
    record = {
        "prompt": prompt,
        "response": response.removeprefix(prompt) if name == "solution" else response,
        "prompt_id": task,
        "reward": reward,
        "meta": omit(tests, ()) | omit(row, _HUMAN_EVAL_COLUMNS),
    }
    return [Item.of(record, name)]


def read_human_eval(row: Row, context: Context) -> list[Item]:
    return _program(row, context, number(row.get("passed"), "passed"))


def gather_evalplus(lines: Iterator[Line]) -> Iterator[Line]:
    """The solutions of all problems in EvalPlus's file of results."""
    return unlisted(lines, _solutions)


def _solutions(results: Row) -> list[Any] | None:
    if "eval" not in results:  # a file with one solution per line
        return None
    rows, tasks = list[Any](), entry(results["eval"], "eval")
    if not tasks:
        raise Refused(f"eval: expected solutions by the task's name, got {results['eval']!r:.80}")
    for task, solutions in tasks.items():
        for one in solutions if isinstance(solutions, list) else [solutions]:
            rows.append({"task_id": task, **one} if isinstance(one, dict) else one)
    return rows


def read_evalplus(row: Row, context: Context) -> list[Item]:
    """Read a solution, which has to pass both sets of tests; the larger set may not have been run."""
    verdicts = []
    for name in ("base_status", "plus_status"):
        status = row.get(name)
        if status not in (None, *_STATUS):
            raise wrong(name, "pass, fail or timeout", status)
        if status is not None:
            verdicts.append(_STATUS[status])
    return _program(row, context, min(verdicts, default=None))
