"""A run's figures and its page. matplotlib is imported when one is drawn."""

from pathlib import Path

__all__ = ["curve", "report"]


def report(run_folder: str | Path) -> Path:
    """Write `report.html`, one self-contained page, into a run folder and return its path.

    Raises `Refused` where `config.json` or `metrics.jsonl` is missing, empty or not what a run writes.
    """
    from agro.pages.run.page import write_page

    return write_page(Path(run_folder))


def curve(run_folder: str | Path, out_png: str | Path) -> Path:
    """Write the learning curve of a run as a PNG and return its path.

    Raises `Refused` as `report` does, and where no reward was measured.
    """
    from agro.errors import Refused
    from agro.pages.run.curves import learning_curve
    from agro.pages.run.figures import png
    from agro.runs.rundata import load_run

    run, path = load_run(Path(run_folder)), Path(out_png)
    if not run.measures("reward_mean", "eval_reward"):
        raise Refused(f"{run.folder / 'metrics.jsonl'}: no step has a reward, so there is no curve to draw")
    png(learning_curve(run, (7.6, 3.6), titled=True), path)
    return path
