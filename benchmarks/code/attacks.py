"""Programs that want the reward without solving the task, or more than a program may have, by attacks.toml.

The task is `add(a, b)`, judged by `TESTS`. None of them adds.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

TESTS = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert abs(add(0.5, 0.25) - 0.75) < 1e-9"]
HONEST = "def add(a, b):\n    return a + b\n"
_PROGRAMS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
FORGERIES, ESCAPES, HOARDS = (_PROGRAMS[name] for name in ("forgeries", "escapes", "hoards"))
