"""A complete step of RLOO with a reference beside TRL's, by the peer's protocol (shared/peers/trl/README.md).

    python benchmarks/trl/run.py --trl-python /tmp/trlenv/bin/python [--cases tiny mid] [--pairs 3]

`tiny` is the peer's 2.4M model: 16 prompts × 4 responses of at most 64 tokens. `mid` is its 34M model with
random weights: 8 × 4 of 256 tokens (agro's may end earlier, with the end token, 1 of 32,000; TRL's don't).
One thread, β = 0.05, one optimizer step a batch, agro's default passes; `mid` also with agro's mixed bf16,
beside the same runs of TRL in float32. A pair is a process of each, in turns; a process gives the medians of
the CPU seconds of its steps, and of these per 1,000 new tokens, without the first two; of `mid`, whose steps
take a minute or two, there is only one. Ratios are of the medians of all pairs. TRL needs an environment of
its own with the packages of the peer's requirements.txt. Rows of benchmarks/results/trl.json with the same
names are replaced.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks import recording  # noqa: E402

RESULTS = ROOT / "benchmarks/results/trl.json"
PEER = ROOT / "../shared/peers/trl"
CASES: dict[str, dict[str, Any]] = {
    "tiny": {"goals": {"float32": 2.0}, "prompts": 16, "new": 64, "steps": 8, "warmup": 2},
    "mid": {"goals": {"float32": 2.5, "mixed": 6.0}, "prompts": 8, "new": 256, "steps": 1, "warmup": 0},
}
SIZE = 4  # responses a prompt, as in recipe.toml


def write_prompts(path: Path, case: str) -> None:
    """The prompts that the peer trains on: of its task, or as its `word_prompts`."""
    sys.path.insert(0, str(PEER))
    import task  # type: ignore[import-not-found]

    texts = task.make_prompts(4096, task.TRAIN_SEED)
    if case == "mid":
        words = random.Random(task.TRAIN_SEED)
        texts = [" ".join(f"w{words.randrange(2, 32000)}" for _ in range(32)) for _ in range(4096)]
    lines = (json.dumps({"prompt": text}) + "\n" for text in texts)
    path.write_text("".join(lines))


def tiny_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    import task

    return [task.reward(p, c) for p, c in zip(prompts, completions, strict=True)]


def mid_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A coin that the text decides, as the peer's."""
    return [float(zlib.crc32(c.encode()) & 1) for c in completions]


def own(case: str, model: str, dtype: str) -> dict[str, Any]:
    """Train in this process; CPU seconds and new tokens of each step, and the peak of the memory in MB."""
    from agro import RunConfig, Trainer

    size = CASES[case]
    samples = [f"sampler.max_new={size['new']}", f"sampler.batch={size['prompts'] * SIZE}"]
    steps = [f"train.steps={size['steps']}", f"train.groups={size['prompts']}"]
    reward = tiny_reward if case == "tiny" else mid_reward
    clock = recording.step_clock("sampled_tokens")
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        write_prompts(prompts, case)
        place = [f"policy.model={model}", f"policy.dtype={dtype}", f"data.prompts={prompts}"]
        config = RunConfig.load(Path(__file__).with_name("recipe.toml"), [*place, *samples, *steps])
        Trainer(config, Path(folder, "run"), monitors=[clock], rewards={"score": reward}).run()
    counted = clock.steps[size["warmup"] :]
    return {
        "cpu": statistics.median(s["cpu"] for s in counted),
        "tokens": statistics.median(s["sampled_tokens"] for s in counted),
        "per_1000": 1000 * statistics.median(s["cpu"] / s["sampled_tokens"] for s in counted),
        "peak_mb": recording.peak_memory() / 1e6,
    }


def measured_peer(python: Path, case: str, model: Path) -> dict[str, Any]:
    size = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        numbers = {name: size[name] for name in ("steps", "warmup", "prompts")}
        options = [f"--{name}={value}" for name, value in numbers.items()]
        options += [f"--max-new={size['new']}", f"--model={model}", f"--out={out}"]
        command = [str(python), "bench_trl.py", *options]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # the peer's folder stays as it is
        subprocess.run(command, cwd=PEER, env=environment, check=True, capture_output=True, text=True)
        found = json.loads(out.read_text())
    summary = found["summary"]
    return {
        "cpu": summary["cpu_s"]["median"],
        "tokens": summary["new_tokens"]["median"],
        "per_1000": found["cpu_s_per_1000_new_tokens"],
        "peak_mb": found["peak_rss_mb"],
        "machine": found["machine"],
    }


def compare(python: Path, case: str, model: Path, pairs: int) -> list[dict[str, Any]]:
    """A row for each type of agro's weights."""
    runs: dict[str, list[dict[str, Any]]] = {dtype: [] for dtype in (*CASES[case]["goals"], "TRL")}
    for _ in range(pairs):
        for who, done in runs.items():
            if who == "TRL":
                found = measured_peer(python, case, model)
            else:
                found = recording.apart(__file__, ROOT, "own", case, str(model), who)
            done.append(found)
            print(f"{case}, {who}: {found['cpu']:.2f} s a step, {found['peak_mb']:.0f} MB", flush=True)
    return [row(case, dtype, runs[dtype], runs["TRL"]) for dtype in CASES[case]["goals"]]


def row(case: str, dtype: str, ours: list[dict[str, Any]], peers: list[dict[str, Any]]) -> dict[str, Any]:
    medians = [
        {key: statistics.median(run[key] for run in runs) for key in ("cpu", "tokens", "per_1000", "peak_mb")}
        for runs in (ours, peers)
    ]
    ratio = {key: medians[1][key] / medians[0][key] for key in medians[0]}
    return recording.row(
        f"step of RLOO, {case}, {dtype}",
        [run["cpu"] for run in ours],
        goal=CASES[case]["goals"][dtype],
        ratio=ratio["cpu"],
        peer=[run["cpu"] for run in peers],
        ratio_per_token=ratio["per_1000"],
        tokens=[each["tokens"] for each in medians],
        peak_mb=[each["peak_mb"] for each in medians],
        memory=1 / ratio["peak_mb"],
        machine=", ".join(f"{name} {value}" for name, value in peers[0]["machine"].items()),
    )


def main() -> None:
    asked = recording.parser(__doc__, trl_python=Path, cases=CASES, pairs=3).parse_args()
    if not PEER.is_dir():
        sys.exit(f"skipped: expected the peer's scripts in {PEER.resolve()}; they aren't there")
    if asked.trl_python is None or not asked.trl_python.exists():
        sys.exit("skipped: expected --trl-python, an interpreter with the peer's requirements.txt installed")
    for case in asked.cases:
        model = PEER.resolve() / "models/tiny"
        if case == "mid":
            model = ROOT.resolve() / "build/trl/mid"
            command = [str(asked.trl_python), "make_model.py", "--mid", str(model.parent)]
            if not model.exists():
                subprocess.run(command, cwd=PEER, check=True)
        for found in compare(asked.trl_python, case, model, asked.pairs):
            recording.keep(RESULTS, found)
            print(f"{found['name']}: {found['ratio']:.2f}x, memory {found['memory']:.2f}", flush=True)


if __name__ == "__main__":
    main()
