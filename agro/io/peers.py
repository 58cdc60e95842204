"""Suggestions for an unknown name: a similar one, or the counterpart of a name in TRL or verl."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

_NAMES = tomllib.loads((Path(__file__).parent / "peers.toml").read_text(encoding="utf-8"))
ALIASES: dict[str, str] = _NAMES["aliases"]  # TRL's settings that mean the same here: accepted, with a note
# Other setting names of theirs: what sets them here.
SETTINGS: dict[str, str] = _NAMES["settings"]
NEEDLESS: dict[str, str] = _NAMES["needless"]  # setting names: why nothing needs to set them here
ELSEWHERE: dict[str, str] = _NAMES["elsewhere"]  # names of their losses: what to use here
ABSENT: tuple[str, ...] = tuple(_NAMES["absent"])  # their losses without a counterpart here
ALIKE = 0.6  # minimum similarity of a suggestion, by difflib, from 0 to 1


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """A question that suggests up to three of the most similar names, with `prefix`; "" if there are none.

    A name that is part of the other in whole words, such as scale in reward_scale, is similar too.
    """
    alike = []
    for each in dict.fromkeys(names):
        likeness = difflib.SequenceMatcher(None, each, name).ratio()
        if f"_{each}_" in f"_{name}_" or f"_{name}_" in f"_{each}_":
            likeness = max(likeness, ALIKE)
        if likeness >= ALIKE:
            alike.append((likeness, each))
    alike = sorted(alike, reverse=True)[:3]
    close = [prefix + each for likeness, each in alike if likeness > alike[0][0] - 0.1]
    return f"did you mean {' or '.join(filter(None, (', '.join(close[:-1]), close[-1])))}?" if close else ""


def plain(name: str) -> str:
    """Lower case, letters and digits alone: "Dr.GRPO" and "dr_grpo" are the same."""
    return re.sub(r"[^a-z0-9*]", "", name.lower())


def hint(path: str) -> str:
    """What sets an argument of theirs here, by its name or dotted key; "" if nothing does, or itself."""
    name = path.rpartition(".")[2]
    ours = SETTINGS.get(name) or ALIASES.get(name, path)
    return NEEDLESS.get(name, "") if ours == path else f"{ours} sets it here"


def objective(name: str, objectives: Mapping[str, str]) -> str:
    """What to use for an objective of an unknown name; "" if nothing is similar.

    `objectives`: the name of each, and what other libraries call it.
    """
    answers = {
        plain(word): f"here it is {name_here}"
        for name_here, called in objectives.items()
        for word in re.findall(r'"([^"]+)"', called)
    }
    answers |= {plain(peer): "it has no counterpart here; see docs/methods.md" for peer in ABSENT}
    answers |= {plain(peer): f"here it is {ours}" for peer, ours in ELSEWHERE.items()}
    answers |= {plain(ours): f"did you mean {ours}?" for ours in objectives}
    return answers.get(plain(name)) or did_you_mean(name, objectives)
