"""What examples of evaluations' logs can't say: other files of a run, and damaged ones."""

from __future__ import annotations

import json
import math
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
from example import examples_of, parts_of
from writers import INSPECT, inspect_members, inspect_zstd, zstd_archive

from agro.errors import Refused
from agro.logs.importing import import_files
from agro.store import Store
from agro_formats.inspect_ai import read_member

SAMPLE = parts_of("inspect")["sample"]  # right by the scorer `match`


def test_a_run_of_helm_by_its_file(store: Store, tmp_path: Path) -> None:
    path = examples_of("helm")[0].make(tmp_path / "log") / "scenario_state.json"
    assert import_files(store, [path]).scored == 2


def test_results_of_evalplus_without_a_hash(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a_eval_results.json"
    task = examples_of("evalplus-results")[0].rows[0]
    path.write_text(json.dumps({"date": "2026-08-01", "eval": {"HumanEval/0": [task]}}))
    with pytest.raises(Refused, match="the prompts are in the file of problems; name it with --join FILE"):
        import_files(store, [path])
    path.write_text(json.dumps({"hash": "h", "eval": "none"}))
    with pytest.raises(Refused, match=r"a_eval_results\.json:1: eval: expected an object, got 'none'"):
        import_files(store, [path])
    path.write_text(json.dumps({"hash": "h", "eval": {}}))
    with pytest.raises(Refused, match=r"json:1: eval: expected solutions by the task's name, got {}"):
        import_files(store, [path])


def test_all_ways_to_pack_a_log_give_the_same(tmp_path: Path) -> None:
    path = examples_of("inspect")[0].make(tmp_path)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("header.json").compress_type == 93
        assert read_member(archive, path, "_journal/start.json").startswith(b'{"version": 2')


def checksum(value: object) -> bytes:
    return struct.pack("<L", zlib.crc32(json.dumps(value).encode()))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda data: data[:-30], "expected a zip file"),
        (lambda data: data.replace(b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfe"), "can't be unpacked"),
        (
            lambda data: data.replace(b"header.json", b"header.jso_").replace(b"start.json", b"start.jso_"),
            "header",
        ),
        (lambda data: data.replace(checksum(INSPECT), b"1234"), "header.json: damaged: the checksum"),
    ],
)
def test_damaged_logs(break_it: object, message: str, store: Store, tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    inspect_zstd(path, [SAMPLE])
    path.write_bytes(break_it(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(Refused, match=message):
        import_files(store, [path])


def test_infinities_and_damaged_parts_of_a_log(store: Store, tmp_path: Path) -> None:
    """NaN means an unknown score to Inspect; infinities mean nothing."""
    folder = "samples/1_epoch_1"
    members = inspect_members([]) | {f"{folder}/sample.json": SAMPLE}
    for part, message in (
        ([math.inf], r"expected a list of objects, got \[inf\]"),
        ({}, r"0\.json: expected a list, got \{\}"),
    ):
        zstd_archive(tmp_path / "log.eval", members | {f"{folder}/messages/0.json": part})
        with pytest.raises(Refused, match=message):
            import_files(store, [tmp_path / "log.eval"])


def test_a_missing_part_of_a_log(store: Store, tmp_path: Path) -> None:
    members = inspect_members([]) | {"samples/1_epoch_1/sample.json": SAMPLE}
    zstd_archive(tmp_path / "log.eval", members | {"samples/1_epoch_1/messages/2.json": []})
    with pytest.raises(Refused, match="expected item 0 first: a part is missing"):
        import_files(store, [tmp_path / "log.eval"])
