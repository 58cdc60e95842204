"""What the page of a run on stored data shows of it."""

from __future__ import annotations

import json

from test_page import LOG_RATIOS, read, rewrite

HELD_OUT = {
    "eval_log_ratio_best": 0.4,
    "eval_log_ratio_best_se": 0.1,
    "eval_log_ratio_worst": -0.9,
    "eval_log_ratio_worst_se": 0.1,
}


def test_log_ratios_of_held_out_groups_are_drawn_where_they_were_measured(run_folder) -> None:
    rewrite(run_folder, lambda row: row | LOG_RATIOS | (HELD_OUT if row["step"] % 100 == 0 else {}))
    text = read(run_folder).text
    assert "held-out best" in text
    assert "held-out worst" in text


def test_a_kl_without_held_out_prompts_is_called_sampled(bare_folder) -> None:
    """At the responses of the policy to prompts of the store."""
    config = json.loads((bare_folder / "config.json").read_text())
    del config["data"]["eval_prompts"]
    (bare_folder / "config.json").write_text(json.dumps(config))
    row = {"step": 1, "phase": "sft", "eval_kl_ref": 0.4, "eval_kl_ref_se": 0.1, "kl_ref": 0.4}
    (bare_folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    text = read(bare_folder).text
    assert "KL at the end 0.400 nats per response, step 1" in text
    assert "held-out KL at the end" not in text


def test_steps_from_which_nothing_could_be_learned_are_shown_with_the_way_out(run_folder) -> None:
    """The page warns as the run did: after three steps in a row."""
    why = {4: "all rewards are 0", 5: "equal rewards within groups", 6: "equal rewards within groups"}
    fine = {"no_signal": None, "replay_missing": 0}
    rewrite(run_folder, lambda row: {k: v for k, v in row.items() if k != "no_signal"})
    assert "steps without a signal not measured" in read(run_folder).text
    rewrite(run_folder, lambda row: row | fine)
    assert "steps without a signal 0 of 220" in read(run_folder).text
    rewrite(run_folder, lambda row: row | {"no_signal": why.get(row["step"]), "replay_missing": 0})
    text = read(run_folder).text
    assert (
        "steps from which nothing could be learned: 3 of 220, equal rewards within groups"
        in text.split("More")[0]
    )
    other_groups = "where other groups of the store have rewards that differ: data.spread = true"
    assert f"equal rewards within groups: {other_groups}" in text
    assert f"all rewards are 0: {other_groups}" in text
    assert "Otherwise check that the reward" in text
    rewrite(run_folder, lambda row: row | {"no_signal": why.get(row["step"]) if row["step"] != 5 else None})
    text = read(run_folder).text
    assert "steps without a signal 2 of 220" in text
    assert "nothing could be learned" not in text


def test_a_share_of_replay_that_was_not_met_is_shown(run_folder) -> None:
    rewrite(run_folder, lambda row: row | {"replay_missing": int(row["step"] in (1, 9))})
    text = read(run_folder).text
    assert "steps with less replay 2 of 221" in text
    assert "less of the store than data.replay" not in text
    rewrite(run_folder, lambda row: row | {"replay_missing": 8})
    assert "steps with less of the store than data.replay: 221 of 221" in read(run_folder).text
