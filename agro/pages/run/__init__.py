"""A run's figures and its page. matplotlib is imported when one is drawn."""

from pathlib import Path

__all__ = ["report"]


def report(run_folder: str | Path) -> Path:
    """Write `report.html`, one self-contained page, into a run folder and return its path.

    Raises `Refused` where `config.json` or `metrics.jsonl` is missing, empty or not what a run writes.
    """
    from agro.pages.run.page import write_page

    return write_page(Path(run_folder))
