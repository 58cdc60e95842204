"""Memory and time of a step as `agro train --dry-run` predicts them, beside those of the run itself.

    python benchmarks/scaling/predicted.py [CASE …]
    python benchmarks/scaling/predicted.py predict CASE      # what each process does, or: train CASE

Each case is predicted in a process of its own, and then run for a few steps in another one. The first step
isn't counted. Responses have the length that is predicted: an end token is too rare in random weights to
matter, and a store's responses are as long as they are. Writes benchmarks/results/scaling.json, where `ours`
is predicted, `peer` measured, and `ratio` the one over the other, and scaling.md beside this file; rows of
the same name are replaced.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks import recording  # noqa: E402

RESULTS = ROOT / "benchmarks/results/scaling.json"
TINY = ROOT.parent / "shared/peers/trl/models/tiny"
STEPS = 3
_DECLARED: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
CASES, SIZES = _DECLARED["cases"], _DECLARED["sizes"]


def random_model(folder: Path, size: str) -> None:
    """A Llama with random weights and one word a token, in transformers format."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    shape = SIZES[size]
    heads = shape["hidden_size"] // 64
    config = transformers.LlamaConfig(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    names = ["<pad>", "<bos>", "<eos>", "<unk>"]
    names += [f"w{i}" for i in range(len(names), shape["vocab_size"])]
    words = {name: i for i, name in enumerate(names)}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    wrapped.save_pretrained(folder)


def config_of(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The run's configuration; its model and prompts are written to `folder`."""
    model = TINY
    if case["model"] != "tiny":
        model = folder / "model"
        random_model(model, case["model"])
    texts = [" ".join(f"w{4 + 30 * i + j}" for j in range(32)) for i in range(256)]
    if case["model"] == "tiny":
        texts = [f"{100 + i}+{200 + 3 * i}+{300 + i}=" for i in range(256)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    n = case.get("n", 4)
    config: dict[str, Any] = {
        "policy": {"model": str(model), "device": "cpu", "threads": 1, "dtype": case.get("dtype", "float32")},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "sampler": {"n": n, "max_new": case["new"], "batch": case["groups"] * n},
        "reward": {"name": "score"},
        "objective": {"name": "rloo", "beta": case.get("beta", 0.05)},
        "train": {"steps": STEPS, "groups": case["groups"], "lr": 1e-5, "checkpoint_every": 1000},
    }
    if "rank" in case:
        config["policy"]["lora"] = {"rank": case["rank"]}
    return config


def score(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Any reward: it must differ within a group."""
    return [float(i % 2) for i in range(len(completions))]


def predict(name: str) -> dict[str, Any]:
    from agro import RunConfig, Trainer

    with tempfile.TemporaryDirectory() as scratch:
        began, folder = time.process_time(), Path(scratch)
        config = RunConfig.of(config_of(CASES[name], folder))
        found: dict[str, Any] = Trainer(config, folder / "run", rewards={"score": score}).plan()
        return found | {"cpu_of_dry_run": time.process_time() - began}


def train(name: str) -> dict[str, Any]:
    """Seconds and CPU seconds of the steps, and the largest memory of the process up to the last one."""
    from agro import RunConfig, Trainer

    names = ("seconds", "seconds_sample", "seconds_train", "sampled_tokens", "tokens")
    clock = recording.step_clock(*names)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = RunConfig.of(config_of(CASES[name], folder))
        Trainer(config, folder / "run", monitors=[clock], rewards={"score": score}).run()
    middle = {name: statistics.median(s[name] for s in clock.steps[1:]) for name in (*names, "cpu")}
    return middle | {"peak": clock.peak, "peak_with_saving": recording.peak_memory()}


def compare(name: str) -> list[dict[str, Any]]:
    """Time and memory of one case, predicted and of the run, each in a process of its own."""
    plan, run = (recording.apart(__file__, ROOT, what, name) for what in ("predict", "train"))
    [phase] = plan["phases"]
    pairs = {
        "time": (sum(phase["step_seconds"].values()), run["cpu"]),
        "memory": (phase["peak"], run["peak"]),
    }
    rows = []
    for what, (guess, found) in pairs.items():
        more = {"parts": phase["step_seconds"], "run": run, "dry_run": plan["cpu_of_dry_run"]}
        more["machine"] = recording.machine_of_models()
        ratio = guess / found
        rows.append(recording.row(f"{what}: {name}", [guess], goal=1.0, ratio=ratio, peer=[found], **more))
        print(f"{what}: {name}: {guess:.4g} predicted, {found:.4g} measured, {guess / found:.2f}", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        unit, scale = ("GB", 1e-9) if row["name"].startswith("memory") else ("s", 1.0)
        both = [f"{scale * row[key][0]:.3g} {unit}" for key in ("ours", "peer")]
        cells.append([row["name"], *both, f"{row['ratio']:.2f}"])
    lines = [recording.markdown(["case", "predicted", "measured", "ratio"], cells)]
    last = rows[-1]
    note = f"`python benchmarks/scaling/predicted.py`, commit {last['commit']}, {last['machine']}"
    return "\n".join([*lines, "", note, ""])


def main() -> None:
    for name in sys.argv[1:] or CASES:
        if CASES[name]["model"] == "tiny" and not TINY.is_dir():
            print(f"{name}: skipped: {TINY} isn't there", flush=True)
            continue
        rows = recording.keep(RESULTS, *compare(name))
        Path(__file__).with_name("scaling.md").write_text(table(rows))


if __name__ == "__main__":
    ways = {"predict": predict, "train": train}
    if sys.argv[1:2] and sys.argv[1] in ways:
        print(json.dumps(ways[sys.argv[1]](sys.argv[2])))
    else:
        main()
