"""Read exports of Argilla and Label Studio, in which people rate, rank, choose or write responses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, text, unpacked
from agro.logs.protocol import Context, Item, Judgment, Row, SkipRecord
from agro.logs.unknown_columns import Column
from agro.logs.values import a_list, listed, number, one_of, wrong
from agro.types import Text
from agro_formats.preferences import rank_judgments, tally
from agro_formats.traces import scored

_PROMPTS = ("prompt", "instruction", "question", "query", "messages", "chat", "input")
_CONTEXTS = ("context", "input")  # further fields that belong to the prompt
_RESPONSE = re.compile(
    r"(.*[\W_])?(response|answer|completion|generation|output|candidate|reply|chosen|rejected)s?[\W_]?(\d+|[a-z])?"
)
_TIES = ("tie", "same", "equal", "draw", "both")

Answers = Mapping[str, Sequence[Any]]
"""The annotators' answers by question: numbers, texts (which may name a response), or objects with ranks by
response name."""


def prompt_of(fields: Mapping[str, Any], context: Context) -> tuple[Text, set[str]]:
    """The prompt in a task's fields, and the names of the fields that it consists of."""
    name = context.choose.get("prompt")
    if name is None:
        name = next((candidate for candidate in _PROMPTS if fields.get(candidate) is not None), None)
    if name is None:
        columns = [Column(key) for key, value in fields.items() if value is not None]
        named = [column.path for column in columns if column.named("prompt") > column.named("response")]
        name = named[0] if len(named) == 1 else None
    if name is None or name not in fields:
        raise Refused(
            f"prompt: expected one of the fields {', '.join(_PROMPTS)}, got {', '.join(fields) or 'none'}; "
            "name it with --choose prompt=FIELD"
        )
    if not isinstance(fields[name], str):
        return objects(fields[name], name), {name}
    more = [key for key in _CONTEXTS if key != name and fields.get(key) and "prompt" not in context.choose]
    return "\n".join(text(fields[key], key) for key in (name, *more)), {name, *more}


def responses_of(fields: Mapping[str, Any], context: Context) -> dict[str, str]:
    """The responses in a task's other fields, ordered by name."""
    name = context.choose.get("response")
    if name is not None:
        return {name: text(fields[name], name)} if name in fields else {}
    names = [
        key
        for key, value in fields.items()
        if isinstance(value, str) and _RESPONSE.fullmatch(key.lower()) and not Column(key).named("answer")
    ]
    return {key: fields[key] for key in sorted(names, key=lambda key: (len(key), key))}


def items_of(
    prompt: Text,
    responses: Mapping[str, str],
    answers: Answers,
    subjects: Mapping[str, str],
    meta: Mapping[str, Any],
    context: Context,
) -> list[Item]:
    """The responses of a task with people's judgments, or if it has none, the responses that people wrote.

    `subjects`: the field that a question is about, by question, if it is about one.
    """
    meta = dict(meta) | ({"answers": dict(answers)} if answers else {})
    if not responses:
        return list(_written(prompt, answers, meta, context))
    records = []
    for name, response in responses.items():
        scores = _scores(name, answers, subjects, alone=len(responses) == 1)
        for question in context.rewards:
            if question in answers and question not in scores:
                raise Refused(f"--reward {question}: expected numbers for each response, one or several")
        records.append(
            {"prompt": prompt, "response": response, "reward": scored(scores, context), "meta": meta}
        )
    return [Item(tuple(records), tuple(responses), _judgments(answers, list(responses), context))]


def _scores(name: str, answers: Answers, subjects: Mapping[str, str], *, alone: bool) -> dict[str, Any]:
    """The ratings of a response, under names that all responses of the task share."""
    scores = {}
    for question, values in answers.items():
        is_of = subjects[question] == name if question in subjects else alone
        if is_of and all(isinstance(value, bool | int | float | None) for value in values):
            short = question if alone else question.removeprefix(name).strip("-_. ")
            scores[short or question] = values
    return scores


def _written(prompt: Text, answers: Answers, meta: dict[str, Any], context: Context) -> Iterator[Item]:
    texts = {
        name: values for name, values in answers.items() if values and all(isinstance(v, str) for v in values)
    }
    question = context.choose.get("response", next(iter(texts), ""))
    if "response" not in context.choose and len(texts) > 1:
        raise Refused(
            f"response: expected --choose response=NAME of the questions {', '.join(texts)}, or of a field"
        )
    if question not in texts:
        raise SkipRecord("tasks without a response")
    for i, value in enumerate(texts[question]):
        record = {"prompt": prompt, "response": value, "role": "expert", "meta": meta}
        yield Item.of(record, f"{question}[{i}]")


def _judgments(answers: Answers, names: list[str], context: Context) -> tuple[Judgment, ...]:
    """The judgments of the question that compares the responses, one per pair."""
    comparisons = dict[str, list[Judgment]]()
    for question, values in answers.items():
        judgments = [judgment for value in values for judgment in _judged(value, names)]
        if judgments:
            comparisons[question] = judgments
    chosen = context.choose.get("preference")
    if chosen is not None and chosen in answers and chosen not in comparisons:
        expected = f"the name of a response ({', '.join(names)}), a tie, or a ranking"
        raise wrong(chosen, expected, answers[chosen][0])
    return tally(comparisons[context.chosen("preference", comparisons)]) if comparisons else ()


def _judged(value: Any, names: list[str]) -> tuple[Judgment, ...]:
    """The judgments in an annotator's answer: ranks, or the name of the best response."""
    if isinstance(value, dict):
        ranks = {_position(str(name), names): rank for name, rank in value.items()}
        if None in ranks:
            return ()
        return rank_judgments([number(ranks.get(i), f"the rank of {name}") for i, name in enumerate(names)])
    if not isinstance(value, str) or len(names) < 2:
        return ()
    if _plain(value) in _TIES:
        return rank_judgments([0.0] * len(names))
    best = _position(value, names)
    return () if best is None else tuple(Judgment(best, i) for i in range(len(names)) if i != best)


def _position(label: str, names: list[str]) -> int | None:
    """The position of the response with this name, or with this ending if endings tell the names apart."""
    plain = [_plain(name) for name in names]
    ends = [re.sub(r"^\D+(?=\d)|^.*(?=.$)", "", name) for name in plain]
    for spellings in (plain, ends):
        if len(set(spellings)) == len(spellings) and _plain(label) in spellings:
            return spellings.index(_plain(label))
    return None


def _plain(name: str) -> str:
    return re.sub(r"\W|_", "", name.lower())


_ANSWERS = ".responses"
_RECORD_COLUMNS = (
    *("id", "_server_id", "external_id", "status", "inserted_at", "updated_at", "metadata", "vectors"),
)
_TIMES = ("inserted_at", "updated_at")
_UNSUBMITTED = ("draft", "discarded")


def read_record(row: Row, context: Context) -> list[Item]:
    answers = {
        question: [one.get("value") for one in listed(values, f"responses.{question}")]
        for question, values in entry(unpacked(row["responses"]), "responses").items()
    }
    fields = entry(unpacked(row["fields"]), "fields")
    extras = {name: value for name, value in row.items() if name in _RECORD_COLUMNS or name == "suggestions"}
    return _items(fields, answers, extras, context)


def read_flat(row: Row, context: Context) -> list[Item]:
    """Read a record whose fields and metadata are columns."""
    answers = {}
    for column in row:
        if column.endswith(_ANSWERS):
            values = a_list(row[column], column)
            states = row.get(f"{column}.status") or [None] * len(values)
            both = zip(values, states, strict=True)
            answers[column.removesuffix(_ANSWERS)] = [v for v, state in both if state not in _UNSUBMITTED]
    columns = {c for c in row if c.endswith(_ANSWERS) or f"{_ANSWERS}." in c}
    reserved = {*columns, *_RECORD_COLUMNS}
    fields = {c: value for c, value in row.items() if c not in reserved and ".suggestion" not in c}
    return _items(fields, answers, omit(row, columns | fields.keys()), context)


def is_flat(row: Row) -> bool:
    return any(c.endswith(_ANSWERS) and f"{c}.users" in row for c in row)


def _items(
    fields: dict[str, Any], answers: dict[str, list[Any]], extras: dict[str, Any], context: Context
) -> list[Item]:
    """The items of a record. `extras`: its further columns, for `meta`."""
    prompt, used = prompt_of(fields, context)
    shown = {name: value for name, value in fields.items() if name not in used}
    responses = responses_of(shown, context)
    named = {question: [name for name in responses if question.startswith(name)] for question in answers}
    subjects = {question: max(names, key=len) for question, names in named.items() if names}
    meta = dict(entry(unpacked(extras.get("metadata") or None), "metadata"))
    for name, value in omit(extras, ("metadata", "vectors")).items():
        if value not in ({}, []):
            meta[name] = str(value) if name in _TIMES else value
    answered = {
        question: [_value(value, sorted(responses)) for value in values]
        for question, values in answers.items()
        if values
    }
    return items_of(prompt, responses, answered, subjects, meta | omit(shown, responses), context)


def _value(value: Any, names: list[str]) -> Any:
    """An answer; a ranking, which lists all `names` in order, becomes ranks by name."""
    is_ranking = isinstance(value, list) and len(value) > 1 and sorted(map(str, value)) == names
    return {name: rank for rank, name in enumerate(value, 1)} if is_ranking else value


def read_task(row: Row, context: Context) -> list[Item]:
    data = entry(row["data"], "data")
    prompt, used = prompt_of(data, context)
    fields = {name: value for name, value in data.items() if name not in used}
    responses = responses_of(fields, context)
    answers: dict[str, list[Any]] = {}
    subjects: dict[str, str] = {}
    for i, annotation in enumerate(objects(row["annotations"], "annotations")):
        if annotation.get("was_cancelled"):
            continue
        for result in objects(a_list(annotation.get("result"), "result"), f"annotations[{i}].result"):
            question = text(result.get("from_name"), f"annotations[{i}].result.from_name")
            answers.setdefault(question, []).append(_answer(result, list(responses)))
            if result.get("to_name") in data:
                subjects[question] = result["to_name"]
    meta = omit(row, ("data", "annotations")) | omit(fields, responses)
    return items_of(prompt, responses, answers, subjects, meta, context)


def _answer(result: Mapping[str, Any], names: list[str]) -> Any:
    """The answer in a result of `annotations`."""
    kind, value = result.get("type"), entry(result.get("value"), "result.value")
    if kind == "pairwise":
        # The name of the response on the selected side. The left one is the first that the control names, or,
        # if it names itself, the first of the names.
        sides = [name.strip() for name in str(result.get("to_name")).split(",")]
        if not set(sides) <= set(names) or len(sides) != 2:
            sides = names
        if len(sides) != 2:
            raise Refused(f"pairwise: expected two responses in data, got {', '.join(names) or 'none'}")
        return one_of(value.get("selected"), dict(zip(("left", "right"), sides)), "pairwise.selected")
    answer = value.get("text") if kind == "textarea" else value.get(str(kind), value)
    return answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
