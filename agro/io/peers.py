"""What was meant by an unknown name: one that is alike, or what TRL and verl call it."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

_NAMES = tomllib.loads((Path(__file__).parent / "peers.toml").read_text(encoding="utf-8"))
ALIASES: dict[str, str] = _NAMES["aliases"]  # settings of TRL that mean the same here: accepted, with a note
# Their other names of settings, and what sets them here.
SETTINGS: dict[str, str] = _NAMES["settings"]
NEEDLESS: dict[str, str] = _NAMES["needless"]  # names of settings, and why nothing need set them here
ELSEWHERE: dict[str, str] = _NAMES["elsewhere"]  # names of their losses without an entry of their own
ABSENT: tuple[str, ...] = tuple(_NAMES["absent"])  # without a counterpart here
ALIKE = 0.6  # the least likeness, as of difflib from 0 to 1, of a name that may be meant


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """A question that names up to three that are as alike, with `prefix` before each; "" where none is.

    A name in whole words of the other, such as scale in reward_scale, is alike too.
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
    """What sets an argument of theirs here, by its name or dotted key; "" where nothing does, or itself."""
    name = path.rpartition(".")[2]
    ours = SETTINGS.get(name) or ALIASES.get(name, path)
    return NEEDLESS.get(name, "") if ours == path else f"{ours} sets it here"


def objective(name: str, known: Mapping[str, str]) -> str:
    """What to use for an objective that isn't known by this name; "" where nothing is near.

    `known`: by name what other libraries call it.
    """
    answers = {
        plain(word): f"here it is {own}"
        for own, called in known.items()
        for word in re.findall(r'"([^"]+)"', called)
    }
    answers |= {plain(peer): "it has no counterpart here; see docs/methods.md" for peer in ABSENT}
    answers |= {plain(peer): f"here it is {ours}" for peer, ours in ELSEWHERE.items()}
    answers |= {plain(own): f"did you mean {own}?" for own in known}
    return answers.get(plain(name)) or did_you_mean(name, known)
