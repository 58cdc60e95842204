"""Commands that show, score, export, copy, recover and delete what stores have."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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

from agro.cli.common import REWARD, Json, RewardOption, licenses, options, pairs, policy_config, terminal
from agro.cli.run_models import MeasuredModel
from agro.config import RewardConfig
from agro.errors import Refused
from agro.io.files import complete_folder
from agro.io.terminal import cut as shorten
from agro.io.terminal import plain, visible
from agro.rewards import check_name, load_reward
from agro.runs.side_by_side import Answer
from agro.store import Store
from agro.store import recover as recover_
from agro.store.export import to_record
from agro.types import Sample


def export(
    store: Annotated[Path, typer.Argument(metavar="STORE-or-RUN")],
    file: Annotated[Path, typer.Argument()],
    merged: bool = False,
    gguf: bool = False,
    as_json: Json = False,
) -> None:
    """Write the samples of a store, without judgments, as interchange records, which agro import takes.

    Args:
        store: The store; a run with its model.
        file: A file that ends with .jsonl, .jsonl.gz or .parquet; of a model a folder or FILE.gguf.
        merged: Of a run: its model in 16 bits, an adapter merged, as a folder.
        gguf: Of a run: its model as GGUF, by the converter of llama.cpp.
    """
    if merged or gguf:
        if merged and gguf:
            raise Refused("--merged, --gguf: expected one of them, got both")
        (write_gguf if gguf else write_merged)(store, file)
        print(json.dumps({"model": str(file)}) if as_json else f"wrote {file}")
        return
    with Store.open(store, read_only=True) as opened:
        count = opened.export(file)
    print(json.dumps({"samples": count, "file": str(file)}) if as_json else f"{file}: {count} samples")


def recover(
    store: Annotated[Path, typer.Argument()],
    out: Path,
    as_json: Json = False,
) -> None:
    """Args:
    store: The damaged store.
    out: The new store.
    """
    recovered = recover_(store, out)
    print(json.dumps(recovered.to_json(), ensure_ascii=False) if as_json else recovered)


def score(
    store: Annotated[Path, typer.Argument()],
    reward: Annotated[str, REWARD],
    option: RewardOption = None,
    missing: bool = False,
    timeout: float = 10.0,
    workers: Annotated[int, typer.Option(min=1, metavar="N")] = 1,
    as_json: Json = False,
) -> None:
    """Args:
    store: The store.
    missing: Only samples without a reward.
    timeout: Seconds for one response.
    workers: Processes of a reward that has some: functions, math, regex.
    """
    Store.open(store, create=False).close()  # refused before torch is imported: that takes seconds
    check_name(reward)
    from agro.rollout.rollout import EpisodeReward

    config = RewardConfig(name=reward, options=options(option), timeout=timeout, workers=workers)
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


CONVERTER = "convert_hf_to_gguf.py"  # of llama.cpp, which keeps it up to date with architectures


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


def write_gguf(run: Path, file: Path) -> None:
    """Convert the merged model with llama.cpp's converter. Without one the merged model stays beside `file`,
    and `Refused` says the command."""
    if file.exists():
        raise Refused(f"{file}: there is such a file; give another one, or remove it")
    merged = file.with_name(f"{file.stem}-merged")
    write_merged(run, merged)
    of_folder = Path(os.environ.get("LLAMA_CPP", "")) / CONVERTER
    converter = str(of_folder) if of_folder.is_file() else shutil.which(CONVERTER)
    command = [converter or f"llama.cpp/{CONVERTER}", str(merged), "--outfile", str(file)]
    command += ["--outtype", "bf16"]
    if converter is None:
        raise Refused(
            f"--gguf: {CONVERTER} of llama.cpp is neither on PATH nor in the folder LLAMA_CPP. The merged "
            f"model is in {merged}. What to do: get llama.cpp, then\n  python {shlex.join(command)}"
        )
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode or not file.exists():
        raise Refused(
            f"--gguf: {converter} failed: {done.stderr.strip()[-500:]}\nThe merged model is in {merged}"
        )
    shutil.rmtree(merged)


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
            raise Refused(
                f"{store}: no sample has {flags[0]} {conditions[flags[0]]}; see agro show and agro check"
            )
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


def store(
    action: Annotated[Action, typer.Argument(help="copy: a store to a new one, a file or postgresql://….")],
    old: Annotated[Path, typer.Argument()],
    new: Annotated[Path, typer.Argument()],
) -> None:
    from agro.store.copying import copy

    copy(old, new)
    with Store.open(new, read_only=True) as made:
        counts = made.counts()
        print(f"{new}: {counts.samples} samples in {counts.groups} groups")


COLUMN = 26  # characters of a group's column at least
BLOCK = 256  # samples read at once, where the newest come first


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


def show(
    store: Annotated[Path, typer.Argument()],
    groups: bool = False,
    reward: Annotated[str | None, typer.Option(metavar="LOW:HIGH")] = None,
    source: list[str] | None = None,
    characters: Annotated[str | None, typer.Option(metavar="LOW:HIGH")] = None,
    prompt: str | None = None,
    prompt_id: str | None = None,
    newest: bool = False,
    limit: Annotated[int | None, typer.Option(min=0)] = None,
    columns: Annotated[int, typer.Option(min=0)] = 6,
    cut: Annotated[int, typer.Option(min=0)] = 800,
    as_json: Json = False,
) -> None:
    """Args:
    store: The store.
    groups: The responses to one prompt side by side.
    reward: Only such rewards, such as 0.5:
    source: Only this source; may be repeated.
    characters: Only responses of so many characters.
    prompt: Only prompts that contain this text, in any case.
    prompt_id: Only this prompt.
    newest: The newest first.
    limit: Samples, or groups, at most; 0 shows all. Where it isn't given, a terminal shows all in a
        pager, and 10 are written elsewhere.
    columns: Responses of a group at most, the best or the newest; 0 shows all.
    cut: Characters of each text; 0 shows all.
    """
    has_reward, has_length = in_range(reward, "--reward"), in_range(characters, "--characters")

    def fits(sample: Sample) -> bool:
        asked = prompt is None or prompt.casefold() in plain(sample.prompt).casefold()
        return asked and has_reward(sample.reward) and has_length(len(sample.response))

    with Store.open(store, read_only=True) as opened:
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
                _browse(chain([first], matches), columns, cut)
                return
        count = 10 if limit is None else limit
        shown = list(islice(matches, count or None))
        more = bool(count) and next(matches, None) is not None
        total = opened.counts().samples
        origins = licenses(opened)
    if as_json:
        rows = [_group_json(g) for g in shown] if groups else [{"id": s.id, **to_record(s)} for s in shown]
        report = {
            "store": str(store),
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
        _print_match(console, match, columns, cut)
    if more:
        console.print(f"there are more of the {total:,} samples (--limit 0 shows all)")
    for name, license in origins.items():
        if license:
            print(f"license of {name}: {license}")


def _browse(matches: Iterator[Any], columns: int, cut: int) -> None:
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
                    _print_match(console, match, columns, cut)
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


def _print_match(console: Console, match: Any, columns: int, limit: int) -> None:
    """A sample, or the samples of a group."""
    parts = _group(console, match, columns, limit) if isinstance(match, list) else _sample(match, limit)
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


def _sample(s: Sample, limit: int) -> Iterable[RenderableType]:
    yield RichText(f"sample {s.id}  " + "  ".join(_facts(s)), "bold")
    yield RichText(f"prompt {visible(s.prompt_id)}", "dim")
    yield Padding(RichText(shorten(plain(s.prompt), limit), "cyan"), (0, 0, 0, 2), expand=False)
    yield Padding(_response(s, limit), (0, 0, 0, 2), expand=False)
    if s.meta.get("reward_error") is not None:
        yield RichText("reward failed: " + shorten(str(s.meta["reward_error"]), limit), "red")


def _response(s: Sample, limit: int) -> RichText:
    """The response, in which the turns of an environment are dim."""
    answer = Answer.of([s])
    text = RichText(shorten(s.response, limit) or "(empty)")
    for start, end in answer.observations:
        text.stylize("dim italic", start, end)
    return text


def _group(console: Console, samples: list[Sample], columns: int, limit: int) -> Iterable[RenderableType]:
    shown = samples[: columns or None]
    rewards = [s.reward for s in samples if s.reward is not None]
    spread = f", rewards {min(rewards):g} to {max(rewards):g}" if rewards else ""
    hidden = ""
    if len(shown) < len(samples):
        hidden = f", {len(samples) - len(shown)} not shown (--columns 0 shows all)"
    yield RichText(
        f"prompt {visible(samples[0].prompt_id)}: {len(samples)} responses{spread}{hidden}", "bold"
    )
    yield RichText(shorten(plain(samples[0].prompt), limit), "cyan")
    width = max(1, console.width // COLUMN)
    for start in range(0, len(shown), width):
        part = shown[start : start + width]
        table = Table(expand=True, show_edge=False)
        for s in part:
            table.add_column(RichText("\n".join([f"sample {s.id}", *_facts(s)])), ratio=1, overflow="fold")
        table.add_row(*(_response(s, limit) for s in part))
        yield table
