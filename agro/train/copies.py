"""Weights that a run keeps beside its checkpoints, in folders under their versions.

A folder stays until no checkpoint needs it: a run that continues from one finds what it had there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agro.io.files import remove
from agro.runs.folder import Run
from agro.store import Store
from agro.train.state import read_position


@dataclass(frozen=True)
class Copies:
    """The folders RUN/weights/`name`/vVERSION."""

    run: Run
    store: Store
    name: str
    last: int = 1  # how many of the last ones are in use at a time

    def folder(self, version: int) -> Path:
        return self.run.folder / "weights" / self.name / f"v{version:08d}"

    def versions(self) -> list[int]:
        """In rising order."""
        return sorted(int(folder.name[1:]) for folder in self.folder(0).parent.glob("v*"))

    def until(self, version: int) -> list[int]:
        """Those up to a version; later ones, of steps that are lost, are removed."""
        for later in self.versions():
            if later > version:
                remove(self.folder(later))
        return self.versions()

    def prune(self, now: int) -> None:
        """Remove all but those in use at version `now`, and where the run continues from a checkpoint."""
        commits = self.store.ledger.commits(self.run.id)
        folders = [self.run.checkpoint(commit.step) for commit in commits]
        starts = [read_position(folder, "").version for folder in folders if folder.is_dir()]
        copies, needed = self.versions(), set[int]()
        for start in (*starts, now):
            needed |= set([version for version in copies if version <= start][-self.last :])
        for version in set(copies) - needed:
            remove(self.folder(version))
