"""What examples of evaluations' logs can't say: what is counted, and what is asked for."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from example import Example, evalplus, examples_of, json_lines
from examples_evaluations import HELM, helm, state, stats
from examples_inspect import EXAMPLES as INSPECT
from examples_inspect import HEADER, members, packed, sample, score, zstd

from agro.errors import Refused
from agro.logs.importing import import_files
from agro.store import Store
from agro_formats.inspect_ai import read_member

LM_EVAL = examples_of("lm-eval")


def harness(responses: list[str], exact_match: float) -> dict[str, Any]:
    """A row of lm-evaluation-harness."""
    return {**LM_EVAL[0].rows[0], "resps": [responses], "exact_match": exact_match}


@pytest.mark.parametrize(
    ("example", "rule"),
    [
        (LM_EVAL[0], "of the filter flexible-extract; taken is strict-match (--choose filter=NAME)"),
        (LM_EVAL[1], "of the filter strict-match; taken is flexible-extract (--choose filter=NAME)"),
        (HELM[0], "log-probs of given answers, no free responses"),
    ],
)
def test_what_is_left_out_by_rule_is_counted(
    example: Example, rule: str, store: Store, tmp_path: Path
) -> None:
    path = example.make(tmp_path / "log")
    options = dict(example.options)
    report = import_files(store, [path], **options)
    assert report.left_out == {rule: 1}
    assert f"left out: 1 records: {rule}" in str(report)


def test_a_filter_that_no_row_has(store: Store, tmp_path: Path) -> None:
    json_lines(tmp_path / "log.jsonl", [harness([" 4"], exact_match=1.0)])
    with pytest.raises(
        Refused, match=r"all records are left out\n.*of the filter strict-match.*taken is none"
    ):
        import_files(store, [tmp_path / "log.jsonl"], choose={"filter": "none"})


def test_several_scores_are_asked_for(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    helm(stats("id1", em=1.0, f1=0.5))(folder, [state("id1", [" 4"])])
    with pytest.raises(Refused, match=r"several columns of rewards \(em, f1\)"):
        import_files(store, [folder])
    helm(stats("id1", em=1.0))(tmp_path / "two", [state("id1", [" 4", " 5"])])
    with pytest.raises(Refused, match="--reward em: one number for 2 completions"):
        import_files(store, [tmp_path / "two"], rewards={"em": 1.0})
    log = tmp_path / "log.eval"
    zstd(log, [sample(1, "4", scores={"match": score("C"), "judge": score(0.5)})])
    with pytest.raises(Refused, match="expected --choose scorer=NAME of match, judge"):
        import_files(store, [log])
    json_lines(tmp_path / "log.jsonl", [harness([" 4", " 5"], exact_match=1.0)])
    with pytest.raises(Refused, match="--reward exact_match: one number for 2 responses"):
        import_files(store, [tmp_path / "log.jsonl"], rewards={"exact_match": 1.0})


def test_a_task_of_given_answers_says_so(store: Store, tmp_path: Path) -> None:
    requests = [["Q: 2+2?\nA:", " 4"], ["Q: 2+2?\nA:", " 5"]]
    json_lines(tmp_path / "log.jsonl", [{**harness(["x"], exact_match=1.0), "arguments": requests}])
    with pytest.raises(Refused, match="this task takes log-likelihoods of given answers"):
        import_files(store, [tmp_path / "log.jsonl"])


def test_a_run_of_helm_by_its_file(store: Store, tmp_path: Path) -> None:
    path = HELM[0].make(tmp_path / "log") / "scenario_state.json"
    assert import_files(store, [path]).scored == 2


def test_the_problems_are_asked_for(store: Store, tmp_path: Path) -> None:
    evalplus(tmp_path / "a_eval_results.json", examples_of("evalplus-results")[0].rows[:1])
    with pytest.raises(Refused, match="the prompts are in the file of problems; name it with --join FILE"):
        import_files(store, [tmp_path / "a_eval_results.json"])


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
    path = INSPECT[0].make(tmp_path)
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
        (lambda data: data.replace(checksum(HEADER), b"1234"), "header.json: damaged: the checksum"),
    ],
)
def test_damaged_logs(break_it: object, message: str, store: Store, tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    zstd(path, [sample(1, "4")])
    path.write_bytes(break_it(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(Refused, match=message):
        import_files(store, [path])


def test_a_missing_part_of_a_log(store: Store, tmp_path: Path) -> None:
    found = members([]) | {"samples/1_epoch_1/sample.json": sample(1, "4")}
    packed(tmp_path / "log.eval", found | {"samples/1_epoch_1/messages/2.json": []})
    with pytest.raises(Refused, match="expected item 0 first: a part is missing"):
        import_files(store, [tmp_path / "log.eval"])


def test_a_text_that_is_not_attached(store: Store, tmp_path: Path) -> None:
    zstd(tmp_path / "log.eval", [sample(1, "4", input="attachment://hash")])
    with pytest.raises(Refused, match="attachments: expected the text of attachment://hash, got none"):
        import_files(store, [tmp_path / "log.eval"])
