"""The files for clusters: their YAML is read, and what they call exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agro.cli.program import command
from agro.config import RunConfig
from agro.config.override import override
from agro.place.placement import Placement

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
STATEMENTS = re.compile(r"&&|\|\||;|\n")


def strings(value: Any) -> Iterator[str]:
    """The command lines in a document; a list of words is one."""
    if isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            yield from [shlex.join(value)] if value[:1] == ["agro"] else value
        else:
            for item in value:
                yield from strings(item)
    elif isinstance(value, str):
        yield value


def commands(name: str) -> list[list[str]]:
    found = []
    for document in yaml.safe_load_all((FOLDER / name).read_text()):
        for text in strings(document):
            for statement in STATEMENTS.split(text.replace("\\\n", " ")):
                words = shlex.split(statement, comments=True)
                if "agro" in words and "install" not in words and len(words) > 1:
                    found.append(words[words.index("agro") + 1 :])
    return found


@pytest.mark.parametrize(
    ("name", "called"),
    [("kubernetes.yaml", ["store", "train", "collect"]), ("skypilot.yaml", ["train"])],
)
def test_commands_and_their_options_exist(name: str, called: list[str]) -> None:
    assert [words[0] for words in commands(name)] == called
    for words in commands(name):
        known = {option for parameter in command(words[0]).params for option in parameter.opts}
        options = {word for word in words if word.startswith("--")}
        assert options <= known, words
        for word in words:
            if re.match(r"\w+\.\w+=", word):
                override({}, word, RunConfig)
        if "--place" in words:
            Placement.parse(words[words.index("--place") + 1])


def test_documents_of_kubernetes_refer_to_each_other() -> None:
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    by_kind = {document["kind"]: document for document in documents}
    assert [*by_kind] == ["Service", "PersistentVolumeClaim", "StatefulSet", "Deployment"]
    labels = by_kind["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert by_kind["Service"]["spec"]["selector"] == labels
    [claim] = by_kind["StatefulSet"]["spec"]["template"]["spec"]["volumes"]
    assert claim["persistentVolumeClaim"]["claimName"] == by_kind["PersistentVolumeClaim"]["metadata"]["name"]
    [port] = by_kind["Service"]["spec"]["ports"]
    [collector] = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert f"http://{by_kind['Service']['metadata']['name']}:{port['port']} " in collector["args"][0]
