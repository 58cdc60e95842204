"""Logs of trainers: what examples can't say of their files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from example import Characters, rows_of
from writers import json_lines, tinker_capture, trinity, trinity_blob

from agro.errors import Refused
from agro.logs.format_table import get
from agro.logs.importing import import_files
from agro.rollout.prompts import load_prompts
from agro.store import Store

TRINITY = rows_of("trinity-sqlite")[0]


def test_only_swift_logs_a_line_once() -> None:
    assert get("swift-completions").once
    assert not get("trl-completions").once


class Trap:
    """What runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('ran')",)


def test_nothing_in_a_pickle_runs(tmp_path: Path) -> None:
    pickled = tmp_path / "global_step_1_training_input.pkl"
    pickled.write_bytes(pickle.dumps(Trap()))
    dump = tmp_path / "4.pt"
    torch.save({"rollout_id": 4, "samples": [{"prompt": Trap()}]}, dump)
    with Store.open(tmp_path / "store.db") as store:
        with pytest.raises(Refused, match="reading a pickle can run any program"):
            import_files(store, [pickled])
        with pytest.raises(Refused, match="can't be read without running what is inside"):
            import_files(store, [dump])


def test_a_store_that_is_being_written_is_refused(tmp_path: Path) -> None:
    tinker_capture(tmp_path / "capture.db", rows_of("tinker-capture"))
    (tmp_path / "capture.db-wal").write_bytes(b"rows")
    with Store.open(tmp_path / "store.db") as store, pytest.raises(Refused, match="newest rows are in"):
        import_files(store, [tmp_path / "capture.db"], tokenizer=Characters())


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (pickle.dumps({"items": []}), "expected Trinity's form TRXP, got another one"),
        (trinity_blob({"items": 4}, {}), "items: expected a list of objects, got 4"),
        (
            trinity_blob({"items": [print]}, {}),
            "can't be read without running what is inside: it names builtins.print",
        ),
        (
            trinity_blob({"items": [TRINITY["fields"]]}, TRINITY["tensors"])[:-1],
            "experience_bytes: expected version 1",
        ),
    ],
)
def test_bytes_that_are_no_experience_are_refused(blob: bytes, said: str, tmp_path: Path) -> None:
    trinity(tmp_path / "buffer.db", [{"blob": blob, "reward": 1.0}])
    with Store.open(tmp_path / "store.db") as store, pytest.raises(Refused, match=said):
        import_files(store, [tmp_path / "buffer.db"])


def test_inputs_of_openrlhf_are_prompts(tmp_path: Path) -> None:
    json_lines(tmp_path / "prompts.jsonl", [{"input": "2+2=", "label": "4", "datasource": "sums"}])
    [prompt] = load_prompts(tmp_path / "prompts.jsonl")
    assert (prompt.text, prompt.columns["answer"]) == ("2+2=", "4")


def test_a_turn_that_is_not_learned_from_is_never_passed_over(tmp_path: Path) -> None:
    """Records with the same keys are of one format: here of the first one, which has no `loss`."""
    asked, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    rows = [{"messages": [asked, said]}, {"messages": [asked, {**said, "loss": False}]}]
    json_lines(tmp_path / "log.jsonl", rows)
    with Store.open(tmp_path / "store.db") as store:
        report = import_files(store, [tmp_path / "log.jsonl"])
    assert [refusal.reason for refusal in report.refused] == [
        "messages: some have `loss`, which selects what is learned; give --format swift-turns"
    ]
