"""Commands that ask, on a terminal of their own (pty)."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.store import Store


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
    if waiting:
        process.kill()
    assert not waiting, said
    return said, process.wait(timeout=60)


def _read(terminal) -> bytes:
    """Nothing where the process has ended, or says nothing for a minute."""
    if not select.select([terminal], [], [], 60)[0]:
        return b""
    try:
        return terminal.read(4096)
    except OSError:
        return b""


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
