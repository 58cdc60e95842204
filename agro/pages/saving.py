"""What people read of a run that has ended: its outcome, the page, the cards, an upload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agro.config import TrainConfig
from agro.io.files import writing
from agro.pages.run import report
from agro.runs.card import push, write_cards
from agro.runs.problems import problems
from agro.runs.rundata import Outcome, RunData, load_run
from agro.runs.side_by_side import SideBySide, short_text
from agro.runs.verdict import Verdict

SHOWN, LONGEST = 2, 160  # prompts on the terminal, and characters of a text


def present(folder: Path, train: TrainConfig, say: Callable[[str], None]) -> bool:
    """What was wrong, where the run was best, page, cards and upload.

    A page that fails doesn't keep back the others; then its error is raised. Returns whether the run ended
    well: without a problem that is more important than its numbers.
    """
    failure: Exception | None = None
    ended_well = True
    with writing(folder):
        try:
            ended_well = summarize(load_run(folder), say)
            report(folder)
        except Exception as error:  # noqa: BLE001
            failure = error
        write_cards(folder)
        address = push(folder / "model", train)
        if address:
            say(f"uploaded to {address}")
        if failure is not None:
            say(f"only the report failed; try again with: agro report {folder}")
            raise failure
    return ended_well


def summarize(run: RunData, say: Callable[[str], None]) -> bool:
    """The problems, whether the model got better, and the best measurement.

    Returns whether no problem contradicts the measurement.
    """
    report, outcome = problems(run), Outcome.of(run)
    for problem in report:
        say(f"problem: {problem.text}" + (f". {problem.detail}" if problem.detail else ""))
    ended_well = not any(problem.serious for problem in report)
    say(Verdict.of(run).sentence)
    shown = SideBySide.load(run.folder)
    if shown is not None:
        say("\n".join([shown.about, *short_text(shown, SHOWN, LONGEST)]))
    if outcome is not None:
        say(outcome.text if ended_well else f"measured all the same: {outcome.text}")
    return ended_well
