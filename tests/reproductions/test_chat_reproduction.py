"""reproductions/chat: its questions, its log, its configurations and its page. No model is loaded."""

from __future__ import annotations

import json
import random

import pytest

from agro.api.race import key_values
from agro.config import RunConfig
from agro.errors import Refused
from agro.train.check import check_config
from agro.types import Sample
from reproductions import harness
from reproductions.chat import logs, model, race, run, tasks


def words(records) -> set[str]:
    """Of the last messages and the answers, without those that all questions of a kind have."""
    found = [set(f"{r['prompt'][-1]['content']} {r['answer']}".replace(",", "").split()) for r in records]
    return set().union(*found)


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_no_word_or_number_of_a_held_out_question_is_trained_on(kind):
    trained, held_out = (
        [r for r in tasks.make(60, held_out=part) if r["kind"] == kind] for part in (False, True)
    )
    assert len(trained) >= 57
    assert len(held_out) >= 29
    common = words(trained) & words(held_out)
    asked = "What is the of opposite past tense last second word this list: Which number larger or"
    assert {w.strip("?") for w in common} <= set(asked.split())


def test_questions_have_their_answers():
    by_kind = {
        kind: next(r for r in tasks.make(1, held_out=False) if r["kind"] == kind) for kind in tasks.KINDS
    }
    listed = by_kind["last"]["prompt"][-1]["content"].rpartition(": ")[2].rstrip("?").split(", ")
    assert (len(listed), by_kind["last"]["answer"]) == (4, listed[-1])
    listed = by_kind["second"]["prompt"][-1]["content"].rpartition(": ")[2].rstrip("?").split(", ")
    assert (len(listed), by_kind["second"]["answer"]) == (3, listed[1])
    a, b = by_kind["larger"]["prompt"][-1]["content"].rpartition(", ")[2].rstrip("?").split(" or ")
    assert by_kind["larger"]["answer"] == max(
        a, b
    )  # two digits each, so that text is compared as numbers are
    assert [m["role"] for m in by_kind["past"]["prompt"]] == ["system", "user", "assistant", "user"]


def test_words_occur_once():
    opposites = [w for pair in tasks.pairs(tasks.OPPOSITES) for w in pair]
    assert len(opposites) == len(set(opposites))
    verbs = [verb for verb, _ in tasks.pairs(tasks.PAST)]
    assert len(verbs) == len(set(verbs))
    assert len(tasks.NOUNS.split()) == len(set(tasks.NOUNS.split()))


def test_a_response_is_right_as_the_reward_has_it():
    assert logs.right(Sample("hot", " cold\n", meta={"answer": "cold"})) == 1.0
    assert logs.right(Sample("hot", "cold.", meta={"answer": "cold"})) == 0.0


def test_a_tenth_of_the_thumbs_is_wrong():
    noise = random.Random(1)
    ups = sum(logs.thumb(0.0, noise) == "up" for _ in range(10_000))
    assert ups == pytest.approx(1000, abs=90)  # three standard deviations of a binomial: 30 each


def test_mixed_groups_are_those_with_unequal_rewards():
    assert logs.mixed([0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0]) == 1


@pytest.mark.parametrize(("job", "method"), [(job, method) for job, of in run.JOBS.items() for method in of])
def test_the_methods_of_a_job_have_the_same_rates_and_updates(job, method, tmp_path):
    row = run.Row(job, method, rate=9e-3, steps=12, seed=3)
    config = RunConfig.of(run.settings(row, tmp_path, logs.Files(tmp_path)), "test")
    check_config(config)
    assert (config.train.lr, config.train.steps, config.train.schedule) == (9e-3, 12, "linear")
    assert (config.train.groups, config.train.seed) == (8 if job == "fresh" else 32, 3)  # prompts an update
    assert config.policy.lora.targets[0] == "20.self_attn.q_proj"
    assert config.data.spread == (0.1 if job == "log" and method == "recipe" else False)
    assert config.data.hold_out == 0


def test_a_text_is_put_between_its_marks(tmp_path):
    readme = tmp_path / "README.md"
    begin, end = "<!-- begin: made by run.py --record -->", "<!-- end: made by run.py --record -->"
    readme.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    harness.put(readme, "new")
    assert readme.read_text() == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"model\.py writes"):
        run.main(["--model", str(tmp_path)])
    with pytest.raises(Refused, match="expected the unpacked wheel"):
        model.find(tmp_path)


def test_a_run_that_is_done_isn_t_made_again(tmp_path):
    row = run.Row("log", "recipe", changes=("data.spread=true",))
    (tmp_path / row.folder).mkdir()
    (tmp_path / row.folder / "measured.json").write_text(json.dumps({**row.keys, "reward": 0.5}))
    run.play(row, tmp_path, tmp_path)
    assert [made["reward"] for made in run.finished(tmp_path)] == [0.5]
    assert row.folder != run.Row("log", "recipe").folder
    assert run.Row.of(json.loads(json.dumps(row.keys))) == row


def test_recorded_runs_that_aren_t_asked_for_count_where_the_log_is_the_same(tmp_path):
    recorded = json.loads((run.HERE / "result.json").read_text())
    files = logs.Files(tmp_path / "data")
    files.folder.mkdir()
    files.facts.write_text(json.dumps(recorded["data"]))
    asked = run.Row.of(recorded["runs"][-1])
    run.restore(tmp_path, {asked})
    assert run.finished(tmp_path) == recorded["runs"][:-1]
    files.facts.write_text(json.dumps({**recorded["data"], "mixed_groups": 1}))
    with pytest.raises(Refused, match="had another log: mixed_groups was 107, is 1"):
        run.restore(tmp_path, {asked})


def test_a_race_has_the_settings_of_all_runs(tmp_path):
    """As a user types them: each is one KEY=VALUE, and read again it is the same."""
    (tmp_path / "log.db").touch()
    given = race.values("thumbs", tmp_path, tmp_path, logs.Files(tmp_path / "data"))
    config = RunConfig.load("feedback", list(key_values(given)))
    lora = config.policy.lora
    assert (lora.rank, list(lora.targets)) == (8, run.COMMON["policy"]["lora"]["targets"])
    assert (config.train.groups, config.train.lr, config.data.eval_prompts) == (
        32,
        3e-3,
        str(tmp_path / "data" / "held_out.jsonl"),
    )
