"""What asking again and searching change, on tasks of a few hundred parameters.

Guide, AMPO, SOPHIA, TempSamp-R1 and ABPO: which responses a step trains on. Agent Q, BFS-Prover-V2 and
MBRCSL: what a search finds and trains on.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from agro.config import RunConfig
from agro.models.policy import Policy
from agro.store import Store
from agro.train.phases import derive
from agro.types import Sample
from reproductions.systems.tiny import MODEL, RUNS, Measured, changed, measured, train, written

SPELLING = Path(__file__).parents[2] / "examples/environments/spelling.py"
Groups = dict[tuple[int, str], list[Sample]]  # by step and prompt, what a run trained on


def guide(folder: Path) -> Measured:
    """The policy knows how to copy a hint, and hardly ever solves the task: most groups teach nothing."""
    model = {"model": copying(folder / "copying")}
    run = train(task(folder, policy=model, train__lr=1e-4, **RUNS["guide"]), folder / "run")
    right = defaultdict[str, bool](bool)  # whether a plain response to the prompt is: each is asked once
    for sample in stored(run):
        right[sample.prompt_id] |= not is_hinted(sample) and sample.reward == 1
    groups = drawn(run)
    yield len([prompt_id for (_, prompt_id), g in groups.items() if hinted(g) and right[prompt_id]])
    failed = [g for (_, prompt_id), g in groups.items() if not right[prompt_id]]
    yield float(np.mean([len({s.reward for s in g}) > 1 for g in failed]))
    own = {s.prompt_id: asked(s) for s in stored(run) if not is_hinted(s)}
    of_hint = [s for g in groups.values() for s in hinted(g)]
    yield len([s for s in of_hint if asked(s) != own[s.prompt_id] or s.context_tokens is None])
    yield without_hint(folder / "without")


CODES = [f"{(digit * 271 + 507) % 1000:03d}" for digit in range(10)]


def without_hint(folder: Path) -> float:
    """A policy that can write the code of a digit that it reads first, and guesses where it reads none."""
    read = [Sample(f"{i:03d}>", CODES[i // 100], reward=1.0) for i in range(1000)]
    guessed = [Sample(f"{i % 100:02d}>", f"{i * 371 % 1000:03d}", reward=1.0) for i in range(1000)]
    settings: dict[str, Any] = {"policy": {"model": taught(folder / "taught", read + guessed, max_new=3)}}
    asked_for = [{"prompt": f"{i:02d}>", "answer": CODES[7], "hint": "7"} for i in range(90)]
    settings |= {"data__prompts": written(folder / "one.jsonl", asked_for), "sampler__max_new": 3}
    right = {}
    for name, changes in (("guide", RUNS["guide"]), ("grpo", {"steps": 10, "objective": {"name": "grpo"}})):
        learning = task(folder / name, **settings, **changes)
        plain = [s for s in stored(train(learning, folder / name / "run")) if not is_hinted(s)]
        right[name] = mean_reward(plain)
    return right["guide"] - right["grpo"]


def ampo(folder: Path) -> Measured:
    """Teachers who repeat the answer, whom a policy that repeats digits understands, and who write >."""
    store = folder / "teachers.db"
    with Store.open(store) as opened:
        for source, text in (("understood", "{0}{0}{0}"), ("other", ">{0}")):
            opened.append(expert(p, text.format(p["answer"]), source) for p in prompts())
    model = {"model": repeating(folder / "repeating")}
    config = task(folder, policy=model, data__store=str(store), **RUNS["ampo"])
    groups = drawn(train(config, folder / "run"), store)
    experts = [s for g in groups.values() for s in g if s.role == "expert"]
    taught = [g for g in groups.values() if any(s.role == "expert" for s in g)]
    yield sum(any(s.reward == 1 for s in g if s.role == "policy") for g in taught)
    yield float(np.mean([s.source == "understood" for s in experts]))


def sophia(folder: Path) -> Measured:
    run = train(task(folder, **RUNS["sophia"]), folder / "run")
    children = defaultdict(list)
    for sample in stored(run):
        if "parent" in sample.meta:
            children[sample.meta["parent"]].append(sample)
    trained = [s for g in drawn(run).values() for s in g]
    yield len([s for s in trained if not s.reward or mean_reward(children[s.meta["parent"]]) <= 0.2])
    yield len(trained)


def mixed(folder: Path) -> Measured:
    """Stored responses beside fresh ones: an expert's in each group, or one that fresh ones complete."""
    complete = {"replay": 1.0, "roles": ["expert"], "complete_groups": 3}
    for name, data in (("tempsamp_r1", {"experts": 1}), ("agro", complete)):
        store = folder / f"{name}.db"
        with Store.open(store) as opened:
            opened.append(expert(p, p["answer"], "log") for p in prompts())
        objective = {"name": name, "beta": 0.1} if name == "agro" else {"name": name}
        changes = {f"data__{key}": value for key, value in data.items()}
        config = task(folder / name, objective=objective, data__store=str(store), steps=4, **changes)
        groups = drawn(train(config, folder / name / "run"), store)
        yield float(np.mean([{s.role for s in g} == {"expert", "policy"} for g in groups.values()]))


LOCKS = [{"prompt": f"{a}{b}>", "answer": f"{a}{b}{(a + b) % 4}"} for a in range(4) for b in range(4)]


def locks(folder: Path, **changes: Any) -> RunConfig:
    """Three digits of four, one after the other: a wrong one ends the episode."""
    values: dict[str, Any] = {
        "policy": {"new": MODEL | {"alphabet": "0123>"}},
        "data__prompts": written(folder / "locks.jsonl", LOCKS),
        "environment": {"name": f"{SPELLING}:Spelling", "max_turns": 3, "options": {"characters": "0123"}},
        "train__groups": 16,
        "sampler__max_new": 1,
    }
    return task(folder, **{**values, **changes})


def agent_q(folder: Path) -> Measured:
    run = train(locks(folder, **RUNS["agent_q"]), folder / "run")
    samples = {s.id: s for s in stored(run)}
    with Store.open(run / "store.db", read_only=True) as store:
        pairs = list(store.pairs())
    yield len([p for p in pairs if samples[p.winner].prompt != samples[p.loser].prompt])
    yield len(pairs)
    yield opened_above_samples("ucb", folder)


def bfs_prover(folder: Path) -> Measured:
    config = locks(folder, **RUNS["bfs_prover"])
    run = train(config, folder / "run")
    yield len([s for g in drawn(run).values() for s in g if s.reward != 1])
    first = Policy.load(config.policy, seed=derive(config.train.seed, "weights")).weights()
    last = load_file(run / "model" / "model.safetensors")
    yield max(float((last[name] - weight).abs().max()) for name, weight in first.items())
    yield opened_above_samples("best", folder)


def mbrcsl(folder: Path) -> Measured:
    """A log of turns whose episodes all fail; a prompt begins with the number of its episode's right ones."""
    asked = [{**lock, "prompt": f"3{lock['prompt']}"} for lock in LOCKS]
    prompts = {"data__prompts": written(folder / "asked.jsonl", asked)}
    log = folder / "log.db"
    with Store.open(log) as store:
        for lock in LOCKS:
            right, wrong = lock["answer"], [str((int(c) + 1) % 4) for c in lock["answer"]]
            for known in range(3):  # so many right digits, then a wrong one
                state = f"{known}{lock['prompt']}"
                for turn in (*right[:known], wrong[known]):
                    store.append([Sample(state, turn, reward=known / 3, meta={"answer": right})])
                    state += f"{turn}>"
    run = train(locks(folder, data__store=str(log), **prompts, **RUNS["mbrcsl"]), folder / "run")
    yield len([s for g in drawn(run, log).values() for s in g if s.prompt[0] == "3" and s.reward != 1])
    still = {"sampler__n": 16, "objective": {"name": "grpo"}, "train__lr": 1e-12, **prompts}
    last = train(locks(folder, policy={"model": str(run / "model")}, steps=1, **still), folder / "last")
    yield mean_reward(stored(last))


def opened_above_samples(by: str, folder: Path) -> float:
    """Share of locks opened with 64 tokens by a search above that with as many tokens or more by samples."""
    still: dict[str, Any] = {"steps": 1, "train__lr": 1e-12}
    search = {"by": by, "train": "path", "branches": 4, "expansions": 16}
    source = {"around": "tree_search", "options": search}
    searched = train(locks(folder, source=source, objective={"name": "sft"}, **still), folder / "search")
    sampled = train(locks(folder, objective={"name": "grpo"}, sampler__n=64, **still), folder / "samples")
    opened = {root(s) for s in stored(searched) if s.reward == 1}
    by_samples = {root(s) for s in stored(sampled) if s.reward == 1}
    return (len(opened) - len(by_samples)) / len(LOCKS)


def root(sample: Sample) -> str:
    """The prompt that a turn belongs to."""
    return str(sample.prompt).partition(">")[0]


def prompts() -> list[dict[str, str]]:
    """The answer to two digits is these in the other order; the hint says it."""
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    return [{"prompt": f"{a}{b}>", "answer": f"{b}{a}", "hint": f"{b}{a}"} for a, b in pairs]


def expert(prompt: dict[str, str], text: str, source: str) -> Sample:
    meta = {"answer": prompt["answer"]}
    return Sample(prompt["prompt"], text, reward=1.0, role="expert", source=source, meta=meta)


def copying(folder: Path) -> str:
    """A model that learned to write the two digits with which a text begins."""
    texts = [(f"{i:04d}", f"{i:04d}"[:2]) for i in range(0, 10000, 7)]
    return taught(folder, [Sample(f"{text}>", start, reward=1.0) for text, start in texts])


def repeating(folder: Path) -> str:
    """A model that learned to write any two digits several times."""
    texts = [(f"{i:04d}"[:2], f"{i:04d}"[2:]) for i in range(0, 10000, 7)]
    return taught(folder, [Sample(f"{text}>", digits * 3, reward=1.0) for text, digits in texts])


def taught(folder: Path, samples: list[Sample], max_new: int = 2) -> str:
    """The folder of a model that imitated these responses."""
    folder.mkdir(parents=True)
    with Store.open(folder / "log.db") as store:
        store.append(samples)
    data: dict[str, Any] = {"data__store": str(folder / "log.db"), "data__replay": 1.0}
    data["data__group_size"] = 1
    data["sampler__max_new"] = max_new
    config = task(folder, objective={"name": "sft"}, steps=120, train__groups=32, **data)
    return str(train(config, folder / "run") / "model")


def task(folder: Path, steps: int, **changes: Any) -> RunConfig:
    """Two digits in the other order, by a new model; `changes` are dotted keys with __ for the dot."""
    values: dict[str, Any] = {
        "policy": {"new": dict(MODEL)},
        "data": {"prompts": written(folder / "prompts.jsonl", prompts())},
        "sampler": {"n": 8, "max_new": 2},
        "train": {"steps": steps, "groups": 8, "micro_batch": 128, "lr": 1e-2, "checkpoint_every": 1000},
    }
    return RunConfig.of(changed(values, changes))


def stored(run: Path) -> list[Sample]:
    with Store.open(run / "store.db", read_only=True) as store:
        return list(store.samples())


def drawn(run: Path, store: Path | None = None) -> Groups:
    groups: Groups = defaultdict(list)
    with Store.open(store or run / "store.db", read_only=True) as opened:
        name = json.loads((run / "config.json").read_text())["run"]
        draws = opened.draws.drawn(name)
        samples = {s.id: s for s in opened.samples(ids=[draw.sample for draw in draws])}
    for draw in draws:
        groups[draw.step, samples[draw.sample].prompt_id].append(samples[draw.sample])
    return groups


def is_hinted(sample: Sample) -> bool:
    return "hint" in sample.meta


def asked(sample: Sample) -> list[int]:
    """The tokens before those of the response."""
    assert sample.tokens is not None
    assert sample.action is not None
    return [int(token) for token in sample.tokens[: int(sample.action.argmax())]]


def hinted(group: list[Sample]) -> list[Sample]:
    return [sample for sample in group if is_hinted(sample)]


def mean_reward(samples: list[Sample]) -> float:
    return float(np.mean([s.reward for s in samples]))


rows = partial(measured, (guide, ampo, sophia, mixed, agent_q, bfs_prover, mbrcsl))
