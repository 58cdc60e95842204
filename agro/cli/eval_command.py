"""`agro eval`: measure a model's accuracy and pass@k, alone or against the start of its run, by a reward or
by blind human ratings: `--blind`, `--ratings`, and `agro rate`, the same as a page. `--log` estimates its
reward from another model's log, without sampling. Responses are stored as they finish, so that a kill loses
few."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from agro.cli.common import answer, end, leave_out, opened_log, options, passed_options
from agro.cli.run_models import START, MeasuredModel, check_against, environment_of, load_sets
from agro.config import DataConfig, SamplerConfig
from agro.errors import Refused
from agro.io.numbers import chance, fixed
from agro.io.record_files import fingerprint
from agro.io.terminal import cut, plain
from agro.pages.run.card import write_cards
from agro.pages.run.evaluation import by_prompt, summary
from agro.pages.run.ratings import (
    Ratings,
    Test,
    answer_both,
    check_free,
    fewest_more,
    key_of,
    read_key,
    read_ratings,
    write_sheet,
)
from agro.pages.run.verdict import Verdict
from agro.pages.store.value_on_log import WAY_OUT, value_on_log
from agro.rollout import Task, collect
from agro.rollout.evaluate import Heldout, heldout
from agro.rollout.prompts import places
from agro.runs.progress import RunActivity
from agro.runs.rundata import load_run
from agro.runs.side_by_side import place
from agro.stats.paired import compare, holm
from agro.store import Store
from agro.store.location import Location, url_of
from agro.store.split import clusters
from agro.types import Prompt

if TYPE_CHECKING:
    from agro.models.policy import Policy
    from agro.pages.store.check_survey import Contamination
    from agro.rollout.rollout import EpisodeReward, Rollout

HELD_OUT = "held-out prompts"
SHOWN = 300  # characters of a response on the terminal


def eval_(
    context: typer.Context,
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]")] = None,
    model: str | None = None,
    prompts: list[Path] | None = None,
    reward: str | None = None,
    option: list[str] | None = None,
    pass_at: float | None = None,
    n: int = 8,
    max_new: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    policy: list[str] | None = None,
    environment: str | None = None,
    max_turns: int | None = None,
    against: str | None = None,
    blind: Annotated[Path | None, typer.Option(metavar="FILE.csv")] = None,
    ratings: Annotated[Path | None, typer.Option(metavar="FILE.csv")] = None,
    out: Path | None = None,
    store: Path | None = None,
    log: Path | None = None,
    as_json: bool = False,
) -> None:
    """Args:
    run: A run, which provides the model, held-out prompts, reward, environment and lengths.
    model: Folder or hub name of a causal language model, or RUN/checkpoints/step-N.
    prompts: A set of prompts, with the columns that the reward reads; may be repeated.
    pass_at: The reward from which a response passes. Default: the reward's maximum.
    against: start: compare with the run's start on the same prompts, paired, and measure the KL
        divergence from it.
    blind: With --against: write the responses of start and result to this sheet, for people to rate.
    ratings: Read a rated sheet back, and store its verdict in the run.
    out: Write rewards and responses here, one prompt per line; for several sets, to a folder.
    store: Store the responses here as they finish: after a kill the same command samples the rest.
    log: Sample nothing: estimate the model's mean reward from another model's log with known log-probs,
        or say why there is no estimate.
    """
    check_against(against, run)
    if log is not None or ratings is not None:
        reason, allowed = WITH_LOG if log is not None else WITH_RATINGS
        leave_out(context, reason, set(passed_options(context)) - set(allowed))
        if log is not None:
            show_by_log(MeasuredModel.of(run, model, policy), log, as_json)
        elif ratings is not None:
            if run is None:
                raise Refused("--ratings: expected the folder of the run that was rated, got none")
            read_blind(run, ratings, as_json)
        return
    if blind is not None:
        _check_blind(context, blind, against)
    if pass_at is not None and not math.isfinite(pass_at):
        raise Refused(f"--pass-at: expected a finite number, got {pass_at}")
    subject = MeasuredModel.of(run, model, policy).playing(environment_of(environment, max_turns))
    if prompts:
        loaded = zip(load_sets(prompts).items(), prompts, strict=True)
        sets = [MeasuredSet(name, contents, file=path) for (name, contents), path in loaded]
    else:
        sets = [MeasuredSet(HELD_OUT, subject.held_out())]
    sampler = subject.sampler(n, temperature, max_new)
    if blind is not None:
        all_prompts = [prompt for measured in sets for prompt in measured.prompts]
        show_written(write_blind(blind, subject, all_prompts, sampler, seed), subject, as_json)
        return

    scoring = subject.reward(reward, options(option))
    location = None if store is None else url_of(store) or store.absolute()
    with subject.scorer(scoring, reward) as scorer:
        measurement = Measurement(scorer, sampler, seed, location)
        maximum = _measure(sets, subject, measurement, with_start=against is not None)
    _write(sets, out, {"scored_by": scoring.model_dump(include={"name", "options"})})
    configured = None if subject.ran is None else subject.ran.evaluate.pass_at
    threshold = next((x for x in (pass_at, configured, maximum) if x is not None), None)
    _report(sets, {"model": subject.name, "n": n, "temperature": temperature}, threshold, as_json)
    if run is not None and model is None and against is None and not as_json:
        verdict = Verdict.of(load_run(run))
        if verdict.answer != "not measured":
            measured_then = f"before and after, at the run's end: {verdict.sentence}"
            print(f"{measured_then} To measure both again: --against start")
    if all(measured.result.is_unknown for measured in sets):
        end(2, "agro: no response could be scored, so nothing was measured")


NOT_WITH_BLIND = ("model", "reward", "option", "pass_at", "n", "out", "store")


def _check_blind(context: typer.Context, sheet: Path, against: str | None) -> None:
    """Refuse a sheet of one model, options without an effect on it, and overwriting ratings."""
    if against is None:
        raise Refused("--blind: expected --against start with it, got none")
    wrong = [name for name in passed_options(context) if name in NOT_WITH_BLIND]
    leave_out(
        context, "--blind: a sheet has a response of the run's start and of its result, no reward", wrong
    )
    check_free(sheet)


# Why an option excludes others, and those that it allows.
WITH_RATINGS = (
    "--ratings only reads a sheet, with the folder of the run and --json",
    ("run", "against", "ratings", "as_json"),
)
WITH_LOG = "--log samples and scores nothing", ("run", "model", "policy", "log", "as_json")


@dataclass(frozen=True)
class Measurement:
    """How to sample and score responses. `store`: where to keep them, if anywhere."""

    scorer: EpisodeReward
    sampler: SamplerConfig
    seed: int
    store: Location | None = None

    def of(self, rollout: Rollout, model: str, prompts: Sequence[Prompt]) -> Heldout:
        """Measure a model. Responses that the store has from the same weights, prompts and settings are
        reused."""
        activity, ledger = RunActivity(), ""
        if self.store is not None:
            decides = {
                "model": fingerprint(model) if Path(model).is_dir() else model,
                "tokenizer": rollout.encoder.fingerprint,
                "prompts": [[prompt.id, prompt.text] for prompt in prompts],
                "sampler": self.sampler.model_dump(mode="json"),
                "seed": self.seed,
                "environment": None if rollout.environment is None else rollout.environment.name,
            }
            ledger = f"eval:{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]}"
        with TemporaryDirectory() as folder, Store.open(self.store or Path(folder) / "eval.db") as store:
            earlier = len(store.experience.find_in_ledger(ledger, range(len(prompts)))) if ledger else 0
            if earlier:
                print(f"{self.store}: {earlier} responses are stored already", file=sys.stderr)
            task = Task(seed=self.seed, ledger=ledger)
            done = collect(rollout, prompts, self.sampler, store, task, activity=activity)
            activity.close()
            stored = list(store.samples(ids=done.ids))
            result = heldout(rollout, self.scorer, prompts, self.sampler, self.seed, stored)
            if self.store is not None:
                store.set_rewards((s.id or 0, s.reward, {}) for s in result.samples)
            return result


def policy_of(rollout: Rollout) -> Policy:
    """Return the model in this process that a rollout samples from."""
    from agro.rollout.engines.hf import HF

    assert isinstance(rollout.engine, HF)
    return rollout.engine.policy


def along_samples(
    rollout: Rollout, other: Rollout | None, result: Heldout, temperature: float
) -> dict[str, NDArray[np.float64]]:
    """Compute [M,n] per response: the mean entropy of its tokens' distributions, in nats, and with another
    model the sum of their exact KL divergences from it, whose mean is the KL of complete responses.

    Empty at a temperature other than the policy's; no KL if the tokenizers differ.
    """
    policy = policy_of(rollout)
    if temperature != policy.temperature or any(s.tokens is None for s in result.samples):
        return {}
    reference = None
    if other is not None and other.encoder.fingerprint == rollout.encoder.fingerprint:
        reference = policy_of(other)
    want = ["entropy"] if reference is None else ["entropy", "kl"]
    from agro.pages.store.measurements import streams_along

    streams = streams_along(policy, result.samples, want, reference)
    position = {id(sample): i for i, sample in enumerate(result.samples)}
    measures = {}
    for name, rows in streams.items():
        joined = [np.concatenate([rows[position[id(s)]] for s in r]) for r in result.responses]
        values = [float(x.sum() if name == "kl" else x.mean()) for x in joined]
        measures[name] = np.array(values).reshape(result.rewards.shape)
    return measures


@dataclass
class MeasuredSet:
    """A set of prompts and its measurements. `start`: result of the model compared with; `along`: [M,n] per
    response, by name, from `along_samples`; `seen`: which prompts the run was trained on."""

    name: str
    prompts: list[Prompt]
    result: Heldout = field(init=False)
    start: Heldout | None = None
    along: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    verdict: Verdict | None = None
    seen: Contamination | None = None
    file: Path | None = None  # source of the prompts, if one was named

    def measure(self, measurement: Measurement, rollout: Rollout, model: str) -> Heldout:
        """Measure a model. Refuses a prompt that the model can't take, with its FILE:LINE."""
        from agro.models.encoding import InvalidSample

        try:
            return measurement.of(rollout, model, self.prompts)
        except InvalidSample as error:
            named = [prompt.id for prompt in self.prompts if str(error).startswith(f"prompt {prompt.id}:")]
            lines = places([self.file], None, named) if self.file is not None else {}
            position = "".join(f"{line}: " for line in lines.values())
            raise Refused(f"{position}{error}. What to do: remove or shorten it") from None

    def to_json(self, threshold: float | None) -> dict[str, Any]:
        document = {"name": self.name, "prompts": len(self.prompts)}
        document |= summary(self.result, threshold, self.along)
        if self.seen is not None:
            document["seen"] = asdict(self.seen)
        if self.start is not None and self.verdict is not None:
            document |= {"verdict": self.verdict.to_json(), "before": summary(self.start, threshold)}
        return document


def _measure(
    sets: list[MeasuredSet], subject: MeasuredModel, measurement: Measurement, *, with_start: bool
) -> float | None:
    """Measure the sets, and compare each with the start if required; several p are adjusted (Holm).

    Returns the maximum of the reward or the environment; None: unknown.
    """
    rollout, start = subject.rollout(), subject.start() if with_start else None
    for measured in sets:
        measured.result = measured.measure(measurement, rollout, subject.path)
    if start is not None:
        similarity, comparisons = (subject.ran.data if subject.ran else DataConfig()).near_copies, []
        for measured in sets:
            measured.start = measured.measure(measurement, start, f"{START} of {subject.run}")
            labels = clusters([plain(prompt.text) for prompt in measured.prompts], similarity).tolist()
            comparisons.append(compare(measured.start.rewards, measured.result.rewards, labels))
        adjusted = holm([comparison.p for comparison in comparisons])
        for measured, comparison, p in zip(sets, comparisons, adjusted):
            measured.verdict = Verdict.compared(replace(comparison, p=p))
    for measured in sets:
        measured.along = along_samples(rollout, start, measured.result, measurement.sampler.temperature)
        measured.seen = subject.seen(measured.prompts)
    if measurement.scorer.of_environment:
        return getattr(rollout.environment, "maximum", None)
    return measurement.scorer.maximum


def _write(sets: list[MeasuredSet], out: Path | None, scored_by: dict[str, Any]) -> None:
    """Write files for `agro compare`: one prompt per line, several sets in a folder."""
    for measured in sets if out else ():
        assert out is not None
        path = out if len(sets) == 1 else out / f"{measured.name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        records = [json.dumps(x | scored_by, ensure_ascii=False) for x in by_prompt(measured.result)]
        path.write_text("".join(f"{record}\n" for record in records), encoding="utf-8")


def _report(
    sets: list[MeasuredSet],
    common: dict[str, Any],
    threshold: float | None,
    as_json: bool,
) -> None:
    """Report one set next to the common fields, or several in `sets`."""
    if as_json:
        documents = [measured.to_json(threshold) for measured in sets]
        one = {key: value for key, value in documents[0].items() if key != "name"}
        answer(common | (one if len(sets) == 1 else {"sets": documents}), "", as_json)
        return
    for measured in sets:
        prefix = "" if len(sets) == 1 else f"{measured.name}: "
        size = f"{len(measured.prompts)} prompts × {common['n']} responses"
        print(f"{prefix}{size} of {common['model']} at temperature {common['temperature']}")
        _show(measured, threshold)
        if measured.verdict is not None:
            print(f"against the start: {measured.verdict.sentence}")
    if sets[0].verdict is not None and len(sets) > 1:
        print(f"p is adjusted for {len(sets)} sets (Holm)")


UNITS = {"length": " tokens", "entropy": " nats per token", "kl": " nats per response"}


def _show(measured: MeasuredSet, threshold: float | None) -> None:
    result = measured.result
    baseline = {} if measured.start is None else summary(measured.start, threshold)
    for key, row in summary(result, threshold, measured.along).items():
        if isinstance(row, dict):
            earlier = f", before {_row(baseline[key])}" if key in baseline else ""
            print(f"{key}: {_row(row)}{UNITS.get(key, '')}{earlier}")
    if threshold is None:
        print(
            "accuracy, pass@k: not measured, since the reward declares no maximum; use --pass-at REWARD, set "
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
            text = " → ".join(cut(repr(text), SHOWN) for text in (sample.prompt, sample.response))
            print(f"{title} (reward {sample.reward:g}): {text}")
    if measured.seen is not None:
        print(f"seen in training: {measured.seen.sentence}")


def _row(row: dict[str, Any]) -> str:
    """Format a value with its interval."""
    if row["value"] is None:
        return "unknown"
    text = f"{row['value']:.4f}"
    return text if row["low"] is None else f"{text}  [{row['low']:.4f}, {row['high']:.4f}]"


def show_by_log(subject: MeasuredModel, path: Path, as_json: bool) -> None:
    """Report the reward that a log predicts for a model, and the uncertainty."""
    if url_of(path) is None and not path.exists():
        raise Refused(f"--log {path}: no such file")
    from agro.pages.store.measurements import RescoredLog

    with opened_log(path) as store:
        log = list(store.samples())
    rescored = RescoredLog.of(log, policy_of(subject.rollout()))
    if not rescored.responses:
        raise Refused(
            f"--log {path}: expected responses that the model can read, got none of {len(log)}; "
            f"dropped: {dict(rescored.dropped) or 'nothing'}"
        )
    scored = rescored.scored()
    prompts = {sample.prompt_id: Prompt(sample.prompt, sample.prompt_id) for sample in log}
    seen = subject.seen(list(prompts.values()))
    obstacle = scored.obstacle()
    value: dict[str, Any] = {"answer": "not estimable", "obstacle": obstacle, "instead": WAY_OUT}
    if not obstacle:
        value = value_on_log(scored.logged()).to_json()
    if as_json:
        report = {"log": str(path), "model": subject.name, "responses": len(scored.responses)}
        report |= {"dropped": scored.dropped, "seen": None if seen is None else asdict(seen)}
        answer(report | {"value": value}, "", as_json)
        return
    print(f"{subject.name} by {len(scored.responses)} responses of {path}")
    if scored.dropped:
        print("dropped: " + ", ".join(f"{count} ({reason})" for reason, count in scored.dropped.items()))
    if seen is not None:
        print(f"seen in training: {seen.sentence}")
    if value["answer"] == "not estimable":
        print(f"Not estimable: {value['obstacle']}. What to do: {value['instead']}")
        return
    gain = f"{_row(value['gain'])}, {chance(value['gain']['p'])}"
    author = f"what wrote the log, whose mean reward is {fixed(value['behavior'])}"
    print(f"{value['answer'].capitalize()} against {author}: {gain} (doubly robust)")
    counting = f"{value['ess']:.0f} of {value['responses']} responses count, of {value['clusters']} prompts"
    print(f"{counting}; the mean weight is {_row(value['mean_weight'])}")
    if value["caution"]:
        print(value["caution"].capitalize())
    for name, estimate in value["estimates"].items():
        print(f"  {name.replace('_', ' ')}: {_row(estimate)}")


def write_blind(
    sheet: Path,
    subject: MeasuredModel,
    prompts: Sequence[Prompt],
    sampler: SamplerConfig,
    seed: int,
    test: Test = "sign",
) -> dict[str, Any]:
    """Sample from the start and the result of a run, write the sheet, and return its report."""
    assert subject.run is not None  # see `check_against`
    answered = answer_both(subject.start(), subject.rollout(), prompts, sampler, seed)
    ran = load_run(subject.run)
    origin = {"model": subject.name, "run": ran.values.get("run"), "step": ran.steps, "test": test}
    write_sheet(sheet, answered, seed, origin)
    same, failed = sum(a.start == a.result for a in answered), len(prompts) - len(answered)
    files = {"sheet": str(sheet), "key": str(key_of(sheet))}
    return {**files, "prompts": len(answered), "failed": failed, "same": same}


def show_written(report: dict[str, Any], subject: MeasuredModel, as_json: bool) -> None:
    sheet = report["sheet"]
    lines = [f"{sheet}: {report['prompts']} prompts; write left, right or tie in the column better of each"]
    if report["same"]:
        lines.append(f"{report['same']} of them have the same response on both sides: a tie")
    if report["failed"]:
        lines.append(f"{report['failed']} prompts are left out, since their environment failed")
    lines.append(f"{report['key']} says which side is whose; then: agro eval {subject.run} --ratings {sheet}")
    answer(report, "\n".join(lines), as_json)


def read_blind(run: Path, sheet: Path, as_json: bool) -> None:
    """Report the verdict of a sheet's ratings, and store them in the run's folder."""
    key = read_key(sheet)
    values = read_ratings(sheet)
    if np.isnan(values).all():
        raise Refused(f"{sheet}: none of its {len(values)} rows is rated; write left, right or tie in better")
    ratings = Ratings.of(values, key["step"], key["test"])
    check_of(run, sheet, key)
    ratings.save(run)
    write_cards(run)
    verdict = Verdict.rated(ratings)
    report = {"sheet": str(sheet), "model": key["model"], "verdict": verdict.to_json()}
    answer(report, verdict.sentence, as_json)
    if not as_json:
        location = f"stored in {run / 'ratings.json'} and in the model cards; agro report {run} shows it"
        print(location, file=sys.stderr)


def check_of(run: Path, sheet: Path, key: dict[str, Any]) -> None:
    """Raise `Refused` unless a sheet compares the run with its start."""
    is_of_start = key.get("against", START) == START
    if key["run"] is None or load_run(run).values.get("run") != key["run"] or not is_of_start:
        raise Refused(
            f"{sheet}: its ratings are of {key['model']}, not of {run} against its start; use its run"
        )


SHEET = "rate.csv"  # in the run's folder
PAIRS = 200  # maximal prompts, chosen by a hash of their ids


def rate(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    port: int = 0,
    host: str = "127.0.0.1",
    prompts: list[Path] | None = None,
) -> None:
    """Args:
    run: A run, which provides the start, the result and the prompts.
    host: Address to listen on; 0.0.0.0: all, for a phone in your network.
    prompts: Prompts to use instead of the run's held-out ones; may be repeated.
    """
    from agro.pages.run.rate import RateServer, Rating

    sheet = run / SHEET
    if not sheet.exists():
        subject = MeasuredModel.of(run, None)
        loaded = [p for read in load_sets(prompts).values() for p in read] if prompts else subject.held_out()
        used = sorted(loaded, key=lambda prompt: place(prompt.id))[:PAIRS]
        print(f"sampling an answer of each model to {len(used)} of {len(loaded)} prompts …", file=sys.stderr)
        fewest = fewest_more(0, 0)
        if len(used) < fewest:
            print(f"note: a decision needs {fewest} pairs or more; --prompts FILE adds some", file=sys.stderr)
        seen = subject.seen(used)
        if seen is not None:
            print(f"seen in training: {seen.sentence}", file=sys.stderr)
        write_blind(sheet, subject, used, subject.sampler(1, 1.0, None), 0, "sequential")
    elif prompts:
        raise Refused(
            f"--prompts: {sheet} exists, with answers to its own prompts; leave the option out, or remove "
            f"{sheet} and its key, with all ratings"
        )
    key, steps = read_key(sheet), load_run(run).steps
    check_of(run, sheet, key)
    if key["test"] != "sequential" or key["step"] != steps:
        raise Refused(
            f"{sheet}: expected answers of step {steps} that agro rate sampled, got step {key['step']} and "
            f"the test {key['test']}; remove it and its key, or rename both"
        )
    rating = Rating(run, sheet, steps)
    with RateServer(rating, port, host) as server:
        print("each rating is stored at once; Ctrl-C ends this, the same command continues", file=sys.stderr)
        server.serve_until_interrupted(f"serving {server.address}?token={server.token}")
    ratings = rating.ratings()
    if ratings.decided or not ratings.unrated:
        read_blind(run, sheet, as_json=False)
