"""`agro show`: what is in a store, on the terminal or as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text as RichText

from agro.cli.common import Json, licenses, terminal
from agro.errors import Refused
from agro.io.terminal import cut as shorten
from agro.io.terminal import plain, visible
from agro.runs.side_by_side import Answer
from agro.store import Store
from agro.store.export import to_record
from agro.types import Sample

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

    def pages() -> Iterator[str]:
        for match in matches:
            with console.capture() as captured:
                _print_match(console, match, columns, cut)
            yield captured.get()

    # As git asks less: leave a page that fits, show colors, keep the screen.
    os.environ |= {"LESS": "FRX", "LESSCHARSET": "utf-8"} | os.environ
    typer.echo_via_pager(pages(), color=True)


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
