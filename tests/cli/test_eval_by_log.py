"""`agro eval --log`: estimates, refusals; entropy and KL of `agro eval`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running import done, refused, report_of, write_rows

from agro.config import NewModel
from agro.models.pretrained import new_model
from agro.store import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models a and b, prompts, and 40 responses of a to each of 5 prompts, scored by their first digit."""
    here = tmp_path_factory.mktemp("off_policy")
    new = NewModel(alphabet="0123456789>", hidden=16, layers=1, heads=2, context=32)
    for seed, name in enumerate("ab"):
        new_model(here / name, new, seed)
    write_rows(here / "prompts.jsonl", ({"prompt": f"{i}>", "answer": str(i)} for i in range(5)))
    asked = ("--model", here / "a", "--prompts", here / "prompts.jsonl", "-n", 40, "--max-new", 3)
    done("sample", *asked, "--out", here / "log.db")
    with Store.open(here / "log.db") as store:
        store.set_rewards((s.id or 0, float(s.response[:1] < "5"), {}) for s in list(store.samples()))
    return here


def test_of_its_own_log_a_model_is_worth_what_it_got(folder: Path) -> None:
    found = report_of("eval", "--model", folder / "a", "--log", folder / "log.db")
    value = found["value"]
    assert (value["responses"], value["ess"], value["clusters"]) == (200, pytest.approx(200), 5)
    assert value["estimates"]["doubly_robust"]["value"] == pytest.approx(value["behavior"], abs=1e-5)
    assert value["answer"] == "not shown"


def test_another_model_is_worth_what_its_own_responses_get(folder: Path) -> None:
    """200 responses of a: the interval of b's value holds the share of its own 600 responses, made here."""
    out = folder / "own.db"
    given = ("--model", folder / "b", "--prompts", folder / "prompts.jsonl", "-n", 120)
    done("sample", *given, "--max-new", 3, "--out", out)
    with Store.open(out) as store:
        own = np.mean([s.response[:1] < "5" for s in store.samples()])
    asked = ("eval", "--model", folder / "b", "--log", folder / "log.db")
    best = report_of(*asked)["value"]["estimates"]["doubly_robust"]
    assert best["low"] - 0.05 <= own <= best["high"] + 0.05  # the share's own standard error is .02
    said = done(*asked).stdout
    assert "(doubly robust)" in said
    assert "  doubly robust: " in said
    assert "  per decision: " in said


def test_what_cant_be_estimated_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    rows = ({"prompt": f"{i}>", "response": "1", "reward": i % 2} for i in range(5))
    log = write_rows(tmp_path / "log.jsonl", rows)
    said = done("eval", "--model", folder / "a", "--log", log).stdout
    assert "Not estimable: the log has no log-probs of what wrote it for 5 of its 5 responses" in said
    assert "agro eval --model M --prompts FILE --reward NAME" in said
    with Store.open(tmp_path / "few.db") as few, Store.open(folder / "log.db") as store:
        few.append([s.replace(id=None) for s in store.samples() if s.meta["index"] % 40 < 4])
    found = report_of("eval", "--model", folder / "b", "--log", tmp_path / "few.db")
    assert found["value"]["answer"] == "not estimable"
    assert "of the log's responses count, and 30 are needed" in found["value"]["obstacle"]
    assert found["value"]["estimates"] is None
    asked = ("eval", "--model", folder / "a", "--log")
    assert "no such file" in refused(*asked, tmp_path / "none.db")
    sampling = refused(*asked, folder / "log.db", "-n", 2, "--reward", "exact")
    assert "--log samples and scores nothing: leave out --reward, -n" in sampling


def test_eval_measures_entropy_and_kl_along_its_samples(folder: Path) -> None:
    """KL of a model from itself is 0; entropy is at most the log of the vocabulary."""
    files = ("--model", folder / "a", "--prompts", folder / "prompts.jsonl")
    asked = ("eval", *files, "--reward", "exact", "-n", 2)
    of_itself = report_of(*asked, "--max-new", 3, "--against", folder / "a")
    assert of_itself["kl"]["value"] == pytest.approx(0, abs=1e-6)
    assert 1 < of_itself["entropy"]["value"] < np.log(20)
    other = report_of(*asked, "--max-new", 3, "--against", folder / "b")
    assert other["kl"]["value"] > 0.01
    assert other["before"]["reward_mean"]["value"] is not None
    assert "kl" not in report_of(*asked, "--max-new", 3)
    assert ", before " in done(*asked, "--max-new", 3, "--against", folder / "b").stdout
