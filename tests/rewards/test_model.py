"""Reward models: the same number alone and in a batch, what they are fitted to, and what is said of them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
from typer.testing import CliRunner

from agro import config
from agro.cli import app
from agro.errors import Refused
from agro.models.newmodel import new_model
from agro.rewards import load_reward
from agro.rewards.fitting import Comparison, Judged, Ranked, by_rating, posterior_mean
from agro.rewards.model import RewardModel
from agro.store import Pair, Store
from agro.types import Sample

LETTERS = "abcdefgh>"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A causal language model of letters."""
    folder = tmp_path_factory.mktemp("base")
    spec = config.NewModel(alphabet=LETTERS, hidden=32, layers=1, heads=2, context=32)
    new_model(folder, spec, 0)
    return folder


def loaded(base: Path, **options) -> RewardModel:
    torch.manual_seed(0)
    return RewardModel.load(str(base), device="cpu", new=True, **options)


def test_a_value_does_not_depend_on_the_batch(base):
    """Rows of 1 to 9 tokens that end in each letter, also with what would pad them."""
    model = loaded(base)
    rows = [model.ids(">", "abcdefgh"[: n % 8] + LETTERS[n]) for n in range(9)]
    together = model.values(rows, batch=9)
    assert together == pytest.approx([model.values([row])[0] for row in rows], abs=1e-5)
    assert np.std(together) > 1e-4
    assert model.values(rows, batch=2) == pytest.approx(together, abs=1e-5)


def test_pickled_weights_are_not_read(base, tmp_path):
    model = loaded(base)
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(Refused, match="pickled weights are not read"):
        RewardModel.load(str(tmp_path), device="cpu")


def test_texts_become_sequences(base):
    model = loaded(base, max_length=4)
    assert model.tokenizer.decode(model.ids("ab", "c")).replace(" ", "").endswith("abc")
    with pytest.raises(LookupError, match="the reward model takes 1 to 4"):
        model.ids("abc", "abcde")
    with pytest.raises(LookupError, match="no chat template"):
        model.ids([{"role": "user", "content": "a"}], "b")
    with pytest.raises(Refused, match="no chat template"):
        loaded(base, template="chat")


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
    with pytest.raises(Refused, match="agro fit-reward trains one"):
        load_reward(config.RewardConfig(name="model", options={"path": str(base)}))


def test_pairs_of_ratings_and_votes():
    assert by_rating([(0, 1.0, "p"), (1, 0.0, "p"), (2, 1.0, "p"), (3, 0.0, "q")]) == [
        Comparison(0, 1, 1.0, "p"),
        Comparison(2, 1, 1.0, "p"),
    ]
    assert posterior_mean(3, 1) == 4 / 6  # Laplace's rule of succession


def test_what_is_said_of_a_ranking():
    """Better − worse: 1, −1, 0 of p, 2 of q: right 1, 0, ½, 1. By prompt ½ and 1. Longer by 2, −1, 0, 3.

    A tie of votes says nothing. Both are right where the longer is better; the shorter is better once.
    """
    judged = Judged([[]] * 5, [5, 3, 4, 5, 8], [], [])
    comparisons = [
        Comparison(0, 1, 1.0, "p"),
        Comparison(1, 2, 0.9, "p"),
        Comparison(3, 0, 0.8, "p"),
        Comparison(3, 4, 0.2, "q"),
        Comparison(3, 4, 0.5, "q"),
    ]
    values = dict(enumerate([2.0, 1.0, 2.0, 2.0, 4.0]))
    ranked = Ranked.of(Judged(judged.rows, judged.length, comparisons, []), values)
    assert ranked.right.tolist() == [1.0, 0.0, 0.5, 1.0]
    assert ranked.by_prompt().tolist() == [0.5, 1.0]
    assert ranked.length_bias() == {
        "n": 3,
        "longer_judged": pytest.approx(2 / 3),
        "longer_ranked": 1.0,
        "right_longer": 1.0,
        "right_shorter": 0.0,
        "baseline": pytest.approx(2 / 3),
    }
    assert sum(row["n"] for row in ranked.calibration()) == 4


def fitted(base: Path, store: Path, out: Path, *options: str) -> dict:
    command = ["fit-reward", str(store), "--model", str(base), "--out", str(out), "--device", "cpu"]
    command += ["--lr", "1e-2", "--hold-out", "0.3", "--json", *options]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_it_is_trained_from_pairs_and_used_by_name(base, tmp_path):
    """A response with more a's is the better one; votes are 5 to 1."""
    random = np.random.default_rng(0)
    with Store.open(tmp_path / "pairs.db") as store:
        for number in range(110):
            texts = ["".join(random.choice(list("abcd"), 6)) for _ in range(2)]
            texts.sort(key=lambda text: -text.count("a"))
            if texts[0].count("a") > texts[1].count("a"):
                prompt = "".join(random.choice(list("efgh"), 8)) + ">"
                ids = store.append(Sample(prompt, text, prompt_id=f"p{number}") for text in texts)
                store.add_pairs([Pair(*ids, votes_winner=5, votes_loser=1)])
    result = fitted(base, tmp_path / "pairs.db", tmp_path / "judge", "--epochs", "4")
    assert result["data"]["on"] == "pairs"
    assert result["held_out"]["accuracy"]["value"] > 0.85
    assert result["held_out"]["accuracy"]["low"] > 0.7
    assert "held-out accuracy" in (tmp_path / "judge/reward.html").read_text()
    chosen = config.RewardConfig(name="model", options={"path": str(tmp_path / "judge"), "device": "cpu"})
    with closing(load_reward(chosen)) as reward:
        texts = ("aaaaaa", "dcbdcb", "a" * 40)
        many, few, long = reward.score([Sample("e>", text) for text in texts])
    assert many.value > few.value
    assert long.value is None
    assert "tokens; the reward model takes" in long.error


def test_it_is_fitted_to_ratings_on_their_scale(base, tmp_path):
    """Ratings are 10 for each a plus 100: mean and spread come back."""
    random = np.random.default_rng(1)
    texts = ["".join(random.choice(list("ab"), 6)) for _ in range(120)]
    with Store.open(tmp_path / "rated.db") as store:
        store.append(
            Sample(
                "efgh"[i % 30 % 4] + ">", text, prompt_id=f"p{i % 30}", reward=100.0 + 10 * text.count("a")
            )
            for i, text in enumerate(texts)
        )
    result = fitted(base, tmp_path / "rated.db", tmp_path / "judge", "--on", "ratings", "--epochs", "8")
    assert result["model"]["shift"] == pytest.approx(130, abs=5)
    chosen = config.RewardConfig(name="model", options={"path": str(tmp_path / "judge"), "device": "cpu"})
    with closing(load_reward(chosen)) as reward:
        values = [s.value for s in reward.score([Sample("e>", "aaaaaa"), Sample("e>", "bbbbbb")])]
    assert values[0] - values[1] > 25  # of 60


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
