"""A door on a tiny model with random weights: in this process, and behind a port."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest
from asking import TOKEN

from agro.config import ChatConfig, NewModel
from agro.door.app import Application, opened
from agro.door.sessions import Keeping
from agro.logs.privacy import Privacy
from agro.models.policy import Policy
from agro.models.pretrained import new_model
from agro.pages.local_server import behind_a_port
from agro.rollout.engines.hf import HF

TEMPLATE = """{%- if tools %}<|tools|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ eos_token }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HF:
    """Of a model of random weights that reads and writes characters, with a chat template that has tools."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("door")
    new_model(folder, NewModel(alphabet=ALPHABET, hidden=16, layers=1, heads=2, context=2048), 0)
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return HF(Policy(model, tokenizer, chat=ChatConfig(template=str(template))))


@pytest.fixture
def says(engine, monkeypatch):
    """A function: texts -> the model answers with them, one after the other. The log-probs stay its own."""
    from agro.door import batch

    original = batch.MixedRows._draw

    def make(*texts: str) -> None:
        tokenizer = engine.policy.tokenizer
        answers = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        under_way: dict = {}

        def draw(self, logits, noise):
            tokens, logp = original(self, logits, noise)
            for row, (job, token) in enumerate(self.drawn):
                under_way.setdefault(job, answers.pop(0) if job not in under_way else None)
                tokens[row] = under_way[job].pop(0)
                self.drawn[row] = job, token._replace(id=int(tokens[row]))
            return tokens, logp

        monkeypatch.setattr(batch.MixedRows, "_draw", draw)

    return make


@pytest.fixture
def serving(engine: HF):
    """A function: the file of a store, or None -> a context with the URL of a door on the tiny model."""

    @contextmanager
    def serve(
        store: Path | None = None, *, redact=True, seconds: float = 60.0, size=8, days=None, newest=None
    ):
        keeping = Keeping(store and str(store), Privacy(redact=redact), days)
        with opened(engine, size, keeping, "tiny", seconds, newest) as made, door(made) as url:
            yield url

    return serve


@pytest.fixture
def url(serving, tmp_path: Path):
    """Of a door with a store, the file s.db of the test's folder."""
    with serving(tmp_path / "s.db") as url:
        yield url


@pytest.fixture
def behind():
    """`door`."""
    return door


def door(backend):
    """A context with the URL of a backend's application."""
    return behind_a_port(Application(backend, "127.0.0.1", TOKEN).app)
