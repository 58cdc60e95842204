"""What a job starts from, made by seeds: the start model, the log or the prompts, the held-out prompts.

The start is a new model that imitates a careless teacher. It is made by a plain loop, not by the library's
trainer: it isn't what is compared, and so it costs a fifth.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from agro.config import EnvironmentConfig, NewModel, RunConfig, SamplerConfig
from agro.io.files import complete_folder
from agro.models.policy import Policy
from agro.models.pretrained import new_model
from agro.rollout.envs.process import load_environment
from agro.rollout.prompts import load_prompts
from agro.rollout.rollout import Rollout, embedded
from agro.store import Pair, Store
from agro.train.collate import ReferenceCache, collate
from agro.train.learner import Local
from agro.types import Prompt, Sample
from reproductions import harness
from reproductions.calculator import run as calculator
from reproductions.panel.jobs import START, Job, Model

CALCULATOR = {
    "name": f"{harness.ROOT}/examples/environments/calculator.py:Calculator",
    "max_turns": 3,
    "options": {"call": ["[", "]"], "result": "({})", "error": "?"},
}
CONTEXT_OF_TURNS = 48
HEADS = 4  # of attention
RATE, WARM_UP = 3e-3, 20  # learning rate, and updates until it is reached
IGNORED = -100  # the target of tokens that aren't learned
PARTS = 256  # sequences whose log-probs are computed at once


@dataclass(frozen=True)
class Size:
    """How much of everything there is. None: as the job says."""

    held_out: int = 1024
    lessons: int = 6000  # responses of the teacher
    prompts: int | None = None
    updates: int | None = None
    warm_up: int | None = None

    def of(self, job: Job) -> Job:
        """The job in this size."""
        changes = {"prompts": self.prompts, "updates": self.updates, "warm_up": self.warm_up}
        return replace(job, **{key: value for key, value in changes.items() if value is not None})


FULL = Size()
SMALL = Size(held_out=32, lessons=400, prompts=24, updates=2, warm_up=12)


class Files:
    """What `prepare` makes in the folder of a job.

    `values`: rewarded samples of the start, for objectives that need some of the reference.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.start = folder, folder / "start"
        self.log, self.values = folder / "log.db", folder / "values.db"
        self.prompts, self.held_out = folder / "prompts.jsonl", folder / "held_out.jsonl"

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the log: its size, the share of right responses, the mean reward, …"""
        found: dict[str, Any] = json.loads((self.folder / "facts.json").read_text())
        return found


def slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower())


def prepare(job: Job, out: Path, size: Size) -> Files:
    """Make the files of a job, once."""
    folder = out / "jobs" / slug(job.name)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with complete_folder(folder) as making:
            _make(job, Files(making), size)
    return Files(folder)


def _make(job: Job, files: Files, size: Size) -> None:
    rng = random.Random(job.name)
    logged, held_out = _prompts(job, size, rng)
    harness.write_prompts(files.held_out, held_out, job.task.answer)
    harness.write_prompts(files.prompts, logged, job.task.answer)
    _make_start(job, files, size, {*logged, *held_out}, rng)
    facts: dict[str, Any] = {"prompts": len(logged), "held_out": len(held_out)}
    if job.data != "fresh":
        prompts = [Prompt(p, columns={"answer": job.task.answer(p)}) for p in logged]
        facts |= _log(job, files, load(files.start), prompts, rng)
    (files.folder / "facts.json").write_text(json.dumps(facts))


def _make_start(job: Job, files: Files, size: Size, taken: Collection[str], rng: random.Random) -> None:
    """By lessons on prompts that aren't taken; or a copy of another log's start, by the same teacher."""
    if job.start is not None:
        shutil.copytree(job.start, files.start)
        return
    lessons: list[str] = []
    while len(lessons) < size.lessons:
        prompt = job.task.prompt(rng)
        if prompt not in taken:
            lessons.append(prompt)
    longest = max(len(prompt) for prompt in taken) + job.max_new + 2
    initial = files.folder / "initial"
    create(job, initial, CONTEXT_OF_TURNS if job.environment else longest)
    environment = CALCULATOR if job.environment else None
    policy = imitate(job, initial, lessons, rng, environment)
    policy.save(files.start, merge=True)


def create(job: Job, folder: Path, context: int) -> None:
    """Write a model with random weights, of the job's class, with a token for each character."""
    model = job.model
    spec = NewModel(
        alphabet=job.task.alphabet, hidden=model.hidden, layers=model.layers, heads=HEADS, context=context
    )
    new_model(folder, spec, seed=0)
    if model.family == "llama":
        return
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for file in folder.iterdir():
        file.unlink()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        other = _of_family(model, context, tokenizer)
    other.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _of_family(model: Model, context: int, tokenizer: Any) -> PreTrainedModel:
    special: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config: PretrainedConfig
    if model.family == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        size = {"n_positions": context, "n_embd": model.hidden, "n_layer": model.layers, "n_head": HEADS}
        return GPT2LMHeadModel(GPT2Config(**special, **size, **off))
    config = GPTNeoXConfig(
        **special,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=HEADS,
        intermediate_size=4 * model.hidden,
        max_position_embeddings=context,
    )
    return GPTNeoXForCausalLM(config)


def imitate(
    job: Job, initial: Path, prompts: Sequence[str], rng: random.Random, environment: dict[str, Any] | None
) -> Policy:
    """The model of the folder `initial` after training on the teacher's responses to `prompts`."""
    policy = Policy.load(RunConfig.of({"policy": {"model": str(initial)}}).policy)
    tokens, mask = _lessons(job, policy, initial, prompts, rng, environment)
    targets = tokens.where(mask, IGNORED)
    weights = list(policy.trained().values())
    adam = torch.optim.AdamW(weights, RATE, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    order = _order(len(tokens), job.together, rng)
    policy.model.train()
    for update in range(job.warm_up):
        rows = next(order)
        logits = policy.model(input_ids=tokens[rows, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), targets[rows, 1:].flatten(), ignore_index=IGNORED)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for group in adam.param_groups:
            group["lr"] = RATE * _share(update, job.warm_up)
        adam.step()
    policy.model.eval()
    return policy


def _share(update: int, updates: int) -> float:
    """Of the learning rate: rising, then a half cosine to 0."""
    if update < WARM_UP:
        return (update + 1) / WARM_UP
    done = (update - WARM_UP) / max(1, updates - WARM_UP)
    return 0.5 * (1 + math.cos(math.pi * done))


def _order(count: int, together: int, rng: random.Random) -> Iterator[list[int]]:
    size = min(together, count)
    while True:
        drawn = rng.sample(range(count), count)
        for i in range(0, count - size + 1, size):
            yield drawn[i : i + size]


def _lessons(
    job: Job,
    policy: Policy,
    initial: Path,
    prompts: Sequence[str],
    rng: random.Random,
    environment: dict[str, Any] | None,
) -> tuple[Tensor, Tensor]:
    """[B,T] tokens of prompt and response, 0 after the end, and which of them are learned."""
    if environment is not None:
        config = RunConfig.of({"policy": {"model": str(initial)}, "environment": environment})
        taught = calculator.lessons(config, prompts, rng)
        encoded = [policy.encoder.encode(sample) for sample in taught]
        rows = [s.tokens.tolist() for s in encoded if s.tokens is not None]
        masks = [s.mask.tolist() for s in encoded]
    else:
        texts = [job.teacher.write(job.task, prompt, rng) for prompt in prompts]
        both = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        end = policy.encoder.eos_ids[0]
        rows = [[*ids, end] for ids in policy.encoder.chat.tokenizer(both)["input_ids"]]
        masks = [
            [False] * (len(row) - len(text) - 1) + [True] * (len(text) + 1)
            for row, text in zip(rows, texts, strict=True)
        ]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (row, of_row) in enumerate(zip(rows, masks, strict=True)):
        tokens[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = torch.tensor(of_row)
    return tokens, mask


def _prompts(job: Job, size: Size, rng: random.Random) -> tuple[list[str], list[str]]:
    """Those of the log and those held out, all different."""
    if job.distinct is None:
        drawn = harness.different(job.prompts + size.held_out, lambda: job.task.prompt(rng))
        return drawn[: job.prompts], drawn[job.prompts :]
    ends = [job.task.prompt(rng).partition(":")[2] for _ in range(job.distinct)]

    def near_copy() -> str:
        return job.task.prompt(rng).partition(":")[0] + ":" + rng.choice(ends)

    half = size.held_out // 2
    copies = harness.different(job.prompts + half, near_copy)
    others = harness.different(half, lambda: job.task.prompt(rng))
    return copies[: job.prompts], list(dict.fromkeys([*copies[job.prompts :], *others]))


def rollout_of(job: Job, policy: Policy) -> Rollout:
    """Samples of a policy, with the job's environment."""
    if not job.environment:
        return Rollout(policy.encoder, embedded(policy))
    environment = load_environment(EnvironmentConfig(**CALCULATOR))  # type: ignore[arg-type]
    return Rollout(policy.encoder, embedded(policy), environment, int(CALCULATOR["max_turns"]))


def text_of(sample: Sample) -> str:
    """The response that counts: of an episode its last turn."""
    return str(sample.meta.get("last_turn", sample.response))


def load(folder: Path) -> Policy:
    return Policy.load(RunConfig.of({"policy": {"model": str(folder)}}).policy)


def _log(
    job: Job, files: Files, policy: Policy, prompts: Sequence[Prompt], rng: random.Random
) -> dict[str, Any]:
    """Write log.db, with tokens and the reference's log-probs of its responses; returns its facts."""
    groups = _responses(job, policy, prompts, rng)
    if job.users:
        groups = _of_users(job, groups)
    samples = [policy.encoder.encode(s) for group in groups for s in _rewarded(job, group, rng)]
    with Store.open(files.log) as store:
        ids = store.append(samples)
        if job.data == "pairs":
            store.add_pairs(Pair(a, b) for a, b in zip(ids[::2], ids[1::2], strict=True))
        keep_reference(store, policy)
    rewards = [float(s.reward or 0.0) for s in samples]
    return {
        "responses": len(samples),
        "groups": len({s.prompt_id for s in samples}),
        "right": sum(job.task.right(str(s.prompt), text_of(s)) for s in samples) / len(samples),
        "mean": statistics.mean(rewards),
        "upper_quartile": float(np.quantile(rewards, 0.75)),
        "length": statistics.mean(len(s.response) for s in samples),
    }


def _responses(
    job: Job, policy: Policy, prompts: Sequence[Prompt], rng: random.Random
) -> Iterator[list[Sample]]:
    """The responses to each prompt."""
    fewest, most = job.sizes
    n = 8 if job.data == "pairs" else most
    own = _drawn(job, policy, prompts, n, seed=1) if START in job.authors else {}
    drawn = {name: [s.replace(role="log", source="start") for s in group] for name, group in own.items()}
    for prompt in prompts:
        if job.data == "pairs":
            yield _judged(job, drawn[prompt.id], rng)
            continue
        group = []
        for i in range(rng.randint(fewest, most)):
            number = i % len(job.authors)
            if job.authors[number] is START:
                group.append(drawn[prompt.id][i])
            else:
                text = job.authors[number].write(job.task, str(prompt.text), rng)
                source = f"author {number}"
                group.append(Sample(prompt.text, text, source=source, meta=dict(prompt.columns)))
        yield group


def reference_samples(job: Job, files: Files) -> Path:
    """A store of eight responses of the start to each prompt of the log, rewarded as the log's; made once."""
    if files.values.exists():
        return files.values
    rng = random.Random(f"values of {job.name}")
    drawn = _drawn(job, load(files.start), load_prompts(files.prompts), 8, seed=2)
    making = files.values.with_suffix(".making")
    with Store.open(making) as store:
        store.append([s for group in drawn.values() for s in _rewarded(replace(job, equal=0.0), group, rng)])
    making.rename(files.values)
    return files.values


def _drawn(job: Job, policy: Policy, prompts: Sequence[Prompt], n: int, seed: int) -> dict[str, list[Sample]]:
    """A policy's responses by the prompt's id, in their order."""
    sampler = SamplerConfig(n=n, max_new=job.max_new, batch=1024)
    drawn: dict[str, list[Sample]] = {p.id: [] for p in prompts}
    found = rollout_of(job, policy).sample(prompts, n, sampler, seed=seed)
    for sample in sorted(found, key=lambda s: int(s.meta["index"])):
        drawn[sample.prompt_id].append(sample)
    return drawn


def _judged(job: Job, group: Sequence[Sample], rng: random.Random) -> list[Sample]:
    """The winner and the loser of two responses of unequal grades; nothing where all grades are equal."""
    grades = [job.task.grade(str(s.prompt), s.response) for s in group]
    other = next((i for i, grade in enumerate(grades) if grade != grades[0]), None)
    if other is None:
        return []
    better, worse = (0, other) if grades[0] > grades[other] else (other, 0)
    winner, loser = (worse, better) if rng.random() < job.wrong else (better, worse)
    return [group[winner].replace(reward=1.0), group[loser].replace(reward=0.0)]


def _of_users(job: Job, groups: Iterator[list[Sample]]) -> Iterator[list[Sample]]:
    """Each prompt is one user's."""
    for number, group in enumerate(groups):
        user = {"user": number % job.users}
        yield [sample.replace(meta={**sample.meta, **user}) for sample in group]


@cache
def lenience(job: Job) -> list[float]:
    """By user, what is added to all grades."""
    rng = random.Random(f"{job.name}, lenience")
    return [rng.gauss(0.0, job.lenience) for _ in range(job.users)]


def _rewarded(job: Job, group: Sequence[Sample], rng: random.Random) -> Iterator[Sample]:
    if job.data == "pairs":
        yield from group
        return
    rewards = [_reward(job, s, rng) for s in group]
    if rng.random() < job.equal:
        rewards = [rewards[0]] * len(rewards)
    for sample, reward in zip(group, rewards, strict=True):
        yield sample.replace(reward=reward)


def _reward(job: Job, sample: Sample, rng: random.Random) -> float:
    """As the log has it, with the noise and the mistakes of whoever judged."""
    prompt, response = str(sample.prompt), text_of(sample)
    if job.rewards not in ("graded", "stars"):
        right = job.task.right(prompt, response)
        return 1.0 - right if rng.random() < job.wrong else right
    grade = job.task.grade(prompt, response) + rng.gauss(0.0, job.noise)
    if job.users:
        grade += lenience(job)[sample.meta["user"]]
    if job.rewards == "stars":
        return float(min(5, max(1, round(1 + 4 * grade))))
    return round(grade, 2)


def learner_of(policy: Policy) -> Local:
    """A learner that computes log-probs, of the policy as policy and as reference."""
    learner = Local(policy, policy, lambda text: None)
    learner.enter(RunConfig.of({"train": {"micro_batch": PARTS}}), began=None, resumed=None)
    return learner


def keep_reference(store: Store, policy: Policy) -> None:
    """Store the start's log-probs of all responses, so that no run needs to compute them."""
    cache, samples = ReferenceCache(store, "panel", learner_of(policy), until=0), list(store.samples())
    for first in range(0, len(samples), PARTS):
        part = samples[first : first + PARTS]
        cache.fill(collate(part, 0), part, step=0)
