"""Logs of model calls, what was answered in them and how it was scored; and logs as declarations, of one call
a record or of a trace with its spans: `traces.toml`.

Scores are an object by name, or a list of objects with name, value, whether it is unknown, and, of a trace's,
the span that they judge.

Responses of a trace are those of the outermost calls of a model; a trace without any is one call itself. A
call that begins with what an earlier one was asked and answered continues it: both are one conversation of
several turns. Other calls are responses of their own. Scores of a call's span are its own; those of the trace
and of its other spans are of every call that has none of that name.
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
    """An item a response of the call: a message, as `replies` has it, or turns. `common`: further fields of
    the record, `meta` among them."""
    if not replies:
        raise Refused(f"{name}: expected a response, got none")
    items = []
    for i, answer in enumerate(replies):
        turns = answer if isinstance(answer, list) else [answer]
        finish, asked = turns[-1].get("finish_reason"), prompt
        said: Any = [{key: x for key, x in turn.items() if key != "finish_reason"} for turn in turns]
        if "role" not in said[0]:
            said = said[0]["content"]
        elif isinstance(prompt, str):
            asked = [user(prompt)]
        record = exchange(asked, said, ("prompt", f"{name}[{i}]"), **common)
        if finish:
            record["meta"]["finish"] = finish
        items.append(Item.of(record, f"{name}[{i}]"))
    return items


def scored(scores: Mapping[str, Sequence[Any]], context: Context) -> float | None:
    """The reward of scores by name: the only one, or those that --reward names. None where there is none.

    Raises `Refused` for several without --reward, for several different values of one without
    --choose scores=mean or scores=last, and for a named one that is text.
    """
    method = context.chosen("scores", ("mean", "last")) if "scores" in context.choose else None
    values = dict[str, Any]()
    for name, given in scores.items():
        texts = [value for value in given if isinstance(value, str)]
        numbers = [] if texts else [x for x in (number(value, name) for value in given) if x is not None]
        if len(set(numbers)) > 1 and method is None:
            raise Refused(
                f"{name}: expected one value of this score, got {numbers}; say --choose scores=mean, or "
                "scores=last"
            )
        values[name] = next(reversed(texts or numbers), None)  # a text is a category
        if method == "mean" and numbers:
            values[name] = sum(numbers) / len(numbers)
    if context.rewards:
        values = {name: values.get(name) for name in context.rewards}
    for name, value in values.items():
        if name in context.rewards and isinstance(value, str):
            raise Refused(f"--reward {name}: its values are text, such as {value!r:.80}, and no numbers")
    known = {name: value for name, value in values.items() if not isinstance(value, str)}
    return total(known, list(known), context.rewards)


def joined_scores(
    context: Context, noun: str, *ids: Any, columns: Sequence[str] = ("value",)
) -> dict[str, list[Any]]:
    """The scores of --join that --reward names, each of the first of `ids` that has one.

    `noun`: what the scores are, for messages. `columns`: of the value, by preference. Raises `Refused` where
    --reward names none.
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
    """What a format says of a span."""

    id: Any
    parent: Any  # None of the trace's root
    input: Any
    output: Any
    is_call: bool  # of a model
    is_judge: bool = False  # whether it scores what others did: calls within it are a judge's
    error: Any = None
    model: Any = None
    sampling: dict[str, Any] | None = None
    tools: Any = None
    scores: Scores = field(default_factory=dict)
    names: tuple[str, str] | None = None  # of a call that isn't in a trace: those of input and output


@dataclass
class _Conversation:
    prompt: str | list[Message]
    turns: list[Message]  # before the last call's replies
    replies: list[Message]
    spans: list[TraceSpan]
    name: str  # of the last call

    def continues_in(self, prompt: str | list[Message]) -> bool:
        if isinstance(self.prompt, str) or isinstance(prompt, str) or len(self.replies) != 1:
            return False
        history = [*self.prompt, *self.turns, *self.replies]
        # In the next call's prompt a message may lack its reasoning.
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
    """The responses of a trace, whose spans are in the order of their begin. `scores`: of the trace."""
    calls = _calls(spans)
    worked = [(i, span) for i, span in calls if span.error is None]
    if not worked:
        errors = [span.error for _, span in calls]
        reason = f"error: the trace has no response: {errors[0]!r:.200}" if errors else ""
        raise Refused(
            reason or "spans: expected a call of a model, or a root with input and output, got none"
        )
    conversations = list[_Conversation]()
    for i, span in worked:
        asked, answered = span.names or (f"spans[{i}].input", f"spans[{i}].output")
        name = f"spans[{i}]" if span.names is None else answered
        prompt = exchanges.prompt(span.input, asked)
        replies = [{"role": "assistant"} | reply for reply in exchanges.replies(span.output, answered)]
        earlier = next((c for c in reversed(conversations) if c.continues_in(prompt)), None)
        if earlier is None:
            conversations.append(_Conversation(prompt, [], replies, [span], name))
        else:
            assert isinstance(prompt, list)
            earlier.add(prompt, replies, span, name)
    call_indices = {i for i, _ in calls}
    trace_scores = _merged([scores, *(span.scores for i, span in enumerate(spans) if i not in call_indices)])
    if len(worked) < len(calls):
        meta = {**meta, "failed_calls": len(calls) - len(worked)}
    items = list[Item]()
    for conversation in conversations:
        items += _items(conversation, trace_scores, context, meta, answer)
    return items


def _calls(spans: Sequence[TraceSpan]) -> list[tuple[int, TraceSpan]]:
    """The outermost calls of a model that aren't a judge's; without any, the root. With their positions."""
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
    """The columns of a trace for `meta`, without empty ones."""
    return {name: value for name, value in omit(row, names).items() if value not in ([], {}, "")}


Declaration = Mapping[str, Any]
SPANS = "spans"  # the column of a record that is made of several lines


def opened(row: Row, how: Declaration) -> Row:
    """The row with what is written as JSON in texts, in the columns that say so."""
    names, inside = how.get("unpack", ()), how.get("json")
    row = {key: unpacked(value) if key in names else value for key, value in row.items()}
    if inside in row:
        row[inside] = {key: _loaded(value) for key, value in entry(row[inside], inside).items()}
    return row


def _loaded(value: Any) -> Any:
    try:
        return loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def read(how: Declaration, row: Row, context: Context) -> list[Item]:
    """The responses of a record."""
    one = how["span"]
    record = opened(row, how)
    listed = at(record, how["spans"]) if "spans" in how else row.get(SPANS, [record])
    rows = [opened(each, one) for each in objects(listed or [], "spans")]
    rows.sort(key=lambda span: [_rank(at(span, key)) for key in how.get("order", ())])
    root = at(record, how.get("root", ""))
    rows = rows if root is None else [root, *rows]
    first = next((span for span in rows if at(span, one.get("parent", "")) is None), rows[0])
    parsed = [_span(span, f"spans[{i}]", one, context) for i, span in enumerate(rows)]
    if root is not None:
        parsed = [parsed[0], *(replace(s, parent=s.parent or parsed[0].id) for s in parsed[1:])]
    scores: Scores = {}
    own = {span.id: span.scores for span in parsed}
    for name, value, judged in _scores_in(record, how, how.get("scores", "scores")):
        _add(own.get(judged, scores) if judged else scores, name, value)
    if "joined" in how:
        scores |= joined_scores(
            context, how["joined"]["noun"], row.get("id"), columns=how["joined"]["columns"]
        )
    about = at(record, how["about"]) if "about" in how else first
    answer = at(record if "about" in how else first, how.get("answer", ""))
    return read_spans(parsed, scores, context, described(about, how["drop"]), answer)


def _rank(value: Any) -> tuple[bool, Any]:
    """What values are sorted by: numbers first."""
    return not isinstance(value, int | float), value if isinstance(value, int | float) else str(value)


def _span(row: Row, name: str, how: Declaration, context: Context) -> TraceSpan:
    is_alone = "id" not in how
    for condition, reason in how.get("skip", {}).items():
        if at(row, condition):
            raise SkipRecord(reason)
    for condition, reason in how.get("refuse", {}).items():
        if found := at(row, condition):
            raise Refused(f"{'' if is_alone else f'{name}.'}{reason}: {found!r:.80}")
    request: dict[str, Any] = {}
    for expression in how["settings"]:
        given = at(row, expression)
        request |= given if isinstance(given, dict) else {}
    is_judge = bool(at(row, how.get("is_judge", "")))
    scores: Scores = {}
    for title, value, _ in () if is_judge or is_alone else _scores_in(row, how, f"{name}.scores"):
        _add(scores, title, value)
    return TraceSpan(
        id=name if is_alone else at(row, how["id"]),
        parent=at(row, how.get("parent", "")),
        input=_text(row, "input", how, context),
        output=_text(row, "output", how, context),
        is_call=bool(at(row, how.get("is_call", ""))),
        is_judge=is_judge,
        error=at(row, how.get("error", "")) or None,
        model=at(row, how["model"]),
        sampling=settings(request, *([SAMPLER] if is_alone else [])),
        tools=at(row, how.get("tools", "")),
        scores=scores,
        names=(how["input"], how["output"]) if is_alone else None,
    )


def _text(row: Row, key: str, how: Declaration, context: Context) -> Any:
    """What was asked or answered, which may be JSON in a text. Raises `Refused` where that is cut off."""
    value = at(row, how[key])
    if not isinstance(value, str) or not how.get("is_whole"):
        return value
    found = unpacked(value)
    if isinstance(found, str) and found.lstrip()[:2] in ('{"', "[{"):
        raise Refused(f"{key}: expected JSON, got {value!r:.80}; it may be cut off: export it anew")
    return _loaded(value) if context.is_text and value[:1] == value[-1:] == '"' else found


def _scores_in(row: Row, how: Declaration, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Name, value, and span that is judged, of the scores of a record or a span."""
    found, inner = at(row, how.get("scores", "")) or [], how.get("value")
    if isinstance(found, dict) and inner:
        parts = {key: entry(value, f"{name}.{key}") for key, value in found.items()}
        found = {key: number(part.get(inner), f"{name}.{key}.{inner}") for key, part in parts.items()}
    if isinstance(found, dict):
        found = [{"name": key, "value": value} for key, value in found.items()]
    for score in objects(found, name):
        title, value = str(score.get("name")), score.get("value")
        for prefix in how.get("prefixes", ()):
            title = title.removeprefix(prefix)
        if isinstance(value, dict) and how.get("are_flat"):
            yield from ((part, each, None) for part, each in _numbers(title, value))
            continue
        if isinstance(value, dict) or (isinstance(value, list) and "are_plain" in how):
            where = how.get("are_plain", name)
            raise Refused(f"{where}: expected a number, a flag or text, got {value!r:.80}")
        if isinstance(value, str):
            value = how.get("words", {}).get(value.lower(), value)
        yield title, None if score.get("is_unknown") else value, score.get("span")


def _numbers(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers and flags in an object, named by their path."""
    for key, value in values.items():
        path = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            yield from _numbers(path, value)
        elif isinstance(value, bool | int | float):
            yield path, value


def _add(scores: Scores, name: str, value: Any) -> None:
    scores.setdefault(name, []).extend(value if isinstance(value, list) else [value])


def gather(how: Declaration, lines: Iterator[Line]) -> Iterator[Line]:
    """A record a trace."""
    column = how["group"].get("list")
    rows = unlisted(lines, lambda row: row.get(column)) if column else lines
    return grouped(rows, lambda row: str(row.get(how["group"]["by"])), SPANS)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
TRACES = SimpleNamespace(
    **{
        name: SimpleNamespace(read=partial(read, how), gather=partial(gather, how))
        for name, how in _TABLES.items()
    }
)
