"""`agro store show`: which samples it finds, and that nothing in them reaches the terminal as a command."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import done, on_terminal, refused, report_of

from agro.store import Store
from agro.types import Sample

ALARM = "\x1b]0;owned\x07"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    tokens = {"tokens": [1, 5, 6, 7], "action": [False, False, True, True]}
    samples = [
        Sample("2+2=", "4", 1.0, source="gpt", role="expert", **tokens),
        Sample("2+2=", "five", 0.0, source="ours", role="policy", version=7),
        Sample("2+2=", "[bold]x[/bold]" + ALARM, None, source="ours", role="policy"),
        Sample("3+3=", "6 of course", 0.5, source="gpt"),
        Sample([{"role": "user", "content": "Say Hello"}], "hello\ud800", -1.0),
    ]
    with Store.open(tmp_path / "s.db") as store:
        store.append(samples)
    return tmp_path / "s.db"


def show(store: Path, *args: object) -> dict:
    return report_of("store", "show", store, *args)


def ids(store: Path, *args: object) -> list[int]:
    return [s["id"] for s in show(store, *args)["samples"]]


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ((), [1, 2, 3, 4, 5]),
        (("--newest",), [5, 4, 3, 2, 1]),
        (("--limit", 2), [1, 2]),
        (("--newest", "--limit", 2), [5, 4]),
        (("--reward", "0.5:"), [1, 4]),
        (("--reward", ":0"), [2, 5]),  # a response without a reward lies in no range
        (("--reward", "-1:0"), [2, 5]),
        (("--reward", "0.5:0.5"), [4]),
        (("--source", "gpt"), [1, 4]),
        (("--source", "gpt", "--source", "ours"), [1, 2, 3, 4]),
        (("--prompt", "say hello"), [5]),
        (("--prompt", "USER:"), [5]),
    ],
)
def test_filters(store: Path, args: tuple, found: list[int]) -> None:
    assert ids(store, *args) == found


def test_a_prompt_by_its_id(store: Path) -> None:
    prompt = show(store)["samples"][3]["prompt_id"]
    assert ids(store, "--prompt-id", prompt) == [4]
    assert ids(store, "--prompt-id", prompt, "--newest") == [4]


def test_json_is_one_document_that_says_whether_there_is_more(store: Path) -> None:
    found = show(store, "--limit", 4)
    assert (found["samples_in_store"], found["more"]) == (5, True)
    assert found["samples"][0]["tokens"] == [1, 5, 6, 7]
    assert show(store, "--limit", 5)["more"] is False
    assert show(store, "--reward", "9:", "--groups")["groups"] == []


def test_groups_have_their_best_or_newest_response_first(store: Path) -> None:
    groups = show(store, "--groups")["groups"]
    assert [[r["id"] for r in g["responses"]] for g in groups] == [[1, 2, 3], [4], [5]]
    groups = show(store, "--groups", "--newest", "--reward", "0:")["groups"]
    assert [[r["id"] for r in g["responses"]] for g in groups] == [[4], [2, 1]]


def test_groups_stand_side_by_side(store: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = done("store", "show", store, "--groups", "--limit", 1).stdout
    [heads] = [line for line in out.splitlines() if "sample 1" in line]
    assert "sample 2" in heads
    assert "sample 3" in heads
    assert "3 responses, rewards 0 to 1" in out
    assert "version 7" in out
    assert "there are more of the 5 samples" in out


@pytest.mark.parametrize("args", [(), ("--groups",)])
def test_control_characters_and_markup_are_text(store: Path, args: tuple, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = done("store", "show", store, *args).stdout
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[bold]x[/bold]\\x1b]0;owned\\x07" in out
    assert "hello\\ud800" in out


def test_what_is_cut_is_said(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s.db") as store:
        store.append(Sample("p", f"{i}" * 900, float(i)) for i in range(7))
    out = done("store", "show", tmp_path / "s.db", "--groups").stdout
    assert out.count("… 100") == 7
    assert out.count("sample ") == 7


def test_refusals_say_what_was_expected(store: Path, tmp_path: Path) -> None:
    for value in ("1", "5:2", "nan:1"):
        assert f"--reward '{value}': expected LOW:HIGH" in refused("store", "show", store, "--reward", value)
    assert "--source 'gtp': expected one of" in refused("store", "show", store, "--source", "gtp")
    assert "none.db" in refused("store", "show", tmp_path / "none.db")


def test_a_terminal_has_a_pager_that_may_be_left(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with Store.open(path) as store:
        store.append(Sample(f"p{i}", "x" * 200) for i in range(2000))
    (all_of_it, code), (first, left) = (
        on_terminal("store", "show", path, PAGER=pager, COLUMNS="80") for pager in ("cat", "head -c 100")
    )
    assert code == left == 0
    assert all_of_it.count("sample ") == 500
    assert "there are more of the 2,000 samples" in all_of_it
    assert 0 < first.count("sample ") < 10


def test_a_terminal_without_its_pager_has_the_first_samples(store: Path) -> None:
    said, code = on_terminal("store", "show", store, PAGER="no-such-pager -R")
    assert (said.count("sample "), code) == (5, 0), said


def test_a_terminal_says_that_nothing_fits(tmp_path: Path) -> None:
    Store.open(tmp_path / "empty.db").close()
    said, code = on_terminal("store", "show", tmp_path / "empty.db", PAGER="cat")
    assert code == 0, said
    assert "none of 0 samples matches" in said
