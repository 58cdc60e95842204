"""What kind of log a store has, and the recipe for it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from agro.store import Store

Kind = Literal["log", "feedback", "pairs"]  # also the name of the recipe for it
MANY = 0.5  # of the prompts with a reward, which have one response


def kind_of(store: Store) -> tuple[Kind, int]:
    """What a store has, by the recipe that trains on it, and at how many prompts.

    log: rewards of several responses a prompt; feedback: of one; pairs: judgments, and no such rewards.
    """
    scored = [group.scored for group in store.survey.each_group() if group.scored]
    judged = judged_prompts(store)
    if judged and not any(size > 1 for size in scored):
        return "pairs", judged
    is_single = len(scored) > 1 and scored.count(1) >= MANY * len(scored)
    return ("feedback" if is_single else "log"), len(scored)


def instead(store: Store) -> str:
    """The recipe for a log of another kind; "" for one that has groups with rewards to compare."""
    kind, _ = kind_of(store)
    if kind == "log":
        return ""
    what = "judged pairs" if kind == "pairs" else "single responses"
    return f"recipe {kind}, which trains on {what} (agro check {store.path} prints its command)"


def judged_prompts(store: Store) -> int:
    """How many prompts have a judgment with a winner."""
    if not store.counts().pairs:
        return 0
    prompts = {row.id: row.prompt_id for row in store.survey.each_summary()}
    return len({prompts.get(pair.winner) for pair in store.pairs() if not pair.is_tie})


def train_command(
    recipe: str, model: str | None, store: Store, log: Path | None, changes: Sequence[str] = ()
) -> str:
    """`agro train RECIPE …`, after `agro import` where the store was filled from a file for a look."""
    path = store.path if log is None else Path(log.name.split(".")[0] + ".db")
    parts = [] if log is None else ["agro", "import", str(log), "--store", str(path), "&&"]
    parts += ["agro", "train", recipe, f"policy.model={model or 'MODEL'}", f"data.store={path}", *changes]
    quoted = [part if part == "&&" else shlex.quote(part) for part in [*parts, "--out", f"runs/{recipe}"]]
    return " ".join(quoted)
