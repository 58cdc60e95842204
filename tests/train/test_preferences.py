"""Training on judged pairs: from a file of preferences to better answers, and what is dropped or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import RESPONSE_ROUNDING, before_step, fill_store, metrics, tiny

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.logs.importing import import_files
from agro.models.policy import Policy
from agro.store import Pair, Store
from agro.train.collate import collate
from agro.train.learner import Local
from agro.train.phases import Phase
from agro.train.trainable import check_store
from agro.types import Sample

BOTH = [{"name": "dpo", "beta": 0.3}, {"name": "pair_consistency", "beta": 0.3}]


def preferences(folder: Path, groups: int = 12, each: int = 3, **columns: Any) -> Path:
    """Of each prompt "1g>" the digit g three times is better than other digits."""
    path = folder / "preferences.jsonl"
    with path.open("w") as file:
        for g in range(groups):
            for k in range(1, each + 1):
                pair = {"chosen": str(g % 10) * 3, "rejected": str((g + k) % 10) * 3}
                file.write(json.dumps({"prompt": f"{100 + g}>", **pair, **columns}) + "\n")
    return path


def config(folder: Path, objective: dict[str, Any] = BOTH[0], **changes: Any) -> RunConfig:
    if not (folder / "pairs.db").exists():
        with Store.open(folder / "pairs.db") as store:
            import_files(store, [preferences(folder)])
    data = {"store": str(folder / "pairs.db"), "replay": 1.0, "group_size": 4} | changes.pop("data", {})
    return tiny(folder, **{"data": data, "objective": objective, "train__steps": 8} | changes)


def run(folder: Path, *objective: dict[str, Any], name: str = "run", **changes: Any) -> list[dict[str, Any]]:
    """The metrics of a run of `config`."""
    return metrics(Trainer(config(folder, *objective, **changes), folder / name).run())


@pytest.mark.parametrize("objective", BOTH, ids=lambda o: o["name"])
def test_the_better_responses_become_likelier(tmp_path: Path, objective: dict[str, Any]) -> None:
    learners: list[Local] = []
    with before_step(lambda feed, valid: learners.append(feed.learner)):
        first, *_, last = run(tmp_path, objective, train__steps=60)
    learner = learners[-1]
    assert (first["groups"], first["dropped"], first["reward_mean"], first["kl_ref"]) == (4, 0, None, None)
    assert first["objective"]["implicit_margin"] == pytest.approx(0, abs=RESPONSE_ROUNDING)
    assert last["objective"]["ordered_share"] > 0.9
    assert last["loss"] < 0.6 * first["loss"]
    with Store.open(tmp_path / "pairs.db", read_only=True) as store:
        batch = collate([learner.encoder.encode(s) for s in store.samples()], 0)
    now, start = learner.logp(batch).sum(1), learner.logp(batch, "reference").sum(1)
    ratio = (now - start).view(-1, 2).mean(0)  # of chosen and rejected, as they stand in the file
    assert ratio[0] > ratio[1] + 1  # nats; h = 1/(2β) = 1.7 is where IPO ends


def test_a_response_that_cannot_be_used_takes_the_other_one_along(tmp_path: Path) -> None:
    """Of 12 groups: in one the loser of a pair is too long; in one, a record of the only pair is damaged."""
    with Store.open(tmp_path / "pairs.db") as store:
        for g in range(12):
            long = "2" * (20 if g == 0 else 2)
            ids = store.append(Sample(f"{100 + g}>", r) for r in ("1", long, "3", "4"))
            store.add_pairs([Pair(ids[0], ids[1]), Pair(ids[2], ids[3])])
            if g == 0:
                store.add_pairs([Pair(ids[0], ids[2])])
        [a, b] = store.append(Sample("1>", r) for r in "12")
        store.add_pairs([Pair(a, b)])
        store.tables.run("UPDATE samples SET response = 'x' WHERE id = ?", [b])
    changes = {"train__groups": 13, "train__max_length": 12, "data": {"group_size": None}}
    [found] = run(tmp_path, train__steps=1, **changes)
    both = {"too long": 1, "damaged": 1}
    assert found["dropped_reasons"] == {**both, "the other response of its pair was dropped": 1}
    assert found["groups"] == 12
    assert found["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_an_episode_is_one_response_of_a_pair(tmp_path: Path) -> None:
    """Both rows of it are trained on; where one can't be used the pair is gone, and with it the group."""
    policy = Policy.load(tiny(tmp_path).policy)

    def row(text: str, episode: str | None, later: bool = False) -> Sample:
        s = policy.encode(Sample("100>", text, prompt_id="p"))
        return s.replace(episode=episode, context_tokens=s.tokens[~s.action] if later else None)

    with Store.open(tmp_path / "pairs.db") as store:
        ids = store.append([row("1", "e"), row("2", "e", later=True), row("3", None)])
        # The second joins the episode with itself.
        store.add_pairs([Pair(ids[1], ids[2]), Pair(ids[0], ids[1])])
    [found] = run(tmp_path, train__groups=1, train__steps=1)
    assert (found["tokens"], found["loss"]) == (6, pytest.approx(0.6931, abs=1e-3))


def test_a_pair_of_two_prompts_is_passed_over(tmp_path: Path) -> None:
    """Though the step draws both."""
    step = {"train__groups": 12, "train__steps": 1}
    [alone] = run(tmp_path, name="alone", **step)
    with Store.open(tmp_path / "pairs.db") as store:
        store.add_pairs([Pair(i, i + 6) for i in range(1, 60)])  # 6 rows a prompt
    [found] = run(tmp_path, **step)
    assert (found["loss"], found["grad_norm"], found["dropped"]) == (alone["loss"], alone["grad_norm"], 0)


def test_held_out_groups_need_no_pairs(tmp_path: Path) -> None:
    """½ Var(R) at the start is that of the rewards 0, 1, 0, 1."""
    with Store.open(tmp_path / "held.db") as store:
        store.append(Sample(f"20{g}>", str(i), reward=float(i % 2)) for g in range(3) for i in range(4))
    start, *_ = run(tmp_path, data={"eval_store": str(tmp_path / "held.db")}, evaluate__beta=0.2)
    assert (start["eval_groups"], start["eval_dropped"]) == (3, 0)
    assert start["eval_consistency"] == pytest.approx(0.5 / 3, rel=1e-6)


def refused(folder: Path, *objective: dict[str, Any], **changes: Any) -> str:
    """What a run says before a model is loaded."""
    made = config(folder, *objective, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agro.train.trainer.Policy.load", None)
        with pytest.raises(Refused) as caught:
            Trainer(made, folder / "run").run()
    assert not (folder / "run").exists()
    return str(caught.value)


def test_a_store_without_pairs(tmp_path: Path) -> None:
    fill_store(tmp_path / "pairs.db", groups=2)
    said = refused(tmp_path)
    assert f"0 of 8 samples in {tmp_path / 'pairs.db'} " in said
    assert "(for example: sample 1 (prompt " in said
    assert "agro import" in said
    assert "prompt, chosen and rejected" in said


def test_pairs_that_the_rules_leave_out(tmp_path: Path) -> None:
    fill_store(tmp_path / "pairs.db", groups=1)
    assert "0 of 4 samples in " in refused(tmp_path, data={"sources": ["someone"]})
    with Store.open(tmp_path / "pairs.db") as store:
        import_files(store, [preferences(tmp_path)])
    excluded = "36 pairs, but of samples that data.roles, data.sources and data.min_reward exclude"
    assert excluded in refused(tmp_path, data={"sources": ["someone"]})
    gap = {"name": "pair_consistency", "beta": 0.3, "gap": "reward"}
    said = refused(tmp_path, gap, data={"sources": ["file:preferences.jsonl"]})
    assert "needs reward: 0 of 72 rows have it" in said


def test_pairs_are_counted_that_can_be_drawn(tmp_path: Path) -> None:
    """Where rewards are needed those of two scored responses, and never one of two prompts."""
    with Store.open(tmp_path / "pairs.db") as store:
        a, b, c, d = store.append(
            Sample(prompt, "1", reward)
            for prompt, reward in (("p", 1.0), ("p", 0.0), ("p", None), ("q", 1.0))
        )
        store.add_pairs([Pair(a, b), Pair(a, c), Pair(a, d)])
        gap = {"name": "pair_consistency", "beta": 0.3, "singletons": "drop"}
        assert check_store(Phase("", config(tmp_path, gap), 0, 1), store)[0] == "1 of 3 pairs aren't drawn"
        notes = check_store(Phase("", config(tmp_path, gap | {"gap": "reward"}), 0, 1), store)
    assert notes[:2] == ["1 of 4 samples have no reward and aren't drawn", "2 of 3 pairs aren't drawn"]
    assert notes[2].startswith("1 of 2 groups don't have pairs ")
    assert len(notes) == 3


def test_groups_without_a_pair_are_refused_or_dropped(tmp_path: Path) -> None:
    fill_store(tmp_path / "pairs.db", groups=1)
    with Store.open(tmp_path / "pairs.db") as store:
        import_files(store, [preferences(tmp_path)], mapping=None)
        store.append([Sample("000>", "1", prompt_id="lone")])
    said = refused(tmp_path)
    assert "objective dpo needs pairs " in said
    assert f"12 of 13 groups in {tmp_path / 'pairs.db'} " in said
    assert "(for example: lone)" in said
    rows = run(tmp_path, BOTH[0] | {"singletons": "drop"}, train__steps=4)
    assert all(m["groups"] == 4 for m in rows)


def test_votes_that_are_not_known(tmp_path: Path) -> None:
    votes = {"name": "dpo", "beta": 0.3, "votes": "mean"}
    said = refused(tmp_path, votes)
    assert "needs the votes of each pair: 0 of 36 pairs have it" in said
    assert "(for example: sample 1 over sample 2; sample 3 over sample 4; sample 5 over sample 6)" in said
    with Store.open(tmp_path / "voted.db") as store:
        import_files(store, [preferences(tmp_path, votes_chosen=4, votes_rejected=1)])
    assert len(run(tmp_path, votes, data={"store": str(tmp_path / "voted.db")}, train__steps=2)) == 2


def test_a_damaged_judgment_is_refused(tmp_path: Path) -> None:
    config(tmp_path)
    with Store.open(tmp_path / "pairs.db") as store:
        store.tables.run("UPDATE pairs SET winner = loser, loser = winner WHERE rowid = 2")
    assert "1 pair not as written: pair 2" in refused(tmp_path)


def test_a_dry_run_counts_what_a_draw_takes(tmp_path: Path) -> None:
    """4 of the 6 responses of a group, which are two of its three pairs, at 4 prompts a step."""
    plan = Trainer(config(tmp_path, data={"group_size": 5})).plan()
    assert plan["phases"][0]["responses_trained"] == 8 * 4 * 4


def test_a_store_of_ties(tmp_path: Path) -> None:
    """Before ties were told from wins, the loss of `dpo` fell from log 2 to 4.6e-6 on four of them."""
    tied = preferences(tmp_path, groups=4, each=1, votes_chosen=2, votes_rejected=2)
    with Store.open(tmp_path / "pairs.db") as store:
        report = import_files(store, [tied])
        assert (report.samples, report.pairs, report.ties) == (8, 0, 4)
        assert "ties: 4 judgments with equal votes" in str(report)
    said = refused(tmp_path)
    assert "the votes of all 4 judgments in " in said
    assert 'votes = "mean"' in said
    with Store.open(tmp_path / "pairs.db") as store:
        assert check_store(Phase("", config(tmp_path, BOTH[0] | {"votes": "mean"}), 0, 1), store) == []
        import_files(store, [preferences(tmp_path, groups=5, each=1)])
        notes = check_store(Phase("", config(tmp_path), 0, 1), store)
    assert notes == ["4 of 9 judgments have equal votes: they have no winner and aren't drawn"]
