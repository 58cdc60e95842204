"""References of a run: another model, a moving average, a copy renewed now and then; adapters in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rounding import rounding
from safetensors.torch import load_file
from tiny_runs import RESPONSE_ROUNDING, before_step, metrics, tiny, whole_and_resumed

from agro.api.reporting_trainer import Trainer
from agro.config import LoRA, PolicyConfig, RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.train.feed import Feed, Valid
from agro.train.monitors import Monitor, View


class Weights(Monitor):
    """The weights of policy and reference after each step."""

    def __init__(self) -> None:
        self.policy: list[dict[str, torch.Tensor]] = []
        self.reference: list[dict[str, torch.Tensor]] = []

    def after(self, view: View) -> None:
        if view.step:
            for kept, now in ((self.policy, self.learner.policy), (self.reference, self.learner.reference)):
                kept.append({n: w.detach().clone() for n, w in now.weights().items()})

    def meet(self, feed: Feed, valid: Valid) -> None:
        self.learner = feed.learner


def train(config: RunConfig, out: Path, *monitors: Monitor, resume: bool = False) -> Path:
    return Trainer(config, out, monitors=monitors, resume=resume).run()


def resumes(config: RunConfig, folder: Path) -> None:
    whole_and_resumed(lambda _: config, folder, 3)


def test_a_moving_average(tmp_path: Path) -> None:
    config = tiny(tmp_path, policy__reference="ema", policy__reference_decay=0.9)
    seen = Weights()
    with before_step(seen.meet):
        out = train(config, tmp_path / "run", seen)
    name = "lm_head.weight" if "lm_head.weight" in seen.policy[0] else next(iter(seen.policy[0]))
    for i in range(1, 6):
        expected = 0.9 * seen.reference[i - 1][name] + 0.1 * seen.policy[i][name]
        torch.testing.assert_close(seen.reference[i][name], expected)
    stored = load_file(out / "checkpoints/step-00000006/reference.safetensors")
    assert torch.equal(stored[name], seen.reference[-1][name])
    resumes(config, tmp_path)


def test_a_copy_renewed_every_few_steps(tmp_path: Path) -> None:
    config = tiny(tmp_path, policy__reference="periodic", policy__reference_every=2)
    seen = Weights()
    with before_step(seen.meet):
        train(config, tmp_path / "run", seen)
    for i in range(1, 6):  # steps 2 to 6
        source = seen.policy[i] if (i + 1) % 2 == 0 else seen.policy[i - 1]
        assert all(torch.equal(seen.reference[i][n], source[n]) for n in source)
    rows = metrics(tmp_path / "run")
    assert rows[2]["kl_ref"] == pytest.approx(0.0, abs=RESPONSE_ROUNDING)  # renewed a moment ago
    assert rows[3]["kl_ref"] != pytest.approx(0.0, abs=RESPONSE_ROUNDING)
    resumes(config, tmp_path)


def base(folder: Path, seed: int = 0) -> str:
    config = tiny(folder).policy
    Policy.load(config, seed=seed).save(folder / f"base{seed}")
    return str(folder / f"base{seed}")


def of_model(folder: Path, **policy) -> RunConfig:
    values = tiny(folder).model_dump()
    return RunConfig.of({**values, "policy": {"model": base(folder), **policy}})


def test_another_model(tmp_path: Path) -> None:
    config = of_model(tmp_path, reference="model", reference_model=base(tmp_path, 1))
    out = train(config, tmp_path / "run")
    assert abs(metrics(out)[0]["kl_ref"]) > 1e-3  # at the first step they differ already


def test_another_model_that_the_phases_name(tmp_path: Path) -> None:
    model = {"reference": "model", "reference_model": base(tmp_path, 1)}
    config = of_model(tmp_path).model_dump() | {"phases": [{"name": "a", "policy": model}]}
    out = train(RunConfig.of(config), tmp_path / "run")
    assert abs(metrics(out)[0]["kl_ref"]) > 1e-3


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    from agro.config import NewModel
    from agro.models.newmodel import new_model

    (tmp_path / "other").mkdir()
    new_model(tmp_path / "other", NewModel(alphabet="xyz", hidden=16, layers=1, heads=2, context=16), 0)
    config = of_model(tmp_path, reference="model", reference_model=str(tmp_path / "other"))
    with pytest.raises(Refused, match=r"policy\.reference_model: .*expected the tokenizer of policy\.model"):
        train(config, tmp_path / "run")


def test_an_adapter_trains_and_resumes(tmp_path: Path) -> None:
    config = of_model(tmp_path, lora={"rank": 2})
    out = train(config, tmp_path / "run")
    checkpoint = load_file(out / "checkpoints/step-00000006/model.safetensors")
    assert all("lora_" in name for name in checkpoint)
    assert metrics(out)[0]["kl_ref"] == pytest.approx(0.0, abs=RESPONSE_ROUNDING)
    assert metrics(out)[-1]["grad_norm"] > 0
    plain, merged = (Policy.load(PolicyConfig(model=m)) for m in (config.policy.model, str(out / "model")))
    alone = Policy.load(PolicyConfig(model=config.policy.model, lora=LoRA(start=str(out / "adapter"))))
    tokens, lengths = torch.tensor([[1, 5, 6, 7]]), torch.tensor([4])
    mask = torch.arange(4)[None] > 0
    logp = [p.streams(tokens, lengths, mask)["logp"][mask].detach() for p in (plain, merged, alone)]
    torch.testing.assert_close(logp[1], logp[2], **rounding(logp[2]))
    assert not torch.allclose(logp[0], logp[1], atol=1e-3)
    resumes(config, tmp_path)
