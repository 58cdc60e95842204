"""`agro compare`: is B better than A, on the same prompts? Of runs their curves too.

`agro off-policy`: what a log says of a model that didn't write it, before the model serves.
"""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from agro.cli.common import (
    REWARD,
    Json,
    PolicySetting,
    Responses,
    RewardOption,
    Seed,
    opened_log,
    options,
    show_table,
    terminal,
)
from agro.cli.run_models import START, MaxNew, MeasuredModel, ModelOfRun, Temperature, load_sets, model_path
from agro.config import RewardConfig
from agro.errors import Refused
from agro.io.numbers import chance, fixed, none_if_nan
from agro.logs.results import Result, is_run, results_at
from agro.rewards import load_reward
from agro.stats.off_policy import HEADLINE, WAY_OUT, RankingAccuracy, sharpe_ratio, value_on_log
from agro.store.location import url_of
from agro.types import Prompt

if TYPE_CHECKING:
    from agro.cli.measuring import Measurement
    from agro.models.policy import Policy
    from agro.pages.run.paired_results import PairedSets
    from agro.pages.store.measurements import Log, RescoredLog


def compare(
    results: Annotated[list[str], typer.Argument(metavar="A B…")],
    metric: str | None = None,
    prompts: list[Path] | None = None,
    reward: Annotated[str | None, REWARD] = None,
    option: RewardOption = None,
    n: Responses = 8,
    max_new: MaxNew = None,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    policy: PolicySetting = None,
    out: Path = Path("compare"),
    as_json: Json = False,
) -> None:
    """Args:
    results: Runs, stores, files of agro eval --out, samples of lm-evaluation-harness, lighteval or
        Inspect (a file, or the folder of several tasks), other logs; with --prompts models. Each other
        one is compared with the first. Of runs those that differ in their seed alone are one line.
    metric: Of runs a number of metrics.jsonl, or else held-out reward; of a harness's one, such as
        exact_match,strict-match, or else the first that both have.
    prompts: A set of prompts, which the models (of runs: theirs) answer; again for each set.
    out: The folder of compare.html, and where all are runs of compare.png, .svg, .pdf and .csv.
    """
    from agro.pages.run.paired_results import PairedSets

    paths = [Path(name) for name in results]
    if prompts is None and all(is_run(path) for path in paths):
        _compare_runs(paths, metric, out, as_json)
        return
    if len(results) < 2:
        raise Refused(f"compare: expected two results or more, or a run, got {results[0]} alone")
    if prompts is None:
        for path in [path for path in paths if not url_of(path)]:
            is_model = (path / "config.json").is_file() and not is_run(path)
            if is_model or not path.exists():
                what = "a model" if is_model else "no such file or folder"
                raise Refused(f"{path}: {what}: models are compared with --prompts FILE --reward NAME")
        sides = [results_at(path) for path in paths]
    else:
        if reward is None:
            raise Refused("--prompts: expected --reward NAME beside it, which scores the responses")
        sets, scoring = load_sets(prompts), RewardConfig(name=reward, options=options(option))
        sampling: dict[str, Any] = {"n": n, "temperature": temperature, "max_new": max_new}
        sides = [_answered(name, sets, scoring, policy, seed, **sampling) for name in results]
    paired = PairedSets.of(sides, metric)
    from agro.pages.run.compare import write_results

    written = [str(path) for path in write_results(paired, out)]
    if as_json:
        print(json.dumps({**paired.to_json(), "files": written}, ensure_ascii=False, allow_nan=False))
        return
    _say(paired)
    print("\n".join(written))


def _answered(
    name: str,
    sets: dict[str, list[Prompt]],
    reward: RewardConfig,
    policy: list[str] | None,
    seed: int,
    **sampling: Any,
) -> list[Result]:
    """Of a model, which answers sets of prompts; the result of a run is its model's, and a file or store of
    responses is read as it is. `sampling`: of `MeasuredModel.sampler`."""
    from agro.cli.measuring import Measurement
    from agro.rollout.rollout import EpisodeReward

    path = Path(name)
    if path.is_file():
        return results_at(path)
    run, model = (path, None) if is_run(path) else (None, name)
    subject = MeasuredModel.of(run, model, policy)
    rollout = subject.rollout()
    scoring = reward.model_dump(mode="json", include={"name", "options"})
    found = []
    with closing(EpisodeReward(load_reward(reward))) as scorer:
        measurement = Measurement(scorer, subject.sampler(**sampling), seed)
        for task, prompts in sets.items():
            measured = measurement.of(rollout, subject.path, prompts)
            if measured.is_unknown:
                raise Refused(
                    f"{name}: none of the responses to {task} could be scored: "
                    f"{measured.errors[0] if measured.errors else 'the reward is unknown'}"
                )
            rows = [list(map(none_if_nan, row)) for row in measured.rewards.tolist()]
            rewards = dict(zip((p.id for p in prompts), rows, strict=True))
            texts = {prompt.id: prompt.text for prompt in prompts}
            found.append(Result.of_prompts(name, rewards, texts, task=task, scoring=scoring))
    return found


def _compare_runs(runs: list[Path], metric: str | None, out: Path, as_json: bool) -> None:
    from agro.pages.run import compare as pages

    comparison = pages.compare(runs, metric)
    paths = pages.write(comparison, out)
    if as_json:
        print(json.dumps(pages.to_json(comparison, paths), ensure_ascii=False, allow_nan=False))
        return
    rows = []
    for line in comparison.lines:
        seeds, difference = ", ".join(map(str, line.seeds)), pages.difference_words(comparison, line)
        rows.append([line.label, seeds, pages.final_words(line), str(line.steps[-1]), difference])
    final = f"final {pages.measure_name(comparison)}"
    console = show_table(("line", "seeds", final, "step", "to the first line"), rows, wrap_names=True)
    if any(len(line.runs) >= pages.BANDS for line in comparison.lines):
        console.print("[…]: 95 % t-interval over seeds")
    differences = pages.differences_words(comparison) or ["nothing but the seed"]
    for text in ["", "what differs:", *differences, "", *pages.notes(comparison), ""]:
        console.print(text)
    if comparison.paired is not None:
        _say(comparison.paired)
    print("\n".join(map(str, paths)))


def _say(paired: PairedSets) -> None:
    """One comparison in sentences; of several a table, and the sentences of those that show a difference."""
    if len(paired.pairs) > 1:
        rows = []
        for pair in paired.pairs:
            x = pair.comparison
            difference = fixed(x.difference, signed=True)
            if x.low == x.low:
                difference += f" [{fixed(x.low, signed=True)}, {fixed(x.high, signed=True)}]"
            p = "unknown" if pair.p != pair.p else chance(pair.p).removeprefix("p ").removeprefix("= ")
            rows.append([pair.name, str(x.n), fixed(x.a), fixed(x.b), difference, p, pair.verdict.answer])
        titles = ("set", "prompts", "first", "other", "difference", "p", "verdict")
        show_table(titles, rows, wrap_names=True).print(
            f"[…]: 95 % interval of other − first; p: adjusted for {len(paired.pairs)} comparisons (Holm)\n"
        )
    console = terminal()
    for pair in paired.pairs:
        for text in (pair.sentence, *pair.notes):
            console.print(text)
    for note in paired.notes:
        console.print(f"Not compared: {note}")
    console.print("")


FITTED, CRITIC = "fitted", "critic"
AUTHOR = "what wrote the log"


def off_policy(
    log: Path,
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]")] = None,
    model: ModelOfRun = None,
    values: str = FITTED,
    clip: Annotated[float | None, typer.Option(min=1.0)] = None,
    reference: str | None = None,
    beta: Annotated[float | None, typer.Option(min=0.0)] = None,
    checkpoints: bool = False,
    reward: Annotated[str | None, REWARD] = None,
    option: RewardOption = None,
    n: Annotated[int, typer.Option("-n", "--responses", min=1)] = 8,
    seed: Seed = 0,
    policy: PolicySetting = None,
    as_json: Json = False,
) -> None:
    """Args:
    log: A store, or a file as `agro import` takes it: scored responses.
    run: A run: its model, and the β of its objective.
    values: V of the doubly robust estimate: fitted to the log's other responses, critic (the value head
        of a checkpoint, as of dro), or a store, whose mean reward of a prompt it is.
    clip: The largest weight of the clipped estimate; √N.
    reference: start (the run's), or a model: for the idealized ranking accuracy.
    beta: In reward per nat; that of the run's objective.
    checkpoints: Rank the run's checkpoints by the log, sample each, and say SharpeRatio@k of the ranking.
    n: With --checkpoints.
    """
    if not log.exists():
        raise Refused(f"--log {log}: no such file")
    subject = MeasuredModel.of(run, model, policy)
    if not checkpoints:  # else the run's are read
        subject.look_at(subject.path)
    from agro.pages.store.measurements import Log  # here: what is missing is refused at once

    with opened_log(log) as store:
        logged = Log(str(log), list(store.samples()), list(store.pairs()))
    document: dict[str, Any] = {"log": str(log), "values": values}
    if checkpoints:
        from agro.cli.measuring import Measurement

        scoring, sampler = subject.reward(reward, options(option)), subject.sampler(n, 1.0, None)
        with subject.scorer(scoring, reward) as scorer:
            measurement = Measurement(scorer, sampler, seed)
            document |= _rank_checkpoints(subject, logged, values, measurement)
    else:
        document |= {"model": subject.name, **_estimate(subject, logged, values, clip, reference, beta)}
    if as_json:
        print(json.dumps(document, ensure_ascii=False, allow_nan=False))
    elif checkpoints:
        for row in document["candidates"]:
            by_log = f"not estimable ({row['obstacle']})" if row["obstacle"] else fixed(row["estimated"])
            print(f"{row['name']}: by the log {by_log}, measured {fixed(row['measured'])}")
        for k, ratio in document["sharpe_ratio"].items():
            print(f"SharpeRatio@{k}: {fixed(ratio)}")
    else:
        _print(document)


def _estimate(
    subject: MeasuredModel,
    log: Log,
    values: str,
    clip: float | None,
    reference: str | None,
    beta: float | None,
) -> dict[str, Any]:
    """The value of the model by the log, and how it ranks the log's pairs; None where it has none."""
    from agro.cli.measuring import policy_of

    rescored, ref_logp = _rescored(log, _policy(subject, values)), None
    if reference is not None:
        named = reference if reference == START else model_path(reference)
        other = _rescored(log, policy_of(subject.other(named)))
        ref_logp = other.totals
        if len(other.responses) != len(rescored.responses):
            raise Refused(
                f"--reference {reference}: expected a model that reads the same {len(rescored.responses)} "
                f"responses, got one that reads {len(other.responses)}; leave --reference out"
            )
    if beta is None and subject.config is not None:
        beta = subject.config.objective.options.get("beta")
    scored, seen, ranking = rescored.scored(), subject.seen(log.prompts()), None
    pairs, groups, lengths = rescored.pairs(log), rescored.clusters, rescored.lengths
    if pairs:
        found = RankingAccuracy.of(pairs, groups, rescored.totals, lengths, ref_logp, beta)
        ranking = {**found.to_json(), "beta": beta}
    return {
        "responses": len(scored.responses),
        "dropped": scored.dropped,
        "seen": None if seen is None else {**seen.to_json(), "sentence": seen.sentence},
        "value": _value(scored, values, clip),
        "ranking_accuracy": ranking,
    }


def _rescored(log: Log, policy: Policy) -> RescoredLog:
    from agro.pages.store.measurements import RescoredLog

    found = RescoredLog.of(log, policy)
    if not found.responses:
        raise Refused(
            f"--log {log.name}: expected responses that the model can read, got none of {len(log.samples)}; "
            f"dropped: {dict(found.dropped) or 'nothing'}"
        )
    return found


def _policy(subject: MeasuredModel, values: str) -> Policy:
    """With the value head of its checkpoint, where that is V."""
    from agro.cli.measuring import policy_of
    from agro.train.stored_tensors import assign, exists

    policy, folder = policy_of(subject.rollout()), Path(subject.path)
    if values == CRITIC:
        if not exists(folder, "value"):
            raise Refused(
                f"--values critic: expected a checkpoint with a value head (RUN/checkpoints/step-N of dro or "
                f"ppo), got {folder}; leave --values out, and V is fitted to the log"
            )
        policy.add_value()
        assign(folder, "value", policy.value_weights())
    return policy


def _value(scored: RescoredLog, kind: str, clip: float | None) -> dict[str, Any]:
    """As JSON; where nothing can be estimated the reason, and what to do instead. `kind`: of V."""
    obstacle = scored.obstacle()
    if obstacle:
        return {"answer": "not estimable", "obstacle": obstacle, "instead": WAY_OUT}
    logged = scored.logged()
    if kind == FITTED:
        return value_on_log(logged, None, clip).to_json()
    if kind == CRITIC:
        return value_on_log(logged, scored.critic_values(), clip).to_json()
    results = results_at(Path(kind))
    found = [(result.name, name) for result in results for name in result.scores]
    if len(found) != 1:
        raise Refused(
            f"--values {kind}: expected one set with one reward, got {len(found)}: "
            f"{', '.join(f'{one} of {of}' for of, one in found) or 'none'}; give a file that has one"
        )
    [of_prompt] = results[0].scores.values()
    rewards = [of_prompt.get(response[0].prompt_id) for response in scored.responses]
    if None in rewards:
        missing = scored.responses[rewards.index(None)][0].prompt_id
        raise Refused(
            f"--values {kind}: expected scored responses to each prompt of the log, got none to "
            f"those of {rewards.count(None)}, such as {missing}; leave --values out: V is fitted to the log"
        )
    return value_on_log(logged, logged.until_end(np.array(rewards, dtype=np.float64)), clip).to_json()


def _rank_checkpoints(
    subject: MeasuredModel, log: Log, values: str, measurement: Measurement
) -> dict[str, Any]:
    """Of each checkpoint the estimate by the log, and the mean reward of its own responses to the log's
    prompts; of the ranking SharpeRatio@k. What wrote the log is a candidate too."""
    if subject.run is None:
        raise Refused("--checkpoints: expected the folder of a run, got --model alone")
    folders = sorted((subject.run / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    if not folders:
        raise Refused(f"{subject.run}: expected checkpoints/step-N, got none; train.keep keeps more of them")
    candidates: list[dict[str, Any]] = []
    for path in folders:
        checkpoint = replace(subject, name=str(path), path=model_path(str(path)))
        rescored = _rescored(log, _policy(checkpoint, values))
        found = _value(rescored.scored(), values, None)
        row: dict[str, Any] = {"name": path.name, "estimated": None, "obstacle": found["obstacle"]}
        if row["obstacle"] is None:
            row["estimated"] = found["estimates"][HEADLINE]["value"]
        row["measured"] = measurement.of(checkpoint.rollout(), path.name, log.prompts()).mean
        candidates.append(row)
    mean = float(np.nanmean(rescored.rewards))
    candidates.append({"name": AUTHOR, "estimated": mean, "obstacle": None, "measured": mean})
    ranked = [row for row in candidates if row["estimated"] is not None and not math.isnan(row["measured"])]
    estimated, measured = (np.array([row[key] for row in ranked]) for key in ("estimated", "measured"))
    author = len(ranked) - 1
    ratios = {k: sharpe_ratio(estimated, measured, author, k) for k in range(2, len(ranked) + 1)}
    return {
        "candidates": [{k: none_if_nan(x) for k, x in row.items()} for row in candidates],
        "sharpe_ratio": {str(k): none_if_nan(ratio) for k, ratio in ratios.items()},
    }


def _print(document: dict[str, Any]) -> None:
    print(f"{document['model']} by {document['responses']} responses of {document['log']}")
    if document["dropped"]:
        print("dropped: " + ", ".join(f"{count} ({why})" for why, count in document["dropped"].items()))
    if document["seen"] is not None:
        print(f"seen in training: {document['seen']['sentence']}")
    value, accuracy = document["value"], document["ranking_accuracy"]
    if value["answer"] == "not estimable":
        print(f"Not estimable: {value['obstacle']}. What to do: {value['instead']}")
    else:
        change = f"{_with_interval(value['gain'])}, {chance(value['gain']['p'])}"
        author = f"what wrote the log, whose mean reward is {fixed(value['behavior'])}"
        print(f"{value['answer'].capitalize()} against {author}: {change} (doubly robust)")
        counting = (
            f"{value['ess']:.0f} of {value['responses']} responses count, of {value['clusters']} prompts"
        )
        print(f"{counting}; the mean weight is {_with_interval(value['mean_weight'])}")
        if value["caution"]:
            print(value["caution"].capitalize())
        for name, estimate in value["estimates"].items():
            print(f"  {name.replace('_', ' ')}: {_with_interval(estimate)}")
        low, high = value["clipping_bias"]
        print(f"clipped: at {value['clip']:.3g}, which changes the value by {low:+.4f} to {high:+.4f}")
    if accuracy is None:
        return
    print(f"ranking accuracy of {accuracy['pairs']} pairs to {accuracy['groups']} prompts")
    for name in ("plain", "length_normalized", "idealized"):
        text = "unknown; it needs --reference, a β, and rewards or votes"
        if accuracy[name] is not None:
            text = _with_interval(accuracy[name])
        print(f"  {name.replace('_', ' ')}: {text}")


def _with_interval(row: dict[str, Any]) -> str:
    if row["low"] is None:
        return fixed(row["value"])
    return f"{fixed(row['value'])} [{fixed(row['low'])}, {fixed(row['high'])}]"
