"""Traces as trees of spans: the conversations of the model in one, with their scores.

Responses are those of the outermost calls of a model; a trace without any is one call itself. A call that
begins with what an earlier one was asked and answered continues it: both are one conversation of several
turns. Other calls are responses of their own. Scores of a call's span are its own; those of the trace and of
its other spans are of every call that has none of that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agro.errors import Refused
from agro.io.json_values import omit
from agro.logs import exchanges
from agro.logs.model_calls import Completion, Message, responses, scored
from agro.logs.protocol import Context, Item, Row

Scores = dict[str, list[Any]]


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


def read(
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
        replies = [
            {"role": "assistant", "content": str(reply), "finish_reason": getattr(reply, "finish", None)}
            if isinstance(reply, str)
            else reply
            for reply in exchanges.replies(span.output, answered)
        ]
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
        **({"tools": final.tools} if final.tools else {}),
    }
    is_text = isinstance(conversation.prompt, str) and not conversation.turns
    replies = list[str | Message | list[Message]]()
    for message in conversation.replies:
        if is_text and message.keys() - {"finish_reason"} == {"role", "content"}:
            replies.append(Completion.of(message["content"], message.get("finish_reason")))
        else:
            replies.append([*conversation.turns, message])
    return responses(conversation.prompt, replies, conversation.name, common)


def described(row: Row, names: Sequence[str]) -> dict[str, Any]:
    """The columns of a trace for `meta`, without empty ones."""
    return {name: value for name, value in omit(row, names).items() if value not in ([], {}, "")}
