"""How a case differs from what was recorded of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Values = dict[str, Any]
ABSENT = "absent"  # in place of a value's JSON, where there is none


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """The JSON of each value, under dotted keys."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{before}{key}.")
        else:
            found[before + key] = json.dumps(value)
    return found


def differences(was: Values, now: Values) -> list[str]:
    """What of a case isn't as it was recorded: files, and metrics with the steps where they differ."""
    found = []
    for file in sorted(was["weights"].keys() | now["weights"].keys()):
        before, after = was["weights"].get(file, ABSENT), now["weights"].get(file, ABSENT)
        if before != after:
            found.append(f"{file}: {after[:12]}, was {before[:12]}")
    then, here = ({m["step"]: flat(m) for m in side["metrics"]} for side in (was, now))
    steps = list(dict.fromkeys([*then, *here]))
    keys = dict.fromkeys(key for side in (then, here) for line in side.values() for key in line)
    for key in keys:
        pairs = {s: (then.get(s, {}).get(key, ABSENT), here.get(s, {}).get(key, ABSENT)) for s in steps}
        other = [step for step, (before, after) in pairs.items() if before != after]
        if other:
            before, after = pairs[other[0]]
            found.append(f"{key}: step {spans(other)} (step {other[0]}: {after}, was {before})")
    order = [[m["step"] for m in side["metrics"]] for side in (was, now)]
    if order[0] != order[1] and then.keys() == here.keys():
        found.append(f"step: lines of steps {order[1]}, were {order[0]}")
    return found


def spans(steps: Sequence[int]) -> str:
    """`1, 3-6` for 1, 3, 4, 5, 6."""
    found: list[list[int]] = []
    for step in sorted(steps):
        if found and step == found[-1][-1] + 1:
            found[-1] = [found[-1][0], step]
        else:
            found.append([step])
    return ", ".join("-".join(map(str, span)) for span in found)


def with_names(was: Values, renamed: Mapping[str, str]) -> Values:
    """A recorded case, its metrics by the names that they have now."""
    return {**was, "metrics": [{renamed.get(k, k): v for k, v in line.items()} for line in was["metrics"]]}


def without_metrics(now: Values, new: Sequence[str]) -> Values:
    """The values without the metrics `new`."""
    return {**now, "metrics": [{k: v for k, v in line.items() if k not in new} for line in now["metrics"]]}
