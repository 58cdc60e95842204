"""A server that samples, as a process: the stand-in of the tests, on a real tiny model.

    python benchmarks/hosts/server.py RECIPE PORT

Its model is the recipe's with weights of its own, as a server has that was started again: what it samples
before the trainer's weights are pushed to it is far off.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "engines")]

from stand_in import Handler, Listener, StandIn  # noqa: E402

from agro.config import RunConfig  # noqa: E402
from agro.models.policy import Policy  # noqa: E402

SEED = 99  # of no run


def main() -> None:
    recipe, port = sys.argv[1:]
    state = StandIn(Policy.load(RunConfig.load(recipe).policy, seed=SEED))
    Listener(("127.0.0.1", int(port)), type("Of", (Handler,), {"state": state})).serve_forever()


if __name__ == "__main__":
    main()
