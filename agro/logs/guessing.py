"""What the columns of an unknown log are: a proposal for `agro import`, by their names and their content.

A proposal is tried on the first records before it is made, and names what it rests on. Nothing is imported by
a guess that wasn't printed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agro.errors import Refused
from agro.io.json_values import unpacked
from agro.logs.column_kinds import (
    FEW,
    JUDGING,
    TEXTS,
    Column,
    as_literal,
    assistants_of,
    best_named,
    columns_of,
    dialog_keys,
    quoted,
    step_of,
)
from agro.logs.format_table import lines_of
from agro.logs.guessed_pairs import guessed_pairs, sides_of
from agro.logs.guessed_rewards import guessed_reward, is_judged, reward_path, why_reward, worth_in
from agro.logs.import_report import ImportReport, Options
from agro.logs.importing import import_files
from agro.logs.labels import written_words
from agro.store import Store

ROWS = 200  # records that are looked at


@dataclass(frozen=True)
class Proposal:
    """How to import a file. `reasons`: what it rests on, and what wasn't used; `tried`: on how many records,
    and how many samples and rewards or pairs came of them. Without `mapping` and `rewards` nothing is
    proposed."""

    path: Path
    columns: tuple[Column, ...]
    mapping: Mapping[str, str] = field(default_factory=dict)
    rewards: tuple[str, ...] = ()
    reward_map: Mapping[str, float | None] = field(default_factory=dict)
    undefined: Column | None = None  # may be the reward, but nobody knows what its words are worth
    reasons: tuple[str, ...] = ()
    tried: str = ""

    def __bool__(self) -> bool:
        return bool(self.mapping or self.rewards)

    @property
    def is_judged(self) -> bool:
        """Whether it has rewards or pairs, or would have with --reward-map."""
        has_judgments = self.rewards or not {"reward", "chosen"}.isdisjoint(self.mapping)
        return bool(has_judgments) or self.undefined is not None

    def options(self) -> Options:
        options: Options = {"mapping": self.mapping}
        if self.rewards:
            options["rewards"] = dict.fromkeys(self.rewards, 1.0)
        if self.reward_map:
            options["reward_map"] = self.reward_map
        return options

    def command(self, *stores: str) -> str:
        """The full command; of words whose worth is unknown with NUMBER in its place."""
        parts = ["agro", "import", str(self.path)]
        for store in stores or ("STORE.db",):
            parts += ["--store", store]
        for name, column in self.mapping.items():
            parts += ["--map", f"{name}={column}"]
        for name in self.rewards:
            parts += ["--reward", name]
        worth = {word: "null" if x is None else f"{x:g}" for word, x in self.reward_map.items()}
        if self.undefined is not None:
            parts += ["--map", f"reward={self.undefined.path}"]
            worth = {
                word: "null" if word in self.undefined.unrated else "NUMBER"
                for word in self.undefined.distinct[:FEW]
            }
        if worth:
            parts += ["--reward-map", written_words(worth)]
        return " ".join(map(shlex.quote, parts))

    def to_json(self, *stores: str) -> dict[str, Any]:
        return {
            "command": self.command(*stores) if self else None,
            "undefined": None if self.undefined is None else self.undefined.distinct,
            "columns": [column.about() for column in self.columns],
            "reasons": self.reasons,
            "tried": self.tried,
        }


def propose(path: Path) -> Proposal | None:
    """A proposal for a file; None where it needs none: its format is known, and it has rewards or pairs.

    Raises `Refused` where the file can't be read.
    """
    known = _tried(path, {})
    if known is not None and not known.refused_count and (known.scored or known.pairs):
        return None
    rows = [line.value for line in islice(lines_of(path, None), ROWS) if not line.error]
    columns = columns_of(rows)
    best: Proposal | None = None
    for guess in _guesses(path, columns, known):
        report = _tried(path, guess.options())
        if report is not None and report.refused_count <= report.samples:
            tried = f"{report.samples} samples, {report.scored} with a reward, {report.pairs} pairs"
            if report.refused_count:
                tried += f", {report.refused_count} refused ({report.refused[0].reason:.120})"
            best = Proposal(**{**vars(guess), "tried": f"the first {len(rows)} records: {tried}"})
            break
    if best is not None and (known is None or best.is_judged):
        return best
    return None if known is not None and not known.refused_count else Proposal(path, columns)


def _tried(path: Path, options: Options) -> ImportReport | None:
    """What comes of the first records with these options; None where none can be taken."""
    with TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db") as store:
        try:
            report = import_files(store, [path], limit=ROWS, **options)  # type: ignore[misc]
        except Refused:
            return None
        return report if report.samples else None


def _as_messages(column: Column) -> str:
    """The turns of a dialog as messages."""
    dialogs = [unpacked(value) for value in column.values]
    keys = dialog_keys(dialogs[0])
    assert keys is not None
    who, said = map(quoted, keys)
    names = dict.fromkeys(turn[keys[0]] for dialog in dialogs for turn in dialog)
    assistants = {name for dialog in dialogs for name in assistants_of({turn[keys[0]] for turn in dialog})}
    roles = [f"({who} == {as_literal(n)} && 'assistant')" for n in names if n in assistants]
    roles += [f"({who} == {as_literal(n)} && 'system')" for n in names if n.casefold() == "system"]
    path = step_of(column)
    return f"{path}[].{{role: {' || '.join(roles)} || 'user', content: {said}}}"


def _guesses(path: Path, columns: Sequence[Column], known: ImportReport | None) -> Iterator[Proposal]:
    """Proposals, the likeliest first."""
    reward, _ = guessed_reward(columns, "")
    if known is not None and reward is not None:
        reasons = (*why_reward(reward), "prompt and response are those of a known format")
        yield Proposal(path, tuple(columns), {}, (reward.path,), worth_in(reward) or {}, None, reasons)
    for mapping, reason in _responses(columns):
        whole, said = dict(mapping), [reason]
        worth: Mapping[str, float | None] = {}
        undefined = None
        if "reward" in mapping:
            judged = [
                worth_in(c) or {} for c in columns if c.type == "word" and step_of(c) in mapping["reward"]
            ]
            worth = {word: number for each in judged for word, number in each.items()}
        elif "chosen" not in mapping:
            reward, undefined = guessed_reward(columns, mapping.get("response", ""))
            if reward is not None:
                whole["reward"], worth = reward_path(reward, mapping), worth_in(reward) or {}
                said += why_reward(reward)
            elif undefined is not None:
                said.append(f"{undefined.path} may be the reward; say what its words are worth")
        if any("*" in each for each in mapping.values()):
            whole["source"] = f"'{path.stem}'"
        inside = "".join(whole.values())
        aside = [c.path for c in columns if _may_matter(c) and c.path not in inside and c is not undefined]
        if aside:
            said.append(f"not used: {', '.join(aside)}")
        yield Proposal(path, tuple(columns), whole, (), worth, undefined, tuple(said))


def _may_matter(column: Column) -> bool:
    """Whether it may be a judgment, or what somebody says."""
    return column.type in JUDGING or (column.type == "text" and column.is_spoken and not column.is_aside)


def _responses(columns: Sequence[Column]) -> Iterator[tuple[dict[str, str], str]]:
    """Mappings of prompt and response, of pairs, or of messages, and why."""
    texts = [c for c in columns if c.type in TEXTS and c.tells]
    dialogs = [c for c in columns if c.type == "messages"]
    asked = [*(c for c in texts if c.type != "texts"), *filter(_is_asked, dialogs)]
    has_whole_dialogs = not all(map(_is_asked, dialogs))
    prompt = best_named([c for c in asked if c.is_spoken or c.type == "messages"] or asked, "prompt")
    if prompt is not None:
        others = [c for c in texts if c is not prompt]
        yield from guessed_pairs(prompt, others, columns)
        yield from _of_several(prompt, others, columns)
        said, right = _said([c for c in others if not is_judged(c)])
        response = best_named([c for c in said if c.type != "word" or c.is_spoken] or said, "response")
        if response is not None and (response.is_spoken or not has_whole_dialogs):
            yield (
                {"prompt": _asked_in(prompt, texts), "response": response.path, **right},
                "prompt and response by their names",
            )
    if dialogs:
        dialog = best_named(dialogs, "messages") or dialogs[0]
        yield {"messages": dialog.path}, f"{dialog.path} has messages, the last one of the assistant"
    for column in columns:
        if column.type == "transcript":
            yield {"messages": column.path}, f"{column.path} has the turns of a dialog in one text"
        if column.type == "dialog":
            yield {"messages": _as_messages(column)}, f"{column.path} has the turns of a dialog"
    yield from _by_content(prompt, texts)


def _by_content(prompt: Column | None, texts: Sequence[Column]) -> Iterator[tuple[dict[str, str], str]]:
    """The response is the longest text but the prompt's, which stands before it; comments only where there
    is nothing else."""
    long, right = _said([c for c in texts if c.is_spoken or c.type == "texts"])
    meant = [c for c in long if not c.is_aside]
    spoken = meant if len(meant) > 1 else long
    if len(spoken) < 2:
        return
    response = best_named([c for c in spoken if c is not prompt], "response")
    if response is None:
        last = [c for c in spoken if c is not prompt and (prompt is not None or c is not spoken[0])]
        response = max(last, key=lambda c: c.length)
    if prompt is None or prompt is response:
        prompt = next(c for c in spoken if c is not response)
    reason = "prompt and response by content: the columns of long text, in their order"
    yield {"prompt": prompt.path, "response": response.path, **right}, reason


def _asked_in(prompt: Column, texts: Sequence[Column]) -> str:
    """The path of a prompt; of a title with its body both."""
    owner, dot, name = prompt.path.rpartition(".")
    bodies = [c for c in texts if c.path in (f"{owner}{dot}body", f"{owner}{dot}selftext")]
    if name != "title" or not bodies:
        return prompt.path
    body = bodies[0].path.rpartition(".")[2]
    return f'{owner}{dot}join(`"\\n\\n"`, [title, {body}])'


def _said(texts: Sequence[Column]) -> tuple[list[Column], dict[str, str]]:
    """Those that may be responses, and the mapping of the answer that would be right, where one is named."""
    right = best_named(texts, "answer")
    said = [c for c in texts if c is not right]
    if right is None or not any(c.named("response") for c in said):
        return list(texts), {}
    return said, {"answer": right.path}


def _of_several(
    prompt: Column, others: Sequence[Column], columns: Sequence[Column]
) -> Iterator[tuple[dict[str, str], str]]:
    """Responses of several models in a row, each with its score: gpt_answer, gpt_score, llama_answer, …"""
    scores = [c for c in columns if c.type in JUDGING and c.named("reward")]
    for responses in sides_of([c for c in others if c.is_spoken]):
        for judged in sides_of(scores):
            marks = [mark for mark in responses if mark in judged]
            if len(marks) < 2:
                continue
            said, rated = (", ".join(step_of(side[mark]) for mark in marks) for side in (responses, judged))
            mapping = {"prompt": prompt.path, "response": f"[{said}]", "reward": f"[{rated}]"}
            reason = f"responses of {', '.join(marks)}, each with its score"
            yield {**mapping, "source": as_literal(marks)}, reason


def _is_asked(column: Column) -> bool:
    """Whether messages end before the assistant's turn."""
    return all(unpacked(value)[-1]["role"] != "assistant" for value in column.values)
