"""Files of records, whatever holds them: the same records come out of each."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pyarrow as pa
import pytest
import zstandard

from agro.errors import Refused
from agro.io import record_files
from agro.io.record_files import fingerprint, read_records
from agro.logs.importing import import_files
from agro.store import Store

ROWS = [{"prompt": "2+2=", "response": f"é{i}", "reward": i / 2} for i in range(3)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl", "\ufeff" + LINES),
        ("a.jsonl.gz", gzip.compress(LINES.encode())),
        ("padded.jsonl.gz", gzip.compress(LINES.encode()) + b"\0" * 512),  # as tapes and block devices do
        ("a.jsonl.zst", zstandard.compress(LINES.encode())),
        ("a.jsonl.zst", zstandard.compress(LINES[:9].encode()) + zstandard.compress(LINES[9:].encode())),
        ("a.json", json.dumps(ROWS)),
        ("a.json", "\ufeff" + json.dumps(ROWS)),
        ("a.json", "\n\n" + json.dumps(ROWS, indent=2)),
        ("a.json.gz", gzip.compress(json.dumps(ROWS, indent=1).encode())),
    ],
    ids=[
        "lines",
        "mark",
        "gzip",
        "gzip with padding",
        "zstd",
        "two zstd frames",
        "list",
        "list with mark",
        "indented",
        "list in gzip",
    ],
)
def test_the_same_records(name: str, content: str | bytes, tmp_path: Path) -> None:
    lines = list(read_records(write(tmp_path / name, content)))
    assert [line.value for line in lines] == ROWS
    assert [line.error for line in lines] == [None] * 3


def test_one_object_over_several_lines(tmp_path: Path) -> None:
    for content in (json.dumps(ROWS[0], indent=2), json.dumps(ROWS[0], indent=2).replace("{\n", "{", 1)):
        [line] = read_records(write(tmp_path / "a.json", content))
        assert line.value == ROWS[0]


def test_a_table_of_text_gives_numbers_and_lists_to_the_fields_that_have_them(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "log.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["prompt", "response", "reward", "prompt_id", "meta"])
        out.writerow(["2+2=", "4", "1", "007", '{"n": 1}'])
        out.writerow(["2+2=", "a,\nb", "", "007", ""])
    assert import_files(store, [path]).samples == 2
    first, second = store.samples()
    assert (first.response, first.reward, first.prompt_id, first.meta) == ("4", 1.0, "007", {"n": 1})
    assert (second.response, second.reward, second.meta) == ("a,\nb", None, {})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "prompt,response,reward\nQ,a,high\n",
            "reward: expected a finite number, or one of the words up, .* got .high.",
        ),
        ("a.csv", "prompt,response\nQ,a,b\n", r"a.csv:2: expected 2 cells, got 3"),
        ("a.csv", "prompt,prompt\nQ,a\n", "expected unique column names, got prompt, prompt"),
        ("a.csv", b"prompt,response\nQ\xc3\xa4,\xff\n", "can't be read as CSV"),
        (
            "a.json",
            '[{"prompt": "Q", "response": "a"}, {"prompt"',
            "after 1 records: expected a list of JSON",
        ),
        ("a.json", '[["a"]]', "expected a list of objects, got"),
        ("a.json", '[{"prompt": "Q", "response": "a", "reward": NaN}]', "expected a list of JSON objects"),
        ("a.jsonl.zst", zstandard.compress(LINES.encode())[:-5], "cut off or damaged"),
    ],
)
def test_what_is_refused(name: str, content: Any, message: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=message):
        import_files(store, [write(tmp_path / name, content)])


def test_a_long_list_is_read_as_it_goes(tmp_path: Path) -> None:
    """The first record is there before the file is read to its end, which is damaged."""
    path = write(tmp_path / "a.json", "[" + ",\n".join([json.dumps(ROWS[0])] * 50_000))
    records = read_records(path)
    assert next(records).value == ROWS[0]
    with pytest.raises(Refused, match="after 50000 records"):
        list(records)


def saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """As `save_to_disk` of the package datasets writes it: two files of Arrow streams, and what they are."""
    folder.mkdir(parents=True)
    schema = pa.Table.from_pylist(rows).schema
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (rows[:2], rows[2:])):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, schema) as out:
            out.write_table(pa.Table.from_pylist(part, schema))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": "train"}
    write(folder / "state.json", json.dumps(state))
    write(folder / "dataset_info.json", "{}")
    return folder


def test_a_folder_of_datasets(store: Store, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "2+2="}]
    rows: list[dict[str, Any]] = [{"prompt": messages, "response": f"{i}", "reward": i / 2} for i in range(3)]
    folder = saved(tmp_path / "data" / "train", [*rows, {"prompt": None, "response": "x", "reward": None}])
    lines = list(read_records(folder))
    assert [line.value for line in lines] == [*rows, {"response": "x"}]
    report = import_files(store, [folder])
    assert (report.samples, len(report.refused)) == (3, 1)
    assert [(s.prompt, s.reward, s.source) for s in store.samples()][1] == (messages, 0.5, "file:train")
    assert import_files(store, [folder]).duplicates == 3


def test_what_is_refused_of_folders(tmp_path: Path) -> None:
    folder = saved(tmp_path / "data" / "train", ROWS)
    write(tmp_path / "data" / "dataset_dict.json", '{"splits": ["train", "test"]}')
    with pytest.raises(Refused, match=r"a folder of several splits; name one: .*/data/train or .*/data/test"):
        list(read_records(tmp_path / "data"))
    with pytest.raises(Refused, match="expected a file, or a folder with state"):
        list(read_records(tmp_path))
    damaged = folder / "data-00000-of-00002.arrow"
    damaged.write_bytes(damaged.read_bytes()[:-200])
    with pytest.raises(Refused, match=r"data-00000-of-00002.arrow: can't be read"):
        list(read_records(folder))


class Hub(ModuleType):
    """The package datasets, with one data set on the hub; it isn't installed where this is tested."""

    def load_dataset(self, name: str, config: str | None, **how: Any) -> Any:
        assert how.pop("streaming")
        assert how.pop("revision") == "5ha"
        if config == "nothing":
            raise ValueError("BuilderConfig 'nothing' not found")
        splits = {"train": ROWS, "test": ROWS[:1]}
        return splits if how["split"] is None else splits[how["split"]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Hub("datasets"))
    monkeypatch.setattr(record_files, "_sha", lambda name: "5ha")


@pytest.mark.usefixtures("hub")
def test_a_data_set_on_the_hub(store: Store) -> None:
    path = Path("hub:team/logs:main:train")
    assert [line.value for line in read_records(path)] == ROWS
    assert len(list(read_records("hub:team/logs:test"))) == 1
    assert import_files(store, [path]).samples == 3
    assert {sample.source for sample in store.samples()} == {"hub:team/logs:main:train"}
    assert import_files(store, [path]).duplicates == 3


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hub:team/logs", "it has the splits train, test; name one, hub:team/logs:train"),
        ("hub:team/logs:nothing:train", "can't be read from the hub: BuilderConfig 'nothing' not found"),
        ("hub:logs", "expected hub:OWNER/NAME"),
    ],
)
def test_what_is_refused_of_the_hub(name: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        list(read_records(name))


def test_the_hub_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Refused, match=r"needs the package datasets: pip install 'datasets>=4\.0'"):
        list(read_records("hub:team/logs:train"))


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def dataset_info(self, name: str) -> Any:
            raise RuntimeError("Name or service not known")

    monkeypatch.setitem(sys.modules, "datasets", Hub("datasets"))
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(Refused, match="hub:team/logs: can't be found on the hub: Name or service not known"):
        fingerprint("hub:team/logs:train")
