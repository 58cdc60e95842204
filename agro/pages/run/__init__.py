"""A run's figures and its page. matplotlib is imported when one is drawn."""

from pathlib import Path

__all__ = ["report"]


def report(run_folder: str | Path) -> Path:
    """Write `report.html`, one self-contained page, into a run folder and return its path.

    Raises `Refused` where `config.json` or `metrics.jsonl` is missing, empty or not what a run writes.
    """
    from agro.io.files import write
    from agro.pages.run.page import page
    from agro.runs.rundata import load_run

    path = Path(run_folder) / "report.html"
    write(path, page(load_run(Path(run_folder))))
    return path
