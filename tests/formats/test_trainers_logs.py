"""Logs of trainers: repeats by design, rewards of tokens, and what can't be imported."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example import json_lines, parquet_table, rows_of
from examples_stores import EID, TENSORS, WIRE, Characters, capture, stored, trinity
from examples_verifiers import EPISODE

from agro.errors import Refused
from agro.logs.format_table import FORMATS, get
from agro.logs.importing import import_files
from agro.rollout.prompts import load_prompts
from agro.store import Store

NEMO, SKY, VALID = (
    dict(rows_of(name)[0]) for name in ("nemo-train-data", "skyrl-evaluations", "nemo-validation")
)


def load(tmp_path: Path, rows: list[dict[str, Any]], **how: Any) -> list[Any]:
    json_lines(tmp_path / "log.jsonl", rows)
    with Store.open(tmp_path / "store.db") as store:
        import_files(store, [tmp_path / "log.jsonl"], **how)
        return list(store.samples())


def same(format: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    identity = get(format).identity
    assert identity is not None
    return identity(one) == identity(other)


def test_a_completion_that_trl_logs_again_is_the_same() -> None:
    row = {"step": 1, "prompt": "2+2=", "completion": "4", "exact": 1.0, "advantage": 0.7}
    assert same("trl-completions", row, {**row, "step": 2})
    assert not same("trl-completions", row, {**row, "completion": "5"})
    assert not same("trl-completions", row, {**row, "advantage": 0.1})


def test_a_null_does_not_make_another_column_the_reward(tmp_path: Path) -> None:
    """One of two columns is null: the other one isn't the reward because of it."""
    row = {"step": 1, "prompt": "2+2=", "completion": "4", "a": 1.0, "b": 1.0, "advantage": 0.0}
    parquet_table(tmp_path / "log.parquet", [row, {**row, "a": None}])
    with Store.open(tmp_path / "store.db") as store, pytest.raises(Refused, match=r"refused \(2\)"):
        import_files(store, [tmp_path / "log.parquet"])


def test_a_line_that_swift_logs_again_is_the_same() -> None:
    line = {"step": ["1"], "prompt": ["2+2="], "completion": ["4"], "exact": [1.0], "advantages": [0.7]}
    assert same("swift-completions", line, {**line, "step": ["2"]})
    assert not same("swift-completions", line, {**line, "completion": ["5"]})
    assert get("swift-completions").once
    assert not get("trl-completions").once


def test_verl_repeats_responses_of_validations_only() -> None:
    row = {"input": "2+2=", "output": "4", "gts": "4", "score": 1.0, "step": 1}
    assert not same("verl-rollouts", row, {**row, "step": 2})
    assert same("verl-rollouts", {**row, "reward": 1.0}, {**row, "reward": 1.0, "step": 2})


def test_labels_of_steps_are_rewards_of_their_last_tokens(tmp_path: Path) -> None:
    row = {"prompt": "Q", "completions": ["ab", "c"], "labels": [True, False]}
    [sample] = load(tmp_path, [row], tokenizer=Characters())
    assert sample.response == "ab\nc"
    assert sample.tokens.tolist() == [ord(c) for c in "Qab\nc"]
    assert sample.action.tolist() == [False, True, True, True, True]
    assert sample.token_reward[[2, 4]].tolist() == [1.0, 0.0]  # of b and of c
    assert (sample.token_reward[[0, 1, 3]] != sample.token_reward[[0, 1, 3]]).all()  # NaN: unknown


def test_log_probs_of_nemo_are_unknown_where_nothing_was_sampled(tmp_path: Path) -> None:
    [sample] = load(tmp_path, [NEMO])
    assert np.isnan(sample.behavior_logp[:2]).all()
    assert sample.behavior_logp[2:].tolist() == [-0.25, -0.5]


def test_turns_of_nemo_are_told_apart_by_the_tokenizer(tmp_path: Path) -> None:
    ids = [ord(c) for c in "QaxbE"]
    row = {**NEMO, "content": ["Q", "a", "x", "b", "E"], "token_ids": ids, "input_lengths": 5}
    logp = [0.0, -0.5, 0.0, -0.25, 0.0]
    row |= {"token_loss_mask": [0, 1, 0, 1, 0], "generation_logprobs": logp}
    [sample] = load(tmp_path, [row], tokenizer=Characters())
    assert (sample.prompt, sample.response, sample.tokenizer) == ("Q", "axb", "characters")
    assert sample.tokens.tolist() == ids[:4]  # nothing after the last that was sampled


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="tokens: expected those of the response '4<end>'"):
        load(tmp_path, [NEMO], tokenizer=Characters())


def test_a_greedy_evaluation_repeats_responses() -> None:
    assert same("skyrl-evaluations", SKY, {**SKY, "data_source": "other"})
    assert not same("skyrl-evaluations", SKY, {**SKY, "output_response": "5"})
    assert same("skyrl-evaluations", {**SKY, "env_class": None}, {**SKY, "env_class": None, "step": 2})
    assert same("nemo-validation", VALID, {**VALID, "idx": 3, "rewards": [1.0]})


class Trap:
    """What runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('ran')",)


def test_nothing_in_a_pickle_runs(tmp_path: Path) -> None:
    pickled = tmp_path / "global_step_1_training_input.pkl"
    pickled.write_bytes(pickle.dumps(Trap()))
    dump = tmp_path / "4.pt"
    torch.save({"rollout_id": 4, "samples": [{"prompt": Trap()}]}, dump)
    with Store.open(tmp_path / "store.db") as store:
        with pytest.raises(Refused, match="a pickle can run any program"):
            import_files(store, [pickled])
        with pytest.raises(Refused, match="can't be read without running what is inside"):
            import_files(store, [dump])


def test_log_probs_of_traces_are_of_the_sampled_tokens(tmp_path: Path) -> None:
    one, other = load(tmp_path, [EPISODE])
    assert np.isnan(one.behavior_logp[[0, 1, 2, 4]]).all()
    assert one.behavior_logp[[3, 5, 6]].tolist() == pytest.approx([-0.1235, -0.5, -0.25])
    assert other.behavior_logp[[3, 5]].tolist() == pytest.approx([-0.1235, -1.0])


def test_effective_episodes_are_among_all() -> None:
    assert same("verifiers-traces", EPISODE, {**EPISODE, "ok": False})
    assert not same("verifiers-traces", EPISODE, {**EPISODE, "id": "e2"})


def test_captured_samples_need_the_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="captured samples have no text; name the model whose tokenizer"):
        load(tmp_path, [WIRE])


@pytest.mark.parametrize(("given", "version"), [("3", 3), (3, 3), ("sha", -1), (None, -1)])
def test_the_version_of_a_captured_sample_is_a_number_or_text(
    given: Any, version: int, tmp_path: Path
) -> None:
    [sample] = load(tmp_path, [{**WIRE, "policy_version": given}], tokenizer=Characters())
    assert sample.version == version


def test_a_sample_that_was_sent_again_is_the_same() -> None:
    assert same("tinker-capture", WIRE, {**WIRE, "created_at": 9.0})
    assert not same("tinker-capture", WIRE, {**WIRE, "sample_idx": 1})
    assert not same("tinker-capture", {**WIRE, "seq_id": None}, {**WIRE, "seq_id": None, "created_at": 9.0})


def test_a_store_that_is_being_written_is_refused(tmp_path: Path) -> None:
    capture(tmp_path / "capture.db", [WIRE])
    (tmp_path / "capture.db-wal").write_bytes(b"rows")
    with Store.open(tmp_path / "store.db") as store, pytest.raises(Refused, match="newest rows are in"):
        import_files(store, [tmp_path / "capture.db"], tokenizer=Characters())


def test_rewards_and_log_probs_of_trinity_are_of_the_response(tmp_path: Path) -> None:
    fields = {"eid": EID, "prompt_length": 2, "prompt_text": "2+2=", "response_text": "4"}
    trinity(tmp_path / "buffer.db", [stored(fields, TENSORS, 1.0)])
    with Store.open(tmp_path / "store.db") as store:
        import_files(store, [tmp_path / "buffer.db"])
        [sample] = store.samples()
    assert np.isnan(sample.behavior_logp[[0, 1, 3]]).all()  # the last one wasn't an action
    assert sample.behavior_logp[2] == -0.25
    assert sample.token_reward[2:].tolist() == [0.0, 1.0]


def test_inputs_of_openrlhf_are_prompts(tmp_path: Path) -> None:
    json_lines(tmp_path / "prompts.jsonl", [{"input": "2+2=", "label": "4", "datasource": "sums"}])
    [prompt] = load_prompts(tmp_path / "prompts.jsonl")
    assert (prompt.text, prompt.columns["answer"]) == ("2+2=", "4")


def test_a_turn_that_is_not_learned_from_is_never_passed_over(tmp_path: Path) -> None:
    """Records with the same keys are of one format: here of the first one, which has no `loss`."""
    asked, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    rows = [{"messages": [asked, said]}, {"messages": [asked, {**said, "loss": False}]}]
    json_lines(tmp_path / "log.jsonl", rows)
    with Store.open(tmp_path / "store.db") as store:
        report = import_files(store, [tmp_path / "log.jsonl"])
    assert [refusal.reason for refusal in report.refused] == [
        "messages: some say with `loss` what is learned from; give --format swift-turns"
    ]


NOTHING = {
    "tinker-annotations": (
        {"event_id": "e", "run_id": "r", "kind": "reward", "payload": {}, "created_at": 1.0},
        "these are annotations of a capture",
    ),
    "tinker-summaries": (
        {"schema_version": 1, "split": "train", "traj_idx": 0, "steps": [], "total_reward": 1.0},
        "summaries of rollouts have rewards and lengths, but neither text nor tokens",
    ),
    "prime-rl-tokens": (
        {"schema_version": 1, "step": 0, "token_ids": [1], "inference_logprobs": [0.0], "loss_mask": [True]},
        "exported tokens of prime-rl have neither text nor rewards",
    ),
    "skyrl-metrics": ({"eval/all/avg_score": 0.5}, "means of an evaluation"),
    "trl-language-modeling": ({"text": "The sky is blue."}, "text: one text"),
}


@pytest.mark.parametrize("format", NOTHING)
def test_what_holds_no_responses_or_rewards_is_refused(format: str, tmp_path: Path) -> None:
    row, said = NOTHING[format]
    with pytest.raises(Refused, match=said):
        load(tmp_path, [row])
    assert FORMATS[format].kind == "nothing"
    assert FORMATS[format].fits(row)
