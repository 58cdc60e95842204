"""Token ids and log-probs of the response alone, as training libraries log them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agro.errors import Refused
from agro.logs.interchange import from_record
from agro.logs.mapping import parse_map
from agro.store import Store
from agro.types import Text

PROMPT = [1, 7, 8]  # ids of any prompt
MAP = parse_map(["response=completion", "tokens=token_ids", "behavior_logp=logprobs"])


class Letters:
    """Id 97 is "a"; 0 is a special token."""

    fingerprint = "letters"

    def prompt(self, text: Text) -> list[int]:
        return PROMPT

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids)).replace("\0", "")


def row(text: str = "ab", **changes: Any) -> dict[str, Any]:
    ids = [*map(ord, text), 0]
    return {"prompt": "Q", "completion": text, "token_ids": ids, "logprobs": [-0.5] * len(ids), **changes}


@pytest.mark.parametrize("prompt", ["Q", [{"role": "user", "content": "Q"}]])
def test_the_prompts_tokens_are_put_before_them(into: Store, load: Any, prompt: Text) -> None:
    load(row(prompt=prompt, token_reward=[0, 1, 2], version=[4, 4, 5]), mapping=MAP, tokenizer=Letters())
    (s,) = into.samples()
    assert (s.prompt, s.response, s.tokenizer) == (prompt, "ab", "letters")
    assert s.tokens.tolist() == [*PROMPT, 97, 98, 0]
    assert s.action.tolist() == [False] * 3 + [True] * 3
    np.testing.assert_array_equal(s.behavior_logp, np.float32([np.nan] * 3 + [-0.5] * 3))
    np.testing.assert_array_equal(s.token_reward, np.float32([np.nan] * 3 + [0, 1, 2]))
    assert s.version.tolist() == [-1, -1, -1, 4, 4, 5]
    assert s.knows_behavior
    assert s.oldest_version == 4


def test_lists_of_responses_bring_a_list_of_tokens_each(into: Store, load: Any) -> None:
    rows = [row(text) for text in ("ab", "c")]
    lists = {name: [r[name] for r in rows] for name in ("completion", "token_ids", "logprobs")}
    load({"prompt": "Q", **lists}, mapping=MAP, tokenizer=Letters())
    assert [s.tokens.tolist()[3:] for s in into.samples()] == [[97, 98, 0], [99, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"logprobs": [-0.5] * 2},
            "behavior_logp: expected one value for each of the response's 3 tokens, got 2",
        ),
        ({"logprobs": [-0.5] * 6}, "behavior_logp: expected one value .* got 6"),
        ({"token_reward": [1]}, "token_reward: expected one value .* got 1"),
        ({"version": [1]}, "version: expected one value .* got 1"),
        ({"token_ids": [97, 99, 0]}, "tokens: expected those of the response 'ab', got those of 'ac'"),
        ({"token_ids": [*PROMPT, 97, 98, 0]}, "tokens: expected those of the response 'ab'"),
        ({"token_ids": [], "logprobs": []}, "tokens: expected those of the response 'ab'"),
    ],
)
def test_tokens_that_are_not_the_response_s(load: Any, changes: dict[str, Any], message: str) -> None:
    report = load(row(), row(**changes), mapping=MAP, tokenizer=Letters())
    assert report.samples == 1
    (refusal,) = report.refused
    assert re.search(message, refusal.reason)


def test_without_a_tokenizer_they_are_refused_with_the_way_out(load: Any) -> None:
    with pytest.raises(Refused, match=r"tokens: .*--tokenizer MODEL"):
        load(row(), mapping=MAP)


def test_a_prompt_that_only_the_tokens_have() -> None:
    """An empty prompt is at most one token (BOS); without ids all such prompts would be one group."""
    record = {"prompt": "", "response": "", "tokens": [1, 2, 3]}
    assert from_record({**record, "mask": [0, 1, 1]}).prompt == ""
    assert from_record({**record, "mask": [0, 0, 1], "prompt_id": "p"}).prompt == ""
    for fields in ({"mask": [0, 0, 1]}, {"action": [0, 0, 1]}):
        with pytest.raises(Refused, match="prompt: expected the text of the 2 tokens before the response"):
            from_record({**record, **fields})
