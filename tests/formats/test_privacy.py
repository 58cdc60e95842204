"""What isn't stored: dropped fields, keys and addresses, and tokens of texts that were changed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agro.errors import Refused
from agro.logs.privacy import Privacy

SECRETS = {  # forms as their makers document them
    "sk-proj-abcdefghij0123456789": "[key]",
    "AKIAIOSFODNN7EXAMPLE": "[key]",  # AWS's own example
    "ghp_" + "a1" * 18: "[key]",
    "hf_" + "aB" * 17: "[key]",
    "Authorization: Bearer abcdef0123456789ABCDEF": "Authorization: Bearer [bearer token]",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----": "[private key]",
    "-----BEGIN PRIVATE KEY-----\nMIIE, and cut": "[private key]",
    "alice.b+c@mail.example.org": "[e-mail address]",
}


@pytest.mark.parametrize(("secret", "left"), SECRETS.items())
def test_secrets_in_all_texts(secret: str, left: str) -> None:
    record = {
        "prompt": [{"role": "user", "content": f"see {secret}"}],
        "response": f"<{secret}",
        "meta": {"deep": [{"x": secret}], secret: 1},
        "note": secret,
    }
    privacy = Privacy(redact=True)
    assert privacy.apply(record) == {
        "prompt": [{"role": "user", "content": f"see {left}"}],
        "response": f"<{left}",
        "meta": {"deep": [{"x": left}], left: 1},
        "note": left,
    }
    assert privacy.redacted.total() == 5
    assert secret in record["response"]


@pytest.mark.parametrize("text", ["a task-based skill", "sk-short", "1@2", "@alice", "bearer of news", "x@y"])
def test_what_is_no_secret_stays(text: str) -> None:
    assert Privacy(redact=True).apply({"prompt": text, "response": text}) == {
        "prompt": text,
        "response": text,
    }


def test_own_patterns() -> None:
    privacy = Privacy(patterns=[r"\bPRJ-\d+", "(?i)alice"])
    record = {"prompt": "ALICE on PRJ-12 and PRJ-3", "response": "a@b.org"}
    assert privacy.apply(record) == {
        "prompt": "[redacted] on [redacted] and [redacted]",
        "response": "a@b.org",
    }
    assert privacy.redacted == {r"pattern \bPRJ-\d+": 2, "pattern (?i)alice": 1}
    for pattern, said in (("(", "expected a regular expression"), ("a*", "doesn't match the empty text")):
        with pytest.raises(Refused, match=said):
            Privacy(patterns=[pattern])


def test_dropped_fields() -> None:
    record: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "Q", "name": "alice"}, {"role": "user", "content": "R"}],
        "response": "A",
        "user": "alice",
        "meta": {"user": "alice", "trace": {"ip": "1.2.3.4", "ms": 5}},
    }
    privacy = Privacy(drop=["meta.user", "meta.trace.ip", "prompt.name", "episode"])
    assert privacy.apply(record) == {
        "prompt": [{"role": "user", "content": "Q"}, {"role": "user", "content": "R"}],
        "response": "A",
        "meta": {"trace": {"ms": 5}},
    }
    assert privacy.dropped == {"meta.user": 1, "meta.trace.ip": 1, "prompt.name": 1, "episode": 0}
    assert Privacy(drop=["user"]).apply({"response": "A", "meta": {"user": 1}}) == {
        "response": "A",
        "meta": {},
    }
    for name in ("response", "prompt", "meta."):
        with pytest.raises(Refused, match="--drop"):
            Privacy(drop=[name])


def test_tokens_of_a_changed_text_are_dropped() -> None:
    record = {"prompt": "Q", "response": "to a@b.org", "tokens": [1, 2], "mask": [0, 1], "version": [1, 2]}
    privacy = Privacy(redact=True)
    assert privacy.apply(record) == {"prompt": "Q", "response": "to [e-mail address]"}
    same = {**record, "response": "fine", "behavior_logp": [None, -1.0]}
    assert privacy.apply(same) == same
    assert privacy.tokens == 1
    assert Privacy(drop=["tokens"]).apply(same) == {"prompt": "Q", "response": "fine"}


def test_ids_with_an_address_stay_apart() -> None:
    privacy = Privacy(redact=True)
    ids = [privacy.apply({"prompt_id": f"{name}@b.org"})["prompt_id"] for name in ("alice", "bob", "alice")]
    assert ids[0] == ids[2] != ids[1]
    assert not any("@" in i for i in ids)


def test_a_long_text_takes_one_pass() -> None:
    began = time.perf_counter()
    Privacy(redact=True).apply({"prompt": "a" * 1_000_000 + "." * 1000, "response": "sk" * 500_000})
    assert time.perf_counter() - began < 60  # a second here; quadratic would be hours
