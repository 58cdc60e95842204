"""Conversations as text by a chat template, and what ends a response.

Each conversation is rendered a second time with marks in place of its texts. Each mark must stand in the
result just once: a conversation whose words don't all arrive is neither sampled nor learned (`NotShown`). The
marks also say which part of a turn its author wrote. What the template puts before it, such as role headers,
an opened thought or an empty one, belongs to the context.

A response ends with the tokenizer's EOS, with an `eos_token_id` of the model's generation_config.json, or
with the token by which the chat template ends an assistant's turn. Nothing else of generation_config.json is
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

_FREE = {"tools", "documents"}  # parameters of apply_chat_template that are the user's
_SYSTEM = ("system", "developer")
_CACHED = 256  # conversations whose rendering is remembered: the responses to a prompt come together
TEXT, REASONED, CALLS, DECLARED = "texts", "reasoning", "calls of tools", "declarations of tools"


class Reply(NamedTuple):
    """A turn of the assistant: all text before what it wrote, and that, with the end token of the turn."""

    context: str
    written: str


class Piece(NamedTuple):
    """A text of a conversation, and the mark that stands for it in the twin.

    `may_repeat`: a name, which templates write several times. `may_drop`: what policy.chat.unshown = "drop"
    goes on without, which is never a question, an answer, a call or its result.
    """

    kind: str
    what: str  # for messages, such as "the content of message 2 (role tool)"
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
                    f"policy.chat.template: {config.template}: expected the file of a Jinja template: {error}"
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
                    "What to do: policy.chat.options={}, or only with variables that the template has"
                )
        try:
            date.fromisoformat(config.today)
        except ValueError:
            raise Refused(f"policy.chat.today: expected a date as 2026-01-31, got {config.today!r}") from None
        if config.today != default.today and not chat.template.reads_clock:
            raise Refused(
                "policy.chat.today: the chat template writes no date, so it has no effect; leave it out"
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
        """What the template doesn't show of instructions and reasoning; else it is refused."""
        return self.config.unshown == "drop"

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The settings that differ from their defaults, besides the template and its date."""
        return self.config.model_dump(exclude_defaults=True, exclude={"template", "today"})

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the SHA-256 of everything that determines the ids of a prompt and a response."""
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            definition = json.loads(backend.to_str())
            for passing in ("truncation", "padding"):  # left behind by the last call
                definition.pop(passing, None)
        else:
            definition = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
        special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token]
        decides = [definition, special, tokenizer.chat_template]
        settings = dict(self._settings)
        if tokenizer.chat_template and self.template.reads_clock:
            settings["today"] = self.config.today
        if settings:
            decides.append(settings)
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]

    def is_text(self, prompt: Text) -> bool:
        """Whether a prompt stays plain text. Raises `Refused` where that would ignore `[policy.chat]`."""
        if not isinstance(prompt, str) or self.config.wrap:
            return False
        if self._settings:
            setting = next(iter(self._settings))
            raise Refused(
                f"prompt {prompt!r:.80}: policy.chat.{setting} is for conversations, but this is plain text; "
                "set policy.chat.wrap = true, which makes it a user message, or remove the setting"
            )
        return True

    def messages(self, prompt: Text) -> Messages:
        """A prompt as a conversation, with the system message."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.config.system is None or any(m["role"] in _SYSTEM for m in messages):
            return messages
        tools = [m for m in messages if m["role"] == TOOLS]
        return [*tools, {"role": "system", "content": self.config.system}, *messages[len(tools) :]]

    def prompt(self, messages: Messages) -> str:
        """A conversation up to the start of the assistant's turn.

        Raises `NotShown` where a text of it doesn't stand in the result.
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
        """Messages as the template takes them: reasoning apart from text, a developer's under its role."""
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
        """Raise `NotShown` where a text of the messages isn't in the rendered `text` just once."""
        marks = _Marks()
        twins = [marks.twin(message, number) for number, message in enumerate(messages)]
        key = json.dumps(twins, default=str)  # the same for all conversations of one shape
        if key not in self._remembered:
            self._remembered[key] = self.template.tried(twins, generates=True)
        twin = self._remembered[key]
        end = 0  # of what was said before
        for piece in marks.pieces:
            if piece.kind == REASONED and self.template.thought is not None:
                continue  # of an earlier turn: what the model reads is up to its template
            if piece.may_drop and self._drops:
                continue
            if piece.kind == TEXT:
                at = twin.find(piece.mark)
                if piece.may_drop and 0 <= at < end:  # some templates move all of the system's to the front
                    raise _not_shown(TEXT, f"{piece.what} in its place", messages)
                end = max(end, at)
            plain = piece.text.strip()
            escaped = json.dumps(plain, ensure_ascii=False)[1:-1]
            if not piece.arrives_in(twin) or not (plain in text or escaped in text):
                raise _not_shown(piece.kind, f"{piece.what} ({plain!r:.60})", messages)

    def reply(
        self, history: Messages, turn: Mapping[str, Any], ends: Collection[str], *, closed: bool = True
    ) -> Reply:
        """A turn of the assistant after a conversation, as the model itself writes it.

        Its texts are unchanged. It ends with one of `ends` (texts of end tokens), or with the end token that
        the template shows, unless it isn't `closed`, or the template has none.

        Raises `NotShown` where the template doesn't show a part of the turn.
        """
        opening = self.prompt(history)
        history = self._prepared(history)
        whole = [*history, dict(turn)]  # for messages
        style, calls = self.template.thought, list(turn.get("tool_calls") or ())
        thought, content, is_open = self._said(turn, opening, ends, closed=closed)
        if thought is not None and style is None:
            if not self._drops:
                raise _not_shown(REASONED, f"its reasoning ({thought!r:.60})", whole)
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
                beside = " beside its calls of tools" if calls else ""
                raise _not_shown(kind, f"its {name.removesuffix('_content')}{beside}", whole)
        places = sorted(text.find(mark) for mark in (REASONING, CONTENT) if mark in text)
        if calls:
            first, last = self._calls(history, marked, text, opening)
        else:
            first, last = places[0], max(text.find(m) + len(m) for m in (CONTENT, REASONING) if m in text)
        context, start = self._context(text, opening, first, content, has_thought=is_marked)
        if is_open and is_marked:
            return Reply(context, text[start : places[0]] + str(thought))
        syntax, end = self.template.end(text[last:], ends, calls=bool(calls))
        after = syntax + end if closed else syntax * bool(calls)
        written = (text[start:last] + after).replace(REASONING, thought or "").replace(CONTENT, content)
        if by_hand and style is not None:
            begun = style.opening
            if self.template.opens_thought(opening):
                context, begun = opening, ""
            written = f"{begun}{thought}" + ("" if is_open else style.closing + written)
        return Reply(context, written)

    def _said(
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
        """Reasoning that is written in a text, the remaining text, and whether the reasoning is unfinished.

        `opened`: whether a text without any mark of a thought is one that goes on.
        """
        style = self.template.thought
        if style is None:
            return None, text, False
        body = text.lstrip()
        tags = [("<think>", "</think>", "\n")]
        if style.closing.strip():
            behind = style.closing[len(style.closing.rstrip()) :]
            tags.insert(0, (style.opening.strip(), style.closing.strip(), behind))
        for begin, end, after in tags:
            thought, ended, content = body.removeprefix(begin).partition(end)
            begun = body.startswith(begin)
            # An end without an opening, which may stand in the prompt, is one as the model writes it: a text
            # may also speak of the tag.
            is_half = begin not in thought and content[:1] in ("", after[:1] or content[:1])
            if ended and (begun or is_half):
                return thought.strip() or None, content.lstrip("\n"), False
            if begun:
                return thought.strip("\n"), "", True
        if opened:
            return text.strip("\n"), "", True
        header = self.template.content_opening.strip()
        return None, body.removeprefix(header) if header and body.startswith(header) else text, False

    def _context(
        self, text: str, opening: str, first: int, content: str, *, has_thought: bool
    ) -> tuple[str, int]:
        """The text before what the assistant wrote, and where in `text` that begins.

        A generation prompt may be continued by something that the template adds: a space, which the model
        writes, an empty thought, which belongs to the context, unless the template does without in earlier
        turns.
        """
        if not text.startswith(opening):
            is_same = text[:first].rstrip() == opening.rstrip()
            is_other = has_thought or self.template.opens_thought(opening)  # a thought in one of them alone
            return (opening if is_same or not is_other else text[:first]), first
        added = text[len(opening) : first]
        if has_thought:
            return opening, len(opening)
        if not added.strip():
            return opening, first if content.startswith(added) else len(opening)
        return (opening, first) if self.template.opens_directly else (text[:first], first)

    def _calls(self, history: Messages, turn: dict[str, Any], text: str, opening: str) -> tuple[int, int]:
        """Where in `text` a turn with calls begins, and where the last of its texts ends.

        Raises `NotShown` unless each name and text of the arguments arrives, and reads back.
        """
        whole = [*history, turn]
        if self.template.call_form is None:
            raise _not_shown(CALLS, "its calls of tools", whole)
        for call in turn["tool_calls"]:
            given = call["function"].get("arguments")
            if not isinstance(given, dict):
                raise _not_shown(CALLS, f"arguments that are no object ({given!r:.80})", whole)
            if self.template.writes_none and "null" in re.sub(r'".*?"', "", json.dumps(given)):
                raise _not_shown(CALLS, "null as an argument (it writes None)", whole)
        marks = _Marks()
        twin = self.template.tried([*history, marks.twin(turn, keeps_texts=True)])
        for piece in marks.pieces:
            if not piece.arrives_in(twin):
                raise _not_shown(CALLS, f"{piece.what} {piece.text!r:.60}", whole)
        firsts = [twin.index(piece.mark) for piece in marks.pieces]
        syntax = set(re.findall(r"</[\w=]+>|<\|?\w+\|?>", twin[min(firsts) :]))
        for piece in marks.pieces:
            if any(tag in piece.text for tag in syntax):
                said = f"{piece.what} {piece.text!r:.60} so that it reads back: it holds the syntax of calls"
                raise _not_shown(CALLS, said, whole)
        own = [mark for mark in (CONTENT, REASONING) if mark in twin]
        last = max(twin.rindex(mark) + len(mark) for mark in [*own, *(piece.mark for piece in marks.pieces)])
        if not text.endswith(twin[last:]):
            raise _not_shown(CALLS, "its calls of tools as they are", whole)
        end = len(text) - len(twin[last:])
        if own and min(firsts) > min(map(twin.index, own)):
            return min(map(text.index, own)), end
        return self._start_of_calls(history, text, opening), end

    def _start_of_calls(self, history: Messages, text: str, opening: str) -> int:
        """Where the calls of a turn without text begin: as its text would, or after the generation prompt."""
        plain = self.template.tried([*history, {"role": "assistant", "content": CONTENT}])
        before = plain.partition(CONTENT)[0]
        if CONTENT in plain and text.startswith(before):
            return len(before)
        if text.startswith(opening):
            return len(opening)
        raise _not_shown(CALLS, "its calls of tools after the text before them", history)

    def message(self, written: str, opening: str) -> dict[str, Any]:
        """What the assistant wrote after the text `opening`, as a message with its reasoning apart."""
        thought, content, _ = self._parse(written, opened=self.template.opens_thought(opening))
        space = self.template.content_opening  # which the template will put before the text again
        if thought is None and not space.strip():
            content = content.removeprefix(space)
        message = {"role": "assistant", "content": content}
        return message if thought is None else {**message, "reasoning_content": thought}

    def unended(self, text: str, ends: Collection[str]) -> str:
        """What an assistant wrote, without the end token and the padding behind it."""
        for at, token in reversed(list(self.template.specials_in(text))):
            if token in ends or token in self.template.control:
                if text[at + len(token) :].strip():
                    break
                text = text[:at]
        return text

    def check_own(self, text: str, ends: Collection[str]) -> None:
        """Raise `NotShown` where an end token, or one of other turns, stands in what an assistant wrote."""
        for at, token in self.template.specials_in(text):
            if token in ends or token in self.template.control:
                raise NotShown(
                    "special tokens in a text",
                    f"the response has the special token {token} at character {at}, and more behind it "
                    f"({text[at : at + 60]!r}); end it there, or take the token out",
                )


def _not_shown(kind: str, said: str, messages: Messages) -> NotShown:
    return NotShown(
        f"{kind} that the chat template doesn't show",
        f"conversation {messages!r:.80}: the chat template doesn't show {said}. What to do: use another "
        'policy.chat.template, or take it out of the records; policy.chat.unshown = "drop" goes on '
        "without declarations of tools, system messages and reasoning",
    )


class _Marks:
    """Messages with a mark in place of each text, and which text each mark stands for."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._names: dict[str, str] = {}

    def twin(
        self, message: Mapping[str, Any], number: int = 0, *, keeps_texts: bool = False
    ) -> dict[str, Any]:
        """`keeps_texts`: only calls get marks."""
        twin, role = dict(message), message["role"]
        if role == TOOLS:
            tools = json.loads(message["content"])
            for function in (tool["function"] for tool in tools):
                function["name"] = self._name(function["name"], "the declaration of the tool", DECLARED)
                if text := function.get("description", ""):
                    what = "the description of a tool"
                    function["description"] = self._mark(DECLARED, what, text, may_drop=True)
            return {**twin, "content": json.dumps(tools)}
        where = f"of message {number} (role {role})"
        if not keeps_texts:
            content, drops = message["content"], role in _SYSTEM
            twin["content"] = self._mark(TEXT, f"the content {where}", content, may_drop=drops)
            if thought := message.get("reasoning_content"):
                what = f"the reasoning {where}"
                twin["reasoning_content"] = self._mark(REASONED, what, thought, may_drop=True)
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

    def _name(self, name: str, what: str, kind: str) -> str:
        if name not in self._names:
            mark = self._mark(kind, what, name, may_repeat=True, may_drop=kind == DECLARED)
            self._names[name] = mark
        return self._names[name]

    def _mark(self, kind: str, what: str, text: str, **may: bool) -> str:
        """The mark for a text; white space stays as it is."""
        if not text.strip():
            return text
        self.pieces.append(Piece(kind, what, text, mark_of(len(self.pieces) + 10), **may))
        return self.pieces[-1].mark


def end_tokens(model: Any, chat: Chat) -> tuple[int, ...]:
    """The tokens that end a response; the first one ends plain text."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    shown = chat.template.end_ids if chat.tokenizer.chat_template else ()
    ids = (chat.tokenizer.eos_token_id, *listed, *shown)
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))
