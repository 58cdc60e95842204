"""How a response ended, in the words of every program, and whether its last thought is closed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

End = Literal["finished", "cut", "unknown"]

# A finished response ends with the model's end token, a stop text or a tool call. One that a limit, a filter,
# an error or a person ended is cut: the model didn't choose that end. Case, spaces, -, _ and . are ignored.
WORDS: dict[End, str] = {
    "finished": """
        stop stopped stop_sequence stop_token stop_string stop_string_found stop_words word
        eos eos_token eos_found end_of_text end_turn end_of_turn end
        complete completed finish finished done natural success
        tool_calls tool_call tool_use tool_uses function_call function_calls
    """,
    "cut": """
        length limit cut truncated incomplete not_finished response_truncated
        max_tokens max_token max_length max_new_tokens max_output_tokens max_completion_tokens
        max_predicted_tokens_reached token_limit tokens_limit token_limit_reached
        model_length context_length context_length_exceeded context_length_reached context_window
        model_context_window_exceeded time_limit timeout pause_turn
        content_filter content_filtered guardrail_intervened safety recitation language blocklist
        prohibited_content spii image_safety sensitive refusal
        malformed_function_call malformed_model_output malformed_tool_use unexpected_tool_call
        too_many_tool_calls
        error error_toxic error_limit network_error insufficient_system_resource failed
        abort aborted cancel cancelled canceled user_cancel user_stopped interrupted model_unloaded
    """,
    "unknown": "unknown none null nan undefined unspecified other load unload in_progress pending",
}
_NOISE = re.compile(r"[\s_.-]+")


def _key(word: str) -> str:
    return _NOISE.sub("", word).casefold().removeprefix("finishreason").removeprefix("stopreason")


ENDS: dict[str, End] = {_key(word): end for end, reasons in WORDS.items() for word in reasons.split()} | {
    "": "unknown"
}


def end_in(value: Any) -> End | None:
    """The end that a finish reason, or several that agree, stands for; None for an unknown reason."""
    if isinstance(value, list):
        ends = {end_in(item) for item in value}
        return ends.pop() if len(ends) == 1 else None
    if isinstance(value, Mapping):  # {"type": "length"} of SGLang, {"reason": "stop"} of HELM
        value = value.get("type", value.get("reason"))
    if value is None:
        return "unknown"
    if not isinstance(value, str):
        return None
    return ENDS.get(_key(value))  # such as FinishReason.STOP


_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
)


_OPENING = re.compile(rf"(?m)^\s*(?:{'|'.join(re.escape(opening) for opening, _ in _TAGS)})")


def thought_in(prompt: str, response: str) -> Literal["open", "closed"] | None:
    """Whether the last thought of a response is closed; None if it has none.

    A prompt that ends with an opening tag opens one, as chat templates of thinking models do. In a response,
    an opening tag counts only at the start of a line, since a text may also mention it.
    """
    opened, closed = [match.start() for match in _OPENING.finditer(response)], -1
    for opening, closing in _TAGS:
        closed = max(closed, response.rfind(closing))
        if not opened and prompt.rstrip().endswith(opening):
            opened.append(-1)
    if closed < 0 and not opened:
        return None
    return "closed" if closed > max(opened, default=-1) else "open"


def without_open_thought(response: str) -> str:
    """The text before an unclosed thought; empty if the prompt opened it."""
    opened = list(_OPENING.finditer(response))
    return response[: opened[-1].start()] if opened else ""
