"""Reward models: the same number alone and in a batch, the sequences that they read, and what is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from agro import config
from agro.errors import Refused
from agro.models.pretrained import new_model
from agro.rewards import load_reward
from agro.rewards.model import ModelReward
from agro.types import Sample

LETTERS = "abcdefgh>"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A causal language model of letters."""
    folder = tmp_path_factory.mktemp("base")
    spec = config.NewModel(alphabet=LETTERS, hidden=32, layers=1, heads=2, context=32)
    new_model(folder, spec, 0)
    return folder


@pytest.fixture(scope="module")
def judge(base: Path) -> Path:
    """The same with a head of one logit."""
    folder = base.with_name("judge")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def loaded(judge: Path, **options) -> ModelReward:
    return ModelReward(str(judge), device="cpu", **options)


def test_a_value_does_not_depend_on_the_batch(judge):
    """Rows of 1 to 9 tokens that end in each letter, also with what would pad them."""
    model = loaded(judge, batch=9)
    rows = [model.ids(">", "abcdefgh"[: n % 8] + LETTERS[n]) for n in range(9)]
    together = model.values(rows)
    assert together == pytest.approx([model.values([row])[0] for row in rows], abs=1e-5)
    assert np.std(together) > 1e-4
    assert loaded(judge, batch=2).values(rows) == pytest.approx(together, abs=1e-5)


def test_pickled_weights_are_not_read(judge, tmp_path):
    model = loaded(judge)
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(Refused, match="pickled weights are not read"):
        ModelReward(str(tmp_path), device="cpu")


def test_texts_become_sequences(judge):
    model = loaded(judge, max_length=4)
    assert model.tokenizer.decode(model.ids("ab", "c")).replace(" ", "").endswith("abc")
    with pytest.raises(LookupError, match="the reward model takes 1 to 4"):
        model.ids("abc", "abcde")
    with pytest.raises(LookupError, match="no chat template"):
        model.ids([{"role": "user", "content": "a"}], "b")
    with pytest.raises(Refused, match="no chat template"):
        loaded(judge, template="chat")


def test_what_is_too_long_has_no_reward(judge):
    chosen = config.RewardConfig(name="model", options={"path": str(judge), "device": "cpu"})
    with closing(load_reward(chosen)) as reward:
        short, long = reward.score([Sample(">", "abc"), Sample(">", "a" * 40)])
    assert short.value is not None
    assert "tokens; the reward model takes" in long.error


def test_a_classifiers_reward_is_the_probability_of_a_label(base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    settings = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
        id2label={0: "bad", 1: "good"},
        label2id={"bad": 0, "good": 1},
    )
    torch.manual_seed(0)
    BertForSequenceClassification(settings).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    options = {"path": str(tmp_path / "bert"), "device": "cpu", "batch": 2}
    values = {}
    for label in ("good", "bad"):
        chosen = config.RewardConfig(name="model", options=options | {"label": label})
        with closing(load_reward(chosen)) as reward:
            values[label] = [s.value for s in reward.score([Sample(">", "ab"), Sample(">", "cdefg")])]
            assert reward.maximum == 1.0
    assert np.add(values["good"], values["bad"]) == pytest.approx([1, 1])
    with pytest.raises(Refused, match="has the labels bad, good"):
        load_reward(config.RewardConfig(name="model", options=options))
    with pytest.raises(Refused, match="TRL's RewardTrainer on judged pairs"):
        load_reward(config.RewardConfig(name="model", options={"path": str(base)}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "path: model needs it: text"),
        ({"path": "x", "batchsize": 3}, "no such option"),
        ({"path": "x", "batch": 0}, "expected 1 or more, got 0"),
        ({"path": "x", "dtype": "float8"}, "expected float32, bfloat16, float16"),
        ({"path": "/nowhere/at/all"}, "reward model /nowhere/at/all: expected the folder or hub name of"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(Refused, match=message):
        load_reward(config.RewardConfig(name="model", options=options))
