"""The page: self-contained, everything escaped, unknown said as unknown."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from agro.errors import Refused
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


def test_the_page_of_a_run(run_folder):
    page = read(run_folder)
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
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
    assert "Groups asked again" not in page.text  # of which there were none
    assert "Rewards" not in page.text  # there is no store


def test_the_page_asks_for_nothing_and_runs_nothing(run_folder):
    page = read(run_folder)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    text = (run_folder / "report.html").read_text()
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
    (run_folder / "metrics.jsonl").write_text(
        '{"step": 1, "phase": "sft"}\n{"step": 2, "phase": "onpolicy"}\n'
    )
    page = read(run_folder)
    assert "No reward was measured." in page.text
    # phases, material, counts; what has nothing to show is left out
    assert page.text.count("not measured") == 3 * 2 + 3 + 8
    assert "<svg" not in (run_folder / "report.html").read_text()
    assert "How was it optimized?" not in page.text
    assert "trained for 2 steps of 220." in page.text
    assert "sft from the store 1 of 60" in page.text


def test_a_torn_line_is_told(bare_folder):
    assert "incomplete" not in read(bare_folder).text
    with (bare_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')
    assert "The last line of metrics.jsonl is incomplete" in read(bare_folder).text


def test_an_evaluation_before_the_end_of_a_phase_names_its_step(run_folder):
    path = run_folder / "metrics.jsonl"
    path.write_text(
        "".join(f"{line}\n" for line in path.read_text().splitlines()[:206])
    )  # killed at step 205
    assert "at step 200" in read(run_folder).text


def test_what_a_page_names_is_escaped(run_folder):
    evil = "<script>alert(1)</script>\"'&\ud800"
    config = json.loads((run_folder / "config.json").read_text())
    config["policy"] = {"model": evil}
    config["phases"][0] = {"name": evil, "objective": {"name": "sft", "<i>": "<u>"}}
    config["versions"] = {"<b>": "<s>"}
    (run_folder / "config.json").write_text(json.dumps(config))
    path = run_folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"sft"', json.dumps(evil.replace("\ud800", ""))))
    with Store.open(run_folder / "store.db") as store:
        store.draws.record(RUN, 1, store.append([Sample(evil, evil, reward=1.0, source=evil)]))
    found = {"prompt": evil, "response": evil, "reward": 1.0, "answer": evil, "observations": [evil]}
    (run_folder / "held_out.jsonl").write_text(json.dumps({"step": 220, "responses": [found]}) + "\n")
    page = read(run_folder)
    assert not page.tags & {"u", "s"}
    # Of the page itself: the script that shows responses, and their data.
    assert (run_folder / "report.html").read_text().count("<script") == 2
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
    from agro.io.numbers import duration

    assert duration(seconds) == text


def rewrite(folder, change, phases=None):
    """The made-up run with other rows, and other phases if given."""
    path = folder / "metrics.jsonl"
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row is not None))
    if phases is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"phases": phases}))


HELD_OUT = ("eval_reward", "eval_reward_se", "eval_n", "eval_unscored", "eval_kl_ref")


def test_a_run_without_held_out_prompts(run_folder):
    rewrite(run_folder, lambda row: row | dict.fromkeys(HELD_OUT))
    text = read(run_folder).text
    assert "Held-out reward went" not in text
    assert "Held-out: prompts that are not trained on" not in text
    assert text.count("not measured") == 3 * 3 + 2  # phases; responses, unscored


PUSHED = "How far the log-probs of servers were from the trainer's after new weights."
GRAY = "Gray: KL divergence of a policy that writes only the best of the stored responses."
CLIPPED = "Clipped at 100% of the steps. The learning rate alone decides"
LOG_RATIOS = {"log_ratio_best": 0.5, "log_ratio_worst": -1.0, "ratio_mean": 0.634, "kl_of_best": 1.28}
OF_LOG = (
    *("Log-ratio of the best and worst responses", "stored responses ended at 0.634"),
    *(GRAY, "best of store"),
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: {"push_error": 2e-7}, ("after a push", PUSHED)),
        (
            lambda row: {"draft_accepted": {3: 0.5, 8: 1.0}.get(row["step"])},  # unknown elsewhere
            ("Draft tokens accepted",),
        ),
        (
            lambda row: {"objective": {"explained_variance": row["step"] / 1000}},
            ("Variance explained by the critic",),
        ),
        (lambda row: LOG_RATIOS, OF_LOG),
        (
            lambda row: {"grad_norm": 3.0, "grad_norm_clipped": 1.0} if row["step"] else {},
            ("The learning rate alone", CLIPPED, "(median norm 3)"),
        ),
    ],
    ids=["pushed weights", "a draft model", "a critic", "log-ratios", "a clip in every step"],
)
def test_what_was_measured_is_shown_there_alone(run_folder, unchanged, change, said):
    rewrite(run_folder, lambda row: row | change(row))
    text = read(run_folder).text
    assert [words for words in said if words in unchanged or words not in text] == []
    assert "held-out best" not in text  # of the log-ratios, which weren't measured


def test_a_run_on_a_log_alone_has_no_reward_against_kl(run_folder):
    fresh = ("kl_ref", "logp_diff_mean", "logp_diff_max", "truncated_share", *HELD_OUT)
    rewrite(run_folder, lambda row: row | dict.fromkeys(fresh))
    text = read(run_folder).text
    assert "Sampler and trainer" not in text
    assert "KL to the reference" not in text
    assert "Reward against KL" not in text


def test_a_run_of_one_phase_in_which_all_rewards_are_equal(run_folder):
    rewrite(
        run_folder,
        lambda row: (
            row | {"phase": "train", "reward_mean": 1.0, "eval_reward": None} if row["step"] <= 60 else None
        ),
        phases=[],
    )
    with Store.open(run_folder / "store.db") as store:
        ids = store.append(
            [Sample(f"p{i}", "r", reward=1.0, source="teacher", role="expert") for i in range(4)]
        )
        store.draws.record(RUN, 1, ids)
    page = read(run_folder)
    assert "steps 1 to 1, mean 1" in page.text
    assert "teacher 4 all 4 1.000 unknown" in page.text


def test_what_went_wrong_is_counted_at_the_top(run_folder):
    rewrite(
        run_folder,
        lambda row: row | {"skipped": int(row["step"] in (7, 9)), "rolled_back": int(row["step"] == 80)},
    )
    page = read(run_folder)
    assert "updates skipped: 2, rollbacks to a checkpoint: 1, rewards that failed: 1" in page.text
    assert ("href", "#problems") in page.attributes
    rewrite(run_folder, lambda row: row | {"skipped": 0, "rolled_back": 0, "rewards_failed": 0})
    assert "Problems: " not in read(run_folder).text
    rewrite(run_folder, lambda row: row | {"requests_failed": int(row["step"] in (3, 5, 8))})
    assert "Problems: requests to the engine that failed: 3" in read(run_folder).text


def test_parts_of_the_reward_and_the_held_out_loss_are_shown_where_there_are_any(run_folder, unchanged):
    names = ["right", "a <b> form that is long", "c", "d", "e", "f", "g"]
    assert "Parts of the reward" not in unchanged
    held = {
        "eval_consistency": 0.1,
        "eval_consistency_se": 0.01,
        "eval_consistency_fall": 0.02,
        "eval_groups": 33,
    }
    rewrite(
        run_folder,
        lambda row: (
            row
            | {"reward_parts": dict.fromkeys(names, row["step"] / 9)}
            | (held if row["step"] % 100 == 0 else {})
        ),
    )
    text = read(run_folder).text
    assert "Parts of the reward" in text
    assert "a <b> form that…" in text
    assert "1 more in metrics.jsonl." in text
    assert "At step 200 it was 0.0200 ± unknown below the reference's, on 33 groups." in text


def test_a_measured_0_is_shown(run_folder):
    """0 is a measurement: only charts of the course, the material and the health have to differ from it."""
    zeros = dict.fromkeys(
        ["kl_ref", "eval_fresh_consistency", "regret", "truncated_share", "logp_diff_mean"], 0.0
    )
    rewrite(
        run_folder, lambda row: row | zeros | {"objective": {"explained_variance": 0.0}, "push_error": 0.1}
    )
    text = read(run_folder).text
    for title in (
        "KL to the reference",
        "½ Var(R) of held-out responses",
        "Estimated regret",
        "Variance explained by the critic",
    ):
        assert title in text
    assert "Truncated responses" not in text
    assert "Sampler and trainer" not in text  # judged by its first metric


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
    assert {"asked again", "all"} <= set(Reader(drawn["Groups asked again"].figure).texts)


def test_diagnostics_of_the_optimum_are_shown_where_they_were_measured(run_folder, unchanged):
    titles = {
        "eval_fresh_consistency": "½ Var(R) of held-out responses",
        "regret": "Estimated regret",
        "eval_regret": "Estimated regret",
        "kl_to_reward_spread": "KL spread to reward spread",
    }
    assert not any(title in unchanged for title in titles.values())
    original = (run_folder / "metrics.jsonl").read_text()
    for keys in (["regret"], ["eval_regret", "eval_fresh_consistency", "kl_to_reward_spread"]):
        (run_folder / "metrics.jsonl").write_text(original)
        rewrite(run_folder, lambda row, keys=keys: row | dict.fromkeys(keys, 0.25 + row["step"]))
        page = read(run_folder).text
        assert {t for t in titles.values() if t in page} == {titles[key] for key in keys}


def test_the_best_model_is_named(bare_folder):
    (bare_folder / "best").mkdir()
    path = bare_folder / "best" / "best.json"
    measured = {"step": 40, "metric": "eval_reward", "eval_reward": 0.75, "eval_reward_se": 0.02}
    path.write_text(json.dumps(measured | {"eval_auc": 0.7}))
    assert "kept in best/ 0.750 ± 0.020 held-out reward, step 40" in read(bare_folder).text
    path.write_text(json.dumps(measured | {"metric": "eval_auc", "eval_auc": 0.7}))
    assert "kept in best/ 0.700 held-out AUC, step 40" in read(bare_folder).text
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

    def only(row, name):
        return row | {"eval_reward": None, name: given.get(row["step"])}

    original = (run_folder / "metrics.jsonl").read_text()
    rewrite(run_folder, lambda row: only(row, "eval_reward"))
    text = read(run_folder).text
    assert "The best held-out reward was 0.900 at step 100; the end has 0.700" in text
    assert text.count("The ring is the best measurement, at step 100.") >= 1
    assert Outcome.of(load_run(run_folder)).text == "best eval_reward 0.900 at step 100; the end 0.700"
    (run_folder / "metrics.jsonl").write_text(original)
    rewrite(run_folder, lambda row: only(row, "eval_consistency"))
    assert Outcome.of(load_run(run_folder)) is None
    config = json.loads((run_folder / "config.json").read_text())
    config["evaluate"] = {"metric": "eval_consistency"}
    (run_folder / "config.json").write_text(json.dumps(config))
    text = read(run_folder).text
    assert "The best held-out ½ Var(R) was 0.200 at step 0; the end has 0.700" in text
    assert "The ring is the best measurement, at step 0." in text


def test_averaged_weights_are_said(run_folder, unchanged):
    assert "moving average" not in unchanged
    config = json.loads((run_folder / "config.json").read_text())
    config["train"]["weights_average"] = 0.99
    (run_folder / "config.json").write_text(json.dumps(config))
    assert "an exponential moving average of the weights (train.weights_average = 0.99 in phase" in (
        " ".join(read(run_folder).text.split())
    )


def test_epochs_are_said_while_they_are_the_steps(run_folder):
    config = json.loads((run_folder / "config.json").read_text())
    config["epochs"] = {"store": {"epochs": 2.5, "groups": 256, "steps": 40}}
    (run_folder / "config.json").write_text(json.dumps(config))
    assert "epochs of store 2.5 passes over 256 stored groups, 40 steps" in read(run_folder).text
    config["epochs"]["store"]["steps"] = 30  # before the run was made longer
    (run_folder / "config.json").write_text(json.dumps(config))
    assert "epochs of store" not in read(run_folder).text


def test_messages_without_text_are_shown_as_they_are(bare_folder):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add <b>"}]}
    prompt = [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "3"}]
    found = [{"prompt": prompt, "response": "four", "reward": 1.0}]
    found += [{"prompt": "y" * 2100, "response": "", "reward": 0.5}]
    (bare_folder / "held_out.jsonl").write_text(json.dumps({"step": 0, "responses": found}) + "\n")
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
