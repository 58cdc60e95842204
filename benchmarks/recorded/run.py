"""Record what synchronous runs come to, byte for byte, and check that a changed trainer comes to the same.

    python benchmarks/recorded/run.py record
    python benchmarks/recorded/run.py check [CASE ...] [--without CASE ...]
                                               [--renamed OLD=NEW ...] [--new KEY ...]

The cases are those of cases.toml. Each trains a small model in a folder of its own. What is kept of it: the
SHA-256 of the weights that it leaves, and its metrics without the times. The code that trains is that of the
repository which this script is in. `check` exits with 1 and names each case, file and metric (with its steps)
that differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE), str(ROOT / "examples")]

import demo  # noqa: E402
import torch  # noqa: E402
from files import FILES  # noqa: E402

from agro import RunConfig, Trainer  # noqa: E402
from benchmarks import recording  # noqa: E402

RECORDED = HERE / "recorded.json"
CASES: dict[str, dict[str, Any]] = tomllib.loads((HERE / "cases.toml").read_text("utf-8"))
ORDINARY = CASES.pop("ordinary")
DEMO = "demo"  # that of examples/, which takes a few minutes
WEIGHTS = [f"{folder}/*.safetensors" for folder in ("model", "adapter", "best")]
WEIGHTS.append("checkpoints/*/value.safetensors")
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "peft", "safetensors")
ABSENT = "absent"  # in place of a value's JSON, where there is none
Values = dict[str, Any]


def config_of(folder: Path, sections: Values) -> RunConfig:
    """The ordinary run, changed section by section; objectives, phases and rewards are given whole."""
    values = dict(ORDINARY)
    for name, changes in sections.items():
        whole = name in ("objective", "phases", "reward", "environment")
        values[name] = changes if whole else {**values.get(name, {}), **changes}
    return RunConfig.of(filled(values, folder))


def filled(value: Any, folder: Path) -> Any:
    """With a file for each "@NAME", a model for each "@ RUN/…" of the run of two steps, and folders for HERE
    and ROOT."""
    if isinstance(value, dict):
        return {key: filled(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, folder) for inner in value]
    if not isinstance(value, str):
        return value
    if value.startswith("@ "):
        return str(folder / value[2:])
    if value.startswith("@"):
        return FILES[value[1:]](folder)
    return value.replace("HERE", str(HERE)).replace("ROOT", str(ROOT))


def trained(name: str, folder: Path) -> Path:
    """The folder of the run of a case.

    `before`: runs that are made first, whose models it may read; `stop`: the step where it is stopped, and
    resumed; `happens`: a metric that has to be 1 once.
    """
    out = folder / "run"
    if name == DEMO:
        return Trainer(demo.configure(out, 0), out).run()
    case = dict(CASES[name])
    before, happens = case.pop("before", {}), case.pop("happens", None)
    stop = case.pop("stop", 0)
    for run, sections in before.items():
        Trainer(config_of(folder, sections), folder / run).run()
    config = config_of(folder, case)
    if stop:
        shorter = config.model_copy(update={"train": config.train.model_copy(update={"steps": stop})})
        Trainer(shorter, out).run()
    Trainer(config, out, resume=bool(stop)).run()
    assert happens is None or any(m[happens] == 1 for m in metrics(out)), f"{happens} was to be 1 once"
    return out


def metrics(out: Path) -> list[Values]:
    """The lines of metrics.jsonl, without the times."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in row.items() if not k.startswith("seconds") and k != "tokens_per_second"}
        for row in rows
    ]


def train(name: str) -> Values:
    """Train a case anew, in a folder that is then removed: the digests of its weights, and its metrics.

    What it says on the way is shown if it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        said, folder = Path(scratch) / "said", Path(scratch) / "case"
        folder.mkdir()
        with contextlib.ExitStack() as shown:
            shown.callback(lambda: sys.stderr.write(said.read_text()))
            with said.open("w") as file, contextlib.redirect_stderr(file):
                out = trained(name, folder)
            shown.pop_all()
        files = sorted(path for pattern in WEIGHTS for path in out.glob(pattern))
        digests = {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
        return {"weights": digests, "metrics": metrics(out)}


def origin() -> dict[str, str]:
    """The commit, and what the last bits of a number may hang on."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    processor = f"{recording.processor()}, {torch.backends.cpu.get_cpu_capability()}"
    python = platform.python_version()
    return {"commit": commit, "processor": processor, "python": python} | {x: version(x) for x in LIBRARIES}


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """The JSON of each value, under dotted keys."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{before}{key}.")
        else:
            found[before + key] = json.dumps(value)
    return found


def differences(was: Values, now: Values, renamed: Mapping[str, str], new: Sequence[str]) -> list[str]:
    """What of a case isn't as it was recorded: files, and metrics with the steps where they differ."""
    found = []
    for file in sorted(was["weights"].keys() | now["weights"].keys()):
        before, after = was["weights"].get(file, ABSENT), now["weights"].get(file, ABSENT)
        if before != after:
            found.append(f"{file}: {after[:12]}, was {before[:12]}")
    then = [{renamed.get(k, k): v for k, v in line.items()} for line in was["metrics"]]
    here = [{k: v for k, v in line.items() if k not in new} for line in now["metrics"]]
    steps = [[line["step"] for line in side] for side in (then, here)]
    if steps[0] != steps[1]:
        return [*found, f"lines of steps {steps[1]}, were {steps[0]}"]
    pairs = [(a["step"], flat(a), flat(b)) for a, b in zip(then, here, strict=True)]
    for key in dict.fromkeys(key for _, *sides in pairs for side in sides for key in side):
        other = [
            (step, a.get(key, ABSENT), b.get(key, ABSENT)) for step, a, b in pairs if a.get(key) != b.get(key)
        ]
        if other:
            step, before, after = other[0]
            at = ", ".join(str(each[0]) for each in other)
            found.append(f"{key}: step {at} (step {step}: {after}, was {before})")
    return found


def record() -> int:
    cases = {}
    for name in (*CASES, DEMO):
        began = time.monotonic()
        cases[name] = train(name)
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    RECORDED.write_text(json.dumps({**origin(), "cases": cases}, indent=1) + "\n")
    print(f"recorded at {origin()['commit']}, {ROOT}")
    return 0


def check(names: Sequence[str], renamed: Mapping[str, str], new: Sequence[str]) -> int:
    if not RECORDED.exists():
        raise SystemExit(f"{RECORDED}: missing; run record in a checkout of before, and copy it here")
    recorded = json.loads(RECORDED.read_text())
    was = {**recorded.get("machine", {}), **recorded}  # where earlier commits recorded it
    for key, here in origin().items():
        if here != was.get(key):
            print(f"{key}: {here}, recorded {was.get(key)}" + "; bits may differ" * (key != "commit"))
    different = []
    for name in names:
        began = time.monotonic()
        try:
            case = recorded["cases"].get(name)
            found = differences(case, train(name), renamed, new) if case else ["not recorded"]
        except Exception as error:  # noqa: BLE001  the other cases are to be heard too
            traceback.print_exc()
            found = [f"failed: {error!r}"]
        print(f"{name}: {'DIFFERS' if found else 'equal'}, {time.monotonic() - began:.1f} s", flush=True)
        print("".join(f"    {line}\n" for line in found), end="")
        different += [name] * bool(found)
    ends = "".join(f"; {name} differs" for name in different)
    print(f"{len(names) - len(different)} of {len(names)} cases are equal{ends}")
    return int(bool(different))


def main() -> int:
    every = [*CASES, DEMO]
    parser = recording.parser(__doc__, renamed=[], new=[])  # OLD=NEW, KEY
    parser.add_argument("command", choices=("record", "check"))
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all, or some of {', '.join(every)}")
    parser.add_argument("--without", nargs="+", default=[], metavar="CASE", choices=every)
    asked = parser.parse_args()
    if asked.command == "record":
        if asked.cases or asked.without or asked.renamed or asked.new:
            parser.error("record takes no cases and no options")
        return record()
    if unknown := [name for name in asked.cases if name not in every]:
        parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(every)}")
    renamed = dict(names.split("=") for names in asked.renamed)
    names = [name for name in asked.cases or every if name not in asked.without]
    return check(names, renamed, asked.new)


if __name__ == "__main__":
    sys.exit(main())
