"""How a response ended, as other programs say it: where it stands in a record, and `meta["finish"]` of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agro.io.json_values import is_unknown, unpacked
from agro.types import end_in

_REASONS = (
    *("finish", "finish_reason", "finishReason", "finish_reasons", "finish_details", "native_finish_reason"),
    *("stop_reason", "stopReason", "stop_type", "done_reason", "completion_reason", "completionReason"),
    *("gen_ai.response.finish_reasons", "llm.finish_reason"),
)
_RESPONSES = frozenset(("output", "incomplete_details"))  # beside which a status is of OpenAI's Responses
_FLAGS = ("truncated", "is_truncated", "isTruncated", "was_truncated")
_TRUE = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_INNER = ("response_metadata", "generation_info", "message", "completion")
NAMES = frozenset((*_REASONS, *_FLAGS, *_INNER, "incomplete_details"))
FINISH = {"finished": "stop", "cut": "length"}  # what `meta["finish"]` has; nothing where it is unknown


class Completion(str):
    """The text of a completion, with what was said of its end."""

    finish: Any = None

    @classmethod
    def of(cls, text: str, finish: Any) -> Completion:
        completion = cls(text)
        completion.finish = finish
        return completion


def reported(value: Any) -> Any:
    """What an object says of the end of its response, such as a choice, a message or a run; None: nothing.

    Of several that differ, that it was cut counts.
    """
    if not isinstance(value, Mapping):
        return None
    found = [unpacked(value[name]) for name in _REASONS if not is_unknown(value.get(name))]
    for name in _FLAGS:
        flag = value.get(name)
        flag = _TRUE.get(flag.strip().casefold(), flag) if isinstance(flag, str) else flag
        if not is_unknown(flag):
            found.append({True: "truncated", False: "complete"}.get(flag, flag) if flag in (0, 1) else flag)
    details = value.get("incomplete_details")
    if isinstance(details, Mapping):
        found.append(details.get("reason") or "incomplete")
    if value.get("status") in ("incomplete", "completed") and not _RESPONSES.isdisjoint(value):
        found.append(value["status"])
    found += [inner for name in _INNER if (inner := reported(unpacked(value.get(name)))) is not None]
    order = ("cut", "finished", None, "unknown")
    return min(found, key=lambda each: order.index(end_in(each)), default=None)


def settle(meta: dict[str, Any]) -> Any:
    """Make `meta["finish"]` "stop" (finished), "length" (cut) or nothing (unknown), of what `meta` says.

    Another word that stood there becomes `finish_reason`. Returns what is said and isn't known, else None.
    """
    if NAMES.isdisjoint(meta):
        return None
    said = reported(meta)
    end = end_in(said)
    finish, prior = FINISH.get(end or ""), meta.pop("finish", None)
    if finish is not None:
        meta["finish"] = finish
    if prior not in (None, finish):
        meta.setdefault("finish_reason", prior)
    return said if end is None else None
