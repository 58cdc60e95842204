"""Read logged model calls and their scores, one call per record or a trace of spans, by the declarations in
`traces.toml`.

Scores are an object by name, or a list of objects with name, value, whether it is unknown, and, for a trace,
the span that they judge.

The responses of a trace are those of its outermost model calls; without any, the trace is a single call. A
call whose prompt begins with an earlier call's prompt and reply continues it: both are one conversation of
several turns. Other calls are separate responses. Scores of a call's span are its own. Those of the trace and
of its other spans apply to every call that has none of that name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, unpacked
from agro.io.jsonlines import Line
from agro.io.strictjson import loads
from agro.logs import exchanges
from agro.logs.exchanges import Message, joined_key
from agro.logs.mapping import evaluated as at
from agro.logs.protocol import Context, Item, Row, SkipRecord
from agro.logs.records import SAMPLER, exchange, grouped, settings, unlisted, user
from agro.logs.values import number, total

Scores = dict[str, list[Any]]


def responses(
    prompt: str | list[Message],
    replies: Sequence[Message | list[Message]],
    name: str,
    common: Mapping[str, Any],
) -> list[Item]:
    """One item per response of the call: a message, as `replies` has it, or turns. `common`: further fields
    of the record, including `meta`."""
    if not replies:
        raise Refused(f"{name}: expected a response, got none")
    items = []
    for i, answer in enumerate(replies):
        turns = answer if isinstance(answer, list) else [answer]
        finish, request = turns[-1].get("finish_reason"), prompt
        content: Any = [{key: x for key, x in turn.items() if key != "finish_reason"} for turn in turns]
        if "role" not in content[0]:
            content = content[0]["content"]
        elif isinstance(prompt, str):
            request = [user(prompt)]
        record = exchange(request, content, ("prompt", f"{name}[{i}]"), **common)
        if finish:
            record["meta"]["finish"] = finish
        items.append(Item.of(record, f"{name}[{i}]"))
    return items


def scored(scores: Mapping[str, Sequence[Any]], context: Context) -> float | None:
    """The reward for scores by name: the only one, or the weighted sum of those that --reward names; None
    without a score.

    Raises `Refused` for several scores without --reward, for different values of one score without
    --choose scores=mean or scores=last, and for text in a score that --reward names.
    """
    method = context.chosen("scores", ("mean", "last")) if "scores" in context.choose else None
    values = dict[str, Any]()
    for name, raw in scores.items():
        texts = [value for value in raw if isinstance(value, str)]
        numbers = [] if texts else [x for x in (number(value, name) for value in raw) if x is not None]
        if len(set(numbers)) > 1 and method is None:
            raise Refused(
                f"{name}: expected one value of this score, got {numbers}; say --choose scores=mean, or "
                "scores=last"
            )
        values[name] = next(reversed(texts or numbers), None)  # text is a category
        if method == "mean" and numbers:
            values[name] = sum(numbers) / len(numbers)
    if context.rewards:
        values = {name: values.get(name) for name in context.rewards}
    for name, value in values.items():
        if name in context.rewards and isinstance(value, str):
            raise Refused(f"--reward {name}: its values are text, such as {value!r:.80}, and no numbers")
    numeric = {name: value for name, value in values.items() if not isinstance(value, str)}
    return total(numeric, list(numeric), context.rewards)


def joined_scores(
    context: Context, noun: str, *ids: Any, columns: Sequence[str] = ("value",)
) -> dict[str, list[Any]]:
    """The scores of --join that --reward names, each for the first of `ids` that has one.

    `noun`: what messages call the scores. `columns`: the columns of the value, by preference. Raises
    `Refused` without --reward.
    """
    if context.joined and not context.rewards:
        raise Refused(f"reward: say which of the joined {noun} it is, --reward NAME")
    scores = {}
    for name in context.rewards:
        keys = [joined_key(id, name) for id in ids]
        rows = [context.joined[key] for key in keys if key in context.joined]
        if rows:
            scores[name] = [next((rows[0][column] for column in columns if column in rows[0]), None)]
    return scores


@dataclass(frozen=True)
class TraceSpan:
    """A span, whatever its format."""

    id: Any
    parent: Any  # None for the trace's root
    input: Any
    output: Any
    is_call: bool  # whether it is a model call
    is_judge: bool = False  # whether it scores other spans, so that calls within it are a judge's
    error: Any = None
    model: Any = None
    sampling: dict[str, Any] | None = None
    tools: Any = None
    scores: Scores = field(default_factory=dict)
    names: tuple[str, str] | None = None  # names of input and output, for a call outside a trace


@dataclass
class _Conversation:
    prompt: str | list[Message]
    turns: list[Message]  # between the prompt and the last call's replies
    replies: list[Message]
    spans: list[TraceSpan]
    name: str  # the last call's

    def continues_in(self, prompt: str | list[Message]) -> bool:
        if isinstance(self.prompt, str) or isinstance(prompt, str) or len(self.replies) != 1:
            return False
        history = [*self.prompt, *self.turns, *self.replies]
        # The next call's prompt may omit a message's reasoning.
        return len(prompt) > len(history) and all(
            (one.get(name) or "") == (other.get(name) or "")
            for one, other in zip(history, prompt)
            for name in ("role", "content", "tool_calls")
        )

    def add(self, prompt: list[Message], replies: list[Message], span: TraceSpan, name: str) -> None:
        self.turns += [*self.replies, *prompt[len(self.prompt) + len(self.turns) + 1 :]]
        self.replies, self.name = replies, name
        self.spans.append(span)


def read_spans(
    spans: Sequence[TraceSpan], scores: Scores, context: Context, meta: Mapping[str, Any], answer: Any = None
) -> list[Item]:
    """The responses of a trace. `spans`: in the order of their start; `scores`: the trace's own."""
    calls = _calls(spans)
    successful = [(i, span) for i, span in calls if span.error is None]
    if not successful:
        errors = [span.error for _, span in calls]
        reason = f"error: the trace has no response: {errors[0]!r:.200}" if errors else ""
        raise Refused(
            reason or "spans: expected a call of a model, or a root with input and output, got none"
        )
    conversations = list[_Conversation]()
    for i, span in successful:
        input_name, output_name = span.names or (f"spans[{i}].input", f"spans[{i}].output")
        name = f"spans[{i}]" if span.names is None else output_name
        prompt = exchanges.prompt(span.input, input_name)
        replies = [{"role": "assistant"} | reply for reply in exchanges.replies(span.output, output_name)]
        earlier = next((c for c in reversed(conversations) if c.continues_in(prompt)), None)
        if earlier is None:
            conversations.append(_Conversation(prompt, [], replies, [span], name))
        else:
            assert isinstance(prompt, list)
            earlier.add(prompt, replies, span, name)
    call_indices = {i for i, _ in calls}
    trace_scores = _merged([scores, *(span.scores for i, span in enumerate(spans) if i not in call_indices)])
    if len(successful) < len(calls):
        meta = {**meta, "failed_calls": len(calls) - len(successful)}
    items = list[Item]()
    for conversation in conversations:
        items += _items(conversation, trace_scores, context, meta, answer)
    return items


def _calls(spans: Sequence[TraceSpan]) -> list[tuple[int, TraceSpan]]:
    """The outermost model calls that aren't a judge's, or else the root, each with its position."""
    spans_by_id, usual = {span.id: span for span in spans}, list[tuple[int, TraceSpan]]()
    for i, span in enumerate(spans):
        is_inner, seen = span.is_judge, {span.id}
        above = None if is_inner else spans_by_id.get(span.parent)
        while above is not None and above.id not in seen and not is_inner:
            is_inner = above.is_judge or above.is_call
            seen.add(above.id)
            above = spans_by_id.get(above.parent)
        if not is_inner:
            usual.append((i, span))
    calls = [(i, span) for i, span in usual if span.is_call]
    return calls or [(i, span) for i, span in usual if span.parent not in spans_by_id][:1]


def _merged(parts: Sequence[Scores]) -> Scores:
    merged: Scores = {}
    for name, values in ((name, values) for part in parts for name, values in part.items()):
        merged.setdefault(name, []).extend(values)
    return merged


def _items(
    conversation: _Conversation, scores: Scores, context: Context, meta: Mapping[str, Any], answer: Any
) -> list[Item]:
    judged = scores | _merged([span.scores for span in conversation.spans])
    final = conversation.spans[-1]
    common = {
        "reward": scored(judged, context),
        "answer": answer,
        "model": final.model,
        "sampling": final.sampling,
        "meta": {**meta, **({"scores": judged} if judged else {})},
        "tools": final.tools,
    }
    replies = list[Message | list[Message]]()
    for message in conversation.replies:
        is_plain = message.keys() - {"finish_reason"} == {"role", "content"} and not conversation.turns
        if is_plain and isinstance(conversation.prompt, str):
            replies.append({name: value for name, value in message.items() if name != "role"})
        else:
            replies.append([*conversation.turns, message])
    return responses(conversation.prompt, replies, conversation.name, common)


def described(row: Row, names: Sequence[str]) -> dict[str, Any]:
    """The non-empty columns of a trace, for `meta`."""
    return {name: value for name, value in omit(row, names).items() if value not in ([], {}, "")}


Declaration = Mapping[str, Any]
SPANS = "spans"  # the column that lists the lines of a merged record


def opened(row: Row, spec: Declaration) -> Row:
    """The row with the JSON texts of the declared columns parsed."""
    names, column = spec.get("unpack", ()), spec.get("json")
    row = {key: unpacked(value) if key in names else value for key, value in row.items()}
    if column in row:
        row[column] = {key: _loaded(value) for key, value in entry(row[column], column).items()}
    return row


def _loaded(value: Any) -> Any:
    try:
        return loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def read(spec: Declaration, row: Row, context: Context) -> list[Item]:
    """The responses of a record."""
    span_spec = spec["span"]
    record = opened(row, spec)
    listed = at(record, spec["spans"]) if "spans" in spec else row.get(SPANS, [record])
    rows = [opened(each, span_spec) for each in objects(listed or [], "spans")]
    rows.sort(key=lambda span: [_rank(at(span, key)) for key in spec.get("order", ())])
    root = at(record, spec.get("root", ""))
    rows = rows if root is None else [root, *rows]
    first_span = next((span for span in rows if at(span, span_spec.get("parent", "")) is None), rows[0])
    parsed = [_span(span, f"spans[{i}]", span_spec, context) for i, span in enumerate(rows)]
    if root is not None:
        parsed = [parsed[0], *(replace(s, parent=s.parent or parsed[0].id) for s in parsed[1:])]
    scores: Scores = {}
    span_scores = {span.id: span.scores for span in parsed}
    for name, value, judged in _scores_in(record, spec, spec.get("scores", "scores")):
        _add(span_scores.get(judged, scores) if judged else scores, name, value)
    if "joined" in spec:
        scores |= joined_scores(
            context, spec["joined"]["noun"], row.get("id"), columns=spec["joined"]["columns"]
        )
    described_row = at(record, spec["about"]) if "about" in spec else first_span
    answer = at(record if "about" in spec else first_span, spec.get("answer", ""))
    return read_spans(parsed, scores, context, described(described_row, spec["drop"]), answer)


def _rank(value: Any) -> tuple[bool, Any]:
    """A sort key that puts numbers first."""
    return not isinstance(value, int | float), value if isinstance(value, int | float) else str(value)


def _span(row: Row, name: str, spec: Declaration, context: Context) -> TraceSpan:
    is_alone = "id" not in spec
    for condition, reason in spec.get("skip", {}).items():
        if at(row, condition):
            raise SkipRecord(reason)
    for condition, reason in spec.get("refuse", {}).items():
        if value := at(row, condition):
            raise Refused(f"{'' if is_alone else f'{name}.'}{reason}: {value!r:.80}")
    request: dict[str, Any] = {}
    for expression in spec["settings"]:
        options = at(row, expression)
        request |= options if isinstance(options, dict) else {}
    is_judge = bool(at(row, spec.get("is_judge", "")))
    scores: Scores = {}
    for title, value, _ in () if is_judge or is_alone else _scores_in(row, spec, f"{name}.scores"):
        _add(scores, title, value)
    return TraceSpan(
        id=name if is_alone else at(row, spec["id"]),
        parent=at(row, spec.get("parent", "")),
        input=_text(row, "input", spec, context),
        output=_text(row, "output", spec, context),
        is_call=bool(at(row, spec.get("is_call", ""))),
        is_judge=is_judge,
        error=at(row, spec.get("error", "")) or None,
        model=at(row, spec["model"]),
        sampling=settings(request, *([SAMPLER] if is_alone else [])),
        tools=at(row, spec.get("tools", "")),
        scores=scores,
        names=(spec["input"], spec["output"]) if is_alone else None,
    )


def _text(row: Row, key: str, spec: Declaration, context: Context) -> Any:
    """The input or output, which may be JSON text. Raises `Refused` if that is cut off."""
    value = at(row, spec[key])
    if not isinstance(value, str) or not spec.get("is_whole"):
        return value
    content = unpacked(value)
    if isinstance(content, str) and content.lstrip()[:2] in ('{"', "[{"):
        raise Refused(f"{key}: expected JSON, got {value!r:.80}; it may be cut off: export it again")
    return _loaded(value) if context.is_text and value[:1] == value[-1:] == '"' else content


def _scores_in(row: Row, spec: Declaration, name: str) -> Iterator[tuple[str, Any, Any]]:
    """The scores of a record or a span: name, value, and judged span."""
    raw, inner = at(row, spec.get("scores", "")) or [], spec.get("value")
    if isinstance(raw, dict) and inner:
        parts = {key: entry(value, f"{name}.{key}") for key, value in raw.items()}
        raw = {key: number(part.get(inner), f"{name}.{key}.{inner}") for key, part in parts.items()}
    if isinstance(raw, dict):
        raw = [{"name": key, "value": value} for key, value in raw.items()]
    for score in objects(raw, name):
        title, value = str(score.get("name")), score.get("value")
        for prefix in spec.get("prefixes", ()):
            title = title.removeprefix(prefix)
        if isinstance(value, dict) and spec.get("are_flat"):
            yield from ((part, each, None) for part, each in _numbers(title, value))
            continue
        if isinstance(value, dict) or (isinstance(value, list) and "are_plain" in spec):
            location = spec.get("are_plain", name)
            raise Refused(f"{location}: expected a number, a flag or text, got {value!r:.80}")
        if isinstance(value, str):
            value = spec.get("words", {}).get(value.lower(), value)
        yield title, None if score.get("is_unknown") else value, score.get("span")


def _numbers(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers and flags in an object, by path."""
    for key, value in values.items():
        path = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            yield from _numbers(path, value)
        elif isinstance(value, bool | int | float):
            yield path, value


def _add(scores: Scores, name: str, value: Any) -> None:
    scores.setdefault(name, []).extend(value if isinstance(value, list) else [value])


def gather(spec: Declaration, lines: Iterator[Line]) -> Iterator[Line]:
    """One record per trace."""
    column = spec["group"].get("list")
    rows = unlisted(lines, lambda row: row.get(column)) if column else lines
    return grouped(rows, lambda row: str(row.get(spec["group"]["by"])), SPANS)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
TRACES = SimpleNamespace(
    **{
        name: SimpleNamespace(read=partial(read, spec), gather=partial(gather, spec))
        for name, spec in _TABLES.items()
    }
)
