"""Probes what a chat template renders, since a template is somebody else's program.

No template declares how it takes tool calls and reasoning, what it puts before a turn, and what ends a turn.
So small conversations are rendered with marks in place of texts, once per template.
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
    """A text that occurs in no conversation."""
    return f"qzq{number:04d}zqz"


CONTENT, REASONING, NAME, ARGUMENT = map(mark_of, range(4))
PING = {"role": "user", "content": "ping"}


class NotShown(Refused):
    """The template doesn't show a part of a conversation. `kind`: the kind of part, for counts."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Thought(NamedTuple):
    """How a model writes its reasoning.

    `field`: the message field that the template renders; "" if it only removes reasoning from the content.
    """

    opening: str
    closing: str
    field: str


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template. `options`: its variables; `today`: the date that it writes."""

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
        """Render messages as text.

        `form`, `reasoning` and `parts` override `call_form`, `Thought.field` and `_takes_parts` while these
        are probed. Raises `NotShown` if the template fails.
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
        except Exception as error:  # noqa: BLE001 a template is somebody else's program
            raise NotShown(
                "the chat template fails", f"prompt {messages!r:.80}: the chat template fails: {error}"
            ) from None
        return text

    def tried(self, messages: Messages, **options: Any) -> str:
        """The rendered messages; "" if the template fails."""
        try:
            return self.render(messages, **options)
        except Refused:
            return ""

    def _dated(self, *, has_tools: bool) -> str | None:
        """The template with `today` in place of the clock; None if it doesn't read the clock."""
        if not self.reads_clock:
            return None
        template = self.tokenizer.chat_template
        if isinstance(template, dict):
            template = template["tool_use" if has_tools and "tool_use" in template else "default"]
        day = date.fromisoformat(self.today)
        dated = re.sub(
            r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""", lambda match: f'"{day.strftime(match[2])}"', template
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
        """Whether the template writes the date, which rendering sets to `today`."""
        return "strftime_now" in self.source

    @property
    def source(self) -> str:
        """The template, or the templates by name, as text."""
        return json.dumps(self.tokenizer.chat_template or "", ensure_ascii=False)

    @cached_property
    def call_form(self) -> tuple[str | None, bool] | None:
        """How the template takes a tool call: the content of a message without text ("" or None), and whether
        the arguments are JSON text. None if it doesn't show calls."""
        turn = _reply("", tool_calls=[_call_of(NAME, {"key": ARGUMENT})])
        for blank, as_text in itertools.product(("", None), (False, True)):
            text = self.tried([PING, turn], form=(blank, as_text))
            spoiled = f"'{ARGUMENT}'" in text or f'\\"{ARGUMENT}' in text
            if NAME in text and "key" in text and text.count(ARGUMENT) == 1 and not spoiled:
                return blank, as_text
        return None

    @cached_property
    def thought(self) -> Thought | None:
        """How reasoning is written; None for templates without it."""
        turns = [_reply(CONTENT)]
        if self.call_form is not None:
            turns.append(_reply("", tool_calls=[_call_of("name", {})]))
        for name, turn in itertools.product(("reasoning_content", "reasoning", "thinking"), turns):
            text = self.tried([PING, {**turn, name: REASONING}], reasoning=name)
            if text.count(REASONING) != 1:
                continue
            start, end = text.index(REASONING), text.find(CONTENT)
            closing = text[start + len(REASONING) : end] if end > start else ""
            prompt = self.tried([PING], generates=True)
            opening = text[len(prompt) : start] if text.startswith(prompt) else ""
            if not opening.strip():
                tag = re.search(r"</(\w+)>", closing)
                opening = f"<{tag[1]}>\n" if tag else prompt.rstrip().rpartition("\n")[2]
            return Thought(opening, closing, name)
        if "</think>" in self.source:
            return Thought("<think>\n", "\n</think>\n\n", "")
        return None

    def opens_thought(self, opening: str) -> bool:
        """Whether a text ends with the opening of a thought, as generation prompts of reasoning models do."""
        return self.thought is not None and opening.rstrip().endswith(self.thought.opening.strip())

    @cached_property
    def writes_none(self) -> bool:
        """Whether null in a call's arguments becomes Python's None, which no parser reads as null."""
        return "None" in self.tried([PING, _reply("", tool_calls=[_call_of(NAME, {"key": None})])])

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template shows text only as a list of parts, as those of image models do."""
        marked = [{"role": "user", "content": CONTENT}]
        as_text, as_parts = (self.tried(marked, parts=parts) for parts in (False, True))
        return CONTENT not in as_text and as_parts.count(CONTENT) == 1

    @cached_property
    def opens_directly(self) -> bool:
        """Whether earlier turns follow the generation prompt directly, without what the template inserts in
        the last turn, such as an empty thought."""
        history, prompt = self.tried([PING]), self.tried([PING], generates=True)
        text = self.tried([PING, _reply(CONTENT), PING])
        return prompt.startswith(history) and prompt[len(history) :] + CONTENT in text

    @cached_property
    def content_opening(self) -> str:
        """What the template writes before a turn's text, such as the name of a channel or a space."""
        prompt = self.tried([PING], generates=True)
        text = self.tried([PING, _reply(CONTENT)])
        return text[len(prompt) : text.find(CONTENT)] if text.startswith(prompt) else ""

    @cached_property
    def developer_role(self) -> str:
        """The role of a developer's message: "developer" if the template shows it, else "system"."""
        text = self.tried([{"role": "developer", "content": CONTENT}, PING])
        return "developer" if text.count(CONTENT) == 1 else "system"

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The special tokens that end a turn of text and a turn that calls a tool.

        If the template writes none, the token that begins the next turn, such as <|user|>, ends the response.
        """
        turns = [_reply(CONTENT)]
        if self.call_form is not None:
            turns.append(_reply("", tool_calls=[_call_of(CONTENT, {})]))
        ends = []
        for turn in turns:
            text = self.tried([PING, turn])
            if CONTENT in text:
                ends.append(self.end(text.rpartition(CONTENT)[2], (), calls="tool_calls" in turn)[1])
        ids = [self.tokenizer.convert_tokens_to_ids(end) for end in ends if end]
        return tuple(dict.fromkeys(ids))

    def end(self, tail: str, ends: Collection[str], *, calls: bool) -> tuple[str, str]:
        """The rest of the turn in the `tail` after its last text, and the turn's end token."""
        places = sorted((tail.index(end), end) for end in ends if end in tail)
        if places:
            return tail[: places[0][0]], places[0][1]
        specials = list(self.specials_in(tail))
        if specials and tail.rstrip().endswith(specials[-1][1]):
            # An end token follows text directly; tool calls may contain other special tokens.
            start, end = specials[-1] if calls else specials[0]
            return tail[:start], end
        return (tail.rstrip() if calls else ""), self._next_turn[calls]

    @cached_property
    def _next_turn(self) -> dict[bool, str]:
        """The special token that begins the turn after a text, and after tool calls; "" without one."""
        tokens = {}
        turns = (_reply("pong"), "user"), (_reply("", tool_calls=[_call_of("name", {})]), "tool")
        for turn, role in turns:
            history = self.tried([PING, turn]).rstrip()
            full = self.tried([PING, turn, {"role": role, "content": CONTENT}])
            follows = full[len(history) : full.find(CONTENT)] if history and full.startswith(history) else ""
            start, token = next(self.specials_in(follows), (0, ""))
            tokens[role == "tool"] = "" if follows[:start].strip() else token
        return tokens

    def specials_in(self, text: str) -> Iterator[tuple[int, str]]:
        """The position and text of each special token in a text."""
        return ((match.start(), match[0]) for match in self._specials.finditer(text))

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        """Matches special tokens; matches nothing if the tokenizer doesn't read them in texts."""
        tokenizer = self.tokenizer
        if getattr(tokenizer, "split_special_tokens", False):
            return re.compile(r"(?!)")
        added = tokenizer.added_tokens_decoder.values()
        texts = {*tokenizer.all_special_tokens, *(str(t) for t in added if t.special)} - {""}
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")

    @cached_property
    def control(self) -> frozenset[str]:
        """The special tokens around turns, which no author writes: those of headers, BOS, EOS, padding."""
        tokenizer = self.tokenizer
        headers = {token for _, token in self.specials_in(self.tried([PING]))}
        ends = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
        return frozenset(filter(None, headers | ends))

    def abilities(self) -> dict[str, str]:
        """Whether the template shows each kind of content: "yes", "no", or how."""
        empty = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": NAME, "description": "", "parameters": empty}}
        both = _reply(CONTENT, tool_calls=[_call_of("name", {})])
        result = {"role": "tool", "content": CONTENT}
        shown = {
            "system": CONTENT in self.tried([{"role": "system", "content": CONTENT}, PING]),
            "tools": NAME in self.tried([PING], tools=[tool]),
            "calls": self.call_form is not None,
            "text beside calls": self.call_form is not None and CONTENT in self.tried([PING, both]),
            "results": CONTENT in self.tried([PING, _reply("pong"), result]),
        }
        report = {name: "yes" if is_shown else "no" for name, is_shown in shown.items()}
        report["developer"] = "yes" if self.developer_role == "developer" else f"as {self.developer_role}"
        if self.thought is None:
            report["reasoning"] = "no"
        elif not self.thought.field:
            report["reasoning"] = "written in the text; not shown of earlier turns"
        else:
            earlier = _reply("pong", reasoning_content=REASONING)
            is_kept = REASONING in self.tried([PING, earlier, PING])
            report["reasoning"] = "yes" if is_kept else "of the last turn only"
        report["date"] = f"{self.today} (policy.chat.today)" if self.reads_clock else "no"
        return report


def _reply(content: str, **more: Any) -> dict[str, Any]:
    """A turn of the assistant."""
    return {"role": "assistant", "content": content, **more}


def _call_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}


def _shaped(messages: Messages, form: tuple[str | None, bool], reasoning: str) -> Messages:
    """Messages as a template takes them, with an id for each call and a function name for each result."""
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
                named = [i for i in waiting if message.get("name") in (None, names[i])]
                message["tool_call_id"] = next(iter([*named, *waiting]), next(reversed(names)))
            waiting = [i for i in waiting if i != message["tool_call_id"]]
            if message.get("name") is None:
                message["name"] = names.get(message["tool_call_id"], next(reversed(names.values())))
        shaped.append(message)
    return shaped
