"""The files for clusters: their YAML is read, and what they call exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agro.cli.program import command
from agro.config import RunConfig
from agro.config.override import override
from agro.store import Store

RECIPE = """
[policy]
new = { alphabet = "0123456789>", hidden = 16, layers = 1, heads = 2, context = 16 }
[data]
prompts = "prompts.jsonl"
[sampler]
n = 3
max_new = 3
[reward]
name = "reward.py:share"
[objective]
name = "agro"
beta = 0.1
[train]
steps = 3
groups = 4
micro_batch = 4
lr = 1e-2
"""
REWARD = """
def share(completions, answer, **_):
    return [sum(c == a for c in text) / 3 for text, a in zip(completions, answer)]
"""
SRUN = """#!/bin/sh
shift
for i in 0 1; do SLURM_PROCID=$i "$@" & done
wait
"""
HOST = "127.0.0.1"
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
    text = (FOLDER / name).read_text()
    for document in yaml.safe_load_all(text) if name.endswith(".yaml") else [text]:
        for text in strings(document):
            for statement in STATEMENTS.split(text.replace("\\\n", " ")):
                words = shlex.split(statement, comments=True)
                if "agro" in words and "install" not in words and len(words) > 1:
                    found.append(words[words.index("agro") + 1 :])
    return found


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("kubernetes.yaml", ["store", "train", "collect"]),
        ("skypilot.yaml", ["store", "train", "collect"]),
        ("slurm.sh", ["store", "train"]),
    ],
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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a shell's command in a folder with a recipe, where `agro` is this one and `srun` a stand-in."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = ({"prompt": f"{i:03d}>", "answer": str(i % 10)} for i in range(40))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("agro", f'#!/bin/sh\nexec {sys.executable} -m agro "$@"\n'), ("srun", SRUN)):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(FOLDER.parents[1])}
    started = []

    def run(text: str, **variables: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **path, "AGRO_TOKEN": "token", "OMP_NUM_THREADS": "1", **variables}
        started.append(subprocess.Popen(["sh", "-c", text], cwd=tmp_path, env=environment))
        return started[-1]

    yield run
    for process in reversed(started):  # the owner last
        process.terminate()
        process.wait(60)


@pytest.mark.nightly
def test_the_containers_of_kubernetes_train_and_go_on(tmp_path: Path, start: Any) -> None:
    """Each container's command as a process of this host, the trainer's twice."""
    texts = {}
    for document in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()):
        template = document["spec"].get("template", {"spec": {"containers": []}})
        for container in template["spec"]["containers"]:
            words = [*container["command"], *container.get("args", [])]
            text = words[2] if words[:2] == ["sh", "-c"] else f"exec {shlex.join(words)}"
            for old, new in {"/run/agro": str(tmp_path / "run"), "0.0.0.0": HOST, "agro-owner": HOST}.items():
                text = text.replace(old, new)
            texts[container["name"]] = text.replace("8700", "18731")
    (tmp_path / "run").mkdir()
    start(texts["owner"])
    collector = start(texts["collector"], POD="agro-collector-1")
    trainer = start(texts["trainer"])
    model, deadline = tmp_path / "run" / "model" / "model.safetensors", time.monotonic() + 200
    while not model.exists():
        assert trainer.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert collector.wait(60) == 0
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("steps = 3", "steps = 5"))
    start(texts["collector"], POD="agro-collector-1")
    start(texts["trainer"])
    while '"step": 5,' not in (tmp_path / "run" / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def finish(folder: Path, job: subprocess.Popen[bytes]) -> None:
    """The job has ended, with a model, and two collectors have sampled for it."""
    assert job.wait(200) == 0
    assert (folder / "runs" / "cluster" / "model" / "model.safetensors").exists()
    with Store.open(folder / "runs" / "cluster" / "store.db", read_only=True) as store:
        assert store.counts().samples >= 3 * 4 * 3
        claims = store._database.run("SELECT DISTINCT collector FROM requests")
    assert {name for (name,) in claims} <= {"collector-0", "collector-1"}


@pytest.mark.nightly
def test_the_machines_of_skypilot_train(tmp_path: Path, start: Any) -> None:
    text = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())["run"].replace("8700", "18732")
    first, second = (
        start(text, SKYPILOT_NODE_RANK=rank, SKYPILOT_NODE_IPS=f"{HOST}\nlocalhost") for rank in "01"
    )
    finish(tmp_path, first)
    assert second.wait(60) == 0


@pytest.mark.nightly
def test_the_job_of_slurm_trains(tmp_path: Path, start: Any) -> None:
    text = (FOLDER / "slurm.sh").read_text().replace("8700", "18733").replace("$(hostname)", HOST)
    finish(tmp_path, start(text))
