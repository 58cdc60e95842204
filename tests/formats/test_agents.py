"""Trajectories of agents: log-probs of their tokens, and steps that aren't as the format says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from examples_agents import ASK, LOOK, RESULT, SAY, SYSTEM, atif, called, failed

from agro.errors import Refused
from agro.logs.format_table import FORMATS
from agro.logs.protocol import Context

CONTEXT = Context(Path("trajectory.json"))


def read(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [item.records[0] for item in FORMATS["atif"].read(row, CONTEXT)]


def test_log_probs_stand_at_the_tokens_of_their_call() -> None:
    calls = called(LOOK, [1, 2], [3, 4], [-0.5, -0.25]), called(SAY, [1, 2, 3, 4, 6], [8], [-1.0])
    (record,) = read(atif(ASK, *calls))
    assert record["behavior_logp"] == [None, None, -0.5, -0.25, None, -1.0]


def test_log_probs_may_be_unknown() -> None:
    (record,) = read(atif(ASK, called(SAY, [1], [2])))
    assert record["tokens"] == [1, 2]
    assert "behavior_logp" not in record


def test_tokens_of_some_steps_only_are_not_taken() -> None:
    (record,) = read(atif(ASK, called(LOOK, [1], [2]), SAY))
    assert "tokens" not in record


def test_details_of_steps_are_kept() -> None:
    (record,) = read(atif(ASK, {**called(SAY, [1], [2]), "timestamp": "2026-01-01T00:00:00Z"}))
    assert record["meta"]["steps"] == [{"timestamp": "2026-01-01T00:00:00Z", "prompt_tokens": 1}]


def test_what_is_observed_last_is_kept() -> None:
    (record,) = read(atif(ASK, LOOK))
    assert record["meta"]["observed_last"] == [{"role": "tool", "tool_call_id": "c1", "content": "a.txt"}]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            [{**ASK, "metrics": {"prompt_tokens": 1}}, SAY],
            "steps.0..metrics: expected only in steps of the agent",
        ),
        (
            [{**ASK, "source": "human"}, SAY],
            "steps.0..source: expected one of system, user, agent, got 'human'",
        ),
        (
            [{**ASK, "message": [{"type": "image", "source": {}}]}, SAY],
            "expected text, got a part of type image",
        ),
        ([ASK, called(SAY, [1], [2, 3], [-1.0])], "metrics.logprobs: expected 2 numbers, one a token, got 1"),
        ([ASK, called(SAY, [1], ["a"])], "completion_token_ids: expected a list of integers"),
        ([SAY], "expected one of the user or the system before the first"),
        ([SYSTEM, {**SAY, "is_copied_context": True}], "expected at least one that the agent's model wrote"),
    ],
)
def test_wrong_steps_are_refused(steps: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(Refused, match=said):
        read(atif(*steps))


def trial(**others: Any) -> dict[str, Any]:
    row = {**RESULT, "trajectories": [atif(ASK, SAY)], **others}
    return FORMATS["harbor"].read(row, CONTEXT)[0].records[0]


def test_why_a_reward_is_unknown_is_said() -> None:
    """By error_policy.py of Harbor: only a spent budget and a refusal are the agent's doing."""
    assert trial()["reward"] == 1.0
    assert "reward_error" not in trial()["meta"]
    step = {"step_name": "one", "exception_info": failed("VerifierTimeoutError")}
    record = trial(step_results=[step])
    assert record["reward"] is None
    assert record["meta"]["reward_error"].startswith("VerifierTimeoutError: the trial failed")
    assert trial(exception_info=failed("AgentSafetyRefusalError"))["reward"] == 1.0
    assert trial(exception_info=failed("SomethingNewError"))["reward"] is None


def test_several_rewards_are_asked_for() -> None:
    with pytest.raises(Refused, match=r"several columns of rewards .tests, style.*--reward tests"):
        trial(verifier_result={"rewards": {"tests": 1, "style": 0}})


def test_a_trial_is_the_same_in_any_folder() -> None:
    identity = FORMATS["harbor"].identity
    assert identity is not None
    assert identity(RESULT) == identity({**RESULT, "trial_uri": "elsewhere"})
    assert identity(RESULT) != identity({**RESULT, "id": "another"})
