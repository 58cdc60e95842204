"""Read Inspect AI's logs of evaluations, `.eval` (zip) and `.json`."""

from __future__ import annotations

import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import zstandard

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, text
from agro.io.jsonlines import Line
from agro.logs.protocol import Context, Item, Row, ScoredDocument, line_of
from agro.logs.records import Record, call, reply, settings, split, user
from agro.logs.values import a_list, number, number_in, total, wrong
from agro.types.conversation import normalized_message

_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}  # correct, incorrect, partial, no answer
_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_ATTACHED = "attachment://"
_ASIDE = ("attachments", "events", "events_data", "store")  # unused columns, which may be large
_COLUMNS = (*_ASIDE, "input", "target", "messages", "output", "scores", "eval", "model_usage")


def read(row: Row, context: Context) -> list[Item]:
    """Read all choices of the last output; the score belongs to the first one. Log-probs belong to the
    provider's own tokens, and only go into `meta`."""
    sample = _resolved(row, row.get("attachments") or {})
    run = entry(sample["eval"], "eval")
    choices = objects(entry(sample["output"], "output").get("choices") or [], "output.choices")
    prompt, turns = _conversation(sample)
    if not turns and not choices:
        error = entry(sample.get("error"), "error").get("message")
        raise Refused(f"output.choices: no response was generated; error: {error}")
    common: Record = {
        "answer": sample.get("target") or None,
        "model": text(run.get("model"), "eval.model"),
        "sampling": settings(entry(run.get("model_generate_config"), "eval.model_generate_config")),
    }
    calls = [each for each in a_list(row.get("events"), "events") if entry(each, "events").get("tools")]
    common["tools"] = _resolved(calls[0]["tools"], row.get("attachments") or {}) if calls else None
    meta = {name: value for name, value in omit(sample, _COLUMNS).items() if value not in ([], {})}
    meta |= {"scores": sample["scores"]} if sample.get("scores") else {}
    items = []
    for index, choice in enumerate(choices or [{}]):
        name, is_first = f"choices[{index}]", index == 0
        aside = meta | omit({"finish": choice.get("stop_reason"), "logprobs": choice.get("logprobs")}, ())
        common["reward"] = _reward(sample, context) if is_first else None
        if turns and is_first:
            record = split(prompt + turns, prompt, aside, **common)
        else:
            message = _plain(entry(choice.get("message"), f"output.{name}.message"))
            record = reply(prompt + turns[:-1], message, ("messages", name), aside, **common)
        items.append(Item.of(record, name))
    return items


def _conversation(sample: Row) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The prompt, and the turns from the first generated message to the last one.

    Assistant messages with the source `input`, such as those of few-shot examples, belong to the prompt.
    """
    request = sample["input"]
    messages = objects(sample.get("messages") or [], "messages")
    if not messages:
        inputs = [user(request)] if isinstance(request, str) else objects(request, "input")
        return [_plain(message) for message in inputs], []
    replies = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    generated = [i for i in replies if messages[i].get("source") == "generate"]
    if not any("source" in messages[i] for i in replies):  # older logs: everything after the input
        generated = [i for i in replies if i >= (len(request) if isinstance(request, list) else 0)]
    if not generated:
        return [_plain(message) for message in messages], []
    turns = [_plain(message) for message in messages[: generated[-1] + 1]]
    return turns[: generated[0]], turns[generated[0] :]


def _plain(message: Row) -> dict[str, Any]:
    """A message in the form of chat templates."""
    turn = {"role": message.get("role"), "content": message.get("content") or ""}
    if message.get("tool_calls"):
        calls = objects(message["tool_calls"], "tool_calls")
        turn["tool_calls"] = [
            {"id": None, **call(each.get("function"), each.get("arguments"), each.get("id"))}
            for each in calls
        ]
    if message.get("role") == "tool":
        if error := entry(message.get("error"), "error"):  # which the model saw instead
            turn["content"] = f"Error: {error.get('message')}"
        fields = {"tool_call_id": message.get("tool_call_id"), "name": message.get("function")}
        turn |= {name: value for name, value in fields.items() if value is not None}
    return normalized_message(turn, "messages")[-1]


def _resolved(value: Any, attachments: Mapping[str, Any]) -> Any:
    """The value with references to attachments replaced by their texts."""
    if isinstance(value, str) and value.startswith(_ATTACHED):
        name = value.removeprefix(_ATTACHED)
        if name not in attachments:
            raise Refused(f"attachments: expected the text of {value}, got none")
        return attachments[name]
    if isinstance(value, list):
        return [_resolved(item, attachments) for item in value]
    if isinstance(value, dict):
        return {n: item if n in _ASIDE else _resolved(item, attachments) for n, item in value.items()}
    return value


def _reward(sample: Row, context: Context) -> float | None:
    """The value of the only scorer, or of the one that --choose names."""
    scores = entry(sample.get("scores"), "scores")
    if not scores and "scorer" not in context.choose:
        return None
    name = context.chosen("scorer", scores)
    value = _value(entry(scores[name], f"scores.{name}"))
    if not isinstance(value, dict):
        return _number(value, f"scores.{name}.value")
    parts = {key: _number(part, f"scores.{name}.{key}") for key, part in value.items()}
    return total(parts, list(parts), context.rewards)


def _value(score: Row) -> Any:
    """The value of a score after its edits."""
    edits = objects(score.get("history") or [], "scores.history")
    values = [edit["value"] for edit in edits if edit.get("value", "UNCHANGED") != "UNCHANGED"]
    return values[-1] if values else score.get("value")


def _number(value: Any, name: str) -> float | None:
    """A number, or the number of a verdict's letter or word."""
    meaning = _LETTERS.get(value, _WORDS.get(value.lower())) if isinstance(value, str) else None
    if meaning is None and isinstance(value, str) and not isinstance(number_in(value), int | float):
        raise wrong(name, "a number, C, I, P, N, yes or no", value)
    return number(value, name, is_text=True) if meaning is None else meaning


def scored(row: Row) -> ScoredDocument:
    """The document with its scores by scorer, or by "SCORER.NAME" if a scorer gives several."""
    run = entry(row["eval"], "eval")
    scores: dict[str, float | None] = {}
    for name, score in entry(row.get("scores"), "scores").items():
        value = _value(entry(score, f"scores.{name}"))
        parts = {f"{name}.{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value}
        scores |= {key: _number(x, f"scores.{key}") for key, x in parts.items()}
    document = _resolved(row["input"], row.get("attachments") or {})
    if not isinstance(document, str):
        document = [_plain(message) for message in objects(document, "input")]  # ids differ by log
    return ScoredDocument(str(run.get("task") or ""), str(row["id"]), document, document, scores)


_MONOLITH = re.compile(r"samples/[^/]+\.json")
_SHELL = re.compile(r"(samples/.+)/sample\.json")
_PART = re.compile(r"(samples/.+)/(\d+)\.json")
_HEADERS = ("header.json", "_journal/start.json")  # the first is written when the log ends
_HEAD = 1 << 16  # bytes of a JSON log that are searched for its keys


def is_log(path: Path) -> bool:
    if path.suffix == ".eval":
        return path.is_file()
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return head.lstrip().startswith(b"{") and all(
        re.search(key, head) for key in (rb'"status"\s*:\s*"', rb'"eval"\s*:\s*\{', rb'"task"\s*:')
    )


def records(path: Path) -> Iterator[Line]:
    """The samples of a log, each with the log's `eval`."""
    samples = _packed(path) if path.suffix == ".eval" else _document(path)
    for position, (location, sample) in enumerate(samples, 1):
        yield line_of(f"{path}:{location}", position, sample)


Read = Callable[[], dict[str, Any]]  # reads one sample, or refuses it


def _document(path: Path) -> Iterator[tuple[str, Read]]:
    try:
        log = _decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise Refused(f"{path}: can't be read: {error.strerror or error}") from None
    for position, sample in enumerate(a_list(log.get("samples"), f"{path}: samples"), 1):
        yield str(position), partial(lambda one: entry(one, "samples") | {"eval": log.get("eval")}, sample)


def _packed(path: Path) -> Iterator[tuple[str, Read]]:
    """The samples of an archive. Each is one member, or several with parts of messages and attachments."""
    with _opened(path) as archive:
        names = frozenset(archive.namelist())
        header = next((name for name in _HEADERS if name in names), None)
        if header is None:
            raise Refused(f"{path}: expected a log of Inspect, with {' or '.join(_HEADERS)}")
        run = _decoded(read_member(archive, path, header), f"{path}: {header}").get("eval")
        parts: dict[str, dict[int, str]] = {}  # by folder, members by the index of their first item
        for name in names:
            if match := _PART.fullmatch(name):
                parts.setdefault(match[1], {})[int(match[2])] = name

        def joined(folder: str) -> list[Any]:
            """A list that is split over several members."""
            items: list[Any] = []
            members = parts.get(folder, {})
            for start in sorted(members):
                if start != len(items):
                    raise Refused(
                        f"{path}: {members[start]}: expected item {len(items)} first: a part is missing"
                    )
                location = f"{path}: {members[start]}"
                items += _decoded(read_member(archive, path, members[start]), location, list)
            return items

        def read(name: str, folder: str) -> dict[str, Any]:
            sample: dict[str, Any] = _decoded(read_member(archive, path, name), f"{path}: {name}")
            sample["eval"] = run
            if folder:
                sample["messages"] = joined(f"{folder}/messages")
                sample["attachments"] = {str(i): x for i, x in enumerate(joined(f"{folder}/attachments"))}
            return sample

        for name in sorted(names):
            shell = _SHELL.fullmatch(name)
            if shell or _MONOLITH.fullmatch(name):
                yield name, partial(read, name, shell[1] if shell else "")


def _decoded(data: bytes, location: str, kind: type = dict) -> Any:
    try:
        value = json.loads(data, parse_constant=_unknown)
    except ValueError as error:
        raise Refused(f"{location}: expected JSON: {error}") from None
    if isinstance(value, kind):
        return value
    raise Refused(f"{location}: expected {'an object' if kind is dict else 'a list'}, got {value!r:.80}")


def _unknown(constant: str) -> float | None:
    """Read NaN, which an unscored sample has, as None. A record refuses an infinity, which stays one."""
    return None if constant == "NaN" else float(constant)


_ZSTANDARD = 93  # zip's compression method
_LOCAL = 30  # bytes of a member's own header before its name and extra field


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise Refused(f"{path}: expected a zip file, as a finished log is: {error}") from None
    except OSError as error:
        raise Refused(f"{path}: can't be read: {error.strerror or error}") from None


def read_member(archive: zipfile.ZipFile, path: Path, name: str) -> bytes:
    """The content of a member, which may be compressed with zstd. Raises `Refused` if it is damaged."""
    info = archive.getinfo(name)
    try:
        if info.compress_type != _ZSTANDARD:
            return archive.read(name)
        with path.open("rb") as file:
            file.seek(info.header_offset)
            name_size, extra_size = struct.unpack("<HH", file.read(_LOCAL)[26:30])
            file.seek(info.header_offset + _LOCAL + name_size + extra_size)
            packed = file.read(info.compress_size)
        with zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True) as frames:
            data = frames.read()
    except (zipfile.BadZipFile, zlib.error, zstandard.ZstdError, NotImplementedError, struct.error) as error:
        raise Refused(f"{path}: {name}: can't be unpacked: {error}") from None
    if zlib.crc32(data) != info.CRC:
        raise Refused(f"{path}: {name}: damaged: the checksum differs")
    return data
