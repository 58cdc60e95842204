"""Commands that score, export and delete what stores have, and `agro store`: copy, recover, show."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from enum import Enum
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text as RichText

from agro.cli.common import (
    REWARD,
    Json,
    RewardOption,
    given,
    leave_out,
    licenses,
    opened_log,
    options,
    pairs,
    policy_config,
    terminal,
)
from agro.cli.run_models import MeasuredModel
from agro.config import RewardConfig
from agro.errors import Refused
from agro.io.files import complete_folder
from agro.io.terminal import cut as shorten
from agro.io.terminal import plain, visible
from agro.rewards import check_name, load_reward
from agro.runs.side_by_side import Answer
from agro.store import Store, recover
from agro.store.export import to_record
from agro.store.location import url_of
from agro.types import Sample


def export(
    store: Annotated[Path, typer.Argument(metavar="STORE-or-RUN")],
    file: Annotated[Path, typer.Argument()],
    as_json: Json = False,
) -> None:
    """Write the samples of a store, without judgments, as interchange records, which agro import takes.

    Args:
        store: The store; a run, or the folder of a model.
        file: A file that ends with .jsonl, .jsonl.gz or .parquet. Of a run or a model a new folder, with the
            model in 16 bits, an adapter merged.
    """
    if url_of(store) is None and store.is_dir():
        if file.suffix in (".jsonl", ".gz", ".parquet", ".gguf"):
            raise Refused(
                f"{file}: of a run or a model agro export writes a folder of safetensors. What to do: give a "
                f"folder; the samples of a run are in {store / 'store.db'}"
            )
        write_merged(store, file)
        print(json.dumps({"model": str(file)}) if as_json else f"wrote {file}")
        return
    with Store.open(store, read_only=True) as opened:
        count = opened.export(file)
    print(json.dumps({"samples": count, "file": str(file)}) if as_json else f"{file}: {count} samples")


def write_merged(run: Path, folder: Path) -> None:
    """Write the model of a run, or a model's folder, in bfloat16, an adapter merged into it."""
    import torch

    from agro.models.policy import Policy

    if folder.exists():
        raise Refused(f"{folder}: there is such a file or folder; give another one, or remove it")
    is_run = (run / "metrics.jsonl").is_file()
    name = MeasuredModel.of(run, None, flag="another run").name if is_run else str(run)
    policy = Policy.load(policy_config(name, None))
    policy.model.to(torch.bfloat16)
    with complete_folder(folder) as unfinished:
        policy.save(unfinished)


def score(
    store: Annotated[Path, typer.Argument()],
    reward: Annotated[str, REWARD],
    option: RewardOption = None,
    missing: bool = False,
    check: bool = False,
    threshold: float | None = None,
    label_threshold: float | None = None,
    timeout: float = 10.0,
    workers: Annotated[int, typer.Option(min=1, metavar="N")] = 1,
    as_json: Json = False,
) -> None:
    """Args:
    store: The store; with --check also a log of `agro formats`.
    missing: Only samples without a reward.
    check: Store nothing: say how far the reward agrees with the rewards that are there, as labels.
    threshold: With --check: from which on the reward says yes; half its maximum where it isn't given.
    label_threshold: With --check: from which on a label says yes; 0.5 where labels are from 0 to 1.
    timeout: Seconds for one response.
    workers: Processes of a reward that has some: functions, math, regex; requests of a judge at a time.
    """
    config = RewardConfig(name=reward, options=options(option), timeout=timeout, workers=workers)
    if check:
        if missing:
            raise Refused("--check reads the samples that have rewards; leave out --missing")
        _check_reward(store, config, threshold, label_threshold, as_json)
        return
    if threshold is not None or label_threshold is not None:
        raise Refused("--threshold and --label-threshold are of --check; add it, or leave them out")
    Store.open(store, create=False).close()  # refused before torch is imported: that takes seconds
    check_name(reward)
    from agro.rollout.rollout import EpisodeReward

    done: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    with closing(EpisodeReward(load_reward(config))) as scorer, Store.open(store, create=False) as opened:
        samples = opened.samples(scored=False) if missing else opened.samples()
        for part in _complete_episodes(samples, 256):
            metas = [{k: v for k, v in s.meta.items() if k != "reward_error"} for s in part]
            scores = scorer.score([s.replace(reward=None, meta=m) for s, m in zip(part, metas)])
            changed = []
            for s, x in zip(part, scores, strict=True):
                outcome = "scored"
                if x.value is None:
                    outcome = "failed" if s.reward is None else "kept"
                done[outcome] += 1
                if x.error:
                    errors[x.error] += 1
                if s.id is not None and outcome != "kept":  # a failure doesn't delete a reward
                    changed.append((s.id, x.value, x.meta))
            opened.set_rewards(changed)
    if as_json:
        counts = {name: done[name] for name in ("scored", "failed", "kept")}
        print(json.dumps({**counts, "errors": errors}, ensure_ascii=False))
    else:
        print(
            f"{done['scored']} scored, {done['failed']} without a reward, {done['kept']} failed and keep "
            "their old one"
        )
        for error, count in errors.most_common(5):
            print(f"  {count} × {error}")
    if errors and not done["scored"]:
        cause = next(iter(errors))
        raise Refused(f"--reward {reward}: no response could be scored (for one: {cause}); fix the reward")


def _complete_episodes(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """`samples` in parts of about `size`; the rows of an episode, which follow each other, share a part."""
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
    """Say how far a reward, most often a judge, agrees with the labels of a store or log."""
    with opened_log(labeled) as store:
        samples = list(store.samples(scored=True))
    if not samples:
        raise Refused(f"{labeled}: expected samples with rewards, which are the labels; got none")
    if labeled_from is None:
        labels = [sample.reward for sample in samples if sample.reward is not None]
        if not 0 <= min(labels) <= max(labels) <= 1:
            raise Refused(
                f"{labeled}: expected labels from 0 to 1, got {min(labels):g} to {max(labels):g}. "
                "What to do: say with --label-threshold from which on one says yes"
            )
        labeled_from = 0.5
    with closing(load_reward(config)) as judge:
        least = judge.maximum / 2 if threshold is None and judge.maximum is not None else threshold
        if least is None:
            raise Refused(f"--threshold: expected one, since the reward {config.name} has no known maximum")
        if not math.isfinite(least) or not math.isfinite(labeled_from):
            raise Refused(f"expected finite thresholds, got {least} and {labeled_from}")
        scores = judge.score(samples)
    judged = [
        (score.value >= least, sample.reward >= labeled_from)
        for sample, score in zip(samples, scores, strict=True)
        if score.value is not None and sample.reward is not None
    ]
    failed = [score.error for score in scores if score.value is None]
    report = agreement(judged) | {"failed": len(failed), "threshold": least}
    if as_json:
        print(json.dumps(report))
        return
    kappa = "κ isn't defined: one of both always says the same"
    if report["kappa"] is not None:
        kappa = f"κ {report['kappa']:.2f} ({report['low']:.2f} to {report['high']:.2f})"
    agrees = "" if not judged else f"; it agrees with {report['agreement']:.1%} of the labels, {kappa}"
    begin = f"yes from {least:g} on, labels from {labeled_from:g} on"
    print(f"{len(judged)} samples judged, {len(failed)} not: {begin}{agrees}")
    for error in list(dict.fromkeys(failed))[:5]:
        print(f"  not judged: {error}")


def agreement(judged: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Share of equal answers and Cohen's κ, (p_o − p_e)/(1 − p_e), with its 95% bootstrap interval.

    `judged`: (the reward's yes, the label's yes) of each sample. κ is None where one of both always says the
    same: chance explains everything then.
    """
    import numpy as np

    if not judged:
        return {"n": 0, "agreement": None, "kappa": None, "low": None, "high": None}

    def kappa_of(counts: Any) -> float | None:
        """`counts`: [4] of samples where neither says yes, the label alone, the reward alone, and both."""
        neither, label, reward, both = (counts / counts.sum()).tolist()
        by_chance = (reward + both) * (label + both) + (neither + label) * (neither + reward)
        return None if by_chance == 1 else (neither + both - by_chance) / (1 - by_chance)

    # A resample counts only by how many of each of the four kinds it has: whatever n is, four numbers.
    n, counts = len(judged), np.bincount(np.array(judged) @ (2, 1), minlength=4)
    drawn = np.random.default_rng(0).multinomial(n, counts / n, RESAMPLES)
    known = [kappa for kappa in map(kappa_of, drawn) if kappa is not None]
    low, high = np.quantile(known, (0.025, 0.975)).tolist() if known else (None, None)
    agreeing = int(counts[0] + counts[3]) / n
    return {"n": n, "agreement": agreeing, "kappa": kappa_of(counts), "low": low, "high": high}


TIMEOUT = 3.0  # seconds to wait for others to close the store


def forget(
    store: Annotated[Path, typer.Argument()],
    source: str | None = None,
    prompt_id: str | None = None,
    meta: Annotated[str | None, typer.Option(metavar="KEY=VALUE")] = None,
    yes: bool = False,
    as_json: Json = False,
) -> None:
    """Args:
    store: The store.
    source: All samples of this source.
    prompt_id: All samples of this prompt.
    meta: All whose meta has this, such as user=alice.
    yes: Delete; without it, only what would be said.
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
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print(f"deleted: {len(ids)} samples, with their judgments, from {shlex.quote(str(store))}\n{runs_text}")
    if trained:
        print(
            "Their weights, pages (report.html) and logs still have what they learned or showed of these "
            "samples; delete those, or train again. A run that is resumed draws from what is left."
        )


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
            help="copy: a store to a new one, a file or postgresql://…; recover: all that is undamaged into "
            "a new store, and what is lost; show: samples, in a terminal all in a pager, elsewhere 10."
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
    as_json: Json = False,
) -> None:
    """Args:
    groups: show: the responses to one prompt side by side.
    reward: show: only such rewards, such as 0.5:
    source: show: only this source; may be repeated.
    prompt: show: only prompts that contain this text, in any case.
    prompt_id: show: only this prompt.
    newest: show: the newest first.
    limit: show: samples, or groups, at most; 0 shows all.
    """
    count, expected = EXPECTED[action]
    if len(stores) != count:
        given_stores = " ".join(map(str, stores))
        raise Refused(f"agro store {action.value}: expected {expected}, got {given_stores}")
    if action is Action.show:
        _show(stores[0], groups, reward, source, prompt, prompt_id, newest, limit, as_json)
        return
    wrong = [name for name in given(context) if name in SELECTING]
    leave_out(context, f"agro store {action.value} takes stores alone", wrong)
    old, out = stores
    if action is Action.recover:
        recovered = recover(old, out)
        print(json.dumps(recovered.to_json(), ensure_ascii=False) if as_json else recovered)
        return
    from agro.store.copying import copy

    copy(old, out)
    with Store.open(out, read_only=True) as made:
        counts = made.counts()
    if as_json:
        print(json.dumps({"store": str(out), "samples": counts.samples, "groups": counts.groups}))
    else:
        print(f"{out}: {counts.samples} samples in {counts.groups} groups")


COLUMN = 26  # characters of a group's column at least
COLUMNS = 6  # responses of a group that are shown: the best, or the newest
LONGEST = 800  # characters of a text
UNASKED = 10  # samples, or groups, that are written where no limit is given and there is no pager
BLOCK = 256  # samples read at once, where the newest come first


def _show(
    path: Path,
    groups: bool,
    reward: str | None,
    source: list[str] | None,
    prompt: str | None,
    prompt_id: str | None,
    newest: bool,
    limit: int | None,
    as_json: bool,
) -> None:
    has_reward = in_range(reward, "--reward")

    def fits(sample: Sample) -> bool:
        is_asked = prompt is None or prompt.casefold() in plain(sample.prompt).casefold()
        return is_asked and has_reward(sample.reward)

    with Store.open(path, read_only=True) as opened:
        unknown = set(source or ()) - opened.counts().sources.keys()
        if unknown:
            known = ", ".join(map(repr, opened.counts().sources)) or "none"
            raise Refused(f"--source {unknown.pop()!r}: expected one of {known}")
        if groups:
            matches: Iterator[Any] = _groups(opened, prompt_id, newest, fits, source)
        else:
            matches = filter(fits, _samples(opened, newest, prompt_id=prompt_id, sources=source))
        if limit is None and not as_json and sys.stdout.isatty():
            first = next(matches, None)
            if first is not None:
                _browse(chain([first], matches))
                return
        count = UNASKED if limit is None else limit
        shown = list(islice(matches, count or None))
        more = bool(count) and next(matches, None) is not None
        total = opened.counts().samples
        origins = licenses(opened)
    if as_json:
        rows = [_group_json(g) for g in shown] if groups else [{"id": s.id, **to_record(s)} for s in shown]
        report = {
            "store": str(path),
            "samples_in_store": total,
            "more": more,
            "licenses": origins,
            "groups" if groups else "samples": rows,
        }
        print(json.dumps(report, allow_nan=False))  # ASCII: responses may have what UTF-8 can't encode
        return
    console = terminal()
    if not shown:
        console.print(f"none of {total:,} samples fits")
    for match in shown:
        _print_match(console, match)
    if more:
        console.print(f"there are more of the {total:,} samples (--limit 0 shows all)")
    for name, license in origins.items():
        if license:
            print(f"license of {name}: {license}")


def in_range(text: str | None, flag: str) -> Callable[[float | None], bool]:
    """Whether a value is in LOW:HIGH, both included; a missing end is unbounded, an unknown value in none."""
    if text is None:
        return lambda value: True
    low, colon, high = text.partition(":")
    try:
        least, most = float(low or "-inf"), float(high or "inf")
    except ValueError:
        least = most = math.nan
    if not colon or not least <= most:
        raise Refused(f"{flag} {text!r}: expected LOW:HIGH, one of which may be empty, such as 0.5:1 or :0")
    return lambda value: value is not None and least <= value <= most


def _browse(matches: Iterator[Any]) -> None:
    """All of them in the terminal's pager, which asks for more as one scrolls."""
    console = terminal()
    command = os.environ.get("PAGER") or "less"
    if shutil.which(shlex.split(command)[0]) is None:
        command = "cat"
    # As git asks less: leave a page that fits, show colors, keep the screen.
    environment = {"LESS": "FRX", "LESSCHARSET": "utf-8", **os.environ}
    with subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, env=environment) as pager:
        assert pager.stdin is not None
        with suppress(BrokenPipeError), pager.stdin as pages:  # the pager was left
            for match in matches:
                with console.capture() as captured:
                    _print_match(console, match)
                pages.write(captured.get().encode("utf-8", "backslashreplace"))


def _samples(store: Store, newest: bool, **selection: Any) -> Iterator[Sample]:
    if not newest:
        yield from store.samples(**selection)
        return
    ids = [row.id for row in store.survey.summaries(**selection)]
    for end in range(len(ids), 0, -BLOCK):
        yield from reversed(list(store.samples(ids=ids[max(0, end - BLOCK) : end])))


def _groups(
    store: Store,
    prompt_id: str | None,
    newest: bool,
    fits: Callable[[Sample], bool],
    sources: list[str] | None,
) -> Iterator[list[Sample]]:
    """The fitting responses of each group, the best first, and groups in the order in which they began.

    `newest`: the newest response first, and first the group that has the newest one.
    """
    prompt_ids = [group.prompt_id for group in store.groups(sources=sources)]
    if newest:
        rows = reversed(store.survey.summaries(sources=sources))
        prompt_ids = list(dict.fromkeys(row.prompt_id for row in rows))
    for group in prompt_ids:
        if prompt_id not in (None, group):
            continue
        matches = list(filter(fits, store.samples(prompt_id=group, sources=sources)))
        if newest:
            matches.reverse()
        else:
            matches.sort(key=lambda s: -math.inf if s.reward is None else s.reward, reverse=True)
        if matches:
            yield matches


def _group_json(samples: list[Sample]) -> dict[str, Any]:
    responses = [{"id": s.id, **to_record(s)} for s in samples]
    return {"prompt_id": samples[0].prompt_id, "prompt": samples[0].prompt, "responses": responses}


def _print_match(console: Console, match: Any) -> None:
    """A sample, or the samples of a group."""
    parts = _group(console, match) if isinstance(match, list) else _sample(match)
    console.print(*parts, sep="\n")
    console.print()


def _facts(s: Sample) -> list[str]:
    """Reward, source, version, length and size of the kept sets, each short."""
    version = s.oldest_version
    length = None if s.action is None else int(s.action.sum())
    kept_sets = []
    if s.kept_count is not None:
        sizes = s.kept_count[s.kept_count > 0]
        kept_sets = [f"kept sets of {sizes.mean():.1f} ids" if len(sizes) else "nothing excluded"]
    return [
        "no reward" if s.reward is None else f"reward {s.reward:g}",
        visible(s.source or s.role) + (f" ({s.role})" if s.source and s.source != s.role else ""),
        "version unknown" if version < 0 else f"version {version}",
        f"{len(s.response):,} characters" if length is None else f"{length:,} tokens",
        *kept_sets,
    ]


def _sample(s: Sample) -> Iterable[RenderableType]:
    yield RichText(f"sample {s.id}  " + "  ".join(_facts(s)), "bold")
    yield RichText(f"prompt {visible(s.prompt_id)}", "dim")
    yield Padding(RichText(shorten(plain(s.prompt), LONGEST), "cyan"), (0, 0, 0, 2), expand=False)
    yield Padding(_response(s), (0, 0, 0, 2), expand=False)
    if s.meta.get("reward_error") is not None:
        yield RichText("reward failed: " + shorten(str(s.meta["reward_error"]), LONGEST), "red")


def _response(s: Sample) -> RichText:
    """The response, in which the turns of an environment are dim."""
    answer = Answer.of([s])
    text = RichText(shorten(s.response, LONGEST) or "(empty)")
    for start, end in answer.observations:
        text.stylize("dim italic", start, end)
    return text


def _group(console: Console, samples: list[Sample]) -> Iterable[RenderableType]:
    shown = samples[:COLUMNS]
    rewards = [s.reward for s in samples if s.reward is not None]
    spread = f", rewards {min(rewards):g} to {max(rewards):g}" if rewards else ""
    hidden = ""
    if len(shown) < len(samples):
        hidden = f", {len(samples) - len(shown)} not shown (--json has all)"
    yield RichText(
        f"prompt {visible(samples[0].prompt_id)}: {len(samples)} responses{spread}{hidden}", "bold"
    )
    yield RichText(shorten(plain(samples[0].prompt), LONGEST), "cyan")
    width = max(1, console.width // COLUMN)
    for start in range(0, len(shown), width):
        part = shown[start : start + width]
        table = Table(expand=True, show_edge=False)
        for s in part:
            table.add_column(RichText("\n".join([f"sample {s.id}", *_facts(s)])), ratio=1, overflow="fold")
        table.add_row(*(_response(s) for s in part))
        yield table
