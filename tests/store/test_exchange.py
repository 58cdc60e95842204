"""Export and import give back the same samples, bit by bit; what can't be given back is refused."""

from __future__ import annotations

import datetime
import gzip
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import LONE, WORDS, random_samples, sample
from writing import read_samples

from agro.errors import AgroWarning, Refused
from agro.io.record_files import fingerprint
from agro.logs.importing import import_files
from agro.logs.interchange import from_record
from agro.store import Pair, Store, write_samples
from agro.store.copying import to_record
from agro.types import Sample
from agro.types.conversation import with_tools

ENDINGS = pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])


def bits(s: Sample) -> dict[str, Any]:
    """A sample's fields but its id, in a form whose equality is that of bits (all NaN alike)."""
    return {name: _bits(value) for name, value in vars(s).items() if name != "id"}


def _bits(value: Any) -> Any:
    if isinstance(value, float):
        return struct.pack("<d", value)
    if not isinstance(value, np.ndarray):
        return json.dumps(value, sort_keys=True)
    if value.dtype == np.float32:
        value = np.where(np.isnan(value), np.float32("nan"), value)
    return value.dtype.str, value.tobytes()


@ENDINGS
@pytest.mark.parametrize("words", [WORDS, WORDS + LONE], ids=["plain", "surrogates"])
def test_an_export_gives_back_the_same_samples(tmp_path: Path, ending: str, words: list[str]) -> None:
    samples = random_samples(1, 400, words)
    path = tmp_path / f"export{ending}"
    with Store.open(tmp_path / "a.db") as store, Store.open(tmp_path / "b.db") as other:
        store.append(samples)
        assert store.export(path) == 400
        kept = list(store.samples())
        report = import_files(other, [path])
        assert (report.samples, report.refused) == (400, [])
        back = list(other.samples())
    assert list(map(bits, kept)) == list(map(bits, samples))
    assert list(map(bits, back)) == list(map(bits, samples))
    assert back == kept == samples == list(read_samples(path))


def test_random_samples_use_every_field() -> None:
    samples = random_samples(1, 400, WORDS + LONE)
    names = ("reward", "learn", "episode", "tokenizer", "sampling", "context_tokens", "token_reward", "kept")
    for name in names:
        assert {getattr(s, name) is None for s in samples} == {True, False}, name
    assert any(isinstance(s.version, np.ndarray) for s in samples)
    assert any(isinstance(s.prompt, list) for s in samples)
    assert any(s.behavior_logp is not None and np.isnan(s.behavior_logp).any() for s in samples)
    assert any(s.response == "" for s in samples)
    assert any(s.reward == 0 and math.copysign(1, s.reward) < 0 for s in samples)
    assert any("\ud800" in s.response for s in samples)


@ENDINGS
@pytest.mark.parametrize("n", [0, 2500])
def test_rows_keep_their_order(tmp_path: Path, ending: str, n: int) -> None:
    path = tmp_path / f"x{ending}"
    assert write_samples(path, [sample(response=str(i)) for i in range(n)]) == n
    assert [s.response for s in read_samples(path)] == [str(i) for i in range(n)]


def test_the_record_is_the_contract_s() -> None:
    meta = {"answer": "18", "finish": "stop"}
    fields = {"version": 3, "role": "policy", "source": "m", "prompt_id": "p", "meta": meta}
    tokens = {"tokens": [1, 2, 3], "action": [False, True, True], "behavior_logp": [math.nan, -0.5, -1.0]}
    assert to_record(sample("Q", "A", 0.5, **fields, **tokens)) == {
        "prompt": "Q",
        "response": "A",
        "reward": 0.5,
        "prompt_id": "p",
        "role": "policy",
        "source": "m",
        "answer": "18",
        "tokens": [1, 2, 3],
        "mask": [False, True, True],
        "behavior_logp": [None, -0.5, -1.0],
        "version": 3,
        "meta": {"finish": "stop"},
    }


def test_mask_is_what_to_learn_from_and_action_what_was_chosen() -> None:
    s = sample(tokens=[1, 2, 3], action=[False, True, True], learn=[False, False, True])
    record = to_record(s)
    assert record["mask"] == [False, False, True]
    assert record["action"] == [False, True, True]
    read = from_record({"prompt": "", "response": "", "tokens": [1, 2], "mask": [0, 1]})
    assert read.action.tolist() == [False, True]


def test_what_is_not_a_field_is_kept_in_meta() -> None:
    """And `model` is the source where there is no other."""
    record = {"prompt": "", "response": "a", "model": "m"}
    s = from_record(record | {"level": 3, "answer": "1", "meta": {"x": 1}})
    assert (s.source, s.meta) == ("m", {"x": 1, "level": 3, "answer": "1"})
    both = from_record(record | {"source": "s"})
    assert (both.source, both.meta) == ("s", {"model": "m"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": "0.5"}, "reward: expected a finite number"),
        ({"reward": 10**400}, "reward: expected a finite number"),
        ({"response": None}, "response: expected text, got null"),
        ({"prompt": {"a": 1}}, "prompt: expected text, or a list of messages"),
        ({"tokens": [1, 2]}, "tokens: without a mask"),
        ({"tokens": [1.0, 2.0], "mask": [0, 1]}, "tokens: expected a list of token ids"),
        ({"tokens": [[1]], "mask": [1]}, "tokens: expected a list of token ids"),
        ({"tokens": [2**31], "mask": [1]}, "tokens: expected a list of token ids"),
        ({"tokens": [2**80], "mask": [1]}, "tokens: expected a list of token ids"),
        (
            {"tokens": [1], "mask": [2]},
            "mask: expected a list of true and false, or of 1 and 0, got 2 at index 0",
        ),
        ({"tokens": [1], "mask": "1"}, "mask: expected a list of true and false"),
        ({"tokens": [1], "mask": [1], "behavior_logp": ["-1"]}, "behavior_logp: expected a list of numbers"),
        ({"tokens": [1], "mask": [1], "behavior_logp": [0.5]}, "behavior_logp: expected log-probs"),
        ({"version": True}, "version: expected an integer"),
        ({"role": "teacher"}, "role: expected one of policy, log, expert"),
        ({"source": 3}, "source: expected text"),
        ({"meta": []}, "meta: expected an object"),
        ({"tokens": [1, True], "mask": [0, 1]}, "tokens: expected a list of token ids.*got True at index 1"),
        ({"tokens": [1], "mask": [1], "behavior_logp": [False]}, "behavior_logp: .*got False at index 0"),
        ({"tokens": [1], "mask": [1], "token_reward": [True]}, "token_reward: .*got True at index 0"),
        ({"tokens": [1], "mask": [1], "version": [True]}, "version: .*got True at index 0"),
        ({"version": []}, "version given without tokens"),
        ({"tokens": [1], "mask": [1], "version": []}, "version: expected one value for each"),
        ({"reward": datetime.date(2026, 1, 1)}, "reward: expected a finite number"),
        ({"model": {"name": "m"}}, "model: expected text"),
        ({"answer": 1, "meta": {"answer": 2}}, "answer: the record has 1, and its meta 2"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        from_record({"prompt": "Q", "response": "A"} | fields)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"x": math.nan}, "expected a value that JSON has, got .*: Out of range float values"),
        ({"x": math.inf}, "expected a value that JSON has, got .*: Out of range float values"),
        ({"x": (1, 2)}, "JSON can't reproduce this value exactly: .*no tuples"),
        ({1: "x"}, "JSON can't reproduce this value exactly: .*text as keys"),
        (
            {"x": {1, 2}},
            "expected a value that JSON has, got .*: Object of type set is not JSON serializable",
        ),
        ({"x": b""}, "expected a value that JSON has, got .*: Object of type bytes is not JSON serializable"),
    ],
)
def test_what_json_does_not_give_back_is_refused(
    into: Store, tmp_path: Path, meta: dict[Any, Any], message: str
) -> None:
    with pytest.raises(Refused, match="meta"):
        into.append([sample(), sample(meta=meta)])
    assert into.counts().samples == 0
    prefix = rf"^sample 1 of the export \(prompt {sample().prompt_id}\): "
    with pytest.raises(Refused, match=prefix + message):
        write_samples(tmp_path / "x.jsonl", [sample(meta=meta)])


@ENDINGS
def test_a_pair_of_surrogates_that_a_file_would_join_is_refused(
    into: Store, tmp_path: Path, ending: str
) -> None:
    torn = sample(response="\ud83d\ude00")
    into.append([torn])
    assert next(into.samples()).response == "\ud83d\ude00"
    with pytest.raises(Refused, match=r"sample 1101 of the export .*surrogates"):
        write_samples(tmp_path / f"x{ending}", [sample()] * 1100 + [torn])


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_samples(path, [sample()])
    before = path.read_bytes()
    with pytest.raises(Refused, match=r"^sample 2 of the export .*: Out of range float values"):
        write_samples(path, [sample(), sample(meta={"x": math.nan})])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


def test_the_same_samples_make_the_same_file(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_samples(tmp_path / name, random_samples(2, 5))
    raw = (tmp_path / "a.jsonl.gz").read_bytes()
    assert raw == (tmp_path / "b.jsonl.gz").read_bytes()
    assert raw[3:8] == bytes(5)  # gzip's flags (no name) and time of writing


def test_content_is_known_by_its_bytes_and_not_by_its_name(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.jsonl", [sample()])
    raw = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "packed").write_bytes(gzip.compress(raw))
    (tmp_path / "plain.gz").write_bytes(raw)
    write_samples(tmp_path / "a.parquet", [sample()])
    (tmp_path / "table").write_bytes((tmp_path / "a.parquet").read_bytes())
    for name in ("packed", "plain.gz", "table"):
        assert list(read_samples(tmp_path / name)) == [sample()]
    packed, plain, table = (fingerprint(tmp_path / name) for name in ("packed", "a.jsonl", "table"))
    assert packed == plain != table


def test_places_that_can_not_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"expected a name that ends with \.jsonl"):
        write_samples(tmp_path / "x.csv", [])
    with pytest.raises(Refused, match="can't be written: No such file"):
        write_samples(tmp_path / "no" / "x.jsonl", [])
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(Refused, match="can't be read as Parquet"):
        list(read_samples(tmp_path / "cut.parquet"))
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "", "response": ""}\n\n{"prompt": "", "response": "", "reward": NaN}\n')
    with pytest.raises(Refused, match=r"x\.jsonl:3: .*NaN isn't JSON"):
        list(read_samples(path))


def test_an_export_says_that_judgments_stay_behind(into: Store, tmp_path: Path) -> None:
    a, b = into.append([sample(response="a"), sample(response="b")])
    into.add_pairs([Pair(a, b)])
    with pytest.warns(AgroWarning, match="1 pairs"):
        into.export(tmp_path / "x.jsonl")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_declarations_of_tools_stand_beside_the_messages(tmp_path: Path, ending: str) -> None:
    """As other programs read them; read again, they are part of the prompt."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    samples = [
        Sample(with_tools([{"role": "user", "content": "q"}], [tool]), "a", 1.0),
        Sample([{"role": "user", "content": "q"}], "b", 0.0),
        Sample("text", "c", 0.5, meta={"tools": ["names", "alone"]}),
    ]
    assert to_record(samples[0])["prompt"] == [{"role": "user", "content": "q"}]
    assert to_record(samples[0])["tools"] == [tool]
    write_samples(tmp_path / f"x{ending}", samples)
    assert list(read_samples(tmp_path / f"x{ending}")) == samples
    assert len({sample.prompt_id for sample in samples}) == 3
