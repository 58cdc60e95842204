"""Commands that score, export and delete the samples of stores, and `agro store`: copy, recover, show."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from enum import Enum
from itertools import chain, islice
from pathlib import Path
from shutil import which
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text as RichText

from agro.cli.common import (
    answer,
    leave_out,
    opened_log,
    options,
    pairs,
    passed_options,
    policy_config,
    terminal,
)
from agro.cli.run_models import MeasuredModel
from agro.config import RewardConfig
from agro.errors import Refused
from agro.io.files import complete_folder
from agro.io.terminal import cut as shorten
from agro.io.terminal import plain, visible
from agro.rewards import load_reward
from agro.runs.side_by_side import Answer
from agro.store import Store, recover
from agro.store.copying import to_record
from agro.store.location import url_of
from agro.types import Sample


def export(
    store: Annotated[Path, typer.Argument(metavar="STORE-or-RUN")],
    file: Annotated[Path, typer.Argument()],
    as_json: bool = False,
) -> None:
    """Write the samples of a store, without judgments, as interchange records, which agro import reads.

    Args:
        store: A store, a run, or a model's folder.
        file: For a store, a file that ends with .jsonl, .jsonl.gz or .parquet. For a run or a model, a new
            folder for the model in 16 bits, with any adapter merged.
    """
    if url_of(store) is not None or not store.is_dir():
        with Store.open(store, read_only=True) as opened:
            count = opened.export(file)
        answer({"samples": count, "file": str(file)}, f"{file}: {count} samples", as_json)
        return
    if file.suffix in (".jsonl", ".gz", ".parquet", ".gguf"):
        raise Refused(
            f"{file}: agro export writes a run or a model to a folder of safetensors. What to do: name a "
            f"folder; the samples of a run are in {store / 'store.db'}"
        )
    if file.exists():
        raise Refused(f"{file}: this file or folder exists; use another one, or remove it")
    import torch

    from agro.models.policy import Policy

    is_run = (store / "metrics.jsonl").is_file()
    name = MeasuredModel.of(store, None, flag="another run").name if is_run else str(store)
    policy = Policy.load(policy_config(name, None))
    policy.model.to(torch.bfloat16)
    with complete_folder(file) as unfinished:
        policy.save(unfinished)
    answer({"model": str(file)}, f"wrote {file}", as_json)


def score(
    store: Annotated[Path, typer.Argument()],
    reward: str,
    option: list[str] | None = None,
    missing: bool = False,
    check: bool = False,
    threshold: float | None = None,
    label_threshold: float | None = None,
    timeout: Annotated[float, typer.Option()] = 10.0,  # no minimum, unlike the shared option
    workers: int = 1,
    as_json: bool = False,
) -> None:
    """Args:
    store: The store; with --check also a log in a format of `agro formats`.
    missing: Score only samples without a reward.
    check: Store nothing: report how far the reward agrees with the stored rewards, as labels.
    threshold: With --check: the reward from which on it says yes. Default: half its maximum.
    label_threshold: With --check: the label from which on it says yes; 0.5 for labels from 0 to 1.
    timeout: Seconds per response.
    workers: Worker processes of functions, math and regex; concurrent requests of a judge.
    """
    config = RewardConfig(name=reward, options=options(option), timeout=timeout, workers=workers)
    if check:
        if missing:
            raise Refused("--check reads the samples that have rewards; leave out --missing")
        _check_reward(store, config, threshold, label_threshold, as_json)
        return
    if threshold is not None or label_threshold is not None:
        raise Refused("--threshold and --label-threshold belong to --check; add it, or leave them out")
    from agro.rollout.rollout import EpisodeReward

    done, errors = Counter(scored=0, failed=0, kept=0), Counter[str]()
    with closing(EpisodeReward(load_reward(config))) as scorer, Store.open(store, create=False) as opened:
        samples = opened.samples(scored=False) if missing else opened.samples()
        for part in _complete_episodes(samples, 256):
            metas = [{k: v for k, v in s.meta.items() if k != "reward_error"} for s in part]
            scores = scorer.score([s.replace(reward=None, meta=m) for s, m in zip(part, metas)])
            changed = []
            for s, x in zip(part, scores, strict=True):
                if x.error:
                    errors[x.error] += 1
                if x.value is None and s.reward is not None:  # a failure doesn't delete a reward
                    done["kept"] += 1
                    continue
                done["failed" if x.value is None else "scored"] += 1
                if s.id is not None:
                    changed.append((s.id, x.value, x.meta))
            opened.set_rewards(changed)
    counted = f"{done['scored']} scored, {done['failed']} without a reward, {done['kept']} failed and keep"
    named = [f"  {count} × {error}" for error, count in errors.most_common(5)]
    answer({**done, "errors": errors}, "\n".join([f"{counted} their old one", *named]), as_json)
    if errors and not done["scored"]:
        cause = next(iter(errors))
        raise Refused(f"--reward {reward}: no response could be scored ({cause}); fix the reward")


def _complete_episodes(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Split `samples` into parts of about `size`, without splitting an episode, whose rows are adjacent."""
    part: list[Sample] = []
    for sample in samples:
        if len(part) >= size and (sample.episode is None or sample.episode != part[-1].episode):
            yield part
            part = []
        part.append(sample)
    if part:
        yield part


RESAMPLES = 2000


def _check_reward(
    labeled: Path, config: RewardConfig, threshold: float | None, labeled_from: float | None, as_json: bool
) -> None:
    """Report how far a reward, typically a judge, agrees with the labels of a store or log."""
    with opened_log(labeled) as store:
        samples = list(store.samples(scored=True))
    labels = [sample.reward for sample in samples if sample.reward is not None]
    if not labels:
        raise Refused(f"{labeled}: expected samples with rewards, which are the labels; got none")
    if labeled_from is None:
        if not 0 <= min(labels) <= max(labels) <= 1:
            raise Refused(
                f"{labeled}: expected labels from 0 to 1, got {min(labels):g} to {max(labels):g}. "
                "What to do: set --label-threshold, the label from which on it says yes"
            )
        labeled_from = 0.5
    with closing(load_reward(config)) as judge:
        cutoff = judge.maximum / 2 if threshold is None and judge.maximum is not None else threshold
        if cutoff is None:
            raise Refused(f"--threshold: expected one, since the reward {config.name} has no known maximum")
        if not math.isfinite(cutoff) or not math.isfinite(labeled_from):
            raise Refused(f"expected finite thresholds, got {cutoff} and {labeled_from}")
        scores = judge.score(samples)
    scored = zip(scores, labels, strict=True)
    judged = [(x.value >= cutoff, label >= labeled_from) for x, label in scored if x.value is not None]
    failed = [score.error for score in scores if score.value is None]
    report = agreement(judged) | {"failed": len(failed), "threshold": cutoff}
    agrees = ""
    if judged:
        kappa = "κ isn't defined: one of both always says the same"
        if report["kappa"] is not None:
            kappa = f"κ {report['kappa']:.2f} ({report['low']:.2f} to {report['high']:.2f})"
        agrees = f"; it agrees with {report['agreement']:.1%} of the labels, {kappa}"
    counted = f"{len(judged)} samples judged, {len(failed)} not"
    begin = f"{counted}: yes from {cutoff:g} on, labels from {labeled_from:g} on{agrees}"
    named = [f"  not judged: {error}" for error in list(dict.fromkeys(failed))[:5]]
    answer(report, "\n".join([begin, *named]), as_json)


def agreement(judged: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Compute the share of equal answers and Cohen's κ, (p_o − p_e)/(1 − p_e), with a 95% bootstrap interval.

    `judged`: (the reward's yes, the label's yes) of each sample. κ is None if one of the two is constant:
    then chance explains all agreement.
    """
    import numpy as np

    if not judged:
        return {"n": 0, "agreement": None, "kappa": None, "low": None, "high": None}

    def kappa_of(counts: Any) -> float | None:
        """`counts`: [4] samples where neither says yes, the label alone, the reward alone, and both."""
        neither, label, reward, both = (counts / counts.sum()).tolist()
        chance = (reward + both) * (label + both) + (neither + label) * (neither + reward)
        return None if chance == 1 else (neither + both - chance) / (1 - chance)

    # κ depends on the four counts alone, so a resample is four numbers, whatever n is.
    n, counts = len(judged), np.bincount(np.array(judged) @ (2, 1), minlength=4)
    resamples = np.random.default_rng(0).multinomial(n, counts / n, RESAMPLES)
    finite = [kappa for kappa in map(kappa_of, resamples) if kappa is not None]
    low, high = np.quantile(finite, (0.025, 0.975)).tolist() if finite else (None, None)
    agreeing = int(counts[0] + counts[3]) / n
    return {"n": n, "agreement": agreeing, "kappa": kappa_of(counts), "low": low, "high": high}


TIMEOUT = 3.0  # seconds to wait for other processes to close the store


def forget(
    store: Annotated[Path, typer.Argument()],
    source: str | None = None,
    prompt_id: str | None = None,
    meta: Annotated[str | None, typer.Option(metavar="KEY=VALUE")] = None,
    yes: bool = False,
    as_json: bool = False,
) -> None:
    """Args:
    store: The store.
    source: Delete all samples of this source.
    prompt_id: Delete all samples of this prompt.
    meta: Delete all samples whose meta has this entry, such as user=alice.
    yes: Really delete; without it, only report what would be deleted.
    """
    conditions = {"--source": source, "--prompt-id": prompt_id, "--meta": meta}
    flags = [flag for flag, value in conditions.items() if value is not None]
    if len(flags) != 1:
        raise Refused(f"expected one of {', '.join(conditions)}, got {' and '.join(flags) or 'none'}")
    in_meta = None if meta is None else next(iter(pairs([meta], "--meta", "KEY=VALUE").items()))
    with Store.open(store, create=False, timeout=TIMEOUT) as opened:
        ids = opened.experience.find(source=source, prompt_id=prompt_id, meta=in_meta)
        if not ids:
            raise Refused(f"{store}: no sample has {flags[0]} {conditions[flags[0]]}; see agro store show")
        trained = opened.draws.trained(ids)
        report: dict[str, Any] = {"samples": len(ids), "runs": [run._asdict() for run in trained]}
        runs = "".join(f"\n  {run}" for run in trained)
        runs_text = f"runs that trained on them:{runs}" if trained else "no run trained on them"
        if not yes:
            raise Refused(
                f"{store}: {len(ids)} samples would be deleted for good; {runs_text}\n"
                "Add --yes to delete them"
            )
        opened.imports.forget(ids)
    lines = [f"deleted: {len(ids)} samples, with their judgments, from {shlex.quote(str(store))}", runs_text]
    if trained:
        lines.append(
            "Their weights, pages (report.html) and logs still hold what they learned or showed of these "
            "samples; delete those, or train again. A resumed run draws from the remaining samples."
        )
    answer(report, "\n".join(lines), as_json)


class Action(Enum):
    copy = "copy"
    recover = "recover"
    show = "show"


EXPECTED = {
    Action.copy: (2, "OLD NEW"),
    Action.recover: (2, "DAMAGED NEW"),
    Action.show: (1, "STORE"),
}
SELECTING = ("groups", "reward", "source", "prompt", "prompt_id", "newest", "limit")  # options of show


def store(
    context: typer.Context,
    action: Annotated[
        Action,
        typer.Argument(
            help="copy: a store to a new one, a file or postgresql://…; recover: write all undamaged data to "
            "a new store, and report losses; show: samples, up to 500 in a pager, or 10 outside a terminal."
        ),
    ],
    stores: Annotated[
        list[Path],
        typer.Argument(help="copy, recover: OLD and NEW. show: the store."),
    ],
    groups: bool = False,
    reward: Annotated[str | None, typer.Option(metavar="LOW:HIGH")] = None,
    source: list[str] | None = None,
    prompt: str | None = None,
    prompt_id: str | None = None,
    newest: bool = False,
    limit: Annotated[int | None, typer.Option(min=0)] = None,
    as_json: bool = False,
) -> None:
    """Args:
    groups: show: the responses to each prompt side by side.
    reward: show: only rewards in this range, such as 0.5:
    source: show: only this source; may be repeated.
    prompt: show: only prompts that contain this text, ignoring case.
    prompt_id: show: only this prompt.
    newest: show: the newest first.
    limit: show: maximal number of samples, or groups; 0 shows all.
    """
    count, expected = EXPECTED[action]
    if len(stores) != count:
        given_stores = " ".join(map(str, stores))
        raise Refused(f"agro store {action.value}: expected {expected}, got {given_stores}")
    if action is Action.show:
        has_reward = in_range(reward, "--reward")

        def fits(sample: Sample) -> bool:
            is_asked = prompt is None or prompt.casefold() in plain(sample.prompt).casefold()
            return is_asked and has_reward(sample.reward)

        with Store.open(stores[0], read_only=True) as opened:
            unknown = set(source or ()) - opened.counts().sources.keys()
            if unknown:
                sources = ", ".join(map(repr, opened.counts().sources)) or "none"
                raise Refused(f"--source {unknown.pop()!r}: expected one of {sources}")
            find = _groups if groups else _samples
            matches = find(opened, fits, newest, prompt_id=prompt_id, sources=source)
            _show(opened, stores[0], matches, groups, limit, as_json)
        return
    wrong = [name for name in passed_options(context) if name in SELECTING]
    leave_out(context, f"agro store {action.value} takes stores alone", wrong)
    old, new = stores
    if action is Action.recover:
        recovered = recover(old, new)
        answer(recovered.to_json(), str(recovered), as_json)
        return
    from agro.store.copying import copy

    copy(old, new)
    with Store.open(new, read_only=True) as copied_store:
        counts = copied_store.counts()
    copied = {"store": str(new), "samples": counts.samples, "groups": counts.groups}
    answer(copied, f"{new}: {counts.samples} samples in {counts.groups} groups", as_json)


COLUMN = 26  # minimal width of a response's column, in characters
LONGEST = 800  # characters of a text
UNPAGED, PAGED = 10, 500  # default limits of samples, or groups: printed, and in a pager
BLOCK = 256  # samples read at once if the newest come first


def in_range(text: str | None, flag: str) -> Callable[[float | None], bool]:
    """Return a test for LOW:HIGH, both inclusive; an empty end is unbounded, and an unknown value fails."""
    if text is None:
        return lambda value: True
    low, colon, high = text.partition(":")
    try:
        lowest, highest = float(low or "-inf"), float(high or "inf")
    except ValueError:
        lowest = highest = math.nan
    if not colon or not lowest <= highest:
        raise Refused(f"{flag} {text!r}: expected LOW:HIGH, one of which may be empty, such as 0.5:1 or :0")
    return lambda value: value is not None and lowest <= value <= highest


def _samples(
    store: Store, fits: Callable[[Sample], bool], newest: bool, **selection: Any
) -> Iterator[list[Sample]]:
    """Yield each matching sample, alone."""
    samples: Iterable[Sample] = store.samples(**selection)
    if newest:
        ids = [row.id for row in store.survey.summaries(**selection)][::-1]
        blocks = (ids[start : start + BLOCK] for start in range(0, len(ids), BLOCK))
        samples = chain.from_iterable(reversed(list(store.samples(ids=block))) for block in blocks)
    return ([sample] for sample in samples if fits(sample))


def _groups(
    store: Store, fits: Callable[[Sample], bool], newest: bool, prompt_id: str | None, sources: Any
) -> Iterator[list[Sample]]:
    """Yield the matching responses of each group, the best first, and groups in the order they began.

    `newest`: sort responses and groups by their newest sample, newest first.
    """
    prompt_ids = [group.prompt_id for group in store.groups(sources=sources)]
    if newest:
        rows = reversed(store.survey.summaries(sources=sources))
        prompt_ids = list(dict.fromkeys(row.prompt_id for row in rows))
    for group in prompt_ids:
        if prompt_id in (None, group):
            matches = list(filter(fits, store.samples(prompt_id=group, sources=sources)))
            if newest:
                matches.reverse()
            else:
                matches.sort(key=lambda s: -math.inf if s.reward is None else s.reward, reverse=True)
            if matches:
                yield matches


def _show(
    store: Store,
    path: Path,
    matches: Iterator[list[Sample]],
    groups: bool,
    limit: int | None,
    as_json: bool,
) -> None:
    """Show samples, alone or by prompt, up to a limit; without one in the terminal's pager, if any."""
    pager = os.environ.get("MANPAGER") or os.environ.get("PAGER") or "less"
    is_paged = limit is None and not as_json and sys.stdout.isatty() and which(pager.partition(" ")[0])
    default_limit = PAGED if is_paged else UNPAGED
    count = default_limit if limit is None else limit
    shown = list(islice(matches, count or None))
    more = bool(count) and next(matches, None) is not None
    total = store.counts().samples
    if as_json:
        rows: list[Any] = []
        for match in shown:
            records = [{"id": s.id, **to_record(s)} for s in match]
            prompt = {"prompt_id": match[0].prompt_id, "prompt": match[0].prompt}
            rows.append(prompt | {"responses": records} if groups else records[0])
        report = {"store": str(path), "samples_in_store": total, "more": more}
        report["groups" if groups else "samples"] = rows
        print(json.dumps(report, allow_nan=False))  # ASCII: responses may have lone surrogates
        return
    console = terminal()
    if not shown:
        console.print(f"none of {total:,} samples matches")
    pager_settings = {"LESS": "FRX", "LESSCHARSET": "utf-8"}  # like git: quit if the page fits, show colors
    os.environ |= pager_settings | os.environ
    with console.pager(styles=True) if is_paged and shown else nullcontext():
        for match in shown:
            _print(console, match)
        if more:
            console.print(f"there are more of the {total:,} samples (--limit 0 shows all)")


def _print(console: Console, samples: Sequence[Sample]) -> None:
    """Print a prompt and its responses, side by side if the terminal is wide enough."""
    rewards = [s.reward for s in samples if s.reward is not None]
    spread = f", rewards {min(rewards):g} to {max(rewards):g}" if len(rewards) > 1 else ""
    count = f": {len(samples)} responses{spread}" if len(samples) > 1 else ""
    console.print(RichText(f"prompt {visible(samples[0].prompt_id)}{count}", "bold"))
    console.print(RichText(shorten(plain(samples[0].prompt), LONGEST), "cyan"))
    width = max(COLUMN, console.width // len(samples) - 1)
    if len(samples) > 1:
        console.print(Columns([_response(s) for s in samples], width=width))
    else:
        console.print(_response(samples[0]))
    console.print()


def _response(s: Sample) -> Group:
    """Format a response's reward, source, version, length and kept-set size, and its text."""
    source = visible(s.source or s.role) + (f" ({s.role})" if s.source and s.source != s.role else "")
    length = f"{len(s.response):,} characters"
    if s.action is not None:
        length = f"{int(s.action.sum()):,} tokens"
    facts = [
        f"sample {s.id}",
        "no reward" if s.reward is None else f"reward {s.reward:g}",
        source,
        "version unknown" if s.oldest_version < 0 else f"version {s.oldest_version}",
        length,
    ]
    if s.kept_count is not None:
        sizes = s.kept_count[s.kept_count > 0]
        facts.append(f"kept sets of {sizes.mean():.1f} ids" if len(sizes) else "nothing excluded")
    text = RichText(shorten(s.response, LONGEST) or "(empty)", overflow="fold")
    for start, end in Answer.of([s]).observations:  # the environment's turns
        text.stylize("dim italic", start, end)
    parts = [RichText("  ".join(facts), "bold"), text]
    if s.meta.get("reward_error") is not None:
        parts.append(RichText("reward failed: " + shorten(str(s.meta["reward_error"]), LONGEST), "red"))
    return Group(*parts)
