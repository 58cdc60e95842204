"""What a run reads: changed models and files are noticed on resume, prompts are checked before it starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import InterruptAfter, fill_store, metrics, tiny, weights, write_prompts

from agro.api.plan import describe
from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Interrupted, Refused
from agro.models.policy import Policy
from agro.models.reference import fingerprint
from agro.place.collector import Collector


def another_model(folder: Path, seed: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    Policy.load(tiny(folder.parent).policy, seed=seed).save(folder)


def another_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}>")


def config(folder: Path) -> RunConfig:
    """A run whose policy, reference, prompts and held-out prompts are in files."""
    held = write_prompts(folder / "held.jsonl", range(60, 64))
    for name, seed in (("start", 0), ("reference", 1)):
        if not (folder / name).exists():
            another_model(folder / name, seed)
    return tiny(
        folder,
        policy={
            "model": str(folder / "start"),
            "reference": "model",
            "reference_model": str(folder / "reference"),
        },
        data={"prompts": str(folder / "prompts.jsonl"), "eval_prompts": held},
    )


def one_prompt(path: Path, prompt: str) -> None:
    path.write_text(json.dumps({"prompt": prompt, "answer": "0"}) + "\n")


CHANGES: dict[str, Callable[[Path], None]] = {
    "policy.model": lambda folder: another_model(folder / "start", 2),
    "policy.model ": lambda folder: another_template(folder / "start"),
    "policy.reference_model": lambda folder: another_model(folder / "reference", 3),
    "data.prompts": lambda folder: one_prompt(folder / "prompts.jsonl", "000>"),
    "data.eval_prompts": lambda folder: one_prompt(folder / "held.jsonl", "999>"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_input_is_refused_by_name(tmp_path: Path, name: str) -> None:
    made = config(tmp_path)
    with pytest.raises(Interrupted):
        Trainer(made, tmp_path / "run", monitors=[InterruptAfter(2)]).run()
    CHANGES[name](tmp_path)
    if name == "policy.model ":  # its tokenizer has to remain that of the reference
        another_template(tmp_path / "reference")
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(Refused, match=rf"what {name.strip()}.* has changed"):
        Trainer(made, tmp_path / "run", resume=True).run()
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert metrics(tmp_path / "run")[-1]["step"] == 2


def test_equal_inputs_elsewhere_on_the_disk_are_not_changed(tmp_path: Path) -> None:
    """The contents count: files that were copied back are the same."""
    made = config(tmp_path)
    Trainer(made, tmp_path / "plain").run()
    with pytest.raises(Interrupted):
        Trainer(made, tmp_path / "run", monitors=[InterruptAfter(2)]).run()
    for name in ("start", "reference"):
        shutil.copytree(tmp_path / name, tmp_path / "copy")
        shutil.rmtree(tmp_path / name)
        (tmp_path / "copy").rename(tmp_path / name)
    Trainer(made, tmp_path / "run", resume=True).run()
    assert weights(tmp_path / "run") == weights(tmp_path / "plain")
    assert RunConfig.load(tmp_path / "run" / "config.json") == made


def test_a_collector_whose_reward_is_not_that_of_the_run_is_refused(tmp_path: Path) -> None:
    made = tiny(tmp_path, source__kind="elsewhere")
    record = {**made.record(), "run": "r", "inputs": {"reward.name": "0" * 64}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(Refused, match=r"what reward\.name names isn't here what it was"):
        Collector.of(str(tmp_path), None, print)  # type: ignore[arg-type]


def test_a_fingerprint_is_of_every_weight(tmp_path: Path) -> None:
    policy = Policy.load(tiny(tmp_path).policy, seed=0)
    before = {fingerprint(policy)}
    for w in policy.weights().values():
        w.data.view(-1)[-1] += 1.0
        before.add(fingerprint(policy))
    assert len(before) == 1 + len(policy.weights())


LONG = "9" * 20 + ">"  # 22 tokens with BOS; the context is 16


def with_long_prompts(folder: Path, count: int, **changes: object) -> RunConfig:
    made = tiny(folder, data__prompts=str(folder / "some.jsonl"), train__groups=2, **changes)
    lines = [json.dumps({"prompt": LONG, "prompt_id": f"long{i}"}) for i in range(count)]
    plain = (folder / "prompts.jsonl").read_text().splitlines()[:4]
    (folder / "some.jsonl").write_text("\n".join([*plain, *lines]) + "\n")
    return made


@pytest.mark.parametrize("key", ["prompts", "eval_prompts"])
def test_prompts_without_room_for_a_response_are_refused_before_the_run(tmp_path: Path, key: str) -> None:
    made = with_long_prompts(tmp_path, 2)
    if key == "eval_prompts":
        data = {"prompts": write_prompts(tmp_path / "p.jsonl", range(8, 12)), key: made.data.prompts}
        made = tiny(tmp_path, data=data)
    for go in (lambda: Trainer(made, tmp_path / "run").plan(), Trainer(made, tmp_path / "run").run):
        named = r"some\.jsonl:5: .*long0.*some\.jsonl:6: .*long1"
        with pytest.raises(Refused, match=rf"data\.{key}: 2 of 6 prompts .*{named}.*invalid_prompts"):
            go()
    assert not (tmp_path / "run" / "config.json").exists()


def test_prompts_without_room_are_dropped_and_counted(tmp_path: Path, capsys) -> None:
    made = with_long_prompts(tmp_path, 2, data__invalid_prompts="drop")
    plan = Trainer(made, tmp_path / "run").plan()
    assert plan["prompts"] == 4
    assert "2 of 6 prompts" in describe(plan)
    folder = Trainer(made, tmp_path / "run").run()
    assert "2 of 6 prompts" in capsys.readouterr().err
    assert all(m["groups"] == 2 for m in metrics(folder))
    lines = (json.dumps({"prompt": LONG, "id": i}) + "\n" for i in range(3))
    (tmp_path / "some.jsonl").write_text("".join(lines))
    with pytest.raises(Refused, match="3 of 3 prompts"):
        Trainer(made, tmp_path / "other").run()


def test_a_prompt_of_unknown_characters_is_invalid_too(tmp_path: Path) -> None:
    made = with_long_prompts(tmp_path, 0, data__invalid_prompts="drop")
    with (tmp_path / "some.jsonl").open("a") as file:
        file.write('{"prompt": "\\ud800"}\n{"prompt": "12ab>"}\n')  # the latter's letters are <unk>
    plan = Trainer(made, tmp_path / "run").plan()
    assert plan["prompts"] == 4
    assert "2 of 6 prompts are invalid" in describe(plan)
    assert "doesn't know 'a', 'b'" in describe(plan)


def test_prompts_of_several_files_by_other_columns(tmp_path: Path) -> None:
    """A CSV file and a JSON list; data.columns names where prompt and answer are, `||` in which of two."""
    (tmp_path / "a.csv").write_text("question,answer,level\n001>,1,easy\n002>,2,hard\n")
    rows = [{"ask": {"text": "003>"}, "answer": "3"}, {"ask": {"text": "001>"}, "answer": "1"}]
    (tmp_path / "b.json").write_text(json.dumps(rows))
    data = {
        "prompts": [str(tmp_path / "a.csv"), str(tmp_path / "b.json")],
        "columns": {"prompt": "question || ask.text"},
    }
    with pytest.raises(Refused, match=r"data\.prompts: 1 prompts are there twice \(.*b\.json:2: .*a\.csv:2"):
        Trainer(tiny(tmp_path, data=data), tmp_path / "run").plan()
    trainer = Trainer(tiny(tmp_path, data={**data, "invalid_prompts": "drop"}), tmp_path / "run")
    assert "1 prompts are there twice" in describe(trainer.plan())
    assert [(p.text, p.columns["answer"]) for p in trainer.prompts] == [
        ("001>", "1"),
        ("002>", "2"),
        ("003>", "3"),
    ]
    assert trainer.prompts[0].columns["level"] == "easy"
    data["columns"] = {"prompt": "task"}
    with pytest.raises(
        Refused, match=r"4 lines are refused.*\n.*data\.columns\.prompt: no column task; there"
    ):
        Trainer(tiny(tmp_path, data=data), tmp_path / "run").plan()


def test_a_column_that_the_reward_lacks_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"prompt": "001>", "solution": "1"}\n')
    reward = tmp_path / "own.py"
    reward.write_text("def own(completions, solution, answer):\n    return [0.0] * len(completions)\n")
    for name in ("exact", f"{reward}:own"):
        made = tiny(tmp_path, data__prompts=str(tmp_path / "some.jsonl"), reward__name=name)
        with pytest.raises(
            Refused, match=r"1 of 1 prompts can't be scored: the sample has no answer.*solution"
        ):
            Trainer(made, tmp_path / "run").plan()
        named = {"prompts": made.data.prompts, "columns": {"answer": "solution || answer"}}
        made = tiny(tmp_path, data=named, reward__name="exact", train__groups=1)
        assert Trainer(made, tmp_path / "run").plan()["prompts"] == 1


def test_a_store_of_too_few_groups_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    """Eight groups; a step of the first phase draws nine."""
    fill_store(tmp_path / "log.db", groups=8)
    data = {"store": str(tmp_path / "log.db"), "replay": 1.0}
    made = tiny(tmp_path, data=data, train__groups=9, policy={"model": str(tmp_path / "no such model")})
    with pytest.raises(Refused, match=r"expected 9 groups .* got 8\. The store has 32 samples in 8 groups"):
        Trainer(made, tmp_path / "run").plan()
    assert Trainer(tiny(tmp_path, data=data, train__groups=8), tmp_path / "run").plan()
