"""The map of the package: `python tools/docs/architecture.py > docs/architecture.md`, from a checkout."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "agro"
# A room imports only rooms listed before it. No other part of the package needs a satellite.
ROOMS = (
    *("errors", "types", "io", "stats", "objectives", "config", "models", "rewards"),
    *("store", "rollout", "runs", "train"),
)
SATELLITES = ("logs", "proof", "place", "pages", "samplers", "api", "door", "cli")

PAGE = """# Architecture

<!-- Made by `python tools/docs/architecture.py > docs/architecture.md`; change that file, or the docstring
of a room. -->

`agro/` has {count} rooms: packages, and a few modules. A room imports only rooms above it in these tables,
and no two modules import each other. Only later satellites import a satellite. `tests/test_rooms.py` checks
these rules.

| room | what it holds |
|---|---|
{rooms}

| satellite | what it holds |
|---|---|
{satellites}

agro finds the packages next to `agro/` by entry points, as it finds those that users install. Nothing in
`agro/` names or imports them:

| package | what it holds |
|---|---|
{beside}

## The path of a sample

1. `train/loop.py` is all of training: fill the store, draw from it, compute the gradient, move the weights,
   skip the update or roll back, and measure.
2. `train/source.py` fills the store with the samples that a step needs, sampled here or by other processes.
   `train/around.py` wraps the source that `source.around` names around it.
3. `collect` of `rollout/` makes every response: `models/encoding.py` turns a prompt into tokens, an engine of
   `rollout/engines/` continues them, an environment of `rollout/envs/` may answer, and `rewards/` scores
   the text.
4. `rollout/prompts.py` reads files of prompts. `logs/importing.py` imports responses of other programs:
   `logs/format_table.py` recognizes the format, by a table of `logs/formats.toml` or of a package.
5. `store/samples.py` appends samples in one transaction. An unknown reward stays null.
6. `store/draw_rules.py` decides which groups a step trains on; `store/drawing.py` applies the rules and
   records each draw.
7. `train/feed.py` turns the drawn and the fresh samples of a step into a `types.Batch` of tensors;
   `train/collate.py` adds reference log-probs and values.
8. `train/step.py` is the only backward pass: it computes streams of log-probs without gradient, calls
   `objectives.differentiate` on one function of `objectives/methods/`, and runs the backward pass one
   micro-batch at a time.
9. `train/monitors/` judge the step before the weights move, and record it afterward. `train/learner.py` moves
   the weights and publishes them.
10. `runs/` keeps a run's configuration, metrics and checkpoints. `pages/` draws the pages that people read.
"""


def summary(room: str, folder: Path = PACKAGE) -> str:
    """The first paragraph of a room's docstring."""
    path = folder / room / "__init__.py"
    if not path.exists():
        path = folder / f"{room}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert text, f"{path} has no docstring"
    return " ".join(text.split("\n\n")[0].split())


def page() -> str:
    def table(rooms: tuple[str, ...], folder: Path = PACKAGE) -> str:
        return "\n".join(f"| `{room}` | {summary(room, folder)} |" for room in rooms)

    count = len(ROOMS) + len(SATELLITES)
    beside = tuple(sorted(path.parent.name for path in PACKAGE.parent.glob("agro_*/__init__.py")))
    return PAGE.format(
        count=count,
        rooms=table(ROOMS),
        satellites=table(SATELLITES),
        beside=table(beside, PACKAGE.parent),
    )


if __name__ == "__main__":
    print(page(), end="")
