"""The stories' reward by hand, what tries to game it, and the reproduction on a small scale."""

from __future__ import annotations

import json

import pytest

from agro.errors import Refused
from agro.rollout.prompts import load_prompts
from reproductions.stories import run
from reproductions.stories.reward import ANIMALS, SAME, animal, animals, fauna, repeated, words

needs_model = pytest.mark.skipif(not run.MODEL.is_dir(), reason="../shared/models/stories260K isn't there")


def score(text: str, prompt: str = "") -> float:
    return fauna([prompt], [text])[0]


STORY = (
    "One day a little cat went out to play. She saw a bird in the tree and wanted to be his friend. "
    "They shared some bread and were happy until the sun went down."
)


def test_a_common_story_scores_in_the_middle_and_a_rich_one_high():
    assert score(STORY) == 0.5  # two animals of four
    rich = STORY + " Then a dog came with his ball. A fox looked on from far away."
    assert score(rich) == 1.0


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("", 0.0),
        ("There was a cat. " * 20, 0.0),
        ("the cat the cat the cat the cat the cat", 0.0),
        ("cat dog bird fox owl bear fish pig cow hen", 0.25),  # a list is one sentence
        ("Cat. Dog. Bird. Fox. Owl. Bear. Fish. Pig.", 0.0),  # and these aren't sentences
        ("I like the big cat. I like the big dog. I like the big fox. I like the big owl.", 0.0),  # one mould
        ("Blick zorp mip grun trell faddle snorp glib tarn wob fenn.", 0.0),  # made-up words
        ("Once upon a time there was a very happy girl who loved to sing and dance all day.", 0.0),
    ],
)
def test_repeating_listing_and_inventing_don_t_pay(text, most):
    assert score(text) <= most


def test_the_share_of_repeated_sequences():
    assert repeated("a b c d e") == 0
    assert repeated("a b c a b c") == 1 / 4  # abc bca cab abc
    assert repeated("too short") == 0
    # 2 animals of 4; 11 sequences of 13 words, one of them ("i like the") again; 0 at a share of 1/5
    assert score("I like the big cat today. Sue said I like the old dog.") == pytest.approx(
        2 / 4 * (1 - 5 / 11)
    )


def test_animals_are_the_same_young_or_old_one_or_many():
    named = {"puppies": "dog", "dogs": "dog", "mice": "mouse", "foxes": "fox", "kitty": "cat"}
    named |= {"horse": "horse", "bus": None, "catch": None, "s": None}
    assert {word: animal(word) for word in named} == named
    assert set(SAME.values()) <= ANIMALS
    assert animals("A cat and a dog ran off. The cat and the dog came back.") == {"cat", "dog"}


def test_what_the_prompt_names_is_no_news():
    assert score(STORY, "Once upon a time, there was a cat.") == 0.25


def test_no_opening_names_an_animal_and_none_is_both_trained_on_and_held_out():
    trained, held_out = (load_prompts(run.HERE / f"{name}.jsonl") for name in ("prompts", "heldout"))
    assert not [p for p in (*trained, *held_out) for w in words(str(p.text)) if animal(w)]
    assert not {p.id for p in trained} & {p.id for p in held_out}


@needs_model
def test_the_reproduction_runs_from_start_to_table(tmp_path, capsys):
    small = ["train.steps=10", "train.groups=2", "sampler.n=4", "sampler.max_new=40", "evaluate.n=2"]
    run.main(["--seeds", "1", "--out", str(tmp_path), *small])
    found = json.loads((tmp_path / "result.json").read_text())["runs"][0]
    # a tenth is one step of two groups
    assert found["first_tenth"]["groups"] == found["last_tenth"]["groups"] == 2
    assert found["kl_ref"] > 0
    assert found["logp_diff_max"] < 1e-4
    printed = capsys.readouterr().out
    assert printed.count("*before*") == printed.count("*after*") == run.SHOWN
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_without_the_model_it_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "MODEL", tmp_path / "shared/models/stories260K")
    with pytest.raises(Refused, match="stories260K isn't there"):
        run.main(["--out", str(tmp_path)])
