"""Runs on a store from which samples are forgotten: what resume does then, and what the card says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import InterruptAfter, done, fill_store, metrics, tiny

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Interrupted, Refused
from agro.logs.importing import import_files
from agro.runs.card import write_cards
from agro.store import Store


def stored(folder: Path, steps: int) -> RunConfig:
    return tiny(
        folder, data__prompts=None, data__store=str(folder / "log.db"), data__replay=1.0, train__steps=steps
    )


def test_a_run_resumes_on_what_is_left(tmp_path: Path) -> None:
    """8 groups of 4 responses, of which 4 groups are left; a step trains on 4 groups."""
    fill_store(tmp_path / "log.db", groups=8)
    config = stored(tmp_path, 6)
    with pytest.raises(Interrupted):
        Trainer(config, tmp_path / "run", monitors=[InterruptAfter(4)]).run()
    assert done(tmp_path / "run") == 4
    with Store.open(tmp_path / "log.db", timeout=0.5) as store:
        run = json.loads((tmp_path / "run/config.json").read_text())["run"]
        ids = store.experience.find(prompt_id=store.groups()[0].prompt_id)
        for group in store.groups()[1:4]:
            ids += store.experience.find(prompt_id=group.prompt_id)
        [trained] = store.draws.trained(ids)
        assert (trained.run, trained.samples) == (run, 16)  # in 4 steps each group was drawn twice
        store.imports.forget(ids)
        left = {s.id for s in store.samples()}
    Trainer(config, tmp_path / "run", resume=True).run()
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    with Store.open(tmp_path / "log.db") as store:
        drawn = store.draws.drawn(run)
    assert {d.sample for d in drawn if d.step > 4} == left
    assert len(left) == 16
    assert sum(d.source == "(forgotten)" for d in drawn) == 32
    assert not any(d.source == "(forgotten)" for d in drawn if d.step > 4)


def test_a_run_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db", groups=8)
    config = stored(tmp_path, 4)
    with pytest.raises(Interrupted):
        Trainer(config, tmp_path / "run", monitors=[InterruptAfter(2)]).run()
    with Store.open(tmp_path / "log.db", timeout=0.5) as store:
        store.imports.forget(store.experience.find(source="someone"))
    with pytest.raises(Refused, match=r"log\.db"):
        Trainer(config, tmp_path / "run", resume=True).run()


def test_the_card_names_files_and_licenses(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{g}>", "response": str(i), "reward": i % 2, "source": "bob"}
        for g in range(4)
        for i in range(3)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Store.open(tmp_path / "log.db") as store:
        import_files(store, [path], license="CC-BY-4.0")
    run = Trainer(stored(tmp_path, 1), tmp_path / "run").run()
    write_cards(run)
    card = (run / "model/README.md").read_text()
    assert "imported data: `bob`: 12 samples of `log.jsonl` (SHA-256 " in card
    assert "license: `CC-BY-4.0`" in card
