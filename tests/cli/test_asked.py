"""Commands that ask, on a terminal of their own (pty)."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.store import Store

LOG = "user_input\tmodel_output\tscore\n" + "".join(
    f"How many legs do {i} cats have?\tThey have {4 * i} of them.\t0.{i}\n" for i in range(1, 7)
)


def on_terminal(arguments: list[str], replies: list[tuple[str, str]]) -> tuple[str, int]:
    """What agro prints where each question, the end of what is on the terminal, is answered; and its exit
    code."""
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "agro", *arguments],
        **dict.fromkeys(("stdin", "stdout", "stderr"), other),
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
    )
    os.close(other)
    said, waiting = "", list(replies)
    with os.fdopen(main, "rb+", buffering=0) as terminal:
        while part := _read(terminal):
            said += part.decode()
            if waiting and said.endswith(waiting[0][0]):
                terminal.write(f"{waiting.pop(0)[1]}\n".encode())
    assert not waiting, said
    return said, process.wait(timeout=60)


def _read(terminal) -> bytes:
    try:
        return terminal.read(4096)
    except OSError:  # the process has ended
        return b""


@pytest.mark.parametrize(("reply", "code"), [("y", 0), ("n", 2)])
def test_an_import_of_an_unknown_file_is_asked(reply: str, code: int, tmp_path: Path) -> None:
    path, store = tmp_path / "log.tsv", tmp_path / "s.db"
    path.write_text(LOG)
    said, ended = on_terminal(["import", str(path), "--store", str(store)], [("Import so? [y/N] ", reply)])
    assert "--map prompt=user_input --map response=model_output --map reward=score" in said
    assert "How many legs do 1 cats have?" in said
    assert ended == code
    assert store.exists() == (code == 0)
    if code == 0:
        with Store.open(store, read_only=True) as opened:
            assert sorted(s.reward for s in opened.samples()) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def test_answers_of_a_run_and_its_start_are_rated_into_a_store(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n')
    values = {
        "policy": {"new": {"alphabet": "0123456789>", "hidden": 16, "layers": 1, "heads": 2, "context": 16}},
        "data": {"prompts": str(tmp_path / "prompts.jsonl")},
        "sampler": {"n": 3, "max_new": 4},
        "objective": {"name": "agro", "beta": 0.1},
        "train": {"steps": 1, "groups": 1},
    }
    run = Trainer(RunConfig.of(values), tmp_path / "run").run()
    asked = "better (1, 2, 0 for a tie, Enter to leave it out): "
    replies = [("> ", "1>"), (asked, "2"), ("> ", "2>"), (asked, "0"), ("> ", "/quit")]
    said, code = on_terminal(["chat", str(run), "--against", "start"], replies)
    assert code == 0, said
    assert f"agro train pairs policy.model={run / 'model'} data.store={run / 'chat.db'}" in said
    assert "ties 1" in said
    with Store.open(run / "chat.db", read_only=True) as store:
        assert [pair.is_tie for pair in store.pairs()] == [False, True]
        assert store.counts().samples == 4
