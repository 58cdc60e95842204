"""`agro eval`: accuracy and pass@k of a model, also against another one."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import (
    REWARD,
    Json,
    PolicySetting,
    Responses,
    RewardOption,
    Seed,
    end,
    options,
    policy_config,
)
from agro.cli.models import LONGEST, EnvironmentName, MaxTurns, environment_of, rollout_of
from agro.cli.run_models import (
    START,
    config_of,
    config_of_model,
    other_rollout,
    sampler_of,
    saved_model,
    started_in,
    working_in,
)
from agro.errors import Refused

HELD_OUT = "held-out prompts"

if TYPE_CHECKING:
    from agro.config import DataConfig, RewardConfig, RunConfig
    from agro.rollout.evaluate import Heldout
    from agro.rollout.rollout import EpisodeReward
    from agro.runs.verdict import Verdict
    from agro.types import Prompt

SHOWN = 300  # characters of a response on the terminal


def eval_(
    context: typer.Context,
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="A run: its model, held-out prompts, reward, environment and lengths."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Folder or hub name of a causal language model, or RUN/checkpoints/step-N."
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts", help="A set of prompts, and what the reward reads; again for each of several sets."
        ),
    ] = None,
    reward: Annotated[str | None, REWARD] = None,
    option: RewardOption = None,
    pass_at: Annotated[
        float | None,
        typer.Option("--pass-at", help="The reward from which a response passes; the reward's own maximum."),
    ] = None,
    n: Responses = 8,
    max_new: Annotated[
        int | None,
        typer.Option("--max-new", min=1, help=f"Tokens a response at most; the run's, or {LONGEST}."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the model's distribution.")] = 1.0,
    seed: Seed = 0,
    policy: PolicySetting = None,
    environment: EnvironmentName = None,
    max_turns: MaxTurns = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="Compare with a model on the same prompts, paired: start (the run's), or as for --model.",
        ),
    ] = None,
    blind: Annotated[
        Path | None,
        typer.Option(
            "--blind",
            metavar="FILE.csv",
            help="With --against: write both models' responses here, to be rated without a reward.",
        ),
    ] = None,
    ratings: Annotated[
        Path | None,
        typer.Option("--ratings", metavar="FILE.csv", help="Read such a sheet back, and keep what it says."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Write rewards and responses here, one prompt a line; of several sets a folder."
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            help="Keep the responses here as they finish: after a kill the same command samples the others.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    from agro.cli.blind import check_blind, check_ratings, read_blind, write_blind

    if ratings is not None:
        check_ratings(context)
        read_blind(run, ratings, as_json)
        return
    if blind is not None:
        check_blind(context, blind)

    if pass_at is not None and not math.isfinite(pass_at):
        raise Refused(f"--pass-at: expected a finite number, got {pass_at}")
    ran = None if run is None else config_of(run)
    own = run if model is None else None  # whose result it is
    model = model or saved_model(run, "model", "--model")
    here, started = Path.cwd(), started_in(run)
    folder = None if run is None else run.absolute()
    with working_in(here if prompts else started):
        sets = _sets(prompts, folder, ran)
    from agro.cli.measuring import Measurement  # here: a missing file is refused before torch is imported
    from agro.config import DataConfig
    from agro.rewards import load_reward
    from agro.rollout.rollout import EpisodeReward

    sampler = sampler_of(n, temperature, max_new, ran or config_of_model(model))
    played = environment_of(environment, max_turns)
    if played is None and ran is not None:
        played = ran.environment
    located = str(Path(model).absolute()) if Path(model).exists() else model
    settings = policy_config(located, policy, None if ran is None else ran.policy)
    if blind is not None:
        assert against is not None
        with working_in(here if environment else started):
            rollout = rollout_of(located, settings, played)
        with working_in(started if against == START else here):
            other = other_rollout(against, ran, policy, played)
        loaded = [prompt for each in sets.values() for prompt in each]
        write_blind(blind, (other, rollout), loaded, sampler, seed, (against, model), own, as_json)
        return
    with working_in(here if reward else started):
        scorer = EpisodeReward(load_reward(_reward(reward, options(option), ran)))
        measurement = Measurement(scorer, sampler, seed, None if store is None else here / store)
        try:
            with working_in(here if environment else started):
                rollout = rollout_of(located, settings, played)
            results = {name: measurement.of(rollout, located, each) for name, each in sets.items()}
            verdicts: dict[str, Verdict] = {}
            if against is not None:
                with working_in(started if against == START else here):
                    other = other_rollout(against, ran, policy, played)
                name = f"{START} of {run}" if against == START else against
                before = {key: measurement.of(other, name, each) for key, each in sets.items()}
                verdicts = _compared(before, results, sets, ran.data if ran else DataConfig())
        finally:
            scorer.close()
    if out is not None:
        _write(out, results, _reward(reward, options(option), ran))
    threshold = _passing_reward(pass_at, ran, scorer, rollout.environment)
    seen = _seen(run, ran, started, sets)
    common = {"model": model, "n": n, "temperature": temperature}
    reports = {
        name: {"prompts": len(sets[name]), **result.to_json(threshold), **seen.get(name, {})}
        for name, result in results.items()
    }
    _tell(common, reports, results, against, verdicts, as_json)
    if all(result.is_unknown for result in results.values()):
        end(2, "agro: none of the responses could be scored, so nothing was measured")


def _sets(prompts: list[Path] | None, run: Path | None, ran: RunConfig | None) -> dict[str, list[Prompt]]:
    """The prompts of each set, by its name."""
    from agro.logs.prompts import load_prompts

    if not prompts:
        return {HELD_OUT: _prompts(run, ran)}
    sets = {path.stem: load_prompts(path) for path in prompts}
    if len(sets) < len(prompts):
        raise Refused("--prompts: expected files of different names, which name the sets")
    return sets


def _compared(
    start: dict[str, Heldout],
    result: dict[str, Heldout],
    sets: dict[str, list[Prompt]],
    data: DataConfig,
) -> dict[str, Verdict]:
    """Of each set; of several p is adjusted (Holm)."""
    from dataclasses import replace

    from agro.io.near_copies import clusters
    from agro.io.terminal import plain
    from agro.rollout.paired import compare, holm
    from agro.runs.verdict import Verdict

    compared = {}
    for name, prompts in sets.items():
        labels = clusters([plain(prompt.text) for prompt in prompts], data.near_copies)
        compared[name] = compare(start[name].rewards, result[name].rewards, labels.tolist())
    adjusted = holm([comparison.p for comparison in compared.values()])
    return {
        name: Verdict.compared(replace(comparison, p=p))
        for (name, comparison), p in zip(compared.items(), adjusted, strict=True)
    }


def _seen(
    run: Path | None, ran: RunConfig | None, started: Path, sets: dict[str, list[Prompt]]
) -> dict[str, dict[str, Any]]:
    """Which prompts the run was trained on, by set; nothing where its training prompts are unknown."""
    from agro.runs.contamination import Contamination, trained_prompts

    if run is None or ran is None:
        return {}
    folder = run.absolute()
    with working_in(started):
        trained = trained_prompts(folder, ran)
    if not trained:
        return {}
    least = ran.data.near_copies
    return {name: {"seen": Contamination.of(each, trained, least)} for name, each in sets.items()}


def _write(out: Path, results: dict[str, Heldout], reward: RewardConfig) -> None:
    """What `agro compare` reads."""
    files = {out: next(iter(results.values()))}
    if len(results) > 1:
        files = {out / f"{name}.jsonl": result for name, result in results.items()}
    scored_by = reward.model_dump(include={"name", "options"})
    for path, result in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        records = ({**record, "scored_by": scored_by} for record in result.by_prompt())
        text = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
        path.write_text(text, encoding="utf-8")


def _passing_reward(
    pass_at: float | None, ran: RunConfig | None, scorer: EpisodeReward, played: Any
) -> float | None:
    """The reward from which a response passes. `played`: the environment."""
    if pass_at is not None:
        return pass_at
    if ran is not None and ran.evaluate.pass_at is not None:
        return ran.evaluate.pass_at
    if scorer.of_environment:
        return getattr(played, "maximum", None)
    return scorer.maximum


def _prompts(run: Path | None, ran: RunConfig | None) -> list[Prompt]:
    """The held-out prompts of a run, or those that it set aside."""
    from agro.logs.prompts import load_prompts
    from agro.runs.folder import SET_ASIDE

    if ran is not None and ran.data.eval_prompts:
        return load_prompts(ran.data.paths("eval_prompts"), ran.data.columns)
    if run is not None and (run / SET_ASIDE).exists():
        return load_prompts(run / SET_ASIDE)
    got = "neither" if run is None else f"{run}, which has no data.eval_prompts and set none aside"
    raise Refused(f"--prompts: expected it, or the folder of a run with held-out prompts, got {got}")


def _reward(name: str | None, options: dict[str, Any], ran: RunConfig | None) -> RewardConfig:
    from agro.config import RewardConfig

    if name is not None:
        return RewardConfig(name=name, options=options)
    if ran is None:
        raise Refused("--reward: expected it, or the folder of a run, got neither")
    if options:
        raise Refused("--option is of --reward, which isn't given; add it, or leave --option out")
    return ran.reward


def _tell(
    common: dict[str, Any],
    reports: dict[str, dict[str, Any]],
    results: dict[str, Heldout],
    against: str | None,
    verdicts: dict[str, Verdict],
    as_json: bool,
) -> None:
    """One set stands beside what is common; several are in `sets`."""
    if as_json:
        documents = []
        for name, report in reports.items():
            seen = report.get("seen")
            document = report | ({} if seen is None else {"seen": seen.to_json()})
            if name in verdicts:
                document |= {"against": against, "verdict": verdicts[name].to_json()}
            documents.append(document if len(reports) == 1 else {"name": name, **document})
        whole = common | (documents[0] if len(reports) == 1 else {"sets": documents})
        print(json.dumps(whole, ensure_ascii=False, allow_nan=False))
        return
    for name, report in reports.items():
        of = "" if len(reports) == 1 else f"{name}: "
        count, n, model = report["prompts"], common["n"], common["model"]
        print(f"{of}{count} prompts × {n} responses of {model} at temperature {common['temperature']}")
        _show(report, results[name])
        if "seen" in report:
            print(f"seen in training: {report['seen'].sentence}")
        if name in verdicts:
            print(f"against {against}: {verdicts[name].sentence}")
    if len(verdicts) > 1:
        print(f"p is adjusted for {len(verdicts)} sets (Holm)")


def _show(report: dict[str, Any], result: Heldout) -> None:
    for key, row in report.items():
        if isinstance(row, dict):
            text = "unknown"
            if row["value"] is not None:
                text = f"{row['value']:.4f}"
            if row["low"] is not None:
                text += f"  [{row['low']:.4f}, {row['high']:.4f}]"
            print(f"{key}: {text}")
    if report["pass_at"] is None:
        print(
            "accuracy, pass@k: not measured, since the reward declares no maximum; say --pass-at REWARD, set "
            "evaluate.pass_at, or declare it: `reward.maximum = 1.0` below the function"
        )
    if result.unscored:
        print(f"{result.unscored} responses couldn't be scored and aren't counted")
        for error, count in Counter(result.errors).most_common(3):
            print(f"  {count} × {error}")
    scored = [s for s in result.samples if s.reward is not None]
    for title, choose in (("best", max), ("worst", min)):
        if scored:
            sample = choose(scored, key=lambda s: s.reward or 0.0)
            print(f"{title} (reward {sample.reward:g}): {_short(sample.prompt)} → {_short(sample.response)}")


def _short(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
