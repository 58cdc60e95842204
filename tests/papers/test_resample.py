"""`resample`: groups that fail get more responses in the same step, with a hint or by a teacher."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import interrupted, logp_rounding, metrics, tiny, weights

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.store import Store
from agro.train.check import check_config
from agro.train.phases import derive
from agro.types import Sample
from agro_papers.resample import shortest_right

EXACT = {"name": "exact"}


def with_hints(folder: Path, again: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    """One digit is the answer, so that a random response is right once in 12 times."""
    lines = [{"prompt": f"{i:03d}>", "answer": f"{i % 10}", "hint": f"{i % 10}"} for i in range(60)]
    (folder / "hints.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {
        "data__prompts": str(folder / "hints.jsonl"),
        "reward": EXACT,
        "sampler": {"n": 4, "max_new": 1},
    }
    if again is not None:
        values["source"] = {"around": "resample", "options": again}
    return tiny(folder, **{"objective": {"name": "guide"}, **values, **changes})


def steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(run) if row["step"]]


HINT = {"by": "hint", "template": "{hint}{prompt}"}


def drawn(run: Path, store: Path | None = None) -> dict[int, dict[str, list[Sample]]]:
    """By step and prompt, what a run trained on."""
    steps: dict[int, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    with Store.open(store or run / "store.db", read_only=True) as opened:
        name = json.loads((run / "config.json").read_text())["run"]
        draws = opened.draws.drawn(name)
        samples = {s.id: s for s in opened.samples(ids=[draw.sample for draw in draws])}
    for draw in draws:
        sample = samples[draw.sample]
        steps[draw.step][sample.prompt_id].append(sample)
    return steps


def stored(run: Path) -> list[Sample]:
    with Store.open(run / "store.db", read_only=True) as store:
        return list(store.samples())


@pytest.fixture(scope="module")
def hinted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hinted")
    return Trainer(with_hints(folder, again=HINT), folder / "run").run()


def test_hinted_rows_are_only_in_groups_that_failed(hinted_run: Path) -> None:
    run, samples = hinted_run, stored(hinted_run)
    plain = [s for s in samples if "hint" not in s.meta]
    hinted = [s for s in samples if "hint" in s.meta]
    failed = {s.prompt_id for s in plain} - {s.prompt_id for s in plain if s.reward == 1}
    assert {s.prompt_id for s in hinted} == failed  # 24 prompts, each of which is asked at one step
    assert len(plain) == 6 * 4 * 4
    assert len(hinted) == 4 * len(failed)
    rows = steps(run)
    assert sum(row["asked_again"] for row in rows) == len(failed)
    trained = [sample for groups in drawn(run).values() for group in groups.values() for sample in group]
    assert sum(row["hinted"] for row in rows) == sum("hint" in s.meta for s in trained) > 0
    for groups in drawn(run).values():
        for group in groups.values():
            assert len(group) == 4
            if "hint" in group[0].meta:  # it took the place of the group that failed, since some are right
                assert {s.reward for s in group} == {0.0, 1.0}
                assert all("hint" in s.meta for s in group)


def test_a_hinted_row_has_the_prompt_without_the_hint_and_log_probs_with_it(hinted_run: Path) -> None:
    config = config_of(hinted_run)
    policy = Policy.load(config.policy, seed=derive(config.train.seed, "weights"))
    hinted = [s for s in stored(hinted_run) if "hint" in s.meta and s.version == 0]
    assert hinted
    for sample in hinted:
        assert policy.encoder.decode(sample.tokens.tolist()).startswith(sample.prompt)
        read = sample.meta["hint"] + sample.prompt
        assert policy.encoder.decode(sample.context_tokens.tolist()) == read
        response = sample.tokens[sample.action]
        tokens = torch.tensor([*sample.context_tokens, *response])[None]
        mask = torch.arange(tokens.shape[1])[None] >= len(sample.context_tokens)
        logp = policy.streams(tokens, torch.tensor([tokens.shape[1]]), mask)["logp"][mask]
        recorded = sample.behavior_logp[sample.action]
        assert logp.detach().numpy() == pytest.approx(recorded, abs=logp_rounding(hinted_run))


def teachers(path: Path, texts: dict[str, str]) -> str:
    """Right responses of two teachers to each prompt, and a wrong one."""
    with Store.open(path) as store:
        for source, text in texts.items():
            store.append(
                Sample(
                    f"{i:03d}>", text.format(i % 10), reward=float("{" in text), role="expert", source=source
                )
                for i in range(60)
            )
    return str(path)


STORE = {"by": "store", "most": 2}


def test_teachers_come_only_where_failed_and_take_places_of_wrong_responses(tmp_path: Path) -> None:
    store = teachers(tmp_path / "log.db", {"long": "33{}", "short": "{}", "wrong": "x"})
    config = with_hints(tmp_path, data__store=store, again=STORE, objective={"name": "ampo"})
    run = Trainer(config, tmp_path / "run").run()
    rows = steps(run)
    asked = 0
    for groups in drawn(run, Path(store)).values():
        for group in groups.values():
            experts = [s for s in group if s.role == "expert"]
            own = [s for s in group if s.role == "policy"]
            assert len(group) == 4
            assert not experts or ([s.source for s in experts], len(own)) == (["long", "short"], 2)
            assert bool(experts) == all(s.reward < 1 for s in own)
            asked += bool(experts)
    assert sum(row["asked_again"] for row in rows) == asked > 0
    assert sum(row["experts"] for row in rows) == 2 * asked


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that learned to write one digit several times, and a wrong one: after 012> it writes 555555."""
    folder = tmp_path_factory.mktemp("repeating")
    with Store.open(folder / "log.db") as store:
        store.append(Sample(f"{i:03d}>", f"{(i + 3) % 10}" * 6, reward=1.0, source="me") for i in range(60))
    data = {"store": str(folder / "log.db"), "replay": 1.0, "group_size": 1}
    changes: dict[str, Any] = {"objective": {"name": "sft"}, "train__steps": 40, "train__groups": 16}
    return str(Trainer(tiny(folder, data=data, **changes), folder / "run").run() / "model")


def test_the_teacher_comes_after_whose_reasoning_the_answer_is_likely(tmp_path: Path, repeating: str) -> None:
    """A policy that repeats digits understands a teacher who wrote the digit twice, not one who wrote >."""
    store = teachers(tmp_path / "log.db", {"understood": "{0}{0}{0}", "shorter": ">{0}"})
    again = {**STORE, "most": 1, "choose": "comprehension"}
    config = with_hints(
        tmp_path,
        data__store=store,
        again=again,
        objective={"name": "ampo"},
        train__steps=2,
        train__lr=1e-12,
        policy={"model": repeating},
    )
    run = Trainer(config, tmp_path / "run").run()
    samples = [s for step in drawn(run, Path(store)).values() for group in step.values() for s in group]
    assert {s.source for s in samples if s.role == "expert"} == {"understood"}


@pytest.mark.parametrize("by", ["hint", "store"])
def test_a_resumed_run_asks_the_same_groups_and_ends_with_the_same_bytes(tmp_path: Path, by: str) -> None:
    again = {"hint": HINT, "store": STORE}[by]
    name = {"hint": "guide", "store": "ampo"}[by]

    def config(part: str) -> RunConfig:
        path = teachers(tmp_path / f"{part}.db", {"long": "33{}", "short": "{}"})
        return with_hints(tmp_path, again=again, objective={"name": name}, data__store=path)

    whole = Trainer(config("whole"), tmp_path / "whole").run()
    interrupted(config("cut"), tmp_path / "run", 3)
    run = Trainer(config_of(tmp_path / "run"), tmp_path / "run", resume=True).run()
    assert weights(run) == weights(whole)
    assert [row["asked_again"] for row in metrics(run)] == [row["asked_again"] for row in metrics(whole)]
    for groups in drawn(run, tmp_path / "cut.db").values():
        for group in groups.values():
            assert len(group) == 4
            assert len({s.id for s in group}) == 4
            assert len({s.source for s in group if s.role == "expert"}) in (0, 2)


def config_of(run: Path) -> RunConfig:
    return RunConfig.load(run / "config.json")


def test_another_model_writes_children_in_the_role_of_an_expert(tmp_path: Path, repeating: str) -> None:
    again = {"by": "parents", "model": repeating, "template": "{hint}{prompt}", "n": 2}
    config = with_hints(tmp_path, again=again, objective={"name": "sft"}, train__steps=2)
    run = Trainer(config, tmp_path / "run").run()
    parents = [s for s in stored(run) if s.role == "policy" and s.response]
    children = [s for s in stored(run) if s.role == "expert"]
    assert sum(row["asked_again"] for row in steps(run)) == len({s.prompt_id for s in parents})
    assert len(children) == 2 * len(parents) > 0
    assert {(s.source, s.version) for s in children} == {(again["model"], -1)}


def test_another_model_is_asked_with_the_hint_where_all_failed(tmp_path: Path, repeating: str) -> None:
    config = with_hints(tmp_path, again={**HINT, "model": repeating}, train__steps=2)
    run = Trainer(config, tmp_path / "run").run()
    theirs = [s for s in stored(run) if s.role == "expert"]
    assert len(theirs) == 4 * sum(row["asked_again"] for row in steps(run)) > 0
    assert {(s.source, s.version, "hint" in s.meta) for s in theirs} == {(repeating, -1, True)}


def test_the_shortest_right_child_of_a_good_parent_is_trained_on_without_its_parent(tmp_path: Path) -> None:
    again = {"by": "parents", "n": 3, "alpha": 0.3, "right": 0.5}
    again["template"] = "{hint}{prompt}"
    sampler = {"n": 4, "max_new": 3}
    reward = {"name": f"{write_half(tmp_path)}:half"}
    config = with_hints(
        tmp_path, again=again, reward=reward, sampler=sampler, objective={"name": "sft"}, train__steps=3
    )
    run = Trainer(config, tmp_path / "run").run()
    samples = {s.id: s for s in stored(run)}
    children = [s for s in samples.values() if "parent" in s.meta]
    assert {s.meta["hint"] for s in children} <= {
        s.response for s in samples.values() if "parent" not in s.meta
    }
    for sample in children:
        assert samples[int(sample.meta["parent"])].response == sample.meta["hint"]
    trained = [s for groups in drawn(run).values() for group in groups.values() for s in group]
    assert trained
    for sample in trained:
        siblings = [s for s in children if s.meta["parent"] == sample.meta["parent"]]
        assert len(siblings) == 3
        assert sum(s.reward for s in siblings) / 3 > 0.3
        assert sample.reward == 1
    assert sum(row["groups"] for row in steps(run)) == len(trained)  # one of a prompt


def test_the_shortest_right_response_of_good_parents() -> None:
    """The parent "a" has 2/3, "b" 1/2 and "c" 0."""
    rows = [("a", 1, 9), ("a", 0, 1), ("a", 1, 7), ("b", 1, 3), ("b", 0, 3), ("c", 0, 2)]
    children = []
    for number, (parent, reward, length) in enumerate(rows):
        action = np.arange(length + 1) > 0
        child = Sample("p", "x", reward=reward, prompt_id="p", meta={"parent": parent}, id=number)
        children.append(child.replace(tokens=np.zeros(length + 1, np.int32), action=action))
    assert [s.id for s in shortest_right(children, 0.5)] == [2]  # strictly above
    assert [s.id for s in shortest_right(children, 0.4)] == [3]
    assert shortest_right(children, 1.0) == []
    assert shortest_right(children[-1:], -1.0) == []  # none is right


def write_half(folder: Path) -> Path:
    """A reward that half of the first characters get."""
    path = folder / "half.py"
    text = "def half(completions, **_):\n    return [float(text[:1] in '01234') for text in completions]\n"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"data__replay": 1.0, "data__store": "s.db", "again": HINT},
            r"resample changes fresh samples, but data\.replay",
        ),
        ({"again": STORE}, r'resample with by = "store" needs data.store'),
        ({"again": {**HINT, "most": 1}}, "resample has the option most, which belongs to by"),
        ({"again": {**STORE, "model": "m"}, "data__store": "s.db"}, r'with by = "store" asks no model'),
        ({"again": HINT, "source__kind": "elsewhere"}, "resample needs a source that samples to prompts"),
        ({"again": HINT, "objective": {"name": "agro_onpolicy", "beta": 0.1}}, "agro_onpolicy needs samples"),
    ],
)
def test_what_it_excludes_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        check_config(with_hints(tmp_path, **changes))


def test_a_prompt_without_a_hint_is_refused(tmp_path: Path) -> None:
    config = with_hints(tmp_path, again={**HINT, "hint": "clue"})
    with pytest.raises(Refused, match="expected a column clue, it has answer, hint"):
        Trainer(config, tmp_path / "run").run()


def test_kept_sets_move_with_the_response(tmp_path: Path) -> None:
    """With top_k = 3 each token of a response has three ids, wherever it stands."""
    sampler = {"n": 4, "max_new": 1, "top_k": 3}
    run = Trainer(with_hints(tmp_path, again=HINT, sampler=sampler, train__steps=1), tmp_path / "run").run()
    hinted = [s for s in stored(run) if "hint" in s.meta]
    assert hinted
    for sample in hinted:
        assert np.array_equal(sample.kept_count > 0, sample.action)
