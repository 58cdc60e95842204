"""What a chat template shows: found out by rendering marks, for a template is a program of somebody else.

How it takes calls of tools and reasoning, what it puts before a turn, and what ends one, isn't declared
anywhere. So small conversations are rendered with marks in place of texts, once for each template.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.types import Messages
from agro.types.conversation import TOOLS


def mark_of(number: int) -> str:
    """A text that stands in no conversation."""
    return f"qzq{number:04d}zqz"


CONTENT, REASONING, NAME, ARGUMENT = map(mark_of, range(4))
PING = {"role": "user", "content": "ping"}


class NotShown(Refused):
    """The template doesn't show what a conversation says. `what`: of which kind, for counts."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


class Thought(NamedTuple):
    """How a model writes its reasoning.

    `field`: of a message, which the template renders; "" where it only takes reasoning out of what was said.
    """

    opening: str
    closing: str
    field: str


@dataclass(frozen=True)
class Template:
    """The chat template of a tokenizer. `options`: its variables; `today`: the date that it writes."""

    tokenizer: Any
    options: Mapping[str, Any]
    today: str

    def render(
        self,
        messages: Messages,
        *,
        generates: bool = False,
        tools: list[Any] | None = None,
        form: tuple[str | None, bool] | None = None,
        reasoning: str = "",
        parts: bool | None = None,
    ) -> str:
        """The text of messages.

        `form`, `reasoning` and `parts` are `call_form`, `Thought.field` and `_takes_parts` while these are
        found. Raises `NotShown` where the template fails.
        """
        if not self.tokenizer.chat_template:
            raise Refused(
                f"prompt {messages!r:.80}: messages, but the tokenizer has no chat template; "
                "give prompts as text, or set policy.chat.template"
            )
        if messages[0]["role"] == TOOLS:
            tools, messages = json.loads(messages[0]["content"]), messages[1:]
        if form is None and any(message.get("tool_calls") for message in messages):
            form = self.call_form
        if not reasoning and any("reasoning_content" in message for message in messages):
            reasoning = self.thought.field if self.thought is not None else ""
        shaped = _shaped(messages, form or ("", False), reasoning)
        if self._takes_parts if parts is None else parts:
            shaped = [
                {**m, "content": [{"type": "text", "text": m["content"]}] if m.get("content") else []}
                for m in shaped
            ]
        try:
            text: str = self.tokenizer.apply_chat_template(
                shaped,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generates,
                chat_template=self._dated(has_tools=bool(tools)),
                **self.options,
            )
        except Exception as error:  # noqa: BLE001 a template is a program of somebody else
            raise NotShown(
                "the chat template fails", f"prompt {messages!r:.80}: the chat template fails: {error}"
            ) from None
        return text

    def tried(self, messages: Messages, **how: Any) -> str:
        """The rendered messages; "" where the template fails."""
        try:
            return self.render(messages, **how)
        except Refused:
            return ""

    def _dated(self, *, has_tools: bool) -> str | None:
        """The template with `today` in place of the clock; None for one without a clock."""
        if not self.reads_clock:
            return None
        template = self.tokenizer.chat_template
        if isinstance(template, dict):
            template = template["tool_use" if has_tools and "tool_use" in template else "default"]
        day = date.fromisoformat(self.today)
        dated = re.sub(
            r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""", lambda found: f'"{day.strftime(found[2])}"', template
        )
        if re.search(r"strftime_now\s*\(", dated):
            raise NotShown(
                "the chat template fails",
                "the chat template writes the date in a form that can't be pinned; set "
                "policy.chat.template to one that doesn't read the clock",
            )
        return dated

    @property
    def reads_clock(self) -> bool:
        """Whether the template writes the date. It is `today` whenever it is rendered."""
        return "strftime_now" in self.source

    @property
    def source(self) -> str:
        """The template, or the templates by name, as text."""
        return json.dumps(self.tokenizer.chat_template or "", ensure_ascii=False)

    @cached_property
    def call_form(self) -> tuple[str | None, bool] | None:
        """How the template takes a call of a tool: the content of a message without text ("" or None), and
        whether its arguments are JSON as text. None where it doesn't show calls."""
        turn = _said("", tool_calls=[_call_of(NAME, {"key": ARGUMENT})])
        for blank, as_text in itertools.product(("", None), (False, True)):
            text = self.tried([PING, turn], form=(blank, as_text))
            spoiled = f"'{ARGUMENT}'" in text or f'\\"{ARGUMENT}' in text
            if NAME in text and "key" in text and text.count(ARGUMENT) == 1 and not spoiled:
                return blank, as_text
        return None

    @cached_property
    def thought(self) -> Thought | None:
        """How reasoning is written; None for templates without."""
        turns = [_said(CONTENT)]
        if self.call_form is not None:
            turns.append(_said("", tool_calls=[_call_of("name", {})]))
        for name, turn in itertools.product(("reasoning_content", "reasoning", "thinking"), turns):
            text = self.tried([PING, {**turn, name: REASONING}], reasoning=name)
            if text.count(REASONING) != 1:
                continue
            first, last = text.index(REASONING), text.find(CONTENT)
            closing = text[first + len(REASONING) : last] if last > first else ""
            opening = self.tried([PING], generates=True)
            begun = text[len(opening) : first] if text.startswith(opening) else ""
            if not begun.strip():
                tag = re.search(r"</(\w+)>", closing)
                begun = f"<{tag[1]}>\n" if tag else opening.rstrip().rpartition("\n")[2]
            return Thought(begun, closing, name)
        if "</think>" in self.source:
            return Thought("<think>\n", "\n</think>\n\n", "")
        return None

    def opens_thought(self, opening: str) -> bool:
        """Whether a text ends with what opens a thought, as generation prompts of reasoning models do."""
        return self.thought is not None and opening.rstrip().endswith(self.thought.opening.strip())

    @cached_property
    def writes_none(self) -> bool:
        """Whether null in the arguments of a call becomes Python's None, which no parser takes for null."""
        return "None" in self.tried([PING, _said("", tool_calls=[_call_of(NAME, {"key": None})])])

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template shows text as a list of parts alone, as those of models with pictures do."""
        marked = [{"role": "user", "content": CONTENT}]
        as_text, as_parts = (self.tried(marked, parts=parts) for parts in (False, True))
        return CONTENT not in as_text and as_parts.count(CONTENT) == 1

    @cached_property
    def opens_directly(self) -> bool:
        """Whether earlier turns are shown right after the generation prompt, so that what the template puts
        between them in the last one, such as an empty thought, needs no place."""
        before, opening = self.tried([PING]), self.tried([PING], generates=True)
        text = self.tried([PING, _said(CONTENT), PING])
        return opening.startswith(before) and opening[len(before) :] + CONTENT in text

    @cached_property
    def content_opening(self) -> str:
        """What the template writes before the text of a turn: the name of a channel, a space."""
        opening = self.tried([PING], generates=True)
        text = self.tried([PING, _said(CONTENT)])
        return text[len(opening) : text.find(CONTENT)] if text.startswith(opening) else ""

    @cached_property
    def developer_role(self) -> str:
        """The role that a developer's message has: its own where the template shows it, else the system's."""
        text = self.tried([{"role": "developer", "content": CONTENT}, PING])
        return "developer" if text.count(CONTENT) == 1 else "system"

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The special tokens that end a turn of text and one that calls a tool.

        Where the template writes none, the one that begins what follows, such as <|user|>, tells the model to
        stop.
        """
        turns = [_said(CONTENT)]
        if self.call_form is not None:
            turns.append(_said("", tool_calls=[_call_of(CONTENT, {})]))
        ends = []
        for turn in turns:
            text = self.tried([PING, turn])
            if CONTENT in text:
                ends.append(self.end(text.rpartition(CONTENT)[2], (), calls="tool_calls" in turn)[1])
        ids = [self.tokenizer.convert_tokens_to_ids(end) for end in ends if end]
        return tuple(dict.fromkeys(ids))

    def end(self, tail: str, ends: Collection[str], *, calls: bool) -> tuple[str, str]:
        """Of what follows the last text of a turn: what still belongs to the turn, and its end token."""
        places = sorted((tail.index(end), end) for end in ends if end in tail)
        if places:
            return tail[: places[0][0]], places[0][1]
        specials = list(self.specials_in(tail))
        if specials and tail.rstrip().endswith(specials[-1][1]):
            # Text is followed by its end at once; calls of tools may hold other special tokens.
            at, end = specials[-1] if calls else specials[0]
            return tail[:at], end
        return (tail.rstrip() if calls else ""), self._next_turn[calls]

    @cached_property
    def _next_turn(self) -> dict[bool, str]:
        """The special token that begins what follows a turn of text, and one with calls; "" without one."""
        found = {}
        turns = (_said("pong"), "user"), (_said("", tool_calls=[_call_of("name", {})]), "tool")
        for turn, role in turns:
            before = self.tried([PING, turn]).rstrip()
            full = self.tried([PING, turn, {"role": role, "content": CONTENT}])
            follows = full[len(before) : full.find(CONTENT)] if before and full.startswith(before) else ""
            at, token = next(self.specials_in(follows), (0, ""))
            found[role == "tool"] = "" if follows[:at].strip() else token
        return found

    def specials_in(self, text: str) -> Iterator[tuple[int, str]]:
        """Where special tokens stand in a text, and which."""
        return ((match.start(), match[0]) for match in self._specials.finditer(text))

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        """Of the special tokens, where the tokenizer reads them in texts."""
        tokenizer = self.tokenizer
        if getattr(tokenizer, "split_special_tokens", False):
            return re.compile(r"(?!)")
        added = tokenizer.added_tokens_decoder.values()
        texts = {*tokenizer.all_special_tokens, *(str(t) for t in added if t.special)} - {""}
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")

    @cached_property
    def control(self) -> frozenset[str]:
        """The special tokens around turns, which no author writes: of headers, BOS, EOS, padding."""
        tokenizer = self.tokenizer
        around = {token for _, token in self.specials_in(self.tried([PING]))}
        own = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
        return frozenset(filter(None, around | own))

    def abilities(self) -> dict[str, str]:
        """What the template shows, by kind of content: "yes", or how, or "no"."""
        empty = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": NAME, "description": "", "parameters": empty}}
        both = _said(CONTENT, tool_calls=[_call_of("name", {})])
        result = {"role": "tool", "content": CONTENT}
        shown = {
            "system": CONTENT in self.tried([{"role": "system", "content": CONTENT}, PING]),
            "tools": NAME in self.tried([PING], tools=[tool]),
            "calls": self.call_form is not None,
            "text beside calls": self.call_form is not None and CONTENT in self.tried([PING, both]),
            "results": CONTENT in self.tried([PING, _said("pong"), result]),
        }
        found = {name: "yes" if is_shown else "no" for name, is_shown in shown.items()}
        found["developer"] = "yes" if self.developer_role == "developer" else f"as {self.developer_role}"
        if self.thought is None:
            found["reasoning"] = "no"
        elif not self.thought.field:
            found["reasoning"] = "written in the text; not shown of earlier turns"
        else:
            earlier = _said("pong", reasoning_content=REASONING)
            is_kept = REASONING in self.tried([PING, earlier, PING])
            found["reasoning"] = "yes" if is_kept else "of the last turn only"
        found["date"] = f"{self.today} (policy.chat.today)" if self.reads_clock else "no"
        return found


def _said(content: str, **more: Any) -> dict[str, Any]:
    """A turn of the assistant."""
    return {"role": "assistant", "content": content, **more}


def _call_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}


def _shaped(messages: Messages, form: tuple[str | None, bool], reasoning: str) -> Messages:
    """Messages as a template takes them, with an id for each call, and the name of what a result is of."""
    blank, as_text = form
    names: dict[str, str] = {}
    waiting: list[str] = []  # the calls without a result
    shaped = []
    for message in messages:
        message = dict(message)
        if "reasoning_content" in message and reasoning != "reasoning_content":
            thought = message.pop("reasoning_content")
            if reasoning:
                message[reasoning] = thought
        calls = []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if as_text:
                function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            calls.append({"id": f"call{len(names):05d}", **call, "function": function})
            names[calls[-1]["id"]] = function["name"]
            waiting.append(calls[-1]["id"])
        if calls:
            message["tool_calls"] = calls
            message["content"] = message["content"] if message["content"].strip() else blank
        if message["role"] == "tool" and names:
            if message.get("tool_call_id") is None:  # results come in the order of their calls
                known = [i for i in waiting if message.get("name") in (None, names[i])]
                message["tool_call_id"] = next(iter([*known, *waiting]), next(reversed(names)))
            waiting = [i for i in waiting if i != message["tool_call_id"]]
            if message.get("name") is None:
                message["name"] = names.get(message["tool_call_id"], next(reversed(names.values())))
        shaped.append(message)
    return shaped
