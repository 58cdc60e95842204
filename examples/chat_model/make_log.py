"""Rated responses of a chat model to questions with an answer of one word: `python make_log.py MODEL`.

Writes log.jsonl (four responses to each question, with their rewards), held_out.jsonl (questions that are
never trained on) and says how many are right. The questions are those of reproductions/chat. Bring a log of
your own instead: any file that `agro import --guess` understands.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reproductions.chat import logs, tasks
from reproductions.chat.run import HELD_OUT, TRAINED


def main(model: Path) -> None:
    files = logs.Files(Path.cwd())
    tasks.write(tasks.make(TRAINED, held_out=False), files.trained)
    tasks.write(tasks.make(HELD_OUT, held_out=True), files.held_out)
    log = logs.write(model, files)["log"]
    print(json.dumps({"log.jsonl": log}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
