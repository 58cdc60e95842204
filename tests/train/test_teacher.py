"""A teacher on a server teaches as one in the process does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "engines"))
from stand_in import serving
from tiny_runs import metrics, tiny

from agro.api.reporting_trainer import Trainer
from agro.config import PolicyConfig, RunConfig
from agro.errors import Refused
from agro.models.policy import Policy

ROUNDED = 1e-5  # of weights after three steps of Adam: float32 in passes of other shapes


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    Policy.load(tiny(tmp_path).policy, seed=7).save(tmp_path / "teacher")
    return str(tmp_path / "teacher")


def distilling(folder: Path, teacher: str, **changes: Any) -> RunConfig:
    policy = tiny(folder).policy.model_dump() | {"reference": "model", "reference_model": teacher}
    policy |= changes.pop("policy", {})
    values = {"objective": {"name": "distill"} | changes.pop("objective", {}), "train__steps": 3}
    return tiny(folder, policy=policy, evaluate={"kl": False}, **values, **changes)


def test_it_equals_one_in_the_process(tmp_path: Path, teacher: str) -> None:
    """Log-probs, gradients and weights; the server scores each sample of each step once."""
    here = Trainer(distilling(tmp_path, teacher), tmp_path / "here")
    rows = metrics(here.run())
    with serving(Policy.load(PolicyConfig(model=teacher))) as (url, state):
        served = Trainer(distilling(tmp_path, url), tmp_path / "served")
        found = metrics(served.run())
    scored = [body for path, body in state.asked if "prompt_logprobs" in body]
    assert len(scored) == 3 * 4 * 3  # steps, groups, responses
    for ours, theirs in zip(rows, found, strict=True):
        for name in ("loss", "grad_norm", "kl_ref"):
            assert theirs[name] == (None if ours[name] is None else pytest.approx(ours[name], abs=1e-5))
    assert any(row["loss"] for row in rows)
    before = Policy.load(here.config.policy, seed=0).weights()
    for name, weight in here.policy.weights().items():
        torch.testing.assert_close(served.policy.weights()[name], weight, atol=ROUNDED, rtol=0)
    assert any((here.policy.weights()[name] - w).abs().max() > 100 * ROUNDED for name, w in before.items())


def test_another_tokenizer_is_refused(tmp_path: Path, teacher: str) -> None:
    other = tiny(tmp_path).policy.model_dump()
    other["new"]["alphabet"] = "9876543210>"
    with (
        serving(Policy.load(PolicyConfig(**other))) as (url, _),
        pytest.raises(Refused, match=r"reference_model = http.*: expected the tokenizer of policy\.model"),
    ):
        Trainer(distilling(tmp_path, url), tmp_path / "run").run()
    with pytest.raises(Refused, match=r"failed .* times.*start vLLM there"):
        Trainer(distilling(tmp_path, url, engine={"retries": 0}), tmp_path / "run").run()


def test_what_is_no_log_prob_is_refused(
    tmp_path: Path, teacher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Policy.load(PolicyConfig(model=teacher))) as (url, state):
        score = state._score

        def spoiled(ids: list[int]) -> dict[str, Any]:
            reply = score(ids)
            reply["choices"][0]["prompt_logprobs"][-1][str(ids[-1])]["logprob"] = 0.5
            return reply

        monkeypatch.setattr(state, "_score", spoiled)
        with pytest.raises(Refused, match=r"expected log-probs, at most 0, got 0\.5"):
            Trainer(distilling(tmp_path, url), tmp_path / "run").run()


def test_its_whole_distribution_is_not_there(tmp_path: Path, teacher: str) -> None:
    with serving(Policy.load(PolicyConfig(model=teacher))) as (url, _):
        config = distilling(tmp_path, url, objective={"over": "vocabulary"})
        with pytest.raises(
            Refused, match=r"log-probs of the sampled tokens alone.*objective\.over = \"samples\""
        ):
            Trainer(config, tmp_path / "run").run()
