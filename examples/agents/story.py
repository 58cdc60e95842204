"""An agent that exists gets better by its own sessions: `python examples/agents/story.py FOLDER`.

A small model learns the form of the agent's conversation from few demonstrations. Then the agent, unchanged,
runs 300 sessions against `agro serve`, each with an exact reward by `POST /v1/feedback`; `agro train log`
trains on that store; and the same agent runs again on held-out tasks, at the start and at the result.

Held out are 200 tasks, each played `PLAYS` times by both. One play each had shown +.085 with p = .030: a
standard deviation of .55 a task. Eight plays leave .20 (if its variance is all of sampling) to .42 (if half
of it is of the tasks), so that the same gain has p < .01 with a probability of 99 % to 62 %.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from openai import OpenAI

from agro.config import NewModel
from agro.models.pretrained import new_model
from agro.stats.paired import compare
from agro.store import Store

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import agent  # noqa: E402

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TASKS, TRIES, HELD_OUT, PLAYS = 75, 4, 200, 8
Task = tuple[str, str]  # a key and its value
TEMPLATE = f"policy.chat.template={HERE / 'template.jinja'}"


def new(folder: Path, seed: int) -> None:
    """A small model of random weights, whose tokenizer reads the end token in a text as one."""
    sizes = {"hidden": 96, "layers": 2, "heads": 4, "context": 320, "initializer_range": 0.1}
    new_model(folder, NewModel(alphabet="bytes", **sizes), seed)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "split_special_tokens": False}))


def agro(*arguments: str, **variables: str) -> str:
    """A command of agro; what it prints."""
    command = [sys.executable, "-m", "agro", *arguments]
    print("$ agro", " ".join(arguments), flush=True)
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def demonstration(task: Task) -> dict:
    """What the agent and a perfect model say to each other."""
    key, value = task
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": json.dumps({"key": key})}}
    turns = [
        {"role": "user", "content": f"{key}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": value},
        {"role": "assistant", "content": value},
        {"role": "user", "content": "twice?"},
        {"role": "assistant", "content": str(2 * int(value))},
    ]
    return {"prompt": turns[:1], "tools": agent.TOOLS, "messages": turns, "role": "expert"}


def tasks(seed: int) -> tuple[list[Task], list[Task], list[Task]]:
    """Of the demonstrations, of the sessions, and held out: no key twice."""
    rng = random.Random(seed)
    keys = [a + b for a in LETTERS for b in LETTERS]
    rng.shuffle(keys)
    made = [(key, str(rng.randrange(10))) for key in keys]
    return made[TASKS + HELD_OUT :], made[:TASKS], made[TASKS : TASKS + HELD_OUT]


@contextmanager
def served(model: Path, *options: str) -> Iterator[str]:
    """The URL of `agro serve` on a model."""
    command = [sys.executable, "-m", "agro", "serve", str(model), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("serving ").strip()
    finally:
        process.terminate()
        process.wait()


def sessions(url: str, asked: Sequence[Task], name: str, *, gives_feedback: bool) -> np.ndarray:
    """The rewards of a session of the agent for each task."""

    def session(number: int) -> float:
        key, value = asked[number]
        base = f"{url}/s/{name}-{number}/v1"
        client = OpenAI(base_url=base, api_key=os.environ["AGRO_TOKEN"])
        said = agent.run(client, f"{key}?", {key: value})
        reward = sum(a == b for a, b in zip(said, [key, value, str(2 * int(value))])) / 3
        if gives_feedback:
            headers = {"authorization": f"Bearer {client.api_key}"}
            httpx.post(f"{base}/feedback", json={"reward": reward}, headers=headers).raise_for_status()
        return reward

    with ThreadPoolExecutor(8) as pool:
        return np.array(list(pool.map(session, range(len(asked)))))


def main(folder: Path, seed: int = 0, taught: int = 260, steps: int = 60) -> None:
    folder.mkdir(parents=True)
    os.environ["AGRO_TOKEN"] = "a-token-of-this-story"
    shown, asked, held_out = tasks(seed)
    demonstrations = folder / "demonstrations.jsonl"
    demonstrations.write_text("".join(json.dumps(demonstration(task)) + "\n" for task in shown))
    agro("import", str(demonstrations), "--store", str(folder / "demonstrations.db"))
    new(folder / "new", seed)
    teach = [f"policy.model={folder / 'new'}", TEMPLATE, f"data.store={folder / 'demonstrations.db'}"]
    teach += [
        f"train.steps={taught}",
        "train.lr=2e-3",
        "train.groups=32",
        f"train.seed={seed}",
        "data.hold_out=0",
    ]
    agro("train", str(HERE / "teach.toml"), *teach, "--out", str(folder / "start"))
    start, store = folder / "start", folder / "calls.db"
    with served(start, "--store", str(store)) as url:
        rewards = sessions(url, [task for task in asked for _ in range(TRIES)], "log", gives_feedback=True)
    with Store.open(store, read_only=True) as opened:
        counts = opened.counts()
    print(
        f"{len(rewards)} sessions recorded, mean reward {rewards.mean():.3f}; {counts.samples} rows, "
        f"{counts.scored} scored, {counts.with_behavior} with log-probs, {counts.groups} groups"
    )
    train = [
        f"policy.model={start / 'model'}",
        f"data.store={store}",
        "train.lr=3e-4",
        f"train.steps={steps}",
    ]
    train += [TEMPLATE, "data.group_size=4", "data.hold_out=0"]
    agro("train", "log", *train, f"train.seed={seed}", "--out", str(folder / "result"))
    played = [task for task in held_out for _ in range(PLAYS)]
    rewards_of = []
    for run in (start, folder / "result"):
        with served(run) as url:
            rewards = sessions(url, played, "held-out", gives_feedback=False)
        rewards_of.append(rewards.reshape(HELD_OUT, PLAYS))
        print(
            f"{run.name}: mean reward {rewards.mean():.3f}, all right {(rewards == 1).mean():.3f} "
            f"of {HELD_OUT} held-out tasks × {PLAYS} plays",
            flush=True,
        )
    paired = compare(*rewards_of)  # the tasks are the units
    interval = f"95% [{paired.low:+.3f}, {paired.high:+.3f}]"
    print(f"difference {paired.difference:+.3f} {interval}, p = {paired.p:.2g}: {paired.verdict}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
