"""Kill a run, and an import, again and again, and compare the results with those of undisturbed work.

    python benchmarks/torture/run.py [--kills 200] [--seed 0] [--out results.json]

Half of the kills strike at an event of a stage (see `stages`), half at a random time of it. Each child is
killed by SIGKILL, resumed and killed again until it finishes. Then everything it wrote is compared. Children
are forks of one process that has the libraries loaded, which saves their start.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
from stages import Measured, Plan, Watch  # noqa: E402

import agro.api.reporting_trainer  # noqa: E402
import agro.logs.importing  # noqa: E402
from agro.config import RunConfig  # noqa: E402
from agro.store import Store  # noqa: E402
from benchmarks import recording  # noqa: E402
from reproductions.systems import tiny  # noqa: E402

REWARD = f"{HERE.parent}/recorded/reward.py:share"  # it differs within a group
STAGES = ["sampling", "scoring", "appending", "updating", "saving"]
# A kill strikes at one of the first few entries of a stage, so that most children get a checkpoint further.
ENTRIES = 5
ROWS = 4000  # of the imported file
TIMES = {"seconds", "seconds_sample", "seconds_train", "tokens_per_second"}


def config(folder: Path) -> RunConfig:
    """That of recipe.toml, with files in `folder`."""
    prompts = tiny.prompts(folder / "prompts.jsonl", range(60))
    held = tiny.prompts(folder / "held.jsonl", range(60, 66))
    files = [f"data.prompts={prompts}", f"data.eval_prompts={held}"]
    return RunConfig.load(HERE / "recipe.toml", [*files, f"reward.name={REWARD}"])


def log(folder: Path) -> Path:
    """Answers, and every tenth row a pair of them; equal rows too, which are to be kept."""
    rows = []
    for i in range(ROWS):
        row: dict[str, Any] = {"prompt": f"{i % 500}+1=", "meta": {"row": i}}
        row |= (
            {"chosen": "good", "rejected": "bad"}
            if i % 10 == 0
            else {"response": str(i % 7), "reward": i % 3}
        )
        rows.append(json.dumps(row) + "\n")
    (folder / "log.jsonl").write_text("".join(rows))
    return folder / "log.jsonl"


def train(folder: Path, out: str) -> None:
    agro.api.reporting_trainer.report = lambda run: run  # figures aren't what this is about
    agro.api.reporting_trainer.Trainer(config(folder), folder / out, resume=True).run()


def import_(folder: Path, out: str) -> None:
    with Store.open(folder / out) as store:
        agro.logs.importing.import_files(store, [folder / "log.jsonl"])


def left_by_run(run: Path) -> dict[str, Any]:
    """What has to be equal after a kill. Ids differ where rows were made again; times differ always."""
    with Store.open(run / "store.db") as store:
        assert not store.tables.damage(), store.tables.damage()
        rows = {
            i: (p, r, y, v, s)
            for i, p, r, y, v, s in store.tables.run(
                "SELECT id, prompt_id, response, reward, version, step FROM samples"
            )
        }
        kept = [i for (i,) in store.tables.run("SELECT id FROM samples WHERE NOT redone ORDER BY id")]
        drawn = store.tables.run("SELECT step, sample FROM draws ORDER BY rowid")
        commits = [
            (c.step, c.digest)
            for c in store.ledger.commits(json.loads((run / "config.json").read_text())["run"])
        ]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": (run / "model" / "model.safetensors").read_bytes(),
        "draws": [(step, *rows[i]) for step, i in drawn],
        "samples": [rows[i] for i in kept],
        "commits": commits,
        "metrics": [{k: v for k, v in m.items() if k not in TIMES} for m in metrics],
        "checkpoints": sorted(p.name for p in (run / "checkpoints").iterdir()),
        "unfinished files": list(run.rglob(".*.tmp")),
    }


def left_by_import(path: Path) -> dict[str, Any]:
    with Store.open(path) as store:
        assert not store.tables.damage(), store.tables.damage()
        origins = store.tables.run(
            "SELECT record, part, prompt_id, response, reward FROM samples ORDER BY id"
        )
        assert len({o[:2] for o in origins}) == len(origins)
        return {"samples": origins, "pairs": list(store.pairs())}


@dataclass
class Work:
    """Something to be killed: what does it, what it leaves, and the stages to hit."""

    do: Callable[[Path, str], None]
    left: Callable[[Path], dict[str, Any]]
    stages: list[str]
    name: str
    finished: int = 0
    undisturbed: dict[str, Any] = field(default_factory=dict)  # what it leaves then
    measured: dict[str, Measured] = field(default_factory=dict)  # by stage, then


@dataclass(frozen=True)
class Kill:
    stage: str  # in which it struck
    by: str  # "event" or "time"
    seconds: float  # that the child lived


class Torture:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng, self.watch = folder, random.Random(seed), Watch()
        self.kills: list[Kill] = []
        log(folder)
        self.works = [
            Work(train, left_by_run, STAGES, "run"),
            Work(import_, left_by_import, ["importing"], "import"),
        ]
        for work in self.works:
            assert self._child(work, "undisturbed", None) is None
            work.undisturbed = work.left(folder / "undisturbed")
            work.measured = {
                s: Measured(**m) for s, m in json.loads((folder / "measured").read_text()).items()
            }
            (folder / "undisturbed").rename(folder / f"undisturbed {work.name}")

    def go_on(self, kills: int) -> None:
        """Until there were so many kills, and what was killed last is done."""
        turns = [work for work in self.works for _ in work.stages]
        while len(self.kills) < kills:
            work = turns[len(self.kills) % len(turns)]
            self._kill_or_finish(work)
        for work in self.works:
            if (self.folder / f"{work.name} {work.finished}").exists():
                assert self._child(work, f"{work.name} {work.finished}", None) is None
                self._compare(work)

    def _kill_or_finish(self, work: Work) -> None:
        hit = Counter(kill.stage for kill in self.kills)
        stage = min(work.stages, key=lambda s: (hit[s], self.rng.random()))
        known = work.measured[stage]
        by_event = self.rng.random() < 0.5
        entry = self.rng.randint(1, min(ENTRIES, known.entries))
        plan = Plan(stage, entry, self.rng.randint(1, known.events // known.entries + 1) if by_event else 0)
        kill = self._child(
            work, f"{work.name} {work.finished}", plan, self.rng.uniform(0, known.seconds / known.entries)
        )
        if kill is None:
            self._compare(work)
        else:
            self.kills.append(kill)

    def _compare(self, work: Work) -> None:
        left = work.left(self.folder / f"{work.name} {work.finished}")
        for what, expected in work.undisturbed.items():
            if left[what] != expected:
                raise SystemExit(
                    f"{self.folder}: {work.name} {work.finished}: {what} differ: {left[what]!r:.500}"
                )
        work.finished += 1

    def _child(self, work: Work, out: str, plan: Plan | None, seconds: float = 0.0) -> Kill | None:
        """Fork, work, and kill by plan; None where the work was done before that."""
        told, tell = os.pipe()
        began = time.monotonic()
        child = os.fork()
        if not child:
            self._work(work, out, plan, tell)
        os.close(tell)
        if os.read(told, 1):  # nothing, where the child ends first
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(told)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            assert plan is not None
            return Kill(self.watch.stage, "event" if plan.event else "time", time.monotonic() - began)
        if os.WEXITSTATUS(status):
            raise SystemExit(f"{out}: {(self.folder / 'said').read_text()[-3000:]}")
        return None

    def _work(self, work: Work, out: str, plan: Plan | None, tell: int) -> None:
        try:
            said = os.open(self.folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(said, stream)
            os.set_inheritable(tell, False)
            torch.set_num_threads(1)
            self.watch.follow(plan, lambda: os.write(tell, b"x") and None)
            work.do(self.folder, out)
            measured = {stage: asdict(m) for stage, m in self.watch.measured.items()}
            (self.folder / "measured").write_text(json.dumps(measured))
        except BaseException:  # noqa: BLE001  the parent says it
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)


def table(result: dict[str, Any]) -> str:
    rows = []
    for stage, by in result["stages"].items():
        rows.append([stage, *map(str, (by["event"], by["time"], by["event"] + by["time"]))])
    return recording.markdown(["stage", "kills at an event", "kills at a random time", "kills"], rows)


if __name__ == "__main__":
    asked = recording.parser(__doc__, kills=200, seed=0, out=Path).parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        torture = Torture(Path(scratch), asked.seed)
        torture.go_on(asked.kills)
    counts = Counter((kill.stage, kill.by) for kill in torture.kills)
    stages = sorted({stage for stage, _ in counts}, key=lambda s: -counts[s, "event"] - counts[s, "time"])
    result = {
        "kills": len(torture.kills),
        "stages": {s: {by: counts[s, by] for by in ("event", "time")} for s in stages},
        "finished": {work.name: work.finished for work in torture.works},
        "different": 0,  # else it would have ended before
        "compared": {work.name: list(work.undisturbed) for work in torture.works},
        "seed": asked.seed,
        "seconds": round(time.monotonic() - began),
        "commit": recording.commit(),
        "machine": recording.machine(),
    }
    print(table(result))
    print(f"{result['kills']} kills, {result['finished']}: nothing differs; {result['seconds']} s")
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
