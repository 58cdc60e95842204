"""`objective.baseline_shift = "measured"`: what a run measures, how it falls, and when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import interrupted, metrics, tiny, weights, write_prompts

from agro import objectives
from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.store import Store
from agro.types import Batch, Sample


def logged(folder: Path, rewards: tuple[float, float], **changes: Any) -> RunConfig:
    """A log of two responses to each of 40 prompts, one of each reward."""
    with Store.open(folder / "log.db") as store:
        store.append(
            Sample(f"{g:03d}>", str(g % 10) * (1 + i), reward=reward, source="someone")
            for g in range(40)
            for i, reward in enumerate(rewards)
        )
    data: dict[str, Any] = {"store": str(folder / "log.db"), "replay": 1.0}
    data["eval_prompts"] = write_prompts(folder / "held.jsonl", range(60, 84))
    options = {"name": "agro", "beta": 0.1, "baseline_shift": "measured"}
    return tiny(folder, **{"data": data, "objective": options, **changes})


def test_it_is_how_much_the_log_is_better_and_falls_to_0(tmp_path: Path) -> None:
    """The log's mean is .6 and .8; the start's rewards are at step 0. A resumed run has the same."""
    config = logged(tmp_path, (0.5, 0.7))
    run = Trainer(config, tmp_path / "run").run()
    start, *rows = metrics(run)
    shift = 0.6 - start["eval_reward"]
    assert start["baseline_shift"] == pytest.approx(shift, rel=1e-6)
    assert shift > 0.3
    assert [row["baseline_shift"] for row in rows] == pytest.approx([shift * (1 - i / 6) for i in range(6)])
    interrupted(config, tmp_path / "again", 3)
    assert weights(Trainer(config, tmp_path / "again", resume=True).run()) == weights(run)
    options = config.objective.model_copy(update={"baseline_shift": 0.0})
    plain = Trainer(config.model_copy(update={"objective": options}), tmp_path / "plain").run()
    assert weights(plain) != weights(run)


@pytest.mark.parametrize(
    ("rewards", "shift", "said"),
    [
        ((0.0, 0.1), 0.0, "objective.baseline_shift = 0.000"),  # a worse author
        ((3.0, 5.0), None, "can't be compared"),  # stars, where the reward goes from 0 to 1
    ],
)
def test_there_is_none_where_the_author_isnt_better_or_that_isnt_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rewards: tuple[float, float], shift: Any, said: str
) -> None:
    run = Trainer(logged(tmp_path, rewards, train__steps=1), tmp_path / "run").run()
    assert [row["baseline_shift"] for row in metrics(run)] == [shift, 0.0]
    assert said in capsys.readouterr().err


def test_without_a_reward_the_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = logged(tmp_path, (0.0, 1.0), train__steps=1, evaluate__kl_samples=0)
    data = config.data.model_copy(update={"eval_prompts": None})
    run = Trainer(config.model_copy(update={"data": data}), tmp_path / "run").run()
    assert metrics(run)[-1]["baseline_shift"] == 0.0
    assert "objective.baseline_shift: no reward measures the start" in capsys.readouterr().err


def test_outside_of_a_run_it_is_a_number_in_units_of_the_gradient() -> None:
    """By hand: two responses, s/2 more of each; with scale = "loss" the gradient is another's."""
    logp, mask = [[0.0, -1.0], [0.0, -1.0]], [[False, True], [False, True]]
    batch = Batch.of(mask=mask, reward=[0.0, 1.0], group=[0, 0], ref_logp=logp)
    one, two = (
        objectives.evaluate("agro", logp, batch, beta=0.0, baseline_shift=s).grads["logp"] for s in (0.0, 0.4)
    )
    assert [two[i][1] - one[i][1] for i in (0, 1)] == pytest.approx([-0.2, -0.2])
    with pytest.raises(Refused, match="expected a number here"):
        objectives.evaluate("agro", logp, batch, beta=0.0, baseline_shift="measured")
    with pytest.raises(Refused, match='baseline_shift needs scale = "reward", got "loss"'):
        objectives.evaluate("agro", logp, batch, beta=0.1, baseline_shift=0.1, scale="loss")
