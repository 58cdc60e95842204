"""AGROTrainer in the real TRL: the same gradient as agro's Trainer, in one micro-batch or several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rounding import rounding
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import agro
from agro.config import NewModel
from agro.models.pretrained import new_model
from agro.train.learner import Local

trl = pytest.importorskip("trl", reason="needs TRL: make test-integrations")
datasets = pytest.importorskip("datasets", reason="needs datasets: make test-integrations")

from agro.api.trl import AGROTrainer  # noqa: E402 - needs TRL
from agro.api.trl_arguments import check_model  # noqa: E402

DIGITS = "0123456789>"
LOG = {
    "12>": [("0", 1.0), ("113", 0.0), ("70", 0.25), ("5", 0.5)],
    "3>": [("42", 0.0), ("1", 2.0), ("999", 1.0), ("03", 0.0)],
    "77>": [("7", 1.0), ("77", 0.0), ("8", 0.0), ("000", 1.0)],
    "0>": [("21", 0.5), ("4", 0.0), ("66", 1.5), ("2", 0.0)],
}


USUAL = {
    "beta": 0.1,
    "scale_rewards": "none",
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "max_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "shuffle_dataset": False,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The reference, and a policy that has moved away from it."""
    base, moved = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("moved")
    new_model(base, NewModel(alphabet=DIGITS, hidden=16, layers=2, heads=2, initializer_range=0.25), 0)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(moved)
    AutoTokenizer.from_pretrained(base).save_pretrained(moved)
    return base, moved


class Gradients(TrainerCallback):
    """The gradient of each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.steps.append({name: weight.grad.clone() for name, weight in model.named_parameters()})


def trainer(folders, out, options=None, **arguments):
    """The policy is trained on the logged responses, in the order of `LOG`."""
    base, moved = folders
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(moved)
    model.config._name_or_path = str(base)  # where TRL loads the reference from

    def rollout(prompts, trainer):
        completions = [LOG[prompt][i % 4][0] for i, prompt in enumerate(prompts)]
        ids = [[*tokenizer(text).input_ids[1:], tokenizer.eos_token_id] for text in completions]
        return {"prompt_ids": tokenizer(prompts).input_ids, "completion_ids": ids, "logprobs": None}

    def logged(prompts, completions, **_):
        return [dict(LOG[prompt])[text] for prompt, text in zip(prompts, completions)]

    gradients = Gradients()
    made = AGROTrainer(
        model,
        logged,
        trl.GRPOConfig(**USUAL | {"output_dir": str(out)} | arguments),
        datasets.Dataset.from_dict({"prompt": list(LOG)}),
        processing_class=tokenizer,
        callbacks=[gradients],
        rollout_func=rollout,
        options=options,
    )
    made.gradients = gradients.steps
    return made


def first_gradient(folders, out, monkeypatch, **options):
    """Loss, mean log-ratio and gradient of the first step of agro's Trainer on the same log."""
    found = {}

    def move(learner: Local, lr: float, largest: float) -> None:
        found.update({name: w.grad.clone() for name, w in learner.policy.model.named_parameters()})
        learner.version += 1

    monkeypatch.setattr(Local, "move", move)
    rows = [{"prompt": p, "response": t, "reward": r} for p, group in LOG.items() for t, r in group]
    base, moved = map(str, folders)
    agro.train(
        moved,
        log=rows,
        objective="agro",
        beta=0.1,
        policy={"reference": "model", "reference_model": base},
        train={"steps": 1, "groups": 4, "clip": 1e9},
        out=out,
        **options,
    )
    return json.loads((Path(out) / "metrics.jsonl").read_text().splitlines()[-1]), found


def assert_equal(gradients, expected):
    assert gradients.keys() == expected.keys()
    tolerance = rounding(*expected.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], **tolerance, msg=name)


PARTS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}  # each a group


@pytest.mark.parametrize(
    ("options", "cuts"), [({"average": "sum"}, [(16, 1), (8, 2), (4, 4)]), ({"average": "token"}, [(4, 4)])]
)
def test_first_gradient_is_that_of_agros_trainer(folders, options, cuts, tmp_path, monkeypatch) -> None:
    metrics, expected = first_gradient(folders, tmp_path / "agro", monkeypatch, **options)
    assert max(float(g.abs().max()) for g in expected.values()) > 0.1, "far above the tolerance"
    for size, accumulated in cuts:
        cut = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
        made = trainer(folders, tmp_path / "trl", options, **cut)
        made.train()
        assert_equal(made.gradients[0], expected)
        assert made.state.log_history[0]["loss"] == pytest.approx(metrics["loss"], rel=1e-4)


def test_later_steps_on_the_same_completions_use_the_current_log_probs(folders, tmp_path) -> None:
    twice = {"num_iterations": 2, "max_steps": 2}
    complete, cut = trainer(folders, tmp_path, **twice), trainer(folders, tmp_path, **twice, **PARTS)
    for made in (complete, cut):
        made.train()
    assert_equal(cut.gradients[1], complete.gradients[1])
    name = "model.embed_tokens.weight"
    assert not torch.allclose(complete.gradients[1][name], complete.gradients[0][name], atol=1e-2)


def test_optimizer_steps_divide_a_generation_batch_by_groups(folders, tmp_path) -> None:
    halves = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2}
    cut = trainer(folders, tmp_path, **PARTS | halves, learning_rate=0.0)
    made = trainer(folders, tmp_path)
    for each in (cut, made):
        each.train()
    mean = {name: (first + cut.gradients[1][name]) / 2 for name, first in cut.gradients[0].items()}
    assert_equal(mean, made.gradients[0])


def test_it_samples_and_evaluates(folders, tmp_path) -> None:
    made = trainer(folders, tmp_path, num_generations_eval=2, max_completion_length=3, max_steps=2, **PARTS)
    made.rollout_func = None
    made.reward_funcs = [lambda completions, **_: [float(text.count("0")) for text in completions]]
    made.train()
    assert made.state.log_history[1]["consistency"] >= 0
    found = made.evaluate(made.train_dataset)
    assert found["eval_loss"] == pytest.approx(found["eval_consistency"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale_rewards": "group"}, "scale_rewards: expected 'none', got 'group'"),
        ({"loss_type": "dr_grpo"}, "loss_type: expected TRL's default 'dapo', got 'dr_grpo'"),
        ({"epsilon_high": 0.28}, "epsilon_high: .* no clipping"),
        ({"mask_truncated_completions": True}, "reward them lower instead"),
        ({"num_generations_eval": 1}, "num_generations_eval: expected 2 or more"),
        (
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
            "since a gradient needs .* got 2",
        ),
        ({"options": {"beta": 1.0}}, "options: beta"),
        ({"options": {"avrage": "token"}}, "avrage"),
    ],
)
def test_arguments_without_an_equal_are_refused(folders, arguments, message, tmp_path) -> None:
    with pytest.raises(agro.Refused, match=message):
        trainer(folders, tmp_path, **arguments)


def test_dropout_is_refused(folders, tmp_path) -> None:
    made = trainer(folders, tmp_path)
    made.model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(agro.Refused, match=r"layers.1.self_attn.attention_dropout: .* got 0.1"):
        check_model(made)
    made = trainer(folders, tmp_path)
    made.model.dropout = torch.nn.Dropout(0.2)
    with pytest.raises(agro.Refused, match=r"model: dropout.p: expected no dropout, got 0.2"):
        check_model(made)


def test_a_reward_of_part_of_a_group_is_refused(folders, tmp_path) -> None:
    made = trainer(folders, tmp_path)
    made.reward_funcs = [lambda completions, **_: [None, *[1.0] * (len(completions) - 1)]]
    with pytest.raises(agro.Refused, match="got None for some"):
        made.train()
    made.reward_funcs = [lambda completions, **_: [None] * len(completions)]
    with pytest.raises(agro.Refused, match="reward"):
        made.train()
