"""Two-digit multiplication from random weights, with a calculator and without.

    python reproductions/calculator/run.py [--seeds 3] [--out runs/calculator] [--record] [KEY=VALUE …]

The prompt `37*46=` asks for `1702`. With the calculator (recipe multi_turn), a careless teacher is
imitated first. It calls the calculator in half of the episodes, `[37*46]` -> `(1702)` -> `1702`, with slips
in its digits, and guesses in the other half. Then AGRO trains on the model's own episodes. Without the
calculator, with everything else equal, the teacher always writes the right product. Prints the table and
writes result.json and figure.png into --out, with --record beside this script too.
"""

from __future__ import annotations

import random
import sys
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.config import RunConfig  # noqa: E402
from agro.errors import Refused  # noqa: E402
from agro.models.encoding import Encoder  # noqa: E402
from agro.models.policy import Policy  # noqa: E402
from agro.rollout.envs import Environment  # noqa: E402
from agro.rollout.envs.process import load_environment  # noqa: E402
from agro.rollout.rollout import Episode  # noqa: E402
from agro.store import Store  # noqa: E402
from agro.types import Prompt, Sample  # noqa: E402
from reproductions import harness  # noqa: E402

RECIPE = HERE.parents[1] / "agro/config/recipes/multi_turn.toml"
TRAIN, TEST = 3000, 512  # prompts; the teacher shows the other 4588 of all 8100
CALLS, SLIP = 0.5, 0.05  # probabilities: that the teacher calls, that it writes a digit at random
WAYS = ("with the calculator", "without")


def questions(seed: int) -> dict[str, list[str]]:
    """All products of two-digit numbers, in three parts that share none."""
    asked = [f"{a}*{b}=" for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(asked)
    return {"train": asked[:TRAIN], "test": asked[TRAIN : TRAIN + TEST], "taught": asked[TRAIN + TEST :]}


def answer(prompt: str) -> str:
    a, b = prompt[:-1].split("*")
    return str(int(a) * int(b))


def slip(text: str, share: float, rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") if c.isdigit() and rng.random() < share else c for c in text)


def demonstrate(
    environment: Environment,
    encoder: Encoder,
    prompt: Prompt,
    turns: Sequence[str],
    *,
    source: str = "teacher",
) -> list[Sample]:
    """The episode in which a teacher writes `turns`; the actions are the tokens of these turns.

    An end token is appended to a turn without a stop text of the environment. The result is one sample,
    unless the chat template rewrites history. The reward is the environment's, or None. Raises `Refused` if
    the episode does not end with the last turn, if the environment raises an error, and for unknown
    characters.
    """
    location = f"demonstration for prompt {prompt.id}"
    episode = Episode(environment, encoder, prompt, encoder.prompt(prompt.text), len(turns) + 1)
    unknown = encoder.chat.tokenizer.unk_token_id
    more = True
    for i, text in enumerate(turns):
        if not more:
            raise Refused(f"{location}: the episode ended ({episode.finish}) after {i} of {len(turns)} turns")
        ids = encoder.following(episode.transcript.text, text)
        if unknown is not None and unknown in ids:
            raise Refused(
                f"{location}: the tokenizer of {encoder.name} doesn't know all characters of {text!r:.80}"
            )
        if not text.endswith(environment.stop or ("\0",)):
            ids = ids + encoder.end_of(prompt.text)
        more = episode.turn(ids, None, cut=False)
    if episode.error:
        raise Refused(f"{location}: {episode.error}")
    if more or not turns:
        raise Refused(f"{location}: the episode goes on after the last turn: {repr(turns)[:80]}; add turns")
    if len(episode.ids) > encoder.context:
        raise Refused(f"{location}: {len(episode.ids)} tokens, but the model's context is {encoder.context}")
    samples = episode.samples(uuid.uuid4().hex, turns[-1], {}, {})
    return [s.replace(role="expert", source=source) for s in samples]


def lessons(config: RunConfig, prompts: Sequence[str], rng: random.Random) -> list[Sample]:
    """The teacher's episodes; without an environment, the right products."""
    if config.environment is None:
        return [
            Sample(p, answer(p), role="expert", source="teacher", meta={"answer": answer(p)}) for p in prompts
        ]
    environment, policy = load_environment(config.environment), Policy.load(config.policy)
    found = []
    for prompt in prompts:
        if rng.random() < CALLS:
            call = slip(prompt[:-1], SLIP, rng)
            turns = [f"[{call}]", slip(answer(f"{call}="), SLIP, rng)]
        else:
            turns = [slip(answer(prompt), 0.5, rng)]
        asked = Prompt(prompt, columns={"answer": answer(prompt)})
        found += demonstrate(environment, policy.encoder, asked, turns)
    return found


def prepare(folder: Path, seed: int, config: RunConfig) -> dict[str, str]:
    """Write train.jsonl, test.jsonl and the teacher's store.db, where they aren't there."""
    parts = questions(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        harness.write_prompts(folder / f"{part}.jsonl", parts[part], answer)
    if not (folder / "store.db").exists():
        taught = lessons(config, parts["taught"], random.Random(seed))
        with Store.open(folder / "store.db") as store:
            store.append(taught)
    return {"data.prompts": str(folder / "train.jsonl"), "data.eval_prompts": str(folder / "test.jsonl")}


def configure(way: str, seed: int, overrides: Sequence[str]) -> RunConfig:
    config = RunConfig.load(RECIPE, [f"train.seed={seed}", *overrides])
    return config if way == WAYS[0] else RunConfig.of(config.model_dump(mode="json") | {"environment": None})


def measure(way: str, seed: int, run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Held-out reward after each phase, and how many of the last step's episodes called the calculator."""
    ends = {m["phase"]: m for m in run["metrics"] if m["eval_reward"] is not None}
    sft, last = ends["sft"], run["metrics"][-1]
    with Store.open(folder / "store.db", read_only=True) as store:
        own = [s for s in store.samples(roles=["policy"]) if s.version == last["version"] - 1]
    return {
        "way": way,
        "seed": seed,
        "after_sft": sft["eval_reward"],
        "after_sft_se": sft["eval_reward_se"],
        "after_episodes": last["eval_reward"],
        "after_episodes_se": last["eval_reward_se"],
        "kl_ref": last["eval_kl_ref"],
        "calls_last_step": float(np.mean([s.meta.get("tool_calls", 0) > 0 for s in own])),
        "seconds": run["seconds"],
        "cpu_seconds": run["cpu_seconds"],
    }


def draw(runs: Sequence[tuple[str, dict[str, Any]]]) -> Figure:
    """Held-out reward against steps, one line a seed."""
    figure = Figure(figsize=(6.4, 3.3), layout="constrained")
    steps = max(run["metrics"][-1]["step"] for _, run in runs)
    axes = harness.axes(figure, (1, 1, 1), "reward on held-out prompts (± standard error)", steps)
    ends = defaultdict(list)
    for way, run in runs:
        color = harness.COLORS[WAYS.index(way)]
        ends[way].append(harness.held_out(axes, run, color))
    axes.set_ylim(-0.02, 1.05)
    harness.name_phases(axes, runs[0][1]["metrics"])
    harness.name_lines(axes, {w: (float(np.mean(y)), harness.COLORS[WAYS.index(w)]) for w, y in ends.items()})
    return figure


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The result in Markdown."""
    head = ["calculator", "seed", "after `sft`", "after `episodes`", "calls in the last step", "KL (nats)"]
    lines = []
    for r in rows:
        ends = [harness.between(r[f"after_{p}"], r[f"after_{p}_se"]) for p in ("sft", "episodes")]
        last = [f"{r['calls_last_step']:.2f}", f"{r['kl_ref']:.1f}"]
        lines.append([r["way"], str(r["seed"]), *ends, *last, *harness.minutes(r)])
    return harness.markdown([*head, "minutes", "CPU minutes"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    episodes = "only write prompts and the teacher's episodes"
    args = harness.arguments(__doc__, "calculator", arguments, prepare=episodes)
    if args.prepare:
        prepare(args.prepare, 0, configure(WAYS[0], 0, args.overrides))
        return
    runs, rows = [], []
    for seed in range(args.seeds):
        for number, way in enumerate(WAYS):
            print(f"{way}, seed {seed}", file=sys.stderr, flush=True)
            folder = args.out / f"{('calculator', 'alone')[number]}-{seed}"
            files = prepare(folder, seed, configure(way, seed, args.overrides))
            config = configure(way, seed, [*(f'{k}="{v}"' for k, v in files.items()), *args.overrides])
            run = harness.train(config, folder)
            runs.append((way, run))
            rows.append(measure(way, seed, run, folder))
    rows.sort(key=lambda r: (WAYS.index(r["way"]), r["seed"]))
    result = {"runs": rows, "overrides": args.overrides, "machine": harness.machine()}
    harness.keep(args, HERE, result, draw(runs))
    print(table(rows))


if __name__ == "__main__":
    harness.guarded(main)
