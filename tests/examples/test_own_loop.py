"""The loop of `examples/own_loop.py`, as a user's program runs it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from agro.config import NewModel
from agro.models.pretrained import new_model
from agro.store import Store

FILE = Path(__file__).parents[2] / "examples/own_loop.py"


def test_it_learns_and_keeps_what_it_saw(tmp_path: Path) -> None:
    """Reward: the share of a response's characters that are "a"; random weights give about a quarter."""
    spec = importlib.util.spec_from_file_location("own_loop", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    new = NewModel(alphabet="abcd", hidden=16, layers=1, heads=2, context=80, initializer_range=0.25)
    new_model(tmp_path / "base", new, 0)
    prompts, reward, out = tmp_path / "prompts.jsonl", tmp_path / "share.py", tmp_path / "out"
    texts = ("a", "b", "c", "d", "ab", "cd", "ba", "dc")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    reward.write_text(
        "def share(completions, **columns):\n"
        "    return [text.count('a') / max(1, len(text)) for text in completions]\n"
    )
    out.mkdir()
    means = module.train(str(tmp_path / "base"), str(prompts), f"{reward}:share", out, 20, 0.02)
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.3
    with Store.open(out / "store.db", read_only=True) as store:
        assert store.counts().scored == 20 * 8 * 4
        assert store.ledger.committed("own").step == 19
    assert (out / "model/model.safetensors").exists()
