"""`agro judge-check`: how far a reward agrees with labels that are there already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import REWARD, Json, RewardOption, options
from agro.errors import Refused

if TYPE_CHECKING:
    from agro.types import Sample

RESAMPLES = 2000


def judge_check(
    labeled: Annotated[Path, typer.Argument(help="Samples with rewards: a store or interchange records.")],
    option: RewardOption = None,
    reward: Annotated[str, REWARD] = "judge",
    threshold: Annotated[
        float | None, typer.Option(help="From which on the reward says yes; half its maximum if not given.")
    ] = None,
    label_threshold: Annotated[float, typer.Option(help="From which on a label says yes.")] = 0.5,
    timeout: Annotated[float, typer.Option(help="Seconds for one response.")] = 60.0,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Requests at a time.")] = 4,
    as_json: Json = False,
) -> None:
    from agro.config import RewardConfig
    from agro.rewards import load_reward

    samples = [sample for sample in _samples(labeled) if sample.reward is not None]
    if not samples:
        raise Refused(f"{labeled}: expected samples with rewards, which are the labels; got none")
    config = RewardConfig(name=reward, options=options(option), timeout=timeout, workers=workers)
    with closing(load_reward(config)) as judge:
        least = judge.maximum / 2 if threshold is None and judge.maximum is not None else threshold
        if least is None:
            raise Refused(f"--threshold: expected one, since the reward {reward} has no known maximum")
        scores = judge.score(samples)
    judged = [
        (score.value >= least, sample.reward >= label_threshold)
        for sample, score in zip(samples, scores, strict=True)
        if score.value is not None and sample.reward is not None
    ]
    failed = [score.error for score in scores if score.value is None]
    report = agreement(judged) | {"failed": len(failed), "threshold": least}
    if as_json:
        print(json.dumps(report))
        return
    print(_described(report))
    for error in list(dict.fromkeys(failed))[:5]:
        print(f"  not judged: {error}")


def agreement(judged: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Share of equal answers and Cohen's κ, (p_o − p_e)/(1 − p_e), with its 95% bootstrap interval.

    `judged`: (the judge's yes, the label's yes) of each sample. κ is None where one of both always says the
    same: chance explains everything then.
    """
    import numpy as np

    if not judged:
        return {"n": 0, "agreement": None, "kappa": None, "low": None, "high": None}
    answers = np.array(judged, dtype=bool)
    random = np.random.default_rng(0)
    draws = [_kappa(answers[random.integers(0, len(answers), len(answers))]) for _ in range(RESAMPLES)]
    known = [kappa for kappa in draws if kappa is not None]
    low, high = np.quantile(known, (0.025, 0.975)) if known else (None, None)
    return {
        "n": len(answers),
        "agreement": float((answers[:, 0] == answers[:, 1]).mean()),
        "kappa": _kappa(answers),
        "low": None if low is None else float(low),
        "high": None if high is None else float(high),
    }


def _kappa(answers: Any) -> float | None:
    observed = (answers[:, 0] == answers[:, 1]).mean()
    yes, expected_yes = answers.mean(0)
    by_chance = yes * expected_yes + (1 - yes) * (1 - expected_yes)
    return None if by_chance == 1 else float((observed - by_chance) / (1 - by_chance))


def _described(report: dict[str, Any]) -> str:
    if not report["n"]:
        return f"no sample was judged ({report['failed']} failed)"
    kappa = "κ isn't defined: one of both always says the same"
    if report["kappa"] is not None:
        kappa = f"κ {report['kappa']:.2f} ({report['low']:.2f} to {report['high']:.2f})"
    return (
        f"{report['n']} samples judged, {report['failed']} not: the judge (yes from "
        f"{report['threshold']:g} on) agrees with {report['agreement']:.1%} of the labels, {kappa}"
    )


def _samples(path: Path) -> list[Sample]:
    from agro.logs.interchange import read_samples
    from agro.store import Store
    from agro.store.location import is_store

    if is_store(path):
        with Store.open(path, read_only=True) as store:
            return list(store.samples())
    return list(read_samples(path))
