"""What a run leaves besides figures: cards, the model's generation_config, an upload to a local hub."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import transformers
import yaml
from loopback import answering
from markdown_it import MarkdownIt
from tiny_runs import DIGITS, metrics, run_tiny, samples_of, tiny, write_prompts, write_toml
from typer.testing import CliRunner, Result

from agro.api.reporting_trainer import Trainer
from agro.cli import app
from agro.config import NewModel
from agro.errors import Unwritable
from agro.logs.importing import import_files
from agro.models.pretrained import new_model
from agro.pages.run.card import literal, write_cards
from agro.store import Store

SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


@pytest.fixture
def base(tmp_path) -> Path:
    """A model that brings sampling values of its own."""
    folder = tmp_path / "base"
    new_model(folder, NewModel(alphabet=DIGITS + ">", hidden=16, layers=1, heads=2, context=16), 0)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SAMPLING))
    return folder


def front(card: Path) -> dict[str, Any]:
    """The YAML at the head of a card."""
    return yaml.safe_load(card.read_text(encoding="utf-8").split("---\n")[1])


@pytest.mark.report
def test_a_card_says_what_was_measured_and_can_be_made_again(tmp_path):
    held_out = write_prompts(tmp_path / "held.jsonl", range(100, 120))
    out = run_tiny(tmp_path, train__steps=2, data__eval_prompts=held_out, evaluate__keep_best=True)
    rows = {row["step"]: row for row in metrics(out)}
    model = out / "model"
    card = (model / "README.md").read_text()
    assert front(model / "README.md") == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["agro", "reinforcement-learning"],
    }
    for step, name in ((0, "before"), (2, "after 2 steps")):
        m = rows[step]
        expected = f"{m['eval_reward']:.4f} ± {m['eval_reward_se']:.4f} (n = {m['eval_n']})"
        assert f"| held-out reward {name} | {expected} |" in card
    assert f"| KL to the reference at the end, nats per response | {rows[2]['eval_kl_ref']:.3f}" in card
    for said in ("random weights", "2 of 2 steps", "`agro (beta = 0.1)`, fresh samples", "`held.jsonl`"):
        assert said in card
    assert "seed: 0" in card
    assert str(tmp_path) not in card  # paths of this machine are nobody's business
    best = json.loads((out / "best" / "best.json").read_text())
    assert f"weights of step {best['step']}" in (out / "best" / "README.md").read_text()
    for name, original in (("report.html", "report.html"), ("run_config.json", "config.json")):
        assert (model / name).read_bytes() == (out / original).read_bytes()
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"
    (model / "README.md").unlink()
    write_cards(out)
    assert (model / "README.md").read_text() == card
    rows[0]["eval_reward"] = 0.125
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    write_cards(out)
    assert "| held-out reward before | 0.1250 ±" in (model / "README.md").read_text()


def test_what_was_not_measured_is_said_so_and_phases_have_their_references(tmp_path):
    phases = [{"name": "a"}, {"name": "b", "policy": {"reference": "phase"}}]
    card = (run_tiny(tmp_path, phases=phases, train__steps=1) / "model" / "README.md").read_text()
    assert card.count("| not measured |") == 3
    assert "held-out prompts: none" in card
    assert "- reference: start; phase\n" in card


def test_cards_of_an_adapter_and_of_the_model_it_was_merged_into(tmp_path, base):
    out = run_tiny(tmp_path, policy={"model": str(base), "lora": {"rank": 2}}, train__steps=1)
    assert front(out / "adapter" / "README.md")["library_name"] == "peft"
    assert front(out / "model" / "README.md")["library_name"] == "transformers"
    card, file = out / "adapter" / "README.md", out / "config.json"
    assert "An adapter (LoRA) of `base`" in card.read_text()
    assert "AutoPeftModelForCausalLM" in card.read_text()
    assert "base_model" not in front(card)  # a folder of this machine isn't one of the hub
    values = json.loads(file.read_text())
    values["policy"]["model"] = "someone/a-model"
    file.write_text(json.dumps(values))
    write_cards(out)
    assert front(card)["base_model"] == "someone/a-model"


@pytest.mark.parametrize("changes", [{}, {"do_sample": False}])
def test_of_the_generation_config_only_end_tokens_are_taken(tmp_path, base, changes):
    """do_sample = false beside a temperature is what transformers refuses to save after a change."""
    file = base / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    before = json.loads(file.read_text())
    out = run_tiny(tmp_path, policy={"model": str(base)}, train__steps=1)
    sampled = samples_of(out)[0].sampling
    assert {name: sampled[name] for name in ("temperature", "top_k", "top_p")} == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    assert json.loads((out / "model" / "generation_config.json").read_text()) == before


def test_plain_prompts_to_a_chat_model_are_noted(tmp_path, base, capsys):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    contents = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.chat_template = contents + "{% if add_generation_prompt %}>{% endif %}"
    tokenizer.save_pretrained(base)
    for wrap, expected in ((False, True), (True, False)):
        policy = {"model": str(base), "chat": {"wrap": wrap}}
        out = Trainer(tiny(tmp_path, policy=policy, train__steps=1), tmp_path / f"run{wrap}").run()
        assert ("60 of 60 prompts are plain text" in capsys.readouterr().err) is expected
        first = samples_of(out)[0]
        assert (first.tokens[:6].tolist().count(tokenizer.convert_tokens_to_ids(">"))) == (2 if wrap else 1)
        assert ("apply_chat_template" in (out / "model" / "README.md").read_text()) is wrap


class Hub:
    """As much of the hub's HTTP interface as create_repo and upload_folder need, without Xet."""

    def __init__(self) -> None:
        self.url, self.declines = "", False
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.repo: dict[str, str] | None = None
        self.tokens: set[str | None] = set()

    def answer(self, path, body, headers) -> tuple[int, Any]:
        path = path.split("?")[0]
        self.tokens.add(headers.get("Authorization"))
        if path.startswith("/large/"):
            self.large[hashlib.sha256(body).hexdigest()] = body
            return 200, {}
        if path == "/api/repos/create" and self.declines:
            return 403, {"error": "no write access"}
        if path == "/api/repos/create":
            self.repo = json.loads(body)
            return 200, {"url": f"{self.url}/someone/fine"}
        if path == "/api/validate-yaml":
            yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            return 200, {"warnings": [], "errors": []}
        if path == "/api/models/someone/fine/preupload/main":
            files = json.loads(body)["files"]
            for file in files:
                file["uploadMode"] = "lfs" if file["path"].endswith(".safetensors") else "regular"
                file["shouldIgnore"] = False
            return 200, {"files": files}
        if path == "/someone/fine.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.url}/large/{each['oid']}"}}
            return 200, {"objects": objects}
        assert path == "/api/models/someone/fine/commit/main", path
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            if item["key"] == "lfsFile":
                self.files[value["path"]] = self.large[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/someone/fine/commit/0", "commitOid": "0" * 40}


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    """A hub on the loopback, and a token for it."""
    hub = Hub()
    with answering(hub.answer) as hub.url:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
        yield hub


@pytest.mark.report
def test_a_model_is_uploaded_whole_and_private(tmp_path, hub, capsys):
    out = run_tiny(tmp_path, train__steps=1, train__push="someone/fine")
    model = out / "model"
    assert hub.files == {p.name: p.read_bytes() for p in model.iterdir()}
    assert {"README.md", "model.safetensors", "report.html", "tokenizer.json"} <= hub.files.keys()
    assert hub.repo == {"name": "fine", "organization": "someone", "visibility": "private"}
    assert "Bearer hf_of_the_test" in hub.tokens
    assert "uploaded to" in capsys.readouterr().err
    for file in (out / "config.json", model / "run_config.json", model / "README.md", out / "metrics.jsonl"):
        assert "hf_of_the_test" not in file.read_text()


REPORT = "agro.api.reporting_trainer.report"


def train_and_push(folder: Path, *more: str) -> Result:
    """`agro train`, into FOLDER/run and the hub."""
    config = write_toml(folder / "config.json", tiny(folder, train__steps=1, train__push="someone/fine"))
    return CliRunner().invoke(app, ["train", str(config), "--out", str(folder / "run"), *more])


def test_a_report_that_fails_keeps_back_nothing_else(tmp_path, hub, monkeypatch):
    monkeypatch.setattr(REPORT, Mock(side_effect=ZeroDivisionError("of the figure")))
    out, done = tmp_path / "run", train_and_push(tmp_path)
    assert done.exit_code == 1
    assert isinstance(done.exception, ZeroDivisionError)
    assert f"the report failed, the model is complete; try again with: agro report {out}" in done.stderr
    assert (out / "model" / "README.md").exists()
    assert {"README.md", "model.safetensors", "run_config.json"} <= hub.files.keys()
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0


def test_an_interruption_of_the_report_uploads_nothing(tmp_path, hub, monkeypatch):
    """Who presses Ctrl-C may not want it to be uploaded."""
    monkeypatch.setattr(REPORT, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tmp_path, train__steps=1, train__push="someone/fine")
    assert (hub.files, hub.repo) == ({}, None)


def test_a_full_disk_at_the_end_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(REPORT, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(Unwritable, match="the disk is full"):
        run_tiny(tmp_path, train__steps=1)
    assert (tmp_path / "run" / "model" / "README.md").exists()


def test_what_the_hub_declines_is_kept_and_can_be_tried_again(tmp_path, hub):
    hub.declines = True
    declined, folder = train_and_push(tmp_path), tmp_path / "run" / "model"
    assert declined.exit_code == 2
    again = f"hf upload someone/fine {folder} . --private"
    assert f"The run is complete and saved. Try again with: {again}" in declined.stderr
    assert "403" in declined.stderr
    weights = (folder / "model.safetensors").read_bytes()
    hub.declines = False
    resumed = train_and_push(tmp_path, "train.push_private=false", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert hub.files["model.safetensors"] == weights
    assert hub.repo["visibility"] == "public"


@pytest.mark.parametrize(
    "text",
    [
        "a](https://evil.example) <img src=x onerror=alert(1)> **b**",
        "new\nline\n\n# Heading\n| a | b |",
        "ticks `code` and ``` fences",
        "`",
        "https://evil.example www.evil.example a@evil.example",
        "\x1b[31mred",
        "  ",
    ],
)
def test_a_text_of_any_origin_is_only_text_in_a_card(text: str) -> None:
    page = MarkdownIt("gfm-like", {"linkify": False}).parse(f"- {literal(text)}: 3 samples\n")
    kinds = {token.type for line in page for token in [line, *(line.children or [])]}
    blocks = {
        f"{kind}_{end}" for kind in ("bullet_list", "list_item", "paragraph") for end in ("open", "close")
    }
    assert kinds <= blocks | {"inline", "code_inline", "text"}
    assert "\x1b" not in literal(text)


def test_a_card_names_what_was_imported_and_a_source_and_a_folder_are_only_text(tmp_path) -> None:
    """A log's source and the run's name are anybody's."""
    row = {"prompt": "1>", "source": "x\n# Free [money](https://evil.example) <b>now</b>"}
    rows = [{**row, "response": str(i), "reward": i} for i in range(4)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with Store.open(tmp_path / "log.db") as store:
        import_files(store, [tmp_path / "log.jsonl"], license="CC-BY-4.0")
    data = {"store": str(tmp_path / "log.db"), "replay": 1.0}
    out = run_tiny(tmp_path, "<b>x [a](b)", data=data, train__steps=1, train__groups=1)
    card = (out / "model" / "README.md").read_text()
    assert "\n# `<b>x [a](b)`\n" in card
    source = "`x # Free [money](https://evil.example) <b>now</b>`"
    assert f"imported data: {source}: 4 samples of `log.jsonl` (SHA-256 " in card
    assert "license: `CC-BY-4.0`" in card
