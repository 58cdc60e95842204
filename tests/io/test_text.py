"""Texts, names and folders as people and other programs meet them."""

from __future__ import annotations

import io
import sys
import time

import pytest

from agro.errors import remember_secret, without_secrets
from agro.io.files import new_run_folder
from agro.io.peers import did_you_mean
from agro.io.strictjson import loads
from agro.io.terminal import csv_cell, cut, drawn, plain, shown_safely, text_of_cell, visible


def test_what_a_terminal_would_obey_is_escaped() -> None:
    text = "a\x1b[31m\x07\x7f\x9b\r\u202e\u2028\ud800é日\n\t"
    assert visible(text) == "a\\x1b[31m\\x07\\x7f\\u009b\\r\\u202e\\u2028\\ud800é日\n\t"


def test_what_is_printed_is_shown_safely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, io.StringIO())
    with shown_safely():
        print("\rname \x1b[31m \x9b \u202e \r0123456789abcdef é日")
        print("\r\x1b[K\x1b[1mdrawn\x1b]0;title\x07\x1b[6n", file=drawn(sys.stderr))
    assert sys.stdout.getvalue() == "\rname \\x1b[31m \\u009b \\u202e \\r(redacted) é日\n"
    assert sys.stderr.getvalue() == "\r\x1b[K\x1b[1mdrawn\\x1b]0;title\\x07\\x1b[6n\n"


def test_a_secret_is_removed_as_it_is_echoed_but_words_of_texts_are_kept() -> None:
    """As a page has it, and a key without its scheme: both were kept. "another" was removed everywhere."""
    for secret in ("pa&ss'w<rd1", "Bearer sk-12345678", "another"):
        remember_secret(secret)
    assert without_secrets("pa&amp;ss&#39;w&lt;rd1, pa%26ss%27w%3Crd1") == "(redacted), (redacted)"
    assert without_secrets("another key, sk-12345678, Bearer") == "another key, (redacted), Bearer"


def test_a_sheet_has_no_formulas() -> None:
    """The characters of OWASP's page on CSV injection, and the quote, so that each text comes back."""
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "'=1", "'", "＝1", "1", ""):
        cell = csv_cell(text)
        assert text_of_cell(cell) == text
        assert cell[:1] not in ("=", "+", "-", "@", "\t", "\r", "＝")


def test_a_cut_says_how_much_is_missing() -> None:
    assert cut("abcdef", 4) == "abcd … 2 more characters"
    assert cut("abcdef", 6) == cut("abcdef", 0) == "abcdef"


def test_messages_are_one_text() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert plain(messages) == "system: Be brief.\nuser: Hi"


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("learning", "did you mean learn?"),
        ("gpro", "did you mean gvpo, gspo or grpo?"),
        ("kro", "did you mean kto?"),
        ("qqqqqq", ""),
    ],
)
def test_up_to_three_names_that_are_alike_are_named(typed: str, answer: str) -> None:
    assert did_you_mean(typed, ["learn", "weight_decay", "grpo", "gvpo", "gspo", "kto"]) == answer
    assert did_you_mean("b", ["beta", "b_"], "train.") == "did you mean train.b_?"


def test_a_name_in_whole_words_of_the_other_is_named() -> None:
    assert did_you_mean("reward_scale", ["scale", "cal", "ward"]) == "did you mean scale?"
    assert did_you_mean("max", ["max_uses", "maximal_number", "climax_uses"]) == "did you mean max_uses?"
    assert did_you_mean("kl_loss_coef", ["kl", "loss", "coef"]) == "did you mean loss, kl or coef?"
    assert did_you_mean("warmup_steps", ["warmup", "steps"]) == "did you mean warmup or steps?"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * 5_000 + "]" * 5_000, '{"a":' * 5_000 + "1" + "}" * 5_000]
)
def test_what_is_nested_too_deeply_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        loads(text)


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20261122-191204")
    names = []
    for _ in range(3):
        folder = new_run_folder()
        folder.mkdir(parents=True)
        names.append(folder.name)
    assert names == ["20261122-191204", "20261122-191204-2", "20261122-191204-3"]
