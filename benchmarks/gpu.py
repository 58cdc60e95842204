"""What one GPU tells in a quarter of an hour: parts in processes of their own, each with a time limit.

    python benchmarks/gpu.py --within 540 --out FOLDER [--parts start correct …] [--commit ID]
    python benchmarks/gpu.py --within 60 --out FOLDER --small --device cpu

| part | seconds | what |
|---|---|---|
| start | 40 | imports everything, counts what is there, times one update: if it fails, so would the others |
| correct | 130 | log-probs, decoding and gradients against the CPU's, every objective, resume, CUDA tests |
| fast | 80 | training beside prime-rl's baselines, decoding, log-probs of 152k tokens beside the plain way |
| learns | 290 | the paper's figure 5 at a hundred times the size of reproductions/paper |

Nothing is downloaded or compiled, and git isn't asked: `--commit` names the commit, else it is read from
.git where that is there, or unknown. Results are written as they come, so that what a limit cuts off isn't
lost: FOLDER/PART.json by each part, result.json with how each part ended, log.txt with what they printed
last, learns.svg. A part that ends early leaves its time to the last one. The exit code is 0 where all parts
ended well, 1 where one didn't, 2 for arguments that can't be.

--small is the same code with tiny shapes and models, and the parts after the first beside each other; its
numbers say nothing. It has not run on a GPU yet.
What a machine must have: docs/scaling.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"start": 40, "correct": 130, "fast": 80, "learns": 290}  # seconds that each may take
KEPT = 1 << 20  # bytes of what a part printed


def commit_of(root: Path) -> str | None:
    """The commit that is checked out, read without git; None where it can't be told."""
    try:
        git = root / ".git"
        if git.is_file():  # a work tree beside its repository
            git = (root / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head
        name = head.removeprefix("ref:").strip()
        common = git / "commondir"
        shared = (git / common.read_text(encoding="utf-8").strip()).resolve() if common.exists() else git
        for folder in (git, shared):
            if (folder / name).exists():
                return (folder / name).read_text(encoding="utf-8").strip()
        packed = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except OSError:
        return None


def write(file: Path, content: Any) -> None:
    """JSON, complete or as it was."""
    making = file.with_name(f".{file.name}")
    making.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    making.replace(file)


def run(part: str, seconds: float, asked: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """One part in a process of its own, which is ended with all its children after `seconds`; what it printed
    too."""
    command = [sys.executable, "-m", f"benchmarks.on_gpu.{part}", "--device", asked.device]
    command += ["--out", str(asked.out), "--seconds", f"{seconds:.0f}"]
    command += ["--small"] if asked.small else []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # which its deterministic products need
    if asked.device == "cpu":  # whose small models more threads slow down
        environment.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    printed = asked.out / f".{part}.txt"
    with printed.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what it left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = printed.read_bytes()[-KEPT:].decode("utf-8", "replace")
    printed.unlink()
    ended = {0: "well", None: f"out of time after {seconds:.0f} s"}.get(code, f"failed (exit code {code})")
    row: dict[str, Any] = {"part": part, "ended": ended, "seconds": round(time.monotonic() - began, 1)}
    if code not in (0, None):
        row["said"] = text.strip().splitlines()[-5:]
    return row, f"== {part}\n{text}\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--within", type=float, default=540, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu", help="folder of the results")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, whose numbers say nothing")
    parser.add_argument("--commit", help="of this code, for the results")
    asked = parser.parse_args(arguments)
    needed = sum(PARTS[part] for part in asked.parts)
    if needed > asked.within and not asked.small:
        parser.error(
            f"expected --within {needed} or more, which is what the parts may take, got {asked.within:g}; "
            "name fewer --parts"
        )
    began = time.monotonic()
    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "commit": asked.commit or commit_of(ROOT),
        "device": asked.device,
        "small": asked.small,
        "within": asked.within,
        "parts": [],
    }
    (asked.out / "log.txt").write_text("", encoding="utf-8")

    def made(part: str) -> bool:
        """Run a part and write how it ended; whether it ended well."""
        remaining = asked.within - 3 - (time.monotonic() - began)  # to write what there is
        if part != asked.parts[-1] and not asked.small:
            remaining = min(remaining, PARTS[part])
        row, text = run(part, max(1.0, remaining), asked)
        with writes:
            result["parts"].append(row)
            result["seconds"] = round(time.monotonic() - began, 1)
            write(asked.out / "result.json", result)
            with (asked.out / "log.txt").open("a", encoding="utf-8") as log:
                log.write(text)
            print(json.dumps(row, ensure_ascii=False), flush=True)
        return bool(row["ended"] == "well")

    writes, parts = threading.Lock(), list(asked.parts)
    if parts[0] == "start" and not made(parts.pop(0)):
        print("the other parts aren't tried", flush=True)
        return 1
    with ThreadPoolExecutor(len(PARTS) if asked.small else 1) as pool:  # small ones beside each other
        return int(not all(list(pool.map(made, parts))))


if __name__ == "__main__":
    sys.exit(main())
