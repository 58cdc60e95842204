"""Prompts that a run sets aside: how many, near-copies together, that none is trained on, and that they give
it a verdict. And responses of log, start and trained model to a few of them, which it keeps to be read."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from running import report_of
from tiny_runs import (
    by_someone,
    fill_store,
    interrupted,
    log_alone,
    metrics,
    run_tiny,
    tiny,
    weights,
    write_prompts,
)
from writing import write_rows

from agro.api import Trained, held_out_prompts
from agro.config import RunConfig
from agro.errors import Refused
from agro.pages.run.card import card
from agro.pages.run.page import page
from agro.pages.run.verdict import Verdict
from agro.rollout.prompts import load_prompts
from agro.runs.folder import SET_ASIDE
from agro.runs.rundata import load_run
from agro.runs.side_by_side import (
    HELD_OUT,
    LONGEST,
    Answer,
    SideBySide,
    best_of_log,
    first_responses,
    held_out_responses,
    place,
    records,
    response_parts,
    short_text,
)
from agro.store import Pair, Store, is_held_out
from agro.store.split import NEAR_COPIES, read_clusters
from agro.train.inputs import largest_share, within_budget
from agro.train.trainer import BaseTrainer
from agro.types import Sample, prompt_hash

BUDGET = {"hold_out": 0.1, "hold_out_most": 25}


def asking(folder: Path, count: int = 300, **changes: Any) -> RunConfig:
    """Fresh samples of so many prompts."""
    data = {"prompts": write_prompts(folder / "asked.jsonl", range(count)), **BUDGET}
    return tiny(folder, data=data, **{"train__steps": 4, **changes})


def learning(folder: Path, size: int = 2, **changes: Any) -> RunConfig:
    """A log of 250 prompts, without a reward."""
    data = log_alone(folder, by_someone(250, size, meta={"answer": "1"}), **BUDGET)
    return tiny(folder, data=data, **{"reward": {}, "train__steps": 2, **changes})


def answers_to(prompts: Iterable[str], **fields: Any) -> list[Sample]:
    """Two to each, of rewards 0 and 1."""
    return [Sample(text, str(i), reward=float(i), **fields) for text in prompts for i in range(2)]


def drawn_prompts(store: Path, run: Path) -> set[str]:
    with Store.open(store, read_only=True) as opened:
        ids = {row.sample for row in opened.draws.drawn(load_run(run).values["run"])}
        return {sample.prompt_id for sample in opened.samples(ids=ids)}


def asked(run: Path) -> set[str]:
    return {prompt.id for prompt in load_prompts(run / SET_ASIDE)}


@pytest.mark.parametrize("most", [1, 7, 60, 99])
def test_the_share_holds_out_as_many_as_allowed(most: int) -> None:
    """Without near-copies exactly so many; clusters of ten at least ten fewer, and whole ones."""
    ids = [f"p{i}" for i in range(100)]
    share, held = largest_share(ids, {}, most)
    assert held == most == sum(is_held_out(i, share) for i in ids)
    clusters = {i: f"p{int(i[1:]) // 10 * 10}" for i in ids}
    share, held = largest_share(ids, clusters, most)
    assert held == most // 10 * 10 == sum(is_held_out(clusters[i], share) for i in ids)


def test_fresh_prompts_are_set_aside_give_a_verdict_and_are_asked_again(tmp_path: Path, capsys) -> None:
    run = BaseTrainer(asking(tmp_path, train__steps=10), tmp_path / "run").run()
    said = capsys.readouterr().err
    assert "25 of 300 prompts are held out and never trained on" in said
    assert "answer 25 of the held-out prompts (RUN/set_aside.jsonl)" in said
    assert len(asked(run)) == 25
    drawn = drawn_prompts(run / "store.db", run)
    assert len(drawn) == 40  # 10 steps of 4
    assert drawn.isdisjoint(asked(run))
    assert (metrics(run)[0]["eval_n"], metrics(run)[-1]["eval_gain_n"]) == (25, 25)
    assert "on 25 held-out prompts" in Verdict.of(load_run(run)).sentence
    config = load_run(run).config
    assert (config.data.hold_out_most, 0 < config.data.hold_out < 0.2) == (None, True)
    rows = [json.loads(line) for line in (run / SET_ASIDE).read_text().splitlines()]
    assert all(row["answer"] == row["prompt"][2] for row in rows)  # of 123> it is 3
    assert {prompt.id for prompt in held_out_prompts(run, config)} == asked(run)
    assert held_out_prompts(tmp_path, config) == []
    assert Trained(run).evaluate(n=1)["prompts"] == 25


def test_a_resumed_run_and_one_that_repeats_it_set_the_same_aside(tmp_path: Path) -> None:
    whole, cut, again = (tmp_path / name for name in ("whole", "cut", "again"))
    BaseTrainer(asking(tmp_path), whole).run()
    interrupted(asking(tmp_path), cut, 2)
    BaseTrainer(asking(tmp_path), cut, resume=True).run()
    BaseTrainer(RunConfig.load(whole / "config.json"), again).run()
    for other in (cut, again):
        assert (other / SET_ASIDE).read_bytes() == (whole / SET_ASIDE).read_bytes()
        assert weights(other) == weights(whole)
        assert metrics(other)[-1]["eval_gain"] == metrics(whole)[-1]["eval_gain"]


def test_a_resumed_run_keeps_its_share_of_a_log_that_has_grown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    interrupted(learning(tmp_path), run, 1)
    before, share = (run / SET_ASIDE).read_bytes(), load_run(run).config.data.hold_out
    fill_store(tmp_path / "log.db", 900, 2)
    BaseTrainer(learning(tmp_path), run, resume=True).run()
    assert (run / SET_ASIDE).read_bytes() == before
    assert load_run(run).config.data.hold_out == share


def test_a_log_with_a_reward_has_its_prompts_answered(tmp_path: Path) -> None:
    """The reward reads `answer` of the stored records."""
    reward = tiny(tmp_path).reward.model_dump()
    run = BaseTrainer(learning(tmp_path, reward=reward), tmp_path / "run").run()
    assert len(asked(run)) == 25
    assert drawn_prompts(tmp_path / "log.db", run).isdisjoint(asked(run))
    last = metrics(run)[-1]
    assert (last["eval_gain_n"], last["eval_groups"]) == (25, 25)
    assert last["eval_kl_ref"] is not None
    assert Verdict.of(load_run(run)).to_json()["by"] == "reward"
    (tmp_path / "plain").mkdir()
    plain = log_alone(tmp_path / "plain", by_someone(250, 2), **BUDGET)  # without answers
    message = r"hold_out: 25 of 25 prompts can't be scored.* data.ask_held_out = false"
    with pytest.raises(Refused, match=message):
        BaseTrainer(tiny(tmp_path, data=plain), tmp_path / "refused").run()


def test_prompts_that_are_too_long_are_left_out(tmp_path: Path, capsys) -> None:
    """The context of 16 tokens leaves no room; of prompts to train on such a one would be refused."""
    long = learning(tmp_path, reward=tiny(tmp_path).reward.model_dump())
    with Store.open(tmp_path / "log.db") as store:
        store.append(answers_to([f"{i:015d}>" for i in range(250)], meta={"answer": "1"}))
    BaseTrainer(long, tmp_path / "run").run()
    said = capsys.readouterr().err
    valid = len(asked(tmp_path / "run"))
    assert 0 < valid < 25
    assert f"data.hold_out: {25 - valid} of 25 prompts are invalid" in said
    assert metrics(tmp_path / "run")[-1]["eval_gain_n"] == valid


def test_a_log_without_a_reward_ranks_and_names_the_prompts_to_ask(tmp_path: Path) -> None:
    run = BaseTrainer(learning(tmp_path), tmp_path / "run").run()
    last, verdict = metrics(run)[-1], Verdict.of(load_run(run))
    assert (last["eval_auc_groups"], last["eval_reward"], verdict.answer) == (25, None, "not measured")
    assert "ranks logged responses (AUC), which says nothing about what it writes" in verdict.sentence
    assert "compares the answers to the 25 held-out prompts that the run set aside" in verdict.sentence


def test_single_responses_are_set_aside_and_not_ranked(tmp_path: Path, capsys) -> None:
    single = {"objective__singletons": "pool", "train__groups": 8}
    run = BaseTrainer(learning(tmp_path, 1, **single), tmp_path / "run").run()
    assert "no held-out prompt has two scored responses" in capsys.readouterr().err
    assert metrics(run)[-1]["eval_auc"] is None
    assert len(asked(run)) == 25
    with pytest.raises(Refused, match=r"data.hold_out: .* two or more scored responses"):
        BaseTrainer(learning(tmp_path, 1, **single, evaluate__keep_best=True), tmp_path / "best").run()


def share_and_note(config: RunConfig, folder: Path) -> tuple[float, str]:
    found = within_budget(config, config.data.store or folder / "none.db", folder / "run", resume=False)
    return found.config.data.hold_out, " ".join(found.notes)


def test_where_none_are_held_out(tmp_path: Path) -> None:
    share, note = share_and_note(asking(tmp_path, 199), tmp_path)
    assert (share, "a share of 0.1 of 199 is fewer than 20" in note) == (0.0, True)
    assert share_and_note(asking(tmp_path, 200), tmp_path)[0] > 0
    held = write_prompts(tmp_path / "held.jsonl", range(900, 905))
    assert share_and_note(asking(tmp_path, data__eval_prompts=held), tmp_path) == (0.0, "")
    assert share_and_note(asking(tmp_path, data__hold_out=0.0), tmp_path) == (0.0, "")
    share, note = share_and_note(learning(tmp_path, train__groups=240), tmp_path)
    assert (share, "a step needs all groups" in note) == (0.0, True)
    assert share_and_note(learning(tmp_path, train__groups=225), tmp_path)[0] > 0
    share, note = share_and_note(learning(tmp_path, objective={"name": "sft"}), tmp_path)
    assert (share, "nothing else needs one" in note) == (0.0, True)


@pytest.mark.parametrize("count", [2, 5, 20, 60])
def test_of_few_pairs_a_prompt_is_held_out_or_a_line_says_why_not(tmp_path: Path, count: int, capsys) -> None:
    """By prompt: each has two judged pairs. The share that the line names holds out a prompt."""
    with Store.open(tmp_path / "pairs.db") as store:
        for i in range(count):
            ids = store.append(Sample(f"{i * 37:03d}>", answer) for answer in ("1", "2", "3"))
            store.add_pairs([Pair(ids[0], ids[1]), Pair(ids[2], ids[1])])
    data = {"store": str(tmp_path / "pairs.db"), "replay": 1.0, "group_size": 4, "hold_out": 0.1}
    objective = {"name": "dpo", "beta": 0.1, "singletons": "drop"}
    settings: dict[str, Any] = {"objective": objective, "reward": {}, "train__steps": 2, "train__groups": 1}
    config = tiny(tmp_path, **settings, data=data)
    for again in range(2):
        run = tmp_path / f"run {again}"
        BaseTrainer(config, run).run()
        said, aside = capsys.readouterr().err, asked(run) if (run / SET_ASIDE).exists() else set()
        held = len(aside)
        assert f"by their hashes {held} of {count} prompts are held out" in said
        assert aside.isdisjoint(drawn_prompts(tmp_path / "pairs.db", run))
        named = re.search(r"data.hold_out=(0\.\d+) holds out some", said)
        assert (named is None) == (held > 0)
        if named is None:
            break
        config = tiny(tmp_path, **settings, data=data | {"hold_out": float(named[1])})
    assert held > 0
    rated = "agro rate RUN shows a person the answers of both, blind, and says when it is decided."
    assert Verdict.of(load_run(run)).sentence.endswith(rated)


def test_near_copies_that_are_more_than_the_budget_aren_t_held_out(tmp_path: Path) -> None:
    texts = [f"{'57316420'[n]:0>{i + 1}}{n}>" for n in range(2) for i in range(150)]
    data = log_alone(tmp_path, answers_to(texts), near_copies=0.01, **BUDGET)
    share, note = share_and_note(tiny(tmp_path, data=data), tmp_path)
    assert (share, "too many of them are near-copies" in note) == (0.0, True)


def test_a_share_on_the_command_line_is_exact() -> None:
    """It takes the place of the recipe's bound, unless it has one of its own."""
    assert RunConfig.load("log").data.hold_out_most == 128
    exact = RunConfig.load("log", ["data.hold_out=0.3"]).data
    assert (exact.hold_out, exact.hold_out_most) == (0.3, None)
    bounded = RunConfig.load("log", ["data.hold_out=0.3", "data.hold_out_most=50"]).data
    assert (bounded.hold_out, bounded.hold_out_most) == (0.3, 50)
    assert RunConfig.load("sft").data.hold_out == 0


rng = random.Random(1)
QUESTIONS = ["".join(rng.choices("0123456789", k=4)) + ">" for _ in range(20)]
COPIES = 4


def copies(question: str) -> list[str]:
    """A letter in front of a colon is a label; the alphabet has none, so that digits stand in for letters."""
    return [f"{n}:{question}" for n in range(COPIES)]


def wide(folder: Path, **changes: Any) -> Any:
    new = {"alphabet": "0123456789>:", "hidden": 16, "layers": 1, "heads": 2, "context": 16}
    return tiny(folder, policy__new=new, **changes)


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    return str(path)


def of_near_copies(folder: Path) -> RunConfig:
    texts = [text for question in QUESTIONS for text in copies(question)]
    return wide(folder, data=log_alone(folder, answers_to(texts), hold_out=0.3), train__steps=4)


def test_a_log_s_near_copies_are_held_out_together(tmp_path: Path, capsys) -> None:
    run = BaseTrainer(of_near_copies(tmp_path), tmp_path / "run").run()
    held_out = {q for q in QUESTIONS if is_held_out(min(map(prompt_hash, copies(q))), 0.3)}
    held = len(held_out)
    said = capsys.readouterr().err
    assert "80 of 80 prompts are near-copies of others, in 20 clusters" in said
    assert f"{COPIES * held} stored groups are measured and not trained on, in {held} clusters of" in said
    drawn = drawn_prompts(tmp_path / "log.db", run)
    trained = {q for q in QUESTIONS if not drawn.isdisjoint(map(prompt_hash, copies(q)))}
    assert trained
    assert trained.isdisjoint(held_out)
    assert metrics(run)[-1]["eval_groups"] == COPIES * held


def test_a_resumed_run_splits_as_it_began(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(of_near_copies(tmp_path), folder, 2)
    before = read_clusters(folder)
    with Store.open(tmp_path / "log.db") as store:
        store.append(answers_to([f"{n}:{question}" for question in QUESTIONS for n in (9, 8)]))
    BaseTrainer(of_near_copies(tmp_path), folder, resume=True).run()
    assert read_clusters(folder) == before
    assert len(before or ()) == 80
    (folder / NEAR_COPIES).unlink()
    with pytest.raises(Refused, match=r"near_copies\.json: .* put it back"):
        BaseTrainer(of_near_copies(tmp_path), folder, resume=True).run()


def test_a_verdict_counts_clusters(tmp_path: Path) -> None:
    held = write(tmp_path / "held.jsonl", [text for question in QUESTIONS[:5] for text in copies(question)])
    asked = write(tmp_path / "asked.jsonl", QUESTIONS[10:])
    config = wide(tmp_path, data={"prompts": asked, "eval_prompts": held}, train__steps=2)
    run = BaseTrainer(config, tmp_path / "run").run()
    *_, row = metrics(run)
    assert (row["eval_gain_n"], row["eval_gain_clusters"]) == (20, 5)
    verdict = Verdict.of(load_run(run))
    assert "on 20 held-out prompts in 5 clusters of near-copies" in verdict.sentence
    assert verdict.to_json()["clusters"] == 5


def test_stored_samples_that_are_never_drawn_may_be_of_held_out_prompts(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db")  # of "100>" and so on, by "someone"
    held = write_prompts(tmp_path / "held.jsonl", range(100, 101))
    data = {"data__store": str(tmp_path / "log.db"), "data__replay": 0.5, "data__eval_prompts": held}
    run_tiny(tmp_path, data__sources=["policy"], train__steps=2, **data)
    with pytest.raises(Refused, match="1 of 1 held-out prompts are in the training data"):
        run_tiny(tmp_path, "other", data__sources=["policy", "someone"], **data)


def of_sixty_groups(folder: Path) -> RunConfig:
    log = log_alone(folder, by_someone(groups=60), group_size=4, hold_out=0.3)
    return tiny(folder, data=log, train__steps=4)


def side_by_side(run: Path) -> SideBySide | None:
    return SideBySide.of(run, RunConfig.load(run / "config.json"))


def answers(shown: SideBySide, side: str) -> list[Answer | None]:
    return [shown.answers(prompt)[side] for prompt in shown.prompts]


def sides(shown: SideBySide) -> tuple[str, ...]:
    """Those that some prompt has an answer of."""
    return tuple(side for side in ("log", "start", "trained") if any(answers(shown, side)))


@pytest.fixture(scope="module")
def run_on_a_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    BaseTrainer(of_sixty_groups(folder), folder / "run").run()
    return folder / "run"


def test_side_by_side_are_eight_held_out_prompts_by_a_hash_with_the_best_of_the_log(
    run_on_a_log: Path,
) -> None:
    shown = side_by_side(run_on_a_log)
    with Store.open(run_on_a_log.parent / "log.db", read_only=True) as store:
        held_out = sorted({s.prompt_id for s in store.samples() if is_held_out(s.prompt_id, 0.3)}, key=place)
    assert [prompt.prompt_id for prompt in shown.prompts] == held_out[:8]
    assert shown.about.startswith("8 held-out prompts, chosen by a hash")
    assert (shown.step, sides(shown)) == (4, ("log", "start", "trained"))
    assert answers(shown, "log") == [Answer("11", 1.0)] * 8  # the first of reward 1 in by_someone
    assert all(start and start.reward is None for start in answers(shown, "start"))
    assert answers(shown, "start") != answers(shown, "trained")


def test_side_by_side_is_on_the_page_in_the_card_on_the_terminal_and_in_json(run_on_a_log: Path) -> None:
    shown, run = side_by_side(run_on_a_log), load_run(run_on_a_log)
    text = " ".join(re.sub(r"<[^>]+>", " ", page(run)).replace("&gt;", ">").replace("&#39;", "'").split())
    written = str(card(run, run_on_a_log / "model"))
    assert shown.about in written
    kept = len(held_out_responses(run_on_a_log))
    assert f"One response to each of {kept} held-out prompts, chosen by a hash of their ids" in text
    assert "The log's is the best there, by reward or by preference." in text
    for prompt in shown.prompts[:4]:
        assert f"prompt: `{prompt.text}`" in written
        assert shown.answers(prompt)["trained"].response in written
    document = report_of("report", run_on_a_log)
    assert document["side_by_side"] == json.loads(json.dumps(shown.to_json()))
    [prompt, log, *_] = short_text(shown, 1, 80)
    assert (prompt, log) == (f"prompt   {shown.prompts[0].text}", "log      1: 11")


def test_side_by_side_with_a_reward_are_the_prompts_of_the_evaluation_with_its_values(tmp_path: Path) -> None:
    held = write_prompts(tmp_path / "held.jsonl", range(60, 100))
    BaseTrainer(tiny(tmp_path, data__eval_prompts=held, train__steps=2), tmp_path / "run").run()
    shown = side_by_side(tmp_path / "run")
    rewards = json.loads((tmp_path / "run" / "held_out_rewards.json").read_text())
    assert sides(shown) == ("start", "trained")
    for prompt in shown.prompts:
        assert shown.answers(prompt)["start"].reward == rewards["start"][prompt.prompt_id]
        assert shown.answers(prompt)["trained"].reward == rewards["rewards"][prompt.prompt_id]


def test_side_by_side_without_held_out_prompts_says_that_they_were_trained_on(tmp_path: Path) -> None:
    log = log_alone(tmp_path)
    BaseTrainer(tiny(tmp_path, data=log, train__steps=1), tmp_path / "run").run()
    assert "prompts of those that were trained on" in side_by_side(tmp_path / "run").about
    BaseTrainer(tiny(tmp_path, train__steps=1), tmp_path / "fresh").run()
    assert side_by_side(tmp_path / "fresh") is None  # the page has its own responses
    unshown = tiny(tmp_path, data=log, train__steps=1, evaluate__side_by_side=0, evaluate__kl_samples=0)
    BaseTrainer(unshown, tmp_path / "none").run()
    assert side_by_side(tmp_path / "none") is None


def test_a_resumed_run_keeps_its_responses_and_forgets_those_of_a_lost_step(
    tmp_path: Path, run_on_a_log: Path
) -> None:
    folder = tmp_path / "run"
    interrupted(of_sixty_groups(tmp_path), folder, 3)
    with (folder / HELD_OUT).open("a") as file:
        file.write('{"step": 4, "responses": []}\n{"step": 4, "resp')
    BaseTrainer(of_sixty_groups(tmp_path), folder, resume=True).run()
    assert (folder / HELD_OUT).read_bytes() == (run_on_a_log / HELD_OUT).read_bytes()


def test_a_phase_on_a_log_after_one_without_shows_no_start(tmp_path: Path) -> None:
    """The log's responses are the first line whenever that is."""
    log = log_alone(tmp_path, by_someone(groups=60))
    fresh = {"prompts": tiny(tmp_path).data.prompts, "replay": 0.0}
    phases = [
        {"name": "a", "train": {"steps": 1}, "data": {"replay": 0.0}},
        {"name": "b", "train": {"steps": 1}, "data": {"replay": 1.0}},
    ]
    BaseTrainer(tiny(tmp_path, data=log | fresh, phases=phases), tmp_path / "run").run()
    shown = side_by_side(tmp_path / "run")
    assert (shown.step, sides(shown)) == (2, ("log", "trained"))
    assert "answered. The trained model's responses are of step 2. The log's" in shown.about


def test_of_a_log_of_pairs_the_preferred_response_is_the_best(tmp_path: Path) -> None:
    with Store.open(tmp_path / "log.db") as store:
        first, second, third = store.append(Sample("p", text, prompt_id="p") for text in ("a", "b", "c"))
        store.add_pairs([Pair(second, first), Pair(second, third), Pair(third, first)])
        store.append([Sample("p", "own", reward=9.0, prompt_id="p")], run="this")
        assert [[s.response for s in parts] for parts in best_of_log(store, "this", ["p", "q"])] == [["b"]]
        assert [[s.response for s in parts] for parts in best_of_log(store, "another", ["p"])] == [["own"]]


def test_the_answer_of_an_episode_is_all_that_follows_its_prompt() -> None:
    parts = [Sample("p", text, reward=1.0, meta={"index": i}) for i, text in ((1, "no"), (0, "a"), (0, "b"))]
    [record] = records(first_responses(parts))
    assert (record["response"], record["reward"], record["prompt"]) == ("ab", 1.0, "p")


def test_an_environments_turns_keep_their_places_as_control_characters_become_escapes() -> None:
    samples = [
        Sample("p", "a\x07see b", reward=1.0, meta={"observations": [[2, 5]]}),
        Sample("p", "\x07c", reward=2.0, meta={"observations": [[0, 1]]}),
        Sample("p", "x" * LONGEST + "y", reward=3.0, meta={"observations": [[1, LONGEST + 1]]}),
    ]
    parts = Answer.of(samples).parts
    assert (parts[:5], parts[6]) == (["a\\x07", "see", " b", "\\x07", "cx"], " … 10 more characters")
    assert response_parts("abc", [[1, 2]]) == ["a", "b", "c"]
    for foreign in (None, 3, "text", [[2, 1]], [[1]], [["a", "b"]], [[-1, 2]]):
        assert response_parts("abc", foreign) == ["abc"]


def test_responses_are_harmless_and_bounded(tmp_path: Path) -> None:
    """As they are written, and where somebody changed the file; a prompt is as it was asked."""
    nasty = "\x1b[2J<script>`|" + "x" * 9000
    found = records([[Sample("p\x07", nasty)]])
    assert found[0]["response"].startswith("\\x1b[2J<script>")
    assert len(found[0]["response"]) < LONGEST + 40
    found.append(found[0] | {"prompt_id": "q", "response": "\x1b[2J"})
    write_rows(tmp_path / HELD_OUT, [{"step": 0, "responses": found}])
    shown = SideBySide.of(tmp_path, RunConfig())
    assert {prompt.text for prompt in shown.prompts} == {"p\\x07"}
    assert Answer("\\x1b[2J") in answers(shown, "start")


def test_the_page_escapes_what_a_model_wrote(run_on_a_log: Path, tmp_path: Path) -> None:
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(run_on_a_log / name, tmp_path)
    said = {0: "<script>alert(1)</script>", 4: "`x` | y"}
    asked = {"prompt_id": "i", "prompt": "<b>p</b>", "reward": None}
    write_rows(
        tmp_path / HELD_OUT,
        [{"step": step, "responses": [{**asked, "response": r}]} for step, r in said.items()],
    )
    assert "<script>alert" not in page(load_run(tmp_path))
    assert "``x` | y``" in str(card(load_run(tmp_path), tmp_path)).replace("`` ", "``").replace(" ``", "``")
