"""The columns of an unknown log: where they are, what they hold, and what their names say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agro.io.json_values import are_messages, is_unknown, unpacked
from agro.io.terminal import cut
from agro.logs.labels import number_in

SHOWN = 3
DEEP = 4  # levels of objects
FEW = 12  # different words of a judgment

Type = Literal["messages", "dialog", "texts", "numbers", "number", "flag", "word", "text", "empty"]

words = str.split
# Words in the names of columns, the most telling first.
NAMES: Mapping[str, Sequence[str]] = {
    "prompt": words(
        "prompt question instruction query frage request problem task user human ask anfrage eingabe "
        "pregunta message input title context q chat conversation history dialog dialogue"
    ),
    "response": words(
        "response completion answer reply antwort generation generated predicted assistant output bot "
        "prediction pred candidate hypothesis ausgabe respuesta ai llm model result text content a"
    ),
    "reward": words(
        "reward score rating bewertung grade thumbs thumb feedback stars note sterne vote quality "
        "satisfaction helpfulness helpful correct correctness label points verdict judgment judgement "
        "evaluation like liked accepted passed success csat nps daumen reaction judge satisfied helped "
        "useful selected güte qualität wertung punkte zufriedenheit valoración calificación évaluation "
        "accuracy acc f1 em rouge bleu"
    ),
    "chosen": words("chosen preferred better best winner winning good accepted positive"),
    "rejected": words("rejected dispreferred worse worst loser losing bad declined negative"),
    "preference": words(
        "winner preference preferred better best choice chosen vote label verdict judgment judgement"
    ),
    "rank": words("rank ranking rang place"),
    "messages": words("messages conversation conversations dialog dialogue chat turns history"),
    "answer": words("expected gold golden reference truth ideal target ground correct"),
}

SPEAKERS = ("role", "speaker", "sender", "from", "author", "who", "type")  # keys of the turns of a dialog
SAID = ("content", "text", "message", "value", "utterance", "body")
ASSISTANTS = ("assistant", "bot", "gpt", "ai", "model", "agent", "chatbot", "support", "system_reply")


@dataclass
class Column:
    """The values at a path of `--map` in the first records, without unknown ones."""

    path: str
    values: list[Any] = field(default_factory=list)

    @property
    def tokens(self) -> list[str]:
        """The words of its name; of a nested one those of its last step first."""
        spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", self.path)
        steps = [re.findall(r"[^\W_]+", step.casefold()) for step in spaced.split(".")]
        return [word for step in reversed(steps) for word in step]

    @property
    def type(self) -> Type:
        if not self.values:
            return "empty"
        tests = (
            ("messages", lambda x: are_messages(unpacked(x))),
            ("dialog", lambda x: dialog_keys(unpacked(x)) is not None),
            ("numbers", lambda x: isinstance(x, list) and all(map(is_number_or_flag, x))),
            ("texts", lambda x: isinstance(x, list) and all(isinstance(each, str) for each in x)),
            ("flag", lambda x: isinstance(x, bool) or str(x).casefold() in ("true", "false")),
            ("number", is_number),
        )
        for name, test in tests:
            if all(map(test, self.values)):
                return name  # type: ignore[return-value]
        is_few = len(self.distinct) <= FEW and max(len(word) for word in self.distinct) <= 24
        return "word" if is_few and len(self.values) > len(self.distinct) else "text"

    @property
    def distinct(self) -> list[str]:
        return list(dict.fromkeys(str(value) for value in self.values))

    @property
    def tells(self) -> bool:
        """Whether it isn't the same in all of several records."""
        return len(self.distinct) > 1 or len(self.values) < 2

    @property
    def is_spoken(self) -> bool:
        """Whether some value has several words, as names and numbers of users don't."""
        return any(isinstance(value, str) and " " in value.strip() for value in self.values)

    def named(self, role: str) -> float:
        """How well its name says that it has this role, from 0 to 1; a word further inside counts less."""
        names, best = NAMES[role], 0.0
        for place, token in enumerate(self.tokens):
            word = token if token in names else token.removesuffix("s")
            if word in names:
                best = max(best, (1 - names.index(word) / len(names)) / (1 + place / 4))
        return best

    def about(self) -> dict[str, Any]:
        """As JSON: its path, type and first values."""
        kind = f"{self.type}, {len(self.distinct)} different" if self.values else "empty"
        return {"column": self.path, "type": kind, "first": [cut(x, 60) for x in self.distinct[:SHOWN]]}


def is_number_or_flag(value: Any) -> bool:
    return isinstance(value, bool) or is_number(value)


def is_number(value: Any) -> bool:
    number = number_in(value)
    return isinstance(number, int | float) and not isinstance(number, bool)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """The columns of records, also those inside of objects and of JSON in a cell."""
    columns: dict[str, Column] = {}
    for row in rows:
        named = [("*", "*", value) for value in row.values()] if _by_key(row) else []
        for name, step, value in named or [(name, quoted(name), value) for name, value in row.items()]:
            for path, inner in _leaves(name, step, value, DEEP):
                column = columns.setdefault(path, Column(path))
                if not is_unknown(inner) and inner != "":
                    column.values.append(inner)
    return tuple(columns.values())


def _leaves(path: str, step: str, value: Any, deep: int) -> Iterator[tuple[str, Any]]:
    """The paths below a value, and what is there. `step`: the path as it stands in longer ones."""
    parsed = unpacked(value)
    if isinstance(parsed, dict) and parsed and deep:
        if _by_key(parsed):
            for item in parsed.values():
                yield from _leaves(f"{step}.*", f"{step}.*", item, deep - 1)
            return
        for name, item in parsed.items():
            longer = f"{step}.{quoted(name)}"
            yield from _leaves(longer, longer, item, deep - 1)
    elif _are_objects(parsed) and deep and not are_messages(parsed) and dialog_keys(parsed) is None:
        for item in parsed:
            yield from _leaves(f"{step}[*]", f"{step}[*]", item, deep - 1)
    else:
        yield path, value
        if are_messages(parsed) and deep:  # a judgment beside what the last one says
            for name in parsed[-1].keys() - {"role", "content", "tool_calls", "name", "id"}:
                longer = f"{step}[-1].{quoted(name)}"
                yield from _leaves(longer, longer, parsed[-1][name], deep - 1)


def _by_key(value: Mapping[str, Any]) -> bool:
    """Whether its keys number or name records that are alike, such as those of pandas' to_json."""
    if all(str(key).isdecimal() for key in value):
        return len(value) > 1
    items = list(value.values())
    if len(items) < 3 or not all(isinstance(item, dict) and item for item in items):
        return False
    are_columns = all(str(key).isdecimal() for key in items[0])  # each with its cells
    return not are_columns and all(item.keys() == items[0].keys() for item in items)


def quoted(name: str) -> str:
    """As a step of an expression."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else json.dumps(name, ensure_ascii=False)


def dialog_keys(value: Any) -> tuple[str, str] | None:
    """The keys of who speaks and of what is said, in the turns of a dialog that aren't messages."""
    if not _are_objects(value):
        return None
    keys = set.intersection(*(set(turn) for turn in value))
    who = next((key for key in SPEAKERS if key in keys), None)
    said = next((key for key in SAID if key in keys), None)
    if who is None or said is None or not all(isinstance(turn[who], str) for turn in value):
        return None
    speaks = {turn[who].casefold() in ASSISTANTS for turn in value}
    return (who, said) if speaks == {True, False} else None


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
