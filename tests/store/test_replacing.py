"""Importing a file again: with other options, in place of what is stored, strictly, and what files repeat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from making import sample, texts
from making import write_lines as write

from agro.errors import Refused
from agro.logs import format_table
from agro.logs.importing import import_files
from agro.store import Pair, Store

# Three records, each with two columns of responses and of rewards.
ROWS = [{"q": f"Q{i}", "a": f"a{i}", "b": f"b{i}", "x": i, "y": -i} for i in range(3)]
A = {"prompt": "q", "response": "a", "reward": "x"}
B = {"prompt": "q", "response": "b", "reward": "y"}


def test_another_map_is_refused_by_name(into: Store, load: Any) -> None:
    load(*ROWS, mapping=A)
    with pytest.raises(Refused, match=r"--map was .*response=a.*, is .*response=b.*--replace"):
        load(*ROWS, mapping=B)
    assert texts(into.samples()) == ["a0", "a1", "a2"]
    assert load(*ROWS, mapping=A).duplicates == 3


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"format": "interchange"}, "--format was not set, is interchange now"),
        ({"rewards": {"x": 2.0}}, "--reward was not set, is x=2.0 now"),
        ({"choose": {"filter": "strict"}}, "--choose was not set, is filter=strict now"),
        ({"drop": ["meta.x"]}, "--drop was not set, is meta.x now"),
        ({"redact": True}, "--redact was not set, is set now"),
    ],
)
def test_each_option_of_reading_is_compared(load: Any, option: dict[str, Any], said: str) -> None:
    row = {"prompt": "Q", "response": "A", "x": 1}
    load(row)
    with pytest.raises(Refused) as refusal:
        load(row, **option)
    assert said in str(refusal.value)


def test_replace_takes_the_records_anew(into: Store, load: Any) -> None:
    load(*ROWS, mapping=A)
    load({"prompt": "Q0", "response": "kept", "reward": 5}, name="other.jsonl")
    ids = [s.id for s in into.samples()]
    into.add_pairs([Pair(ids[1], ids[0]), Pair(ids[3], ids[0])])
    report = load(*ROWS, mapping=B, replace=True)
    assert (report.samples, report.scored, report.replaced, report.duplicates) == (3, 3, 3, 0)
    assert "replaced: 3 samples" in str(report)
    rewards = {s.response: s.reward for s in into.samples()}
    assert rewards == {"kept": 5, "b0": 0, "b1": -1, "b2": -2}
    assert min(s.id for s in into.samples() if s.response != "kept") > max(ids)  # no id is given twice
    assert (into.counts().samples, list(into.pairs())) == (4, [])
    assert texts(into.samples(redone=True)) == ["kept", "b0", "b1", "b2"]
    assert not into.tables.damage()
    assert load(*ROWS, mapping=B).duplicates == 3
    with pytest.raises(Refused, match=r"response=b.* is .*response=a"):
        load(*ROWS, mapping=A)


def test_what_is_not_replaced_stays(into: Store, load: Any) -> None:
    """Where all that would replace it is refused, and where runs drew from it."""
    load(*ROWS, mapping=A)
    with pytest.raises(Refused, match="all records are refused"):
        load(*ROWS, mapping={**A, "response": "x"}, replace=True)
    assert load(*ROWS, mapping=A).duplicates == 3
    into.draws.record("first", 4, [1, 2])
    into.draws.record("first", 6, [1])
    into.draws.record("second", 1, [3])
    with pytest.raises(Refused, match=r"first \(2 samples, steps 4 to 6\); second \(1 samples, step 1\)"):
        load(*ROWS, mapping=B, replace=True)
    assert texts(into.samples()) == ["a0", "a1", "a2"]


def test_strict_stores_nothing_where_a_record_is_refused(into: Store, load: Any) -> None:
    good = [{"prompt": "Q", "response": str(i)} for i in range(700)]  # more than one transaction takes
    bad = {"prompt": "Q", "response": None}
    with pytest.raises(Refused, match=r"--strict: .* got 1 refused[^$]*log\.jsonl:701: response"):
        load(*good, bad, strict=True)
    assert (into.counts().samples, into.imports.provenance()) == (0, [])
    assert load(*good, bad).samples == 700
    assert load(*good, name="fine.jsonl", strict=True).samples == 700


def completion(step: int, text: str) -> dict[str, Any]:
    return {"step": step, "prompt": "Q", "completion": text, "reward": 1.0, "advantage": 0.0}


def test_files_of_a_queue_repeat_its_rows(into: Store, tmp_path: Path) -> None:
    """TRL writes its queue, whose last rows are in the next file again; two responses may be equal."""
    first = write(tmp_path / "1.jsonl", *(completion(1, text) for text in ("a", "b", "b")))
    second = write(tmp_path / "2.jsonl", *(completion(2, text) for text in ("b", "b", "b", "c")))
    report = import_files(into, [first, second])
    assert (report.samples, report.repeated) == (5, {"TRL's queue": 2})
    assert "repeats of TRL's queue: 2 not taken again" in str(report)
    assert texts(into.samples()) == ["a", "b", "b", "b", "c"]
    again = import_files(into, [second])
    assert (again.samples, again.duplicates, again.repeated) == (0, 2, {"TRL's queue": 2})


def test_a_format_whose_identities_are_unique(into: Store, load: Any, monkeypatch: Any) -> None:
    once = replace(format_table.get("trl-completions"), once=True)
    monkeypatch.setitem(format_table.FORMATS, "trl-completions", once)
    assert load(*(completion(1, text) for text in ("a", "b", "b"))).repeated == {"TRL's queue": 1}
    assert texts(into.samples()) == ["a", "b"]


def test_a_replaced_file_gives_its_identities_back(load: Any) -> None:
    load(completion(1, "a"))
    report = load(completion(1, "a"), replace=True)
    assert (report.samples, report.replaced, report.repeated) == (1, 1, {})
    assert load(completion(2, "a"), name="2.jsonl").repeated == {"TRL's queue": 1}


def test_license_and_provenance_of_sources(into: Store, tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", {"prompt": "Q", "response": "1", "source": "alice"})
    two = write(tmp_path / "two.jsonl", *({"prompt": "Q", "response": r, "source": "bob"} for r in "23"))
    import_files(into, [one], license="CC-BY-4.0")
    import_files(into, [two])
    into.append([sample("Q2", source="policy")])
    found = [(p.source, p.samples, p.file, p.license) for p in into.imports.provenance()]
    assert found == [("alice", 1, "one.jsonl", "CC-BY-4.0"), ("bob", 2, "two.jsonl", None)]
    assert import_files(into, [two], license="MIT").duplicates == 2  # a later import may say it
    import_files(into, [two])
    assert [p.license for p in into.imports.provenance()] == ["CC-BY-4.0", "MIT"]
    into.draws.record("run", 1, [2])
    assert [(p.source, p.samples) for p in into.imports.provenance("run")] == [("bob", 1)]
