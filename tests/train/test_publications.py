"""What a trainer publishes for its collectors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agro.errors import Refused
from agro.store.shared import LocalFolder
from agro.train.publications import KEPT, Publications, PublishedWeights
from agro.types import Prompt

PROMPTS = [
    Prompt("line\u2028break \n and \x85", "a", {"answer": 1, "id": "a column", "none": None}),
    Prompt([{"role": "user", "content": "¿?"}], "b\n", {"nested": {"x": [0.1]}}),
    Prompt("", "c"),
]


@pytest.fixture
def publications(tmp_path: Path) -> Publications:
    return Publications(LocalFolder(tmp_path))


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"")


def versions(publications: Publications) -> list[str]:
    names = publications.shared.names("weights")
    return [name.removeprefix("weights/v") for name in names if name != "weights/latest.json"]


def test_collectors_get_the_record_and_the_prompts(publications: Publications) -> None:
    assert publications.record() is None
    with pytest.raises(Refused, match=r"expected prompts\.jsonl.*--resume"):
        publications.prompts()
    publications.begin({"run": "r", "train": {"steps": 3}}, PROMPTS)
    assert publications.record() == {"run": "r", "train": {"steps": 3}}
    assert publications.prompts() == PROMPTS


def test_the_newest_weights_and_the_ones_before_them(publications: Publications) -> None:
    assert publications.newest() is None
    publications.end()  # nothing was published, so that nobody waits for more
    assert publications.newest() is None
    for version in range(5):
        publications.publish(PublishedWeights(version, "train", step=version + 1), write)
    assert publications.newest() == PublishedWeights(4, "train", 5)
    assert versions(publications) == ["00000002", "00000003", "00000004"]
    assert len(versions(publications)) == KEPT
    with publications.weights(PublishedWeights(3, "train")) as folder:
        assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
    publications.end()
    assert publications.newest() == PublishedWeights(4, "train", 5, ended=True)
    publications.begin({}, PROMPTS)  # it goes on with more steps: collectors that start now have work
    assert publications.newest() == PublishedWeights(4, "train", 5)


def test_weights_are_written_once_a_version(publications: Publications) -> None:
    publications.publish(PublishedWeights(1, "first"), write)
    publications.publish(PublishedWeights(1, "second", 4), lambda folder: pytest.fail("they are there"))
    assert publications.newest() == PublishedWeights(1, "second", 4)


def test_weights_that_were_never_announced_are_removed(publications: Publications) -> None:
    """A trainer was killed after it wrote version 3 and before it announced it: another 3 will take its
    place. The weights of a server aren't touched."""
    for version in (1, 2):
        publications.publish(PublishedWeights(version, "train"), write)
    publications.shared.add("weights/v00000003", write)
    publications.shared.add("weights/served", write)
    publications.begin({}, PROMPTS)
    assert versions(publications) == ["weights/served", "00000001", "00000002"]


def test_what_json_has_not_is_refused(publications: Publications) -> None:
    with pytest.raises(Refused, match="prompt x: expected a value that JSON has"):
        publications.begin({}, [Prompt("x", "x", {"answer": math.nan})])
