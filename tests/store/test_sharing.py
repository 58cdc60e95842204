"""An import by several processes makes the store and the report that one process makes."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from making import write_lines
from processes import children, is_running, until
from pyarrow import parquet

from agro.errors import AgroWarning, Refused
from agro.logs import reading
from agro.logs.importing import import_files
from agro.store import Store
from agro.store.database import LEDGERS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 7 records."""
    monkeypatch.setattr("agro.io.record_files.CHUNK", 7)


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The blocks that this process reads."""
    blocks: list[Any] = []
    read = reading.Reader.read

    def noted(reader: Any, file: Any, state: Any, block: Any) -> Any:
        blocks.append(block)
        return read(reader, file, state, block)

    monkeypatch.setattr(reading.Reader, "read", noted)
    return blocks


def imported(folder: Path, files: list[Path], **options: Any) -> tuple[Any, ...]:
    """What an import leaves: the report, and all rows of the store, with their checksums."""
    with Store.open(folder / "s.db") as store:
        report = import_files(store, files, **options)
        assert not store.tables.damage()
        tables = ("samples", "changes", *LEDGERS)
        rows = {name: store.tables.run(f"SELECT * FROM {name} ORDER BY rowid") for name in tables}
    left = report.to_json()
    left.pop("refused_file", None)
    return left, str(report).replace(str(folder), ""), rows


def compared(tmp_path: Path, files: list[Path], **options: Any) -> dict[str, Any]:
    """The report, which is the same of one process and of two others beside it."""
    for workers in (1, 2):
        (tmp_path / f"{workers}").mkdir()
    one, several = (imported(tmp_path / f"{n}", files, workers=n, **options) for n in (1, 2))
    for left, right in zip(one, several, strict=True):
        assert left == right
    report: dict[str, Any] = one[0]
    return report


def rows(count: int) -> list[str]:
    """Lines of responses, pairs, tokens, blanks, wrong ones, and prompt_ids that name two prompts."""
    some = random.Random(0)
    lines = []
    for i in range(count):
        prompt = f"Q{i // 3}" if i % 2 else [{"role": "user", "content": f"Q{i // 3} é"}]
        record: dict[str, Any] = {"prompt": prompt, "response": f"A{some.randrange(3)}", "reward": i % 4 / 2}
        kind = i % 9
        if kind == 3:
            record = {"prompt": prompt, "chosen": "good", "rejected": f"bad {i}", "votes_chosen": 2}
        elif kind == 4:
            record |= {"tokens": [1, 2, i], "mask": [0, 1, 1], "behavior_logp": [None, -0.5, -1 / (i + 1)]}
        elif kind == 5:
            record["prompt_id"] = f"p{i % 4}"  # names another prompt, mostly
        elif kind == 6:
            record |= {"reward": "many", f"column{i % 5}": i}
        lines.append("" if kind == 7 else json.dumps(record) + ("}" if kind == 8 else ""))
    return lines


def test_json_lines_with_all_that_may_be_wrong(tmp_path: Path, read_here: list[Any]) -> None:
    """Nine kinds of lines, in 29 and 3 blocks."""
    lines = rows(200)
    files = [write_lines(tmp_path / "a.jsonl", *lines), write_lines(tmp_path / "b.jsonl.gz", *lines[50:70])]
    report = compared(tmp_path, files)
    # Where this process is alone; of two others it reads again what they were reading before it was known
    # that the rewards are numbers, not shares.
    assert 29 + 3 <= len(read_here) <= 29 + 3 + 5
    numbers = [int(refusal["where"].rpartition(":")[2]) for refusal in report["refused"]]
    of_first = [n for n, r in zip(numbers, report["refused"], strict=True) if "a.jsonl" in r["where"]]
    assert of_first == sorted(of_first)
    assert {"p1" in r["reason"] for r in report["refused"]} == {True, False}
    assert report["pairs"] == sum(i % 9 == 3 for i in [*range(200), *range(50, 70)])


def table(path: Path) -> Path:
    return write_lines(path, "prompt,response,reward", *(f"Q{i},A{i},{i % 3}" for i in range(30)), "Q,")


def a_list(path: Path) -> Path:
    records = [{"prompt": f"Q{i}", "response": "A", "reward": i} for i in range(30)]
    return write_lines(path, json.dumps([*records, 7]))


def arrow(path: Path) -> Path:
    """Two groups of rows, and a level that is NaN, which the store can't hold."""
    levels = [float(i) if i % 11 else float("nan") for i in range(2000)]
    columns = {"prompt": [f"Q{i}" for i in range(2000)], "response": ["A"] * 2000, "level": levels}
    parquet.write_table(pa.table(columns), path, row_group_size=1500)
    return path


@pytest.mark.parametrize(
    ("make", "name", "refused"), [(table, "t.csv", 1), (a_list, "l.json", 1), (arrow, "p.parquet", 182)]
)
def test_other_files(tmp_path: Path, make: Callable[[Path], Path], name: str, refused: int) -> None:
    """Of 2,000 levels, each eleventh, from the first on, is NaN: 182."""
    assert compared(tmp_path, [make(tmp_path / name)])["refused_count"] == refused


def test_a_format_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[map]\nprompt = 'q'\nresponse = 'a'\n[skip]\nbad = 'bad ones'\n")
    rows = [{"q": f"p{i}", "a": "x", "bad": i % 7 == 0} for i in range(40)]
    log = write_lines(tmp_path / "log.jsonl", *rows)
    report = compared(tmp_path, [log], format=str(tmp_path / "own.toml"))
    assert report["left_out"] == {"bad ones": 6}


def test_options_that_change_records(tmp_path: Path) -> None:
    record = {"score": ["up", "down"], "user": "U"}
    log = write_lines(
        tmp_path / "log.jsonl",
        *(record | {"q": f"p{i}", "id": str(i), "a": [f"mail a{i}@example.com", "no"]} for i in range(40)),
    )
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"prompt": f"P{i}", "id": i} for i in range(40)))
    options: dict[str, Any] = {
        "mapping": {"prompt_id": "id", "response": "a", "reward": "score", "meta.user": "user"},
        "reward_map": {"up": 1.0, "down": 0.0},
        "redact_patterns": ["zzz"],
    }
    more = {"prompts": prompts, "drop": ["meta.user"], "redact": True, "center_by": "source", "strict": True}
    report = compared(tmp_path, [log], **options, **more)
    assert (report["samples"], report["scored"]) == (80, 80)
    assert report["redacted"] == {"pattern zzz": 0, "e-mail address": 40}
    assert report["dropped"] == {"meta.user": 80}


def test_what_earlier_records_decide(tmp_path: Path, read_here: list[Any]) -> None:
    """Of a file with two filters the first one is taken. Blocks that were read without knowing it are read
    again here."""
    rows: list[Any] = []
    for i in range(60):
        asked = {"gen_args_0": {"arg_0": f"Q{i}", "arg_1": {"until": []}}}
        row = {"doc_id": i, "doc": {}, "target": "1", "arguments": asked, "resps": [["1"]]}
        rows.append({**row, "filtered_resps": ["1"], "filter": "flexible" if i % 2 else "strict"})
    rows[0] = rows[1] = {"prompt": "Q", "response": "A"}  # the first block's third record decides
    log = write_lines(tmp_path / "samples.jsonl", *rows)
    report = compared(tmp_path, [log])
    assert report["left_out"] == {"of the filter flexible; taken is strict (--choose filter=NAME)": 29}
    assert 9 < len(read_here) < 18


def test_processes_that_are_killed_are_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: Any) -> None:
    log = write_lines(tmp_path / "log.jsonl", *rows(200))
    submit, submitted = ProcessPoolExecutor.submit, []

    def killing(pool: Any, *question: Any) -> Any:
        submitted.append(question)
        if len(submitted) == 9:
            for pid in list(pool._processes):
                os.kill(pid, signal.SIGKILL)
        return submit(pool, *question)

    whole = imported(tmp_path, [log])
    (tmp_path / "s.db").unlink()
    monkeypatch.setattr(ProcessPoolExecutor, "submit", killing)
    with pytest.warns(AgroWarning, match=r"ended \(killed, or see what it printed\); this one reads"):
        shared = imported(tmp_path, [log], workers=2)
    assert shared == whole


PROGRAM = """
import sys, time
from agro.io import record_files
from agro.logs.importing import EntryWriter
from agro.logs.importing import import_files
from agro.store import Store

def slowly(*arguments, write=EntryWriter.write):
    time.sleep(0.05)
    return write(*arguments)

record_files.CHUNK, EntryWriter.write = 10, slowly
with Store.open(sys.argv[2]) as store:
    print("begins", flush=True)
    import_files(store, [sys.argv[1]], workers=2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_import_that_is_ended_leaves_no_process_and_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    """By a kill of it alone, or by Ctrl-C, which reaches all processes."""
    log = write_lines(tmp_path / "log.jsonl", *rows(2000))
    path = tmp_path / "ended.db"
    command = [sys.executable, "-c", PROGRAM, str(log), str(path)]
    errors = (tmp_path / "errors").open("w")
    program = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
    )
    assert program.stdout is not None
    program.stdout.readline()
    stored, ends = 0, time.monotonic() + 60
    while not (stored > 100 and children(program.pid)) and time.monotonic() < ends:
        time.sleep(0.01)
        with sqlite3.connect(path) as database:
            stored = database.execute("SELECT count(*) FROM samples").fetchone()[0]
    started = children(program.pid)
    (os.killpg if number == signal.SIGINT else os.kill)(program.pid, number)
    assert program.wait(60) != 0
    assert len(started) == 3  # two that read, and the one with which Python looks after their resources
    assert (tmp_path / "errors").read_text().count("Traceback") == (number == signal.SIGINT)
    until(lambda: not any(map(is_running, started)), 60)
    with Store.open(path) as store, Store.open(tmp_path / "whole.db") as whole:
        stored = store.counts().samples
        again, report = import_files(store, [log]), import_files(whole, [log])
        assert 100 < stored < report.samples
        assert (again.samples, again.duplicates) == (report.samples - stored, stored)
        assert list(store.samples()) == list(whole.samples())
        assert list(store.pairs()) == list(whole.pairs())


def test_an_import_that_is_killed_while_its_processes_begin_leaves_none(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", *rows(200))
    command = [sys.executable, "-c", PROGRAM, str(log), str(tmp_path / "s.db")]
    program = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    until(lambda: len(children(program.pid)) == 3, 60)
    started = children(program.pid)
    program.kill()
    program.wait(60)
    until(lambda: not any(map(is_running, started)), 60)


def test_a_program_that_other_processes_cant_run_again_reads_all(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", *rows(200))
    command = [sys.executable, "-", str(log), str(tmp_path / "s.db")]
    done = subprocess.run(command, input=PROGRAM, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "FileNotFoundError" in done.stderr
    assert "this one reads the rest" in done.stderr
    with Store.open(tmp_path / "s.db") as store, Store.open(tmp_path / "whole.db") as whole:
        import_files(whole, [log])
        assert list(store.samples()) == list(whole.samples())


def test_a_script_without_a_main_says_what_to_do(tmp_path: Path) -> None:
    """Each process that reads runs the script again; the first one reads all itself."""
    log = write_lines(tmp_path / "log.jsonl", *({"prompt": "q", "response": f"{i}"} for i in range(20)))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from agro.logs.importing import import_files\n"
        "from agro.store import Store\n"
        "with Store.open(sys.argv[2]) as store:\n"
        "    print(import_files(store, [sys.argv[1]], workers=2, replace=True).samples)\n"
    )
    command = [sys.executable, str(script), str(log), str(tmp_path / "s.db")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr
    assert 'put what the script does under `if __name__ == "__main__":`' in done.stderr
    assert "this one reads the rest" in done.stderr


def test_tokens_of_a_tokenizer(tmp_path: Path, tiny: Callable[[], Any], read_here: list[Any]) -> None:
    encoder = tiny().encoder
    texts = ("ba", "b", "aab") * 9
    lines = [{"prompt": "ab", "response": text, "tokens": encoder.ids(text)} for text in texts]
    log = write_lines(tmp_path / "log.jsonl", *lines)
    assert compared(tmp_path, [log], tokenizer=encoder)["samples"] == 27
    assert len(read_here) == 4  # of 7 records, by the import in one process
    encoder.__dict__["unsendable"] = lambda: None
    with Store.open(tmp_path / "s.db") as store, pytest.raises(Refused, match="a tokenizer that can't be"):
        import_files(store, [log], tokenizer=encoder, workers=2)


def test_how_many_processes(into: Store, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="workers: expected 1 or more"):
        import_files(into, [write_lines(tmp_path / "log.jsonl", *rows(9))], workers=0)
