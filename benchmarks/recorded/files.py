"""The files that recorded cases name as "@NAME": prompts, stores and models, made in the folder of a case."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from agro.store import Pair, Store
from agro.types import Sample
from reproductions.systems import tiny

PRODUCTS = [(f"{a}*{b}=", str(a * b)) for a in range(1, 10) for b in range(1, 10)]


def held_out(folder: Path, numbers: range) -> str:
    return tiny.prompts(folder / "held.jsonl", numbers)


def log(
    folder: Path,
    groups: Iterable[int] = range(100, 110),
    size: int = 4,
    name: str = "log",
    fields: dict[str, Any] | None = None,
) -> str:
    """A store of texts and rewards alone, as of an imported log."""
    with Store.open(folder / f"{name}.db") as store:
        store.append(
            Sample(
                f"{g}>",
                str((g + i) % 10) * (i % 3 + 1),
                **{"reward": (i * g % 4) / 3, "source": "someone", **(fields or {})},
            )
            for g in groups
            for i in range(size)
        )
    return str(folder / f"{name}.db")


def sources(folder: Path) -> str:
    """Groups of one source and role among others."""
    path = log(folder)
    log(folder, range(100, 115), fields={"source": "others"})
    log(folder, range(105, 120), fields={"role": "expert"})
    return path


def held_out_groups(folder: Path) -> str:
    """Beside groups a prompt that the model can't read."""
    held = log(folder, range(200, 206), name="held")
    with Store.open(held) as opened:
        opened.append(Sample("x>", "12", reward=float(i)) for i in range(2))
    return held


def judged(folder: Path) -> str:
    """Groups of four responses: of three pairs of them it is known which is the better one."""
    with Store.open(folder / "pairs.db") as store:
        for g in range(100, 112):
            digits = [g, g + 1, g + 2, g + 4]
            ids = store.append(Sample(f"{g}>", str(d % 10) * 3, reward=(g - d) / 4) for d in digits)
            store.add_pairs(
                [Pair(ids[0], ids[1], 4, 1), Pair(ids[2], ids[3], 3, 2), Pair(ids[0], ids[3], 5, 0)]
            )
    return str(folder / "pairs.db")


def products(folder: Path, part: slice) -> str:
    file = folder / f"products{part.start}.jsonl"
    rows = (json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in PRODUCTS[part])
    file.write_text("".join(rows))
    return str(file)


def taught_products(folder: Path) -> str:
    """Texts of a teacher that calls the calculator."""
    with Store.open(folder / "taught.db") as store:
        store.append(
            Sample(p, f"[{p[:-1]}]({a}){a}", role="expert", source="teacher") for p, a in PRODUCTS[21::2]
        )
    return str(folder / "taught.db")


TEACHER = {"reward": None, "role": "expert", "source": "teacher"}
FILES: dict[str, Callable[[Path], str | None]] = {
    "none": lambda folder: None,
    "prompts": lambda folder: tiny.prompts(folder / "prompts.jsonl", range(60)),
    "four held out": partial(held_out, numbers=range(60, 64)),
    "ten held out": partial(held_out, numbers=range(60, 70)),
    "log": log,
    "log of fives": partial(log, size=5),
    "five groups": partial(log, groups=range(100, 105)),
    "values": partial(log, size=6, name="values"),
    "experts": partial(log, groups=range(100, 140), size=1, fields=TEACHER),
    "sources": sources,
    "held out groups": held_out_groups,
    "judged": judged,
    "products": partial(products, part=slice(0, None, 2)),
    "products held out": partial(products, part=slice(1, 20, 2)),
    "products taught": taught_products,
}
