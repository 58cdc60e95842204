"""A task of `verifiers` 0.4: `harness:python examples/agents/verifiers_episode.py TASKSET`.

The row's column `idx` is the number of the task; the sum of its weighted rewards becomes the reward
(`environment.options.reward` is "file"). TASKSET is an installed package. Its chat program runs as a process
of this machine, for which verifiers needs `uv`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

index = json.loads(os.environ["AGRO_COLUMNS"])["idx"]
result = Path(os.environ["AGRO_RESULT"])
options = {
    "--client.base-url": os.environ["OPENAI_BASE_URL"],
    "--client.api-key-var": "OPENAI_API_KEY",
    "--env.agent.harness.id": "null",  # the chat loop; others are agents such as mini_swe_agent
    "--env.agent.runtime.type": "subprocess",
    "--select.include.idx": f"{index}",
    "--output-dir": str(result.parent / "verifiers"),
    "--rich": "None",
}
command = ["vf-eval", sys.argv[1], "--model", "policy", "--no-push"]
subprocess.run([*command, *(part for option in options.items() for part in option)], check=True)
[file] = result.parent.glob("verifiers/*/traces.jsonl")
[episode] = map(json.loads, file.read_text().splitlines())
[trace] = episode["traces"]
reward = sum(part["score"] * part["weight"] for part in trace["rewards"].values())
result.write_text(json.dumps({"reward": reward}))
