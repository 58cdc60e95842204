"""`agro race` as the reproductions run it: from values of a configuration to a row of what it chose."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agro.api.race import Race, key_values
from reproductions import harness

HEAD = ["data", "after a quarter of the steps, at its best rate", "chosen", "held-out reward: start, chosen"]
HEAD += ["on the other held-out prompts", "CPU minutes"]
MADE = "made by race.py --record"


def race(values: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """What race.json has, and the CPU seconds that it took; made once in the folder `out`."""

    def make() -> dict[str, Any]:
        began = harness.cpu_seconds()
        record = Race(list(key_values(values)), out, say=lambda text: print(text, file=sys.stderr)).run()
        for row in record["rows"]:  # folders of this machine
            row.pop("run")
        del record["settings"]
        return record | {"cpu_seconds": harness.cpu_seconds() - began}

    found: dict[str, Any] = harness.once(out / "raced.json", make)
    return found


def table(names: Mapping[str, str], races: Mapping[str, Any]) -> str:
    """Of races by job, whose data have `names`."""
    return harness.markdown(HEAD, [row(names[job], raced) for job, raced in races.items()])


def row(data: str, raced: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    first = min(int(steps) for of in raced["runs"].values() for steps in of)
    best: dict[str, tuple[float, str]] = {}
    for name, of in raced["runs"].items():
        method, rate = _parts(name)
        if str(first) in of:
            best[method] = max(best.get(method, (-1.0, "")), (of[str(first)]["reward"], rate))
    tried = [f"{method} {reward:.2f} ({rate})" for method, (reward, rate) in best.items()]
    refused = {of["candidate"] for of in raced["rows"] if "refused" in of} - set(best)
    tried += [f"{method}: refused" for method in sorted(refused)]
    start = f"{raced['start']['reward']:.2f}"
    if raced["winner"] is None:
        words = ["nothing", start, "–"]
    else:
        steps = raced["runs"][raced["winner"]]
        reached = steps[max(steps, key=int)]["reward"]
        words = [" at ".join(_parts(raced["winner"])), f"{start}, {reached:.2f}", _judged(raced["judged"])]
    return [data, ", ".join(tried), *words, f"{raced['cpu_seconds'] / 60:.1f}"]


def write(
    folder: Path,
    file: str,
    names: Mapping[str, str],
    raced: Mapping[str, Any],
    *,
    record: bool,
    on_page: bool = True,
) -> None:
    """Print the table of races, by job; with `record` put what it is made of into `folder`, and the table too
    where it is `on_page`."""
    text = table(names, raced)
    if record:
        result = {"machine": harness.machine(), "races": raced}
        (folder / file).write_text(json.dumps(result, indent=1) + "\n")
        if on_page:
            harness.put(folder / "README.md", text, MADE)
    print(text)


def _parts(name: str) -> Sequence[str]:
    """The method and the rate of a run's name, whose rate may be 1e-05."""
    method, _, rate = name.partition("-")
    return method, rate


def _judged(judged: Mapping[str, Any] | None) -> str:
    if judged is None:
        return "too few"
    change = f"{judged['difference']:+.2f} ({judged['low']:.2f} to {judged['high']:.2f})"
    return f"{judged['verdict']}, {change}, {judged['n']} prompts"
