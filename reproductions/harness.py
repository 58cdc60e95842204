"""What the reproductions share: data, the run of one configuration, the machine, and the style of figures."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig, SamplerConfig
from agro.errors import Interrupted, Refused
from agro.models.policy import Policy
from agro.rollout.rollout import Rollout, embedded
from agro.train.trainer import BaseTrainer
from agro.types import Prompt, Sample
from benchmarks import recording

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
INK, MUTED, GRID = "#1b1b1f", "#6b6f76", "#dfe1e5"
MADE = "made by run.py --record"  # the name of what is made on most pages
RECORD = "write the result beside this script too"
RECORDED, MEASURED = "what was recorded counts as complete", "report the runs that are complete; run none"
SMALL = "a coarse measurement, for the tests"
COLORS = ("#0072b2", "#d55e00", "#009e73")  # Okabe and Ito's, which color-blind people tell apart
Map = Callable[..., Iterable[Any]]  # `map`, in this process or in several
markdown = recording.markdown


def marks(name: str = MADE) -> tuple[str, str]:
    """Around what is made on a page."""
    return f"<!-- begin: {name} -->", f"<!-- end: {name} -->"


def put(readme: Path, text: str, name: str = MADE) -> None:
    """Put a text between the marks of this name."""
    begin, end = marks(name)
    before, _, rest = readme.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    assert ended, f"{readme} has no {begin} with {end} after it"
    readme.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def parser(doc: str | None, out: Path | str | None = None, **options: Any) -> argparse.ArgumentParser:
    """As `recording.parser`, with --out, where it writes, and a switch for each option that is a text."""
    switches = {name: text for name, text in options.items() if isinstance(text, str)}
    made = recording.parser(doc, **{name: kind for name, kind in options.items() if name not in switches})
    if out is not None:
        made.add_argument("--out", type=Path, default=Path(out))
    for name, text in switches.items():
        made.add_argument(f"--{name}", action="store_true", help=text)
    return made


def arguments(
    doc: str | None, name: str, given: Sequence[str] | None = None, prepare: str = ""
) -> argparse.Namespace:
    """Of a reproduction with seeds. `prepare`: the help of --prepare FOLDER, where it has that."""
    made = parser(doc, f"runs/{name}", record=RECORD, seeds=3)
    made.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    if prepare:
        made.add_argument("--prepare", type=Path, metavar="FOLDER", help=prepare)
    args = made.parse_args(given)
    at_least_1(seeds=args.seeds)
    return args


def at_least_1(**given: int) -> None:
    """Refuse options that have to be 1 or more."""
    for name, value in given.items():
        if value < 1:
            raise Refused(f"--{name}: expected at least 1, got {value}")


def merged(base: Any, changes: Any) -> Any:
    """Values of a configuration with others in their place, section by section."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return {**base, **{key: merged(base.get(key), value) for key, value in changes.items()}}


def refuse_unknown(given: Iterable[str], known: Sequence[str], of: str) -> None:
    """Refuse a key that nothing reads, by its name; `of`: where it stands."""
    for key in given:
        if key not in known:
            raise Refused(f"{of}: expected some of {', '.join(known)}; got {key}")


def grouped(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[Any, list[Any]]:
    """Rows by their values of these keys."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


@contextmanager
def processes(jobs: int) -> Iterator[Map]:
    """`map` in so many processes."""
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The mean; of several values also the least and the most."""
    text = f"{fmean(values):{form}}"
    return text if len(values) == 1 else f"{text} ({min(values):{form}} to {max(values):{form}})"


def between(mean: float, error: float) -> str:
    return f"{mean:.3f} ± {error:.3f}"


def minutes(run: Mapping[str, Any]) -> list[str]:
    """By the clock and of the CPU; – where it was interrupted."""
    spent = [run[key] for key in ("seconds", "cpu_seconds")]
    return ["–" if seconds is None else f"{seconds / 60:.1f}" for seconds in spent]


def held_out(axes: Any, run: Mapping[str, Any], color: str) -> float:
    """Draw the held-out rewards of a run with their standard errors, and return the last one."""
    rows = [m for m in run["metrics"] if m["eval_reward"] is not None]
    at, y, se = ([m[k] for m in rows] for k in ("step", "eval_reward", "eval_reward_se"))
    axes.errorbar(at, y, se, color=color, linewidth=1.3, elinewidth=0.8, marker="o", markersize=3)
    return float(y[-1])


def need(path: Path) -> Path:
    """`path`, or `Refused` where it isn't there."""
    if not path.exists():
        raise Refused(
            f"{path} isn't there; expected the shared folder with its data and models beside this repository"
        )
    return path


def agro(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """One command of the library, shown as a user would type it."""
    words = [str(a) for a in arguments]
    print("$ agro " + " ".join(f"'{w}'" if "*" in w else w for w in words), flush=True)
    command = [sys.executable, "-m", "agro", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def import_log(log: Path, store: Path, columns: Sequence[str], *more: str | Path) -> None:
    """`agro import` of a log into a new store; `columns`: FIELD=COLUMN, `more`: further arguments."""
    store.parent.mkdir(parents=True, exist_ok=True)
    maps = [word for column in columns for word in ("--map", column)]
    done = agro("import", need(log), "--store", store, *maps, *more)
    if done.returncode:
        raise Refused(done.stderr)
    print(done.stdout)


def train(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Run one configuration, or continue it where it was interrupted.

    Returns its metrics, and the seconds that it took (null if it was interrupted).

    `cpu_seconds` counts this process and those that it started.
    """
    took = folder / "took.json"
    resume = (folder / "config.json").exists()
    clock, cpu = time.perf_counter(), cpu_seconds()
    Trainer(config, folder, resume=resume).run()
    if not took.exists():
        spent = {"seconds": time.perf_counter() - clock, "cpu_seconds": cpu_seconds() - cpu}
        took.write_text(json.dumps(dict.fromkeys(spent) if resume else spent))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"metrics": metrics, **json.loads(took.read_text())}


def responses(policy: Policy, prompts: Sequence[Prompt], sampler: SamplerConfig) -> list[Sample]:
    """A policy's responses in the order of the prompts, with the random numbers of seed 1."""
    found = Rollout(policy.encoder, embedded(policy)).sample(prompts, sampler.n, sampler, seed=1)
    return sorted(found, key=lambda sample: int(sample.meta["index"]))


class SilentTrainer(BaseTrainer):
    """Without pages and lines, which for each of some thousand runs would take most of the time."""

    def run(self) -> Path:
        with Path(os.devnull).open("w") as nothing, redirect_stderr(nothing):
            return super().run()


def once(file: Path, make: Callable[[], Any]) -> Any:
    """What `make` returns, from the JSON `file` where it was made before."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        making = file.with_suffix(".making")
        making.write_text(json.dumps(make(), allow_nan=False))
        making.rename(file)
    return json.loads(file.read_text())


def different(count: int, draw: Callable[[], str]) -> list[str]:
    """So many drawn texts, all different."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw()] = None
    return list(drawn)


def write_prompts(file: Path, prompts: Iterable[str], answer: Callable[[str], str]) -> None:
    """With their answers."""
    lines = (json.dumps({"prompt": prompt, "answer": answer(prompt)}) + "\n" for prompt in prompts)
    file.write_text("".join(lines))


def cpu_seconds() -> float:
    """Of this process and of those that it started and that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def enumerate_and_draw(
    doc: str | None,
    folder: Path,
    measure: Callable[[bool], dict[str, Any]],
    figure: Callable[[dict[str, Any], Path], None],
    tell: Callable[[dict[str, Any]], str],
) -> None:
    """The main function of an exact reproduction.

    Calls `measure(small)` and writes result.json and figure.png of it into `folder`.
    """
    args = parser(doc, folder, small=SMALL).parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    found = measure(args.small)
    (args.out / "result.json").write_text(json.dumps(found) + "\n")
    figure(found, args.out / "figure.png")
    print(tell(found))


def machine() -> dict[str, Any]:
    """Where a result comes from: processor, cores, load, commit."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    cores, load = os.cpu_count(), os.getloadavg()[1]
    return {"cpu": recording.processor(), "cores": cores, "load_average": load, "commit": commit or None}


def column(metrics: Sequence[dict[str, Any]], name: str) -> NDArray[np.float64]:
    """One value a training step; NaN where it isn't known."""
    return np.array([np.nan if m[name] is None else m[name] for m in metrics if m["step"]], dtype=np.float64)


def trailing_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """The mean of the `width` values up to each; NaN for the first ones, which have fewer."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    means = np.full(len(values), np.nan)
    means[width - 1 :] = (sums[width:] - sums[:-width]) / width
    return means


def axes(figure: Figure, place: tuple[int, int, int], title: str, steps: int) -> Any:
    """Axes with a title for the quantity, a light grid and nothing else."""
    found = figure.add_subplot(*place)
    for side in ("left", "right", "top"):
        found.spines[side].set_visible(False)
    found.spines["bottom"].set_color(MUTED)
    found.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    found.grid(axis="y", color=GRID, linewidth=0.6)
    found.set_axisbelow(True)
    found.set_xlim(0, steps)
    found.set_title(title, loc="left", fontsize=9, color=INK, fontweight="bold")
    found.set_xlabel("step", fontsize=8, color=MUTED, loc="right")
    return found


def heat_map(
    axes: Any, shown: NDArray[np.float64], rows: Sequence[str], columns: Sequence[str], form: str, colors: Any
) -> None:
    """The values of cells, NaN where there is none, on colors that are clipped to the limits of `colors`, a
    `ScalarMappable`; those on dark colors are written in white."""
    drawn = np.clip(shown, *colors.get_clim())
    axes.imshow(drawn, cmap=colors.cmap, norm=colors.norm, aspect="auto", interpolation="none")
    for (y, x), value in np.ndenumerate(shown):
        text, color = form.format(value), INK
        if np.isnan(value):
            text, color = "–", MUTED
        elif sum(colors.to_rgba(drawn[y, x])[:3]) < 1.5:
            color = "white"
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(len(columns)), columns, fontsize=8, rotation=30, ha="left")
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def name_phases(found: Any, metrics: Sequence[dict[str, Any]]) -> None:
    """A thin line where a phase begins, and its name at the top."""
    begun: dict[str, int] = {}
    for m in metrics[1:]:
        begun.setdefault(m["phase"], m["step"] - 1)
    for name, step in begun.items():
        if step:
            found.axvline(step, color=GRID, linewidth=1.0, zorder=0)
        _label(found, name, (step, 1), ("data", "axes fraction"), (3, -2), color=MUTED, fontsize=7, va="top")


def name_lines(found: Any, ends: Mapping[str, tuple[float, str]]) -> None:
    """Names of lines, name -> (height, color), right of the axes, moved apart where they would overlap."""
    low, high = found.get_ylim()
    apart, before = 0.07 * (high - low), -np.inf
    for name, (y, color) in sorted(ends.items(), key=lambda item: item[1][0]):
        before = max(y, before + apart)
        style = {"color": color, "fontsize": 8, "va": "center", "annotation_clip": False}
        _label(found, name, (1, before), ("axes fraction", "data"), (4, 0), **style)


def _label(
    found: Any, text: str, at: tuple[float, float], of: Any, off: tuple[int, int], **style: Any
) -> None:
    """A text beside a place, `off` by so many points."""
    found.annotate(text, at, off, xycoords=of, textcoords="offset points", **style)


def keep(
    args: argparse.Namespace,
    beside: Path,
    result: dict[str, Any],
    figure: Figure | None = None,
    name: str = "result.json",
) -> None:
    """Write the result and figure.png into --out, with --record beside the script too."""
    for folder in (args.out, *((beside,) if args.record else ())):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
        if figure is not None:
            figure.savefig(folder / "figure.png", dpi=160, facecolor="white")


def guarded(main: Callable[[], None]) -> None:
    """Run a script: what the user can mend ends with a message and 2, an interruption with 130."""
    try:
        main()
    except Refused as error:
        print(f"{Path(sys.argv[0]).parent.name}: {error}", file=sys.stderr)
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(130)
