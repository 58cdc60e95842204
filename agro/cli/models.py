"""Commands that sample from a model."""

from __future__ import annotations

import sys
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from agro.cli.common import Model, PolicySetting, PromptFile, Responses, Seed, policy_config, sampler_config
from agro.errors import Refused

if TYPE_CHECKING:
    from agro import config
    from agro.rollout import Rollout

EnvironmentName = Annotated[
    str | None,
    typer.Option("--environment", help="Episodes: verifiers:ENV_ID, module:Class or file.py:Class."),
]
TURNS, LONGEST = 8, 256  # of an episode, and tokens of a response, where nothing else is said
ModelOfRun = Annotated[
    str | None,
    typer.Option("--model", help="Folder or hub name of a causal language model, or RUN/checkpoints/step-N."),
]
MaxNew = Annotated[
    int | None,
    typer.Option("--max-new", min=1, help=f"Tokens a response at most; the run's, or {LONGEST}."),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="Of the model's distribution.")]
MaxTurns = Annotated[
    int | None,
    typer.Option("--max-turns", min=1, metavar="N", help=f"Turns of an episode at most; {TURNS}."),
]


def sample(
    model: Model,
    prompts: PromptFile,
    out: Path,
    n: Responses = 4,
    greedy: bool = False,
    max_new: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    seed: Seed = 0,
    policy: PolicySetting = None,
    environment: EnvironmentName = None,
    max_turns: MaxTurns = None,
) -> None:
    """Args:
    out: A store, or a .jsonl, .jsonl.gz or .parquet file.
    greedy: Always the likeliest token.
    max_new: Tokens a response at most.
    temperature: 1 where it isn't given.
    """
    from agro.cli.runs import look_at_model
    from agro.rollout import Task, collect
    from agro.rollout.prompts import load_prompts
    from agro.store import Store, write_samples

    loaded = load_prompts(prompts)
    settings = policy_config(model, policy)
    look_at_model(settings.model or model)
    as_file = out.name.endswith((".jsonl", ".jsonl.gz", ".parquet"))
    if as_file and out.exists():
        raise Refused(f"{out}: there is such a file; give another --out, or remove it")
    if greedy and temperature is not None:
        raise Refused(
            f"--greedy takes the likeliest token: expected no --temperature beside it, got {temperature}"
        )
    if temperature is None:
        temperature = 0.0 if greedy else 1.0
    sampler = sampler_config(n=n, temperature=temperature, max_new=max_new)
    rollout = rollout_of(model, settings, environment_of(environment, max_turns))
    with TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db" if as_file else out) as store:
        start = ceil(store.experience.next_number(seed) / n)  # so that no stored response is sampled again
        task = Task(seed=seed, numbers=tuple(range(start, start + len(loaded))))
        report = collect(rollout, loaded, sampler, store, task)
        if as_file:
            samples_by_id = {s.id: s for s in store.samples()}
            write_samples(out, (samples_by_id[i] for i in report.ids))
    print(f"{len(report.ids)} responses to {len(loaded)} prompts in {out}", file=sys.stderr)


def environment_of(name: str | None, max_turns: int | None) -> config.EnvironmentConfig | None:
    from agro.config import EnvironmentConfig

    if name is None:
        return None
    return EnvironmentConfig(name=name, max_turns=TURNS if max_turns is None else max_turns)


def rollout_of(
    model: str,
    settings: config.PolicyConfig,
    environment: config.EnvironmentConfig | None,
    weights_seed: int = 0,
) -> Rollout:
    """Of a model or of a checkpoint of a run. `weights_seed`: of random weights, for `settings.new`."""
    from agro.models.policy import Policy
    from agro.rollout.rollout import embedded, load_rollout
    from agro.train.recovery import is_checkpoint, load_checkpoint

    folder = Path(model)
    if is_checkpoint(folder):
        policy = load_checkpoint(folder, settings)
    else:
        policy = Policy.load(settings, seed=weights_seed)
    return load_rollout(policy.encoder, embedded(policy), environment, source=model)
