"""Columns of Parquet that JSON has no type for: what becomes of their values."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from pyarrow import parquet

from agro.errors import Refused
from agro.io.record_files import _values, read_records
from agro.logs.importing import import_files
from agro.store import Store

UTC, DAY = dt.UTC, dt.date(2026, 1, 2)
NS = 1767323045678000123  # 2026-01-02 03:04:05.678000123, more digits than datetime has
LONG = "12345678901234567890.123456789"  # more digits than a float has
COLUMNS = {  # the type, a value, and what is read
    "moment": (pa.timestamp("us"), dt.datetime(2026, 1, 2, 3, 4, 5, 678000), "2026-01-02 03:04:05.678000"),
    "zone": (pa.timestamp("ms", "UTC"), dt.datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02 00:00:00.000Z"),
    "nanoseconds": (pa.timestamp("ns"), NS, "2026-01-02 03:04:05.678000123"),
    "date": (pa.date32(), dt.date(2026, 1, 2), "2026-01-02"),
    "late date": (pa.date32(), 10_000_000, "29349-01-26"),  # later than Python's dates
    "time": (pa.time64("us"), dt.time(3, 4, 5, 6), "03:04:05.000006"),
    "duration": (pa.duration("ms"), dt.timedelta(seconds=1.5), 1500),
    "decimal": (pa.decimal128(10, 2), Decimal("0.50"), 0.5),
    "integer": (pa.decimal128(38, 0), Decimal(10**20), 10**20),
    "long decimal": (pa.decimal128(38, 9), Decimal(LONG), LONG),
    "object": (
        pa.struct([("at", pa.date32()), ("n", pa.int64())]),
        {"at": dt.date(2026, 1, 2), "n": 1},
        {"at": "2026-01-02", "n": 1},
    ),
    "list": (pa.list_(pa.date32()), [dt.date(2026, 1, 2), None], ["2026-01-02", None]),
    "pair": (pa.list_(pa.date32(), 1), [dt.date(2026, 1, 2)], ["2026-01-02"]),
    "map": (pa.map_(pa.string(), pa.decimal128(3, 1)), [("k", Decimal("1.5"))], {"k": 1.5}),
    "map by number": (pa.map_(pa.int64(), pa.string()), [(1, "x")], {"1": "x"}),
    "map by object": (
        pa.map_(pa.struct([("at", pa.date32())]), pa.int64()),
        [({"at": DAY}, 1)],
        [[{"at": "2026-01-02"}, 1]],
    ),
    "map by list": (pa.map_(pa.list_(pa.int64()), pa.string()), [([1], "x")], [[[1], "x"]]),
    "view": (pa.list_view(pa.date32()), [DAY, None], ["2026-01-02", None]),
    "large view": (pa.large_list_view(pa.decimal128(3, 1)), [Decimal("1.5")], [1.5]),
    "object of views": (pa.struct([("x", pa.list_view(pa.date32()))]), {"x": [DAY]}, {"x": ["2026-01-02"]}),
    "category": (pa.dictionary(pa.int8(), pa.string()), "x", "x"),
    "bytes": (pa.binary(), b"x", b"x"),
}
EXPECTED = {name: value for name, (_, _, value) in COLUMNS.items()}


def written(path, **columns):
    parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("name", COLUMNS)
def test_a_value_of_each_type(name, tmp_path):
    """In the first and the last row, so that rows before it, and one that is unknown, don't move it."""
    kind, value, _ = COLUMNS[name]
    array = pa.array([value, None, value], kind)
    lines = list(read_records(written(tmp_path / "log.parquet", x=array)))
    assert [line.error for line in lines] == [None] * 3
    assert [line.value["x"] for line in lines] == [EXPECTED[name], None, EXPECTED[name]]


def test_a_row_whose_map_has_a_key_twice_is_refused(tmp_path):
    maps = pa.array([[("k", 1)], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64()))
    first, second = read_records(written(tmp_path / "log.parquet", x=maps))
    assert (first.value["x"], first.error) == ({"k": 1}, None)
    assert "can't be read" in second.error


@pytest.fixture
def table(tmp_path):
    columns = {name: pa.array([value], kind) for name, (kind, value, _) in COLUMNS.items()}
    image = pa.array([{"bytes": b"x", "path": "x.png"}])
    reward = pa.array([Decimal("0.25")], pa.decimal128(3, 2))
    return written(
        tmp_path / "log.parquet", prompt=["q"], response=["a"], reward=reward, image=image, **columns
    )


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "s.db") as store:
        yield store


def test_rows_with_such_columns_are_taken(table, store):
    report = import_files(store, [table])
    (sample,) = store.samples()
    assert (report.samples, report.refused) == (1, [])
    assert report.dropped == {"image.bytes (bytes)": 1, "bytes (bytes)": 1}
    assert "dropped image.bytes (bytes): in 1 records" in str(report)
    assert sample.reward == 0.25
    expected = {name: value for name, value in EXPECTED.items() if name != "bytes"}
    assert sample.meta == expected | {"image": {"path": "x.png"}}


@pytest.mark.parametrize(
    ("mapping", "refused"),
    [
        ({"response": "bytes"}, "response: expected text, got 1 bytes"),
        ({"answer": "bytes"}, "answer: expected any value, got 1 bytes"),
        ({"meta.image": "image"}, "image.bytes: expected a value of JSON, got bytes; leave it out of --map"),
    ],
)
def test_bytes_that_are_asked_for_are_refused_by_name(mapping, refused, table, store):
    with pytest.raises(Refused, match=refused):
        import_files(store, [table], mapping={"prompt": "prompt", "response": "response", **mapping})


def test_bytes_in_meta_under_the_name_of_a_field_are_dropped(tmp_path, store):
    meta = [{"source": b"x", "answer": b"y", "at": 1}]
    path = written(tmp_path / "log.parquet", prompt=["q"], response=["a"], reward=[1.0], meta=meta)
    report = import_files(store, [path])
    (sample,) = store.samples()
    assert report.dropped == {"source (bytes)": 1, "answer (bytes)": 1}
    assert sample.meta == {"at": 1}


def test_a_category_of_objects_is_read():
    """As Arrow files have it."""
    array = pa.DictionaryArray.from_arrays(pa.array([0, None]), pa.array([{"at": DAY}]))
    assert _values(array) == [{"at": "2026-01-02"}, None]
    assert _values(pa.StructArray.from_arrays([array], ["x"])) == [{"x": {"at": "2026-01-02"}}, {"x": None}]
