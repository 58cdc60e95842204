"""The page: self-contained, everything escaped, unknown said as unknown."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from made_up_run import CONFIG, configure, rewrite, write_run
from made_up_run import rows as made_up_rows
from writing import write_rows

from agro.errors import Refused
from agro.io.numbers import duration
from agro.pages.run import report
from agro.pages.run.page import panels
from agro.runs.rundata import Outcome, load_run
from agro.store import Store
from agro.types import Sample

RUN = "0123456789abcdef"  # of the made-up configuration
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Reader(HTMLParser):
    """Checks that every element is closed; gathers tags, attributes and the text between."""

    def __init__(self, text):
        super().__init__()
        self.source = text
        self.open, self.tags, self.attributes, self.texts = [], set(), [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join("".join(f" {t}" for t in self.texts).split())


def read(folder):
    path = report(folder)
    assert path == folder / "report.html"
    return Reader(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The page of the made-up run as it is, which others are compared with."""
    return read(write_run(tmp_path_factory.mktemp("plain") / "demo"))


def test_the_page_of_a_run(plain):
    page, rows = plain, list(made_up_rows())
    first, last = rows[0]["eval_reward"], rows[220]["eval_reward"]
    assert f"Held-out reward went from {first:.3f} to {last:.3f} ." in page.text
    assert "A new model (3 layers of 96) was trained for 220 steps in 3 min 18 s." in page.text
    before, after, se = rows[60]["eval_reward"], rows[180]["eval_reward"], rows[60]["eval_reward_se"]
    assert f"agro beta = 0.01 fresh samples 120 {before:.3f} ± {se:.3f} {after:.3f}" in page.text
    assert f"{after - before:+.3f}" in page.text
    assert f"{after - before:+.3f} ±" not in page.text  # as if the prompts were others
    for title in (
        "KL to the reference",
        "Gradient norm",
        "Length over steps",
        "Truncated responses",
        "Sampler and trainer",
        "Staleness",
    ):
        assert title in page.text
    assert f"{sum(r.get('groups_equal', 0) for r in rows):,} of 3,520" in page.text
    assert '"beta": 0.01' in page.text  # the configuration
    assert page.text.count("not measured") == 0
    assert "Groups sampled again" not in page.text  # of which there were none
    assert "Rewards" not in page.text  # there is no store


def test_the_page_asks_for_nothing_and_runs_nothing(plain):
    page, text = plain, plain.source
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    assert all(not name.startswith("on") for name, _ in page.attributes)
    assert all(
        value.startswith("#") for name, value in page.attributes if name in ("href", "xlink:href", "src")
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    assert ("content", policy) in page.attributes
    assert "prefers-color-scheme: dark" in text
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {v[1:] for n, v in page.attributes if n == "xlink:href"} <= set(ids)


def test_what_was_not_measured_is_said(run_folder):
    write_rows(run_folder / "metrics.jsonl", [{"step": 1, "phase": "sft"}, {"step": 2, "phase": "onpolicy"}])
    page = read(run_folder)
    assert "No reward was measured." in page.text
    # phases, material, counts; what has nothing to show is left out
    assert page.text.count("not measured") == 3 * 2 + 3 + 8
    assert "<svg" not in page.source
    assert "How was it optimized?" not in page.text
    assert "trained for 2 steps of 220." in page.text
    assert "sft from the store 1 of 60" in page.text


def test_a_torn_line_is_told(bare_folder):
    assert "incomplete" not in read(bare_folder).text
    with (bare_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')
    assert "The last line of metrics.jsonl is incomplete" in read(bare_folder).text


def test_an_evaluation_before_the_end_of_a_phase_names_its_step(run_folder):
    rewrite(run_folder, lambda row: row if row["step"] <= 205 else None)  # killed
    assert "at step 200" in read(run_folder).text


def test_what_a_page_names_is_escaped(run_folder):
    evil = "<script>alert(1)</script>\"'&\ud800"
    phase = {"name": evil, "objective": {"name": "sft", "<i>": "<u>"}}
    phases = [phase, *CONFIG["phases"][1:]]
    configure(run_folder, policy={"model": evil}, phases=phases, versions={"<b>": "<s>"})
    path = run_folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"sft"', json.dumps(evil.replace("\ud800", ""))))
    with Store.open(run_folder / "store.db") as store:
        store.draws.record(RUN, 1, store.append([Sample(evil, evil, reward=1.0, source=evil)]))
    found = {"prompt_id": evil, "prompt": evil, "response": evil, "reward": 1.0, "answer": evil}
    found["observations"] = [evil]
    write_rows(run_folder / "held_out.jsonl", [{"step": 220, "responses": [found]}])
    page = read(run_folder)
    assert not page.tags & {"u", "s"}
    # Of the page itself: the script that shows responses, and their data.
    assert page.source.count("<script") == 2
    assert '"<i>": "<u>"' in page.text
    # model, source, prompt, response and answer
    assert page.text.count("<script>alert(1)</script>\"'&\\ud800") >= 5


def test_a_store_that_is_elsewhere_is_said(bare_folder):
    assert f"There is no store at {bare_folder / 'store.db'}." in read(bare_folder).text


def test_matplotlib_waits_until_a_figure_is_drawn():
    code = "import sys, agro, agro.pages.run; assert not {'matplotlib', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.25 s"), (59.4, "59.4 s"), (60, "1 min 0 s"), (3700, "1 h 1 min")]
)
def test_times(seconds, text):
    assert duration(seconds) == text


HELD_OUT = ("eval_reward", "eval_reward_se", "eval_n", "eval_unscored", "eval_kl_ref")


def test_a_run_without_held_out_prompts(run_folder):
    rewrite(run_folder, lambda row: row | dict.fromkeys(HELD_OUT))
    text = read(run_folder).text
    assert "Held-out reward went" not in text
    assert "Held-out: prompts that are not trained on" not in text
    assert text.count("not measured") == 3 * 3 + 2  # phases; responses, unscored


PUSHED = "How far the log-probs of servers were from the trainer's after new weights."
GRAY = "Gray: KL divergence of a policy that writes only the best of the stored responses."
LOG_RATIOS = {"log_ratio_best": 0.5, "log_ratio_worst": -1.0, "ratio_mean": 0.634, "kl_of_best": 1.28}
OF_LOG = (
    *("Log-ratio of the best and worst responses", "best of store"),
    GRAY,
)
HELD_OUT_RATIOS = {
    "eval_log_ratio_best": 0.4,
    "eval_log_ratio_best_se": 0.1,
    "eval_log_ratio_worst": -0.9,
    "eval_log_ratio_worst_se": 0.1,
}
HELD_OUT_LOSS = {
    "eval_consistency": 0.1,
    "eval_consistency_se": 0.01,
    "eval_consistency_fall": 0.02,
    "eval_groups": 33,
}
PARTS = ["right", "a <b> form that is long", "c", "d", "e", "f", "g"]
ZEROS = dict.fromkeys(["kl_ref", "eval_fresh_consistency", "regret", "truncated_share"], 0.0)
KL, SPREAD, REGRET = "KL to the reference", "KL spread to reward spread", "Estimated regret"
VARIANCE, CRITIC = "½ Var(R) of held-out responses", "Variance explained by the critic"


def each_100(row, values):
    return values if row["step"] % 100 == 0 else {}


@pytest.mark.parametrize(
    ("change", "said", "absent"),
    [
        (lambda row: {"push_error": 2e-7}, ("after a push", PUSHED), ()),
        (
            lambda row: {"draft_accepted": {3: 0.5, 8: 1.0}.get(row["step"])},  # unknown elsewhere
            ("Draft tokens accepted",),
            (),
        ),
        (lambda row: {"objective": {"explained_variance": row["step"] / 1000}}, (CRITIC,), ()),
        (lambda row: LOG_RATIOS, OF_LOG, ("held-out best",)),
        (
            lambda row: LOG_RATIOS | each_100(row, HELD_OUT_RATIOS),
            (*OF_LOG[:2], "held-out best", "held-out worst"),
            (),
        ),
        (
            lambda row: {"reward_parts": dict.fromkeys(PARTS, row["step"] / 9)},
            ("Parts of the reward", "a <b> form that…", "1 more in metrics.jsonl."),
            (),
        ),
        (
            lambda row: each_100(row, HELD_OUT_LOSS),
            ("Held-out ½ Var(R)",),
            (),
        ),
        (lambda row: {"regret": 0.25 + row["step"]}, (REGRET,), (VARIANCE, SPREAD)),
        (
            lambda row: dict.fromkeys(
                ["eval_regret", "eval_fresh_consistency", "kl_to_reward_spread"], 0.25 + row["step"]
            ),
            (REGRET, VARIANCE, SPREAD),
            (),
        ),
        # 0 is a measurement: only charts of the course, the material and the health have to differ from it.
        # "Sampler and trainer" is judged by its first metric.
        (
            lambda row: (
                ZEROS | {"objective": {"explained_variance": 0.0}, "logp_diff_mean": 0.0, "push_error": 0.1}
            ),
            (VARIANCE, REGRET, CRITIC),
            ("Truncated responses", "Sampler and trainer"),
        ),
        (
            lambda row: dict.fromkeys(
                ["kl_ref", "logp_diff_mean", "logp_diff_max", "truncated_share", *HELD_OUT]
            ),
            (),
            ("Sampler and trainer", KL, "Reward against the distance from the reference."),
        ),
    ],
    ids=[
        *("pushed weights", "a draft model", "a critic", "log-ratios", "held-out log-ratios"),
        *("parts of the reward", "the held-out loss", "regret", "the optimum"),
        *("zeros", "a run on a log alone"),
    ],
)
def test_what_was_measured_is_shown_there_alone(run_folder, plain, change, said, absent):
    rewrite(run_folder, lambda row: row | change(row))
    text = read(run_folder).text
    assert [words for words in said if words in plain.text or words not in text] == []
    assert [words for words in absent if words in text] == []
    # Also where it is 0 at every step. The plain page has it, so that it can't stand in `said`.
    assert (KL in text) == (KL not in absent)


def test_a_run_of_one_phase_in_which_all_rewards_are_equal(run_folder):
    equal = {"phase": "train", "reward_mean": 1.0, "eval_reward": None}
    rewrite(run_folder, lambda row: row | equal if row["step"] <= 60 else None)
    configure(run_folder, phases=[])
    with Store.open(run_folder / "store.db") as store:
        rows = [Sample(f"p{i}", "r", reward=1.0, source="teacher", role="expert") for i in range(4)]
        store.draws.record(RUN, 1, store.append(rows))
    page = read(run_folder)
    assert "steps 1 to 1, mean 1" in page.text
    assert "teacher 4 all 4 1.000 unknown" in page.text


def test_what_went_wrong_is_counted_at_the_top(run_folder):
    def at(*steps):
        return lambda row: int(row["step"] in steps)

    skipped, rolled_back, failed = at(7, 9), at(80), at(3, 5, 8)
    rewrite(run_folder, lambda row: row | {"skipped": skipped(row), "rolled_back": rolled_back(row)})
    page = read(run_folder)
    assert "updates skipped: 2, rollbacks to a checkpoint: 1, rewards that failed: 1" in page.text
    assert ("href", "#problems") in page.attributes
    rewrite(run_folder, lambda row: row | {"skipped": 0, "rolled_back": 0, "rewards_failed": 0})
    assert "Problems: " not in read(run_folder).text
    rewrite(run_folder, lambda row: row | {"requests_failed": failed(row)})
    assert "Problems: requests to the engine that failed: 3" in read(run_folder).text


def test_captions_begin_with_what_is_shown(run_folder):
    values = dict.fromkeys(["log_ratio_best", "log_ratio_worst", "eval_log_ratio_best", "asked_again"], 0.5)
    rewrite(run_folder, lambda row: row | values | {"kl_of_best": row["step"] % 2})
    text = read(run_folder).text
    lowest = "Mean log π/π_ref of the stored responses with the lowest reward of their group."
    assert f"{lowest} Running mean over 5 steps. The best should rise above 0;" in text
    assert "on held-out groups." not in text
    run = load_run(run_folder)
    drawn = {panel.title: panel for panel in panels(run, "nearness") + panels(run, "material")}
    caption = drawn["KL to the reference"].caption
    assert caption.startswith("KL divergence of fresh responses from the reference.")
    assert "Gray: KL divergence of a policy that writes only the best" in caption
    assert {"sampled again", "all"} <= set(Reader(drawn["Groups sampled again"].figure).texts)


def test_the_best_model_is_named(bare_folder):
    (bare_folder / "best").mkdir()
    path = bare_folder / "best" / "best.json"
    measured = {"step": 40, "metric": "eval_reward", "eval_reward": 0.75, "eval_reward_se": 0.02}
    path.write_text(json.dumps(measured | {"eval_auc": 0.7}))
    assert "saved in best/ 0.750 ± 0.020 held-out reward, step 40" in read(bare_folder).text
    path.write_text(json.dumps(measured | {"metric": "eval_auc", "eval_auc": 0.7}))
    assert "saved in best/ 0.700 held-out AUC, step 40" in read(bare_folder).text
    for wrong, message in (
        ({"eval_reward": None}, "eval_reward: expected a number"),
        ({"metric": "x"}, "metric: "),
    ):
        path.write_text(json.dumps(measured | wrong))
        with pytest.raises(Refused, match=rf"best\.json: {message}"):
            report(bare_folder)


def test_the_best_measurement_is_said_and_marked(run_folder):
    """Rewards .2 at step 0, .9 at 100, .7 at the end; then ½ Var(R), which is better where lower."""
    given = {0: 0.2, 100: 0.9, 220: 0.7}

    def only(name):
        rewrite(run_folder, lambda row: row | {"eval_reward": None, name: given.get(row["step"])})

    only("eval_reward")
    text = read(run_folder).text
    assert "The best held-out reward was 0.900 at step 100; the end has 0.700" in text
    assert "The ring is the best measurement, at step 100." in text
    assert Outcome.of(load_run(run_folder)).text == "best eval_reward 0.900 at step 100; the end 0.700"
    only("eval_consistency")
    assert Outcome.of(load_run(run_folder)) is None


def test_averaged_weights_are_said(run_folder, plain):
    assert "moving average" not in plain.text
    configure(run_folder, train__weights_average=0.99)
    said = "an exponential moving average of the weights (train.weights_average = 0.99 in phase"
    assert said in read(run_folder).text


def test_epochs_are_said_while_they_are_the_steps(run_folder):
    configure(run_folder, epochs={"store": {"epochs": 2.5, "groups": 256, "steps": 40}})
    assert "epochs of store 2.5 passes over 256 stored groups, 40 steps" in read(run_folder).text
    configure(run_folder, epochs__store__steps=30)  # before the run was made longer
    assert "epochs of store" not in read(run_folder).text


def test_messages_without_text_are_shown_as_they_are(bare_folder):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add <b>"}]}
    prompt = [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "3"}]
    found = [{"prompt_id": "a", "prompt": prompt, "response": "four", "reward": 1.0}]
    found += [{"prompt_id": "b", "prompt": "y" * 2100, "response": "", "reward": 0.5}]
    write_rows(bare_folder / "held_out.jsonl", [{"step": 0, "responses": found}])
    text = read(bare_folder).text
    assert 'user: hi assistant: {"tool_calls": [{"name": "add <b>"}]} tool tool: 3 ' in text
    assert "reward 1 four" in text
    assert "… 100 more characters" in text
    assert "reward 0.5 empty" in text


def test_a_run_on_stored_responses_alone_shows_what_can_improve(run_folder):
    """Its training reward says which rows were drawn, so it has no curve without held-out rewards."""
    auc = {"eval_auc": 0.8, "eval_auc_se": 0.02, "eval_auc_groups": 30}
    rewrite(run_folder, lambda row: row | {"sampled_tokens": 0} | (auc if row["step"] % 100 == 0 else {}))
    assert "All responses were stored ones." not in read(run_folder).text
    rewrite(run_folder, lambda row: {k: v for k, v in row.items() if not k.startswith("eval_reward")})
    text = read(run_folder).text
    assert "All responses were stored ones." in text
    assert "Held-out ranking (AUC)" in text
    assert "Loss of the objective" in text
    assert "Training: mean reward" not in text


def test_a_kl_without_held_out_prompts_is_called_sampled(bare_folder):
    """At the responses of the policy to prompts of the store."""
    configure(bare_folder, data__eval_prompts=None)
    row = {"step": 1, "phase": "sft", "eval_kl_ref": 0.4, "eval_kl_ref_se": 0.1, "kl_ref": 0.4}
    write_rows(bare_folder / "metrics.jsonl", [row])
    text = read(bare_folder).text
    assert "KL at the end 0.400 nats per response, step 1" in text
    assert "held-out KL at the end" not in text


def test_steps_from_which_nothing_could_be_learned_are_shown_with_the_way_out(run_folder):
    """The page warns as the run did: after three steps in a row."""
    why = {4: "all rewards are 0", 5: "equal rewards within groups", 6: "equal rewards within groups"}
    fine = {"no_signal": None, "replay_missing": 0}
    rewrite(run_folder, lambda row: {k: v for k, v in row.items() if k != "no_signal"})
    assert "steps without a signal not measured" in read(run_folder).text
    rewrite(run_folder, lambda row: row | fine)
    assert "steps without a signal 0 of 220" in read(run_folder).text
    rewrite(run_folder, lambda row: row | {"no_signal": why.get(row["step"]), "replay_missing": 0})
    text = read(run_folder).text
    counted = "steps from which nothing could be learned: 3 of 220, equal rewards within groups"
    assert counted in text.split("More")[0]
    other_groups = "where other groups of the store have rewards that differ: data.spread = true"
    assert f"equal rewards within groups: {other_groups}" in text
    assert f"all rewards are 0: {other_groups}" in text
    assert "Otherwise check that the reward" in text
    rewrite(run_folder, lambda row: row | {"no_signal": why.get(row["step"]) if row["step"] != 5 else None})
    text = read(run_folder).text
    assert "steps without a signal 2 of 220" in text
    assert "nothing could be learned" not in text


def test_a_share_of_replay_that_was_not_met_is_shown(run_folder):
    rewrite(run_folder, lambda row: row | {"replay_missing": int(row["step"] in (1, 9))})
    text = read(run_folder).text
    assert "steps with less replay 2 of 221" in text
    assert "less of the store than data.replay" not in text
    rewrite(run_folder, lambda row: row | {"replay_missing": 8})
    assert "steps with less of the store than data.replay: 221 of 221" in read(run_folder).text
