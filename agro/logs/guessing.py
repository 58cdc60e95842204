"""Guess what the columns of an unknown log hold, by name and content, and propose an `agro import` command.

A proposal is tried on the first records, and shows the result: the best and the worst responses, or winners
and losers. Nothing is imported until a person or an option accepts it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.io.json_values import unpacked, value_at
from agro.io.jsonlines import Line
from agro.io.record_files import read_records, record_block
from agro.io.terminal import cut, visible
from agro.io.terminal import plain as as_text
from agro.logs.format_table import Recognizer, format_at, lines_of
from agro.logs.mapping import MAPPABLE, CellInterpreter
from agro.logs.reading import LogFile, Options, Reader, ReaderState
from agro.logs.unknown_columns import (
    FEW,
    JUDGING,
    TEXTS,
    Column,
    Judged,
    best_named,
    candidates,
    check_scale,
    columns_of,
    guessed_pairs,
    is_lower,
    quoted,
    worth_in,
)
from agro.logs.values import written_words
from agro.store.sample_rows import from_rows
from agro.types import Sample

ROWS = 200  # records to look at
EXAMPLES = 3  # best responses, worst responses, or pairs to show


class Example(NamedTuple):
    """A response as the proposal would import it. `raw`: the value of the judging column; None without a
    single one. Responses of a pair have no `reward`, and the winner stands before the loser."""

    raw: Any
    reward: float | None
    prompt: str
    response: str


@dataclass(frozen=True)
class Proposal:
    """A way to import a file, which a person or an option has to accept; `str` shows it.

    `best` and `worst` are samples with extreme rewards; for pairs the winners and their losers. `judged`: the
    column of rewards or winners, "" without one; `others`: other candidates for it. `reasons`: the evidence,
    and which columns are unused; `tried`: the number of records tried, and the result. Without `mapping` the
    format is known, or nothing is proposed.
    """

    path: Path
    columns: tuple[Column, ...]
    mapping: Mapping[str, str] = field(default_factory=dict)
    reward_map: Mapping[str, float | None] = field(default_factory=dict)
    lower_is_better: bool = False
    drop: tuple[str, ...] = ()  # columns whose name is that of a field of another type
    judged: str = ""
    others: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    tried: str = ""
    best: tuple[Example, ...] = ()
    worst: tuple[Example, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.mapping or self.judged)

    @property
    def is_paired(self) -> bool:
        return "chosen" in self.mapping

    @property
    def is_judged(self) -> bool:
        """Whether the proposal has rewards or pairs."""
        return bool(self.judged) or self.is_paired

    def options(self) -> Options:
        return {
            "mapping": self.mapping,
            "rewards": {self.judged: 1.0} if self.judged and not self.mapping else {},
            "reward_map": self.reward_map,
            "lower_is_better": self.lower_is_better,
            "drop": self.drop,
        }

    def reversed(self) -> Proposal:
        """The proposal with the opposite direction: the worst responses are the best."""
        best, worst = (
            tuple(e._replace(reward=None if e.reward is None else 0.0 - e.reward) for e in side)
            for side in (self.worst, self.best)
        )
        return replace(self, lower_is_better=not self.lower_is_better, best=best, worst=worst)

    def command(self, store: str = "STORE.db") -> str:
        worth = {word: "null" if x is None else f"{x:g}" for word, x in self.reward_map.items()}
        options = [("--map", f"{name}={column}") for name, column in self.mapping.items()]
        options += [("--reward", self.judged)] if self.judged and not self.mapping else []
        options += [("--reward-map", written_words(worth))] if worth else []
        options += [("--drop", name) for name in self.drop]
        lower = ["--lower-is-better"] if self.lower_is_better else []
        return shlex.join(["agro", "import", str(self.path), "--store", store, *chain(*options), *lower])

    def to_json(self, store: str) -> dict[str, Any]:
        return {
            "command": self.command(store) if self else None,
            "reversed": self.reversed().command(store) if self.best else None,
            "reward": self.judged or None,
            "lower_is_better": self.lower_is_better,
            "others": self.others,
            "best": [example._asdict() for example in self.best],
            "worst": [example._asdict() for example in self.worst],
            "pairs": self.is_paired,
            "columns": [column.about() for column in self.columns],
            "reasons": self.reasons,
            "tried": self.tried,
        }

    def __str__(self) -> str:
        """The columns, the evidence, and the responses as the proposal would import them."""
        lines = ["columns:", *map(str, self.columns), *self.reasons]
        lines += [f"tried on {self.tried}"] if self.tried else []
        column = cut(self.judged, 60)
        if self.is_judged:
            way = "lower is better" if self.lower_is_better else "higher is better"
            if self.is_paired:
                way = "it names the worse one" if self.lower_is_better else "it names the better one"
            lines.append(f"proposed: {column or 'the names of the responses'}: {way}")
        if self.others:
            lines.append(f"other columns that may be it: {', '.join(self.others)}")
        if self.best and self.is_paired:
            for winner, loser in zip(self.best, self.worst, strict=True):
                verdict = "" if winner.raw is None else f" ({column}: {cut(str(winner.raw), 40)})"
                lines.append(f"prompt: {cut(winner.prompt, 80)}{verdict}")
                lines.append(f"  upper, winner: {cut(winner.response, 80)}")
                lines.append(f"  lower, loser:  {cut(loser.response, 80)}")
        elif self.worst:
            for title, side in (("upper, the best", self.best), ("lower, the worst", self.worst)):
                lines.append(f"{title} ({column} → reward):")
                for e in side:
                    raw = "" if e.raw is None else f"{cut(str(e.raw), 40)} → "
                    lines.append(f"  {raw}{e.reward:g}: {cut(e.prompt, 50)} » {cut(e.response, 60)}")
        elif self.is_judged and self.tried:
            lines.append("no two of these responses are judged differently: nothing shows which are better")
        else:
            lines += [f"  {cut(e.prompt, 50)} » {cut(e.response, 60)}" for e in self.best]
        return visible("\n".join(lines))

    def refusal(self, store: str) -> Refused:
        """A refusal that shows the proposal and the ways to decide."""
        file, quoted = shlex.quote(str(self.path)), shlex.quote(store)
        if not self:
            names = ", ".join(column.path for column in self.columns) or "none"
            return Refused(
                f"{self.path}: of no known format\n{self}\nno column says that it is the prompt or the "
                "response, or which of two is better; name them: --map prompt=COLUMN --map response=COLUMN "
                f"--map reward=COLUMN (of pairs --map chosen=COLUMN --map rejected=COLUMN), of {names}"
            )
        look = "whether these are prompts and responses, then give --yes"
        if self.is_judged:
            look = "whether the upper ones are better, then give --yes (as proposed), --lower-is-better or "
            look += "--reward COLUMN with --guess"
        ways = [f"as proposed: {self.command(store)}"]
        if self.is_judged:
            ways.append(f"the other way round: {self.reversed().command(store)}")
            ways.append(f"another column: agro import {file} --guess --reward COLUMN --store {quoted}")
        return Refused(
            f"{self.path}: nothing is imported until somebody says that this is right\n{self}\n"
            f"What to do: look {look}, or run one of\n  " + "\n  ".join(ways)
        )


def propose_unknown(path: Path, *, lower_is_better: bool | None = None) -> Proposal | None:
    """`propose` for a file of unknown format, or for a file of prompts in which it finds judged answers; None
    for other files, which are read as they are."""
    if format_at(path) is not None or all(line.error for line in islice(read_records(path), 1)):
        return None
    format = Recognizer(None).recognize_first(path)
    if format is not None and format.kind != "prompts":
        return None
    proposal = propose(path, lower_is_better=lower_is_better)
    return None if format is not None and proposal is not None and not proposal.is_judged else proposal


def propose(path: Path, *, reward: str | None = None, lower_is_better: bool | None = None) -> Proposal | None:
    """A proposal for a file; None if it needs none: its format is known, and it has rewards or pairs, or no
    column that may be the reward.

    `reward`: the column of rewards, or the one that names the better of two; with None the proposal chooses
    it, and likewise `lower_is_better`. Raises `Refused` if the file can't be read, or if there is no such
    column, or it has two scales or words of unknown worth.
    """
    prior = _tried(path, {})
    prior = prior if prior is not None and prior.samples else None
    if prior is not None and prior.is_judged and reward is None:
        return None
    lines = list(islice(lines_of(path, None), ROWS))
    if not lines:
        raise Refused(f"{path}: empty: expected records, got none")
    lines = [line for line in lines if not line.error]
    columns = columns_of([line.value for line in lines])
    named = "" if reward is None else _column(reward, columns).path
    locations = [line.where for line in lines]
    for guess in _guesses(path, columns, named, locations, has_format=prior is not None):
        trial = _tried(path, guess.options())
        while trial is not None and trial.refused and not trial.samples:
            used = {*guess.mapping, *guess.mapping.values(), *guess.drop}
            free = {column.path for column in columns} & {*MAPPABLE} - used
            name = next((word for word in trial.refused[0].split(": ") if word in free), "")
            if not name:
                break
            guess = replace(guess, drop=(*guess.drop, name))
            trial = _tried(path, guess.options())
        if trial is None or not trial.samples or len(trial.refused) > len(trial.samples):
            continue
        if prior is not None and not guess.is_judged:
            break
        if lower_is_better not in (None, guess.lower_is_better):
            guess = replace(guess, lower_is_better=not guess.lower_is_better)
            trial = _tried(path, guess.options()) or trial
        scored = sum(sample.reward is not None for sample in trial.samples)
        tried = f"{len(trial.samples)} samples, {scored} with a reward, {len(trial.pairs)} pairs"
        if trial.refused:
            tried += f", {len(trial.refused)} refused ({trial.refused[0]:.120})"
        guess = replace(guess, tried=f"the first {len(lines)} records: {tried}")
        return _with_examples(guess, trial, lines)
    return Proposal(path, columns) if prior is None else None


def _column(name: str, columns: Sequence[Column]) -> Column:
    named = [c for c in columns if c.path == name]
    named = named or [c for c in columns if quoted(name) in (c.path, c.path.rpartition(".")[2])]
    if len(named) != 1:
        expected = ", ".join(c.path for c in named or columns)
        raise Refused(f"--reward {name}: expected one of the columns {expected}")
    return named[0]


class _Trial(NamedTuple):
    samples: list[Sample]
    numbers: list[int]  # the record number of each sample
    pairs: list[tuple[int, int]]  # winner and loser as indices into `samples`, without ties
    refused: list[str]  # reasons

    @property
    def is_judged(self) -> bool:
        return bool(self.pairs) or any(sample.reward is not None for sample in self.samples)


def _tried(path: Path, options: Options) -> _Trial | None:
    """The result of reading the first records with these options; None if they are refused."""
    try:
        format = Recognizer(None, mapped=bool(options.get("mapping"))).recognize_file(path)
        lines = list(islice(lines_of(path, format), ROWS))
        file = LogFile(str(path), "", None if format is None else format.name)
        result, _ = Reader(options, {}).read(file, ReaderState({}, {}), record_block(lines))
    except Refused:
        return None
    trial = _Trial([], [], [], [refusal.reason for _, refusal in result.refused])
    for entry in result.entries:
        offset = len(trial.samples)
        trial.samples.extend(from_rows([(*row.values,) for row in entry.samples]))
        trial.numbers.extend([entry.record[1]] * len(entry.samples))
        judged = [j for j in entry.judgments if j.votes[0] is None or j.votes[0] != j.votes[1]]
        trial.pairs.extend((offset + j.winner, offset + j.loser) for j in judged)
    return trial


def _with_examples(proposal: Proposal, trial: _Trial, lines: Sequence[Line]) -> Proposal:
    """Add the best and the worst samples, or pairs, from different prompts if there are enough."""
    rows = {line.number: line.value for line in lines}

    def example(i: int) -> Example:
        sample, row, raw = trial.samples[i], rows.get(trial.numbers[i], {}), None
        if proposal.judged in row:
            raw = row[proposal.judged]
        elif proposal.judged and not {"*", "["} & set(proposal.judged):
            raw = value_at(row, proposal.judged, CellInterpreter)[1]
        reward = None if proposal.is_paired else sample.reward
        return Example(raw, reward, as_text(sample.prompt), sample.response)

    rewards = {i: sample.reward for i, sample in enumerate(trial.samples) if sample.reward is not None}
    best, worst = list(range(min(EXAMPLES, len(trial.samples)))), list[int]()
    if proposal.is_paired:
        shown = _few([(trial.samples[w].prompt_id, (w, x)) for w, x in trial.pairs])
        best, worst = [w for w, _ in shown], [x for _, x in shown]
    elif proposal.is_judged and rewards:
        order = sorted(rewards, key=lambda i: rewards[i])
        middle = (rewards[order[0]] + rewards[order[-1]]) / 2
        high = _few([(trial.samples[i].prompt_id, i) for i in reversed(order) if rewards[i] > middle])
        low = _few([(trial.samples[i].prompt_id, i) for i in order if rewards[i] < middle])
        count = min(len(high), len(low))
        best, worst = high[:count], low[:count]
    return replace(proposal, best=tuple(map(example, best)), worst=tuple(map(example, worst)))


def _few(items: Sequence[tuple[str, Any]]) -> list[Any]:
    """The first items, from different prompts if there are enough."""
    by_prompt: dict[str, Any] = {}
    for prompt_id, item in items:
        by_prompt.setdefault(prompt_id, item)
    shown = list(by_prompt.values())[:EXAMPLES]
    return shown + [item for _, item in items if item not in shown][: EXAMPLES - len(shown)]


def _guesses(
    path: Path, columns: tuple[Column, ...], named: str, locations: Sequence[str], *, has_format: bool
) -> Iterator[Proposal]:
    """Proposals, the likeliest first. `named`: the path of the judging column; "" for any."""
    bases = [Judged({}, "prompt and response are those of a known format")] if has_format else []
    for base in chain(bases, _responses(columns, named)):
        guess, judged = Proposal(path, columns, dict(base.mapping), lower_is_better=base.lower), base.column
        if judged is None and not guess.is_paired:
            ranked = candidates(columns, guess.mapping)
            judged = next((c for c in columns if c.path == named), ranked[0] if ranked else None)
            guess = replace(guess, others=tuple(c.path for c in ranked if c is not judged))
            if judged is not None:
                check_scale(judged, locations)
                if base.mapping:
                    guess = replace(guess, mapping={**guess.mapping, "reward": judged.path})
                worth = worth_in(judged)
                if worth is None:
                    raise _unknown_words(replace(guess, judged=judged.path), judged)
                guess = replace(guess, reward_map=worth, lower_is_better=is_lower(judged))
            if any("*" in column for column in guess.mapping.values()):
                guess = replace(guess, mapping={**guess.mapping, "source": f"'{path.stem}'"})
        if named and (judged is None or judged.path != named):
            continue
        guess = replace(guess, judged="" if judged is None else judged.path)
        yield replace(guess, reasons=(base.reason, *_about(guess, judged)))


def _unknown_words(guess: Proposal, column: Column) -> Refused:
    worth = {word: "null" if word in column.unrated else "NUMBER" for word in column.distinct[:FEW]}
    alternatives = (
        f"\nor another column: --guess --reward COLUMN, of {', '.join(guess.others)}" if guess.others else ""
    )
    return Refused(
        f"{column.path}: the worth of its words is unknown. What to do: replace NUMBER in\n"
        f"  {guess.command()} --reward-map {shlex.quote(written_words(worth))}{alternatives}"
    )


def _about(guess: Proposal, judged: Column | None) -> Iterator[str]:
    """What a proposal takes as unknown, and which columns it doesn't use."""
    if judged is not None and judged.unrated:
        yield f"of {judged.path} taken as unknown: {', '.join(sorted(judged.unrated))}"
    expressions = "".join(guess.mapping.values())
    relevant = [  # columns that may hold a judgment or something that somebody wrote
        c for c in guess.columns if c.type in JUDGING or (c.type == "text" and c.is_spoken and not c.is_aside)
    ]
    used = {guess.judged, *guess.others}
    unused = [c.path for c in relevant if c.path not in used and c.path not in expressions]
    if unused:
        yield f"not used: {', '.join(unused)}"


def _responses(columns: Sequence[Column], named: str) -> Iterator[Judged]:
    """Candidate mappings of prompt and response, of pairs, or of messages, each with its reason."""
    texts = [c for c in columns if c.type in TEXTS and c.tells]
    dialogs = [c for c in columns if c.type == "messages"]
    questions = [*(c for c in texts if c.type != "texts"), *filter(_ends_unanswered, dialogs)]
    has_whole_dialogs = not all(map(_ends_unanswered, dialogs))
    spoken = [c for c in questions if c.is_spoken or c.type == "messages"]
    prompt = best_named(spoken or questions, "prompt")
    if prompt is None and len(spoken) < 2:  # prompts may be short, such as 7*8?
        prompt = best_named([c for c in questions if c.type == "text"], "prompt")
    if prompt is None and len(spoken) > 2 and not any(c.named("response") for c in spoken[:1]):
        prompt = spoken[0]
    if prompt is not None:
        choices = [c for c in texts if c is not prompt]
        for judged in guessed_pairs(prompt, choices, columns, named):
            if judged is None:
                return
            yield judged
        verdicts = [c for c in choices if c.type == "word" and c.named("reward") and worth_in(c) is not None]
        replies, right = _possible_replies([c for c in choices if c not in verdicts])
        response = best_named([c for c in replies if c.type != "word" or c.is_spoken] or replies, "response")
        if response is not None and (response.is_spoken or not has_whole_dialogs):
            mapping = {"prompt": prompt.path, "response": response.path, **right}
            yield Judged(mapping, "prompt and response by their names")
    if dialogs:
        dialog = best_named(dialogs, "messages") or dialogs[0]
        yield Judged({"messages": dialog.path}, f"{dialog.path} has messages, the last one of the assistant")
    yield from _longest_texts(prompt, texts, columns)


def _longest_texts(
    prompt: Column | None, texts: Sequence[Column], columns: Sequence[Column]
) -> Iterator[Judged]:
    """Take the longest text besides the prompt, which stands before it, as the response. Comments, and
    numbers whose name says so, are taken only if there is nothing else."""
    long, right = _possible_replies([c for c in texts if c.is_spoken or c.type == "texts"])
    meant = [c for c in long if not c.is_aside]
    spoken = meant if len(meant) > 1 else long
    if len(spoken) < 2:
        result = best_named([c for c in columns if c.type in ("number", "id")], "response")
        if prompt is not None and result is not None:
            yield Judged(
                {"prompt": prompt.path, "response": result.path}, "prompt and response by their names"
            )
        return
    response = best_named([c for c in spoken if c is not prompt], "response")
    if response is None:
        remaining = [c for c in spoken if c is not prompt and (prompt is not None or c is not spoken[0])]
        response = max(remaining, key=lambda c: c.length)
    if prompt is None or prompt is response:
        prompt = next(c for c in spoken if c is not response)
    reason = "prompt and response by content: the columns of long text, in their order"
    yield Judged({"prompt": prompt.path, "response": response.path, **right}, reason)


def _possible_replies(texts: Sequence[Column]) -> tuple[list[Column], dict[str, str]]:
    """The columns that may be responses, and the mapping of the reference answer, if one is named."""
    right = best_named(texts, "answer")
    replies = [c for c in texts if c is not right]
    if right is None or not any(c.named("response") for c in replies):
        return list(texts), {}
    return replies, {"answer": right.path}


def _ends_unanswered(column: Column) -> bool:
    """Whether messages end before the assistant's turn."""
    return all(unpacked(value)[-1]["role"] != "assistant" for value in column.values)
