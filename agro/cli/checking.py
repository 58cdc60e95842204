"""`agro check`: the report before training."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from agro.cli.common import (
    Json,
    PolicySetting,
    RewardOption,
    Workers,
    end,
    licenses,
    opened_log,
    options,
    policy_config,
)
from agro.cli.preflight import look_at_model
from agro.config import RewardConfig, RunConfig, override
from agro.errors import Refused
from agro.rewards import load_reward


def check(
    path: Annotated[Path, typer.Argument(metavar="LOG-or-STORE")],
    objective: str | None = None,
    recipe: Path | None = None,
    changes: Annotated[list[str] | None, typer.Option("--set")] = None,
    model: str | None = None,
    reference: str | None = None,
    setting: PolicySetting = None,
    reward: str | None = None,
    option: RewardOption = None,
    limit: Annotated[int, typer.Option(min=1)] = 1000,
    held_out: Path | None = None,
    out: Path | None = None,
    workers: Workers = 1,
    whole: Annotated[bool, typer.Option("--all")] = False,
    as_json: Json = False,
) -> None:
    """Args:
    path: A store, or a log of `agro formats`.
    objective: The objective that is to train on it; else the best for the data.
    recipe: A recipe, by file or name: its settings are checked.
    changes: KEY=VALUE, such as objective.singletons=drop; may be repeated.
    model: Measure log π of the responses: ranking (AUC), coverage, weights, β.
    reference: π_ref: measure log π/π_ref, such as the model before training.
    reward: With --model: score its own responses to the log's prompts, beside the log's.
    limit: Measure at most so many prompts with the model.
    held_out: A file of prompts that it shouldn't overlap with.
    out: A folder for the page, check.html, and check.json.
    whole: Name all objectives that can or can't train on it, and why.
    """
    alone = (
        ("--reference and --policy go with --model", model is None and (reference is not None or setting)),
        ("--reward scores responses of --model", model is None and reward is not None),
        ("--option is of --reward", reward is None and option),
    )
    for words, is_alone in alone:
        if is_alone:
            raise Refused(f"{words}, which isn't given; add it, or leave the others out")
    config = _config(objective, recipe, changes or [])
    compared = None if reference is None else policy_config(reference, setting)
    if model is not None:
        config = config.model_copy(update={"policy": policy_config(model, setting, config.policy)})
        for policy in (config.policy, compared):
            if policy is not None and policy.model is not None:
                look_at_model(policy.model)  # refused before torch is imported
    with opened_log(path, workers) as store:
        from agro.pages.store import check_store  # here: a missing file is refused at once

        is_asked = objective or recipe or any(change.startswith("objective.") for change in changes or [])
        wanted = None if is_asked else changes or []
        whose = licenses(store)
        report = check_store(store, config, path=path, held_out=held_out, licenses=whose, changes=wanted)
        if model is not None:
            from agro.models.policy import Policy
            from agro.pages.store.measurements import measure, own_reward

            asked = Policy.load(config.policy)
            reference_policy = None if compared is None else Policy.load(compared)
            report = replace(report, measured=measure(store, asked, reference_policy, limit))
            if reward is not None:
                scoring = RewardConfig(name=reward, options=options(option))
                with closing(load_reward(scoring)) as loaded:
                    own = own_reward(store, asked, loaded, config)
                report = replace(report, own_reward=own)
    if out is not None:
        from agro.pages.store.check_page import write_page

        write_page(report, out)
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        lines = [] if out is None else [f"page: {out / 'check.html'}"]
        if report.ranking is not None:
            lines += report.ranking.lines(whole=whole)
        print("\n".join([str(report), "", *lines]))
    problems = [str(verdict) for verdict in report.verdicts if verdict.level == "problem"]
    if problems:
        end(2, "\n".join(f"agro: {problem}" for problem in problems))


def _config(objective: str | None, recipe: Path | None, changes: list[str]) -> RunConfig:
    """What the store is checked for: a recipe, or an objective with its defaults, and changed settings."""
    if recipe is not None and objective is not None:
        raise Refused("--objective: the recipe has one; give --recipe or --objective, not both")
    if recipe is not None:
        return RunConfig.load(recipe, changes)
    values: dict[str, Any] = {"objective": {"name": objective or "agro"}}
    for change in changes:
        override(values, change, RunConfig)
    return RunConfig.of(values, "--set")
