"""A question as a task of Inspect's: `harness:python examples/agents/inspect_episode.py`.

The row's prompt and `answer` are its sample; Inspect's score becomes the reward (`environment.options.reward`
is "file"). Solvers with tools and several turns go in place of `generate`.
"""

import json
import os
from pathlib import Path

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes, value_to_float
from inspect_ai.solver import generate

answer = json.loads(os.environ["AGRO_COLUMNS"])["answer"]
task = Task([Sample(os.environ["AGRO_PROMPT"], target=answer)], solver=generate(), scorer=includes())
result = Path(os.environ["AGRO_RESULT"])
[log] = eval(task, model="openai/policy", display="none", log_dir=str(result.parent / "inspect"))
[score] = log.samples[0].scores.values()
result.write_text(json.dumps({"reward": value_to_float()(score.value)}))
