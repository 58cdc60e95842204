"""Which prompts of a store are held out: `data.hold_out` by a hash, near-copies together or not at all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

from agro.config import DataConfig
from agro.errors import Refused
from agro.io.files import write
from agro.io.near_copies import cluster_names
from agro.io.strictjson import loads
from agro.store.database import Database
from agro.store.draw_rules import is_held_out
from agro.store.survey import Survey
from agro.types import Text

FILE = "near_copies.json"
TABLE = "CREATE TABLE IF NOT EXISTS clusters (run TEXT PRIMARY KEY, clusters TEXT NOT NULL)"

Clusters = Mapping[str, str]  # by prompt id the smallest id of its near-copies; those alone may be missing


class Split:
    """The prompts of a store that are held out, and those that are trained on."""

    def __init__(self, survey: Survey, database: Database) -> None:
        self._survey, self._db = survey, database
        self._clusters: Clusters | None = None
        self._of_runs: dict[str, Clusters | None] = {}
        self._of_store: dict[float, Clusters] = {}

    def use(self, clusters: Clusters | None) -> None:
        """Split by these where no run is named. They may have more prompts than the store."""
        self._clusters = clusters

    def keep(self, run: str, clusters: Clusters) -> None:
        """Split by these, in every process of the run."""
        self.use(clusters)
        with self._db.transaction():
            self._db.run(TABLE)
            row = (run, json.dumps(dict(clusters)))
            self._db.insert("clusters", ("run", "clusters"), [row], key=("run",))
        self._of_runs.pop(run, None)

    def of(self, run: str) -> Clusters | None:
        """Those of a run; None where it keeps none."""
        if run not in self._of_runs:
            exists = self._db.has("clusters")
            rows = exists and self._db.run("SELECT clusters FROM clusters WHERE run = ?", [run])
            self._of_runs[run] = loads(rows[0][0]) if rows else None
        return self._of_runs[run]

    def held_out(self, data: DataConfig, run: str = "") -> Callable[[str], bool]:
        """Whether a prompt, by its id, is held out. One that isn't in a cluster decides for itself. None are
        while `data.hold_out_most` isn't resolved to a share, which a run does when it begins.

        Near-copies are those that the run keeps (those in use where none is named), or else those of the
        store as it is when this is first asked.
        """
        clusters = self._chosen(data, run)
        if clusters is None:
            return lambda prompt_id: False
        return lambda prompt_id: is_held_out(clusters.get(prompt_id, prompt_id), data.hold_out)

    def name_of(self, data: DataConfig, run: str) -> str:
        """Of what `held_out` returns: another one where it holds out other prompts."""
        clusters = self._chosen(data, run)
        if clusters is None:
            return ""
        content = json.dumps([data.hold_out, sorted(clusters.items())])
        return blake2b(content.encode(), digest_size=8).hexdigest()

    def _chosen(self, data: DataConfig, run: str) -> Clusters | None:
        """None where nothing is held out."""
        if not data.hold_out or data.hold_out_most is not None:
            return None
        clusters = self.of(run) if run else self._clusters
        if clusters is None and data.near_copies not in self._of_store:
            self._of_store[data.near_copies] = clusters_in(self._survey.each_prompt(), data.near_copies)
        return self._of_store[data.near_copies] if clusters is None else clusters


def clusters_in(prompts: Iterable[tuple[str, Text]], near_copies: float) -> dict[str, str]:
    """Of prompts with near-copies the smallest id among them. The order of prompts doesn't matter."""
    names = cluster_names(dict(prompts), near_copies)
    sizes = Counter(names.values())
    return {prompt_id: name for prompt_id, name in names.items() if sizes[name] > 1}


def write_clusters(folder: Path, clusters: Clusters) -> None:
    """Keep those of a run, which a resumed run splits by, though its store may have grown."""
    write(folder / FILE, json.dumps(dict(clusters), ensure_ascii=False, indent=0) + "\n")


def read_clusters(folder: Path) -> dict[str, str] | None:
    """Of a run; None where it has none. Raises `Refused` for what isn't a table of ids."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values = loads(path.read_bytes())
    except ValueError as error:
        raise Refused(f"{path}: expected clusters of prompts as JSON: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise Refused(f"{path}: expected an object of prompt ids, got {values!r:.80}")
    return values
