"""The prompts that a run is measured on, and whether they or near-copies of them were trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agro.config import RunConfig
from agro.io.near_copies import clusters, normalized
from agro.io.terminal import plain
from agro.rollout.prompts import load_prompts
from agro.runs.folder import SET_ASIDE
from agro.store import Store
from agro.store.location import exists, located
from agro.types import Prompt, Text

NAMED = 3


@dataclass(frozen=True)
class Contamination:
    """Ids of the prompts that are among `trained` ones, up to case, spaces and labels, and of near-copies."""

    prompts: int
    trained: int
    exact: tuple[str, ...]
    near: tuple[str, ...]

    @classmethod
    def of(cls, prompts: Sequence[Prompt], trained: Sequence[Text], least: float) -> Contamination:
        """`least`: how alike near-copies are, as `data.near_copies`."""
        seen, asked = ([plain(text) for text in texts] for texts in (trained, [p.text for p in prompts]))
        labels = clusters([*seen, *asked], least).tolist()
        of_trained, words = set(labels[: len(seen)]), set(map(normalized, seen))
        exact = tuple(p.id for p, text in zip(prompts, asked, strict=True) if normalized(text) in words)
        near = tuple(
            p.id
            for p, label in zip(prompts, labels[len(seen) :], strict=True)
            if label in of_trained and p.id not in exact
        )
        return cls(len(prompts), len(trained), exact, near)

    @property
    def sentence(self) -> str:
        parts = []
        for ids, what in (
            (self.exact, "were trained on"),
            (self.near, "are near-copies of training prompts"),
        ):
            named = f" ({', '.join(ids[:NAMED])}{', …' if len(ids) > NAMED else ''})" if ids else ""
            parts.append(f"{len(ids)} {what}{named}")
        return f"of {self.prompts} prompts {', '.join(parts)}; the run has {self.trained} training prompts"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def held_out_prompts(run: Path, config: RunConfig) -> list[Prompt]:
    """Those of `data.eval_prompts`, or that the run set aside; empty where there are none. To be called where
    the run was started."""
    if config.data.eval_prompts:
        return load_prompts(config.data.paths("eval_prompts"), config.data.columns)
    return load_prompts(run / SET_ASIDE) if (run / SET_ASIDE).exists() else []


def trained_prompts(run: Path, config: RunConfig) -> list[Text]:
    """The prompts of `data.prompts`, and those of the run's store that aren't held out. To be called where
    the run was started, since its configuration has relative paths."""
    files = [path for path in config.data.paths("prompts") if path.startswith("hub:") or Path(path).exists()]
    texts = [prompt.text for prompt in load_prompts(files, config.data.columns)] if files else []
    store = located(config.data.store, run.absolute())
    if exists(store):
        with Store.open(store, read_only=True) as opened:
            is_held_out = opened.split.held_out(config.data)
            texts += [text for prompt_id, text in opened.survey.each_prompt() if not is_held_out(prompt_id)]
    return list({plain(text): text for text in texts}.values())
