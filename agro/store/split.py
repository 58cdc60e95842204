"""Which prompts of a store are held out: `data.hold_out` by a hash, near-copies together or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agro.config import DataConfig
from agro.errors import Refused
from agro.io.files import write
from agro.io.near_copies import cluster_names
from agro.io.strictjson import loads
from agro.store.draw_rules import is_held_out
from agro.store.survey import Survey
from agro.types import Text

FILE = "near_copies.json"

Clusters = Mapping[str, str]  # by prompt id the smallest id of its near-copies; those alone may be missing


@dataclass
class Split:
    """The prompts of a store that are held out, and those that are trained on.

    `clusters`: of a run, which may know more prompts than the store has.
    """

    _survey: Survey
    clusters: Clusters | None = None
    _clusters: dict[float, Clusters] = field(default_factory=dict)

    def held_out(self, data: DataConfig) -> Callable[[str], bool]:
        """Whether a prompt, by its id, is held out. One that isn't in a cluster decides for itself.

        Near-copies are those of the run, or of the store as it is when this is first asked.
        """
        share = data.hold_out
        if not share:
            return lambda prompt_id: False
        clusters = self.clusters
        if clusters is None:
            if data.near_copies not in self._clusters:
                self._clusters[data.near_copies] = clusters_in(self._survey.each_prompt(), data.near_copies)
            clusters = self._clusters[data.near_copies]
        return lambda prompt_id: is_held_out(clusters.get(prompt_id, prompt_id), share)


def clusters_in(prompts: Iterable[tuple[str, Text]], near_copies: float) -> dict[str, str]:
    """Of prompts with near-copies the smallest id among them. The order of prompts doesn't matter."""
    names = cluster_names(dict(prompts), near_copies)
    sizes: dict[str, int] = {}
    for name in names.values():
        sizes[name] = sizes.get(name, 0) + 1
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
