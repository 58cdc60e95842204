"""Slow responses are the hard ones: what is lost where stale samples are dropped.

    python benchmarks/staleness/run.py [--arms wait drop …] [--seeds 0 1 2]   # runs; result.json, figure.svg

A prompt is a mark and a word of four letters. The mark says what is to be done with the word, how often the
model that training starts from slips, and how long a rollout takes: KINDS. Times have a heavy tail
(log-normal, σ = 0.8). One trainer, 24 collectors, one rollout each. The clock is simulated, so that a busy
machine changes nothing: a rollout takes its time, an update STEP_SECONDS, and a response is sampled with the
weights that were published when its rollout began. Requests are claimed, finished, taken and asked again by
agro's own store and rules (`Requests`, `ahead`).

    wait       data.max_age = 0: each step waits for responses of the present weights
    drop       what is more than 2 updates old is discarded, and never asked again
    drop, busy the same, and collectors wait only while a step's prompts are done
    ask again  data.max_age = 2: what is older is discarded, and its prompt is asked again
    pace       at most two steps of prompts are under way, nothing is discarded (agro's earlier default)
    keep       the default: collectors wait only while a step's prompts are done; nothing is discarded
"""

from __future__ import annotations

import heapq
import json
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro import rollout  # noqa: E402
from agro.api.reporting_trainer import Trainer  # noqa: E402
from agro.config import RunConfig, SamplerConfig  # noqa: E402
from agro.errors import Interrupted  # noqa: E402
from agro.rollout.prompts import load_prompts  # noqa: E402
from agro.store import Store  # noqa: E402
from agro.store.sample_rows import ledger_of  # noqa: E402
from agro.train.phases import derive  # noqa: E402
from agro.train.source import FillRequest, InlineSource, ahead  # noqa: E402
from benchmarks import recording  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.panel import logs  # noqa: E402
from reproductions.panel.jobs import Job, Model  # noqa: E402
from reproductions.panel.tasks import LETTERS, Task, Writer, shifted  # noqa: E402
from reproductions.systems import tiny  # noqa: E402

# mark -> what is to be done, chance that the teacher slips at a letter, mean seconds of a rollout
KINDS: dict[str, Any] = {
    "=": (lambda word: word, 0.05, 0.5),
    "+": (lambda word: shifted(LETTERS, 1, word), 0.15, 2.0),
    "<": (lambda word: word[::-1], 0.20, 6.0),
    "*": (lambda word: shifted(LETTERS, 1, word[::-1]), 0.30, 16.0),
}
HARDEST = "*"
SIGMA = 0.8  # of the logarithm of a rollout's time
GROUPS, COLLECTORS = 8, 24  # as in recipe.toml
STEP_SECONDS = 1.0
ARMS = {"wait": 0, "drop": 2, "drop, busy": 2, "ask again": 2, "pace": None, "keep": None}  # data.max_age
SECONDS, LOOK_SECONDS, LOOK_PROMPTS, LAST = 400.0, 20.0, 200, 5
CLOCK = "the clock has ended"
COLORS = dict(zip(ARMS, ("#6b6f76", "#d55e00", "#e69f00", "#cc79a7", "#0072b2", "#009e73")))
OUT = HERE.parents[1] / "runs/staleness"


class Slipping(Writer):
    """A teacher who slips by the kind of a prompt."""

    def write(self, task: Task, prompt: str, rng: random.Random) -> str:
        return Writer(slip=KINDS[prompt[0]][1]).write(task, prompt, rng)


def prompt(rng: random.Random) -> str:
    return rng.choice(list(KINDS)) + "".join(rng.choices(LETTERS, k=4)) + ">"


TASK = Task(  # what the mark says is done with a word
    "kinds",
    prompt,
    lambda text: KINDS[text[0]][0](text[1:-1]),
    LETTERS + "".join(KINDS) + ">",
    LETTERS,
)
JOB = Job("kinds", "", TASK, Slipping(), "fresh", model=Model(96, 2), prompts=4000, warm_up=1000, max_new=6)


def config_of(files: logs.Files, seed: int) -> RunConfig:
    place = [f"policy.model={files.start}", f"data.prompts={files.prompts}"]
    return RunConfig.load(HERE / "recipe.toml", [*place, f"train.seed={seed}"])


class Timed:
    """A source whose responses come from collectors on a simulated clock."""

    def __init__(self, inline: InlineSource, arm: str, seed: int, held_out: Path, log: Path) -> None:
        self.inline, self.arm, self.seed, self.log = inline, arm, seed, log
        self.requests, self.run = inline.store.requests, inline.run
        config = inline.config
        data = config.data.model_copy(update={"max_age": ARMS[arm]})
        self.ahead = ahead(config.model_copy(update={"data": data}))
        self.is_busy = arm in ("keep", "drop, busy")
        self.bound = ARMS[arm]
        self.now, self.looked, self.version, self.step = 0.0, -LOOK_SECONDS, 0, 0
        self.idle = list(range(COLLECTORS))
        self.ends: list[tuple[float, int, int]] = []  # heap: time, request, collector
        self.claimed: list[int] = []  # requests that are to be sampled with the present weights
        self.attempts: Counter[int] = Counter()
        self.discarded = 0  # tokens
        self.held_out = load_prompts(str(held_out))[:LOOK_PROMPTS]

    def publish(self, learner: Any) -> None:
        """The update before took its time, in which collectors went on with the weights before."""
        if learner.version != self.version:
            self._until(self.now + STEP_SECONDS)
            self._sample()
        self.inline.publish(learner)
        self.version = learner.version
        if self.now >= self.looked + LOOK_SECONDS:
            self.looked = self.now
            self._look()
        if self.now >= SECONDS:
            raise Interrupted(CLOCK)

    def fill(self, wanted: FillRequest) -> rollout.CollectResult:
        skipped = 0
        store = self.inline.store
        while True:
            self._claim()
            numbers = self.requests.ready(self.run, wanted.groups)
            if numbers and self.bound is not None:
                self._sample()
                samples = store.experience.in_ledger(ledger_of(self.run), numbers)
                stale = [s for s in samples if s.version < self.version - self.bound]
                skipped += len(stale)
                self.discarded += sum(s.actions for s in stale)
                old = sorted({s.number for s in stale})
                if old and self.arm != "ask again":
                    self.requests.take(self.run, wanted.step, old)
                elif old:
                    self.requests.reopen(self.run, old)
                if old:
                    continue
            if len(numbers) >= wanted.groups:
                break
            self._until(self.ends[0][0])
        self._sample()
        samples = store.experience.in_ledger(ledger_of(self.run), numbers)
        self.requests.take(self.run, wanted.step, numbers)
        self.step = wanted.step
        tokens = sum(sample.actions for sample in samples)
        return rollout.CollectResult(tuple(s.id for s in samples), 0, tokens, too_stale=skipped)

    def _until(self, time: float) -> None:
        """What ends until then is finished, and its collector goes on."""
        while self.ends and self.ends[0][0] <= time:
            self.now, number, collector = heapq.heappop(self.ends)
            self.requests.finish(self.run, [number])
            self.idle.append(collector)
            self._claim()
        self.now = max(self.now, time)

    def _claim(self) -> None:
        for collector in list(self.idle):
            room = self.ahead
            if self.is_busy and len(self.requests.ready(self.run, GROUPS)) < GROUPS:  # as `Collector` does
                room += self.requests.backlog(self.run, self.step)
            name, trained = f"collector {collector}", self.step
            for number in self.requests.claim(self.run, name, maximum=1, ahead=room, trained=trained):
                text = str(self.inline.prompts.take(number, 1)[0].text)
                spread = random.Random(f"{self.seed} {number} {self.attempts[number]}")
                self.attempts[number] += 1
                seconds = KINDS[text[0]][2] * spread.lognormvariate(-(SIGMA**2) / 2, SIGMA)
                heapq.heappush(self.ends, (self.now + seconds, number, collector))
                self.claimed.append(number)
                self.idle.remove(collector)

    def _sample(self) -> None:
        """Those that were claimed under the present weights."""
        if not self.claimed:
            return
        inline, numbers = self.inline, tuple(sorted(self.claimed))
        prompts = [inline.prompts.take(number, 1)[0] for number in numbers]
        seed = derive(self.seed, "collect", self.version)
        task = rollout.Task(self.run, None, seed, numbers, ledger_of(self.run))
        sampler = inline.config.sampler
        rollout.collect(inline.rollout, prompts, sampler, inline.store, task, inline.reward)
        self.claimed = []

    def _look(self) -> None:
        """Measure the present weights; it takes no time of the simulated clock."""
        sampler = SamplerConfig(n=2, max_new=JOB.max_new, batch=512)
        samples = list(self.inline.rollout.sample(self.held_out, 2, sampler, seed=self.version))
        assert self.inline.reward is not None
        by_kind = defaultdict(list)
        for sample, scored in zip(samples, self.inline.reward.score(samples), strict=True):
            by_kind[str(sample.prompt)[0]].append(scored.value)
        look = {"seconds": self.now, "version": self.version, "discarded": self.discarded}
        look |= {kind: statistics.fmean(by_kind[kind]) for kind in KINDS}
        with self.log.open("a") as file:
            print(json.dumps(look), file=file)


class Simulated(Trainer):
    """A run on the simulated clock."""

    arm, held_out = "", Path()

    def _source(self, phase: Any, position: Any, learner: Any) -> Any:
        inline = super()._source(phase, position, learner)
        assert isinstance(inline, InlineSource)
        log = self.out.parent / "looks.jsonl"
        return Timed(inline, self.arm, self.config.train.seed, self.held_out, log)


def run(arm: str, seed: int) -> dict[str, Any]:
    """What came of a run; made once."""
    folder = OUT / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
    result = folder / "result.json"
    if not result.exists():
        folder.mkdir(parents=True)  # delete what an earlier one that was stopped has left
        files = logs.prepare(JOB, OUT, logs.FULL)
        trainer = Simulated(config_of(files, seed), folder / "run")
        trainer.arm, trainer.held_out = arm, files.held_out
        try:
            trainer.run()
        except Interrupted as error:
            if str(error) != CLOCK:
                raise
            result.write_text(json.dumps({"arm": arm, "seed": seed, **count(folder)}))
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def count(folder: Path) -> dict[str, Any]:
    rows = tiny.metrics(folder / "run")
    looks = [json.loads(line) for line in (folder / "looks.jsonl").read_text().splitlines()]
    run = json.loads((folder / "run/config.json").read_text())["run"]
    with Store.open(folder / "run/store.db", read_only=True) as store:
        drawn = sorted({draw.sample for draw in store.draws.drawn(run)})
        trained = Counter(str(sample.prompt)[0] for sample in store.samples(ids=drawn))
    tokens = sum(row["sampled_tokens"] for row in rows)
    discarded = looks[-1]["discarded"]
    return {
        "steps": len(rows),
        "staleness_mean": statistics.fmean(row["staleness_mean"] for row in rows),
        "staleness_max": max(row["staleness_max"] for row in rows),
        "share_of_hardest": trained[HARDEST] / trained.total(),
        "tokens_trained": tokens,
        "discarded": discarded / (tokens + discarded),
        "reward": statistics.fmean(look[kind] for look in looks[-LAST:] for kind in KINDS),
        "reward_of_hardest": statistics.fmean(look[HARDEST] for look in looks[-LAST:]),
        "looks": looks,
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    lines = []
    for arm in dict.fromkeys(each["arm"] for each in runs):
        of = [each for each in runs if each["arm"] == arm]
        mean = statistics.fmean(each["staleness_mean"] for each in of)
        stale = f"{mean:.1f} ({max(each['staleness_max'] for each in of):.0f})"
        shares = ("share_of_hardest", "discarded", "reward", "reward_of_hardest")
        cells = [harness.spread([each[key] for each in of]) for key in shares]
        lines.append([arm, harness.spread([each["steps"] for each in of], ".0f"), stale, *cells])
    head = ["arm", "updates", "staleness, mean (most)", "share of the hardest", "tokens discarded"]
    return recording.markdown([*head, "reward at the end", "of the hardest"], lines)


def draw(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Held-out reward over the clock, a line for each arm: the mean of its seeds."""
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    for place, (title, kinds) in enumerate({"all prompts": list(KINDS), "the hardest": [HARDEST]}.items()):
        axes = harness.axes(figure, (1, 2, place + 1), f"held-out reward, {title}", int(SECONDS))
        axes.set_xlabel("seconds, simulated", fontsize=8, loc="right")
        for arm in dict.fromkeys(each["arm"] for each in runs):
            of = [each["looks"] for each in runs if each["arm"] == arm]
            times = np.arange(0, min(looks[-1]["seconds"] for looks in of), LOOK_SECONDS)
            lines = [
                np.interp(
                    times,
                    [look["seconds"] for look in looks],
                    [statistics.fmean(look[kind] for kind in kinds) for look in looks],
                )
                for looks in of
            ]
            means = np.mean(lines, axis=0)
            axes.plot(times, means, color=COLORS[arm], linewidth=1.4, label=arm)
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(file)


def main() -> None:
    arguments = recording.parser(__doc__, arms=ARMS, seeds=[0, 1, 2], record=False).parse_args()
    torch.set_num_threads(1)
    runs = [run(arm, seed) for arm in arguments.arms for seed in arguments.seeds]
    folder = HERE if arguments.record else OUT
    (folder / "result.json").write_text(json.dumps({"runs": runs, "machine": harness.machine()}) + "\n")
    draw(runs, folder / "figure.svg")
    print(table(runs))


if __name__ == "__main__":
    main()
