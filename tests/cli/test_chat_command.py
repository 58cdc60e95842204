"""`agro chat`, with lines on standard input as a person types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from running import done, on_terminal, refused
from typer.testing import CliRunner, Result

from agro.api.reporting_trainer import Trainer
from agro.cli import app
from agro.config import NewModel, RunConfig
from agro.models.pretrained import new_model
from agro.store import Store
from agro.types import Sample

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    (folder / "prompts.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n')
    values = {
        "policy": {"new": {"alphabet": "0123456789>", "hidden": 16, "layers": 1, "heads": 2, "context": 16}},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "sampler": {"n": 3, "max_new": 4},
        "objective": {"name": "agro", "beta": 0.1},
        "train": {"steps": 1, "groups": 1, "lr": 1e-2},
    }
    return Trainer(RunConfig.of(values), folder / "run").run()


def chat(typed: str, *args: object) -> Result:
    return CliRunner().invoke(app, ["chat", *map(str, args)], input=typed, prog_name="agro")


def test_each_line_is_answered(run: Path) -> None:
    result = chat("123>\n\n4>\n/quit\n5>\n", run)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("> ") == 4  # the empty line is asked again, and after /quit nothing is
    assert "no chat template" in result.stderr


def test_judgments_of_blind_answers_are_pairs_in_the_run_folder(run: Path) -> None:
    """One better, one a tie, and one that is left out after an answer that says nothing."""
    (run / "chat.db").unlink(missing_ok=True)
    result = chat("1>\n2\n2>\n0\n3>\nwhat\n\n", run, "--against", "start")
    assert result.exit_code == 0, result.output
    with Store.open(run / "chat.db", read_only=True) as store:
        pairs = list(store.pairs())
        samples = {s.id: s for s in store.samples()}
    assert [pair.is_tie for pair in pairs] == [False, True]
    assert len(samples) == 4
    assert all(samples[p.winner].prompt == samples[p.loser].prompt for p in pairs)
    shown = [line.removeprefix("> ") for line in result.stdout.splitlines()]
    second = next(line for line in shown if line.startswith("2: "))
    assert samples[pairs[0].winner].response == second.removeprefix("2: ")
    command = f"agro train pairs policy.model={run / 'model'} data.store={run / 'chat.db'}"
    assert f"{command} train.groups=1\n" in result.stdout  # the tie has no winner to learn from
    assert "ties 1" in result.stdout


def test_the_end_of_the_input_in_place_of_a_judgment_ends_the_conversation(run: Path) -> None:
    result = chat("1>\n", run, "--against", "start")
    assert result.exit_code == 0, result.output
    assert "ties 0" in result.stdout


def test_sides_are_shuffled(run: Path) -> None:
    """Who always prefers the first answer prefers neither model."""
    typed = "".join(f"{i}>\n1\n" for i in range(20))
    result = chat(typed, run, "--against", "start")
    counts = re.search(rf"^preferred: {run} (\d+), start (\d+), ties 0$", result.stdout, re.MULTILINE)
    assert counts is not None
    assert int(counts[1]) + int(counts[2]) == 20
    assert 3 <= int(counts[1]) <= 17


def test_turns_go_on_where_the_model_has_a_chat_template(tmp_path: Path, monkeypatch) -> None:
    from transformers import AutoTokenizer

    new_model(tmp_path / "model", NewModel(hidden=16, layers=1, heads=2, context=256), 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    asked = []

    from agro.rollout import Rollout

    def sample(self, prompts, n, options, **rest) -> list[Sample]:
        asked.append(prompts[0].text)
        return [Sample(prompts[0].text, f"answer {len(asked)}")]

    monkeypatch.setattr(Rollout, "sample", sample)
    assert chat("one\ntwo\n/new\nthree\n", tmp_path / "model").exit_code == 0
    assert [[m["content"] for m in messages] for messages in asked] == [
        ["one"],
        ["one", "answer 1", "two"],
        ["three"],
    ]


def test_what_a_model_wrote_cannot_control_the_terminal(run: Path, monkeypatch) -> None:
    from agro.rollout import Rollout

    monkeypatch.setattr(Rollout, "sample", lambda *a, **b: [Sample("1>", "\x1b[2J")])
    assert "\\x1b[2J" in chat("1>\n", run).stdout


def test_only_a_run_has_a_start(run: Path, tmp_path: Path) -> None:
    assert "expected start, the run's first model" in refused("chat", run, "--against", run / "model")
    (tmp_path / "model").mkdir()  # which can't be loaded
    assert "expected the folder of a run" in refused("chat", tmp_path / "model", "--against", "start")
    assert "chat" in done("--help").stdout
    (tmp_path / "runs").mkdir()
    assert "there is no such run or model" in refused("chat", tmp_path / "runs" / "frist")


def test_the_result_is_exported_in_16_bits(run: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    done("export", run, tmp_path / "merged")
    ours, theirs = (load_file(f / "model.safetensors") for f in (run / "model", tmp_path / "merged"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], ours[name].bfloat16()) for name in ours)
    assert "this file or folder exists" in refused("export", run, tmp_path / "merged")


def test_answers_are_asked_for_and_rated_on_a_terminal(run: Path) -> None:
    """A terminal of its own (pty)."""
    asked = "better (1, 2, 0 for a tie, Enter to skip): "
    replies = [("> ", "1>"), (asked, "2"), ("> ", "2>"), (asked, "0"), ("> ", "/quit")]
    store = run / "chat.db"
    store.unlink(missing_ok=True)
    said, code = on_terminal("chat", run, "--against", "start", replies=replies)
    assert code == 0, said
    assert f"agro train pairs policy.model={run / 'model'} data.store={store}" in said
    assert "ties 1" in said
    with Store.open(store, read_only=True) as opened:
        assert [pair.is_tie for pair in opened.pairs()] == [False, True]
        assert opened.counts().samples == 4
