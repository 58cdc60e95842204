"""Reading a run folder: what a kill leaves is told, what is wrong is refused by file and line."""

import math
import re

import pytest

from agro.errors import Refused
from agro.runs.rundata import Measurement, PhaseSpan, load_run


def test_the_synthetic_run(run_folder):
    run = load_run(run_folder)
    assert run.spans == [
        PhaseSpan("sft", 0, 60),
        PhaseSpan("onpolicy", 60, 180),
        PhaseSpan("store", 180, 220),
    ]
    assert not run.torn
    assert math.isnan(run.column("reward_mean")[0])  # step 0 is an evaluation only
    assert run.total("tokens") == 220 * 1800
    assert run.total("no_such_column") is None
    row = run.rows[60]
    assert run.heldout(60, 60) == Measurement(
        "eval_reward", row["eval_reward"], row["eval_reward_se"], 60, 256
    )
    assert run.heldout(61, 75) is None
    assert run.heldout(61, 119).step == 100


@pytest.mark.parametrize(
    "tail", ['{"step": 221, "ph', '{"step": 221, "phase": "é'.encode()[:-1].decode("latin-1")]
)
def test_a_torn_last_line_is_left_out_and_told(run_folder, tail):
    before = load_run(run_folder).rows
    with (run_folder / "metrics.jsonl").open("ab") as file:
        file.write(tail.encode("latin-1"))
    run = load_run(run_folder)
    assert run.torn
    assert run.rows == before


def test_a_last_line_without_its_newline_counts_if_it_is_whole(run_folder):
    path = run_folder / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    run = load_run(run_folder)
    assert not run.torn
    assert run.rows[-1]["step"] == 220


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 3', "the last line"),
        ('{"step": 3, "phase": "sft", "loss": NaN}', "NaN isn't JSON"),
        ("", "got an empty line"),
        ("[]", r"expected a JSON object, got \[\]"),
        ('{"step": 2, "phase": "sft"}', "step: expected a whole number above 2, got 2"),
        ('{"step": 3.5, "phase": "sft"}', "got 3.5"),
        ('{"phase": "sft"}', "step: expected a whole number above 2, got None"),
        ('{"step": 3}', "phase: expected text, got None"),
        (
            '{"step": 3, "phase": "sft", "reward_mean": "high"}',
            "reward_mean: expected a number or null, got 'high'",
        ),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line(run_folder, line, message):
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(Refused, match=rf"metrics\.jsonl:4: .*{message}"):
        load_run(run_folder)


def test_a_bad_last_line_with_its_newline_is_not_torn(run_folder):
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 22\n')
    with pytest.raises(Refused, match=r"metrics\.jsonl:222: "):
        load_run(run_folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", "", " has no steps yet"),
        ("metrics.jsonl", '{"st', " has no steps yet"),
        ("metrics.jsonl", None, ": can't be read: No such file"),
        ("config.json", "{", ": expected a run's configuration as JSON"),
        (
            "config.json",
            '{"train": {"stepz": 3}}',
            r": unknown key train\.stepz; did you mean train\.steps\?$",
        ),
        ("config.json", None, ": can't be read: No such file"),
    ],
)
def test_missing_and_empty_files_are_named(run_folder, name, text, message):
    (run_folder / name).unlink()
    if text is not None:
        (run_folder / name).write_text(text)
    with pytest.raises(Refused, match=re.escape(name) + message):
        load_run(run_folder)
