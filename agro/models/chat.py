"""Renders conversations with a chat template, and defines how a response ends.

Each conversation is rendered a second time with marks in place of its texts. Each mark must occur in the
result exactly once: a conversation with missing words is neither sampled nor learned (`NotShown`). The marks
also show which part of a turn its author wrote. What the template puts before that part, such as role headers
or an opened or empty thought, belongs to the context.

A response ends with the tokenizer's EOS, with an `eos_token_id` of the model's generation_config.json, or
with the token by which the chat template ends an assistant's turn. Nothing else in generation_config.json is
used: temperature, top-k, penalties and the like would change the sampling distribution, which `[sampler]`
sets. The file is saved with the model, unchanged.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from agro import config as configuration
from agro.errors import Refused
from agro.models.template import CONTENT, REASONING, NotShown, Template, mark_of
from agro.types import Messages, Text
from agro.types.conversation import TOOLS

_FREE = {"tools", "documents"}  # parameters of apply_chat_template that users may set
_SYSTEM = ("system", "developer")
_CACHED = 256  # renderings in the cache: the responses to a prompt come together
TEXT, REASONED, CALLS, DECLARED = "texts", "reasoning", "calls of tools", "declarations of tools"


class Reply(NamedTuple):
    """A turn of the assistant: the text before it, and what the assistant wrote, with its end token."""

    context: str
    written: str


class Piece(NamedTuple):
    """A text of a conversation, and the mark that replaces it in the twin.

    `may_repeat`: the text is a name, which templates may repeat. `may_drop`: policy.chat.unshown = "drop"
    continues without it; never a question, an answer, a call or its result.
    """

    kind: str
    label: str  # for messages, such as "the content of message 2 (role tool)"
    text: str
    mark: str
    may_repeat: bool = False
    may_drop: bool = False

    def arrives_in(self, twin: str) -> bool:
        count = twin.count(self.mark)
        return count == 1 or (self.may_repeat and count > 1)


@dataclass(frozen=True)
class Chat:
    """Renders conversations with a tokenizer's chat template and the settings of `[policy.chat]`."""

    tokenizer: Any
    config: configuration.ChatConfig
    _remembered: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, tokenizer: Any, config: configuration.ChatConfig) -> Chat:
        """Set the tokenizer's template to the configured one, so that it is saved with the model.

        Raises `Refused` for settings that would have no effect.
        """
        if config.template is not None:
            try:
                tokenizer.chat_template = Path(config.template).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise Refused(
                    f"policy.chat.template: {config.template}: expected a file with a Jinja template: {error}"
                ) from None
        default = configuration.ChatConfig()
        if config != default and not tokenizer.chat_template:
            raise Refused("[policy.chat]: the tokenizer has no chat template; set policy.chat.template")
        chat = cls(tokenizer, config)
        for name in config.options:
            if name in set(inspect.signature(tokenizer.apply_chat_template).parameters) - _FREE:
                raise Refused(
                    f"policy.chat.options: {name}: expected a variable of the template; agro sets this one"
                )
            if not re.search(rf"\b{re.escape(name)}\b", chat.template.source):
                raise Refused(
                    f"policy.chat.options: {name}: the chat template doesn't use it, so it has no effect. "
                    "What to do: policy.chat.options={}, or only variables that the template uses"
                )
        try:
            date.fromisoformat(config.today)
        except ValueError:
            text = f"expected a date such as 2026-01-31, got {config.today!r}"
            raise Refused(f"policy.chat.today: {text}") from None
        if config.today != default.today and not chat.template.reads_clock:
            raise Refused(
                "policy.chat.today: the chat template writes no date, so it has no effect; remove it"
            )
        return chat

    @cached_property
    def template(self) -> Template:
        return Template(self.tokenizer, self.config.options, self.config.today)

    @property
    def end_id(self) -> int | None:
        """The special token that ends an assistant's turn; None without one."""
        return next(iter(self.template.end_ids), None)

    @property
    def _drops(self) -> bool:
        """Whether to drop instructions and reasoning that the template doesn't show, or to refuse them."""
        return self.config.unshown == "drop"

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The settings that differ from their defaults, without the template and its date."""
        return self.config.model_dump(exclude_defaults=True, exclude={"template", "today"})

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the SHA-256 of everything that determines the ids of a prompt and a response."""
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            definition = json.loads(backend.to_str())
            for transient in ("truncation", "padding"):  # the last call's
                definition.pop(transient, None)
        else:
            definition = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
        special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token]
        content = [definition, special, tokenizer.chat_template]
        settings = dict(self._settings)
        if tokenizer.chat_template and self.template.reads_clock:
            settings["today"] = self.config.today
        if settings:
            content.append(settings)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def is_text(self, prompt: Text) -> bool:
        """Whether a prompt stays plain text. Raises `Refused` if that would ignore `[policy.chat]`."""
        if not isinstance(prompt, str) or self.config.wrap:
            return False
        if self._settings:
            setting = next(iter(self._settings))
            raise Refused(
                f"prompt {prompt!r:.80}: policy.chat.{setting} is for conversations, but this is plain text; "
                "set policy.chat.wrap = true, which turns it into a user message, or remove the setting"
            )
        return True

    def messages(self, prompt: Text) -> Messages:
        """A prompt as a conversation, with the configured system message."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.config.system is None or any(m["role"] in _SYSTEM for m in messages):
            return messages
        tools = [m for m in messages if m["role"] == TOOLS]
        return [*tools, {"role": "system", "content": self.config.system}, *messages[len(tools) :]]

    def prompt(self, messages: Messages) -> str:
        """Render a conversation up to the start of the assistant's turn.

        Raises `NotShown` if one of its texts is missing in the result.
        """
        key = json.dumps(messages, sort_keys=True, default=str)
        if key not in self._remembered:
            if len(self._remembered) >= _CACHED:
                self._remembered.clear()
            messages = self._prepared(messages)
            text = self.template.render(messages, generates=True)
            self._check_shown(messages, text)
            self._remembered[key] = text
        return self._remembered[key]

    def _prepared(self, messages: Messages) -> Messages:
        """Messages as the template takes them: with reasoning separate from text, and its developer role."""
        prepared = []
        for message in messages:
            if message["role"] == "developer":
                message = {**message, "role": self.template.developer_role}
            elif message["role"] == "assistant" and "reasoning_content" not in message:
                thought, content, is_open = self._parse(message["content"], opened=False)
                if thought is not None and not is_open:
                    message = {**message, "content": content, "reasoning_content": thought}
            prepared.append(message)
        return prepared

    def _check_shown(self, messages: Messages, text: str) -> None:
        """Raise `NotShown` unless each text of the messages occurs exactly once in the rendered `text`."""
        marks = _Marks()
        twins = [marks.twin(message, number) for number, message in enumerate(messages)]
        key = json.dumps(twins, default=str)  # the same for all conversations of one shape
        if key not in self._remembered:
            self._remembered[key] = self.template.tried(twins, generates=True)
        twin = self._remembered[key]
        end = 0  # end of the previous texts
        for piece in marks.pieces:
            if piece.kind == REASONED and self.template.thought is not None:
                continue  # an earlier turn's reasoning, which the template may leave out
            if piece.may_drop and self._drops:
                continue
            if piece.kind == TEXT:
                start = twin.find(piece.mark)
                if piece.may_drop and 0 <= start < end:  # some templates move every system text to the front
                    raise _not_shown(TEXT, f"{piece.label} in its place", messages)
                end = max(end, start)
            plain = piece.text.strip()
            escaped = json.dumps(plain, ensure_ascii=False)[1:-1]
            if not piece.arrives_in(twin) or not (plain in text or escaped in text):
                raise _not_shown(piece.kind, f"{piece.label} ({plain!r:.60})", messages)

    def reply(
        self, history: Messages, turn: Mapping[str, Any], ends: Collection[str], *, closed: bool = True
    ) -> Reply:
        """Render a turn of the assistant after a conversation, as the model itself writes it.

        Its texts are unchanged. It ends with one of `ends` (texts of end tokens), or with the end token that
        the template shows, unless it isn't `closed`, or the template has none.

        Raises `NotShown` if the template doesn't show a part of the turn.
        """
        opening = self.prompt(history)
        history = self._prepared(history)
        conversation = [*history, dict(turn)]  # for messages
        style, calls = self.template.thought, list(turn.get("tool_calls") or ())
        thought, content, is_open = self._contents(turn, opening, ends, closed=closed)
        if thought is not None and style is None:
            if not self._drops:
                raise _not_shown(REASONED, f"its reasoning ({thought!r:.60})", conversation)
            thought = None
        by_hand = thought is not None and style is not None and not style.field
        is_marked = thought is not None and not by_hand
        marked: dict[str, Any] = {"role": "assistant", "content": ""}
        if content.strip() or is_open or not (calls or is_marked):
            marked["content"] = CONTENT
        if is_marked:
            marked["reasoning_content"] = REASONING
        if calls:
            marked["tool_calls"] = calls
        text = self.template.render([*history, marked])
        for name, kind in (("reasoning_content", REASONED), ("content", TEXT)):
            if marked.get(name) and text.count(marked[name]) != 1:
                suffix = " next to its tool calls" if calls else ""
                raise _not_shown(kind, f"its {name.removesuffix('_content')}{suffix}", conversation)
        places = sorted(text.find(mark) for mark in (REASONING, CONTENT) if mark in text)
        if calls:
            begin, stop = self._calls(history, marked, text, opening)
        else:
            begin, stop = places[0], max(text.find(m) + len(m) for m in (CONTENT, REASONING) if m in text)
        context, start = self._context(text, opening, begin, content, has_thought=is_marked)
        if is_open and is_marked:
            return Reply(context, text[start : places[0]] + str(thought))
        syntax, end = self.template.end(text[stop:], ends, calls=bool(calls))
        tail = syntax + end if closed else syntax * bool(calls)
        written = (text[start:stop] + tail).replace(REASONING, thought or "").replace(CONTENT, content)
        if by_hand and style is not None:
            prefix = style.opening
            if self.template.opens_thought(opening):
                context, prefix = opening, ""
            written = f"{prefix}{thought}" + ("" if is_open else style.closing + written)
        return Reply(context, written)

    def _contents(
        self, turn: Mapping[str, Any], opening: str, ends: Collection[str], *, closed: bool
    ) -> tuple[str | None, str, bool]:
        """Reasoning and text of a turn, and whether the reasoning is unfinished."""
        content, thought = self.unended(turn["content"], ends), turn.get("reasoning_content")
        may_be_open = not turn.get("tool_calls")  # a call ends the thought before it
        if thought is None:
            opened = not closed and may_be_open and self.template.opens_thought(opening)
            thought, content, is_open = self._parse(content, opened=opened)
        else:
            is_open = not closed and not content.strip()
            thought, content = thought.strip("\n"), content.lstrip("\n")
        for text in (thought or "", content):
            self.check_own(text, ends)
        return thought, content, is_open and may_be_open

    def _parse(self, text: str, *, opened: bool) -> tuple[str | None, str, bool]:
        """The reasoning written in a text, the remaining text, and whether the reasoning is unfinished.

        `opened`: whether a text without tags continues an open thought.
        """
        style = self.template.thought
        if style is None:
            return None, text, False
        body = text.lstrip()
        tags = [("<think>", "</think>", "\n")]
        if style.closing.strip():
            spaces = style.closing[len(style.closing.rstrip()) :]
            tags.insert(0, (style.opening.strip(), style.closing.strip(), spaces))
        for begin, end, spaces in tags:
            thought, closing, content = body.removeprefix(begin).partition(end)
            is_opened = body.startswith(begin)
            # The prompt may contain the opening tag. Then the closing tag must look as the model writes it,
            # since a text may also mention the tag.
            is_half = begin not in thought and content[:1] in ("", spaces[:1] or content[:1])
            if closing and (is_opened or is_half):
                return thought.strip() or None, content.lstrip("\n"), False
            if is_opened:
                return thought.strip("\n"), "", True
        if opened:
            return text.strip("\n"), "", True
        header = self.template.content_opening.strip()
        return None, body.removeprefix(header) if header and body.startswith(header) else text, False

    def _context(
        self, text: str, opening: str, begin: int, content: str, *, has_thought: bool
    ) -> tuple[str, int]:
        """The text before what the assistant wrote, and where in `text` that begins.

        The template may add something to a generation prompt: a space, which the model writes, or an empty
        thought, which belongs to the context unless the template omits it in earlier turns.
        """
        if not text.startswith(opening):
            is_same = text[:begin].rstrip() == opening.rstrip()
            is_other = has_thought or self.template.opens_thought(opening)  # only one of them has a thought
            return (opening if is_same or not is_other else text[:begin]), begin
        added = text[len(opening) : begin]
        if has_thought:
            return opening, len(opening)
        if not added.strip():
            return opening, begin if content.startswith(added) else len(opening)
        return (opening, begin) if self.template.opens_directly else (text[:begin], begin)

    def _calls(self, history: Messages, turn: dict[str, Any], text: str, opening: str) -> tuple[int, int]:
        """Where in `text` a turn with calls begins, and where the last of its texts ends.

        Raises `NotShown` unless each name and argument text is shown and can be parsed back.
        """
        conversation = [*history, turn]
        if self.template.call_form is None:
            raise _not_shown(CALLS, "its tool calls", conversation)
        for call in turn["tool_calls"]:
            arguments = call["function"].get("arguments")
            if not isinstance(arguments, dict):
                raise _not_shown(CALLS, f"arguments that are no object ({arguments!r:.80})", conversation)
            if self.template.writes_none and "null" in re.sub(r'".*?"', "", json.dumps(arguments)):
                raise _not_shown(CALLS, "null as an argument (it writes None)", conversation)
        marks = _Marks()
        twin = self.template.tried([*history, marks.twin(turn, keeps_texts=True)])
        for piece in marks.pieces:
            if not piece.arrives_in(twin):
                raise _not_shown(CALLS, f"{piece.label} {piece.text!r:.60}", conversation)
        starts = [twin.index(piece.mark) for piece in marks.pieces]
        syntax = set(re.findall(r"</[\w=]+>|<\|?\w+\|?>", twin[min(starts) :]))
        for piece in marks.pieces:
            if any(tag in piece.text for tag in syntax):
                problem = f"{piece.label} {piece.text!r:.60} unambiguously: it contains the syntax of calls"
                raise _not_shown(CALLS, problem, conversation)
        texts = [mark for mark in (CONTENT, REASONING) if mark in twin]
        stop = max(
            twin.rindex(mark) + len(mark) for mark in [*texts, *(piece.mark for piece in marks.pieces)]
        )
        if not text.endswith(twin[stop:]):
            raise _not_shown(CALLS, "its tool calls as they are", conversation)
        end = len(text) - len(twin[stop:])
        if texts and min(starts) > min(map(twin.index, texts)):
            return min(map(text.index, texts)), end
        return self._start_of_calls(history, text, opening), end

    def _start_of_calls(self, history: Messages, text: str, opening: str) -> int:
        """Where the calls of a turn without text begin: where text would, or after the generation prompt."""
        plain = self.template.tried([*history, {"role": "assistant", "content": CONTENT}])
        prefix = plain.partition(CONTENT)[0]
        if CONTENT in plain and text.startswith(prefix):
            return len(prefix)
        if text.startswith(opening):
            return len(opening)
        raise _not_shown(CALLS, "its tool calls after the preceding text", history)

    def message(self, written: str, opening: str) -> dict[str, Any]:
        """What the assistant wrote after the text `opening`, as a message with separate reasoning."""
        thought, content, _ = self._parse(written, opened=self.template.opens_thought(opening))
        space = self.template.content_opening  # the template will put it before the text again
        if thought is None and not space.strip():
            content = content.removeprefix(space)
        message = {"role": "assistant", "content": content}
        return message if thought is None else {**message, "reasoning_content": thought}

    def unended(self, text: str, ends: Collection[str]) -> str:
        """What an assistant wrote, without a trailing end token and padding."""
        for start, token in reversed(list(self.template.specials_in(text))):
            if token in ends or token in self.template.control:
                if text[start + len(token) :].strip():
                    break
                text = text[:start]
        return text

    def check_own(self, text: str, ends: Collection[str]) -> None:
        """Raise `NotShown` if what an assistant wrote contains an end token or a token of other turns."""
        for start, token in self.template.specials_in(text):
            if token in ends or token in self.template.control:
                raise NotShown(
                    "special tokens in a text",
                    f"the response has the special token {token} at character {start}, and more text after "
                    f"it ({text[start : start + 60]!r}); end the response there, or remove the token",
                )


def _not_shown(kind: str, part: str, messages: Messages) -> NotShown:
    return NotShown(
        f"{kind} that the chat template doesn't show",
        f"conversation {messages!r:.80}: the chat template doesn't show {part}. What to do: use another "
        'policy.chat.template, or remove it from the records; policy.chat.unshown = "drop" continues '
        "without declarations of tools, system messages and reasoning",
    )


class _Marks:
    """Replaces the texts of messages by marks, and records which text each mark replaces."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._names: dict[str, str] = {}

    def twin(
        self, message: Mapping[str, Any], number: int = 0, *, keeps_texts: bool = False
    ) -> dict[str, Any]:
        """A message with marks in place of its texts; with `keeps_texts`, only calls get marks."""
        twin, role = dict(message), message["role"]
        if role == TOOLS:
            tools = json.loads(message["content"])
            for function in (tool["function"] for tool in tools):
                function["name"] = self._name(function["name"], "the declaration of the tool", DECLARED)
                if text := function.get("description", ""):
                    label = "the description of a tool"
                    function["description"] = self._mark(DECLARED, label, text, may_drop=True)
            return {**twin, "content": json.dumps(tools)}
        origin = f"of message {number} (role {role})"
        if not keeps_texts:
            content, drops = message["content"], role in _SYSTEM
            twin["content"] = self._mark(TEXT, f"the content {origin}", content, may_drop=drops)
            if thought := message.get("reasoning_content"):
                label = f"the reasoning {origin}"
                twin["reasoning_content"] = self._mark(REASONED, label, thought, may_drop=True)
        if message.get("tool_calls"):
            twin["tool_calls"] = []
            for call in message["tool_calls"]:
                name = self._name(call["function"]["name"], "the name of the called tool", CALLS)
                arguments = self._leaves(call["function"].get("arguments"))
                function = {**call["function"], "name": name, "arguments": arguments}
                twin["tool_calls"].append({**call, "function": function})
        if role == "tool" and message.get("name") in self._names:
            twin["name"] = self._names[message["name"]]
        return twin

    def _leaves(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._leaves(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._leaves(item) for item in value]
        return self._mark(CALLS, "the argument of a call", value) if isinstance(value, str) else value

    def _name(self, name: str, label: str, kind: str) -> str:
        if name not in self._names:
            mark = self._mark(kind, label, name, may_repeat=True, may_drop=kind == DECLARED)
            self._names[name] = mark
        return self._names[name]

    def _mark(self, kind: str, label: str, text: str, **may: bool) -> str:
        """The mark for a text; white space is returned unchanged."""
        if not text.strip():
            return text
        self.pieces.append(Piece(kind, label, text, mark_of(len(self.pieces) + 10), **may))
        return self.pieces[-1].mark


def end_tokens(model: Any, chat: Chat) -> tuple[int, ...]:
    """The tokens that end a response; the first one ends plain text."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    shown = chat.template.end_ids if chat.tokenizer.chat_template else ()
    ids = (chat.tokenizer.eos_token_id, *listed, *shown)
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))
