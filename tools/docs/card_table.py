"""Prints the table of docs/scaling.md, how much fits on one GPU: `python tools/docs/card_table.py`."""

from __future__ import annotations

import sys

from agro.api.fit import Choice, for_card
from agro.config import RunConfig
from agro.models.footprint import SIZES

CARDS = (16, 24, 80)  # GB


def cell(model: str, gigabytes: int) -> str:
    """The tokens that fit, with a star for 4-bit weights; if none fit, the missing memory."""
    choice = Choice(RunConfig.load("card24", [f"policy.model={model}"]))
    short = for_card(choice, gigabytes * 1e9)
    if short:
        return short.partition(" of ")[0]
    config = choice.config
    return f"{config.train.max_length:,}" + ("*" if config.policy.quantize else "")


def main() -> int:
    print("| model | " + " | ".join(f"{card} GB" for card in CARDS) + " |")
    print("|---" * (len(CARDS) + 1) + "|")
    for model in SIZES:
        print(f"| {model} | " + " | ".join(cell(model, card) for card in CARDS) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
