"""`agro fit-reward`: a reward model from judged pairs or ratings, with what it is worth; and `agro
judge-check`: how far a reward agrees with labels that are there already."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import REWARD, Json, Model, RewardOption, Seed, opened_log, options
from agro.config import DataConfig, RewardConfig
from agro.errors import Refused
from agro.io.files import write
from agro.rewards import load_reward
from agro.stats.intervals import interval
from agro.store import Store
from agro.types import Sample

if TYPE_CHECKING:
    from agro.rewards.fitting import Judged
    from agro.rewards.model import RewardModel

KINDS = ("pairs", "ratings", "groups")
PAGE = "reward.html"
LENGTH = {  # of responses: what the page says of it
    "longer_judged": "the longer one is judged better",
    "longer_ranked": "the model ranks the longer one higher",
    "right_longer": "accuracy where the longer one is better",
    "right_shorter": "accuracy where the shorter one is better",
    "baseline": "accuracy of length alone",
}


def fit_reward(
    store: Annotated[Path, typer.Argument()],
    model: Model,
    out: Path,
    on: str = "",
    hold_out: Annotated[float, typer.Option(min=0.0, max=0.9)] = 0.1,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    lr: float = 2e-5,
    batch: Annotated[int, typer.Option(min=1)] = 16,
    max_length: int | None = None,
    template: str = "auto",
    device: str = "auto",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Args:
    store: Judged pairs, or responses with rewards.
    out: Folder of the reward model, new or empty.
    on: pairs: judgments; ratings: rewards, by regression; groups: pairs of unequal rewards to one prompt.
        Pairs where the store has some, else groups.
    hold_out: Share of the prompts that it is measured on.
    epochs: Passes over the comparisons or ratings.
    lr: Learning rate; small models want more, such as 1e-3.
    batch: Comparisons or ratings of an update.
    max_length: Tokens of prompt and response; longer ones are left out, and counted.
    template: auto, chat or plain: how texts become one.
    device: auto, cpu or cuda.
    """
    import torch

    from agro.rewards import fitting
    from agro.rewards.model import SETTINGS, RewardModel

    if on not in ("", *KINDS):
        raise Refused(f"--on: expected {', '.join(KINDS)}, got {on!r}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"--out {out}: expected a new or empty folder")
    torch.manual_seed(seed)  # of the new head
    start = RewardModel.load(model, device=device, template=template, max_length=max_length, new=True)
    numbers, train, held_out = _read(store, start, on, hold_out)
    kind: fitting.Kind = "ratings" if numbers["on"] == "ratings" else "pairs"
    options = fitting.Fitting(kind, epochs, batch, lr, seed)
    losses: list[float] = []

    def say(update: int, updates: int, loss: float) -> None:
        """The mean loss ten times."""
        losses.append(loss)
        if not as_json and (update % max(1, updates // 10) == 0 or update == updates):
            print(f"update {update} of {updates}: loss {fmean(losses):.4f}", file=sys.stderr)
            losses.clear()

    fitted = fitting.fit(start, train, options, say=say)
    result = {
        "model": {"from": model, "template": template, "scale": fitted.scale, "shift": fitted.shift},
        "data": numbers,
        "held_out": measured(fitted, held_out, batch),
    }
    out.mkdir(parents=True, exist_ok=True)
    fitted.model.save_pretrained(out)
    fitted.tokenizer.save_pretrained(out)
    write(out / SETTINGS, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    write(out / PAGE, page(out.name, result))
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
        return
    for line in summary(result):
        print(line)
    print(f'{out / PAGE}; as a reward: reward.name = "model", reward.options = {{ path = "{out}" }}')


def _read(path: Path, model: RewardModel, on: str, share: float) -> tuple[dict[str, Any], Judged, Judged]:
    """What the store has for a reward model, in numbers, and its pairs or ratings to train on and held out,
    split by prompts; near-copies of a prompt go with it."""
    from agro.rewards.fitting import Comparison, Judged, by_rating, posterior_mean

    dropped: Counter[str] = Counter()
    ratings: list[tuple[int, float, str]] = []
    samples, ids = list[Sample](), list[list[int]]()
    with Store.open(path, read_only=True, create=False) as store:
        pairs = [] if on in ("ratings", "groups") else list(store.pairs())
        on = on or ("pairs" if pairs else "groups")
        judged = {i for pair in pairs for i in (pair.winner, pair.loser)}
        for sample in store.samples(ids=judged) if on == "pairs" else store.samples(scored=True):
            try:
                ids.append(model.ids(sample.prompt, sample.response))
                samples.append(sample)
            except LookupError as error:
                dropped["too long" if "tokens" in str(error) else str(error)] += 1
        comparisons = []
        place = {sample.id: i for i, sample in enumerate(samples)}
        for pair in pairs:
            if pair.winner not in place or pair.loser not in place:
                dropped["pairs without one of the two"] += 1
                continue
            p = 1.0
            if pair.votes_winner is not None and pair.votes_loser is not None:
                p = posterior_mean(pair.votes_winner, pair.votes_loser)
            first, second = place[pair.winner], place[pair.loser]
            comparisons.append(Comparison(first, second, p, samples[first].prompt_id))
        if on != "pairs":
            ratings = [(i, s.reward, s.prompt_id) for i, s in enumerate(samples) if s.reward is not None]
            comparisons = by_rating(ratings)
        data = Judged(ids, [len(sample.response) for sample in samples], comparisons, ratings)
        train, held_out = data.split(store.split.held_out(DataConfig(store=str(path), hold_out=share)))
    numbers: dict[str, Any] = {"on": on}
    for name, part in (("trained", train), ("held_out", held_out)):
        prompts = {c.prompt for c in part.comparisons} | {prompt for _, _, prompt in part.ratings}
        sizes = {"comparisons": len(part.comparisons), "ratings": len(part.ratings)}
        numbers[name] = {"prompts": len(prompts), **sizes}
    return numbers | {"left_out": dict(dropped)}, train, held_out


def measured(model: RewardModel, held_out: Judged, batch: int) -> dict[str, Any] | None:
    """What the model is worth on the comparisons that were held out; None where there are none."""
    from agro.rewards.fitting import Ranked

    if not held_out.comparisons:
        return None
    used = sorted({place for c in held_out.comparisons for place in (c.first, c.second)})
    values = dict(zip(used, model.values([held_out.rows[place] for place in used], batch), strict=True))
    ranked = Ranked.of(held_out, values)
    by_prompt = ranked.by_prompt()
    low, high = interval(by_prompt)
    return {
        "accuracy": {"value": float(by_prompt.mean()), "low": low, "high": high},
        "comparisons": len(ranked.prompts),
        "prompts": len(by_prompt),
        "calibration": ranked.calibration(),
        "length": ranked.length_bias(),
    }


def summary(result: dict[str, Any]) -> list[str]:
    """In words, for terminal and page."""
    data, found = result["data"], result["held_out"]
    trained = data["trained"]
    unit = "ratings" if data["on"] == "ratings" else "comparisons"
    lines = [f"trained on {trained[unit]:,} {unit} of {trained['prompts']:,} prompts ({data['on']})"]
    lines += [f"left out: {reason}: {n:,}" for reason, n in data["left_out"].items()]
    if found is None:
        return [*lines, "nothing was held out, so its accuracy isn't known (--hold-out)"]
    accuracy, length = found["accuracy"], found["length"]
    lines.append(
        f"held-out accuracy {accuracy['value']:.3f} ({accuracy['low']:.3f} to {accuracy['high']:.3f}) on "
        f"{found['comparisons']:,} comparisons of {found['prompts']:,} prompts; chance is 0.5"
    )
    if length["baseline"] is not None:
        lines.append(
            f"length: the longer response is judged better in {length['longer_judged']:.3f} of them, and "
            f"ranked higher in {length['longer_ranked']:.3f}; length alone has the accuracy "
            f"{length['baseline']:.3f}"
        )
    return lines


def page(name: str, result: dict[str, Any]) -> str:
    from agro.pages.run.render import Fact, render

    found, facts = result["held_out"], list[Fact]()
    if found is not None:
        length = found["length"]
        facts = [Fact("pairs of different length", f"{length['n']:,}")]
        for key, title in LENGTH.items():
            value = length.get(key)
            facts.append(Fact(title, None if value is None else f"{value:.3f}"))
    return render("reward.html", name=name, said=summary(result), found=found, length=facts)


RESAMPLES = 2000


def judge_check(
    labeled: Annotated[Path, typer.Argument()],
    option: RewardOption = None,
    reward: Annotated[str, REWARD] = "judge",
    threshold: float | None = None,
    label_threshold: float = 0.5,
    timeout: float = 60.0,
    workers: Annotated[int, typer.Option(min=1, metavar="N")] = 4,
    as_json: Json = False,
) -> None:
    """Args:
    labeled: Samples with rewards: a store, or a log of `agro formats`.
    threshold: From which on the reward says yes; half its maximum if not given.
    label_threshold: From which on a label says yes.
    timeout: Seconds for one response.
    workers: Requests at a time.
    """
    with opened_log(labeled) as store:
        samples = list(store.samples(scored=True))
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
    print(described(report))
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

    def kappa_of(counts: Any) -> float | None:
        """`counts`: [4] of samples where neither says yes, the label alone, the judge alone, and both."""
        neither, label, judge, both = (counts / counts.sum()).tolist()
        by_chance = (judge + both) * (label + both) + (neither + label) * (neither + judge)
        return None if by_chance == 1 else (neither + both - by_chance) / (1 - by_chance)

    # A resample counts only by how many of each of the four kinds it has: whatever n is, four numbers.
    n, counts = len(judged), np.bincount(np.array(judged) @ (2, 1), minlength=4)
    drawn = np.random.default_rng(0).multinomial(n, counts / n, RESAMPLES)
    known = [kappa for kappa in map(kappa_of, drawn) if kappa is not None]
    low, high = np.quantile(known, (0.025, 0.975)).tolist() if known else (None, None)
    agreeing = int(counts[0] + counts[3]) / n
    return {"n": n, "agreement": agreeing, "kappa": kappa_of(counts), "low": low, "high": high}


def described(report: dict[str, Any]) -> str:
    if not report["n"]:
        return f"no sample was judged ({report['failed']} failed)"
    kappa = "κ isn't defined: one of both always says the same"
    if report["kappa"] is not None:
        kappa = f"κ {report['kappa']:.2f} ({report['low']:.2f} to {report['high']:.2f})"
    return (
        f"{report['n']} samples judged, {report['failed']} not: the judge (yes from "
        f"{report['threshold']:g} on) agrees with {report['agreement']:.1%} of the labels, {kappa}"
    )
