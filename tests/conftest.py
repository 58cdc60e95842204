"""Tiny language models of several architectures, with random weights large enough for logits that differ."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import multiprocessing.process
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jinja2
import pretended  # noqa: F401  a guard of a GPU has to be there before the first backward pass
import pytest
import torch
import transformers
from postgres import postgres, postgres_url  # noqa: F401  fixtures
from tiers import TESTS, tier_of, tier_of_file

from agro.config import NewModel
from agro.models import policy
from agro.models.policy import Policy
from agro.models.pretrained import new_model


@functools.cache
def _files_of_new_model(spec: NewModel, seed: int) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        new_model(folder, spec, seed)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _write_new_model(folder: str, spec: NewModel, seed: int) -> None:
    for name, content in _files_of_new_model(spec, seed).items():
        (Path(folder) / name).write_bytes(content)


# Thousands of runs load one of a few new models, and write versions of the same libraries and cards of one
# template. tests/models/test_pretrained.py says that a new model has the same bytes each time.
policy.new_model = _write_new_model  # type: ignore[assignment]
importlib.metadata.version = functools.cache(importlib.metadata.version)
jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)  # type: ignore[method-assign]

gc.disable()  # what the libraries and 8,000 tests allocate on import is looked through again and again else

# A shell that starts the tests in the background ignores SIGINT in them, and so in their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).parents[1] / "../shared"
# Files and folders of tests whose runs draw no page, unless a test is marked `report`.
WITHOUT_PAGES = (
    *("api", "cli/test_commands.py", "docs", "door", "engines", "examples", "integrations", "place"),
    *("reproductions", "train", "vllm_server"),
)
ALPHABET = "abcdefgh "


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest -m check` reads no files of later tiers: that takes longer than its tests."""
    later = collection_path.is_file() and tier_of_file(collection_path) not in ("check", None)
    return True if config.option.markexpr == "check" and later else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier_of(item))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _what_check_promises(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tier `check` makes no model and starts no process."""
    if not request.node.get_closest_marker("check"):
        return

    def refuse(*args: Any, **options: Any) -> None:
        pytest.fail("a model or a process, in a test of the tier `check`: see tests/tiers.py")

    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)


def _causal(name: str, **changes):
    """A model with the vocabulary of `new_model` over ALPHABET."""
    sizes = {
        "vocab_size": 4 + len(ALPHABET),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 96,
        "initializer_range": 0.3,
        "attention_dropout": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if name == "GPT2":
        for key in ("num_key_value_heads", "head_dim", "intermediate_size", "attention_dropout"):
            del sizes[key]
        config = transformers.GPT2Config(**sizes | changes)
        kind = transformers.GPT2LMHeadModel
    else:
        config_name = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
        config = getattr(transformers, config_name)(**sizes | changes)
        kind = getattr(transformers, f"{name}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(config)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    new_model(folder, NewModel(alphabet=ALPHABET, hidden=8, layers=1, heads=1, context=96), 0)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def causal():
    """A function: architecture, changes of its configuration -> transformers model."""
    return _causal


@pytest.fixture(scope="session")
def tiny(tokenizer):
    """A function: architecture, type of its weights, changes of its configuration -> `Policy`."""

    def make(
        name: str = "Llama", dtype: torch.dtype = torch.float32, temperature: float = 1.0, **changes
    ) -> Policy:
        return Policy(_causal(name, **changes).to(dtype), tokenizer, temperature=temperature, chunk=5)

    return make


@pytest.fixture(scope="session")
def shared_model():
    """A function: name -> folder of one of the models beside the repository."""

    def find(name: str) -> Path:
        folder = SHARED / "models" / name
        if not folder.is_dir():
            pytest.skip(f"{folder} isn't there: this test needs that model")
        return folder

    return find


@pytest.fixture(autouse=True)
def _without_page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures take longer than the tiny runs of these tests."""
    makes_no_run = request.node.get_closest_marker("check")
    is_about_pages = request.node.get_closest_marker("report")
    if makes_no_run or is_about_pages:
        return
    within = [request.path, *request.path.parents]
    if any(TESTS / name in within for name in WITHOUT_PAGES):
        monkeypatch.setattr("agro.api.reporting_trainer.report", lambda folder: folder)


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's secret, such as "another", would be taken out of the messages of the next ones."""
    monkeypatch.setattr("agro.errors._secrets", set())
