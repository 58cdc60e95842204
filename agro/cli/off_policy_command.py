"""`agro off-policy`: what a log says of a model that didn't write it, before the model serves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from agro.cli.common import REWARD, Json, PolicySetting, RewardOption, Seed, opened_log, options
from agro.cli.run_models import START, MeasuredModel, ModelOfRun, model_path
from agro.errors import Refused
from agro.io.numbers import chance, fixed, none_if_nan
from agro.logs.results import results_at
from agro.rollout.off_policy import (
    HEADLINE,
    WAY_OUT,
    RankingAccuracy,
    sharpe_ratio,
    value_on_log,
)

if TYPE_CHECKING:
    from agro.cli.measuring import Measurement
    from agro.models.policy import Policy
    from agro.pages.store.measurements import Log, RescoredLog

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
