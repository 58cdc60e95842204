"""Figure 5 of the paper at a hundred times the size of reproductions/paper, in five minutes of one GPU.

A Llama of 8 layers of 512 (25 million weights) is taught from scratch for a minute to multiply as in `task`,
and is then right in about 35 of 100: it is π_ref. Its own responses, 8 to each of 4,096 prompts, are the log.
Each arm trains it for 150 updates of 256 logged responses by a run of agro, with one constant rate, and is
measured on 512 other prompts before, and every 30 updates: accuracy and KL(π ‖ π_ref), one response each at
temperature 1; and on 256 responses of the log the mean of log π/π_ref, of the right and of the wrong ones.
`reproductions/paper` chose the best of several settings for each method; here there is time for one.

Runs are made four at a time on the same GPU, all arms with the first seed, then with the next: what the limit
cuts off are seeds. Results are in learns.json after each run, with what is known of those that didn't end.
"""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agro import objectives
from agro.config import NewModel, PolicyConfig, RunConfig, SamplerConfig
from agro.config.recipes import recipes
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rollout import Rollout
from agro.rollout.engines.hf import HF
from agro.store import Store
from agro.train.collate import collate
from agro.train.learner import Local
from agro.train.monitors import Monitor, View
from agro.train.step import MicroBatch, Passes, streams_of
from agro.train.trainer import BaseTrainer
from agro.types import Batch, Prompt, Sample
from benchmarks.on_gpu import task
from benchmarks.on_gpu.common import Asked, Results, peak_gib, write

N = 8  # responses of the start to a prompt
PASS = 32_768  # tokens
KL_NAME = r"KL($\pi\,\Vert\,\pi_\mathrm{ref}$), nats"


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    hidden: int = 512
    layers: int = 8
    teach_seconds: float = 60.0
    lessons: int = 512  # of an update of teaching
    logged: int = 4096  # prompts of the log
    anew: int = 4800  # other prompts, with as many responses as all updates of a run take
    held_out: int = 512
    compared: int = 32  # prompts of the log whose responses are measured on the way
    updates: int = 150
    every: int = 30
    groups: int = 32  # of an update
    batch: int = 4096  # responses that are decoded at once
    seeds: int = 3
    workers: int = 4  # runs at a time
    is_random: bool = False  # rewards are, of a model that learned nothing
    tail: float = 15.0  # seconds that are kept for the figure

    @property
    def untaught(self) -> int:
        """Prompts that the teacher doesn't show."""
        return self.held_out + self.logged + self.anew


FULL = Size()
SMALL = Size(
    hidden=16, layers=1, teach_seconds=0.5, lessons=16, logged=8, anew=8, held_out=4, compared=2, updates=2,
    every=2, groups=2, batch=64, seeds=1, workers=1, tail=10.0, is_random=True,
)  # fmt: skip
SETTINGS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("arm.toml").read_text("utf-8"))


class Arm(NamedTuple):
    """What a run minimizes; `train`, `data`: what differs from other runs."""

    name: str
    objective: dict[str, Any]
    data: dict[str, Any]
    train: dict[str, Any]
    log: str  # or the responses of π_ref that were sampled anew

    @classmethod
    def of(cls, name: str, given: dict[str, Any]) -> Arm:
        """Of arm.toml; `recipe`: it has the objective of the recipe `log`, and its bound on a step."""
        values = {"data": {}, "train": {}, "log": "log", **given}
        if values.pop("recipe", False):
            recipe = tomllib.loads(recipes()["log"].text)
            values |= {"objective": recipe["objective"], "train": {"step_kl": recipe["train"]["step_kl"]}}
        return cls(name, **values)


ARMS = tuple(Arm.of(name, given) for name, given in SETTINGS.pop("arm").items())


def new_policy(size: Size, asked: Asked) -> Policy:
    """The model with random weights, and a token for each character."""
    new = NewModel(
        alphabet=task.ALPHABET, hidden=size.hidden, layers=size.layers, heads=max(1, size.hidden // 64),
        context=task.CONTEXT,
    )  # fmt: skip
    dtype = "mixed" if asked.device.type == "cuda" else "float32"
    return Policy.load(PolicyConfig(new=new, device=str(asked.device), dtype=dtype))


def teach(folder: Path, size: Size, asked: Asked) -> dict[str, Any]:
    """Imitation of the careless teacher for so many seconds, at a rate that falls with time; -> FOLDER."""
    policy = new_policy(size, asked)
    train = {"micro_tokens": 65_536, "lr": 1e-3, "adam_betas": [0.9, 0.98]}
    config = RunConfig.of({"objective": {"name": "sft"}, "train": train})
    learner = Local(policy, None, print)
    learner.enter(config, began=None, resumed=None)
    options = objectives.get("sft").resolve("sft", {})
    steps = tokens = 0
    spent, losses = 0.0, []
    command = [sys.executable, "-m", "benchmarks.on_gpu.task", str(size.lessons), str(size.untaught)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as teacher:
        assert teacher.stdout is not None
        began = time.monotonic()
        for line in teacher.stdout:
            batch = taught(json.loads(line), policy)
            slope = math.cos(math.pi / 2 * spent / size.teach_seconds)
            step = learner.gradient(batch, "sft", options, lambda: None)
            learner.move(1e-3 * min(1.0, (steps + 1) / 50) * (0.02 + 0.98 * slope))
            steps, tokens = steps + 1, tokens + int(batch.mask.sum())
            losses.append(-float(step.streams["logp"].sum() / batch.mask.sum()))
            spent = time.monotonic() - began
            if spent >= size.teach_seconds:
                break
        teacher.kill()
    learner.save_model(folder, merge=True)
    shown = {str(i): losses[i] for i in sorted({0, len(losses) // 4, len(losses) // 2, len(losses) - 1})}
    return {
        "steps": steps,
        "learned_tokens": tokens,
        "nats_a_token": shown,
        "weights": sum(p.numel() for p in policy.model.parameters()),
        "gib": peak_gib(asked.device),
    }


def taught(pairs: Sequence[tuple[str, str]], policy: Policy) -> Batch:
    """Lessons as one batch; the end of a response is learned too."""
    ids = {c: policy.tokenizer.convert_tokens_to_ids(c) for c in task.ALPHABET}
    bos, eos = policy.tokenizer.bos_token_id, policy.tokenizer.eos_token_id
    rows = [[bos, *(ids[c] for c in prompt + text), eos] for prompt, text in pairs]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    places = torch.arange(width)
    first = 1 + len(pairs[0][0])
    mask = (places >= first) & (places < lengths[:, None])
    return Batch.of(
        mask=mask, reward=[1.0] * len(rows), group=list(range(len(rows))), tokens=tokens,
        lengths=lengths, role=["expert"] * len(rows),
    )  # fmt: skip


def sample(
    file: Path, policy: Policy, engine: HF, prompts: Sequence[str], size: Size, seed: int
) -> dict[str, Any]:
    """`N` scored responses to each prompt, in a store."""
    began = time.monotonic()
    rollout = Rollout(policy.encoder, engine, source="start")
    sampler = SamplerConfig(n=N, max_new=task.NEW, batch=size.batch)
    asked = [Prompt(prompt, columns={"answer": task.answer(prompt)}) for prompt in prompts]
    samples = []
    for done in rollout.sample(asked, N, sampler, seed=seed):
        reward = float(task.is_right(done.response, done.meta["answer"]))
        if size.is_random:
            reward = float(done.meta["index"] % 2)
        samples.append(done.replace(reward=reward, role="log"))
    decoded = time.monotonic() - began
    with Store.open(file) as store:
        store.append(samples)
    tokens = sum(int(s.action.sum()) for s in samples if s.action is not None)
    return {
        "responses": len(samples),
        "tokens_a_response": tokens / len(samples),
        "right": sum(s.reward or 0.0 for s in samples) / len(samples),
        "decode_seconds": decoded,
        "store_seconds": time.monotonic() - began - decoded,
    }


class OfLog(Monitor):
    """The mean of log π/π_ref of right and of wrong logged responses. Each point goes to `file` too."""

    trainer: BaseTrainer  # whose run it observes

    def __init__(self, file: Path, samples: Sequence[Sample], head: dict[str, Any]) -> None:
        self.file, self.samples, self.head = file, samples, head
        self.curve: list[dict[str, Any]] = []
        self.began = time.monotonic()

    def after(self, view: View) -> None:
        if not view.is_due:
            return
        policy, reference = self.trainer.policy, self.trainer.reference
        assert reference is not None
        batch = collate([policy.encode(sample) for sample in self.samples], 0)
        passes = Passes(MicroBatch(tokens=PASS))
        own, start = (streams_of(p, batch, ["logp"], passes)["logp"] for p in (policy, reference))
        ratio, is_right = (own - start).sum(1), batch.reward > 0.5
        self.curve.append(
            {
                "update": view.step,
                "accuracy": view.metrics["eval_reward"],
                "kl": view.metrics["eval_kl_ref"],
                "right": float(ratio[is_right].mean()),
                "wrong": float(ratio[~is_right].mean()),
            }
        )
        spent = round(time.monotonic() - self.began, 1)
        write(self.file, {**self.head, "curve": self.curve, "seconds": spent})


def train(arm: Arm, seed: int, folder: Path, size: Size, device: str, dtype: str) -> dict[str, Any]:
    """One run; what it measured is in FOLDER/curves too, as far as it came."""
    torch.set_num_threads(1)
    values = copy.deepcopy(SETTINGS)
    values["policy"] |= {"model": str(folder / "start"), "device": device, "dtype": dtype}
    files = {"store": str(folder / f"{arm.log}.db"), "eval_prompts": str(folder / "held_out.jsonl")}
    values["data"] |= {**files, **arm.data}
    values["sampler"]["batch"] = size.held_out
    values["objective"] = arm.objective
    steps = {"steps": size.updates, "groups": size.groups, "warmup": min(10, size.updates), "seed": seed}
    values["train"] |= {**steps, **arm.train}
    values["evaluate"]["every"] = size.every
    with Store.open(folder / "log.db", read_only=True) as store:
        logged = list(islice(store.samples(), size.compared * N))
    name = f"{ARMS.index(arm)}-{seed}"
    head = {"arm": arm.name, "seed": seed}
    of_log = OfLog(folder / "curves" / f"{name}.json", logged, head)
    run = folder / "runs" / name
    trainer = BaseTrainer(RunConfig.of(values), run, monitors=[of_log], rewards={"right": task.right})
    of_log.trainer = trainer
    try:
        trainer.run()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(run, ignore_errors=True)
    steps = [row["seconds_train"] for row in rows if row["step"]]
    return {
        **head,
        "curve": of_log.curve,
        "seconds": round(time.monotonic() - of_log.began, 1),
        "seconds_an_update": statistics.median(steps) if steps else None,
        "gib": peak_gib(torch.device(device)),
    }


def prepare(folder: Path, size: Size, asked: Asked, results: Results) -> tuple[str, HF]:
    """The start, its log and the held-out prompts. Returns the dtype of runs, and the engine of the start."""
    held_out, logged, *_ = task.prompts([size.held_out, size.logged])
    lines = (json.dumps({"prompt": p, "answer": task.answer(p)}) + "\n" for p in held_out)
    (folder / "held_out.jsonl").write_text("".join(lines))
    results.measure("teach", partial(teach, folder / "start", size, asked))
    device = str(asked.device)
    for dtype in ("mixed", "float32") if asked.device.type == "cuda" else ("float32",):
        config = PolicyConfig(model=str(folder / "start"), device=device, dtype=dtype)
        try:
            policy = Policy.load(config)
            engine = HF(policy)
            break
        except Refused as error:  # of the trained model in bfloat16
            results.add({"name": f"start in {dtype}", "refused": str(error)[:300]})
            torch.backends.cuda.matmul.allow_tf32 = True
    else:
        raise Refused("the start can't be sampled from in any dtype: see the rows before")
    results.measure("log", partial(sample, folder / "log.db", policy, engine, logged, size, 0))
    return dtype, engine


def main() -> int:
    asked = Asked.parse()
    size = SMALL if asked.small else FULL
    results = Results("learns", asked)
    with tempfile.TemporaryDirectory(prefix="learns") as name:
        folder = Path(name)
        for part in ("curves", "runs"):
            (folder / part).mkdir()
        # They start beside the teaching.
        with ProcessPoolExecutor(size.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            for _ in range(size.workers):
                pool.submit(len, ())
            dtype, engine = prepare(folder, size, asked, results)
            if not results.failed:
                race(folder, size, asked, results, dtype, engine, pool)
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # whose runs are cut off
                process.kill()
    return int(results.failed)


def race(
    folder: Path,
    size: Size,
    asked: Asked,
    results: Results,
    dtype: str,
    engine: HF,
    pool: ProcessPoolExecutor,
) -> None:
    """All arms with each seed, `size.workers` runs at a time, as far as there is time."""
    runs: list[dict[str, Any]] = []
    results.content |= {"size": asdict(size), "dtype": dtype, "runs": runs}
    every = [(arm, seed) for seed in range(size.seeds) for arm in ARMS]
    first = [(arm, seed) for arm, seed in every if arm.log == "log"][: 2 * size.workers]
    waiting = {pool.submit(train, *one, folder, size, str(asked.device), dtype): one for one in first}
    anew = task.prompts([size.held_out, size.logged, size.anew])[2]
    new = partial(sample, folder / "anew.db", engine.policy, engine, anew, size, 1)
    results.measure("new samples of the start", new)  # beside the first runs
    for one in every:
        if one not in first and (one[0].log == "log" or (folder / "anew.db").exists()):
            waiting[pool.submit(train, *one, folder, size, str(asked.device), dtype)] = one
    try:
        for done in as_completed(waiting, timeout=max(1.0, asked.left - size.tail)):
            arm, seed = waiting[done]
            try:
                runs.append(done.result())
            except Exception as error:  # noqa: BLE001
                why = f"{type(error).__name__}: {error}"[:500]
                results.add({"name": f"{arm.name}, seed {seed}", "failed": why})
            results.write()
            print(f"{arm.name}, seed {seed}: ended, {asked.left:.0f} s left", flush=True)
    except TimeoutError:
        left_out = sum(not done.done() for done in waiting)
        ended = {(run["arm"], run["seed"]) for run in runs}
        for file in sorted((folder / "curves").glob("*.json")):
            run = json.loads(file.read_text())
            if (run["arm"], run["seed"]) not in ended:
                runs.append({**run, "ended": False})
        results.add({"name": "runs", "cut_off": left_out, "of": len(waiting)})
    results.measure("figure", lambda: {"file": figure(runs, asked.out, results.content["rows"]).name})


def figure(runs: Sequence[dict[str, Any]], out: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Accuracy over KL; and log π/π_ref of right and of wrong responses of the log."""
    from reproductions.paper import drawing
    from reproductions.paper.drawing import STYLES, Line, Panel, of_curve

    shown = [run for run in runs if len(run["curve"]) > 1]
    points = min((len(run["curve"]) for run in shown), default=0)
    shown = [{**run, "curve": run["curve"][:points]} for run in shown]  # what all have
    lines = [
        Line(arm.name, style, [run for run in shown if run["arm"] == arm.name])
        for arm, style in zip(ARMS, STYLES, strict=False)
    ]
    taught = next((f"{row['weights']:,} weights" for row in rows if "weights" in row), "")
    ratio = r"log $\pi/\pi_\mathrm{ref}$"
    panels = [Panel(taught, lines, drawing.kl, drawing.accuracy, KL_NAME, "accuracy", own_x=True)]
    for key, title in (("right", "right responses of the log"), ("wrong", "wrong ones")):
        panels.append(Panel(title, lines, drawing.updates, of_curve(key), "updates", ratio))
    drawn = drawing.draw([panels])
    ratios = [p[k] for run in shown for p in run["curve"] for k in ("right", "wrong")]
    drawn.axes[0].set_ylim(0, 1)
    for axes in drawn.axes[1:]:  # which are below 0 too
        axes.set_ylim(min([0.0, *ratios]), max([1e-9, *ratios]))
    drawing.save(drawn, out, "learns")
    return out / "learns.svg"


if __name__ == "__main__":
    sys.exit(main())
