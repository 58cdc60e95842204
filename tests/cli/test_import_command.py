"""`agro import` with its options of privacy and repetition, and `agro forget`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from running import agro, done, refused, report_of
from writing import write_rows

from agro.store import Store


def log(folder: Path) -> Path:
    """Two groups of two; the second response of each is alice's and has a secret."""
    rows: list[dict[str, Any]] = []
    for i in range(4):
        user, text = ("alice", "mail a@b.org, AKIAIOSFODNN7EXAMPLE") if i % 2 else ("bob", "fine")
        rows.append({"prompt": f"Q{i // 2}", "response": f"{text} {i}", "reward": i, "user": user, "x": i})
    return write_rows(folder / "log.jsonl", rows)


def test_drop_and_redact(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    how = ("--drop", "meta.user", "--drop", "meta.y", "--redact", "--redact-pattern", "fin.")
    result = done("import", log(tmp_path), "--store", store, *how)
    for line in (
        "dropped meta.user: in 4 records",
        "dropped meta.y: in 0 records",
        "redacted e-mail address: 2 times",
        "redacted key: 2 times",
        "redacted pattern fin.: 2 times",
    ):
        assert line in result.stdout
    with Store.open(store) as opened:
        samples = list(opened.samples())
    assert [s.response for s in samples[:2]] == ["[redacted] 0", "mail [e-mail address], [key] 1"]
    assert [s.meta for s in samples] == [{"x": i} for i in range(4)]
    for text in (b"alice", b"a@b.org", b"AKIA", b"fine"):
        assert not any(text in p.read_bytes() for p in tmp_path.glob("s.db*"))
    assert "--redact was set, is not set now" in refused("import", log(tmp_path), "--store", store)


def test_a_preview_is_redacted_too(tmp_path: Path) -> None:
    result = done("import", log(tmp_path), "--preview", "--redact", "--drop", "user")
    assert "[key]" in result.stdout
    assert not any(text in result.stdout for text in ("AKIA", "alice"))


def test_a_file_controls_no_terminal(tmp_path: Path) -> None:
    """Names of columns set a title and cleared the screen; a preview had C1 and U+202E as they were."""
    record = {"a\u202eb": "1+1?", "c\x1b]0;x\x07": "2", "d\x1b[2J": 1.0}
    file = write_rows(tmp_path / "log.jsonl", [record, record | {"d\x1b[2J": 0.0}])
    shown = {"prompt": "1\x9b2J", "response": "2\u202e3", "reward": 1.0}
    known = write_rows(tmp_path / "known.jsonl", [shown])
    outputs = [agro("import", file, "--guess"), agro("import", file, "--preview"), agro("check", file)]
    preview = agro("import", known, "--preview")
    for result in [*outputs, preview]:
        assert not set(result.output) & set("\x1b\x07\x9b\u202e"), result.output
    for result in outputs:
        assert "a\\u202eb" in result.output
    assert json.loads(preview.stdout)["response"] == "2\u202e3"


def test_strict_and_replace(tmp_path: Path) -> None:
    path, store = log(tmp_path), tmp_path / "s.db"
    path.write_text(path.read_text() + '{"prompt": "Q", "response": null}\n')
    assert "log.jsonl:5: response" in refused("import", path, "--store", store, "--strict")
    assert not store.exists()
    done("import", path, "--store", store)
    again = ("import", path, "--store", store, "--map", "response=user")
    assert "--map was not set, is response=user now" in refused(*again)
    report = report_of(*again, "--replace")
    assert [report[name] for name in ("samples", "replaced", "duplicates")] == [5 - 1, 4, 0]
    with Store.open(store) as opened:
        assert [s.response for s in opened.samples()] == ["bob", "alice", "bob", "alice"]


def test_forget(tmp_path: Path) -> None:
    path, store = log(tmp_path), tmp_path / "s.db"
    done("import", path, "--store", store)
    with Store.open(store) as opened:
        opened.draws.record("first", 3, [2])
    asked = ("forget", store, "--meta", "user=alice")
    message = refused(*asked)
    assert "2 samples would be deleted for good" in message
    assert "--yes" in message
    assert "first (1 samples, step 3)" in message
    report = report_of(*asked, "--yes")
    assert report == {"samples": 2, "runs": [{"run": "first", "samples": 1, "first": 3, "last": 3}]}
    assert not any(b"alice" in p.read_bytes() for p in tmp_path.glob("s.db*"))
    assert "no sample has --meta user=alice" in refused(*asked, "--yes")
    result = done("forget", store, "--source", "file:log.jsonl", "--yes")
    assert "deleted: 2 samples" in result.stdout
    assert "no run trained on them" in result.stdout


def test_what_forget_needs(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    done("import", log(tmp_path), "--store", store)
    assert "got none" in refused("forget", store, "--yes")
    assert "got --source and --prompt-id" in refused("forget", store, "--source", "a", "--prompt-id", "b")
    assert "KEY=VALUE" in refused("forget", store, "--meta", "user")
    assert "no such store" in refused("forget", tmp_path / "no.db", "--source", "a")


def test_rewards_that_are_words(tmp_path: Path) -> None:
    store, words = tmp_path / "s.db", ("up", "down", None, "sideways")
    rows = ({"prompt": "Q", "response": str(i), "thumbs": word} for i, word in enumerate(words))
    path = write_rows(tmp_path / "log.jsonl", rows)
    how = ("import", path, "--map", "reward=thumbs", "--reward-map", "up=1,down=-1")
    result = done(*how, "--store", store)
    assert "taken: 3 samples (2 with a reward)" in result.stdout
    assert "log.jsonl:4: reward: expected a finite number, or one of the words up, down, got" in result.stdout
    with Store.open(store) as opened:
        assert [s.reward for s in opened.samples()] == [1, -1, None]
    assert "'up': expected WORD=NUMBER" in refused(*how[:-1], "up", "--store", store)


def test_several_processes_do_what_one_does(tmp_path: Path) -> None:
    """Import and score; their reports but for the store's name, and the rewards."""
    path = log(tmp_path)
    reward = tmp_path / "reward.py"
    reward.write_text("def length(prompts, completions):\n    return [len(text) for text in completions]\n")
    reports, rewards = [], []
    for workers in (1, 2):
        store, how = tmp_path / f"{workers}.db", ("--workers", workers, "--json")
        imported = done("import", path, "--store", store, *how).stdout
        scored = done("score", store, "--reward", f"{reward}:length", *how).stdout
        reports.append([json.loads(text) for text in (imported, scored)])
        with Store.open(store) as opened:
            rewards.append([sample.reward for sample in opened.samples()])
    assert reports[0] == reports[1]
    assert rewards == [[6, 36, 6, 36]] * 2  # characters of "fine 0" and of "mail a@b.org, …"
