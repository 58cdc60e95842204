"""The store: all samples, in one SQLite file that processes share."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Self

from agro.errors import AgroWarning
from agro.formats.records import write_samples
from agro.store.database import BUSY_TIMEOUT
from agro.store.drawing import Drawing
from agro.store.forgetting import Forgetting
from agro.store.requests import Requests
from agro.store.surveying import Surveying


class Store(Drawing, Requests, Forgetting, Surveying):
    """Samples in the order in which they were added. Open one connection per process and thread.

    A method writes in one transaction, which is on the disk when it returns; `transaction()` joins several. A
    row of a sample is never deleted: what a resumed run generates again is marked `redone`, and returned on
    request only; what is replaced or forgotten is emptied, and never returned. Nor is a damaged sample:
    reading it is refused, or reported to `on_damaged`.
    """

    @classmethod
    def open(
        cls, path: str | Path, *, read_only: bool = False, create: bool = True, timeout: float = BUSY_TIMEOUT
    ) -> Self:
        """Open a store, or create one. `timeout`: seconds to wait for another writer.

        Raises `Refused` for what isn't a store, has another schema, can't be written to, or is missing.
        """
        return cls(path, read_only=read_only, create=create, timeout=timeout)

    def export(self, path: str | Path) -> int:
        """Write the samples, without judgments, to a .jsonl, .jsonl.gz or .parquet file; returns how many."""
        [(pairs,)] = self._run("SELECT count(*) FROM pairs")
        if pairs:
            text = f"{path}: the store's {pairs} pairs aren't part of an export"
            warnings.warn(text, AgroWarning, stacklevel=2)
        return write_samples(path, self.samples())
