"""A run's figures and its page. matplotlib is imported on demand."""

from pathlib import Path

__all__ = ["report"]


def report(run_folder: str | Path) -> Path:
    """Write `report.html`, one self-contained page, to a run folder and return its path.

    Raises `Refused` if `config.json` or `metrics.jsonl` is missing, empty or malformed.
    """
    from agro.io.files import write
    from agro.pages.run.page import page
    from agro.runs.rundata import load_run

    path = Path(run_folder) / "report.html"
    write(path, page(load_run(Path(run_folder))))
    return path
