"""Record what synchronous runs come to, byte for byte, and check that a changed trainer comes to the same.

    python benchmarks/recorded/run.py record
    python benchmarks/recorded/run.py check [CASE ...] [--without CASE ...]
                                               [--renamed OLD=NEW ...] [--new KEY ...]

Each case trains a small model in a folder of its own. What is kept of it: the SHA-256 of the weights that it
leaves, and its metrics without the times. The code that trains is that of the repository which this script is
in. `check` exits with 1 and names each case, file and metric (with its steps) that differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import torch  # noqa: E402

from agro import Refused, RunConfig, Trainer  # noqa: E402
from agro.demo import configure  # noqa: E402
from agro.store import Pair, Store  # noqa: E402
from agro.types import Sample  # noqa: E402

RECORDED = HERE / "recorded.json"
DIGITS = "0123456789"
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "peft", "safetensors")
WEIGHTS = (
    "model/*.safetensors",
    "adapter/*.safetensors",
    "best/*.safetensors",
    "checkpoints/*/value.safetensors",
)
ABSENT = "absent"  # in place of a value's JSON, where there is none

Values = dict[str, Any]
Case = Callable[[Path], Path]  # trains in a folder and returns the run's
CASES: dict[str, Case] = {}


def case(train: Case) -> Case:
    """List it under its name."""
    CASES[train.__name__.replace("_", "-")] = train
    return train


def prompts(path: Path, numbers: Iterable[int]) -> str:
    """A file of prompts such as `037>`, whose answer is the last digit."""
    lines = (json.dumps({"prompt": f"{i:03d}>", "answer": f"{i % 10}"}) + "\n" for i in numbers)
    path.write_text("".join(lines))
    return str(path)


def log(path: Path, groups: Iterable[int] = range(100, 110), size: int = 4, **fields: Any) -> str:
    """A store of texts and rewards alone, as of an imported log."""
    with Store.open(path) as store:
        store.append(
            Sample(
                f"{g}>",
                str((g + i) % 10) * (i % 3 + 1),
                **{"reward": (i * g % 4) / 3, "source": "someone", **fields},
            )
            for g in groups
            for i in range(size)
        )
    return str(path)


def reward(name: str) -> Values:
    return {"name": f"{HERE / 'reward.py'}:{name}"}


def small(folder: Path, **sections: Values) -> RunConfig:
    """Fresh AGRO with a model of a few thousand weights; each of `sections` changes values of its own.

    An objective is given whole.
    """
    new = {
        "alphabet": DIGITS + ">",
        "hidden": 16,
        "layers": 2,
        "heads": 2,
        "context": 16,
        "initializer_range": 0.2,
    }
    values: Values = {
        "policy": {"new": new},
        "data": {"prompts": prompts(folder / "prompts.jsonl", range(60))},
        "sampler": {"n": 3, "max_new": 3},
        "reward": reward("share"),
        "objective": {"name": "agro", "beta": 0.1},
        "train": {"steps": 8, "groups": 4, "micro_batch": 4, "lr": 1e-2, "checkpoint_every": 3},
    }
    for name, changes in sections.items():
        alone = name in ("objective", "phases", "reward")
        values[name] = changes if alone else {**values.get(name, {}), **changes}
    return RunConfig.of(values)


def from_store(store: str, **data: Any) -> Values:
    """The section [data] of a run that samples nothing."""
    return {"prompts": None, "store": store, "replay": 1.0, **data}


def run(folder: Path, **sections: Any) -> Path:
    return Trainer(small(folder, **sections), folder / "run").run()


@case
def fresh(folder: Path) -> Path:
    """Held-out prompts measured on the way; warm-up and a schedule of the learning rate."""
    return run(
        folder,
        data={"eval_prompts": prompts(folder / "held.jsonl", range(60, 70))},
        evaluate={"every": 2, "n": 2, "keep_best": True},
        train={"warmup": 2, "schedule": "cosine", "weight_decay": 0.01, "clip": 0.5},
    )


@case
def patience(folder: Path) -> Path:
    """A run that ends early, as held-out rewards don't rise."""
    held = prompts(folder / "held.jsonl", range(60, 64))
    return run(
        folder,
        data={"eval_prompts": held},
        evaluate={"every": 1, "patience": 2},
        train={"steps": 30, "lr": 1e-6},
    )


@case
def two_rewards(folder: Path) -> Path:
    parts = [{**reward("share"), "label": "share"}, {**reward("short"), "label": "short", "weight": 0.3}]
    return run(folder, reward={"functions": parts}, train={"micro_batch": None, "micro_tokens": 20})


@case
def failed_rewards(folder: Path) -> Path:
    return run(folder, reward={**reward("some_fail"), "max_failed": 1.0}, sampler={"n": 6})


@case
def replay(folder: Path) -> Path:
    """Half of each step's groups are of a log without tokens, the other half fresh."""
    return run(folder, data={"store": log(folder / "log.db"), "replay": 0.5})


@case
def log_only(folder: Path) -> Path:
    return run(folder, data=from_store(log(folder / "log.db", size=5), group_size=3))


@case
def left_out(folder: Path) -> Path:
    """Responses that are too long, in draws of any order."""
    data = from_store(log(folder / "log.db"), order="uniform")
    return run(folder, data=data, train={"max_length": 7, "gradient_checkpointing": True})


def base(folder: Path) -> str:
    """A model that a run of two steps has left."""
    (folder / "base").mkdir()
    return str(run(folder / "base", train={"steps": 2}) / "model")


@case
def lora(folder: Path) -> Path:
    return run(folder, policy={"new": None, "model": base(folder), "lora": {"rank": 2}})


@case
def lora_going_on(folder: Path) -> Path:
    """From an adapter that there is; RUN/model is an adapter too."""
    model = base(folder)
    first = Trainer(
        small(folder, policy={"new": None, "model": model, "lora": {"rank": 2}}), folder / "first"
    ).run()
    adapter = {"start": str(first / "adapter"), "merge": False}
    return run(folder, policy={"new": None, "model": model, "lora": adapter})


def valued(folder: Path, name: str) -> Path:
    """One response a prompt, with a learned value."""
    return run(folder, objective={"name": name, "beta": 0.1}, sampler={"n": 1}, train={"groups": 12})


@case
def dro(folder: Path) -> Path:
    return valued(folder, "dro")


@case
def prefix_consistency(folder: Path) -> Path:
    return valued(folder, "prefix_consistency")


@case
def value_over_phases(folder: Path) -> Path:
    """A phase that learns a value, one that leaves it, and one that goes on with it on stored samples."""
    valued = {"name": "dro", "beta": 0.1}
    phases = [
        {"name": "first", "objective": valued, "train": {"steps": 3}},
        {"name": "without", "train": {"steps": 2}},
        {"name": "again", "objective": valued, "data": {"replay": 0.5}, "train": {"steps": 3}},
    ]
    return run(folder, phases=phases)


def judged(path: Path) -> str:
    """Groups of four responses: of three pairs of them it is known which is the better one."""
    with Store.open(path) as store:
        for g in range(100, 112):
            digits = [g, g + 1, g + 2, g + 4]
            ids = store.append(Sample(f"{g}>", str(d % 10) * 3, reward=(g - d) / 4) for d in digits)
            store.add_pairs(
                [Pair(ids[0], ids[1], 4, 1), Pair(ids[2], ids[3], 3, 2), Pair(ids[0], ids[3], 5, 0)]
            )
    return str(path)


@case
def dpo(folder: Path) -> Path:
    data = from_store(judged(folder / "pairs.db"), group_size=3)
    return run(folder, data=data, objective={"name": "dpo", "beta": 0.3, "votes": "mean"})


@case
def pair_consistency(folder: Path) -> Path:
    data = from_store(judged(folder / "pairs.db"))
    return run(folder, data=data, objective={"name": "pair_consistency", "beta": 0.3, "gap": "reward"})


@case
def reference_ema(folder: Path) -> Path:
    return run(folder, policy={"reference": "ema", "reference_decay": 0.9})


@case
def reference_periodic(folder: Path) -> Path:
    return run(folder, policy={"reference": "periodic", "reference_every": 3})


@case
def reference_phase(folder: Path) -> Path:
    phases = [
        {"name": "fresh", "train": {"steps": 5}},
        {
            "name": "mixed",
            "data": {"replay": 0.5},
            "objective": {"beta": 0.3},
            "train": {"steps": 5, "updates": 2},
        },
    ]
    return run(folder, policy={"reference": "phase"}, phases=phases)


@case
def reference_model(folder: Path) -> Path:
    first = small(folder, train={"steps": 2, "seed": 1})
    other = Trainer(first, folder / "other").run() / "model"
    return run(
        folder,
        policy={"new": None, "model": base(folder), "reference": "model", "reference_model": str(other)},
    )


def rolled_back(folder: Path, kl: float, **sections: Any) -> Path:
    """The learning rate is far too high, so the KL passes the guard's limit."""
    guard = {"kl": kl, "action": "rollback", "rollbacks": 100}
    out = run(folder, guard=guard, train={"steps": 14, "lr": 5e-2}, **sections)
    assert any(m["rolled_back"] == 1 for m in metrics(out)), "it was to go back once at least"
    return out


@case
def rollback(folder: Path) -> Path:
    return rolled_back(folder, 2.0)


@case
def rollback_ema(folder: Path) -> Path:
    """The reference goes back too."""
    return rolled_back(folder, 1.0, policy={"reference": "ema", "reference_decay": 0.9})


@case
def rollback_value(folder: Path) -> Path:
    """So does the learned value."""
    return rolled_back(folder, 2.0, objective={"name": "dro", "beta": 0.1})


@case
def guard_skip(folder: Path) -> Path:
    """Updates that are left out."""
    guard = {"loss": 4.0, "window": 5, "action": "skip"}
    out = run(folder, guard=guard, train={"steps": 14, "groups": 2, "max_skipped": 14})
    assert any(m["skipped"] == 1 for m in metrics(out)), "it was to skip an update at least"
    return out


@case
def sft_then_grpo(folder: Path) -> Path:
    store = log(folder / "store.db", range(100, 140), size=1, reward=None, role="expert", source="teacher")
    grpo = {"name": "grpo", "ratio": "old", "beta": 0.05}
    phases = [
        {
            "name": "imitate",
            "objective": {"name": "sft"},
            "data": {"replay": 1.0, "roles": ["expert"]},
            "train": {"steps": 6, "groups": 8},
        },
        {"name": "grpo", "objective": grpo, "train": {"steps": 5, "updates": 3, "schedule": "linear"}},
    ]
    return run(folder, data={"store": store}, policy={"reference": "phase"}, phases=phases)


@case
def beta_tuned(folder: Path) -> Path:
    beta = {"start": 0.02, "target_kl": 0.3, "rate": 0.2}
    return run(folder, objective={"name": "agro", "beta": beta}, train={"steps": 10})


@case
def beta_scheduled(folder: Path) -> Path:
    """To 0, where the objective no longer reads the reference."""
    beta = {"start": 0.3, "end": 0.0, "steps": 5, "shape": "cosine"}
    return run(folder, objective={"name": "agro", "beta": beta}, evaluate={"beta": 0.2})


@case
def agro_onpolicy(folder: Path) -> Path:
    return run(folder, objective={"name": "agro_onpolicy", "beta": 0.1})


@case
def agro_onpolicy_baseline(folder: Path) -> Path:
    return run(folder, objective={"name": "agro_onpolicy", "beta": 0.1, "baseline": True})


@case
def agro_local(folder: Path) -> Path:
    """Each token's whole distribution is compared with the reference's, by an option of two spellings."""
    objective = {"name": "agro", "beta": 0.1}
    try:
        return run(folder, objective={**objective, "regularizer": "local"})
    except Refused:  # before anything is trained: this code has the other spelling
        return run(folder, objective={**objective, "regulariser": "local"})


@case
def cache_reference(folder: Path) -> Path:
    """Each stored group is drawn several times."""
    data = {"store": log(folder / "log.db", range(100, 105)), "replay": 0.5}
    return run(folder, data=data, policy={"cache_reference": True})


@case
def calculator(folder: Path) -> Path:
    """Texts of a teacher that calls it are imitated; then episodes, fresh and stored."""
    asked = [(f"{a}*{b}=", str(a * b)) for a in range(1, 10) for b in range(1, 10)]
    lines = (json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in asked[::2])
    (folder / "asked.jsonl").write_text("".join(lines))
    (folder / "held.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in asked[1:20:2])
    )
    with Store.open(folder / "store.db") as store:
        store.append(
            Sample(p, f"[{p[:-1]}]({a}){a}", role="expert", source="teacher") for p, a in asked[21::2]
        )
    new = {
        "alphabet": DIGITS + "*=[]()?",
        "hidden": 32,
        "layers": 2,
        "heads": 2,
        "context": 32,
        "initializer_range": 0.2,
    }
    phases = [
        {
            "name": "imitate",
            "objective": {"name": "sft"},
            "data": {"replay": 1.0, "roles": ["expert"]},
            "train": {"steps": 40, "groups": 16},
        },
        {"name": "episodes", "train": {"steps": 4, "lr": 1e-3}},
        {"name": "mixed", "data": {"replay": 0.5, "roles": ["policy"]}, "train": {"steps": 4, "lr": 1e-3}},
    ]
    return run(
        folder,
        policy={"new": new, "reference": "phase"},
        environment={
            "name": str(HERE.parents[1] / "examples/environments/calculator.py") + ":Calculator",
            "max_turns": 3,
            "options": {"call": ["[", "]"], "result": "({})", "error": "?"},
        },
        data={
            "prompts": str(folder / "asked.jsonl"),
            "eval_prompts": str(folder / "held.jsonl"),
            "store": str(folder / "store.db"),
        },
        sampler={"n": 4, "max_new": 8},
        reward=reward("places"),
        train={"micro_batch": 8},
        phases=phases,
    )


@case
def sampler_top_p(folder: Path) -> Path:
    return run(folder, sampler={"top_p": 0.8, "temperature": 1.3, "batch": 5}, policy={"temperature": 1.1})


@case
def sampler_top_k_and_stop(folder: Path) -> Path:
    return run(folder, sampler={"top_k": 6, "min_p": 0.05, "stop": ["7", "33"], "max_new": 6})


@case
def resume(folder: Path) -> Path:
    """Of four steps, then of eight."""
    Trainer(small(folder, train={"steps": 4}), folder / "run").run()
    return Trainer(small(folder), folder / "run", resume=True).run()


def killed_and_resumed(folder: Path, at: int, **sections: Any) -> Path:
    """Killed when step `at` is logged, or soon after: where that is must not matter."""
    config, out = small(folder, **sections), folder / "run"
    child = os.fork()
    if not child:
        try:
            Trainer(config, out).run()
        finally:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    lines = out / "metrics.jsonl"
    while not (lines.exists() and lines.read_text().count("\n") >= at):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended by itself"
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (out / "model").exists(), "the run was to be killed before its end"
    return Trainer(config, out, resume=True).run()


@case
def killed(folder: Path) -> Path:
    """After step 5, of which the last checkpoint knows nothing; fresh and stored groups."""
    data = {"store": log(folder / "log.db"), "replay": 0.5}
    return killed_and_resumed(folder, 5, data=data, train={"steps": 10, "updates": 2})


@case
def killed_in_second_phase(folder: Path) -> Path:
    """Where a reference follows, beta is tuned, the learning rate falls and a learned value stays."""
    tuned = {"name": "agro", "beta": {"start": 0.02, "target_kl": 0.3, "rate": 0.2}}
    phases = [
        {"name": "valued", "objective": {"name": "dro", "beta": 0.1}, "train": {"steps": 4}},
        {
            "name": "tuned",
            "objective": tuned,
            "data": {"replay": 0.5},
            "train": {"steps": 9, "schedule": "linear"},
        },
    ]
    policy = {"reference": "ema", "reference_decay": 0.8}
    return killed_and_resumed(folder, 9, phases=phases, policy=policy, train={"groups": 8})


@case
def held_out_groups(folder: Path) -> Path:
    """Groups of one source and role among others; several updates a batch."""
    store = log(folder / "log.db")
    log(folder / "log.db", range(100, 115), source="others")
    log(folder / "log.db", range(105, 120), role="expert")
    held = log(folder / "held.db", range(200, 206))
    with Store.open(folder / "held.db") as opened:
        opened.append(Sample("x>", "12", reward=float(i)) for i in range(2))
    data = from_store(store, eval_store=held, roles=["log"], sources=["someone"])
    return run(folder, data=data, train={"updates": 2}, evaluate={"every": 3})


@case
def max_age(folder: Path) -> Path:
    """Fresh groups, and those that the run itself has sampled not long ago."""
    log(folder / "store.db")
    data = {
        "store": str(folder / "store.db"),
        "replay": 0.5,
        "max_age": 6,
        "order": "uniform",
        "roles": ["policy"],
    }
    return run(folder, data=data, train={"steps": 10, "updates": 2})


@case
def stored_value(folder: Path) -> Path:
    values = log(folder / "values.db", size=6)
    stored = {"name": "squared_consistency", "beta": 0.1, "baseline": "stored", "scale": "square"}
    data = from_store(log(folder / "log.db"), group_size=1, value_store=values)
    return run(folder, data=data, objective=stored)


@case
def demo(folder: Path) -> Path:
    """`make demo`; it takes a few minutes."""
    return Trainer(configure(folder / "run", 0), folder / "run").run()


def metrics(out: Path) -> list[Values]:
    """The lines of metrics.jsonl, without the times."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not is_time(k)} for line in lines]


def is_time(key: str) -> bool:
    return key.startswith("seconds") or key == "tokens_per_second"


def left(out: Path) -> Values:
    """What is kept of a run: the digests of its weights, and its metrics."""
    files = sorted(path for pattern in WEIGHTS for path in out.glob(pattern))
    digests = {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    return {"weights": digests, "metrics": metrics(out)}


def train(name: str) -> Values:
    """Train a case anew, in a folder that is then removed; what it says on the way is shown if it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        said = Path(scratch) / "said"
        folder = Path(scratch) / "case"
        folder.mkdir()
        with contextlib.ExitStack() as shown:
            shown.callback(lambda: sys.stderr.write(said.read_text()))
            with said.open("w") as file, contextlib.redirect_stderr(file):
                out = CASES[name](folder)
            shown.pop_all()
        return left(out)


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """The JSON of each value, under dotted keys."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{before}{key}.")
        else:
            found[before + key] = json.dumps(value)
    return found


def differences(was: Values, now: Values) -> list[str]:
    """What of a case isn't as it was recorded: files, and metrics with the steps where they differ."""
    found = []
    for file in sorted(was["weights"].keys() | now["weights"].keys()):
        before, after = was["weights"].get(file, ABSENT), now["weights"].get(file, ABSENT)
        if before != after:
            found.append(f"{file}: {after[:12]}, was {before[:12]}")
    then, here = ({m["step"]: flat(m) for m in side["metrics"]} for side in (was, now))
    steps = list(dict.fromkeys([*then, *here]))
    keys = dict.fromkeys(key for side in (then, here) for line in side.values() for key in line)
    for key in keys:
        pairs = {s: (then.get(s, {}).get(key, ABSENT), here.get(s, {}).get(key, ABSENT)) for s in steps}
        other = [step for step, (before, after) in pairs.items() if before != after]
        if other:
            before, after = pairs[other[0]]
            found.append(f"{key}: step {spans(other)} (step {other[0]}: {after}, was {before})")
    order = [[m["step"] for m in side["metrics"]] for side in (was, now)]
    if order[0] != order[1] and then.keys() == here.keys():
        found.append(f"step: lines of steps {order[1]}, were {order[0]}")
    return found


def spans(steps: Sequence[int]) -> str:
    """`1, 3-6` for 1, 3, 4, 5, 6."""
    found: list[list[int]] = []
    for step in sorted(steps):
        if found and step == found[-1][-1] + 1:
            found[-1] = [found[-1][0], step]
        else:
            found.append([step])
    return ", ".join("-".join(map(str, span)) for span in found)


def machine() -> dict[str, str]:
    """What the last bits of a number may hang on."""
    told = [line.split(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()]
    cpu = {key.strip(): value.strip() for key, value in told}
    numbers = ", ".join(f"{key} {cpu[key]}" for key in ("cpu family", "model", "stepping") if key in cpu)
    return {
        "cpu": f"{cpu.get('model name', platform.machine())} ({numbers})",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(HERE), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", str(HERE.parents[1] / "agro"))
    return git("rev-parse", "HEAD") + (" and changes to agro" if changed else "")


def record() -> int:
    cases = {}
    for name in CASES:
        began = time.monotonic()
        cases[name] = train(name)
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    RECORDED.write_text(as_text({"commit": commit(), "machine": machine(), "cases": cases}) + "\n")
    print(f"recorded at {commit()}, {HERE.parents[1]}")
    return 0


def as_text(value: Any, indent: int = 0) -> str:
    """JSON with a line for each line of metrics."""
    pad = "\n" + " " * (indent + 1)
    if isinstance(value, dict) and "step" not in value:
        items = [f"{json.dumps(k)}: {as_text(v, indent + 1)}" for k, v in value.items()]
        return "{" + pad + f",{pad}".join(items) + pad[:-1] + "}"
    if isinstance(value, list):
        return "[" + pad + f",{pad}".join(json.dumps(v) for v in value) + pad[:-1] + "]"
    return json.dumps(value)


def with_names(was: Values, renamed: Mapping[str, str]) -> Values:
    """A recorded case, its metrics by the names that they have now."""
    return {**was, "metrics": [{renamed.get(k, k): v for k, v in line.items()} for line in was["metrics"]]}


def without_metrics(now: Values, new: Sequence[str]) -> Values:
    """The values without the metrics `new`."""
    return {**now, "metrics": [{k: v for k, v in line.items() if k not in new} for line in now["metrics"]]}


def compare(was: Values | None, name: str, renamed: Mapping[str, str], new: Sequence[str]) -> list[str]:
    """Train a case anew: what isn't as it was recorded."""
    if was is None:
        return ["not recorded"]
    try:
        now = train(name)
    except Exception as error:  # noqa: BLE001  the other cases are to be heard too
        traceback.print_exc()
        return [f"failed: {error!r}"]
    return differences(with_names(was, renamed), without_metrics(now, new))


def check(names: Sequence[str], renamed: Mapping[str, str], new: Sequence[str]) -> int:
    recorded = json.loads(RECORDED.read_text())
    print(f"recorded at {recorded['commit']}; here: {commit()}, {HERE.parents[1]}")
    for key, here in machine().items():
        if here != recorded["machine"].get(key):
            print(f"note: {key} is {here}, was {recorded['machine'].get(key)}: the last bits may differ")
    different = []
    for name in names:
        began = time.monotonic()
        found = compare(recorded["cases"].get(name), name, renamed, new)
        print(f"{name}: {'DIFFERS' if found else 'equal'}, {time.monotonic() - began:.1f} s", flush=True)
        for line in found:
            print(f"    {line}")
        different += [name] * bool(found)
    print(
        f"{len(names) - len(different)} of {len(names)} cases are equal"
        + "".join(f"; {n} differs" for n in different)
    )
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", help="train every case anew and write recorded.json")
    checking = commands.add_parser("check", help="train again and compare")
    checking.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"all where none is given: {', '.join(CASES)}"
    )
    checking.add_argument("--without", nargs="+", default=[], metavar="CASE", choices=list(CASES))
    checking.add_argument(
        "--renamed", nargs="+", default=[], metavar="OLD=NEW", help="metrics that have another name now"
    )
    checking.add_argument(
        "--new", nargs="+", default=[], metavar="KEY", help="metrics that didn't exist when it was recorded"
    )
    asked = parser.parse_args()
    if asked.command == "record":
        return record()
    if unknown := [name for name in asked.cases if name not in CASES]:
        parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(CASES)}")
    renamed = dict(names.split("=") for names in asked.renamed)
    return check([name for name in asked.cases or CASES if name not in asked.without], renamed, asked.new)


if __name__ == "__main__":
    sys.exit(main())
