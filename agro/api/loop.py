"""A served model learns from its store in turns, and only a better model replaces it.

A turn checks the store, trains the served model with the recipe for this data, and compares the two on the
same held-out prompts: the run's verdict. The folder of the loop holds

    loop.json     the turns, and which model is served; it is replaced atomically
    1/, 2/, …     the run of each turn

`agro serve FOLDER` serves the model that loop.json names, and switches to the next one between two tokens. A
killed turn resumes its run.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Lost, Refused, Unwritable
from agro.io.files import write
from agro.pages.run.verdict import Verdict
from agro.pages.store import check_store
from agro.runs.problems import problems
from agro.runs.rundata import load_run
from agro.store import Store
from agro.store.location import exists, url_of
from agro.train.phases import is_checkpoint, read_position
from agro.train.trainable import kind_of

FILE = "loop.json"
POLL_SECONDS = 2.0  # between two checks of the store
Outcome = Literal["under way", "refused", "rejected", "better", "promoted", "rolled back"]


class Turn(BaseModel):
    """`start`: the turn whose model it trains on; 0: the first model. `version`: optimizer steps since the
    first model, more than those of any earlier turn."""

    number: int
    start: int
    rewarded: int  # samples with a reward, and judged pairs, in the store when it began
    recipe: str
    overrides: list[str]
    outcome: Outcome = "under way"
    reason: str = ""
    version: int = -1

    def __str__(self) -> str:
        return f"turn {self.number}: {self.outcome}. {self.reason}"


class LoopRecord(BaseModel):
    """`served`: the promoted turns, of which the last is served; 0: the first model."""

    model: str
    version: int  # of the first model; -1: not from an agro run
    served: list[int] = [0]
    turns: list[Turn] = []

    @classmethod
    def read(cls, folder: Path) -> LoopRecord:
        """Raises `Refused` for a folder without a loop."""
        try:
            record = cls.model_validate_json((folder / FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise Refused(f"{folder}: expected the folder of a loop, with its {FILE}: {error}") from None
        if not record.served or not all(0 <= number <= len(record.turns) for number in record.served):
            raise Refused(f"{folder / FILE}: served: expected numbers of recorded turns, got {record.served}")
        return record

    def newest(self, folder: Path, number: int | None = None) -> tuple[Path, int]:
        """Return the served model, or that of a turn, and its version."""
        number = self.served[-1] if number is None else number
        if number == 0:
            return Path(self.model), self.version
        return folder / str(number) / "model", self.turns[number - 1].version


def version_of(model: Path) -> int:
    """Count the optimizer steps of RUN, RUN/model, RUN/best or RUN/checkpoints/step-N; -1 for other paths."""
    if is_checkpoint(model):
        return read_position(model, "").version
    run = model if (model / "model").is_dir() else model.parent
    if not (run / "metrics.jsonl").is_file() or model.name not in (run.name, "model", "best"):
        return -1
    data = load_run(run)
    best = data.best_model if model.name == "best" else None
    step = data.steps if best is None else best.step
    versions = [row["version"] for row in data.rows if row["step"] == step and row.get("version") is not None]
    return int(versions[-1]) if versions else -1


class Loop:
    """The turns of a store, in `folder`, by default next to the store with the suffix .loop."""

    def __init__(
        self,
        store: str,
        model: str | None,
        folder: Path | None,
        overrides: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        """`model`: the first model. `overrides`: KEY=VALUE for the runs. Raises `Refused` for a missing
        model, and for a different one once a turn has trained."""
        self.store = url_of(store) or Path(store).absolute()
        self.overrides, self.say = list(overrides), say
        if folder is None and url_of(store):
            raise Refused("agro loop: expected --out FOLDER for a store in a database, got none")
        self.folder = (folder or Path(store).with_suffix(".loop")).absolute()
        start = None
        if model is not None:
            start = Path(model) / "model" if (Path(model) / "model").is_dir() else Path(model)
            start = start.absolute() if start.exists() else start
        file = self.folder / FILE
        if start is None:
            if not file.is_file():
                raise Refused(f"--model: expected the first model, since {self.folder} has no {FILE}")
            LoopRecord.read(self.folder)  # refuses a folder without a loop
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked(".lock", waits=True):
            record = LoopRecord.read(self.folder) if file.is_file() else None
            if record is not None and str(start) == record.model:
                return
            turns = [] if record is None else record.turns
            if record is not None and any(turn.outcome != "refused" for turn in turns):
                raise Refused(
                    f"--model {model}: {self.folder} began with {record.model}; use that one, or another "
                    "--out"
                )
            record = LoopRecord(model=str(start), version=version_of(start), turns=turns)
            write(file, record.model_dump_json(indent=1) + "\n")

    def wait(self, count: int) -> None:
        """Wait until `count` rewarded samples and judged pairs have arrived since the last turn, not counting
        deletions. Return at once if a turn is under way."""
        turns = LoopRecord.read(self.folder).turns
        if turns and turns[-1].outcome == "under way":
            return
        self.say(f"waiting for {count} more rewarded samples in {self.store}")
        new, seen = 0, turns[-1].rewarded if turns else 0
        while new < count:
            time.sleep(POLL_SECONDS)
            try:
                rewarded = self._rewarded() if exists(self.store) else 0
            except Lost as error:  # the server may come back
                self.say(str(error))
                continue
            new, seen = new + max(0, rewarded - seen), rewarded

    def turn(self, *, promote: bool) -> Turn:
        """Run one turn, or finish one that was killed."""
        with self._locked(".turn", waits=False):
            turn = self._begin()
            run = self.folder / str(turn.number)
            resume = (run / "config.json").exists()
            try:
                model, _ = LoopRecord.read(self.folder).newest(self.folder, turn.start)
                changes = [f"policy.model={model}", f"data.store={self.store}", *turn.overrides]
                config = RunConfig.load(
                    run / "config.json" if resume else turn.recipe, [] if resume else changes
                )
                if not resume:  # refuse what `agro check` calls a problem
                    with Store.open(self.store, read_only=True) as store:
                        report = check_store(store, config, path=self.store)
                    self.say(str(report))
                    for verdict in report.verdicts:
                        if verdict.level == "problem":
                            raise Refused(str(verdict))
                Trainer(config, run, resume=resume).run()
            except (Lost, Unwritable):  # not the fault of the turn
                raise
            except Refused as error:
                return self._end(turn, "refused", str(error))
            return self._judge(turn, promote=promote)

    def promote_last(self) -> Turn | None:
        """Promote the last turn's model if it was shown to be better, perhaps by ratings collected since."""
        with self._locked(".turn", waits=False):
            turns = LoopRecord.read(self.folder).turns
            if not turns or turns[-1].outcome not in ("better", "rejected"):
                return None
            turn = self._judge(turns[-1], promote=True)
        return turn if turn.outcome == "promoted" else None

    def roll_back(self) -> str:
        """Serve the model from before the last promotion. Raises `Refused` if nothing was promoted."""
        with self._edited() as record:
            if len(record.served) < 2:
                got = f"{record.model} alone"
                raise Refused(f"--rollback: {self.folder}: expected a promoted model, got {got}")
            number = record.served.pop()
            record.turns[number - 1].outcome = "rolled back"
            model, version = record.newest(self.folder)
        return f"the model of turn {number} is rolled back; serving {model}, version {version}"

    def _begin(self) -> Turn:
        """Return the turn under way, or begin a new one."""
        with self._edited() as record:
            if record.turns and record.turns[-1].outcome == "under way":
                self.say(f"turn {record.turns[-1].number} continues")
                return record.turns[-1]
            with Store.open(self.store, read_only=True, create=False) as store:
                recipe = kind_of(store)
            number, start, rewarded = len(record.turns) + 1, record.served[-1], self._rewarded()
            turn = Turn(
                number=number, start=start, rewarded=rewarded, recipe=recipe, overrides=self.overrides
            )
            record.turns.append(turn)
        self.say(f"turn {number}: {rewarded} rewarded samples, recipe {recipe}")
        return turn

    def _judge(self, turn: Turn, *, promote: bool) -> Turn:
        """Promote the model if a reward or people showed that it is better; else record why not."""
        run = load_run(self.folder / str(turn.number))
        verdict = Verdict.of(run)
        serious = [f"Problem: {problem.text}." for problem in problems(run) if problem.serious]
        if verdict.answer != "better" or serious:
            return self._end(turn, "rejected", " ".join([verdict.sentence, *serious]))
        if verdict.to_json()["by"] not in ("reward", "ratings"):
            return self._end(turn, "rejected", f"An estimate promotes nothing. {verdict.sentence}")
        if not promote:
            return self._end(turn, "better", f"{verdict.sentence} --promote serves it.")
        return self._end(turn, "promoted", verdict.sentence)

    def _end(self, turn: Turn, outcome: Outcome, reason: str) -> Turn:
        """Record how a turn ended and which model is served, atomically."""
        with self._edited() as record:
            if outcome == "promoted" and record.served[-1] != turn.start:
                outcome, reason = "rejected", f"The served model changed during the turn. {reason}"
            if turn.version < 0 and outcome != "refused":
                steps = max(0, version_of(self.folder / str(turn.number)))
                turn.version = max(0, record.version, *(each.version for each in record.turns)) + steps
            turn.outcome, turn.reason = outcome, reason
            record.turns[turn.number - 1] = turn
            if outcome == "promoted":
                record.served.append(turn.number)
        return turn

    def _rewarded(self) -> int:
        with Store.open(self.store, read_only=True) as store:
            counts = store.counts()
        return counts.scored + counts.pairs

    @contextmanager
    def _edited(self) -> Iterator[LoopRecord]:
        """Yield loop.json, and write it afterwards; other processes wait."""
        with self._locked(".lock", waits=True):
            record = LoopRecord.read(self.folder)
            yield record
            write(self.folder / FILE, record.model_dump_json(indent=1) + "\n")

    @contextmanager
    def _locked(self, name: str, *, waits: bool) -> Iterator[None]:
        """Hold a lock file. If another process holds it, wait or raise `Refused`."""
        with (self.folder / name).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                raise Refused(f"{self.folder}: another process is running a turn; wait for it") from None
            yield
