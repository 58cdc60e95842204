"""Kill the processes of runs on Ray, and measure what goes on, what is lost and when all is back.

    python benchmarks/hosts/run.py --ray-python PYTHON [--only ray "ray on postgres"] [--seed 0]

Each case is failures.py, and in the end looks at the run's store: each response made once and drawn once,
groups complete, nothing damaged. Writes benchmarks/results/hosts.json. What dies on one host is in
tests/place/test_local_run.py and tests/store/postgres_faults.py, ranks in tests/train/test_ranks.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from placed import ENVIRONMENT, holds  # noqa: E402

from agro.io.processes import free_port  # noqa: E402
from benchmarks import recording  # noqa: E402
from benchmarks.postgres.postgres_server import Server  # noqa: E402

KILLS = {"ray": "5", "ray on postgres": "24"}


def main() -> None:
    parser = recording.parser(__doc__, only=KILLS, seed="0", out=HERE.parent / "results/hosts.json")
    parser.add_argument("--ray-python", required=True)
    asked = parser.parse_args()
    for name in asked.only:
        with tempfile.TemporaryDirectory() as folder, closing(Server(free_port("127.0.0.1"))) as server:
            out = Path(folder) / "result.json"
            command = [asked.ray_python, str(HERE / "failures.py"), folder, str(out), "--seed", asked.seed]
            command += ["--kills", KILLS[name], *(("--url", server.url) if "postgres" in name else ())]
            subprocess.run(command, env=ENVIRONMENT, check=True)
            result = json.loads(out.read_text())
        print(json.dumps(result), flush=True)
        back = [seconds for failure in result["failures"] for seconds in failure["back_after"]]
        rows = recording.keep(asked.out, recording.row(ours=back, **result))
    raise SystemExit(0 if all(holds(row["found"]) for row in rows) else 1)


if __name__ == "__main__":
    main()
